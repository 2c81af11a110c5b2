"""Layers that are given q and k without their l2 norm, which then is part of the step: ``LayerSpec.norm``."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from harness import Where, make_spec
from torch import Tensor

from replayssm import GDN, KDA, MAMBA2, Recurrence, StatePool, ops
from replayssm.gates import delta_qk
from replayssm.reference import verify_ref
from replayssm.testing import Inputs, make_inputs
from replayssm.testing.oracle import Tally, plain
from replayssm.tree import commit_path, verify_tree

N, EPS = 5, 1e-6


def normalised(x: Inputs) -> Inputs:
    q, k = delta_qk(x.q, x.k)
    return x._replace(q=q, k=k)


def walk(where: Where, recurrence: Recurrence, dtype: torch.dtype, fold_every: int, window: int, steps: int) -> None:
    """Keys and queries of lengths from 0 to 30, in the ring's own dtype, against the recurrence of normalised ones."""
    rng = torch.Generator().manual_seed(0)
    spec = replace(make_spec(recurrence), input_dtype=dtype, norm=EPS)
    pool = where.pool([spec], N=N, fold_every=fold_every, window=window, width=1, generator=rng)
    layer, outputs, states = pool.layers[0], Tally(torch.float32), Tally(torch.float32)
    assert layer.k.dtype == dtype
    same = torch.randn(N, spec.HV, spec.V, spec.K, generator=rng)
    exact = same.double()
    ops.seed(layer, same.to(where.device), where.slots(*range(N)))
    for step in range(steps):
        slots = torch.randperm(N, generator=rng)[:3].int()
        slots[1] = -1 if step % 3 == 0 else slots[1]
        T = int(torch.randint(1, window + 1, (), generator=rng))
        x = make_inputs(recurrence, 3, T, spec.H, spec.HV, spec.K, spec.V, torch.float32, rng)
        length = torch.rand(3, T, spec.H, 1, generator=rng) * 30 * (torch.rand(3, T, 1, 1, generator=rng) > 0.1)
        x = x._replace(q=(x.q * length).to(dtype), k=(x.k * length).to(dtype))
        tree = T > 1 and step % 2 == 0 and where.backend in ("torch", "triton")
        parents = torch.zeros(3, T, dtype=torch.long) - 1  # each node alone, so that one of them is a step of one token
        given = [y.to(where.device) for y in x]
        there = slots.to(where.device)
        if tree:
            out = verify_tree(layer, *given, parents.to(where.device), slots=there, backend=where.backend)
            path, accepted = torch.full((3, 1), T - 1), torch.tensor([1, 0, 1])
            commit_path(pool.layers, path.to(where.device), accepted.to(where.device), there)
        else:
            out = ops.verify(layer, *given, slots=there, backend=where.backend)
            accepted = torch.randint(T + 1, (3,), generator=rng)
            pool.commit(there, accepted.to(where.device))
        for row, slot in enumerate(slots.tolist()):
            if slot < 0:
                assert not out[row].any()
                continue
            mine = x.rows(slice(row, row + 1))
            mine = mine.tokens(torch.tensor([T - 1])) if tree else mine
            o, S = plain(recurrence, same[slot, None], normalised(mine))
            o64, S64 = plain(
                recurrence, exact[slot, None], normalised(Inputs(*(y.double() for y in mine))), torch.float64
            )
            outputs.add(out[row, -o.shape[1] :].cpu(), o[0], o64[0])
            same[slot], exact[slot] = S[accepted[row], 0], S64[accepted[row], 0]
    pool.fold(where.slots(*range(N)))
    states.add(layer.ckpt.cpu(), same, exact)
    outputs.check("outputs")
    states.check("states")


@pytest.mark.parametrize(("fold_every", "window"), [(6, 1), (6, 4), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("recurrence", [GDN, KDA], ids=["gdn", "kda"])
def test_against_normalised_inputs(
    where: Where, recurrence: Recurrence, dtype: torch.dtype, fold_every: int, window: int
) -> None:
    if where.backend == "sequential" and fold_every > 1:
        pytest.skip("the plain recurrence folds every step")
    walk(where, recurrence, dtype, fold_every, window, 24)


INTERPRETED = """
import sys
sys.path.insert(0, "tests")
from test_norm import GDN, KDA, Where, torch, walk
recurrence, dtype, fold_every, window = sys.argv[1:]
recurrence = {"gdn": GDN, "kda": KDA}[recurrence]
walk(Where("triton", "cpu"), recurrence, getattr(torch, dtype), int(fold_every), int(window), 5)
"""


@pytest.mark.parametrize("case", ["gdn bfloat16 4 1", "gdn float32 4 2", "kda bfloat16 4 2", "kda bfloat16 1 1"])
def test_in_tritons_interpreter(case: str) -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-c", INTERPRETED, *case.split()]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def pools(*backends: str) -> list[StatePool]:
    made = []
    for backend in backends:
        pool = StatePool(3, fold_every=4, window=2, backend=backend)
        pool.add_layer(replace(make_spec(GDN), norm=EPS))
        pool.alloc(3)
        made.append(pool)
    return made


def test_the_reference_and_what_rows_keep() -> None:
    """k as it came, and a product of d and w that is the reference's, whoever wrote the row."""
    ours, ref = pools("torch", "torch")
    slots, rng = torch.tensor([2, 0], dtype=torch.int32), torch.Generator().manual_seed(1)
    s = ours.layers[0]
    for _ in range(4):
        x = make_inputs(GDN, 2, 2, s.H, s.HV, s.K, s.V, torch.float32, rng)
        x = x._replace(q=x.q * 3, k=x.k * 5)
        got, want = ops.verify(s, *x, slots=slots, backend="torch"), verify_ref(ref.layers[0], *x, slots)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        assert torch.equal(s.k, ref.layers[0].k)

        def written(pool: StatePool) -> Tensor:
            return pool.layers[0].d * pool.layers[0].w[..., None]

        torch.testing.assert_close(written(ours), written(ref), rtol=1e-4, atol=1e-6)
        for pool in (ours, ref):
            pool.commit(slots, 2)


def test_what_a_norm_needs() -> None:
    for recurrence, eps in ((MAMBA2, EPS), (GDN, 0.0), (GDN, -1.0)):
        with pytest.raises(ValueError, match="norm is an eps above 0, for a recurrence with erase"):
            replace(make_spec(recurrence), norm=eps)
