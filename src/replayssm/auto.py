"""What is chosen where nothing was asked for, beside the backend: how often checkpoints are written."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from replayssm.layer import LayerSpec

FOLD_EVERY = 16


@dataclass(frozen=True)
class FoldEvery:
    """Tokens between two writes of a checkpoint, 1 for the plain recurrence, and why."""

    tokens: int
    reason: str


def fold_every(spec: LayerSpec, rows: int, device: torch.device) -> FoldEvery:
    """For steps of one token of ``rows`` sequences that are never rolled back.

    On a GPU the plain recurrence is one launch of few instructions, and while a layer's states take few bytes that is
    what counts: up to 5 MB, or 9 MB of 16 bits, and with a decay by channel up to 34 MB, or 17 MB of 16 bits (H200,
    docs/log.md)."""
    bits = spec.state_dtype.itemsize * 8
    states = rows * spec.HV * spec.V * spec.K * bits / 8e6
    size = f"{states:.0f}" if states >= 1 else f"{states:.2g}"
    least = {(False, 32): 5, (False, 16): 9, (True, 32): 34, (True, 16): 17}.get((spec.recurrence.channel, bits), 0)
    if device.type == "cuda" and states <= least:
        return FoldEvery(
            1, f"a layer's states take {size} MB; up to {least} MB the plain recurrence is faster on a GPU"
        )
    return FoldEvery(FOLD_EVERY, f"a layer's states take {size} MB, which are written once in {FOLD_EVERY} tokens")
