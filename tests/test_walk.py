"""A random walk over everything that a pool can do, on each backend, held against the oracle all along.

In CI a short one. ``WALK_STEPS=10000 pytest tests/test_walk.py -k cuda`` is the long one on a GPU."""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import torch
from harness import Where

from replayssm import LayerSpec, Recurrence, auto, ops
from replayssm.auto import FoldEvery
from replayssm.backends import load, triton
from replayssm.backends.triton.config import LaunchConfig, launch_config
from replayssm.testing import Inputs, Oracle, assert_untouched, make_inputs, make_pool, snapshot

N, WINDOW, FOLD_EVERY = 7, 4, 6
STEPS = int(os.environ.get("WALK_STEPS", "60"))


def test_a_random_walk_follows_the_oracle(
    where: Where, recurrence: Recurrence, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = itertools.count()  # of Triton's steps of one token every other in one launch

    def in_turn(**case: Any) -> LaunchConfig:
        return launch_config(**case | {"rows": next(turns) % 2 << 20})

    monkeypatch.setattr(triton, "launch_config", in_turn)
    few = FoldEvery(1, "so few rows fold every step")
    monkeypatch.setattr(auto, "fold_every", lambda spec, rows, device: few if rows <= 3 else FoldEvery(99, ""))
    rng = torch.Generator().manual_seed(STEPS)
    spec = LayerSpec(recurrence, H=2, HV=4, K=32, V=16)
    fold_every = 1 if where.backend == "sequential" else FOLD_EVERY
    window = 1 if where.backend == "sequential" else WINDOW
    pool = make_pool([spec], N, fold_every=fold_every, window=window, device=where.device, generator=rng)
    layer, oracle = pool.layers[0], Oracle(spec, N)
    if (why := load(where.backend).refuses(layer)) is not None:
        pytest.skip(why)
    every = torch.arange(N, dtype=torch.int32)
    state = torch.randn(N, spec.HV, spec.V, spec.K, generator=rng)
    ops.seed(layer, state.to(where.device), every.to(where.device))
    oracle.seed(every, state)

    def some(least: int = 1) -> torch.Tensor:
        n = int(torch.randint(least, N + 1, (1,), generator=rng))
        return torch.randperm(N, generator=rng)[:n].to(torch.int32)

    for step in range(STEPS):
        kind = int(torch.randint(10, (1,), generator=rng))
        slots = some()
        there = slots.to(where.device)
        before = snapshot(pool) if step % 10 == 0 else None
        if kind < 6:  # a step, with padding among the rows
            pad = torch.rand(slots.numel(), generator=rng) < 0.2
            slots = slots.masked_fill(pad, -1)
            there = slots.to(where.device)
            T = int(torch.randint(1, window + 1, (1,), generator=rng))
            inputs = make_inputs(recurrence, slots.numel(), T, spec.H, spec.HV, spec.K, spec.V, torch.float32, rng)
            given = Inputs(*(x.to(where.device) for x in inputs))
            at = pool.at(slots.numel())
            oracle.verify(inputs, slots, ops.verify(at.layers[0], *given, slots=there, backend=where.backend))
            accepted = torch.randint(T + 1, (slots.numel(),), generator=rng)
            at.commit(there, accepted.to(where.device))
            oracle.commit(accepted)
        elif kind == 6:  # a fold of a prefix
            n = (torch.rand(slots.numel(), generator=rng) * (pool.ring.at(there)[1].cpu() + 1)).int()
            ops.fold(pool.layers, there, n.to(where.device), backend=where.backend)
        elif kind == 7:  # a fold of all, and a look at the states
            ops.fold(pool.layers, there, backend=where.backend)
            oracle.fold(layer, there)
        elif kind == 8:  # slots become copies of others
            src = some(slots.numel())[: slots.numel()]
            ops.copy(pool.layers, src.to(where.device), there)
            oracle.exact[slots.long()], oracle.same[slots.long()] = oracle.exact[src.long()], oracle.same[src.long()]
        else:  # a new sequence takes the slots
            ops.reset(pool.layers, there)
            state = torch.randn(slots.numel(), spec.HV, spec.V, spec.K, generator=rng)
            ops.seed(layer, state.to(where.device), there)
            oracle.seed(slots, state)
        if before is not None:
            assert_untouched(pool, before, slots)
    ops.fold(pool.layers, every.to(where.device), backend=where.backend)
    oracle.fold(layer, every.to(where.device))
    oracle.check(f"{where} {recurrence.name}")
