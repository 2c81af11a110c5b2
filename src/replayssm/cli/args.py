"""What the commands share: one-line errors and checked option values."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NoReturn


class UsageError(Exception):
    """Something the caller can put right: one line on stderr, exit code 2, no traceback."""


class Parser(argparse.ArgumentParser):
    """Reports a bad command line as a :class:`UsageError` instead of a usage text and an exit."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def number(kind: type[int] | type[float], low: float, high: float | None = None) -> Callable[[str], float]:
    """A parser of ``kind`` in ``[low, high]``, for argparse's ``type=``."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= (float("inf") if high is None else high):
            what = "a whole number" if kind is int else "a number"
            span = f"of at least {low:g}" if high is None else f"from {low:g} to {high:g}"
            raise argparse.ArgumentTypeError(f"must be {what} {span}; got {text!r}")
        return value

    return parse


def add_replay_options(parser: argparse.ArgumentParser) -> None:
    """The options of :func:`replayssm.attach` that a command passes on."""
    parser.add_argument(
        "--backend", default="auto", metavar="NAME", help="auto, or a name that 'replayssm doctor' lists"
    )
    parser.add_argument(
        "--fold-every", type=number(int, 1), metavar="N",
        help="write the state once in N tokens (default: 16, or on a GPU 1, the plain recurrence, if faster)",
    )  # fmt: skip


def check_backend(name: str, auto: bool = True) -> None:
    """Refuses what is no backend's name, before anything is loaded or written."""
    from replayssm.backends import names

    valid = [*(["auto"] if auto else []), *names()]
    if name not in valid:
        raise UsageError(f"unknown backend {name!r}; valid: {', '.join(valid)}")


def unserved(name: str, device: str) -> str | None:
    """Why the backend serves no layer on this device; None where it does."""
    from replayssm import KDA, LayerSpec, StatePool
    from replayssm.backends import load

    pool = StatePool(1, fold_every=1 if name == "sequential" else 16, device=device)
    return load(name).refuses(pool.add_layer(LayerSpec(KDA, H=1, HV=1, K=32, V=32)))


def check_serves(name: str, device: str) -> None:
    """Refuses a backend that does not run on the device, before anything is loaded."""
    if name != "auto" and (why := unserved(name, device)) is not None:
        raise UsageError(f"backend {name!r} does not run on {device}: {why}")


def check_prompt(text: str) -> str:
    """The prompt, if there is one and it is text."""
    if not text:
        raise UsageError("the prompt is empty")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError("the prompt is not UTF-8") from None
    return text


def need_transformers() -> None:
    """Says how to get transformers where it is missing."""
    try:
        import safetensors  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise UsageError(f"{error.name} is not installed; pip install 'replayssm[hf]'") from None
