"""What drafts cost without a ring: a whole state is kept after each token of a step, and the step after it goes on from
the one after the last accepted token. Engines verify drafts of recurrent layers that way. In torch, on any device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from replayssm.bench.gate import DISTINCT, WrongKernel, draw, hold_rows
from replayssm.bench.kernels import pool_count
from replayssm.bench.shapes import Case
from replayssm.testing import Inputs, Tally, plain


def snapshots(states: Tensor, last: Tensor, inputs: Inputs, out: Tensor, channel: bool, erase: bool) -> None:
    """One step of ``T`` tokens: ``states [T, B, HV, V, K]``, of which row ``b`` goes on from number ``last[b]``, become
    the states after each token; ``out [B, T, HV, V]``.

    A token passes over a state three times: both products, with ``k`` and with ``q``, are read at once from the state
    before it (``S_t q = S' q + w d (k . q)`` where ``S'`` is decayed, and the decay goes to ``k`` and ``q``, which are
    smaller), then it is decayed, then the outer product is added. Arithmetic is float32 or wider.
    """
    T, wide = len(states), inputs.w.dtype
    group = inputs.v.shape[2] // inputs.k.shape[2]
    q, k, v, w, g = (x.to(wide).transpose(0, 1) for x in inputs)
    q, k = q.repeat_interleave(group, 2), k.repeat_interleave(group, 2)
    decay = (g if channel else g[..., None]).exp()
    pair = torch.stack([k * decay, q * decay], -1) if erase else (q * decay)[..., None]
    score = (k * q).sum(-1, keepdim=True)
    S = states[0] if T == 1 else states[last, torch.arange(len(last), device=last.device)]  # no state is its own next
    S = S.to(wide)
    for t in range(T):
        read = S @ pair[t]
        u = w[t, ..., None] * (v[t] - read[..., 0] if erase else v[t])
        new = states[t] if states.dtype == wide else S
        torch.mul(S, decay[t, :, :, None], out=new)
        new.addcmul_(u[..., None], k[t, :, :, None])
        out[:, t] = (read[..., -1] + u * score[t]).to(out.dtype)
        if states.dtype != wide:
            states[t].copy_(new)
        S = new


class Snapshots:
    """Buffers in turn, together larger than the last cache, as :class:`replayssm.bench.kernels.Rotation`'s pools; rows
    differ in how many tokens the step before had accepted."""

    def __init__(self, case: Case, device: torch.device) -> None:
        B, T, s = case.batch, case.T, case.shape
        self.case = case
        count = max(1, -(-pool_count(case, device) // T))
        rng = torch.Generator(device).manual_seed(0)
        first = torch.randn(T, B, s.HV, s.V, s.K, generator=rng, device=device).mul_(0.1).to(case.dtype)
        self.states = [first, *(first.clone() for _ in range(count - 1))]
        self.last = torch.arange(B, device=device) % T
        few = draw(case, min(B, 16), device, torch.Generator().manual_seed(0))
        self.inputs = few.rows(torch.arange(B, device=device) % min(B, 16))
        self.out = torch.empty_like(self.inputs.v)

    def run(self) -> None:
        """A step on each buffer."""
        for states in self.states:
            step(self.case, states, self.last, self.inputs, self.out)


def step(case: Case, states: Tensor, last: Tensor, inputs: Inputs, out: Tensor) -> None:
    """:func:`snapshots` of the case's recurrence."""
    snapshots(states, last, inputs, out, case.shape.recurrence.channel, case.shape.recurrence.erase)


def check(case: Case, device: torch.device, run: Callable[..., None] = step) -> None:
    """Two steps, the second from states that the first left, against the oracle; raises WrongKernel."""
    rng, s, recurrence = torch.Generator().manual_seed(0), case.shape, case.shape.recurrence
    n = min(case.batch, DISTINCT)
    row, each = torch.arange(case.batch, device=device) % n, torch.arange(n, device=device)
    S = torch.randn(n, s.HV, s.V, s.K, generator=rng).to(device, case.dtype)
    exact, same = S.double(), S
    states = torch.full((case.T, case.batch, s.HV, s.V, s.K), float("nan"), dtype=case.dtype, device=device)
    last = each % case.T
    states[last[row], torch.arange(case.batch, device=device)] = S[row]
    outputs, kept = Tally(case.inputs), Tally(case.dtype)
    for _ in range(2):
        inputs = draw(case, n, device, rng)
        out = torch.full_like(inputs.v[row], float("nan"))
        run(case, states, last[row], inputs.rows(row), out)
        exact_out, exact_states = plain(recurrence, exact, Inputs(*(x.double() for x in inputs)), torch.float64)
        same_out, same_states = plain(recurrence, same, inputs, case.spec.wide_dtype)
        outputs.add(out, same_out[row], exact_out[row])
        for t in range(case.T):
            hold_rows(kept, states[t], torch.arange(case.batch, device=device), same_states[t + 1], exact_states[t + 1])
        last = (case.T - 1 - each) % case.T
        exact, same = exact_states[last + 1, each], same_states[last + 1, each]
    for name, tally in (("outputs", outputs), ("states", kept)):
        if not tally.ok:
            raise WrongKernel(
                f"refusing to time snapshots, which are wrong: {case}: error of their {name} {tally.error:.2g}, "
                f"allowed {tally.allowed:.2g}"
            )
