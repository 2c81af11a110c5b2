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

    On a GPU replay takes two launches and the plain recurrence one, so that it is the faster while a layer's states
    take few bytes: up to 17 MB, or 50 MB with a decay by channel (H200, benchmarks/results/h200-kernels.json: at 17 MB
    replay has 0.88 to 1.16 of its speed, at 34 MB 1.17 to 1.42; by channel 0.98 at 34 MB, 1.22 at 67 MB)."""
    states = rows * spec.HV * spec.V * spec.K * spec.state_dtype.itemsize / 1e6
    least = 50 if spec.recurrence.channel else 17
    if device.type == "cuda" and states <= least:
        return FoldEvery(
            1, f"a layer's states take {states:.0f} MB; up to {least} MB the plain recurrence is faster on a GPU"
        )
    return FoldEvery(
        FOLD_EVERY, f"a layer's states take {states:.0f} MB, which are written once in {FOLD_EVERY} tokens"
    )
