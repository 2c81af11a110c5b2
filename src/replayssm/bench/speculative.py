"""What a step that verifies drafts costs one layer: on the ring, as plain steps, and with a state kept a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from replayssm.bench import snapshot
from replayssm.bench.kernels import Bench
from replayssm.bench.shapes import CYCLE, Case, Shape, make_case
from replayssm.bench.timing import Timed
from replayssm.ring import Ring

LENGTHS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class LayerRow:
    """One layer, batch and number of new tokens ``T`` a step, of which ``accepted`` are committed.

    us: a step on the ring, mean over a whole fold cycle. plain_us: T steps of the plain recurrence, which can take
    nothing back. snapshot_us: a step that keeps a state after each token, in torch; traffic_us: the bytes that it must
    move (a state read, T written) over what the device reads a second. bytes,
    plain_bytes, snapshot_bytes: of recurrent memory that a sequence takes, convolution windows not counted.
    """

    recurrence: str
    shape: str
    dtype: str
    inputs: str
    batch: int
    T: int
    accepted: int
    R: int
    backend: str
    us: float
    plain_us: float
    snapshot_us: float
    traffic_us: float
    read_gbps: float
    bytes: int
    plain_bytes: int
    snapshot_bytes: int
    part: str = "layer"


def cases(
    shape: Shape, dtype: torch.dtype, inputs: torch.dtype, batch: int, lengths: Sequence[int], accepted: int | None
) -> list[Case]:
    """A case a length, with the ring that a pool of ``fold_every=16`` has. ``accepted``: of each step's tokens at most;
    None: all but one."""
    made = []
    for T in lengths:
        some = None if accepted is None else min(accepted, T)
        made.append(make_case(shape, "verify", dtype, inputs, batch, draft=T, accepted=some, R=CYCLE - 1 + 2 * T))
    return made


def measure(case: Case, bench: Bench, backends: Sequence[str] = ("auto",)) -> list[LayerRow]:
    """A row for each of the backends, each checked first, beside the same snapshots. Raises WrongKernel, or ValueError
    where a backend does not serve the case."""
    steps = [bench.measure(case, name) for name in dict.fromkeys(bench.backend(case, name) for name in backends)]
    beside, state = time_snapshots(case, bench), case.checkpoint_bytes
    return [
        LayerRow(
            recurrence=row.recurrence, shape=row.shape, dtype=row.dtype, inputs=row.inputs, batch=row.batch, T=row.T,
            accepted=row.accepted, R=row.R, backend=row.backend, us=row.us, plain_us=case.T * row.plain_us,
            snapshot_us=beside.seconds * 1e6, traffic_us=(1 + case.T) * state / beside.read * 1e6,
            read_gbps=beside.read / 1e9, bytes=sequence_bytes(case), plain_bytes=state // case.batch,
            snapshot_bytes=case.T * state // case.batch,
        )
        for row in steps
    ]  # fmt: skip


def time_snapshots(case: Case, bench: Bench) -> Timed:
    """A step of the snapshots, checked first."""
    snapshot.check(replace(case, batch=min(case.batch, 4)), bench.device)
    buffers = snapshot.Snapshots(case, bench.device)
    timed = bench.clock.time(buffers.run)
    return Timed(timed.seconds / len(buffers.states), timed.read)


def sequence_bytes(case: Case) -> int:
    """Checkpoint, ring and cursors of one sequence."""
    layer = case.spec.build(Ring.build(1, case.R, case.T, case.limit))
    return sum(x[0].numel() * x.element_size() for x in layer.tensors.values()) + 8
