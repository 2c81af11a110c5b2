"""What the tests share: a pool beside its oracle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from replayssm import LayerSpec, StatePool, ops
from replayssm.backends import load
from replayssm.recurrence import Recurrence
from replayssm.testing import Inputs, Oracle, assert_guards, assert_untouched, guarded, make_inputs, make_pool, memory

N = 6  # slots of a test pool


@dataclass(frozen=True)
class Where:
    """A backend, and the device it is tested on."""

    backend: str
    device: str

    def __str__(self) -> str:
        return self.backend if self.device == "cpu" else f"{self.backend}-{self.device}"

    def pool(self, specs: list[LayerSpec], **kwargs: Any) -> StatePool:
        """A poisoned pool; skips the test where the backend refuses one of its layers."""
        pool = make_pool(specs, kwargs.pop("N", N), device=self.device, backend=self.backend, **kwargs)
        for layer in pool.layers:
            if self.backend != "auto" and (why := load(self.backend).refuses(layer)):
                pytest.skip(f"{self}: {why}")
        return pool

    def slots(self, *ids: int) -> Tensor:
        return torch.tensor(ids, dtype=torch.int32, device=self.device)


def make_spec(recurrence: Recurrence, **changes: Any) -> LayerSpec:
    """K != V, H != HV, and neither a power of two."""
    return LayerSpec(**{**dict(recurrence=recurrence, H=2, HV=6, K=12, V=7), **changes})


class Run:
    """Steps of a pool with one layer, each followed by its oracle. All slots start from random states."""

    def __init__(
        self,
        where: Where,
        spec: LayerSpec,
        *,
        dtype: torch.dtype | None = None,
        gates: torch.dtype | None = None,
        seed: int = 0,
        extremes: bool = True,
        **pool: Any,
    ) -> None:
        self.where, self.spec, self.extremes = where, spec, extremes
        self.dtype, self.gates = dtype or spec.input_dtype, gates
        self.rng = torch.Generator().manual_seed(seed)
        pool = {"fold_every": 6, "width": 1, "generator": self.rng, **pool}
        self.pool = where.pool([spec], **pool)
        self.layer = self.pool.layers[0]
        self.oracle = Oracle(spec, self.pool.N, self.dtype)
        self.seed(where.slots(*range(self.pool.N)))

    def seed(self, slots: Tensor) -> None:
        """Random states, in the checkpoint and in the oracle."""
        spec = self.spec
        state = torch.randn(slots.numel(), spec.HV, spec.V, spec.K, generator=self.rng).to(spec.state_dtype)
        ops.seed(self.layer, state.to(self.where.device), slots)
        real = (slots >= 0).cpu()
        self.oracle.seed(slots.cpu()[real], state[real])

    def inputs(self, B: int, T: int) -> Inputs:
        """On the CPU."""
        s = self.spec
        made = make_inputs(s.recurrence, B, T, s.H, s.HV, s.K, s.V, self.dtype, self.rng, self.extremes)
        return made if self.gates is None else made._replace(w=made.w.to(self.gates), g=made.g.to(self.gates))

    def verify(self, inputs: Inputs, slots: Tensor, *, folded: bool = False) -> Tensor:
        """Between guard bands; counts the outputs."""
        given = Inputs(*(x.to(self.where.device) for x in inputs)).guarded()
        out = guarded(torch.ones_like(given.v))
        got = ops.verify(self.layer, *given, slots=slots, out=out, folded=folded, backend=self.where.backend)
        assert got is out
        assert_guards(*given, out)
        self.oracle.verify(inputs, slots, out)
        return out

    def commit(self, slots: Tensor, accepted: Tensor | int) -> None:
        self.pool.commit(slots, accepted if isinstance(accepted, int) else accepted.to(slots.device))
        self.oracle.commit(accepted)

    def step(self, slots: Tensor, T: int, accepted: Tensor | int | None = None, *, folded: bool = False) -> Tensor:
        """A verify and a commit, of random acceptance by default."""
        B = slots.numel()
        out = self.verify(self.inputs(B, T), slots, folded=folded)
        self.commit(slots, torch.randint(T + 1, (B,), generator=self.rng) if accepted is None else accepted)
        self.pool.check()
        return out

    def fold(self, slots: Tensor, n: Tensor | int | None = None) -> None:
        """Counts the checkpoints if all rows are folded."""
        self.pool.fold(slots, n)
        if n is None:
            self.oracle.fold(self.layer, slots)

    def finish(self) -> None:
        """Folds everything and applies the rule; looks at the pool's guard bands."""
        self.fold(self.where.slots(*range(self.pool.N)))
        assert_untouched(self.pool, memory(self.pool), range(self.pool.N))
        self.oracle.check(f"{self.where}, {self.spec.recurrence.name}:")
