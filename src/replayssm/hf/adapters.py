"""From the arguments of a model's recurrent function to ``q, k, v, w, g`` and back: one adapter a function.

Each takes the call that a mixer made with a :class:`Handle` for the state. The first tokens of a step, if it absorbs
any, go to the model's own function; the others are replayed. GDN and KDA models keep the state as ``[B, HV, K, V]``, so
it is transposed where it is handed over; Mamba-2's is ``[B, HV, V, K]`` already.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from replayssm import gates
from replayssm.hf.handle import ConvHandle, Handle, PathHandle, refuse_gradient
from replayssm.layer import LayerSpec
from replayssm.recurrence import GDN, KDA, MAMBA2, Recurrence


@dataclass(frozen=True)
class Call:
    """A call of a replaced function: its original, its parameter names and the arguments as the mixer gave them."""

    original: Callable[..., Any]
    names: tuple[str, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def get(self, name: str, default: Any = None) -> Any:
        """The argument ``name``."""
        index = self.names.index(name)
        return self.args[index] if index < len(self.args) else self.kwargs.get(name, default)

    def first(self, n: int, sequences: tuple[str, ...], **changed: Any) -> Any:
        """Calls the original with the arguments ``sequences [B, T, ..]`` cut to their first ``n`` tokens."""
        arguments = dict(zip(self.names, self.args, strict=False)) | self.kwargs | changed
        arguments |= {name: arguments[name][:, :n] for name in sequences}
        positional = [arguments.pop(name) for name in self.names[: len(self.args)]]
        return self.original(*positional, **arguments)

    def refuse(self, *names: str) -> None:
        """Raises where an argument that replay does not know is used."""
        used = [name for name in names if self.kwargs.get(name) is not None]
        if used:
            raise ValueError(f"replayssm: packed sequences ({', '.join(used)}) cannot continue from a ReplayCache")


def _spec(handle: Handle, recurrence: Recurrence, k: Tensor, v: Tensor, input_dtype: torch.dtype) -> LayerSpec:
    options = handle.recurrent.options
    return LayerSpec(
        recurrence, H=k.shape[2], HV=v.shape[2], K=k.shape[3], V=v.shape[3], state_dtype=options.state_dtype,
        input_dtype=input_dtype,
    )  # fmt: skip


DELTA_INPUTS = ("query", "key", "value", "g", "beta")


def delta_rule(recurrence: Recurrence) -> Callable[[Handle, Call], tuple[Tensor, Handle]]:
    """Adapter of both functions of the delta rules, ``(query, key, value, g, beta, ...) -> output, state``."""

    def adapter(handle: Handle, call: Call) -> tuple[Tensor, Handle]:
        call.refuse("cu_seqlens")
        q, k, v, g, beta = (call.get(name) for name in DELTA_INPUTS)
        recurrent, layer = handle.recurrent, handle.layer
        step = recurrent.plan(layer, q.shape[1], q.shape[0], q.device)
        # 16 bits hold a key, but not what its l2 norm makes of it: there the norm is left to the step, and rows keep
        # the key as it came.
        wide, normalised = torch.promote_types(q.dtype, torch.float32), call.get("use_qk_l2norm_in_kernel", False)
        spec = _spec(handle, recurrence, k, v, wide)
        if normalised and q.dtype == k.dtype != wide:
            spec = replace(spec, input_dtype=q.dtype, norm=gates.EPS)
        state = recurrent.layer(layer, spec)
        n, outputs = step.tokens - step.replayed, []
        if n:
            S0 = None if step.first else state.ckpt.to(wide).transpose(-1, -2).contiguous()
            o, S1 = call.first(n, DELTA_INPUTS, initial_state=S0, output_final_state=True)
            recurrent.seed(layer, S1.transpose(-1, -2))
            outputs.append(o)
        if step.replayed:
            q, k, v, g, beta = (x[:, n:] for x in (q, k, v, g, beta))
            if spec.norm is None:
                q, k = gates.delta_qk(q, k) if normalised else (q.to(wide) * q.shape[-1] ** -0.5, k.to(wide))
            outputs.append(recurrent.verify(layer, q, k, v, beta, g).to(call.get("query").dtype))
        recurrent.finish(layer, step)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1), handle

    return adapter


SCAN_INPUTS = ("hidden_states", "dt", "B", "C")


def mamba2_scan(handle: Handle, call: Call) -> Any:
    """Adapter of ``mamba2_chunk_scan``: several tokens."""
    call.refuse("seq_idx", "cu_seqlens", "z")
    x, dt, B, C = (call.get(name) for name in SCAN_INPUTS)
    recurrent, layer = handle.recurrent, handle.layer
    step = recurrent.plan(layer, x.shape[1], x.shape[0], x.device)
    state = recurrent.layer(layer, _spec(handle, MAMBA2, B, x, x.dtype))
    n, outputs = step.tokens - step.replayed, []
    if n:
        S0 = None if step.first else state.ckpt.to(state.w.dtype)
        o, S1 = call.first(n, SCAN_INPUTS, initial_states=S0, return_final_states=True)
        recurrent.seed(layer, S1)
        outputs.append(o)
    if step.replayed:
        # Models clamp dt in this function and not in the one-token one. Prompts are treated as they do; drafts, which
        # only a recording cache sees, as single tokens are, so that verifying a token is the same as decoding it.
        limit = call.get("dt_limit") if recurrent.options.exact_dt_limit or not recurrent.recording else None
        A, D = call.get("A"), call.get("D")
        bias, softplus = call.get("dt_bias"), call.get("dt_softplus", False)
        x, dt, B, C = (y[:, n:] for y in (x, dt, B, C))
        w = gates.mamba2_dt(dt, bias, softplus=softplus, limit=limit)
        o = _mamba2(handle, x, w, A, B, C)
        o = gates.mamba2_output(o, x, D)
        outputs.append(o.to(outputs[0].dtype) if outputs else o)
    recurrent.finish(layer, step)
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
    return (output, handle) if call.get("return_final_states", False) else output


def mamba2_update(handle: Handle, call: Call) -> Tensor:
    """Adapter of ``mamba2_selective_state_update``: one token, ``hidden_states [B, HV, V]``, with dt, A, D and dt_bias
    expanded over the head's channels."""
    x, dt, A, B, C, D, bias, z = (
        call.get(name) for name in ("hidden_states", "dt", "A", "B", "C", "D", "dt_bias", "z")
    )
    recurrent, layer = handle.recurrent, handle.layer
    step = recurrent.plan(layer, 1, x.shape[0], x.device)
    x1, B1, C1 = x[:, None], B[:, None], C[:, None]
    recurrent.layer(layer, _spec(handle, MAMBA2, B1, x1, x.dtype))
    limited = recurrent.options.exact_dt_limit or step.first  # a prompt of one token comes here too
    w = gates.mamba2_dt(
        dt[:, None, :, 0],
        None if bias is None else bias[:, 0],
        softplus=call.get("dt_softplus", False),
        limit=recurrent.dt_limits.get(layer) if limited else None,
    )
    o = _mamba2(handle, x1, w, A[:, 0, 0], B1, C1)
    recurrent.finish(layer, step)
    return gates.mamba2_output(o[:, 0], x, D, z)


