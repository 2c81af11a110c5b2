"""Launch configurations: a pure function of what is launched. No autotuning: the kernels write state in place."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

# Bytes of states up to which a replay step in one launch is faster than in two, by erase and the bits of a number.
ONE_LAUNCH = {(False, 32): 135e6, (False, 16): 17e6, (True, 32): 34e6, (True, 16): 6e6}


@dataclass(frozen=True)
class LaunchConfig:
    """BV: state rows a program of the read kernel, 16 at least; num_warps: its warps; order: how programs run through
    blocks of V, rows of the batch and heads, fastest first.
    dot: products on tensor cores, else multiply-adds (of one token, decay by head only); registers: what a thread may
    take of them on an NVIDIA GPU, where 128 leave room for 16 warps and 136 for 12. heads: value heads that a program
    of the first launch serves: with a decay by head of one key head, all of them where that does not divide them; by
    channel of any, fewer where that does not divide them. launches: of a step, two
    (prepare.py, kernel.py) or one (single.py: one token; with a decay by channel only where every step folds), whose
    columns a row that go to different threads are BC."""

    BV: int
    num_warps: int = 1
    BC: int = 32
    dot: bool = True
    order: str = "vhb"
    registers: int | None = None
    heads: int = 16
    launches: int = 2

    def __post_init__(self) -> None:
        # Tensor-core products of fewer than 16 rows a warp miscompile (Triton 3.6, sm_90, 8 warps on 64 rows).
        if self.dot and 16 * self.num_warps > self.BV:
            raise ValueError(
                f"LaunchConfig: dot needs BV >= 16 * num_warps; got BV={self.BV}, num_warps={self.num_warps}"
            )
        if self.heads not in (1, 2, 4, 8, 16, 32):  # by channel each has 32 / heads threads of a warp
            raise ValueError(f"LaunchConfig: heads is a power of two up to 32; got heads={self.heads}")


def power_of_2(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least ``n`` and ``least``."""
    return max(least, 1 << max(0, n - 1).bit_length())


@functools.cache
def launch_config(
    *,
    channel: bool,
    erase: bool,
    state_bits: int,
    K: int,
    V: int,
    T: int,
    rows: int = 1 << 20,
    ring: int = 16,
    folds: bool = False,
) -> LaunchConfig:
    """The configuration of one step, the fastest of sweeps on an H200, K = 128 (docs/log.md).

    rows: states that the step works on, B * HV; ring: committed rows that it may find; folds: at every step."""
    if T == 1 and folds:
        return plain_config(K=K, V=V)
    few = rows * K * V * state_bits / 8 <= ONE_LAUNCH[erase, state_bits]
    if T == 1 and not channel and ring <= 16 and few:
        return LaunchConfig(min(32 if power_of_2(K) <= 128 else 16, power_of_2(V, 16)), 2, dot=False, launches=1)
    if state_bits == 32 and T == 1 and not channel:
        order = "bvh" if V <= 64 and not erase else "vbh"
        return LaunchConfig(16, num_warps=1 if power_of_2(K) <= 128 else 2, dot=False, order=order)
    BV = 16 if state_bits == 32 and (channel or T == 1) else 32
    return _fit(BV, channel=channel, erase=erase, state_bits=state_bits, K=K, V=V, T=T)


def candidates(
    *, channel: bool, erase: bool, state_bits: int, K: int, V: int, T: int, rows: int = 1 << 20, ring: int = 16
) -> list[LaunchConfig]:
    """What is worth a try for a step, the shipped configuration first."""
    case: dict[str, Any] = dict(channel=channel, erase=erase, state_bits=state_bits, K=K, V=V, T=T)
    shipped, first = launch_config(**case, rows=rows, ring=ring), launch_config(**case)
    configs = [_fit(BV, **case) for BV in (16, 32, 64)]
    configs += [replace(config, order=order) for config in (first, configs[0]) for order in ("vhb", "vbh", "bvh")]
    configs += [replace(first, registers=registers) for registers in ((None, 96) if first.dot else ())]
    configs += [replace(first, heads=heads) for heads in ((1, 2, 4) if channel else (8, 4))]
    if T == 1 and not channel:
        configs += [config for config in plain_candidates(K=K, V=V) if config.BC == 32 and config.BV >= 16]
    return list(dict.fromkeys([shipped, first, *configs]))


def _fit(BV: int, *, channel: bool, erase: bool, state_bits: int, K: int, V: int, T: int) -> LaunchConfig:
    """Products of BV rows, but no more rows than there are, and no more state than a thread has registers for; with a
    decay by channel two heads in the first launch, if a thread has registers for their vectors."""
    while BV > 16 and (power_of_2(V, 16) < BV or BV * power_of_2(K) * state_bits > 32 * 128 * 32):
        BV //= 2
    numbers = BV * power_of_2(K) * state_bits // 1024  # of 32 bits, of the state, a thread
    registers = None if T > 4 or numbers > 128 else 168 if numbers > 64 else 128
    order = "vbh" if T == 1 and state_bits == 16 else "vhb"
    if not channel:
        return LaunchConfig(BV, order=order, registers=registers)
    heads = 2 if T > 1 and 2 * power_of_2(2 * T if erase else T) * power_of_2(K) <= 64 * 32 else 1
    return LaunchConfig(BV, order=order, registers=registers, heads=heads)


def plain_config(*, K: int, V: int) -> LaunchConfig:
    """The configuration of the plain recurrence."""
    BV = 16 if power_of_2(K) <= 128 else 8
    return LaunchConfig(min(BV, power_of_2(V, 8)), dot=False, launches=1)


def plain_candidates(*, K: int, V: int) -> list[LaunchConfig]:
    """What is worth a try for the plain recurrence, so that the baseline is as tuned as what is held against it."""
    sizes = [(8, 1), (16, 1), (16, 2), (32, 2), (32, 4), (64, 4)]
    return [
        LaunchConfig(BV, num_warps, BC, dot=False, launches=1)
        for BV, num_warps in sizes
        if power_of_2(V, 8) >= BV
        for BC in (32, 16)
    ]
