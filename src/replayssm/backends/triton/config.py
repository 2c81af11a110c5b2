"""Launch configurations: a pure function of what is launched. No autotuning: the kernels write state in place."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class LaunchConfig:
    """BV: state rows a program of the read kernel, 16 at least; num_warps: its warps; order: how programs run through
    blocks of V, rows of the batch and heads, fastest first.
    dot: products on tensor cores, for states of 16 bits; BC: otherwise, neighbouring columns of a row that go to
    different threads, see kernel.py. ahead: ring rows that the prepare kernel loads at once, decay by channel."""

    BV: int
    num_warps: int
    BC: int = 32
    dot: bool = False
    order: str = "vbh"
    ahead: int = 4

    def __post_init__(self) -> None:
        # Tensor-core products of fewer than 16 rows a warp miscompile (Triton 3.6, sm_90, 8 warps on 64 rows).
        if self.dot and 16 * self.num_warps > self.BV:
            raise ValueError(
                f"LaunchConfig: dot needs BV >= 16 * num_warps; got BV={self.BV}, num_warps={self.num_warps}"
            )


def power_of_2(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least ``n`` and ``least``."""
    return max(least, 1 << max(0, n - 1).bit_length())


# (erase, channel, one token) of 16-bit states: (BV, num_warps, order), the fastest of a sweep on an H200 at B = 256,
# K = 128 (benchmarks/results/h200-kernels.json). Of float32 states (16, 1, "vbh") was, for all.
_TUNED_DOT = {
    (False, False, True): (64, 2, "vhb"),
    (False, False, False): (64, 2, "vhb"),
    (True, False, True): (64, 2, "vhb"),
    (True, False, False): (64, 2, "vhb"),
    (True, True, True): (64, 2, "vhb"),
    (True, True, False): (128, 4, "vbh"),
}


def launch_config(
    *, erase: bool, channel: bool, state_bits: int, K: int, V: int, T: int, capability: tuple[int, int] | None = None
) -> LaunchConfig:
    """The configuration of one step. ``capability``: of a CUDA device, None elsewhere."""
    # Tensor cores take 16-bit states as they are. Those of float32 would have to be split, and tensor cores truncate
    # as they add, which alone is more than the error of the plain recurrence in float32.
    if state_bits == 16 and (capability is None or capability >= (8, 0)):
        BV, num_warps, order = _TUNED_DOT[erase or channel, channel, T == 1]
        return replace(_fit(BV, num_warps, K=K, V=V, dot=True), order=order)
    return _fit(16, 1, K=K, V=V, dot=False)


def candidates(*, erase: bool, channel: bool, state_bits: int, K: int, V: int, T: int) -> list[LaunchConfig]:
    """What is worth a try for a step, the shipped configuration first."""
    dot = state_bits == 16
    first = launch_config(erase=erase, channel=channel, state_bits=state_bits, K=K, V=V, T=T)
    sizes = [(64, 4), (64, 2), (32, 2), (128, 4)] if dot else [(16, 1), (16, 2), (32, 2), (64, 4)]
    configs = [_fit(BV, num_warps, K=K, V=V, dot=dot) for BV, num_warps in sizes]
    configs += [replace(first, order=order) for order in ("vhb", "bvh")]
    configs += [replace(first, ahead=ahead) for ahead in ((2, 8) if channel else ())]
    configs += [replace(first, BC=16)] if not dot else []
    return [first] + [config for i, config in enumerate(configs) if config not in [first, *configs[:i]]]


def _fit(BV: int, num_warps: int, *, K: int, V: int, dot: bool) -> LaunchConfig:
    """No more rows than there are, and no more state a program than was tuned for."""
    most = 128 * 128 if dot else 16 * 128 * num_warps
    while BV > 16 and (power_of_2(V, 16) < BV or BV * power_of_2(K) > most):  # 16: what a fold takes at a time
        BV //= 2
    if not dot and BV * power_of_2(K) > most:
        num_warps *= 2
    return LaunchConfig(BV, max(1, min(num_warps, BV // 16)) if dot else num_warps, dot=dot)


def plain_config(*, K: int, V: int) -> LaunchConfig:
    """The configuration of the plain recurrence."""
    BV = 16 if power_of_2(K) <= 128 else 8
    return LaunchConfig(min(BV, power_of_2(V, 8)), num_warps=1)


def plain_candidates(*, K: int, V: int) -> list[LaunchConfig]:
    """What is worth a try for the plain recurrence, so that the baseline is as tuned as what is held against it."""
    sizes = [(8, 1), (16, 1), (16, 2), (32, 2), (32, 4), (64, 4)]
    return [LaunchConfig(BV, num_warps, BC) for BV, num_warps in sizes if power_of_2(V, 8) >= BV for BC in (32, 16)]
