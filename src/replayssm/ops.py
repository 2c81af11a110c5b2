"""Public ops over the memory of a layer or of all layers of a model: validate, choose the backend, call it.

One step of decoding is, for each layer, :func:`verify` (``T = 1``: plain decoding), then one :func:`commit`. What is not
committed is rolled back by doing nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from replayssm import checks
from replayssm.backends import choose
from replayssm.layer import LayerState
from replayssm.ring import Ring


def verify(
    layer: LayerState,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    g: Tensor,
    *,
    slots: Tensor,
    out: Tensor | None = None,
    folded: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Appends ``T`` new tokens as draft rows and reads their outputs from checkpoint and ring.

    Equivalent, from the state after the committed rows, to ``T`` times::

        S = S * exp(g);  d = v - S @ k  (erase)  or  v;  S = S + w * outer(d, k);  o = S @ q

    q, k: ``[B, T, H, K]``; v: ``[B, T, HV, V]``; w: ``[B, T, HV]``; g: ``[B, T, HV]`` or, decay by channel,
    ``[B, T, HV, K]``, never positive. Any float dtypes and strides. slots: int32 ``[B]``, each at most once; ``< 0`` is
    padding: nothing is written for that row and its output is 0.
    out: ``[B, T, HV, V]`` like v, written and returned; allocated if None.
    folded: the caller has just folded these slots (:func:`fold`), so up to ``R - window`` tokens fit; otherwise
    ``window`` do.
    backend: ``"auto"`` or a name from :func:`replayssm.backends.names`; ``explain`` says what auto takes and why.

    Where the ring's fold is due, the layer's checkpoint also absorbs the committed rows. Cursors move only in
    :func:`commit`, once for all layers. Raises ValueError or TypeError on a wrong shape, dtype, device or slot.
    """
    room = layer.ring.R - layer.ring.window if folded else layer.ring.window
    checks.check_verify("verify", layer, q, k, v, w, g, slots, room)
    if out is None:
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
    else:
        checks.check_out("verify", out, v)
    if v.numel():
        choose(backend, layer).verify(layer, q, k, v, w, g, slots, out)
    return out


def decode(
    layer: LayerState,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    g: Tensor,
    *,
    slots: Tensor,
    backend: str = "auto",
) -> Tensor:
    """:func:`verify` of one token a row, without the ``T`` dimension: q, k ``[B, H, K]``; v ``[B, HV, V]``; w
    ``[B, HV]``; g ``[B, HV]`` or ``[B, HV, K]``. Returns ``[B, HV, V]``. Call :func:`commit` with 1 after all layers.
    """
    for name, x, dims in (("q", q, 3), ("k", k, 3), ("v", v, 3), ("w", w, 2)):
        if x.dim() != dims:
            raise ValueError(f"decode: {name} must have {dims} dimensions; got {name}.shape={tuple(x.shape)}")
    q, k, v, w, g = (x.unsqueeze(1) for x in (q, k, v, w, g))
    checks.check_verify("decode", layer, q, k, v, w, g, slots, layer.ring.window)
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    if v.numel():
        choose(backend, layer).verify(layer, q, k, v, w, g, slots, out)
    return out[:, 0]


def commit(ring: Ring, slots: Tensor, accepted: Tensor | int) -> None:
    """Ends a step for all layers at once: ``accepted`` of the step's draft rows (one int, or ``[B]``; 0..T, the bonus
    token included) become committed. To be called once, after every layer's :func:`verify`, with the same slots."""
    checks.check_slots("commit", slots, ring.N, ring.head.device)
    checks.check_accepted(slots, accepted, ring.R - ring.window)
    ring.commit(slots, accepted)


def seed(layer: LayerState, state: Tensor, slots: Tensor) -> None:
    """Writes states ``[B, HV, V, K]`` (any float dtype) as the checkpoints of ``slots``, whose rings must be empty."""
    checks.check_state("seed", layer, state, slots)
    keep = slots >= 0 if bool(slots.device.type == "cpu") else None
    if keep is not None and not bool(keep.all()):
        slots, state = slots[keep], state[keep]
    layer.ckpt[slots.long()] = state.to(layer.ckpt.dtype)


def fold(layers: Sequence[LayerState], slots: Tensor, n: Tensor | int | None = None, backend: str = "auto") -> None:
    """Every layer's checkpoint absorbs the first ``n`` committed rows of ``slots`` (all of them by default).

    ``n``: one int or integers ``[B]``, at most the committed rows. Between steps only, as it moves the cursors."""
    checks.check_rows("fold", layers, slots, 0 if n is None else n)
    ring = layers[0].ring
    rows = ring.at(slots)[1] if n is None else torch.as_tensor(n, device=slots.device).expand(slots.shape)
    if slots.numel() == 0:
        return
    for layer in layers:
        choose(backend, layer).fold(layer, slots, rows)
    ring.absorb(slots, rows)


def copy(layers: Sequence[LayerState], src: Tensor, dst: Tensor) -> None:
    """``dst`` slots become copies of ``src`` slots (both int32 ``[B]``; a source may come more than once)."""
    checks.check_rows("copy", layers, dst, 0)
    if src.shape != dst.shape or src.dtype != torch.int32:
        raise TypeError(f"copy: src must be int32 of shape {tuple(dst.shape)}; got {src.dtype} {tuple(src.shape)}")
    checks.check_slots("copy", src.unique(), layers[0].ring.N, dst.device)
    for layer in layers:
        for x in layer.tensors.values():
            x[dst.long()] = x[src.long()]
    layers[0].ring.copy(src, dst)


def reset(layers: Sequence[LayerState], slots: Tensor) -> None:
    """``slots`` start anew: zero checkpoint, empty ring. Ring rows are left as they are; no dead row is ever read."""
    checks.check_rows("reset", layers, slots, 0)
    for layer in layers:
        layer.ckpt[slots.long()] = 0
    layers[0].ring.reset(slots)


def rewind(layers: Sequence[LayerState], slots: Tensor, n: Tensor | int) -> None:
    """Takes the last ``n`` committed tokens of ``slots`` back, as long as they are still in the ring."""
    checks.check_rows("rewind", layers, slots, n)
    layers[0].ring.rewind(slots, n)
