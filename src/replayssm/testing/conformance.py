"""Holds a backend against the oracle: what ``replayssm verify`` runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from replayssm import ops
from replayssm.backends import load, names
from replayssm.layer import LayerSpec
from replayssm.recurrence import RECURRENCES, Recurrence
from replayssm.testing.inputs import Inputs, assert_guards, guarded, make_inputs
from replayssm.testing.memory import assert_untouched, make_pool, snapshot
from replayssm.testing.oracle import Oracle


@dataclass(frozen=True)
class VerifyRow:
    """One line of ``replayssm verify``: a backend's error for one recurrence, dtype of inputs and state, and T.

    error, allowed: of outputs or states, whichever comes closer to breaking the rule; infinite where something else
    broke, which ``broken`` tells. skipped: why it was not run."""

    backend: str
    recurrence: str
    dtype: str
    T: int
    error: float
    allowed: float
    ok: bool
    skipped: str | None = None
    broken: str | None = None


def check_backend(
    name: str,
    recurrence: Recurrence,
    *,
    dtype: torch.dtype = torch.float32,
    T: int = 1,
    device: torch.device | str = "cpu",
    steps: int = 24,
) -> VerifyRow:
    """Runs a backend for some steps with random acceptance and folds, in poisoned memory and between guard bands, and
    holds it against the oracle. ``dtype``: of inputs, ring and state. A write to another slot counts as infinite error.
    """
    row = VerifyRow(name, recurrence.name, str(dtype).removeprefix("torch."), T, 0.0, 0.0, True)
    spec = LayerSpec(recurrence, H=2, HV=4, K=64, V=16, state_dtype=dtype, input_dtype=dtype)
    rng = torch.Generator().manual_seed(T)
    pool = make_pool([spec], N=6, fold_every=6, window=T, device=device, backend=name, generator=rng)
    layer, oracle = pool.layers[0], Oracle(spec, pool.N)
    if (why := load(name).refuses(layer)) is not None:
        return replace(row, skipped=why)
    slots = torch.tensor([4, -1, 0, 5], dtype=torch.int32, device=device)
    state = torch.randn(4, spec.HV, spec.V, spec.K, generator=rng).to(dtype)
    real = slots >= 0
    ops.seed(layer, state.to(device), slots)
    oracle.seed(slots[real].cpu(), state[real.cpu()])
    before = snapshot(pool)
    try:
        for _ in range(steps):
            inputs = make_inputs(recurrence, 4, T, spec.H, spec.HV, spec.K, spec.V, dtype, rng)
            given = Inputs(*(x.to(device) for x in inputs)).guarded()
            out = guarded(torch.zeros_like(given.v))
            oracle.verify(inputs, slots, ops.verify(layer, *given, slots=slots, out=out, backend=name))
            assert_guards(*given, out)
            accepted = torch.randint(T + 1, (4,), generator=rng)
            pool.commit(slots, accepted.to(device))
            oracle.commit(accepted)
        pool.fold(slots)
        oracle.fold(layer, slots)
        assert_untouched(pool, before, slots)
    except AssertionError as broken:
        return replace(row, error=float("inf"), ok=False, broken=str(broken))
    worst = max(oracle.outputs, oracle.states, key=lambda tally: tally.error / tally.allowed)
    return replace(row, error=worst.error, allowed=worst.allowed, ok=worst.ok)


def verify_backends(backends: list[str] | None = None, device: torch.device | str = "cpu") -> list[VerifyRow]:
    """:func:`check_backend` of the named backends (all by default) on ``device``: all recurrences, float64, float32 and
    bfloat16, one token and several. A backend that does not serve a case gives a row with ``skipped`` set; one that
    serves none a single row, of recurrence and dtype "all"."""
    rows: list[VerifyRow] = []
    with _one_thread():
        for name in names() if backends is None else backends:
            mine = [
                check_backend(name, recurrence, dtype=dtype, T=T, device=device)
                for recurrence in RECURRENCES.values()
                for dtype in (torch.float64, torch.float32, torch.bfloat16)
                for T in (1, 5)
            ]
            reasons = {row.skipped for row in mine}
            if None not in reasons and len(reasons) == 1:
                mine = [VerifyRow(name, "all", "all", 0, 0.0, 0.0, True, reasons.pop())]
            rows += mine
    return rows


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Tensors this small only lose by threads, up to fiftyfold on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
