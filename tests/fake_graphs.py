"""A stand-in for CUDA graphs on a CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from replayssm.hf.captured import CapturedStep, signature


class FakeGraph:
    """In place of a CUDA graph, on a CPU: does again what was done when it was captured."""

    current: FakeGraph
    count = 0

    def __init__(self) -> None:
        FakeGraph.current, self.again = self, None

    def replay(self) -> None:
        FakeGraph.count += 1
        assert self.again is not None
        self.again()


@pytest.fixture
def fake_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures that run nothing, and replays that run the model with what was captured, whatever has changed since."""

    def capture(self: CapturedStep, cache: Any, leaves: list[Any], spec: Any) -> None:
        own = [x.clone() if isinstance(x, torch.Tensor) else x for x in leaves]
        self.turn, self.signature = cache.recurrent.turn, signature(self.forward.model)
        frozen = copy.deepcopy(self.forward.model)
        graph = FakeGraph()
        held: dict[str, Any] = {}

        def again() -> None:
            out = frozen(cache=cache, **torch.utils._pytree.tree_unflatten(own, spec))
            if not held:
                held.update({name: x for name, x in out.items() if x is not cache})
                self._type = type(out)
            else:
                held["logits"].copy_(out["logits"])

        graph.again = again
        self._inputs = [x for x in own if isinstance(x, torch.Tensor)]
        self._type, self._fields, self.graph = dict, held, graph  # pyright: ignore

    monkeypatch.setattr(CapturedStep, "_capture", capture)
