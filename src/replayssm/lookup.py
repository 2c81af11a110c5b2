"""Drafts looked up in text: texts repeat themselves, and each other."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

from replayssm.speculative import Draft, Sampling, Tree


class _Grams:
    """Where sequences of up to ``longest`` tokens came, each in its latest ``places``, to look up what followed."""

    def __init__(self, longest: int, places: int) -> None:
        self.longest = longest
        self._texts: list[list[int]] = []
        # Tokens -> texts and positions of what follows, the latest first.
        self._last: dict[tuple[int, ...], deque[tuple[int, int]]] = defaultdict(lambda: deque(maxlen=places))

    def add(self) -> int:
        """A new, empty text; returns its number."""
        self._texts.append([])
        return len(self._texts) - 1

    def extend(self, text: int, tokens: Sequence[int]) -> None:
        """Appends to a text. What ends the text is found only once something follows it."""
        mine = self._texts[text]
        for token in tokens:
            at = len(mine)
            for n in range(1, min(self.longest, at) + 1):
                self._last[tuple(mine[at - n :])].appendleft((text, at))
            mine.append(token)

    def length(self, text: int) -> int:
        """Tokens of a text so far."""
        return len(self._texts[text])

    def after(self, text: int, shortest: int, most: int) -> list[list[int]]:
        """Up to ``most`` tokens that followed the longest end of ``text`` that is known, for each of its places, the
        latest first; a repetition goes on."""
        mine = self._texts[text]
        for n in range(min(self.longest, len(mine)), shortest - 1, -1):
            found = self._last.get(tuple(mine[len(mine) - n :]))
            if found is not None:
                return [self._follow(text, source, at, most) for source, at in found]
        return []

    def _follow(self, text: int, source: int, at: int, most: int) -> list[int]:
        follows = self._texts[source][at : at + most]
        period = len(follows)  # up to the end of the text, if it is this one
        while source == text and len(follows) < most:
            follows.append(follows[-period])
        return follows


class PromptLookup:
    """Drafts what followed the last tokens of a row where they came before in the same row.

    longest, shortest: how many last tokens must agree; the longest end that is found counts, at its latest place.
    branches: with more than one, at as many of its latest places, for a tree; half of the tokens go to the latest.
    """

    def __init__(self, longest: int = 4, shortest: int = 1, branches: int = 1) -> None:
        if not 1 <= shortest <= longest or branches < 1:
            raise ValueError(
                f"PromptLookup: need 1 <= shortest <= longest and branches >= 1; got shortest={shortest}, "
                f"longest={longest}, branches={branches}"
            )
        self.longest, self.shortest, self.branches = longest, shortest, branches
        self._rows: list[tuple[_Grams, int]] = []

    def propose(self, texts: Sequence[Sequence[int]], most: Sequence[int], sampling: Sampling) -> Draft | Tree:
        """See :class:`Drafter`."""
        if not self._rows:
            self._rows = [self._place() for _ in texts]
        rows = []
        for (grams, text), tokens, n in zip(self._rows, texts, most, strict=True):
            grams.extend(text, tokens[grams.length(text) :])
            rows.append(grams.after(text, self.shortest, n))
        if self.branches == 1:
            return Draft.of([found[0] if found else [] for found in rows])
        return Tree.of([_shares(found, n) for found, n in zip(rows, most, strict=True)])

    def select(self, rows: Sequence[int]) -> None:
        """See :class:`Drafter`."""
        self._rows = [self._rows[i] for i in rows]

    def _place(self) -> tuple[_Grams, int]:
        grams = _Grams(self.longest, self.branches)
        return grams, grams.add()


def _shares(alternatives: list[list[int]], most: int) -> list[list[int]]:
    """Cut to ``most`` tokens in all: each alternative takes half of what is left, the last the rest."""
    cut = []
    for i, tokens in enumerate(alternatives):
        n = most if i == len(alternatives) - 1 else most - most // 2
        cut.append(tokens[:n])
        most -= n
    return cut


class EarlierOutputs(PromptLookup):
    """Drafts what followed the longest suffix of a row in any text that it has seen: this row, the other rows, and the
    outputs of earlier calls that the same object was given to. Memory grows with every token."""

    def __init__(self, longest: int = 8, shortest: int = 2) -> None:
        super().__init__(longest, shortest)
        self._grams = _Grams(longest, 1)

    def _place(self) -> tuple[_Grams, int]:
        return self._grams, self._grams.add()
