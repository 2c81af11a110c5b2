"""What is timed: layers by name, and the three ways in which a step uses one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from replayssm.layer import LayerSpec
from replayssm.recurrence import GDN, KDA, MAMBA2, Recurrence

MODES = ("standard", "verify", "fold")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CYCLE = 16  # tokens between two folds, unless the ring's rows are given


@dataclass(frozen=True)
class Shape:
    """A layer's heads and dimensions; ``small``: for a laptop or CI, too small for figures that mean anything."""

    name: str
    recurrence: Recurrence
    H: int
    HV: int
    K: int
    V: int
    small: bool = False


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("mamba2 128x64", MAMBA2, 8, 128, 128, 64),
        Shape("mamba2 96x80", MAMBA2, 8, 96, 128, 80),
        Shape("gdn 16/64", GDN, 16, 64, 128, 128),
        Shape("gdn 16/32", GDN, 16, 32, 128, 128),
        Shape("kda 64", KDA, 64, 64, 128, 128),
        Shape("mamba2 small", MAMBA2, 1, 4, 64, 32, small=True),
        Shape("gdn small", GDN, 2, 4, 64, 64, small=True),
        Shape("kda small", KDA, 2, 2, 64, 64, small=True),
    )
}


@dataclass(frozen=True)
class Case:
    """One line of the table. dtype: of the checkpoint; inputs: of q, k, v. accepted: tokens committed a step of T new
    ones. R: ring rows, of which all but two windows may stay unfolded."""

    shape: Shape
    mode: str
    dtype: torch.dtype
    inputs: torch.dtype
    batch: int
    T: int
    accepted: int
    R: int

    def __post_init__(self) -> None:
        if not 1 <= self.accepted <= self.T:
            raise ValueError(f"accepted tokens must be from 1 to T = {self.T}; got {self.accepted}")
        if self.R < 2 * self.T:
            raise ValueError(f"a step of T = {self.T} tokens needs at least {2 * self.T} ring rows; got R = {self.R}")

    @property
    def limit(self) -> int:
        """Committed rows above which a fold is due."""
        return self.R - 2 * self.T

    @property
    def counts(self) -> list[int]:
        """Committed rows that the steps of one fold cycle find; the last step folds. In mode ``fold``: rows folded."""
        if self.mode == "fold":
            return [self.limit + 1]
        return list(range(self.accepted, self.limit + self.accepted + 1, self.accepted))

    @property
    def spec(self) -> LayerSpec:
        """The layer."""
        s = self.shape
        return LayerSpec(s.recurrence, s.H, s.HV, s.K, s.V, self.dtype, self.inputs)

    @property
    def checkpoint_bytes(self) -> int:
        """Of all rows of the batch: what ``x`` is counted in."""
        return self.batch * self.shape.HV * self.shape.V * self.shape.K * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.shape.name}, {dtype_name(self.dtype)}, {self.mode}, batch {self.batch}, T {self.T}, R {self.R}"


def make_case(
    shape: Shape,
    mode: str,
    dtype: torch.dtype,
    inputs: torch.dtype,
    batch: int,
    *,
    draft: int = 4,
    accepted: int | None = None,
    R: int | None = None,
) -> Case:
    """A case in which a fold comes about every 16 tokens. ``draft``: new tokens a step of mode ``verify``, where
    ``accepted`` are all but one by default. ``R``: other ring rows, so another fold cycle."""
    T = draft if mode == "verify" else 1
    accepted = max(1, T - 1) if accepted is None or mode != "verify" else accepted
    cycle = max(accepted, CYCLE // accepted * accepted)
    return Case(shape, mode, dtype, inputs, batch, T, accepted, cycle - accepted + 2 * T if R is None else R)


def select(recurrences: Iterable[str], names: Iterable[str] | None, quick: bool, cpu: bool) -> list[Shape]:
    """Shapes of these recurrences: the named ones; else all large ones, or one a recurrence where a run must be short
    (small ones for a quick run on a CPU)."""
    wanted = set(recurrences)
    if names is not None:
        return [SHAPES[name] for name in names if SHAPES[name].recurrence.name in wanted]
    shapes = [s for s in SHAPES.values() if s.small == (quick and cpu) and s.recurrence.name in wanted]
    if not (quick or cpu):
        return shapes
    return list({s.recurrence: s for s in reversed(shapes)}.values())[::-1]


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` and so on."""
    return str(dtype).removeprefix("torch.")
