"""Gates against the formulas written out, in float64, element by element."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from replayssm import gates

RNG = torch.Generator().manual_seed(0)
F64 = torch.float64


def randn(*shape: int, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(shape, generator=RNG, dtype=torch.float64).to(dtype)


def softplus(x: float) -> float:
    return math.log1p(math.exp(-abs(x))) + max(x, 0.0)


def close(x: Tensor, want: list[float]) -> None:
    torch.testing.assert_close(x.flatten(), torch.tensor(want, dtype=F64), rtol=1e-14, atol=0)


def test_l2norm_and_delta_qk() -> None:
    q, k = randn(2, 3, 5), randn(2, 3, 5)
    norms = [1 / math.sqrt(sum(x * x for x in row) + 1e-6) for row in q.view(-1, 5).tolist()]
    close(gates.l2norm(q), [x * n for row, n in zip(q.view(-1, 5).tolist(), norms, strict=True) for x in row])
    got_q, got_k = gates.delta_qk(q, k)
    torch.testing.assert_close(got_q, gates.l2norm(q) / math.sqrt(5), rtol=1e-14, atol=0)
    torch.testing.assert_close(got_k, gates.l2norm(k), rtol=0, atol=0)
    assert not gates.l2norm(torch.zeros(4)).any()  # eps keeps a zero vector finite


def test_gdn_gate() -> None:
    a, A_log, bias = randn(2, 3, 4) * 3, randn(4), randn(4)
    want = [
        -math.exp(A_log[h].item()) * softplus(a[b, t, h].item() + bias[h].item())
        for b in range(2) for t in range(3) for h in range(4)
    ]  # fmt: skip
    close(gates.gdn_gate(a, A_log, bias), want)
    assert (gates.gdn_gate(a, A_log, bias) <= 0).all()


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_kda_gate(lower_bound: float | None) -> None:
    x, A_log, bias = randn(2, 3, 2, 4) * 3, randn(2), randn(2, 4)

    def gate(x: float, rate: float) -> float:
        return -rate * softplus(x) if lower_bound is None else lower_bound / (1 + math.exp(-rate * x))

    want = [
        gate(x[b, t, h, c].item() + bias[h, c].item(), math.exp(A_log[h].item()))
        for b in range(2) for t in range(3) for h in range(2) for c in range(4)
    ]  # fmt: skip
    got = gates.kda_gate(x, A_log, bias, lower_bound)
    close(got, want)
    assert (got <= 0).all() and (lower_bound is None or (got > lower_bound).all())


@pytest.mark.parametrize("bound", [0.0, 5.0])
def test_kda_gate_bound_is_negative(bound: float) -> None:
    with pytest.raises(ValueError, match=f"kda_gate: lower_bound must be negative, .*; got {bound}"):
        gates.kda_gate(randn(1, 2), randn(1), randn(1, 2), bound)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("limit", [None, (0.1, 0.9)])
@pytest.mark.parametrize("soft", [True, False])
def test_mamba2_dt(bias: bool, limit: tuple[float, float] | None, soft: bool) -> None:
    dt, dt_bias = randn(2, 3, 4), randn(4) if bias else None
    want = []
    for i, x in enumerate(dt.flatten().tolist()):
        x += dt_bias[i % 4].item() if dt_bias is not None else 0
        x = softplus(x) if soft else x
        want.append(x if limit is None else min(max(x, limit[0]), limit[1]))
    close(gates.mamba2_dt(dt, dt_bias, softplus=soft, limit=limit), want)


@pytest.mark.parametrize("skip", [None, (4,), (4, 3)], ids=str)
@pytest.mark.parametrize("gated", [True, False])
def test_mamba2_output(skip: tuple[int, ...] | None, gated: bool) -> None:
    o, x = randn(2, 4, 3), randn(2, 4, 3)
    D, z = randn(*skip) if skip else None, randn(2, 4, 3) if gated else None
    want = []
    for b in range(2):
        for h in range(4):
            for c in range(3):
                y = o[b, h, c].item()
                if D is not None:
                    y += x[b, h, c].item() * (D[h, c] if D.dim() == 2 else D[h]).item()
                if z is not None:
                    y *= z[b, h, c].item() / (1 + math.exp(-z[b, h, c].item()))
                want.append(y)
    close(gates.mamba2_output(o, x, D, z), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_inputs_are_computed_in_float32(dtype: torch.dtype) -> None:
    """Bitwise the gate of the same numbers in float32; only the output of a layer comes back in its dtype."""
    x, A_log, bias, k = randn(2, 4, dtype=dtype), randn(4, dtype=dtype), randn(4, dtype=dtype), randn(2, 6, dtype=dtype)
    wide = [t.float() for t in (x, A_log, bias)]
    pairs = [
        (gates.gdn_gate(x, A_log, bias), gates.gdn_gate(*wide)),
        (
            gates.kda_gate(x[..., None], A_log, bias[:, None]),
            gates.kda_gate(wide[0][..., None], wide[1], wide[2][:, None]),
        ),
        (gates.mamba2_dt(x, bias), gates.mamba2_dt(wide[0], wide[2])),
        (gates.l2norm(k), gates.l2norm(k.float())),
    ]
    for got, want in pairs:
        assert got.dtype == torch.float32 and torch.equal(got, want)
    out = gates.mamba2_output(x[..., None].float(), x[..., None], bias, x[..., None])
    assert out.dtype == dtype
    wide_out = gates.mamba2_output(wide[0][..., None], wide[0][..., None], wide[2], wide[0][..., None])
    assert torch.equal(out, wide_out.to(dtype))
