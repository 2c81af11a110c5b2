"""A layer's step as torch sees it: registered, with what it writes declared, so that ``torch.compile`` goes through it
without a graph break. :mod:`replayssm.ops` calls :func:`traced` while a graph is traced, and :func:`run` otherwise, for
the dispatcher costs more than a small step.

Importing this registers ``torch.ops.replayssm.verify``, which is all that it does."""

from __future__ import annotations

import torch
from torch import Tensor

from replayssm import checks
from replayssm.backends import choose
from replayssm.layer import LayerState
from replayssm.recurrence import Recurrence
from replayssm.ring import Ring, Scratch

_WRITTEN = ("out", "ckpt", "ring_k", "ring_d", "ring_w", "ring_g", "scratch")


@torch.library.custom_op("replayssm::verify", mutates_args=_WRITTEN)
def _verify(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, g: Tensor, slots: Tensor, out: Tensor,
    ckpt: Tensor, ring_k: Tensor, ring_d: Tensor, ring_w: Tensor, ring_g: Tensor, scratch: Tensor | None,
    head: Tensor, count: Tensor, R: int, window: int, limit: int, stagger: bool,
    channel: bool, erase: bool, folded: bool, backend: str,
) -> None:  # fmt: skip
    ring = Ring(head, count, R, window, limit, stagger, Scratch() if scratch is None else Scratch([scratch]))
    recurrence = Recurrence("channel" if channel else "head", erase)
    layer = LayerState(recurrence, ring, ckpt, ring_k, ring_d, ring_w, ring_g)
    run(layer, q, k, v, w, g, slots, out, folded, backend)


@_verify.register_fake
def _(*args: object) -> None:
    return None


def run(
    layer: LayerState, q: Tensor, k: Tensor, v: Tensor, w: Tensor, g: Tensor, slots: Tensor, out: Tensor,
    folded: bool, backend: str,
) -> None:  # fmt: skip
    """Checks, chooses the backend and calls it; see :func:`replayssm.ops.verify`."""
    checks.check_verify("verify", layer, q, k, v, w, g, slots, folded)
    checks.check_out("verify", out, v)
    if v.numel():
        choose(backend, layer).verify(layer, q, k, v, w, g, slots, out)
    elif slots.numel():  # no token, but the commit that ends the step takes a due fold as done
        head, count = layer.ring.at(slots)
        choose(backend, layer).fold(layer, slots, count * layer.ring.due(count, head))


def traced(
    layer: LayerState, q: Tensor, k: Tensor, v: Tensor, w: Tensor, g: Tensor, slots: Tensor, out: Tensor,
    folded: bool, backend: str,
) -> None:  # fmt: skip
    """:func:`run` as one node of a graph, checks included. Warm up once in eager mode, so that the
    scratch memory is there and no step allocates."""
    ring, recurrence = layer.ring, layer.recurrence
    torch.ops.replayssm.verify(
        q, k, v, w, g, slots, out, layer.ckpt, layer.k, layer.d, layer.w, layer.g,
        ring.scratch.buffers[-1] if ring.scratch.buffers else None,
        ring.head, ring.count, ring.R, ring.window, ring.limit, ring.stagger,
        recurrence.channel, recurrence.erase, folded, backend,
    )  # fmt: skip
