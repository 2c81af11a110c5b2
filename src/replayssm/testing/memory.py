"""Poisoned pools, and whether a call touched only what it was given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from replayssm.layer import LayerSpec
from replayssm.pool import StatePool
from replayssm.testing.inputs import guard, same_bits


def make_pool(
    specs: Sequence[LayerSpec],
    N: int = 6,
    *,
    fold_every: int = 7,
    window: int = 1,
    width: int = 4,
    device: torch.device | str = "cpu",
    backend: str = "auto",
    generator: torch.Generator | None = None,
) -> StatePool:
    """A pool of poisoned memory: all of it NaN, ring heads anywhere, no slot allocated, and a guard band of one slot
    before and after each tensor of a layer. Seed slots before use."""
    pool = StatePool(N, fold_every=fold_every, window=window, width=width, device=device, backend=backend)
    for spec in specs:
        layer = pool.add_layer(spec)
        pool.layers[-1] = replace(layer, **{name: _banded(x) for name, x in layer.tensors.items()})
    poison(pool, generator)
    return pool


def poison(pool: StatePool, generator: torch.Generator | None = None) -> None:
    """Fills every tensor of every slot with NaN and sets empty rings with random heads."""
    for layer in pool.layers:
        for x in layer.tensors.values():
            x.fill_(float("nan"))
    for conv in pool.convs:
        conv.x.fill_(float("nan"))
    slots = torch.arange(pool.N, dtype=torch.int32, device=pool.ring.head.device)
    head = torch.randint(pool.ring.R, (pool.N,), generator=generator).to(slots)
    pool.ring.put(slots, head, torch.zeros_like(head))


def memory(pool: StatePool) -> list[Tensor]:
    """Views, slot-major, of all the pool's memory; the cursors come last."""
    tensors = [x for layer in pool.layers for x in layer.tensors.values()] + [conv.x for conv in pool.convs]
    return [*tensors, pool.ring.head[:-1], pool.ring.count[:-1]]


def snapshot(pool: StatePool) -> list[Tensor]:
    """A copy of :func:`memory`."""
    return [x.clone() for x in memory(pool)]


def assert_untouched(pool: StatePool, before: Sequence[Tensor], slots: Tensor | Sequence[int] = ()) -> None:
    """Raises AssertionError unless every slot but ``slots`` is bitwise what it was at the snapshot ``before``, and the
    guard bands of :func:`make_pool`, if there are any, are whole."""
    touched = set(slots.tolist() if isinstance(slots, Tensor) else slots)
    rest = [slot for slot in range(pool.N) if slot not in touched]
    for i, (x, old) in enumerate(zip(memory(pool), before, strict=True)):
        for slot in rest:
            if not same_bits(x[slot], old[slot]):
                raise AssertionError(f"tensor {i} of slot {slot} changed, which the call was not given")
        if (base := x._base) is not None and base.shape[0] == pool.N + 2:
            band = base[:: pool.N + 1]
            if not same_bits(band, torch.full_like(band, guard(x))):
                raise AssertionError(f"tensor {i} was written outside of its slots")


def _banded(x: Tensor) -> Tensor:
    """Memory like ``x``, ``[N, ...]``, with one more slot of :data:`replayssm.testing.GUARD` before and after."""
    buffer = torch.full((x.shape[0] + 2, *x.shape[1:]), guard(x), dtype=x.dtype, device=x.device)
    return buffer[1:-1]
