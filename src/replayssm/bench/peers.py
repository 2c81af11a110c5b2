"""Other implementations of one plain step, where they are installed: each is held against the oracle, then timed.

All of them read and write the whole state each token. Their calls follow what each package documents; a peer that does
not serve a case, is not installed or breaks the rule is named with the reason, never left out in silence.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from replayssm.bench.gate import DISTINCT, draw, hold_rows
from replayssm.bench.kernels import Bench, Row, pool_count
from replayssm.bench.shapes import Case, dtype_name
from replayssm.bench.timing import Timed
from replayssm.testing import Inputs, Tally, plain


@dataclass(frozen=True)
class Step:
    """A peer's step on a case. state: ours ``[B, HV, V, K]`` to its own; call: its own to ``(out [B, 1, HV, V], its
    own)``, in place or new; back: its own to ours."""

    inputs: Inputs
    call: Callable[[Tensor], tuple[Tensor, Tensor]]
    state: Callable[[Tensor], Tensor] = lambda S: S
    back: Callable[[Tensor], Tensor] = lambda S: S


@dataclass(frozen=True)
class Peer:
    """name: in tables; install: what pip calls it; where: module and function by recurrence; dtypes: of its state;
    gpu: runs there only; make: the function, the case and our inputs to a :class:`Step`."""

    name: str
    install: str
    where: dict[str, tuple[str, str]]
    dtypes: tuple[torch.dtype, ...]
    gpu: bool
    make: Callable[[Callable[..., Any], Case, Inputs], Step]

    def refuses(self, case: Case, device: torch.device) -> str | None:
        """Why this peer does not serve the case."""
        if case.mode != "standard":
            return f"no step of mode {case.mode} here"
        if case.shape.recurrence.name not in self.where:
            return f"no {case.shape.recurrence.name} step"
        if self.gpu and device.type != "cuda":
            return "runs on a GPU only"
        if case.dtype not in self.dtypes:
            return f"keeps no state in {dtype_name(case.dtype)}"
        return None


def measure(peer: Peer, case: Case, bench: Bench) -> Row | str:
    """A row, or why there is none."""
    if (why := peer.refuses(case, bench.device)) is not None:
        return why
    module, function = peer.where[case.shape.recurrence.name]
    try:
        step = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        return f"not installed (pip install {peer.install}): {_first_line(error)}"
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)  # such as transformers' on what else could be installed
    try:
        with torch.no_grad():
            return _timed(peer, step, case, bench)
    except Exception as error:  # another version than we know, a compiler that is missing: a peer must not end the run
        return f"failed: {type(error).__name__}: {_first_line(error)}"
    finally:
        logging.disable(disabled)


def _timed(peer: Peer, function: Callable[..., Any], case: Case, bench: Bench) -> Row | str:
    distinct, rng = min(case.batch, DISTINCT), torch.Generator().manual_seed(0)
    row = torch.arange(case.batch, device=bench.device) % distinct
    step = peer.make(function, case, Inputs(*(x[row] for x in draw(case, distinct, bench.device, rng))))
    s = case.shape
    S = torch.randn(distinct, s.HV, s.V, s.K, generator=rng).to(bench.device, case.dtype)
    if (why := _wrong(step, case, S, row)) is not None:
        return why
    states = [step.state(S[row]) for _ in range(pool_count(case, bench.device))]
    timed = bench.clock.time(lambda: [step.call(state) for state in states])
    timed = Timed(timed.seconds / len(states), timed.read)
    return Row.of(case, peer.name, timed, 2 * case.checkpoint_bytes, bench.plain(case), len(states))


def _wrong(step: Step, case: Case, S: Tensor, row: Tensor) -> str | None:
    """One step by the oracle's rule; the reason where it is broken."""
    some = Inputs(*(x[: len(S)] for x in step.inputs))
    exact_out, exact = plain(case.shape.recurrence, S.double(), Inputs(*(x.double() for x in some)), torch.float64)
    same_out, same = plain(case.shape.recurrence, S, some)
    out, state = step.call(step.state(S[row]))
    outputs, states = Tally(case.inputs), Tally(case.dtype)
    outputs.add(out.view(same_out[row].shape), same_out[row], exact_out[row])
    hold_rows(states, step.back(state).to(case.dtype), torch.arange(len(row)), same[1], exact[1])
    for name, tally in (("outputs", outputs), ("state", states)):
        if not tally.ok:
            return f"breaks the oracle's rule: error of its {name} {tally.error:.2g}, allowed {tally.allowed:.2g}"
    return None


