"""Launch configurations: a pure function of what is launched. No autotuning: the kernels write state in place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LaunchConfig:
    """BV: state rows a program of the read kernel; num_warps: its warps; BC: neighbouring columns of a row that go to
    different threads; dot: tensor cores instead, for 16-bit states, see kernel.py; heads_first: neighbouring
    programs are those of other heads, otherwise of other batch rows; ahead, fold_ahead: ring rows loaded at once by the
    prepare kernel and by a fold; pdl: the read kernel starts to stream the state while the prepare kernel runs (NVIDIA,
    from Hopper on)."""

    BV: int
    num_warps: int
    BC: int = 32
    dot: bool = False
    heads_first: bool = False
    ahead: int = 4
    fold_ahead: int = 2
    pdl: bool = False

    def __post_init__(self) -> None:
        # Tensor-core products of fewer than 16 rows a warp miscompile (Triton 3.6, sm_90, 8 warps on 64 rows).
        if self.dot and 16 * self.num_warps > self.BV:
            raise ValueError(
                f"LaunchConfig: dot needs BV >= 16 * num_warps; got BV={self.BV}, num_warps={self.num_warps}"
            )


def power_of_2(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least ``n`` and ``least``."""
    return max(least, 1 << max(0, n - 1).bit_length())


def launch_config(
    *, erase: bool, channel: bool, state_bits: int, K: int, V: int, T: int, capability: tuple[int, int] | None
) -> LaunchConfig:
    """The configuration of one step. ``capability``: of a CUDA device, None elsewhere."""
    pdl = capability is not None and capability >= (9, 0)
    if state_bits == 16:
        BV = min(64, power_of_2(V, 16))
        return LaunchConfig(BV, BV // 16, dot=True, pdl=pdl)
    return LaunchConfig(16, 1, pdl=pdl)


def plain_config(*, K: int, V: int) -> LaunchConfig:
    """The configuration of the plain recurrence."""
    BV = 16 if power_of_2(K) <= 128 else 8
    return LaunchConfig(min(BV, power_of_2(V, 8)), num_warps=1)
