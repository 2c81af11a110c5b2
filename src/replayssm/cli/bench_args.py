"""What the commands of ``replayssm bench`` share: lists as option values, files, progress."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replayssm.cli.args import UsageError, number

if TYPE_CHECKING:
    import torch


def add_common(parser: argparse.ArgumentParser, quick: str, plot: str) -> None:
    """Declares what every bench takes: where it runs, how long, and where the rows go."""
    parser.add_argument("--device", help="default: a GPU if there is one, else cpu")
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON and nothing else")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write machine, versions, command and rows as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help=f"draw {plot}, such as out.png")


def chosen(text: str | None, what: str, valid: Any) -> list[str] | None:
    """The names of a comma-separated list, each of them valid."""
    if text is None:
        return None
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names or [text]:
        if name not in valid:
            raise UsageError(f"unknown {what} {name!r}; valid: {', '.join(valid)}")
    return names


def whole_numbers(text: str | None, option: str) -> list[int]:
    """The numbers of a comma-separated list, 1 or more; none where the option is not given."""
    if text is not None and not text.strip(", "):
        raise UsageError(f"argument --{option}: it names no number; got {text!r}")
    try:
        return [int(number(int, 1)(each.strip())) for each in (text or "").split(",") if each.strip()]
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"argument --{option}: {error}") from None


def check_files(args: argparse.Namespace) -> None:
    """Before minutes are spent: can ``--out`` and ``--plot`` be written?"""
    for path in (args.out, args.plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise UsageError(f"directory {path.absolute().parent} does not exist")
    if args.plot is not None:
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise UsageError("matplotlib is not installed; pip install 'replayssm[plot]'") from None
        known = Figure().canvas.get_supported_filetypes()
        if args.plot.suffix.removeprefix(".") not in known:
            raise UsageError(f"--plot cannot write {args.plot.name!r}; valid suffixes: .{', .'.join(sorted(known))}")


def open_device(args: argparse.Namespace) -> torch.device:
    """The device that ``--device`` names, made the one where Triton launches."""
    import torch

    from replayssm.cli.checkpoint import check_device

    device = torch.device(check_device(args.device or "auto"))
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    return device


def start(args: argparse.Namespace, what: str, *refused: str) -> torch.device:
    """Of ``bench WHAT``: refuses options of bench kernels, which stand on the level above and say nothing to it, and
    files that cannot be written; returns the device."""
    for name in refused:
        if getattr(args, name):
            raise UsageError(f"--{name.replace('_', '-')} is an option of bench kernels, not of bench {what}")
    device = open_device(args)
    check_files(args)
    return device


class Progress:
    """What is measured now, on stderr: one line that is wiped again in a terminal; elsewhere, with ``lines``, one a
    case."""

    def __init__(self, text: str, lines: bool) -> None:
        self._text, self._wipe, self._lines = text, sys.stderr.isatty(), lines

    def __enter__(self) -> Callable[[str], None]:
        if self._wipe:
            self._show("")
        elif self._lines:
            print(self._text, file=sys.stderr, flush=True)
        return self._show

    def __exit__(self, *error: object) -> None:
        if self._wipe:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def _show(self, more: str) -> None:
        if self._wipe:
            print(f"\r\x1b[K{self._text} {more}"[:110], end="", file=sys.stderr, flush=True)


def command(args: argparse.Namespace, what: str) -> list[str]:
    """The command line of ``bench WHAT`` that gives these options again."""
    words = ["bench", what]
    for name, value in vars(args).items():
        if name in ("run", "json", "out", "plot") or value is None or value is False:
            continue
        option = f"--{name.replace('_', '-')}"
        words += [option] if value is True else [option, f"'{value}'" if " " in str(value) else str(value)]
    return words
