"""Portable backend: replay as a few matrix products in plain torch. Any device, no host synchronisation off the CPU.

Every read, for the query and with erase for the key as well, is

    read(x) = S0 (exp(G_0) x) + sum_i w_i d_i <k_i, exp(G_i) x>

over ring rows and the step's own tokens up to the reading one, where G sums the log-decays after the row (from the
checkpoint on for G_0). Sums are suffix or segment sums of non-positive numbers, so only exponentials <= 1 are formed.
docs/math.md derives it. Below, X stands for T, or 2T where the keys are read too; "~" for 1 or K.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from replayssm.layer import LayerState
from replayssm.ring import without_padding


def refuses(layer: LayerState) -> str | None:
    """Serves every layer."""
    return None


def verify(
    layer: LayerState, q: Tensor, k: Tensor, v: Tensor, w: Tensor, g: Tensor, slots: Tensor, out: Tensor
) -> None:
    """See :func:`replayssm.ops.verify`."""
    _verify_along(layer, (q, k, v, w, g), slots, out, lambda g, rows: (g.cumsum(2), _segments(g)))


def verify_tree(
    layer: LayerState, q: Tensor, k: Tensor, v: Tensor, w: Tensor, g: Tensor, slots: Tensor, out: Tensor,
    parents: Tensor,
) -> None:  # fmt: skip
    """See :func:`replayssm.tree.verify_tree`."""
    _verify_along(layer, (q, k, v, w, g), slots, out, lambda g, rows: _paths(g, parents[rows]))


def _verify_along(
    layer: LayerState,
    inputs: Sequence[Tensor],
    slots: Tensor,
    out: Tensor,
    along: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
) -> None:
    """:func:`verify` of tokens in an order of their own. along: from g ``[B, HV, T, ~]`` and the rows ``[B]`` of the
    call that it is of, its sums from the ring on ``[B, HV, T, ~]`` and between tokens as of :func:`_segments`."""
    rows, slots, pad, alive = without_padding(slots)
    head, count = layer.ring.at(slots)
    q, k, v, w, g = (x[rows].to(layer.w.dtype).transpose(1, 2) for x in inputs)  # [B, heads, T, ..]
    channel, erase, T = layer.recurrence.channel, layer.recurrence.erase, v.shape[2]
    g = g if channel else g[..., None]  # [B, HV, T, ~]
    past = _history(layer, slots, head, count)
    S0 = _gather(layer.ckpt, slots).to(layer.w.dtype)

    sums, segments = along(g, rows)
    x = q
    if erase:
        x, sums, segments = torch.cat([q, k], 2), torch.cat([sums, sums], 2), torch.cat([segments, segments], 2)
    old = _read_state(layer, S0, x, sums + past.total)  # [B, HV, X, V]
    old = old + (_scores(layer, x, past.k, sums, past.after) * past.w[:, :, None]) @ past.d
    near = _scores_near(layer, x, k, segments) * w[:, :, None]  # [B, HV, X, T], zero above the diagonal
    d = v
    if erase:
        # d_t = v_t - old_t - sum_{j<t} near_tj d_j: unit lower triangular, whose diagonal the solver does not read.
        d = v - old[:, :, T:]
        if T > 1:
            d = torch.linalg.solve_triangular(near[:, :, T:], d, upper=False, unitriangular=True)
    o = (old[:, :, :T] + near[:, :, :T] @ d).transpose(1, 2)
    out.copy_(torch.where(pad[:, None, None, None], 0, o))
    _write_fold(layer, slots, alive & layer.ring.due(count, head), S0, past)  # last: S0 may be a view of the checkpoint
    _append(layer, slots, alive, head + count, k, d, w, g)


def fold(layer: LayerState, slots: Tensor, n: Tensor) -> None:
    """See :func:`replayssm.ops.fold`; the cursors are moved by the caller."""
    rows, slots, _, alive = without_padding(slots)
    head, _ = layer.ring.at(slots)
    n = n[rows].long()
    S0 = _gather(layer.ckpt, slots).to(layer.w.dtype)
    _write_fold(layer, slots, alive & (n > 0), S0, _history(layer, slots, head, n))


class _History(NamedTuple):
    """Ring rows in logical order, dead ones zeroed. k [B, H, R, K], d [B, HV, R, V], w [B, HV, R]; ``after``
    [B, HV, R, ~] sums the log-decays of the rows after each, ``total`` [B, HV, 1, ~] of all."""

    k: Tensor
    d: Tensor
    w: Tensor
    after: Tensor
    total: Tensor


def _gather(x: Tensor, slots: Tensor) -> Tensor:
    """``x[slots]``, as a view where the slots are consecutive and can be looked at for free."""
    if slots.device.type == "cpu":
        first, B = int(slots[0]), slots.numel()
        if torch.equal(slots, torch.arange(first, first + B)):
            return x[first : first + B]
    return x[slots]


def _history(layer: LayerState, slots: Tensor, head: Tensor, n: Tensor) -> _History:
    """The first ``n [B]`` rows of each slot's ring."""
    i = torch.arange(layer.ring.R, device=slots.device)
    row = (head[:, None] + i) % layer.ring.R
    live = i < n[:, None]  # [B, R]

    def load(x: Tensor) -> Tensor:
        x = x[slots[:, None], :, row].to(layer.w.dtype)  # [B, R, heads, ..]
        return torch.where(live.view(*live.shape, *[1] * (x.dim() - 2)), x, 0).transpose(1, 2)

    g = load(layer.g)
    g = g if layer.recurrence.channel else g[..., None]
    from_row = g.flip(2).cumsum(2).flip(2)
    after = torch.cat([from_row[:, :, 1:], torch.zeros_like(from_row[:, :, :1])], 2)
    return _History(load(layer.k), load(layer.d), load(layer.w), after, from_row[:, :, :1])