def _mamba(inputs: Inputs) -> tuple[Inputs, dict[str, Tensor]]:
    """Inputs whose decay is ``A * dt`` with one ``A`` a head, dt exact in 16 bits, and the same by Mamba's names; the
    strides of 0 tell these kernels that a head shares its numbers."""
    dt = inputs.w.to(inputs.v.dtype)
    A = -torch.linspace(0.02, 1.5, dt.shape[-1], device=dt.device)
    inputs = inputs._replace(w=dt.float(), g=dt.float() * A)
    (HV, P), N = inputs.v.shape[2:], inputs.k.shape[-1]
    zeros = torch.zeros(HV, 1, dtype=dt.dtype, device=dt.device).expand(HV, P)
    return inputs, {
        "x": inputs.v[:, 0], "dt": dt[:, 0, :, None].expand(-1, HV, P), "A": A[:, None, None].expand(HV, P, N),
        "B": inputs.k[:, 0], "C": inputs.q[:, 0], "D": zeros, "dt_bias": zeros,
    }  # fmt: skip


def _mamba_ssm(function: Callable[..., Any], case: Case, inputs: Inputs) -> Step:
    inputs, names = _mamba(inputs)
    return Step(inputs, lambda S: (function(S, **names), S))


def _flashinfer(function: Callable[..., Any], case: Case, inputs: Inputs) -> Step:
    if case.shape.recurrence.name == "mamba2":
        inputs, names = _mamba(inputs)
        return Step(inputs, lambda S: (function(S, **names), S))
    # Its gates are computed in the kernel: beta = sigmoid(b), g = -exp(A_log) * softplus(a + dt_bias).
    b, a = torch.logit(inputs.w.clamp(0.01, 0.99)).to(inputs.v.dtype), (2 * inputs.w - 1).to(inputs.v.dtype)
    zeros = torch.zeros(case.shape.HV, device=a.device)
    inputs = inputs._replace(w=b.float().sigmoid(), g=-F.softplus(a.float()))

    def call(S: Tensor) -> tuple[Tensor, Tensor]:
        out, _ = function(
            q=inputs.q, k=inputs.k, v=inputs.v, state=S, A_log=zeros, a=a, dt_bias=zeros, b=b, scale=1.0,
            use_qk_l2norm=False,
        )  # fmt: skip
        return out, S

    return Step(inputs, call)


def _key_first(call: Callable[[Tensor], tuple[Tensor, Tensor]], inputs: Inputs) -> Step:
    """For who keeps ``[B, HV, K, V]`` and returns a new state."""
    return Step(inputs, call, lambda S: S.mT.contiguous(), lambda S: S.mT)


def _fla(function: Callable[..., Any], case: Case, inputs: Inputs) -> Step:
    q, k, v, w, g = inputs
    options = {"beta": w, "scale": 1.0, "output_final_state": True}
    return _key_first(lambda S: function(q, k, v, g=g, initial_state=S, **options), inputs)


def _transformers(function: Callable[..., Any], case: Case, inputs: Inputs) -> Step:
    """Stock transformers with the copy into its cache; its functions scale q themselves."""
    if case.shape.recurrence.name == "mamba2":
        inputs, names = _mamba(inputs)
        x = names.pop("x")
        return Step(inputs, lambda S: (function(S, x, **names), S))
    q, k, v, w, g = inputs
    group = case.shape.HV // case.shape.H
    if group > 1 and case.shape.recurrence.name == "kda":  # its function takes as many key heads as value heads
        q, k = q.repeat_interleave(group, 2), k.repeat_interleave(group, 2)
    q = q * case.shape.K**0.5

    def call(S: Tensor) -> tuple[Tensor, Tensor]:
        out, new = function(q, k, v, g=g, beta=w, initial_state=S, output_final_state=True)
        return out, S.copy_(new)

    return _key_first(call, inputs)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]


_ALL = (torch.float32, torch.bfloat16, torch.float16)
_HF = "transformers.models"
PEERS = (
    Peer(
        "fla", "flash-linear-attention",
        {"gdn": ("fla.ops.gated_delta_rule", "fused_recurrent_gated_delta_rule"),
         "kda": ("fla.ops.kda", "fused_recurrent_kda")},
        (torch.float32,), True, _fla,
    ),
    Peer(
        "mamba-ssm", "mamba-ssm",
        {"mamba2": ("mamba_ssm.ops.triton.selective_state_update", "selective_state_update")}, _ALL, True, _mamba_ssm,
    ),
    Peer(
        "flashinfer", "flashinfer-python",
        {"mamba2": ("flashinfer.mamba", "selective_state_update"),
         "gdn": ("flashinfer.gdn_decode", "gated_delta_rule_decode_pretranspose")},
        _ALL, True, _flashinfer,
    ),
    Peer(
        "transformers", "'replayssm[hf]'",
        {"mamba2": (f"{_HF}.nemotron_h.modeling_nemotron_h", "mamba2_selective_state_update"),
         "gdn": (f"{_HF}.qwen3_5.modeling_qwen3_5", "torch_recurrent_gated_delta_rule"),
         "kda": (f"{_HF}.kimi_linear.modeling_kimi_linear", "recurrent_kimi_delta_attention")},
        (torch.float32,), False, _transformers,
    ),
)  # fmt: skip
