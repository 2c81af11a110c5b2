"""One measured row: a step of one layer, over whole fold cycles, with the plain recurrence beside it."""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from replayssm.auto import fold_every
from replayssm.backends import explain, load
from replayssm.bench.gate import Verify, WrongKernel, check_backend_case, check_case, draw, plain_case
from replayssm.bench.shapes import Case, dtype_name
from replayssm.bench.timing import Clock, Timed, cache_bytes
from replayssm.layer import LayerState
from replayssm.ring import Ring
from replayssm.traffic import row_bytes

ROTATE = 4  # times the last cache: what the checkpoints of one case hold together at least
MANY, FEW = 512, 16  # pools at most; of shapes whose figures mean little anyway


@dataclass(frozen=True)
class Row:
    """A line of the table, and of the JSON.

    us: a step (mode ``fold``: a fold), mean over whole fold cycles, median of the repeats. x: over the time in which
    the checkpoint could be read once. gbps: all bytes that a step must move (checkpoint, ring rows and, where it folds,
    the checkpoint again) over its time; share: of ``read_gbps``, measured in the same run. plain_us: the plain
    recurrence, one token. speedup: of a step's T tokens over as many plain steps; of a fold over one plain step, which
    reads and writes as much. taken: which of the two, "replay" or "plain", ``StatePool.at`` takes for such a step; of
    ours only.
    """

    recurrence: str
    shape: str
    mode: str
    dtype: str
    inputs: str
    batch: int
    T: int
    accepted: int
    R: int
    backend: str
    us: float
    x: float
    gbps: float
    share: float
    read_gbps: float
    plain_us: float
    plain_x: float
    speedup: float
    pools: int
    config: dict[str, Any] | None = None
    taken: str | None = None

    @staticmethod
    def of(case: Case, backend: str, timed: Timed, moved: float, plain: Timed, pools: int) -> Row:
        """The figures from times and bytes."""
        seconds, read = timed
        tokens = case.T if case.mode == "verify" else 1
        return Row(
            recurrence=case.shape.recurrence.name, shape=case.shape.name, mode=case.mode, dtype=dtype_name(case.dtype),
            inputs=dtype_name(case.inputs), batch=case.batch, T=case.T, accepted=case.accepted, R=case.R,
            backend=backend, us=seconds * 1e6, x=seconds * read / case.checkpoint_bytes, gbps=moved / seconds / 1e9,
            share=moved / seconds / read, read_gbps=read / 1e9, plain_us=plain.seconds * 1e6,
            plain_x=plain.seconds * plain.read / case.checkpoint_bytes, speedup=tokens * plain.seconds / seconds,
            pools=pools,
        )  # fmt: skip


class Bench:
    """Measures cases on one device. The plain recurrence of a layer and batch is timed once and kept."""

    def __init__(self, device: torch.device | str, clock: Clock | None = None) -> None:
        self.device = torch.device(device)
        self.clock = clock or Clock(self.device)
        self._plain: dict[Any, Timed] = {}
        self._right: dict[Any, list[Any]] = {}  # configurations of the plain kernel, which do not depend on the batch

    def measure(self, case: Case, backend: str = "auto") -> Row:
        """Checks a backend on ``case`` (WrongKernel where it breaks the rule), then times it. Raises ValueError where a
        named backend does not serve the case."""
        name = self.backend(case, backend)
        check_backend_case(case, name, self.device)
        layers = Rotation(case, self.device)
        run = load(name)
        timed = self.clock.time(layers.folds(run.fold) if case.mode == "fold" else layers.steps(run.verify))
        timed = Timed(timed.seconds / layers.calls, timed.read)
        row = Row.of(case, name, timed, moved_bytes(case, layers.pools[0]), self.plain(case), len(layers.pools))
        few = case.mode == "standard" and fold_every(case.spec, case.batch, self.device).tokens == 1
        row = dataclasses.replace(row, taken="plain" if few or case.limit == 0 else "replay")
        if name != "triton" or case.mode == "fold":
            return row
        config = importlib.import_module("replayssm.backends.triton").config(layers.pools[0], case.batch, case.T)
        return dataclasses.replace(row, config=dataclasses.asdict(config))

    def backend(self, case: Case, backend: str = "auto") -> str:
        """The backend that ``backend`` means for this case."""
        ring = Ring.build(1, case.R, case.T, case.limit, self.device)
        return explain(case.spec.build(ring), backend).name

    def plain(self, case: Case) -> Timed:
        """One step of the plain recurrence: on a GPU the fastest of its launch configurations, each checked first."""
        case = plain_case(case)
        if case not in self._plain:
            variants = list(self._plain_variants(case))
            layers = Rotation(case, self.device)
            best = min((self.clock.time(layers.steps(verify)) for verify in variants), key=lambda timed: timed.seconds)
            self._plain[case] = Timed(best.seconds / layers.calls, best.read)
        return self._plain[case]

    def _plain_variants(self, case: Case) -> Iterator[Verify]:
        """What is right of the ways to run the plain recurrence here."""
        if self.backend(case) != "triton":
            check_backend_case(case, "sequential", self.device)
            yield load("sequential").verify
            return
        triton = importlib.import_module("replayssm.backends.triton")
        small = dataclasses.replace(case, batch=3)
        if small not in self._right:
            right, wrong = [], None
            for config in plain_configs(K=case.shape.K, V=case.shape.V):
                verify: Verify = partial(triton.launch_verify, config=config)
                try:
                    check_case(small, verify, triton.fold, self.device, f"the plain kernel with {config}")
                    right.append(config)
                except WrongKernel as error:
                    wrong = error
            if not right and wrong is not None:
                raise wrong
            self._right[small] = right
        yield from (partial(triton.launch_verify, config=config) for config in self._right[small])


