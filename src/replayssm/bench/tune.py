"""Launch configurations: each candidate is checked on a scratch pool, then timed on others, never on one in use."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from replayssm.backends import load
from replayssm.bench.gate import Verify, WrongKernel, check_case
from replayssm.bench.kernels import Bench, Rotation
from replayssm.bench.shapes import Case, dtype_name


@dataclass
class Tuned:
    """The fastest configuration of a case. times: microseconds of each that is right; refused: why others are not."""

    case: Case
    config: Any
    us: float
    x: float
    times: list[tuple[Any, float]] = field(default_factory=list)
    refused: list[tuple[Any, str]] = field(default_factory=list)

    @property
    def line(self) -> str:
        """For a person, who may put it into ``launch_config`` of backends/triton/config.py."""
        return f"{self.case}: {self.us:.1f} us, x {self.x:.2f}, {self.config!r}"

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        case = self.case
        return {
            "recurrence": case.shape.recurrence.name, "shape": case.shape.name, "mode": case.mode,
            "dtype": dtype_name(case.dtype), "batch": case.batch, "T": case.T, "R": case.R, "us": self.us, "x": self.x,
            "config": dataclasses.asdict(self.config),
            "tried": [{"config": dataclasses.asdict(config), "us": us} for config, us in self.times],
            "refused": [{"config": dataclasses.asdict(config), "why": why} for config, why in self.refused],
        }  # fmt: skip


def tune(
    case: Case,
    bench: Bench,
    configs: Sequence[Any] | None = None,
    launch: Callable[..., None] | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Tuned:
    """Tries ``configs`` (by default all that Triton's ``candidates`` names for the case) by ``launch(*args, config=)``.

    The check of a configuration is the gate's, with its last fold by the torch backend, which reads the ring rows that
    the candidate wrote: outputs, checkpoints after folds in the kernel, and the ring. Raises WrongKernel where none is
    left."""
    configs = candidates(case) if configs is None else configs
    start: Callable[..., None] = launch or importlib.import_module("replayssm.backends.triton").launch_verify
    small = dataclasses.replace(case, batch=min(case.batch, 3))
    pools, tuned = Rotation(case, bench.device), Tuned(case, None, float("inf"), float("inf"))
    for i, config in enumerate(configs):
        tell(f"{i + 1}/{len(configs)} {config}")
        verify: Verify = partial(start, config=config)
        try:
            check_case(small, verify, load("torch").fold, bench.device, str(config))
            timed = bench.clock.time(pools.steps(verify))
        except Exception as error:  # wrong, or more registers or shared memory than there are
            tuned.refused.append((config, f"{type(error).__name__}: {error}"))
            continue
        us = timed.seconds / pools.calls * 1e6
        tuned.times.append((config, us))
        if us < tuned.us:
            x = timed.seconds / pools.calls * timed.read / case.checkpoint_bytes
            tuned.config, tuned.us, tuned.x = config, us, x
    if not tuned.times:
        first = tuned.refused[0][1] if tuned.refused else "there is no candidate"
        raise WrongKernel(f"no launch configuration is right for {case}: {first}")
    return tuned


def candidates(case: Case) -> Sequence[Any]:
    """What Triton's configuration file holds worth a try."""
    table = importlib.import_module("replayssm.backends.triton.config")
    recurrence, bits = case.shape.recurrence, case.dtype.itemsize * 8
    return table.candidates(
        channel=recurrence.channel, erase=recurrence.erase, state_bits=bits, K=case.shape.K, V=case.shape.V, T=case.T,
        rows=case.batch * case.shape.HV, ring=case.R - case.T,
    )  # fmt: skip
