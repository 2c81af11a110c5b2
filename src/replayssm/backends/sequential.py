"""The plain recurrence: the state is read and written every step. The honest baseline, and what pays at small batch.

It is the fold of a pool built with ``fold_every=1``, run by the same kernels as replay: each step's fold absorbs the
rows that the step before committed, in the pass that reads the output. Traffic is that of any plain decode kernel, one
read and one write of the state, and rejected drafts still cost nothing.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from replayssm.backends import cpu, torch, triton
from replayssm.layer import LayerState


def refuses(layer: LayerState) -> str | None:
    """Only pools that fold every step."""
    if layer.ring.limit > 0:
        return f"the pool folds every {layer.ring.limit + 1} rows; build it with fold_every=1"
    return None


def normalises(layer: LayerState) -> bool:
    """As the kernels that serve the layer."""
    return _kernels(layer) is triton


def verify(
    layer: LayerState, q: Tensor, k: Tensor, v: Tensor, w: Tensor, g: Tensor, slots: Tensor, out: Tensor
) -> None:
    """See :func:`replayssm.ops.verify`."""
    _kernels(layer).verify(layer, q, k, v, w, g, slots, out)


def fold(layer: LayerState, slots: Tensor, n: Tensor) -> None:
    """See :func:`replayssm.ops.fold`."""
    _kernels(layer).fold(layer, slots, n)


def _kernels(layer: LayerState) -> ModuleType:
    """The first of the kernels that serves the layer, in the order of preference of ``"auto"``."""
    return cpu if cpu.refuses(layer) is None else triton if triton.refuses(layer) is None else torch
