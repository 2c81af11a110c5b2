"""Launch configurations: a pure function of what is launched. No autotuning: the kernels write state in place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LaunchConfig:
    """BV: state rows a program of the read kernel; num_warps: its warps; BF: rows at a time where it folds; dot: tensor
    cores for the products over K (otherwise row sums, for one token); rows_first: neighbouring programs serve different
    rows of the batch; pdl: the read kernel starts to stream the state while the prepare kernel runs (NVIDIA, from
    Hopper on); prepare_warps: warps of the prepare kernel."""

    BV: int
    num_warps: int
    BF: int = 16
    dot: bool = True
    rows_first: bool = True
    pdl: bool = False
    prepare_warps: int = 1

    def __post_init__(self) -> None:
        # Tensor-core products of fewer than 16 rows a warp miscompile (Triton 3.6, sm_90, 8 warps on 64 rows).
        if self.dot and 16 * self.num_warps > self.BV:
            raise ValueError(
                f"LaunchConfig: dot needs BV >= 16 * num_warps; got BV={self.BV}, num_warps={self.num_warps}"
            )


def power_of_2(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least ``n`` and ``least``."""
    return max(least, 1 << max(0, n - 1).bit_length())


# (erase, channel, state bits, one token): (BV, num_warps, BF, dot), the fastest of a sweep on an H200 at B = 256 with
# K = 128 (benchmarks/results/h200-sweep.json).
_TUNED = {
    (False, False, 32, True): (16, 1, 16, False),
    (False, False, 16, True): (64, 4, 16, True),
    (False, False, 32, False): (64, 4, 16, True),
    (False, False, 16, False): (64, 4, 16, True),
    (True, False, 32, True): (16, 1, 16, False),
    (True, False, 16, True): (64, 2, 16, True),
    (True, False, 32, False): (64, 4, 16, True),
    (True, False, 16, False): (64, 2, 16, True),
    (True, True, 32, True): (64, 2, 32, False),
    (True, True, 16, True): (64, 2, 16, True),
    (True, True, 32, False): (64, 4, 16, True),
    (True, True, 16, False): (64, 4, 16, True),
}


def launch_config(
    *, erase: bool, channel: bool, state_bits: int, K: int, V: int, T: int, capability: tuple[int, int] | None
) -> LaunchConfig:
    """The configuration of one step. ``capability``: of a CUDA device, None elsewhere."""
    key = (erase or channel, channel, 32 if state_bits > 16 else 16, T == 1)
    BV, num_warps, BF, dot = _TUNED[key]
    while BV > 16 and (power_of_2(V, 16) < BV or BV * power_of_2(K) > 64 * 128):  # no more state a program than tuned
        BV //= 2
    while dot and num_warps > 1 and 16 * num_warps > BV:
        num_warps //= 2
    pdl = capability is not None and capability >= (9, 0)
    return LaunchConfig(BV, num_warps, min(BF, BV), dot, pdl=pdl, prepare_warps=1 if T == 1 else 2 if T <= 4 else 8)


def plain_config(*, K: int, V: int) -> LaunchConfig:
    """The configuration of the plain recurrence."""
    BV = 16 if power_of_2(K) <= 128 else 8
    return LaunchConfig(min(BV, power_of_2(V, 8)), num_warps=1, dot=False)
