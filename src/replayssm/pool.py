"""State memory of all recurrent layers of a model, by slot."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from replayssm import auto, ops
from replayssm.backends import describe, names
from replayssm.conv import ConvWindow, columns
from replayssm.layer import LayerSpec, LayerState
from replayssm.ring import Ring, copy_slots, put_slots


class StatePool:
    """Checkpoints, rings, convolution windows and one pair of cursors for ``N`` slots, a slot for each sequence.

    fold_every: a row's checkpoint is written once in this many one-token steps; 1 writes it every step (the plain
    recurrence). window: the most new tokens a step appends. R, the physical ring rows, follows from both, rounded up
    where that makes the convolution windows smaller; ``width`` is the taps of the model's convolutions.
    stagger: sequences that start together do not all fold in the same step, see :mod:`replayssm.ring`.
    Memory is allocated by :meth:`add_layer` and :meth:`add_conv`, never later.
    """

    def __init__(
        self,
        N: int,
        *,
        fold_every: int = 16,
        window: int = 1,
        width: int = 4,
        device: torch.device | str = "cpu",
        backend: str = "auto",
        stagger: bool = True,
    ) -> None:
        if min(fold_every, window, width) < 1:
            raise ValueError(
                f"StatePool: fold_every, window and width must be at least 1; got {fold_every}, {window} and {width}"
            )
        if backend != "auto" and backend not in names():
            raise ValueError(f"StatePool: unknown backend {backend!r}; valid: auto, {', '.join(names())}")
        if backend == "sequential":
            fold_every = 1
        self.ring = Ring.build(N, _rows(fold_every, window, width), window, fold_every - 1, device, stagger)
        self.backend = backend
        self.layers: list[LayerState] = []
        self.convs: list[ConvWindow] = []
        self._free = list(range(N - 1, -1, -1))
        self._specs: list[LayerSpec] = []
        self._plain: StatePool | None = None

    def add_layer(self, spec: LayerSpec) -> LayerState:
        """Allocates one recurrent layer's memory for all slots."""
        self._specs.append(spec)
        self._plain = None
        self.layers.append(spec.build(self.ring))
        return self.layers[-1]

    def add_conv(self, channels: int, width: int = 4, dtype: torch.dtype = torch.float32) -> ConvWindow:
        """Allocates one convolution window for all slots."""
        self.convs.append(ConvWindow.build(self.ring, channels, width, dtype))
        return self.convs[-1]

    def at(self, rows: int) -> StatePool:
        """The pool for a step of ``rows`` sequences, by what is faster: itself, or the same memory and cursors folding
        every step, the plain recurrence (on a GPU, while states are few). Its ``layers`` are to be verified and its
        ``commit`` called; steps of either kind may follow each other. :meth:`explain` says why."""
        device = self.ring.head.device
        if (
            self.ring.limit == 0
            or not self._specs
            or any(auto.fold_every(spec, rows, device).tokens > 1 for spec in self._specs)
        ):
            return self
        if self._plain is None:
            plain = copy.copy(self)
            plain.ring = dataclasses.replace(self.ring, limit=0)
            plain.layers = [dataclasses.replace(layer, ring=plain.ring) for layer in self.layers]
            self._plain = plain
        return self._plain

    def explain(self, rows: int, T: int = 1) -> str:
        """What :meth:`at` and ``backend="auto"`` take for a step of ``rows`` sequences and ``T`` tokens, and why: lines
        for each kind of layer."""
        lines: list[str] = []
        pool, device = self.at(rows), self.ring.head.device
        for spec, layer in dict(zip(self._specs, pool.layers, strict=True)).items():
            lines.append(f"{spec.recurrence.name} [{layer.HV}, {layer.V}, {layer.K}] {layer.ckpt.dtype}")
            lines.append(describe(layer, rows, T, self.backend))
            lines.append(f"fold every {pool.ring.limit + 1}: {auto.fold_every(spec, rows, device).reason}")
        return "\n".join(lines)

    @property
    def N(self) -> int:
        """Number of slots."""
        return self.ring.N

    @property
    def free_slots(self) -> int:
        """Slots that :meth:`alloc` can still give out."""
        return len(self._free)

    @property
    def nbytes(self) -> int:
        """Every byte the pool holds: checkpoints, rings, windows, cursors, backends' scratch."""
        ring = self.ring
        tensors = [*self._slot_tensors(), ring.head, ring.count, *ring.scratch.buffers]
        return sum(x.numel() * x.element_size() for x in tensors)

    @property
    def nbytes_a_slot(self) -> int:
        """Bytes that one sequence takes."""
        return sum(x[0].numel() * x.element_size() for x in self._slot_tensors()) + 8

    def alloc(self, n: int = 1) -> Tensor:
        """``n`` slots, reset, as int32 ``[n]``; raises RuntimeError, taking none, if fewer are free."""
        if n < 0:
            raise ValueError(f"alloc: n must not be negative; got {n}")
        if n > len(self._free):
            raise RuntimeError(
                f"alloc: the state pool is full: {n} slots asked for, {len(self._free)} of {self.N} free; "
                "free finished sequences or build a larger pool"
            )
        slots = self._tensor([self._free.pop() for _ in range(n)])
        self.reset(slots)
        return slots

    def free(self, slots: Tensor | Sequence[int]) -> None:
        """Gives slots back. Raises ValueError, freeing none, if one is not allocated."""
        ids = slots.tolist() if isinstance(slots, Tensor) else list(slots)
        for slot in ids:
            if not 0 <= slot < self.N or slot in self._free or ids.count(slot) > 1:
                raise ValueError(
                    f"free: slot {slot} is not allocated (N={self.N}, {len(self._free)} free), or is given twice"
                )
        self._free.extend(reversed(ids))

    def reset(self, slots: Tensor) -> None:
        """``slots`` start anew, with zero states and windows."""
        if self.layers:
            ops.reset(self.layers, slots)
        for conv in self.convs:
            put_slots(conv.x, slots, 0)
        self.ring.reset(slots)

    def copy(self, src: Tensor, dst: Tensor) -> None:
        """``dst`` slots become copies of ``src`` slots (int32 ``[B]``): a fork of a sequence, or a beam's reorder."""
        ops.copy(self.layers, src, dst)
        copy_slots([conv.x for conv in self.convs], src, dst)

    def commit(self, slots: Tensor, accepted: Tensor | int) -> None:
        """Ends a step; see :func:`replayssm.ops.commit`."""
        ops.commit(self.ring, slots, accepted)

    def fold(self, slots: Tensor, n: Tensor | int | None = None) -> None:
        """Checkpoints absorb committed rows; see :func:`replayssm.ops.fold`."""
        ops.fold(self.layers, slots, n, self.backend)

    def rewind(self, slots: Tensor, n: Tensor | int) -> None:
        """Takes committed tokens back; see :func:`replayssm.ops.rewind`. A convolution window goes back at most
        ``C - (W - 1)`` tokens from the newest draft: the tokens of the last step, and what ``C`` has beyond those."""
        most = min((conv.x.shape[2] - conv.width + 1 for conv in self.convs), default=self.ring.R)
        far = n > most
        if isinstance(far, Tensor):  # looked at where that is free, as all ranges
            far = far.device.type == "cpu" and far.shape == slots.shape and bool((far & (slots >= 0)).any())
        if far:
            raise ValueError(f"rewind: a convolution window keeps the inputs for at most {most} tokens back; got n={n}")
        ops.rewind(self.layers, slots, n)

    def export(self, slot: int) -> dict[str, Any]:
        """A copy of one slot's memory, on the CPU: what :meth:`import_` takes, in any pool of the same geometry."""
        self._check_slot("export", slot)
        return {
            "R": self.ring.R,
            "recurrences": [layer.recurrence.name for layer in self.layers],
            "cursors": (int(self.ring.head[slot]), int(self.ring.count[slot])),
            "tensors": [x[slot].cpu().clone() for x in self._slot_tensors()],
        }

    def import_(self, slot: int, saved: dict[str, Any]) -> None:
        """Puts an exported slot into ``slot``. Raises ValueError, changing nothing, where the geometry differs or the
        committed rows leave no room for this pool's window."""
        self._check_slot("import_", slot)
        tensors = self._slot_tensors()
        mine = [(x.shape[1:], x.dtype) for x in tensors]
        theirs = [(x.shape, x.dtype) for x in saved["tensors"]]
        recurrences = [layer.recurrence.name for layer in self.layers]
        if saved["R"] != self.ring.R or mine != theirs or saved["recurrences"] != recurrences:
            raise ValueError(
                f"import_: the slot comes from a pool of another geometry (R={saved['R']} with {len(theirs)} tensors "
                f"of {', '.join(saved['recurrences'])}; this pool has R={self.ring.R} with {len(mine)} of "
                f"{', '.join(recurrences)})"
            )
        head, count = saved["cursors"]
        if count > self.ring.most:
            raise ValueError(
                f"import_: the slot's {count} committed rows leave no room in R={self.ring.R} rows for this pool's "
                f"window={self.ring.window}; fold the slot before its export"
            )
        if not self.ring.stagger or head // self.ring.R > self.ring.limit:
            head %= self.ring.R  # without the phase, see ring.py
        for x, y in zip(tensors, saved["tensors"], strict=True):
            x[slot] = y.to(x.device)
        self.ring.put(self._tensor([slot]), self._tensor([head]), self._tensor([count]))

    def check(self) -> None:
        """Raises AssertionError where a cursor is out of bounds: ``0 <= head < R``, with a phase on top where the pool
        staggers; ``0 <= count <= most``."""
        head, count = self.ring.head[:-1], self.ring.count[:-1]
        most = self.ring.R * (self.ring.limit * self.ring.stagger + 1)
        bad = (head < 0) | (head >= most) | (count < 0) | (count > self.ring.most)
        if bool(bad.any()):
            slot = int(bad.nonzero()[0])
            raise AssertionError(f"slot {slot}: head={int(head[slot])}, count={int(count[slot])}, R={self.ring.R}")

    def _check_slot(self, op: str, slot: int) -> None:
        if not 0 <= slot < self.N:
            raise ValueError(f"{op}: slot {slot} is out of range; the pool has N={self.N} slots, 0 to {self.N - 1}")

    def _slot_tensors(self) -> list[Tensor]:
        return [x for layer in self.layers for x in layer.tensors.values()] + [conv.x for conv in self.convs]

    def _tensor(self, ids: list[int]) -> Tensor:
        return torch.tensor(ids, dtype=torch.int32, device=self.ring.head.device)


def _rows(fold_every: int, window: int, width: int) -> int:
    """Ring rows: at least ``fold_every - 1 + 2 * window``, and a count with a divisor that suits the convolution (one
    of its columns weighs about as much as a ring row)."""
    least = max(fold_every - 1 + 2 * window, width - 1 + window)
    return min(range(least, least + width + window), key=lambda R: R + columns(R, width, window))
