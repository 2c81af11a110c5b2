"""Cursors of the rings: the only module that writes them.

One pair of int32 a slot, on the device, shared by all layers of a model:

- ``head``: the oldest live row; ``count``: the committed rows. Logical row ``i`` lies at ``(head + i) % R``.
- Committed rows are ``[0, count)``; a step of ``T`` new tokens appends draft rows ``[count, count + T)``.
- *commit*: ``count += accepted``. Rolling rejected drafts back is doing nothing.
- *fold*: the checkpoint absorbs the committed rows; ``head = (head + count) % R; count = 0``.

A fold is due when ``count > limit``. ``limit`` is at most ``R - 2 * window``, so a fold comes no later than the first
step at which ``count + 2 * window > R``: one whole free window always stays, and an append never lands on a row that
another program of the same launch still reads. ``limit = 0`` folds every step: the plain recurrence.

Sequences that start together would also fold together, every ``limit + 1`` steps, and that step would take twice the
time of the others. A ring that staggers lets each slot's *first* fold come earlier, by a phase of its own from 0 to
``limit``. Until that fold ``head`` carries the phase, as ``R * phase`` on top, which no row number, modulo R, sees.

Between the layers of one step the cursors stand still: each layer's ``verify`` folds its own checkpoint where
:meth:`Ring.due`, and :meth:`Ring.commit` afterwards moves the cursors by the same predicate.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor


class Scratch:
    """Memory that a backend may use within one call, shared by all layers of a pool.

    It grows at the first call of a size, the warm-up; what a captured graph may still point to is never released."""

    def __init__(self, buffers: Iterable[Tensor] = ()) -> None:
        self.buffers = list(buffers)
        self._parts: dict[tuple[int, ...], tuple[Tensor, ...]] = {}  # making views takes longer than a launch

    def __getstate__(self) -> dict[str, object]:
        return {"buffers": self.buffers, "_parts": {}}  # copied views would be of memory of their own

    def take(self, *sizes: int, device: torch.device) -> tuple[Tensor, ...]:
        """So many float32 each, of undefined content."""
        numel = sum(sizes)
        if not self.buffers or self.buffers[-1].numel() < numel:
            self.buffers.append(torch.empty(numel, dtype=torch.float32, device=device))
            self._parts.clear()
        if sizes not in self._parts:
            self._parts[sizes] = self.buffers[-1][:numel].split(list(sizes))
        return self._parts[sizes]


@dataclass(frozen=True)
class Ring:
    """Cursors and geometry of the rings of ``N`` slots.

    head, count: int32 ``[N + 1]``; the last entry takes the writes of padding rows and is never read as a slot.
    R: physical rows; window: most new tokens a step; limit: most committed rows that stay unfolded; most:
    committed rows that a step can find, what kernels must be able to read; stagger: see above.
    """

    head: Tensor
    count: Tensor
    R: int
    window: int
    limit: int
    most: int
    stagger: bool = False
    scratch: Scratch = field(default_factory=Scratch, repr=False, compare=False)

    @staticmethod
    def build(
        N: int, R: int, window: int, limit: int | None = None, device: torch.device | str = "cpu", stagger: bool = False
    ) -> Ring:
        """Empty cursors for ``N`` slots; ``limit`` defaults to the latest that is safe, ``R - 2 * window``."""
        if N < 1 or window < 1 or 2 * window > R:
            raise ValueError(f"Ring: need N >= 1, window >= 1 and R >= 2 * window; got N={N}, R={R}, window={window}")
        latest = R - 2 * window
        limit = latest if limit is None else limit
        if not 0 <= limit <= latest:
            raise ValueError(f"Ring: limit must be in [0, R - 2 * window] = [0, {latest}]; got {limit}")
        # Two tensors, not two views of one: torch.compile cannot mutate views of one another in place.
        head, count = (torch.zeros(N + 1, dtype=torch.int32, device=device) for _ in range(2))
        ring = Ring(head, count, R, window, limit, limit + window, stagger)
        ring.reset(torch.arange(N, dtype=torch.int32, device=device))
        return ring

    @property
    def N(self) -> int:
        """Number of slots."""
        return self.head.numel() - 1

    def due(self, count: Tensor, head: Tensor | int) -> Tensor:
        """The fold predicate, for kernels' callers, commit and the reference; cursors as :meth:`at` gives them."""
        return (count > self.limit - head // self.R) & (count > 0)

    def at(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """``(head, count)`` of ``slots [B]``, int64; zero for padding rows (``slots < 0``)."""
        index, pad = self._index(slots)
        return self.head[index].long().masked_fill(pad, 0), self.count[index].long().masked_fill(pad, 0)

    def commit(self, slots: Tensor, accepted: Tensor | int) -> None:
        """Ends a step: folds' cursor move where due, then ``count += accepted`` (``[B]`` or one number, 0..T)."""
        index, pad = self._index(slots)
        head, count = self.head[index], self.count[index]
        due = self.due(count, head)
        new = torch.where(due, 0, count) + accepted
        self.head[index] = torch.where(due, (head + count) % self.R, head).to(torch.int32)
        self.count[index] = new.masked_fill(pad, 0).to(torch.int32)

    def absorb(self, slots: Tensor, n: Tensor) -> None:
        """After the checkpoint took the first ``n [B]`` committed rows: they leave the ring."""
        index, pad = self._index(slots)
        n = n.masked_fill(pad, 0).to(torch.int32)
        head, count = self.head[index], self.count[index] - n
        moved = (head + n) % self.R + torch.where(count == 0, self._phase(slots), 0)
        self.head[index] = torch.where(n > 0, moved, head).to(torch.int32)
        self.count[index] = count

    def rewind(self, slots: Tensor, n: Tensor | int) -> None:
        """Drops the last ``n`` committed rows; the caller has checked that ``n <= count``."""
        index, pad = self._index(slots)
        n = torch.as_tensor(n, dtype=torch.int32, device=self.count.device).expand(slots.shape)
        self.count[index] = self.count[index] - n.masked_fill(pad, 0)

    def reset(self, slots: Tensor) -> None:
        """Empties the rings of ``slots``."""
        index, _ = self._index(slots)
        self.head[index] = self._phase(slots)
        self.count[index] = 0

    def copy(self, src: Tensor, dst: Tensor) -> None:
        """Gives ``dst`` the cursors of ``src`` (both ``[B]``), as :func:`copy_slots`; an empty ring keeps its phase."""
        copy_slots([self.head, self.count], src, dst)
        index, pad = self._index(dst.masked_fill(src < 0, -1))
        head = self.head[index]
        own = torch.where((self.count[index] == 0) & ~pad, head % self.R + self._phase(dst), head)
        self.head[index] = own.to(torch.int32)

    def put(self, slots: Tensor, head: Tensor, count: Tensor) -> None:
        """Sets the cursors of ``slots`` (import of a slot)."""
        index, pad = self._index(slots)
        self.head[index] = head.masked_fill(pad, 0).to(self.head)
        self.count[index] = count.masked_fill(pad, 0).to(self.count)

    def _phase(self, slots: Tensor) -> Tensor:
        """``R * phase`` of an empty ring, int32 ``[B]``."""
        return slots.clamp(min=0) % (self.limit + 1) * (self.R * self.stagger)

    def _index(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Padding goes to the spare last entry, so that it never shares an address with a real slot."""
        pad = slots < 0
        return slots.long().masked_fill(pad, self.N), pad


def without_padding(slots: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Lets padding rows repeat the first real row, so that they write what that row writes to the same place.

    Returns rows [B] (which row of the call to compute), the slots of those rows (int64), pad [B], and alive [B]: False
    only if there is no real row at all, and then nothing may be written. ``slots`` must not be empty."""
    pad = slots < 0
    first = (~pad).int().argmax()
    rows = torch.where(pad, first, torch.arange(slots.numel(), device=slots.device))
    real = slots[rows]
    return rows, real.clamp(min=0).long(), pad, real >= 0


def put_slots(x: Tensor, slots: Tensor, new: Tensor | int) -> None:
    """``x[slots] = new`` (``[B, ...]`` or a number) for the real slots, with no synchronisation."""
    if slots.numel() == 0:
        return
    rows, index, _, alive = without_padding(slots)
    new = new[rows].to(x.dtype) if isinstance(new, Tensor) else torch.as_tensor(new, dtype=x.dtype, device=x.device)
    x[index] = torch.where(alive.view(-1, *[1] * (x.dim() - 1)), new, x[index])


def copy_slots(tensors: Iterable[Tensor], src: Tensor, dst: Tensor) -> None:
    """``x[dst] = x[src]`` for each tensor, gathered before anything is written; a pair with padding copies nothing."""
    if dst.numel() == 0:
        return
    rows, index, _, alive = without_padding(dst.masked_fill(src < 0, -1))
    source = torch.where(alive, src[rows].long(), index)  # without a real pair: slot 0 onto itself
    for x in tensors:
        x[index] = x[source]
