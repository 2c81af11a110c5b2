"""The gate before the clock: a kernel is held against the oracle at the shape, dtype and batch that will be timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from replayssm.backends import load
from replayssm.bench.shapes import Case
from replayssm.layer import LayerState
from replayssm.ring import Ring
from replayssm.testing import Inputs, Tally, make_inputs, plain

Verify = Callable[[LayerState, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]
Fold = Callable[[LayerState, Tensor, Tensor], None]
DISTINCT = 3  # sequences that differ; the batch repeats them, so that the oracle's work does not grow with it


class WrongKernel(Exception):
    """A kernel that breaks the oracle's rule; it is not timed."""


def check_backend_case(case: Case, backend: str, device: torch.device) -> None:
    """:func:`check_case` of a backend's own functions."""
    run = load(backend)
    check_case(case, run.verify, run.fold, device, backend)


def check_case(case: Case, verify: Verify, fold: Fold, device: torch.device, what: str) -> None:
    """Runs more than a fold cycle of ``case`` on a scratch pool of its own, in poisoned memory, with ring heads
    anywhere and slots in any order; holds every output, and every checkpoint after a last fold by ``fold``, against the
    oracle (:mod:`replayssm.testing`). A wrong ring row shows in the outputs after it and in that fold.

    Raises WrongKernel, naming ``what`` and the case."""
    rng = torch.Generator().manual_seed(0)
    layer, slots, S = _scratch(case, device, rng)
    ring, recurrence, T = layer.ring, case.shape.recurrence, case.T
    row = torch.arange(case.batch, device=device) % len(S)  # which of the distinct sequences
    exact, same = S.double(), S
    outputs, states = Tally(case.inputs), Tally(case.dtype)
    for _ in range(_steps(case)):
        inputs = draw(case, len(S), device, rng)
        out = torch.full_like(inputs.v[row], float("nan"))
        verify(layer, *inputs.rows(row), slots, out)
        exact_out, exact_states = plain(recurrence, exact, Inputs(*(x.double() for x in inputs)), torch.float64)
        same_out, same_states = plain(recurrence, same, inputs, case.spec.wide_dtype)
        outputs.add(out, same_out[row], exact_out[row])
        accepted = (
            torch.randint(T + 1, (len(S),), generator=rng).to(device) if T > 1 else torch.ones_like(row[: len(S)])
        )
        ring.commit(slots, accepted[row])
        each = torch.arange(len(S), device=device)
        exact, same = exact_states[accepted, each], same_states[accepted, each]
    fold(layer, slots, ring.at(slots)[1])
    hold_rows(states, layer.ckpt, slots, same, exact)
    for name, tally in (("outputs", outputs), ("checkpoints", states)):
        if not tally.ok:
            raise WrongKernel(
                f"refusing to time {what}, which is wrong: {case}: error of its {name} {tally.error:.2g}, "
                f"allowed {tally.allowed:.2g}"
            )


def _steps(case: Case) -> int:
    """More than a fold cycle; in mode ``fold``, one step less than would fold by itself."""
    if case.mode == "fold":
        return case.limit + 1
    return case.limit + 3 if case.T == 1 else 4 * case.limit // case.T + 4


def draw(case: Case, B: int, device: torch.device, rng: torch.Generator) -> Inputs:
    """Inputs of one step for ``B`` sequences."""
    s = case.shape
    inputs = make_inputs(s.recurrence, B, case.T, s.H, s.HV, s.K, s.V, case.inputs, rng)
    return Inputs(*(x.to(device) for x in inputs))


def hold_rows(tally: Tally, actual: Tensor, slots: Tensor, same: Tensor, exact: Tensor) -> None:
    """Counts the states ``actual[slots]``, which repeat ``exact``, a few at a time: a whole batch in float64 is too
    much."""
    for i in range(0, slots.numel(), len(exact)):
        some = actual[slots[i : i + len(exact)].long()]
        tally.add(some, same[: len(some)], exact[: len(some)])


def _scratch(case: Case, device: torch.device, rng: torch.Generator) -> tuple[LayerState, Tensor, Tensor]:
    """A seeded layer in poisoned memory, its slots, and the distinct states ``[., HV, V, K]``."""
    B, spec = case.batch, case.spec
    ring = Ring.build(B, case.R, case.T, case.limit, device)
    slots = torch.randperm(B, generator=rng).to(device, torch.int32)
    head = torch.randint(case.R, (B,), generator=rng).to(device)
    ring.put(slots, head, torch.zeros_like(head))
    layer = spec.build(ring)
    for x in layer.tensors.values():
        x.fill_(float("nan"))
    S = torch.randn(min(B, DISTINCT), spec.HV, spec.V, spec.K, generator=rng).to(device, case.dtype)
    for i in range(0, B, len(S)):
        some = slots[i : i + len(S)].long()
        layer.ckpt[some] = S[: len(some)]
    return layer, slots, S


def plain_case(case: Case) -> Case:
    """The plain recurrence on the layer of ``case``: one token, folded every step."""
    return replace(case, mode="standard", T=1, accepted=1, R=2)
