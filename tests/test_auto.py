"""What is chosen where nothing is asked for."""

from __future__ import annotations

import torch

from replayssm import GDN, KDA, LayerSpec, Recurrence
from replayssm.auto import FOLD_EVERY, fold_every

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def spec(recurrence: Recurrence = GDN, dtype: torch.dtype = torch.float32) -> LayerSpec:
    return LayerSpec(recurrence, H=16, HV=64, K=128, V=128, state_dtype=dtype)  # 4.2 MB a sequence


def test_small_batches_on_a_gpu_run_the_plain_recurrence() -> None:
    cases = [(GDN, torch.float32, 4), (GDN, torch.bfloat16, 8), (KDA, torch.float32, 11), (KDA, torch.bfloat16, 23)]
    for recurrence, dtype, most in cases:
        assert fold_every(spec(recurrence, dtype), most, CUDA).tokens == 1
        assert fold_every(spec(recurrence, dtype), most + 1, CUDA).tokens == FOLD_EVERY


def test_on_a_cpu_replay_never_loses() -> None:
    assert fold_every(spec(), 1, CPU).tokens == FOLD_EVERY


def test_the_reason_says_how_large_the_states_are() -> None:
    assert "take 4 MB; up to 17 MB" in fold_every(spec(), 1, CUDA).reason
    assert "take 1074 MB" in fold_every(spec(), 256, CUDA).reason
