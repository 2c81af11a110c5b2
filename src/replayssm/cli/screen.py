"""What the demo shows: panels that fill side by side in a terminal (rich), plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from replayssm.cli.checkpoint import Checkpoint
    from replayssm.cli.compare import Result

TITLES = {"mamba2": "Mamba-2", "gdn": "Gated DeltaNet", "kda": "Kimi Delta Att."}
SIDES = {"stock": "stock transformers", "replay": "ReplaySSM"}


class Screen(Protocol):
    """A context manager that the demo tells what happens."""

    def __enter__(self) -> Screen: ...
    def __exit__(self, *error: object) -> None: ...

    def loading(self, name: str) -> None:
        """The next model is being loaded."""

    def begin(self, name: str, checkpoint: Checkpoint) -> None:
        """It is loaded."""

    def status(self, text: str) -> None:
        """What goes on now."""

    def write(self, side: str, text: str) -> None:
        """New text of one side."""

    def end(self, result: Result) -> None:
        """The model is done."""

    def table(self, results: Sequence[Result]) -> None:
        """All models are done."""


def make_screen(prompt: str, out: TextIO, quiet: bool) -> Screen:
    """The best screen that ``out`` can show. quiet: one line a model, neither texts nor table."""
    if not quiet and out.isatty():
        try:
            from replayssm.cli.panels import PanelScreen

            return PanelScreen(prompt)
        except ImportError:
            print("rich is not installed (pip install 'replayssm[cli]'): plain text", file=sys.stderr)
    return PlainScreen(prompt, out, quiet)


class PlainScreen:
    """Lines of text, one side after the other."""

    def __init__(self, prompt: str, out: TextIO, quiet: bool) -> None:
        self._prompt, self._out, self._quiet = prompt, out, quiet
        self._side = ""

    def __enter__(self) -> PlainScreen:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is not None and self._side:
            self._print("\n")

    def loading(self, name: str) -> None:
        """See :class:`Screen`; nothing to see here."""

    def begin(self, name: str, checkpoint: Checkpoint) -> None:
        """See :class:`Screen`."""
        self._side = ""
        if not self._quiet:
            self._print(f"== {describe(name, checkpoint)}\n")

    def status(self, text: str) -> None:
        """See :class:`Screen`; the texts themselves show the progress here."""

    def write(self, side: str, text: str) -> None:
        """See :class:`Screen`."""
        if self._quiet:
            return
        if side != self._side:
            self._print(f"{chr(10) * 2 if self._side else ''}-- {SIDES[side]}\n{self._prompt}")
            self._side = side
        self._print(text)

    def end(self, result: Result) -> None:
        """See :class:`Screen`."""
        self._print(
            f"{TITLES[result.recurrence]}: {verdict(result)}\n" if self._quiet else f"\n\n{verdict(result)}\n\n"
        )

    def table(self, results: Sequence[Result]) -> None:
        """See :class:`Screen`."""
        if self._quiet:
            return
        rows = [heading(results), *table_rows(results)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            self._print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n")
        self._print(f"\n{NOTE}\n")

    def _print(self, text: str) -> None:
        print(text, end="", file=self._out, flush=True)


NOTE = (
    "State moved a token: recurrent state and ring that a decode step of one sequence must read and write, mean of a\n"
    "fold cycle (replayssm.traffic). A step of models this small is spent in Python, not in memory traffic, so their\n"
    "tokens/s say little about large ones: `replayssm bench` measures those shapes. Drafts are looked up in the text\n"
    "itself, at temperature 0, where models this small repeat themselves and many drafts are right. Stock has none."
)


def describe(name: str, checkpoint: Checkpoint) -> str:
    """One line on a model."""
    kinds = checkpoint.config.layer_types
    recurrent, attention = (sum(kind == wanted for kind in kinds) for wanted in ("linear_attention", "full_attention"))
    parameters = sum(p.numel() for p in checkpoint.model.parameters())
    return (
        f"{TITLES[name]} · {checkpoint.config.model_type} · {recurrent} recurrent + {attention} attention layers · "
        f"{parameters / 1e6:.1f} M weights"
    )


def verdict(result: Result) -> str:
    """One line on what a model showed."""
    rates = f"{result.tokens_per_s:.0f} tokens/s, stock {result.stock_tokens_per_s:.0f}"
    if not result.drafts_identical:
        return f"DIFFERENT with drafts looked up in the text, at temperature 0 · {rates}"
    if result.identical:
        return f"identical: {result.tokens} tokens, logits within {result.difference:.1e} · {rates}"
    return (
        f"DIFFERENT from token {result.divergence} of {result.tokens}: stock scores the two {result.gap:.1e} apart; "
        f"logits up to there within {result.difference:.1e} · {rates}"
    )


def heading(results: Sequence[Result]) -> list[str]:
    """Titles of the closing table's columns."""
    return ["", "", *(TITLES[result.recurrence] for result in results)]


def table_rows(results: Sequence[Result]) -> list[list[str]]:
    """Rows of the closing table: what, whose, then one cell a model."""

    return [
        ["text", "", *(_text(r) for r in results)],
        ["tokens/s", "ReplaySSM", *(f"{r.tokens_per_s:.1f}" for r in results)],
        ["", "  with drafts", *(f"{r.drafts_tokens_per_s:.1f}" for r in results)],
        ["", "stock", *(f"{r.stock_tokens_per_s:.1f}" for r in results)],
        ["state moved a token", "ReplaySSM", *(_kib(r.state_bytes_per_token) for r in results)],
        ["", "stock", *(_kib(r.stock_state_bytes_per_token) for r in results)],
        ["memory a sequence", "ReplaySSM", *(_kib(r.bytes_per_sequence) for r in results)],
        ["", "stock", *(_kib(r.stock_bytes_per_sequence) for r in results)],
        ["drafts accepted", "ReplaySSM", *(f"{r.drafts_accepted:.0%}" for r in results)],
        ["tokens a forward", "ReplaySSM", *(f"{r.tokens_per_forward:.2f}" for r in results)],
    ]


def _text(result: Result) -> str:
    if result.divergence is not None:
        return f"differs at {result.divergence}"
    return "identical" if result.drafts_identical else "differs with drafts"


def _kib(n: float) -> str:
    return f"{n / 1024:.1f} KiB"
