"""The short causal convolution before a recurrent layer, on the same cursors as the ring.

Logical row ``i`` of a slot's window is the convolution's input at that token, at column ``(head + i) % C``. ``C``
divides ``R``, so that the ring's ``head`` (mod R) is also right mod C, and is at least ``W - 1 + window``: the
``W - 1`` inputs before the draft rows and the draft rows themselves. A commit, a rollback and a fold move the ring's
cursors and, with them, the window; no column is ever shifted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from replayssm.ring import Ring, without_padding


def columns(R: int, width: int, window: int) -> int:
    """Columns of a window: the smallest divisor of ``R`` that holds ``width - 1 + window``."""
    need = width - 1 + window
    if need > R:
        raise ValueError(f"conv: width={width} with window={window} needs {need} columns, more than R={R} rows")
    return next(c for c in range(need, R + 1) if R % c == 0)


@dataclass(frozen=True)
class ConvWindow:
    """The last inputs of one convolution, for all slots: ``x [N, channels, C]``; ``width``: taps W."""

    ring: Ring
    x: Tensor
    width: int

    @staticmethod
    def build(ring: Ring, channels: int, width: int, dtype: torch.dtype) -> ConvWindow:
        """Allocates zero windows for all slots of ``ring``."""
        C = columns(ring.R, width, ring.window)
        return ConvWindow(ring, torch.zeros(ring.N, channels, C, dtype=dtype, device=ring.head.device), width)

    def extend(self, new: Tensor, slots: Tensor) -> Tensor:
        """Records the inputs ``new [B, channels, T]`` as draft rows; returns ``[B, channels, W - 1 + T]``, with the
        ``W - 1`` inputs before them in front. Padding slots (< 0) record nothing and see zeros.

        Of more than C new inputs the last C are kept, so up to ``C - (W - 1)`` of a long append can be rolled back.
        """
        if new.dim() != 3 or new.shape[1] != self.x.shape[1] or new.shape[0] != slots.numel():
            raise ValueError(
                f"conv: new inputs must be [B={slots.numel()}, channels={self.x.shape[1]}, T]; got {tuple(new.shape)}"
            )
        C, T = self.x.shape[2], new.shape[2]
        head, count = self.ring.at(slots)
        pad = slots < 0
        safe = slots.clamp(min=0).long()
        end = (head + count)[:, None]
        before = self.x[safe[:, None], :, (end + torch.arange(1 - self.width, 0, device=new.device)) % C].transpose(
            1, 2
        )
        full = torch.cat([before.masked_fill(pad[:, None, None], 0).to(new.dtype), new], 2)
        self._put(slots, (end + torch.arange(max(0, T - C), T, device=new.device)) % C, new[:, :, max(0, T - C) :])
        return full

    def seed(self, last: Tensor, slots: Tensor) -> None:
        """Sets the inputs right before the next token from ``last [B, channels, <= C]``, newest last; zeros before."""
        C = self.x.shape[2]
        head, count = self.ring.at(slots)
        last = torch.nn.functional.pad(last, (max(0, C - last.shape[2]), 0))[:, :, -C:]
        self._put(slots, ((head + count)[:, None] + torch.arange(C, device=last.device)) % C, last)

    def _put(self, slots: Tensor, column: Tensor, new: Tensor) -> None:
        """Writes ``new [B, channels, n]`` at ``column [B, n]``. Padding rows repeat the first real row's write."""
        if slots.numel() == 0:
            return
        rows, index, _, alive = without_padding(slots)
        index, column = index[:, None], column[rows]
        kept = self.x[index, :, column]
        new = new[rows].transpose(1, 2).to(self.x.dtype)
        self.x[index, :, column] = torch.where(alive[:, None, None], new, kept)
