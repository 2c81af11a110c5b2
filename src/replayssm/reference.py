"""The oracle: the recurrence and its replay in plain torch loops, any dtype (float64 for tests). Never optimised.

Nothing here is shared with the backends except the shapes and :meth:`Ring.due`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from replayssm.layer import LayerState
from replayssm.recurrence import Recurrence


def token_ref(
    recurrence: Recurrence, S: Tensor, q: Tensor, k: Tensor, v: Tensor, w: Tensor, g: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One token of one value head: ``S [V, K]``, ``q, k [K]``, ``v [V]``, ``w`` scalar, ``g`` scalar or ``[K]``.

    Returns the new state, the output ``[V]`` and the written ``d [V]``. The four lines of the package's docstring.
    """
    S = S * torch.exp(g)
    d = v - S @ k if recurrence.erase else v
    S = S + w * torch.outer(d, k)
    return S, S @ q, d


def recurrence_ref(
    recurrence: Recurrence, S: Tensor, q: Tensor, k: Tensor, v: Tensor, w: Tensor, g: Tensor
) -> tuple[Tensor, Tensor]:
    """The plain recurrence over ``T`` tokens.

    ``S [B, HV, V, K]``; ``q, k [B, T, H, K]``; ``v [B, T, HV, V]``; ``w [B, T, HV]``; ``g [B, T, HV]`` or
    ``[B, T, HV, K]``. Arithmetic in v's dtype, the state rounded to S's dtype after every token, as an engine that
    keeps it in that dtype does. Returns ``o [B, T, HV, V]`` and the last state.
    """
    B, T, HV, _ = v.shape
    group = HV // k.shape[2]
    state, out = S.clone(), torch.zeros_like(v)
    for b in range(B):
        for h in range(HV):
            for t in range(T):
                S_new, out[b, t, h], _ = token_ref(
                    recurrence, state[b, h].to(v.dtype), q[b, t, h // group], k[b, t, h // group], v[b, t, h],
                    w[b, t, h], g[b, t, h],
                )  # fmt: skip
                state[b, h] = S_new.to(S.dtype)
    return out, state


def live_state_ref(layer: LayerState, slot: int, n: int | None = None) -> Tensor:
    """The state ``[HV, V, K]`` of a slot after its first ``n`` committed rows (all by default), in wide dtype."""
    head, count = int(layer.ring.head[slot]), int(layer.ring.count[slot])
    group, wide = layer.HV // layer.H, layer.w.dtype
    S = layer.ckpt[slot].to(wide).clone()
    for h in range(layer.HV):
        for i in range(count if n is None else n):
            row = (head + i) % layer.ring.R
            k, d = layer.k[slot, h // group, row].to(wide), layer.d[slot, h, row].to(wide)
            S[h] = S[h] * torch.exp(layer.g[slot, h, row]) + layer.w[slot, h, row] * torch.outer(d, k)
    return S


def verify_ref(layer: LayerState, q: Tensor, k: Tensor, v: Tensor, w: Tensor, g: Tensor, slots: Tensor) -> Tensor:
    """What ``ops.verify`` does, row by row and token by token; same shapes, same effects on ``layer``."""
    wide, R, group = layer.w.dtype, layer.ring.R, layer.HV // layer.H
    out, unit = torch.zeros_like(v), torch.ones(k.shape[:3], dtype=wide)
    if layer.norm is not None:
        unit = 1 / torch.sqrt((k.to(wide) ** 2).sum(-1) + layer.norm)
        q = q.to(wide) / torch.sqrt((q.to(wide) ** 2).sum(-1, keepdim=True) + layer.norm) / layer.K**0.5
    for b, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        head, count = int(layer.ring.head[slot]), int(layer.ring.count[slot])
        state = live_state_ref(layer, slot)
        if layer.ring.due(layer.ring.count[slot], head):
            layer.ckpt[slot] = state.to(layer.ckpt.dtype)
        for t in range(v.shape[1]):
            row = (head + count + t) % R
            for h in range(layer.HV):
                r = unit[b, t, h // group]
                S, o, d = token_ref(
                    layer.recurrence, state[h], q[b, t, h // group].to(wide), r * k[b, t, h // group].to(wide),
                    v[b, t, h].to(wide), w[b, t, h].to(wide), g[b, t, h].to(wide),
                )  # fmt: skip
                state[h], out[b, t, h] = S, o.to(out.dtype)
                layer.k[slot, h // group, row] = k[b, t, h // group].to(layer.k.dtype)
                layer.d[slot, h, row] = d.to(layer.d.dtype)
                layer.w[slot, h, row], layer.g[slot, h, row] = r * w[b, t, h].to(wide), g[b, t, h].to(wide)
    return out


def fold_ref(layer: LayerState, slots: Tensor, n: Tensor) -> None:
    """The checkpoint of each slot absorbs its first ``n [B]`` committed rows; the cursors are left to the caller."""
    for slot, rows in zip(slots.tolist(), n.tolist(), strict=True):
        if slot >= 0:
            layer.ckpt[slot] = live_state_ref(layer, slot, rows).to(layer.ckpt.dtype)
