"""Draft trees: several guesses a position, verified in one call on the same ring.

A node's parent is an earlier node of the call, or -1 for the committed text itself. Node ``t`` sees the checkpoint, the
committed rows and its ancestors, so decays add up along its path. A chain is the tree with parents ``-1, 0, 1, ..``.
Draft rows lie in the ring in the order of the nodes; :func:`commit_path` moves those of one path together, so
that the rows which stay are as contiguous as after a chain.

In a kernel a path is walked from its node to the root: what a chain reads token by token from the last one back, a node
of a tree reads where the token is its ancestor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from replayssm import checks, library, ops
from replayssm.conv import ConvWindow
from replayssm.layer import LayerState
from replayssm.ring import without_padding


@torch.no_grad()
def verify_tree(
    layer: LayerState,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    g: Tensor,
    parents: Tensor,
    *,
    slots: Tensor,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """:func:`replayssm.ops.verify` of a tree of ``T`` nodes a row: same inputs, same outputs ``[B, T, HV, V]``.

    parents: int64 ``[B, T]``, ``-1 <= parents[b, t] < t``; the range is checked on the CPU only. As after ``verify``, a
    commit must follow: :func:`commit_path`, or ``ops.commit`` of 0. backend: ``"auto"``, ``"triton"`` or ``"torch"``;
    ``explain(layer, tree=True)`` says what auto takes. Raises ValueError or TypeError on a wrong shape, dtype, device,
    slot, parent or backend.
    """
    out = torch.empty_like(v, memory_format=torch.contiguous_format) if out is None else out
    library.run("verify_tree", layer, (q, k, v, w, g), slots, out, False, backend, parents)
    return out


def tree_windows(before: Tensor, new: Tensor, parents: Tensor) -> Tensor:
    """The convolution's inputs of each node, its own last: ``[B, channels, T, W]``, from those before the tree,
    ``before [B, channels, W - 1]``, and those of its nodes, ``new [B, channels, T]``."""
    B, channels, past = before.shape
    T, device = new.shape[2], new.device
    # Position p of [before, new] comes after position up[p]; the oldest has nothing before it that is asked for.
    chain = torch.arange(-1, past - 1, device=device).clamp(min=0).expand(B, past)
    up = torch.cat([chain, torch.where(parents < 0, past - 1, parents + past)], 1)
    at = torch.arange(past, past + T, device=device).expand(B, T)
    path = [at]
    for _ in range(past):
        path.append(up.gather(1, path[-1]))
    index = torch.stack(path[::-1], 2).view(B, 1, -1).expand(-1, channels, -1)
    return torch.cat([before, new], 2).gather(2, index).view(B, channels, T, past + 1)


def extend_tree(conv: ConvWindow, new: Tensor, parents: Tensor, slots: Tensor) -> Tensor:
    """:meth:`ConvWindow.extend` of the nodes ``new [B, channels, T]``; returns :func:`tree_windows` of them."""
    full = conv.extend(new, slots)
    past = conv.width - 1
    return tree_windows(full[..., :past], full[..., past:], parents)


@torch.no_grad()
def commit_path(
    layers: Sequence[LayerState], path: Tensor, accepted: Tensor, slots: Tensor, convs: Sequence[ConvWindow] = ()
) -> None:
    """Ends a step that verified a tree: the first ``accepted [B]`` nodes of ``path [B, P]`` become committed rows.

    path: int64, the numbers of nodes from a child of the root on, each the parent of the next, anything beyond a row's
    ``accepted``. That they ascend is checked on the CPU only, that they are a path not at all. Called once, for all
    layers and convolution windows of a pool. Raises ValueError or TypeError.
    """
    checks.check_rows("commit_path", layers, slots, 0)
    ring = layers[0].ring
    checks.check_accepted(ring, slots, accepted)
    checks.check_path("commit_path", path, accepted, slots, ring.window)
    if path.numel():
        end = torch.stack(ring.at(slots)).sum(0)[:, None]
        step = torch.arange(path.shape[1], device=path.device)
        # What is not accepted stays where it is.
        source = torch.where((step < accepted[:, None]) & (slots >= 0)[:, None], path, step)
        for layer in layers:
            for x in (layer.k, layer.d, layer.w, layer.g):
                move_columns(x, 2, slots, (end + source) % ring.R, (end + step) % ring.R)
        for conv in convs:
            C = conv.x.shape[2]
            move_columns(conv.x, 2, slots, (end + source) % C, (end + step) % C)
    ops.commit(ring, slots, accepted)


def move_columns(x: Tensor, dim: int, slots: Tensor, source: Tensor, target: Tensor) -> None:
    """In the rows ``slots [B]`` of ``x``, column ``target[b, i]`` of dimension ``dim`` becomes what ``source[b, i]``
    was. Padding rows repeat the first real row's write."""
    rows, index, _, alive = without_padding(slots)
    x = x.movedim(dim, 1)
    index = index[:, None]
    old = torch.where(alive[:, None], source[rows], target[rows])
    x[index, target[rows]] = x[index, old]
