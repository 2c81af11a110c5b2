"""The oracle itself: against an independent formulation in numpy, and replay against the plain recurrence."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from harness import make_spec

from replayssm import Recurrence
from replayssm.reference import fold_ref, live_state_ref, recurrence_ref, verify_ref
from replayssm.testing import Inputs, assert_close_to_oracle, make_inputs, make_pool, plain

B, T, H, HV, K, V = 2, 9, 2, 4, 5, 3


def _inputs(recurrence: Recurrence, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[torch.Tensor, Inputs]:
    rng = torch.Generator().manual_seed(seed)
    S = torch.randn(B, HV, V, K, generator=rng).to(dtype)
    return S, make_inputs(recurrence, B, T, H, HV, K, V, dtype, rng)


def transition_numpy(recurrence: Recurrence, S: torch.Tensor, inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """Another form: each token multiplies the state by one K x K matrix, diag(e^g) (1 - w k k^T), and adds w v k^T."""
    q, k, v, w, g = (x.numpy() for x in inputs)
    state, out = S.numpy().copy(), np.zeros(v.shape)
    for b in range(B):
        for h in range(HV):
            kh = h * H // HV
            for t in range(T):
                decay = np.diag(np.exp(g[b, t, h])) if recurrence.channel else np.exp(g[b, t, h]) * np.eye(K)
                kk = w[b, t, h] * np.outer(k[b, t, kh], k[b, t, kh])
                step = decay @ (np.eye(K) - kk) if recurrence.erase else decay
                state[b, h] = state[b, h] @ step + w[b, t, h] * np.outer(v[b, t, h], k[b, t, kh])
                out[b, t, h] = state[b, h] @ q[b, t, kh]
    return out, state


@pytest.mark.parametrize("form", ["loops", "vectorised"])
def test_two_formulations_agree(recurrence: Recurrence, form: str) -> None:
    S, inputs = _inputs(recurrence)
    want_o, want_S = transition_numpy(recurrence, S, inputs)
    if form == "loops":
        o, last = recurrence_ref(recurrence, S, *inputs)
    else:
        o, states = plain(recurrence, S, inputs, torch.float64)
        last = states[-1]
        assert torch.equal(states[0], S) and len(states) == T + 1
    assert_equal64(o, torch.tensor(want_o))
    assert_equal64(last, torch.tensor(want_S))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_state_is_rounded_every_token(recurrence: Recurrence, dtype: torch.dtype) -> None:
    S, inputs = _inputs(recurrence, torch.float32)
    o, last = recurrence_ref(recurrence, S.to(dtype), *inputs)
    assert last.dtype == dtype
    by_hand = S.to(dtype)
    for t in range(T):
        _, by_hand = recurrence_ref(recurrence, by_hand.float(), *inputs.tokens(slice(t, t + 1)))
        by_hand = by_hand.to(dtype)
    assert torch.equal(last, by_hand)
    same, states = plain(recurrence, S.to(dtype), inputs)
    exact, states64 = plain(recurrence, S.to(dtype).double(), Inputs(*(x.double() for x in inputs)), torch.float64)
    assert_close_to_oracle(o, same, exact)
    assert_close_to_oracle(last, states[-1], states64[-1])


def assert_equal64(x: torch.Tensor, y: torch.Tensor) -> None:
    """Equal up to float64 rounding, relative to the largest value."""
    torch.testing.assert_close(x, y, rtol=0, atol=1e-13 * max(1.0, float(y.abs().max())))


@pytest.mark.parametrize(("fold_every", "window"), [(1, 1), (1, 4), (6, 1), (5, 3), (12, 5)])
def test_replay_is_the_recurrence(recurrence: Recurrence, fold_every: int, window: int) -> None:
    """Random acceptance (rollback by the cursor alone), folds when due, and folds of any prefix between."""
    rng = torch.Generator().manual_seed(fold_every)
    spec = make_spec(recurrence, HV=4, K=5, V=3, state_dtype=torch.float64, input_dtype=torch.float64)
    pool = make_pool([spec], 3, fold_every=fold_every, window=window, generator=rng)
    layer = pool.layers[0]
    S = torch.randn(3, spec.HV, spec.V, spec.K, generator=rng, dtype=torch.float64)
    layer.ckpt.copy_(S)
    folds = 0
    for step in range(16 + 16 * fold_every // window):
        rows = torch.randperm(3, generator=rng)[:2]
        slots = rows.int()
        inputs = make_inputs(recurrence, 2, window, spec.H, spec.HV, spec.K, spec.V, torch.float64, rng)
        exact, states = plain(recurrence, S[rows], inputs, torch.float64)
        folds += int(layer.ring.due(*reversed(layer.ring.at(slots))).sum())
        assert_equal64(verify_ref(layer, *inputs, slots), exact)
        accepted = torch.randint(window + 1, (2,), generator=rng)
        pool.commit(slots, accepted)
        pool.check()
        S[rows] = states[accepted, torch.arange(2)]
        for slot in rows.tolist():
            assert_equal64(live_state_ref(layer, slot), S[slot])
        if step % 6 == 5:
            n = (torch.rand(2, generator=rng) * (pool.ring.at(slots)[1] + 1)).long()
            fold_ref(layer, slots, n)
            pool.ring.absorb(slots, n)
            for slot in rows.tolist():
                assert_equal64(live_state_ref(layer, slot), S[slot])
    assert folds > 6


def test_padding_rows_of_the_reference(recurrence: Recurrence) -> None:
    spec = make_spec(recurrence)
    pool = make_pool([spec], window=2)
    inputs = make_inputs(recurrence, 2, 2, spec.H, spec.HV, spec.K, spec.V)
    slots = torch.tensor([-1, -3], dtype=torch.int32)
    assert not verify_ref(pool.layers[0], *inputs, slots).any()
    fold_ref(pool.layers[0], slots, torch.tensor([5, 5]))
    assert all(x.isnan().all() for x in pool.layers[0].tensors.values())
