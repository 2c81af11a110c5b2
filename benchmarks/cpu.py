"""One decode step on the CPU against the machine's own read bandwidth. ``python benchmarks/cpu.py [--json out.json]``

Checkpoints of 128 MiB in float32. A line a variant: milliseconds a step, the median over full fold cycles; checkpoint
bytes a second; their share of the bandwidth that ``torch.sum`` over as many bytes reaches. The two are timed in turns,
a step and a sum, since on a shared machine bandwidth drifts by the second.
Nothing is timed before it agrees with the float64 oracle. ``stock`` is the function that transformers calls, with the
copy into its cache.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import torch

from replayssm import GDN, KDA, MAMBA2, StatePool
from replayssm.backends import load
from replayssm.layer import LayerSpec
from replayssm.recurrence import Recurrence
from replayssm.testing import check_backend, make_inputs

MIB = 1 << 20
# recurrence, B, H, HV, K, V: each 128 MiB of float32 state
SHAPES: dict[str, tuple[Recurrence, int, int, int, int, int]] = {
    "mamba2": (MAMBA2, 32, 8, 128, 128, 64),
    "gdn": (GDN, 64, 16, 32, 128, 128),
    "kda": (KDA, 64, 32, 32, 128, 128),
}
STOCK = {
    "mamba2": ("nemotron_h", "mamba2_selective_state_update"),
    "gdn": ("qwen3_5", "torch_recurrent_gated_delta_rule"),
    "kda": ("kimi_linear", "recurrent_kimi_delta_attention"),
}


class Times(NamedTuple):
    """Seconds of steps, and of as many sums over 128 MiB on all of torch's threads, one after each."""

    steps: list[float]
    sums: list[float]

    def per_cycle(self, cycle: int = 16) -> tuple[float, float]:
        """Medians over full fold cycles (in which one step may be the expensive one) of the mean step, and of its share
        of the bandwidth."""
        starts = range(0, max(1, len(self.steps) - cycle + 1), cycle)
        steps, sums = ([fmean(x[i : i + cycle]) for i in starts] for x in self)
        return median(steps), median(read / took for read, took in zip(sums, steps, strict=True))


BYTES = torch.ones(128 * MIB // 4)


def timed(call: Callable[[], object]) -> float:
    """Seconds of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def replay(name: str, fold_every: int, backend: str, steps: int, staggered: bool) -> Times:
    """``steps`` steps, commits not counted (one serves all layers of a model)."""
    recurrence, B, H, HV, K, V = SHAPES[name]
    pool = StatePool(B, fold_every=fold_every, backend=backend, width=1)
    layer = pool.add_layer(LayerSpec(recurrence, H, HV, K, V))
    slots, rng = pool.alloc(B), torch.Generator().manual_seed(0)
    layer.ckpt.normal_(generator=rng)
    inputs = make_inputs(recurrence, B, 1, H, HV, K, V, torch.float32, rng)
    out, run = torch.empty_like(inputs.v), load(backend)
    times = Times([], [])
    for step in range(steps + fold_every):
        if staggered and step < fold_every - 1:  # the first cycle spreads the rows over it
            mine = slots[torch.arange(B) % fold_every > step]
            part = [x[: mine.numel()] for x in inputs]
            run.verify(layer, *part, mine, out[: mine.numel()])
            pool.commit(mine, 1)
            continue
        took = timed(partial(run.verify, layer, *inputs, slots, out))
        pool.commit(slots, 1)
        if step >= fold_every:
            times.steps.append(took)
            times.sums.append(timed(BYTES.sum))
    return times


def stock(name: str, steps: int) -> Times:
    """Steps of transformers' own function on the same shapes."""
    recurrence, B, H, HV, K, V = SHAPES[name]
    module, function = STOCK[name]
    step = getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), function)
    rng = torch.Generator().manual_seed(0)
    q, k, v, w, g = make_inputs(recurrence, B, 1, H, HV, K, V, torch.float32, rng)
    if name == "mamba2":
        state = torch.randn(B, HV, V, K, generator=rng)
        A = -torch.rand(HV, generator=rng)[:, None, None].expand(HV, V, K)
        dt = w[:, 0, :, None].expand(B, HV, V)
        run: Callable[[], object] = lambda: step(state, v[:, 0], dt, A, k[:, 0], q[:, 0])  # noqa: E731
    else:
        cache = torch.randn(B, HV, K, V, generator=rng)
        group = HV // H if name == "kda" else 1  # KDA's function takes as many key heads as value heads
        q, k = q.repeat_interleave(group, 2), k.repeat_interleave(group, 2)

        def run() -> object:
            _, state = step(q, k, v, g=g, beta=w, initial_state=cache, output_final_state=True)
            return cache.copy_(state)

    run()
    pairs = [(timed(run), timed(BYTES.sum)) for _ in range(steps)]
    return Times([step for step, _ in pairs], [read for _, read in pairs])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows here as well")
    parser.add_argument("--cycles", type=int, default=6, help="fold cycles a variant")
    args = parser.parse_args()
    for recurrence in (MAMBA2, GDN, KDA):
        for backend in ("cpu", "torch"):
            row = check_backend(backend, recurrence)
            if row.skipped or not row.ok:
                sys.exit(f"refusing to time a backend that is wrong or not there: {row}")
    rows, first = [], 128 * MIB / median(timed(BYTES.sum) for _ in range(15))
    print(f"{cpu_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}, read {first / 1e9:.1f} GB/s")
    print(f"{'recurrence':10s} {'variant':34s} {'ms':>8s} {'GB/s':>6s} {'share':>6s}")
    for name in SHAPES:
        cycle, variants = 16 * args.cycles, []
        for label, fold_every, backend, staggered in (
            ("cpu, fold every 16, staggered", 16, "cpu", True),
            ("cpu, fold every 16, all at once", 16, "cpu", False),
            ("cpu, plain (fold every step)", 1, "cpu", False),
            ("torch, fold every 16, staggered", 16, "torch", True),
        ):
            steps = cycle if backend == "cpu" else 16
            variants.append((label, partial(replay, name, fold_every, backend, steps, staggered)))
        variants.append(("stock transformers", partial(stock, name, 3)))
        for label, run in variants:
            times = run()
            took, share = times.per_cycle()
            row = {
                "recurrence": name, "variant": label, "ms": took * 1e3, "gbps": 128 * MIB / took / 1e9, "share": share,
                "no_fold_ms": median(sorted(times.steps)[: max(1, len(times.steps) // 2)]) * 1e3,
                "read_gbps": 128 * MIB / median(times.sums) / 1e9,
            }  # fmt: skip
            rows.append(row)
            print(f"{name:10s} {label:34s} {took * 1e3:8.2f} {row['gbps']:6.1f} {share:6.0%}", flush=True)
    if args.json:
        about = {
            "cpu": cpu_name(), "threads": torch.get_num_threads(), "torch": torch.__version__,
            "date": str(date.today()), "commit": commit(), "command": "python benchmarks/cpu.py",
        }  # fmt: skip
        args.json.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


def cpu_name() -> str:
    """The processor, as the system names it."""
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if info.exists() and names else platform.processor()


def commit() -> str:
    """The checkout's commit, marked where files differ from it."""
    done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True)
    return done.stdout.strip()


if __name__ == "__main__":
    main()
