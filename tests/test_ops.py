"""The ops of every backend against the oracle, in poisoned memory and between guard bands."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from harness import Run, Where, make_spec

from replayssm import GDN, KDA, MAMBA2, Recurrence, ops
from replayssm.backends import load
from replayssm.layer import LayerState
from replayssm.reference import verify_ref
from replayssm.testing import Inputs, Tally, assert_untouched, memory, same_bits, snapshot

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("T", "R"), [(1, 9), (1, 16), (2, 9), (2, 24), (5, 16), (5, 24), (16, 34), (16, 40)], ids=lambda n: str(n)
)
def test_steps_match_the_recurrence(where: Where, recurrence: Recurrence, T: int, R: int) -> None:
    """Several folds and wraps of the ring, rows and slots in any order, random acceptance, some rows padding."""
    run = Run(where, make_spec(recurrence), fold_every=R - 2 * T + 1, window=T)
    assert where.backend == "sequential" or run.pool.ring.R == R
    for _ in range(8 + 3 * R // T):
        slots = torch.randperm(run.pool.N + 2, generator=run.rng)[:4] - 2  # of -2 .. N - 1, where < 0 is padding
        run.step(slots.int().to(where.device), T)
    run.finish()


@pytest.mark.parametrize(
    ("inputs", "ring", "state", "gates"),
    [
        (F64, F64, F64, F64),
        (BF16, BF16, F32, F32),
        (F16, F16, F32, F16),
        (BF16, F32, BF16, F32),
        (BF16, BF16, BF16, BF16),
        (F16, F16, F16, F32),
    ],
    ids=lambda dtype: str(dtype).removeprefix("torch."),
)
def test_dtypes(where: Where, recurrence: Recurrence, inputs, ring, state, gates) -> None:
    spec = make_spec(recurrence, state_dtype=state, input_dtype=ring)
    run = Run(where, spec, dtype=inputs, gates=gates, window=3)
    for _ in range(12):
        assert run.step(where.slots(3, 0), 3).dtype == inputs
    run.finish()


@pytest.mark.parametrize(("H", "HV", "K", "V"), [(1, 1, 1, 1), (1, 3, 5, 16), (2, 2, 16, 8), (1, 8, 33, 3)], ids=str)
def test_shapes(where: Where, recurrence: Recurrence, H: int, HV: int, K: int, V: int) -> None:
    run = Run(where, make_spec(recurrence, H=H, HV=HV, K=K, V=V), window=2)
    for _ in range(12):
        run.step(where.slots(4, 1, 2), 2)
    run.finish()


def test_fewer_tokens_than_the_window(where: Where, recurrence: Recurrence) -> None:
    """T may differ from step to step."""
    run = Run(where, make_spec(recurrence), window=5, fold_every=4)
    for T in (5, 1, 3, 5, 2, 4, 1, 1, 5, 5):
        run.step(where.slots(0, 5), T)
    run.finish()


@pytest.mark.parametrize("T", [1, 23])
def test_folded_rings_take_more_than_the_window(where: Where, recurrence: Recurrence, T: int) -> None:
    run = Run(where, make_spec(recurrence), window=1, fold_every=23)
    run.pool.ring.limit or pytest.skip("needs a longer ring than the plain recurrence has")
    slots = where.slots(2, -1, 4)
    for n in (None, 0, T):
        run.step(slots, 1)
        run.fold(slots)
        run.step(slots, T, n, folded=True)
    run.finish()


def test_fold_of_a_prefix_changes_no_output(where: Where, recurrence: Recurrence) -> None:
    run = Run(where, make_spec(recurrence), window=2, fold_every=9)
    slots = where.slots(5, -1, 0, 3)
    for n in (1, 2, 0, 1, 1):
        run.step(slots, 2, 2)
        rows = torch.minimum(torch.tensor([n, 99, 0, n + 1], device=where.device), run.pool.ring.at(slots)[1])
        before = snapshot(run.pool)
        run.fold(slots, rows.where(slots >= 0, 99))  # what padding rows ask for is not looked at
        assert_untouched(run.pool, before, where.slots(*slots[rows > 0].tolist()))
    run.finish()


@pytest.mark.parametrize("slots", [(), (2,), (-1, -1, -7), (-1, 3)], ids=["no-rows", "one", "all-padding", "some"])
@pytest.mark.parametrize("T", [0, 1, 3])
def test_nothing_else_is_touched(where: Where, recurrence: Recurrence, slots: tuple[int, ...], T: int) -> None:
    """Whole-pool equality, through folds: other slots bitwise, and of touched slots all rows but the drafts."""
    run = Run(where, make_spec(recurrence), window=3, fold_every=3)
    at = where.slots(*slots)
    real = [slot for slot in slots if slot >= 0]
    if real:
        for n in (2, 3):  # now a fold is due
            run.step(where.slots(*real), 3, n)
    for _ in range(2):
        before = snapshot(run.pool)
        out = run.verify(run.inputs(len(slots), T), at)
        assert out.shape == (len(slots), T, run.spec.HV, run.spec.V)
        assert_untouched(run.pool, before, at)
        for slot in real:
            _only_drafts_changed(run.layer, before, slot, T)
        run.commit(at, 0)
    run.finish()


def _only_drafts_changed(layer: LayerState, before: list[torch.Tensor], slot: int, T: int) -> None:
    head, count = int(layer.ring.head[slot]), int(layer.ring.count[slot])
    kept = torch.ones(layer.ring.R, dtype=torch.bool, device=layer.ckpt.device)
    kept[[(head + count + t) % layer.ring.R for t in range(T)]] = False
    ckpt, *rows = before[:5]
    for x, old in zip((layer.k, layer.d, layer.w, layer.g), rows, strict=True):
        assert same_bits(x[slot][:, kept], old[slot][:, kept])
        assert not x[slot][:, ~kept].isnan().any()
    if not layer.ring.due(layer.ring.count[slot], layer.ring.head[slot]):
        assert same_bits(layer.ckpt[slot], ckpt[slot])


def test_no_tokens_still_fold_where_due(where: Where, recurrence: Recurrence) -> None:
    """commit moves the cursors of a due slot, so that a verify of zero tokens has to fold it too."""
    run = Run(where, make_spec(recurrence), window=2, fold_every=2)
    slots = where.slots(1, -1, 4)
    run.step(slots, 2, 2)
    assert run.pool.ring.due(*reversed(run.pool.ring.at(slots)))[[0, 2]].all()
    run.step(slots, 0, 0)
    assert not run.pool.ring.at(slots)[1].any()
    run.step(slots, 2, 2)
    run.finish()


def test_appended_rows(where: Where, recurrence: Recurrence) -> None:
    """k, w, g are the inputs; d is that of the reference, by the rule."""
    run = Run(where, make_spec(recurrence, input_dtype=BF16), dtype=BF16, window=4)
    slots = where.slots(3, -1, 0)
    run.step(slots, 4, 1)
    layer, inputs = run.layer, run.inputs(3, 4)
    narrow, wide = (_twin(layer, dtype) for dtype in (F32, F64))
    run.verify(inputs, slots)
    for twin in (narrow, wide):
        verify_ref(twin, *inputs._replace(v=inputs.v.to(twin.w.dtype)), slots.cpu())
    d = Tally(layer.d.dtype)
    for b, slot in ((0, 3), (2, 0)):
        row = [(int(layer.ring.head[slot]) + int(layer.ring.count[slot]) + t) % layer.ring.R for t in range(4)]
        for name in ("k", "w", "g"):
            ring, x = getattr(layer, name)[slot].cpu(), getattr(inputs, name)[b].transpose(0, 1)
            assert same_bits(ring[:, row], x.to(ring.dtype).contiguous()), name
        d.add(layer.d[slot][:, row].cpu(), narrow.d[slot][:, row].to(layer.d.dtype), wide.d[slot][:, row])
    d.check("d")


def _twin(layer: LayerState, dtype: torch.dtype) -> LayerState:
    """A copy on the CPU, all of it in ``dtype``."""
    ring = replace(layer.ring, head=layer.ring.head.cpu(), count=layer.ring.count.cpu())
    return replace(layer, ring=ring, **{name: x.to("cpu", dtype, copy=True) for name, x in layer.tensors.items()})


def test_decode_is_verify_of_one_token(where: Where, recurrence: Recurrence) -> None:
    """Bitwise, through folds."""
    one, two = (Run(where, make_spec(recurrence), fold_every=3) for _ in range(2))
    slots = where.slots(5, 0, -1, 2)
    for _ in range(10):
        inputs = one.inputs(4, 1)
        out = one.verify(inputs, slots)
        given = (x[:, 0].to(where.device) for x in inputs)
        assert same_bits(ops.decode(two.layer, *given, slots=slots, backend=where.backend), out[:, 0])
        one.commit(slots, 1)
        two.pool.commit(slots, 1)
    for x, y in zip(memory(one.pool), memory(two.pool), strict=True):
        assert same_bits(x, y)
    one.finish()


@pytest.mark.parametrize("T", [2, 5, 16])
def test_tokens_in_one_call_or_one_by_one(where: Where, recurrence: Recurrence, T: int) -> None:
    """Both are within the rule of the same oracle, outputs and states."""
    run = Run(where, make_spec(recurrence, state_dtype=F64, input_dtype=F64), window=T, fold_every=4)
    together, single = where.slots(0), where.slots(1)
    run.layer.ckpt[1] = run.layer.ckpt[0]
    run.oracle.seed(single.cpu(), run.layer.ckpt[:1].cpu())
    for _ in range(4):
        inputs = run.inputs(1, T)
        run.verify(inputs, together)
        run.commit(together, T)
        for t in range(T):
            run.verify(inputs.tokens(slice(t, t + 1)), single)
            run.commit(single, 1)
    run.finish()


def test_a_rejected_draft_leaves_no_trace(where: Where, recurrence: Recurrence) -> None:
    """The same accepted tokens, with and without drafts between them, end in bitwise the same outputs."""
    with_drafts, without = (Run(where, make_spec(recurrence), window=4, fold_every=8, seed=1) for _ in range(2))
    slots = where.slots(3, 1)
    junk = Run(where, make_spec(recurrence), window=4, seed=2)
    for _ in range(5):
        inputs = without.inputs(2, 2)
        with_drafts.verify(junk.inputs(2, 4), slots)
        with_drafts.commit(slots, 0)
        outs = [run.verify(inputs, slots) for run in (with_drafts, without)]
        if with_drafts.pool.ring.limit:  # otherwise the draft's step has folded what the other run still has to
            assert same_bits(*outs)
        for run in (with_drafts, without):
            run.commit(slots, 1)
    with_drafts.finish()
    without.finish()


@pytest.mark.parametrize("layout", ["heads-first", "expanded", "backwards"])
def test_strided_inputs(where: Where, recurrence: Recurrence, layout: str) -> None:
    run, slots = Run(where, make_spec(recurrence), window=3), where.slots(2, 0, 4)
    for _ in range(6):
        made = Inputs(*(x.to(where.device) for x in run.inputs(3, 3)))
        if layout == "heads-first":
            given = Inputs(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in made))
        elif layout == "expanded":
            given = Inputs(*(x[:, :, :1].expand_as(x) for x in made))
        else:
            given = Inputs(*(x.transpose(0, -1).contiguous().transpose(0, -1) for x in made))
        out = ops.verify(run.layer, *given, slots=slots, backend=where.backend)
        assert out.is_contiguous()
        run.oracle.verify(Inputs(*(x.cpu() for x in given)), slots, out)
        run.commit(slots, 2)
    run.finish()


def test_out_may_be_left_out(where: Where, recurrence: Recurrence) -> None:
    one, two = (Run(where, make_spec(recurrence), window=2) for _ in range(2))
    slots = where.slots(2, -1)
    for _ in range(8):
        inputs = one.inputs(2, 2)
        given = Inputs(*(x.to(where.device) for x in inputs))
        out = ops.verify(two.layer, *given, slots=slots, out=None, backend=where.backend)
        assert same_bits(one.verify(inputs, slots), out)
        one.commit(slots, 2)
        two.pool.commit(slots, 2)


def test_inputs_that_require_grad_leave_no_graph_in_the_pool(where: Where, recurrence: Recurrence) -> None:
    run, slots = Run(where, make_spec(recurrence)), where.slots(1)
    ops.seed(run.layer, torch.zeros_like(run.layer.ckpt[:1], requires_grad=True), slots)
    given = (x.to(where.device).requires_grad_() for x in run.inputs(1, 1))
    out = ops.verify(run.layer, *given, slots=slots, backend=where.backend)
    assert not out.requires_grad
    assert not any(x.requires_grad for x in run.layer.tensors.values())


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_auto_takes_a_backend_that_works(recurrence: Recurrence, dtype: torch.dtype) -> None:
    run = Run(Where("auto", "cpu"), make_spec(recurrence, state_dtype=dtype, input_dtype=dtype), window=2)
    for _ in range(8):
        run.step(run.where.slots(0, 3), 2)
    run.finish()


def test_torch_serves_every_layer(recurrence: Recurrence) -> None:
    """So that skipped backends cannot leave the suite without one."""
    for dtype in (F16, BF16, F32, F64):
        run = Run(Where("torch", "cpu"), make_spec(recurrence, state_dtype=dtype, input_dtype=dtype))
        assert load("torch").refuses(run.layer) is None


@pytest.mark.parametrize("rec", [MAMBA2, GDN, KDA], ids=["mamba2", "gdn", "kda"])
def test_no_synchronisation_off_the_cpu(rec: Recurrence) -> None:
    """Meta tensors have no values: whatever would read one on the host fails."""
    on = Where("torch", "meta")
    pool = on.pool([make_spec(rec)], window=3)
    layer, slots, n = pool.layers[0], on.slots(0, 1), torch.zeros(2, dtype=torch.int32, device="meta")
    spec = make_spec(rec)
    gate = (spec.HV, spec.K) if rec.channel else (spec.HV,)
    shapes = [(spec.H, spec.K), (spec.H, spec.K), (spec.HV, spec.V), (spec.HV,), gate]
    ops.seed(layer, torch.empty(2, spec.HV, spec.V, spec.K, device="meta"), slots)
    for T in (0, 1, 3):
        ops.verify(layer, *(torch.empty(2, T, *shape, device="meta") for shape in shapes), slots=slots)
    ops.decode(layer, *(torch.empty(2, *shape, device="meta") for shape in shapes), slots=slots)
    for accepted in (1, n):
        pool.commit(slots, accepted)
        pool.rewind(slots, accepted)
    for rows in (None, 2, n):
        pool.fold(slots, rows)
    pool.copy(slots, slots)
    pool.reset(slots)


def test_padding_in_the_memory_ops(where: Where, recurrence: Recurrence) -> None:
    """A padding row of seed, copy, reset, fold and rewind touches nothing, the last slot least of all."""
    run = Run(where, make_spec(recurrence), fold_every=9, window=2)
    run.step(where.slots(*range(run.pool.N)), 2, 2)
    pool, layer = run.pool, run.layer
    memory_ops = [
        lambda slots: pool.fold(slots, 1),
        lambda slots: pool.rewind(slots, 1),
        lambda slots: pool.copy(where.slots(0, 0, -1), slots),
        lambda slots: pool.copy(slots, where.slots(0, 2, 1)),
        lambda slots: pool.reset(slots),
        lambda slots: ops.seed(layer, torch.zeros(3, *layer.ckpt.shape[1:], device=where.device), slots),
    ]
    for slots, touched in (((-1, 2, -1), {2}), ((-1, -1, -1), set())):
        for op in memory_ops:
            before = snapshot(pool)
            op(where.slots(*slots))
            assert_untouched(pool, before, touched)
