"""torch.compile goes through a decode step as one graph, and the step does what it does in eager mode."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from replayssm import LayerSpec, Recurrence, StatePool, ops
from replayssm.testing import Inputs, make_inputs


def build(recurrence: Recurrence, window: int) -> tuple[StatePool, LayerSpec]:
    spec = LayerSpec(recurrence, H=2, HV=4, K=16, V=8)
    pool = StatePool(5, fold_every=6, window=window, backend="torch")
    for _ in range(2):
        pool.add_layer(spec)
    pool.alloc(5)
    return pool, spec


@pytest.mark.parametrize("window", [1, 3])
def test_a_step_is_one_graph_that_is_compiled_once(recurrence: Recurrence, window: int) -> None:
    torch.compiler.reset()
    pool, spec = build(recurrence, window)
    eager, rng = copy.deepcopy(pool), torch.Generator().manual_seed(0)
    slots = torch.tensor([3, -1, 0], dtype=torch.int32)

    def step(pool: StatePool, accepted: Tensor, *inputs: Tensor) -> Tensor:
        for layer in pool.layers:
            out = ops.verify(layer, *inputs, slots=slots, backend="torch")
        pool.commit(slots, accepted)
        return out * 2

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for i in range(20):
        inputs: Inputs = make_inputs(recurrence, 3, window, spec.H, spec.HV, spec.K, spec.V, torch.float32, rng)
        accepted = torch.randint(1, window + 1, (3,), generator=rng)
        with torch.compiler.set_stance("default" if i == 0 else "fail_on_recompile"):
            got = compiled(pool, accepted, *inputs)
        assert torch.equal(got, step(eager, accepted, *inputs))
    assert int(eager.ring.head[3]) > 0, "no fold was part of the test"
    for a, b in zip(pool.layers, eager.layers, strict=True):
        for name, x in a.tensors.items():
            assert torch.equal(x, b.tensors[name]), name
    assert torch.equal(pool.ring.head, eager.ring.head) and torch.equal(pool.ring.count, eager.ring.count)


def test_checks_are_made_when_a_graph_runs(recurrence: Recurrence) -> None:
    torch.compiler.reset()
    pool, spec = build(recurrence, 1)
    inputs = make_inputs(recurrence, 2, 1, spec.H, spec.HV, spec.K, spec.V, torch.float32)
    compiled = torch.compile(
        lambda *x, slots: ops.verify(pool.layers[0], *x, slots=slots), fullgraph=True, backend="eager"
    )
    # no_grad: what a graph switches off, an exception in it leaves off.
    with torch.no_grad(), pytest.raises(ValueError, match="slot 4"):
        compiled(*inputs, slots=torch.tensor([4, 4], dtype=torch.int32))
    assert torch.is_grad_enabled()


def test_decode_compiles_too(recurrence: Recurrence) -> None:
    torch.compiler.reset()
    pool, spec = build(recurrence, 1)
    inputs = [x[:, 0] for x in make_inputs(recurrence, 2, 1, spec.H, spec.HV, spec.K, spec.V, torch.float32)]
    slots = torch.tensor([1, 2], dtype=torch.int32)
    compiled = torch.compile(lambda *x: ops.decode(pool.layers[0], *x, slots=slots), fullgraph=True, backend="eager")
    again = copy.deepcopy(pool)
    assert torch.equal(compiled(*inputs), ops.decode(again.layers[0], *inputs, slots=slots))
