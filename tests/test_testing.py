"""The tests' own tools can fail: the rule, poison, guard bands, whole-pool equality, the check of a backend."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from harness import Run, Where, make_spec

from replayssm import GDN, KDA, MAMBA2, Recurrence, backends
from replayssm.backends import torch as torch_backend
from replayssm.testing import (
    Tally,
    VerifyRow,
    assert_close_to_oracle,
    assert_guards,
    assert_untouched,
    check_backend,
    conformance,
    guarded,
    make_inputs,
    same_bits,
    snapshot,
    verify_backends,
)  # fmt: skip

TORCH = Where("torch", "cpu")
EPS = torch.finfo(torch.float32).eps


def test_the_rule() -> None:
    """2 * 3 eps of plain + one eps of the largest value, 2."""
    exact = torch.tensor([1.0, -2.0, 0.0], dtype=torch.float64)
    plain = exact.float() + torch.tensor([0, 0, -3 * EPS])
    for times, ok in ((8, True), (8.5, False), (math.nan, False), (math.inf, False)):
        actual = exact.float() + torch.tensor([0, 0, times * EPS])
        if ok:
            assert_close_to_oracle(actual, plain, exact)
        else:
            with pytest.raises(AssertionError, match=r"outputs: error .* allowed 9\.54e-07"):
                assert_close_to_oracle(actual, plain, exact, "outputs")


def test_the_rule_says_nothing_where_plain_overflows() -> None:
    exact, over = torch.tensor([1e5], dtype=torch.float64), torch.tensor([1e5]).half()
    with pytest.raises(AssertionError, match="allowed inf"):
        assert_close_to_oracle(over, over, exact)


def test_the_rule_in_float64_scales_the_error_of_float32() -> None:
    exact = torch.tensor([1.0], dtype=torch.float64)
    tally = Tally(torch.float64)
    tally.add(exact, exact.float() + 4 * EPS, exact)
    assert tally.allowed == 9 * torch.finfo(torch.float64).eps


def test_a_tally_takes_one_dtype_and_one_shape() -> None:
    x = torch.zeros(2)
    for actual, exact in ((x.double(), x.double()), (x, x)):
        with pytest.raises(TypeError, match="need actual in"):
            Tally(torch.float32).add(actual, x, exact)
    for plain in (x[:1], x[:, None]):
        with pytest.raises(ValueError, match="shapes differ"):
            Tally(torch.float32).add(x, plain, x.double())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_guard_bands(dtype: torch.dtype) -> None:
    view = guarded(torch.zeros(2, 3, dtype=dtype))
    view += 1
    assert_guards(view)
    for write in (lambda base: base[0].zero_(), lambda base: base[:, -1].fill_(math.nan)):
        view = guarded(torch.zeros(2, 3, dtype=dtype))
        write(view._base)
        with pytest.raises(AssertionError, match="a write outside"):
            assert_guards(view)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_untouched_slots_are_compared_by_bits(value: float) -> None:
    pool = TORCH.pool([make_spec(GDN), make_spec(KDA)])
    pool.add_conv(3).x.fill_(-0.0)
    before = snapshot(pool)
    assert_untouched(pool, before)
    for x in (pool.layers[1].g[2, 0, 3], pool.convs[0].x[2, 1], pool.ring.count[2]):
        old = x.clone()
        x.fill_(value if x.is_floating_point() else 1)
        assert_untouched(pool, before, [2])
        with pytest.raises(AssertionError, match="of slot 2 changed"):
            assert_untouched(pool, before, [0, 1])
        x.copy_(old)


@pytest.mark.parametrize("slot", [0, -1])
def test_a_pool_has_guard_bands(slot: int) -> None:
    pool = TORCH.pool([make_spec(MAMBA2)])
    before = snapshot(pool)
    pool.layers[0].k._base[slot, 1, 2, 3] = 0
    with pytest.raises(AssertionError, match="tensor 1 was written outside of its slots"):
        assert_untouched(pool, before, range(pool.N))


def test_same_bits() -> None:
    nan, zero = torch.tensor([math.nan]), torch.tensor([0.0])
    assert same_bits(nan, nan.clone()) and not same_bits(zero, -zero) and not same_bits(zero, zero.double())


def test_inputs_are_what_gates_make(recurrence: Recurrence) -> None:
    x = make_inputs(recurrence, 4, 50, 2, 4, 8, 6, torch.bfloat16, torch.Generator().manual_seed(0))
    assert x.q.shape == x.k.shape == (4, 50, 2, 8) and x.v.shape == (4, 50, 4, 6) and x.w.shape == (4, 50, 4)
    assert x.g.shape == ((4, 50, 4, 8) if recurrence.channel else (4, 50, 4))
    assert {t.dtype for t in x[:3]} == {torch.bfloat16} and {t.dtype for t in x[3:]} == {torch.float32}
    assert (x.g <= 0).all() and (x.g == 0).any() and (x.g.exp() == 0).any() and (x.w > 0).all()
    if recurrence.erase:
        assert (x.w < 1).all()
        torch.testing.assert_close(x.k.float().norm(dim=-1), torch.ones(4, 50, 2), rtol=1e-2, atol=0)
    mild = make_inputs(recurrence, 4, 50, 2, 4, 8, 6, extremes=False)
    assert (mild.g < 0).all() and (mild.g > -4).all()


def test_verify_backends() -> None:
    rows = verify_backends(["torch"])
    assert {(row.recurrence, row.dtype, row.T) for row in rows} == {
        (rec.name, dtype, T)
        for rec in (MAMBA2, GDN, KDA)
        for dtype in ("float64", "float32", "bfloat16")
        for T in (1, 5)
    }
    assert all(row.ok and 0 < row.error <= row.allowed and not row.skipped for row in rows)
    with pytest.raises(ValueError, match="unknown backend 'cuda'; valid: auto, "):
        verify_backends(["cuda"])


def test_a_backend_that_serves_nothing_gives_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "load", lambda name: SimpleNamespace(refuses=lambda layer: "not today"))
    assert verify_backends(["cpu"]) == [VerifyRow("cpu", "all", "all", 0, 0.0, 0.0, True, skipped="not today")]


def _too_wide(layer, q, k, v, w, g, slots, out):
    torch_backend.verify(layer, q, k, v, w, g, slots, out)
    layer.d[1] = 0


def _nudged(layer, q, k, v, w, g, slots, out):
    torch_backend.verify(layer, q, k, v, w, g, slots, out)
    out[-1] *= 1 + 8 * torch.finfo(out.dtype).eps


def _past_the_end(layer, q, k, v, w, g, slots, out):
    torch_backend.verify(layer, q, k, v, w, g, slots, out)
    out._base[-1] = 0


def _loud_padding(layer, q, k, v, w, g, slots, out):
    torch_backend.verify(layer, q, k, v, w, g, slots, out)
    out[1] = 1


@pytest.mark.parametrize(
    ("verify", "broken"),
    [
        (_too_wide, "tensor 2 of slot 1 changed, which the call was not given"),
        (_past_the_end, "a write outside of the tensor of shape (4, 5, 4, 16)"),
        (_loud_padding, "the output of a padding row is not 0"),
        (_nudged, None),
    ],
)
def test_a_broken_backend_is_found(monkeypatch: pytest.MonkeyPatch, verify, broken: str | None) -> None:
    bad = SimpleNamespace(verify=verify, fold=torch_backend.fold, refuses=lambda layer: None)
    monkeypatch.setattr(backends, "load", lambda name: bad)
    row = check_backend("torch", GDN, T=5)
    assert not row.ok and row.error > row.allowed and row.broken == broken


def test_poison_reaches_an_unmasked_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """The history of one row too many takes a dead row in, which is NaN."""
    history = torch_backend._history
    monkeypatch.setattr(torch_backend, "_history", lambda layer, slots, head, n: history(layer, slots, head, n + 1))
    run = Run(TORCH, make_spec(GDN))
    run.step(TORCH.slots(0), 1, 1)
    with pytest.raises(AssertionError, match="outputs: error inf"):
        run.finish()
