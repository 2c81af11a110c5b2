"""What is chosen where nothing is asked for."""

from __future__ import annotations

import pytest
import torch

from replayssm import GDN, KDA, LayerSpec, Recurrence, StatePool, auto
from replayssm.auto import FOLD_EVERY, fold_every
from replayssm.backends import triton

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def spec(recurrence: Recurrence = GDN, dtype: torch.dtype = torch.float32) -> LayerSpec:
    return LayerSpec(recurrence, H=16, HV=64, K=128, V=128, state_dtype=dtype)  # 4.2 MB a sequence


def test_small_batches_on_a_gpu_run_the_plain_recurrence() -> None:
    cases = [(GDN, torch.float32, 1), (GDN, torch.bfloat16, 4), (KDA, torch.float32, 8), (KDA, torch.bfloat16, 8)]
    for recurrence, dtype, most in cases:
        assert fold_every(spec(recurrence, dtype), most, CUDA).tokens == 1
        assert fold_every(spec(recurrence, dtype), most + 1, CUDA).tokens == FOLD_EVERY


def test_on_a_cpu_replay_never_loses() -> None:
    assert fold_every(spec(), 1, CPU).tokens == FOLD_EVERY


def test_a_pool_is_its_own_plain_pool_where_that_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = StatePool(8)
    assert pool.at(1) is pool
    pool.add_layer(spec(KDA))
    assert pool.at(8) is pool, "never on a CPU"
    monkeypatch.setattr(auto, "fold_every", lambda spec, rows, device: fold_every(spec, rows, CUDA))
    plain = pool.at(8)
    assert plain is pool.at(2) is not pool is pool.at(9)
    assert plain.ring.limit == plain.layers[0].ring.limit == 0
    assert plain.layers[0].ckpt is pool.layers[0].ckpt and plain.ring.head is pool.ring.head
    assert "fold every 1: a layer's states take 34 MB; up to 34 MB" in pool.explain(8)
    assert "fold every 16" in pool.explain(9) and "backend: cpu" in pool.explain(9)


def test_the_reason_says_how_large_the_states_are() -> None:
    assert "take 2 MB; up to 9 MB" in fold_every(spec(dtype=torch.bfloat16), 1, CUDA).reason
    assert "take 1074 MB" in fold_every(spec(), 256, CUDA).reason
    assert "take 0.0041 MB" in fold_every(LayerSpec(GDN, 1, 1, 32, 32), 1, CPU).reason


def test_a_backend_with_several_ways_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "refuses", lambda layer: None)
    pool = StatePool(256, backend="triton")
    pool.add_layer(LayerSpec(GDN, 1, 1, 128, 128))
    assert "one launch: it reads 0 MB of states only" in pool.explain(2)
    assert "two launches: one alone serves one token" in pool.explain(2, T=4)
    plain = StatePool(1, fold_every=1, backend="triton")
    plain.add_layer(LayerSpec(KDA, 1, 1, 16, 16))
    assert "one launch: every step folds" in plain.explain(1)
