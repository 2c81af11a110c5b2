"""Text as it is written, and the clock beside it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any


class TextStream:
    """What ``model.generate(streamer=...)`` feeds: hands text on as soon as its last character is complete.

    tokens, times: every new token and when it came (``time.perf_counter``). count: told the number of tokens so far.
    warm: how many tokens come before :attr:`rate` begins to count.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        write: Callable[[str], None],
        count: Callable[[int], None] | None = None,
        warm: int = 1,
    ) -> None:
        self.tokens: list[int] = []
        self.times: list[float] = []
        self._decode, self._write, self._count, self._warm = decode, write, count, warm
        self._prompt = True
        self._first = 0  # tokens are decoded from here on, to keep long texts cheap
        self._shown = 0  # characters of that which were handed on

    def put(self, value: Any) -> None:
        """The prompt, then the new tokens, one or several at a time."""
        if self._prompt:
            self._prompt = False
            return
        new = value.flatten().tolist()
        self.tokens += new
        self.times += [time.perf_counter()] * len(new)
        self._show(final=False)
        if self._count is not None:
            self._count(len(self.tokens))

    def end(self) -> None:
        """Hands on what is left, incomplete characters included."""
        self._show(final=True)

    @property
    def rate(self) -> float:
        """Tokens a second after the first new token, so without the prompt's processing; 0 where there is one only."""
        first = self._warm - 1
        if len(self.times) < first + 2:
            return 0.0
        return (len(self.times) - 1 - first) / (self.times[-1] - self.times[first])

    def _show(self, final: bool) -> None:
        text = self._decode(self.tokens[self._first :])
        if not final and text.endswith("\ufffd"):
            return
        if len(text) > self._shown:
            self._write(text[self._shown :])
            self._shown = len(text)
        if text.endswith("\n"):  # the last token stays as context: some tokenizers decode a first token differently
            self._first = len(self.tokens) - 1
            self._shown = len(self._decode(self.tokens[self._first :]))


def sampling(
    tokens: int, *, temperature: float = 0.0, top_k: int | None = None, top_p: float | None = None
) -> dict[str, Any]:
    """Arguments of ``generate`` for at most ``tokens`` tokens: the likeliest ones at temperature 0, whatever the
    checkpoint's own defaults are."""
    if temperature == 0:
        how: dict[str, Any] = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
    else:
        top_p = 1.0 if top_p is None else top_p
        how = {"do_sample": True, "temperature": temperature, "top_k": top_k or 0, "top_p": top_p}
    return {"max_new_tokens": tokens, "num_beams": 1, **how}