def _mamba2(handle: Handle, x: Tensor, w: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """Read-out in at least float32 of tokens ``x [B, T, HV, V]`` with step sizes ``w [B, T, HV]``."""
    return handle.recurrent.verify(handle.layer, C, B, x.to(w.dtype), w, w * A.to(w.dtype))


def convolve(handle: ConvHandle, call: Call) -> Tensor:
    """Adapter of ``causal_conv1d_fn``: a step's inputs, recorded and convolved by the cache's window, or a tree's."""
    weight, bias, activation = (call.get(name) for name in ("weight", "bias", "activation"))
    if isinstance(handle, PathHandle):
        out = (handle.windows.to(weight.dtype) * weight[:, None]).sum(-1)
        out = out if bias is None else out + bias[:, None]
        return (out if activation is None else ACT2FN[activation](out)).to(handle.windows.dtype)
    refuse_gradient(handle.x, weight)
    if activation not in (None, "silu", "swish"):
        full = handle.window.extend(handle.x, handle.slots)
        return call.original(full, weight, bias, activation)[:, :, -handle.x.shape[2] :]
    return handle.window.convolve(handle.x, handle.slots, weight, bias, activation is not None)


ADAPTERS: dict[str, Callable[[Any, Call], Any]] = {
    "causal_conv1d_fn": convolve,
    "torch_chunk_gated_delta_rule": delta_rule(GDN),
    "torch_recurrent_gated_delta_rule": delta_rule(GDN),
    "chunk_kimi_delta_attention": delta_rule(KDA),
    "recurrent_kimi_delta_attention": delta_rule(KDA),
    "mamba2_chunk_scan": mamba2_scan,
    "mamba2_selective_state_update": mamba2_update,
}
