"""The drift rule: after 4,096 tokens with folds, at most twice the error of the plain recurrence in that state dtype.

It decides what a ring may round. Gates forget slowly here, and every draft is the true continuation, so that one run of
the plain recurrence over the sequence is the oracle of every window.
"""

from __future__ import annotations

import functools

import pytest
import torch
from harness import Where, make_spec
from torch import Tensor

from replayssm import GDN, KDA, MAMBA2, Recurrence, ops
from replayssm.testing import Inputs, assert_close_to_oracle, make_inputs, plain

TOKENS, ROWS = 4096, 2


@functools.cache
def sequence(rec: Recurrence) -> Inputs:
    """Exact in bfloat16 and given in float32, so that the ring's narrow rows are lossless and no output is rounded."""
    spec = make_spec(rec)
    rng = torch.Generator().manual_seed(0)
    made = make_inputs(rec, ROWS, TOKENS + 16, spec.H, spec.HV, spec.K, spec.V, torch.bfloat16, rng, extremes=False)
    q, k, v = (x.float() for x in made[:3])
    return Inputs(q, k, v, made.w * 0.2, made.g * 0.03)


@functools.cache
def expected(rec: Recurrence, state: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Outputs and last state, of the plain recurrence with such a state and in float64."""
    spec, inputs = make_spec(rec), sequence(rec)
    S = torch.zeros(ROWS, spec.HV, spec.V, spec.K, dtype=state)
    o, states = plain(rec, S, inputs)
    o64, states64 = plain(rec, S.double(), Inputs(*(x.double() for x in inputs)), torch.float64)
    return o, states[TOKENS], o64, states64[TOKENS]


@pytest.mark.parametrize("T", [1, 16])
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("rec", [MAMBA2, GDN, KDA], ids=["mamba2", "gdn", "kda"])
def test_drift(where: Where, rec: Recurrence, state: torch.dtype, T: int) -> None:
    spec = make_spec(rec, input_dtype=torch.bfloat16, state_dtype=state)
    pool = where.pool([spec], window=T, fold_every=16)
    layer, slots = pool.layers[0], where.slots(3, 1)
    pool.reset(slots)
    o, S, o64, S64 = expected(rec, state)
    inputs = Inputs(*(x.to(where.device) for x in sequence(rec)))
    rng = torch.Generator().manual_seed(1)
    at, tokens, outs = 0, [], []
    while at < TOKENS:
        outs.append(ops.verify(layer, *inputs.tokens(slice(at, at + T)), slots=slots, backend=where.backend))
        tokens += range(at, at + T)  # rejected ones come again in the next window
        accepted = min(int(torch.randint(1, T + 1, (), generator=rng)), TOKENS - at)
        pool.commit(slots, accepted)
        at += accepted
    pool.fold(slots)
    out = torch.cat(outs, 1).cpu()
    assert_close_to_oracle(out, o[:, tokens], o64[:, tokens], "outputs")
    late = len(tokens) * 3 // 4
    assert_close_to_oracle(out[:, late:], o[:, tokens[late:]], o64[:, tokens[late:]], "outputs of the last quarter")
    assert_close_to_oracle(layer.ckpt[slots.long()].cpu(), S, S64, "the last state")
