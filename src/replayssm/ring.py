"""Cursors of the rings: the only module that writes them.

One pair of int32 a slot, on the device, shared by all layers of a model:

- ``head``: the oldest live row; ``count``: the committed rows. Logical row ``i`` lies at ``(head + i) % R``.
- Committed rows are ``[0, count)``; a step of ``T`` new tokens appends draft rows ``[count, count + T)``.
- *commit*: ``count += accepted``. Rolling rejected drafts back is doing nothing.
- *fold*: the checkpoint absorbs the committed rows; ``head = (head + count) % R; count = 0``.

A fold is due when ``count > limit``. ``limit`` is at most ``R - 2 * window``, so a fold comes no later than the first
step at which ``count + 2 * window > R``: one whole free window always stays, and an append never lands on a row that
another program of the same launch still reads. ``limit = 0`` folds every step: the plain recurrence.

Between the layers of one step the cursors stand still: each layer's ``verify`` folds its own checkpoint where
:meth:`Ring.due`, and :meth:`Ring.commit` afterwards moves the cursors by the same predicate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Ring:
    """Cursors and geometry of the rings of ``N`` slots.

    head, count: int32 ``[N + 1]``; the last entry takes the writes of padding rows and is never read as a slot.
    R: physical rows; window: most new tokens a step; limit: most committed rows that stay unfolded.
    """

    head: Tensor
    count: Tensor
    R: int
    window: int
    limit: int

    @staticmethod
    def build(N: int, R: int, window: int, limit: int | None = None, device: torch.device | str = "cpu") -> Ring:
        """Empty cursors for ``N`` slots; ``limit`` defaults to the latest that is safe, ``R - 2 * window``."""
        if N < 1 or window < 1 or R < 2 * window:
            raise ValueError(f"Ring: need N >= 1, window >= 1 and R >= 2 * window; got N={N}, R={R}, window={window}")
        latest = R - 2 * window
        limit = latest if limit is None else limit
        if not 0 <= limit <= latest:
            raise ValueError(f"Ring: limit must be in [0, R - 2 * window] = [0, {latest}]; got {limit}")
        zeros = torch.zeros(2, N + 1, dtype=torch.int32, device=device)
        return Ring(zeros[0], zeros[1], R, window, limit)

    @property
    def N(self) -> int:
        """Number of slots."""
        return self.head.numel() - 1

    def due(self, count: Tensor) -> Tensor:
        """The fold predicate, for kernels' callers, commit and the reference alike."""
        return count > self.limit

    def at(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """``(head, count)`` of ``slots [B]``, int64; zero for padding rows (``slots < 0``)."""
        index, pad = self._index(slots)
        return self.head[index].long().masked_fill(pad, 0), self.count[index].long().masked_fill(pad, 0)

    def commit(self, slots: Tensor, accepted: Tensor | int) -> None:
        """Ends a step: folds' cursor move where due, then ``count += accepted`` (``[B]`` or one number, 0..T)."""
        index, pad = self._index(slots)
        head, count = self.head[index], self.count[index]
        due = self.due(count)
        new = torch.where(due, 0, count) + accepted
        self.head[index] = torch.where(due, (head + count) % self.R, head).to(torch.int32)
        self.count[index] = new.masked_fill(pad, 0).to(torch.int32)

    def absorb(self, slots: Tensor, n: Tensor) -> None:
        """After the checkpoint took the first ``n [B]`` committed rows: they leave the ring."""
        index, pad = self._index(slots)
        n = n.masked_fill(pad, 0).to(torch.int32)
        self.head[index] = (self.head[index] + n) % self.R
        self.count[index] = self.count[index] - n

    def rewind(self, slots: Tensor, n: Tensor | int) -> None:
        """Drops the last ``n`` committed rows; the caller has checked that ``n <= count``."""
        index, pad = self._index(slots)
        n = torch.as_tensor(n, dtype=torch.int32, device=self.count.device).expand(slots.shape)
        self.count[index] = self.count[index] - n.masked_fill(pad, 0)

    def reset(self, slots: Tensor) -> None:
        """Empties the rings of ``slots``."""
        index, _ = self._index(slots)
        self.head[index] = 0
        self.count[index] = 0

    def copy(self, src: Tensor, dst: Tensor) -> None:
        """Gives ``dst`` the cursors of ``src`` (both ``[B]``, gathered before anything is written)."""
        self.put(dst, self.head[src.long()], self.count[src.long()])

    def put(self, slots: Tensor, head: Tensor, count: Tensor) -> None:
        """Sets the cursors of ``slots`` (import of a slot)."""
        index, _ = self._index(slots)
        self.head[index] = head.to(self.head)
        self.count[index] = count.to(self.count)

    def _index(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Padding goes to the spare last entry, so that it never shares an address with a real slot."""
        pad = slots < 0
        return slots.long().masked_fill(pad, self.N), pad
