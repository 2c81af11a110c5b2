"""The plain recurrence: the state is read and written every step. The honest baseline, and what pays at small batch.

It is the fold of a pool built with ``fold_every=1``, run by the same kernels as replay: each step's fold absorbs the rows
that the step before committed, in the pass that reads the output. Traffic is that of any plain decode kernel, one read
and one write of the state, and rejected drafts still cost nothing.
"""

from __future__ import annotations

from torch import Tensor

from replayssm.backends import cpu, torch
from replayssm.layer import LayerState


def refuses(layer: LayerState) -> str | None:
    """Only pools that fold every step."""
    if layer.ring.limit > 0:
        return f"the pool folds every {layer.ring.limit + 1} rows; build it with fold_every=1"
    return None


def verify(
    layer: LayerState, q: Tensor, k: Tensor, v: Tensor, w: Tensor, g: Tensor, slots: Tensor, out: Tensor
) -> None:
    """See :func:`replayssm.ops.verify`."""
    (torch if cpu.refuses(layer) else cpu).verify(layer, q, k, v, w, g, slots, out)


def fold(layer: LayerState, slots: Tensor, n: Tensor) -> None:
    """See :func:`replayssm.ops.fold`."""
    (torch if cpu.refuses(layer) else cpu).fold(layer, slots, n)
