"""The last inputs of one convolution of a transformers model.

:mod:`replayssm.conv` keeps a cursor for each sequence on the device. In transformers all rows of a batch advance
together, so the cursor is one host int here, and a step copies slices where it would gather.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Window:
    """A ring of columns ``x [B, channels, C]``; the next input goes to column ``end % C``.

    past: the inputs that a step reads before its own. keep: how many of the newest can be taken back all the same.
    """

    def __init__(self, B: int, channels: int, past: int, keep: int, dtype: torch.dtype, device: torch.device) -> None:
        self.past, self.end = past, 0
        with torch.inference_mode(False):
            self.x = torch.zeros(B, channels, past + max(keep, 1), dtype=dtype, device=device)

    @property
    def spare(self) -> int:
        """How many inputs can be taken back at most."""
        return self.x.shape[2] - self.past

    def last(self, n: int) -> Tensor:
        """A copy of the ``n <= C`` inputs before the next."""
        return torch.cat([self.x[..., a:b] for a, b in self._pieces(self.end - n, n)], -1)

    def extend(self, new: Tensor) -> Tensor:
        """Appends ``new [B, channels, T]``; returns it with the ``past`` inputs before it in front."""
        pieces = self._pieces(self.end - self.past, self.past)
        full = torch.cat([*(self.x[..., a:b] for a, b in pieces), new], -1)
        self.append(new)
        return full

    def append(self, new: Tensor) -> None:
        """Records ``new [B, channels, T]``; of more than C inputs the last."""
        C, new = self.x.shape[2], new.detach()
        self.end += new.shape[2]
        kept = min(C, new.shape[2])
        at = new.shape[2] - kept
        for a, b in self._pieces(self.end - kept, kept):
            self.x[..., a:b] = new[..., at : at + b - a]
            at += b - a

    def rewind(self, n: int) -> None:
        """Takes the last ``n`` inputs back."""
        self.end -= n

    def resized(self, keep: int) -> Window:
        """The same inputs in a window of another ``keep``."""
        B, channels, _ = self.x.shape
        other = Window(B, channels, self.past, keep, self.x.dtype, self.x.device)
        other.end = self.end - self.past
        other.append(self.last(self.past))
        return other

    def select(self, rows: Tensor) -> None:
        """Row ``b`` becomes a copy of row ``rows[b]``."""
        with torch.inference_mode(False):
            self.x = self.x[rows]

    def reset(self) -> None:
        """Zeros before the first input."""
        self.x.zero_()
        self.end = 0

    def _pieces(self, start: int, n: int) -> list[tuple[int, int]]:
        """Column ranges of ``n <= C`` inputs from ``start`` on."""
        C = self.x.shape[2]
        a = start % C
        return [(a, a + n)] if a + n <= C else [(a, C), (0, a + n - C)]
