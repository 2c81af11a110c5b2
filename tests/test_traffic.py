"""Bytes that a step must move, against the cursors of a pool that really decodes."""

from __future__ import annotations

import pytest
import torch

from replayssm import GDN, KDA, MAMBA2, LayerSpec, Recurrence, StatePool
from replayssm.traffic import plain_bytes, replay_bytes, row_bytes


@pytest.mark.parametrize("recurrence", [MAMBA2, GDN, KDA], ids=lambda r: r.name)
@pytest.mark.parametrize("fold_every", [1, 2, 7, 16])
def test_replay_bytes_is_the_mean_of_a_fold_cycle(recurrence: Recurrence, fold_every: int) -> None:
    pool = StatePool(1, fold_every=fold_every)
    layer = pool.add_layer(LayerSpec(recurrence, H=1, HV=2, K=8, V=4, state_dtype=torch.bfloat16))
    slots, moved = pool.alloc(1), []
    checkpoint = 2 * 4 * 8 * 2
    for _ in range(4 * fold_every + 1):
        count = pool.ring.count[slots.long()]
        written = checkpoint if bool(pool.ring.due(count, pool.ring.head[slots.long()])) else 0
        moved.append(checkpoint + written + (int(count) + 1) * row_bytes(layer))
        pool.commit(slots, 1)
    cycle = moved[-fold_every:]  # the first step finds an empty ring and belongs to no cycle
    assert sum(cycle) / fold_every == pytest.approx(replay_bytes(layer))


def test_rows_and_states_of_each_recurrence() -> None:
    def layer(recurrence: Recurrence):
        return StatePool(1).add_layer(LayerSpec(recurrence, H=1, HV=2, K=8, V=4, input_dtype=torch.bfloat16))

    assert row_bytes(layer(MAMBA2)) == 8 * 2 + 2 * 4 * 2 + 2 * 4 + 2 * 4  # k and v as the inputs, w and g float32
    assert row_bytes(layer(GDN)) == 8 * 2 + 2 * 4 * 4 + 2 * 4 + 2 * 4  # d is computed: float32
    assert row_bytes(layer(KDA)) == 8 * 2 + 2 * 4 * 4 + 2 * 4 + 2 * 8 * 4  # and g is per channel
    assert plain_bytes(layer(GDN)) == 2 * 2 * 4 * 8 * 4
    assert plain_bytes(layer(GDN), torch.bfloat16) == 2 * 2 * 4 * 8 * 2


def test_the_figures_of_the_design_page() -> None:
    def share(recurrence: Recurrence) -> float:
        layer = StatePool(1).add_layer(LayerSpec(recurrence, H=1, HV=1, K=128, V=128))
        return round(replay_bytes(layer) / plain_bytes(layer), 2)

    assert share(GDN) == 0.61 and share(KDA) == 0.64