def _segments(g: Tensor) -> Tensor:
    """``[B, HV, T, T, ~]``: entry (t, j) sums g ``[B, HV, T, ~]`` over the tokens j+1 .. t; -inf above the diagonal."""
    T = g.shape[2]
    t = torch.arange(T, device=g.device)
    later = (t[:, None] > t)[..., None]  # (l, j): l comes after j
    sums = torch.where(later, g[:, :, :, None], 0).cumsum(2)
    return sums.masked_fill((t[:, None] < t)[..., None], float("-inf"))


def _paths(g: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of ``g [B, HV, T, ~]`` along paths: from the root to each node, ``[B, HV, T, ~]``; and ``[B, HV, T, T, ~]``,
    entry (t, j) over the nodes after j down to t, -inf unless j is an ancestor of t or t itself."""
    B, T = parents.shape
    row = torch.arange(B, device=g.device)
    sums = torch.zeros_like(g)
    segments = torch.full((*g.shape[:3], T, g.shape[3]), float("-inf"), dtype=g.dtype, device=g.device)
    for t in range(T):
        up, root = parents[:, t].clamp(min=0), (parents[:, t] < 0)[:, None, None]
        sums[:, :, t] = torch.where(root, 0, sums[row, :, up]) + g[:, :, t]
        above = torch.where(root[..., None], float("-inf"), segments[row, :, up])
        segments[:, :, t] = above + g[:, :, t, None]
        segments[:, :, t, t] = 0
    return sums, segments


def _per_value_head(layer: LayerState, x: Tensor) -> Tensor:
    """``[B, H, ..] -> [B, HV, ..]``: each key head serves consecutive value heads."""
    return x if layer.H == layer.HV else x.repeat_interleave(layer.HV // layer.H, 1)


def _scores(layer: LayerState, x: Tensor, k: Tensor, sums: Tensor, after: Tensor) -> Tensor:
    """``[B, HV, X, R]``: <k_i, exp(G_i) x> of ring rows, where G_i = after_i + sums_x."""
    if layer.recurrence.channel:
        x, k = _per_value_head(layer, x) * sums.exp(), _per_value_head(layer, k) * after.exp()
        return x @ k.transpose(-1, -2)
    return _per_value_head(layer, x @ k.transpose(-1, -2)) * (sums + after.transpose(-1, -2)).exp()


def _scores_near(layer: LayerState, x: Tensor, k: Tensor, segments: Tensor) -> Tensor:
    """``[B, HV, X, T]``: the same among the tokens of this step. exp(G) does not factor over channels without forming
    exponentials > 1, so there the sum over K is taken directly."""
    if layer.recurrence.channel:
        x, k = _per_value_head(layer, x), _per_value_head(layer, k)
        return torch.einsum("bhxk,bhjk,bhxjk->bhxj", x, k, segments.exp())
    return _per_value_head(layer, x @ k.transpose(-1, -2)) * segments[..., 0].exp()


def _read_state(layer: LayerState, S0: Tensor, x: Tensor, sums: Tensor) -> Tensor:
    """``[B, HV, X, V]``: S0 (exp(G_0) x), with G_0 = sums."""
    if layer.recurrence.channel:
        return (_per_value_head(layer, x) * sums.exp()) @ S0.transpose(-1, -2)
    B, H, X, K = x.shape
    y = x @ S0.reshape(B, H, -1, K).transpose(-1, -2)  # all value heads of a key head in one product
    return y.view(B, H, X, layer.HV // H, layer.V).transpose(2, 3).reshape(B, layer.HV, X, layer.V) * sums.exp()


def _write_fold(layer: LayerState, slots: Tensor, where: Tensor, S0: Tensor, past: _History) -> None:
    """Checkpoint of the rows ``where``: S0 exp(total) + sum_i w_i d_i (exp(after_i) k_i)^T."""
    if slots.device.type == "cpu":  # the choice of rows costs no synchronisation here; elsewhere all are written
        keep = where.nonzero().flatten()
        if keep.numel() == 0:
            return
        slots, where, S0, past = slots[keep], where[keep], S0[keep], _History(*(x[keep] for x in past))
    k = _per_value_head(layer, past.k) * past.after.exp()
    S1 = S0 * past.total.exp() + (past.d * past.w[..., None]).transpose(-1, -2) @ k
    layer.ckpt[slots] = torch.where(where[:, None, None, None], S1, S0).to(layer.ckpt.dtype)


def _append(
    layer: LayerState, slots: Tensor, alive: Tensor, end: Tensor, k: Tensor, d: Tensor, w: Tensor, g: Tensor
) -> None:
    """Writes draft rows from physical row ``end [B]`` on."""
    row = (end[:, None] + torch.arange(k.shape[2], device=slots.device)) % layer.ring.R
    g = g if layer.recurrence.channel else g[..., 0]
    for ring, x in ((layer.k, k), (layer.d, d), (layer.w, w), (layer.g, g)):
        new = x.transpose(1, 2).to(ring.dtype)
        kept = ring[slots[:, None], :, row]
        ring[slots[:, None], :, row] = torch.where(alive.view(-1, *[1] * (new.dim() - 1)), new, kept)