class Rotation:
    """Pools used in turn, together larger than the last cache by far, each at another point of its fold cycle; so are
    the rows of a pool, evenly. A run is one cycle of every pool or, where there are pools for each point of the cycle,
    one step of each. The cursors of each step are laid out beforehand, as one commit serves all layers of a model and
    is not a layer's cost."""

    def __init__(self, case: Case, device: torch.device, seed: int = 0) -> None:
        B, self.case = case.batch, case
        cursors = Ring.build(B, case.R, case.T, case.limit, device)
        first = _filled(case.spec.build(cursors), seed)
        self.pools = [first, *(_copied(first) for _ in range(pool_count(case, device) - 1))]
        self.slots = torch.arange(B, dtype=torch.int32, device=device)
        self.cursors = [_at(cursors, case, step) for step in range(len(case.counts))]
        few = draw(case, min(B, 16), device, torch.Generator().manual_seed(seed))  # drawn on the CPU, which takes time
        self.inputs = few.rows(torch.arange(B, device=device) % min(B, 16))
        self.out = torch.empty_like(self.inputs.v)

    @property
    def calls(self) -> int:
        """Calls of the backend in one run."""
        return len(self.layers())

    def layers(self) -> list[LayerState]:
        """The layer that each call of a run works on."""
        F = len(self.cursors)
        return [
            dataclasses.replace(pool, ring=self.cursors[(step + i) % F])
            for step in range(F if len(self.pools) < F else 1)
            for i, pool in enumerate(self.pools)
        ]

    def steps(self, verify: Verify) -> Callable[[], None]:
        """A run of steps."""
        layers, inputs, slots, out = self.layers(), self.inputs, self.slots, self.out

        def run() -> None:
            for layer in layers:
                verify(layer, *inputs, slots, out)

        return run

    def folds(self, fold: Callable[[LayerState, Tensor, Tensor], None]) -> Callable[[], None]:
        """A run of stand-alone folds."""
        layers, slots = self.layers(), self.slots
        rows = torch.full_like(slots, self.case.counts[0])

        def run() -> None:
            for layer in layers:
                fold(layer, slots, rows)

        return run


def pool_count(case: Case, device: torch.device) -> int:
    """How many pools a case takes in turn: from the length of a fold cycle on, a multiple of it."""
    wanted = math.ceil(ROTATE * cache_bytes(device) / case.checkpoint_bytes)
    wanted, F = min(max(1, wanted), FEW if case.shape.small else MANY), len(case.counts)
    return wanted if wanted < F else -(-wanted // F) * F


def moved_bytes(case: Case, layer: LayerState) -> float:
    """Mean bytes a step that must move: the checkpoint and committed rows read, new rows written, and the checkpoint
    written once a fold cycle. For T = 1: :func:`replayssm.traffic.replay_bytes` of the batch."""
    row = row_bytes(layer) * case.batch
    if case.mode == "fold":
        return 2 * case.checkpoint_bytes + row * case.counts[0]
    return case.checkpoint_bytes * (1 + 1 / len(case.counts)) + row * (fmean(case.counts) + case.T)


def plain_configs(*, K: int, V: int) -> Sequence[Any]:
    """Launch configurations of the plain Triton kernel that are worth a try."""
    table = importlib.import_module("replayssm.backends.triton.config")
    many = getattr(table, "plain_candidates", None)
    return many(K=K, V=V) if many is not None else [table.plain_config(K=K, V=V)]


def _filled(layer: LayerState, seed: int) -> LayerState:
    """Random numbers of a size at which a state neither grows nor dies out over many cycles."""
    rng = torch.Generator(layer.ckpt.device).manual_seed(seed)
    for x in (layer.ckpt, layer.k, layer.d):
        x.normal_(generator=rng).mul_(0.1)
    layer.w.uniform_(generator=rng)
    layer.g.uniform_(generator=rng).mul_(-0.2)
    return layer


def _copied(layer: LayerState) -> LayerState:
    return dataclasses.replace(layer, **{name: x.clone() for name, x in layer.tensors.items()})


def _at(ring: Ring, case: Case, step: int) -> Ring:
    """Cursors at one step of the cycle: rows spread evenly over it, heads anywhere."""
    row = torch.arange(case.batch, device=ring.head.device)
    counts = torch.tensor(case.counts, device=row.device)
    at = Ring.build(case.batch, case.R, case.T, case.limit, row.device)
    at.put(row, row * 7 % case.R, counts[(row + step) % len(counts)])
    return dataclasses.replace(at, scratch=ring.scratch)
