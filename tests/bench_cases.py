"""What the tests of ``replayssm bench`` share: tiny layers, a clock that stands still, no cache to outgrow."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from replayssm.bench import kernels, timing
from replayssm.bench.shapes import Case, Shape, make_case
from replayssm.bench.timing import Clock, Timed
from replayssm.recurrence import RECURRENCES

CPU = torch.device("cpu")
FAST = ["bench", "--quick", "--device", "cpu", "--backend", "torch", "--no-peers"]
TINY = [Shape(f"tiny {name}", recurrence, 2, 4, 32, 16, small=True) for name, recurrence in RECURRENCES.items()]


def case(shape: Shape = TINY[0], mode: str = "standard", B: int = 4, **options: Any) -> Case:
    return make_case(shape, mode, torch.float32, torch.float32, B, **options)


class Still(Clock):
    """A clock at which every run takes 2 ms, at 3 GB/s; it runs what it is given once."""

    def time(self, run: timing.Run) -> Timed:
        run()
        return Timed(2e-3, 3e9)

    def read_bandwidth(self) -> float:
        return 3e9


@pytest.fixture(name="quick")
def quick_fixture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny layers, no cache to outgrow, no measuring of memory."""
    monkeypatch.setattr("replayssm.bench.shapes.SHAPES", {shape.name: shape for shape in TINY})
    monkeypatch.setattr(kernels, "cache_bytes", lambda device: 0)
    monkeypatch.setattr(timing, "Clock", Still)
