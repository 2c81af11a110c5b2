"""A layer's step as torch sees it: registered, with what it writes declared, so that ``torch.compile`` goes through it
without a graph break. :mod:`replayssm.ops` calls :func:`traced` while a graph is traced, and :func:`run` otherwise, for
the dispatcher costs more than a small step.

Importing this registers ``torch.ops.replayssm.verify``, which is all that it does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from replayssm import checks
from replayssm.backends import choose, take_norm
from replayssm.layer import LayerState
from replayssm.recurrence import Decay, Recurrence
from replayssm.ring import Ring, Scratch


@torch.library.custom_op("replayssm::verify", mutates_args=("out", "memory", "scratch"))
def _verify(
    inputs: list[Tensor], out: Tensor, memory: list[Tensor], scratch: list[Tensor], cursors: list[Tensor],
    geometry: list[int], decay: str, flags: list[bool], norm: float, backend: str,
) -> None:  # fmt: skip
    """:func:`run` with what a schema can say of its arguments, filled in by :func:`traced`."""
    (head, count), (R, window, limit, most), (ckpt, k, d, w, g) = cursors, geometry, memory
    stagger, erase, folded = flags
    ring = Ring(head, count, R, window, limit, most, stagger, Scratch(scratch))
    layer = LayerState(Recurrence(cast(Decay, decay), erase), ring, ckpt, k, d, w, g, norm or None)
    run("verify", layer, inputs[:-1], inputs[-1], out, folded, backend)


@_verify.register_fake
def _(*args: object) -> None:
    return None


def run(
    op: str,
    layer: LayerState,
    inputs: Sequence[Tensor],
    slots: Tensor,
    out: Tensor,
    folded: bool,
    backend: str,
    parents: Tensor | None = None,
) -> None:
    """Checks, chooses the backend and calls it; see :func:`replayssm.ops.verify` and, with parents,
    :func:`replayssm.tree.verify_tree`. op: named in errors; inputs: q, k, v, w and g."""
    q, k, v, w, g = inputs
    checks.check_verify(op, layer, q, k, v, w, g, slots, folded)
    if parents is not None:
        checks.check_parents(op, parents, slots, v.shape[1])
    checks.check_out(op, out, v)
    chosen = choose(backend, layer, tree=parents is not None)
    if v.numel():
        q, k, v, w = take_norm(chosen, layer, q, k, v, w)
        if parents is None:
            chosen.verify(layer, q, k, v, w, g, slots, out)
        else:
            chosen.verify_tree(layer, q, k, v, w, g, slots, out, parents)
    elif slots.numel():  # no token, but the commit that ends the step takes a due fold as done
        head, count = layer.ring.at(slots)
        chosen.fold(layer, slots, count * layer.ring.due(count, head))


def traced(
    op: str, layer: LayerState, inputs: Sequence[Tensor], slots: Tensor, out: Tensor, folded: bool, backend: str
) -> None:
    """:func:`run` as one node of a graph, checks included. Warm up once in eager mode, so that the scratch memory is
    there and no step allocates."""
    ring, recurrence = layer.ring, layer.recurrence
    torch.ops.replayssm.verify(
        [*inputs, slots], out, list(layer.tensors.values()), ring.scratch.buffers[-1:], [ring.head, ring.count],
        [ring.R, ring.window, ring.limit, ring.most], recurrence.decay, [ring.stagger, recurrence.erase, folded],
        layer.norm or 0.0, backend,
    )  # fmt: skip
