"""Bytes of recurrent state that one decode step of one sequence must move: by replay, and by the plain recurrence.

Counted from the tensors that a layer holds and the ring's fold predicate, for one new token a step and committed at
once. Left out because both sides move the same: the step's own inputs and output, and the convolution window.
"""

from __future__ import annotations

import torch
from torch import Tensor

from replayssm.layer import LayerState


def replay_bytes(layer: LayerState) -> float:
    """Mean bytes a token over a whole fold cycle of ``F = ring.limit + 1`` steps.

    Each step reads the checkpoint and the ring's committed rows and appends one row; one step in F, the one that finds
    F committed rows, also writes the checkpoint. Committed rows at a step run from 1 to F, (F + 1) / 2 on average::

        checkpoint * (1 + 1 / F) + row * ((F + 1) / 2 + 1)
    """
    F = layer.ring.limit + 1
    return _bytes(layer.ckpt[0]) * (1 + 1 / F) + row_bytes(layer) * ((F + 1) / 2 + 1)


def plain_bytes(layer: LayerState, dtype: torch.dtype = torch.float32) -> int:
    """Bytes a token of the plain recurrence with a state in ``dtype``: one read and one write of the whole state.

    That is the least a plain decode kernel can do. The torch code that transformers runs without such a kernel goes
    over the state about 14 times a token, and its cache adds a copy.
    """
    return 2 * layer.ckpt[0].numel() * dtype.itemsize


def row_bytes(layer: LayerState) -> int:
    """Bytes of one ring row, all heads: ``k``, ``d``, ``w`` and ``g``."""
    return sum(_bytes(x[0, :, 0]) for x in (layer.k, layer.d, layer.w, layer.g))


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
