"""Decode kernels on a GPU against the memory's speed. ``python benchmarks/gpu.py [--json out.json] [--quick]``

One line a case: microseconds a step over a full fold cycle, rows staggered; x, the time over what reading the
checkpoint once takes at the read bandwidth measured in the same run; the plain recurrence beside it, tuned here too.
CUDA graphs, medians, states far larger than L2. Nothing is timed before it agrees with the oracle.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from datetime import date

import torch
import triton
import triton.language as tl

from replayssm import GDN, KDA, MAMBA2, LayerSpec, LayerState, Ring
from replayssm.backends.triton import config, launch_plain, launch_verify
from replayssm.backends.triton.config import LaunchConfig
from replayssm.gates import delta_qk
from replayssm.recurrence import Recurrence
from replayssm.testing import check_backend

# name: recurrence, H, HV, K, V
SHAPES: dict[str, tuple[Recurrence, int, int, int, int]] = {
    "mamba2 128x64": (MAMBA2, 8, 128, 128, 64),
    "mamba2 96x80": (MAMBA2, 8, 96, 128, 80),
    "gdn 16/64": (GDN, 16, 64, 128, 128),
    "gdn 16/32": (GDN, 16, 32, 128, 128),
    "kda 64": (KDA, 64, 64, 128, 128),
}
MODES = {"standard": (1, 1, 16), "verify": (4, 3, 12)}  # T, accepted a step, fold limit + 1
PLAIN = [LaunchConfig(BV, warps, 8, dot=False) for BV, warps in [(8, 1), (16, 1), (16, 2), (32, 2), (32, 4), (64, 4)]]


def seconds(run: Callable[[], object], repeats: int = 11) -> float:
    """Median device seconds of ``run``, replayed as a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run()
        times = []
        for _ in range(repeats):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[len(times) // 2]


@triton.jit
def read_only(x, out, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.sum(tl.load(x + i), 0)
    if total == 1.25e30:  # never: keeps the loads
        tl.store(out, total)


def read_bandwidth() -> float:
    """Bytes a second of a kernel that only reads: the best of a few block sizes over 1 GiB."""
    x, out = torch.randn(1 << 28, device="cuda"), torch.zeros(1, device="cuda")
    best = 0.0
    for block, warps in ((4096, 4), (8192, 8), (16384, 8)):
        grid = (x.numel() // block,)
        took = seconds(lambda g=grid, b=block, w=warps: [read_only[g](x, out, b, num_warps=w) for _ in range(4)]) / 4
        best = max(best, x.numel() * 4 / took)
    return best


def build(shape: str, dtype: torch.dtype, ring: Ring) -> LayerState:
    """A layer full of random numbers."""
    recurrence, H, HV, K, V = SHAPES[shape]
    layer = LayerSpec(recurrence, H, HV, K, V, dtype, torch.bfloat16).build(ring)
    for x in (layer.ckpt, layer.k, layer.d):
        x.normal_().mul_(0.1)
    layer.w.uniform_()
    layer.g.uniform_().mul_(-0.2)
    return layer


def draw(shape: str, B: int, T: int) -> list[torch.Tensor]:
    """Inputs of one step, in bfloat16 (w and g in float32)."""
    recurrence, H, HV, K, V = SHAPES[shape]
    q, k, v = (torch.randn(B, T, *d, device="cuda") for d in ((H, K), (H, K), (HV, V)))
    if recurrence.erase:
        q, k = delta_qk(q, k)
    gate = (K,) if recurrence.channel else ()
    w, g = torch.rand(B, T, HV, device="cuda"), -0.2 * torch.rand(B, T, HV, *gate, device="cuda")
    return [q.bfloat16(), k.bfloat16(), v.bfloat16(), w, g]


def cycle(layer: LayerState, accepted: int) -> list[LayerState]:
    """The layer at each step of one fold cycle, rows spread evenly over it."""
    ring = layer.ring
    counts = list(range(accepted, ring.limit + accepted + 1, accepted))
    row, states = torch.arange(ring.N, device="cuda"), []
    for step in range(len(counts)):
        at = Ring.build(ring.N, ring.R, ring.window, ring.limit, "cuda")
        at.count[: ring.N] = torch.tensor(counts, dtype=torch.int32, device="cuda")[(row + step) % len(counts)]
        at.head[: ring.N] = row * 7 % ring.R
        states.append(dataclasses.replace(layer, ring=dataclasses.replace(at, scratch=ring.scratch)))
    return states


def measure(shape: str, dtype: torch.dtype, mode: str, B: int, bandwidth: float) -> dict[str, object]:
    """One row of the table."""
    recurrence, _, HV, K, V = SHAPES[shape]
    T, accepted, fold_every = MODES[mode]
    ring = Ring.build(B, fold_every + 2 * T - 1, T, fold_every - 1, "cuda")
    layer, slots = build(shape, dtype, ring), torch.arange(B, dtype=torch.int32, device="cuda")
    inputs = draw(shape, B, T)
    out = torch.empty_like(inputs[2])
    steps = cycle(layer, accepted)
    took = seconds(lambda: [launch_verify(at, *inputs, slots, out, config(at, T)) for at in steps]) / len(steps)
    # The plain recurrence takes one token; verifying T by it costs at least T such steps (and T kept states).
    ring1 = Ring.build(B, 2, 1, 0, "cuda")
    ring1.count[:B] = 1
    one, first = build(shape, dtype, ring1), [x[:, :1] for x in inputs]
    plain = min(seconds(lambda c=c: launch_plain(one, *first, slots, out[:, :1], c)) for c in PLAIN)
    nbytes = B * HV * K * V * layer.ckpt.element_size()
    return {
        "recurrence": recurrence.name, "shape": shape, "mode": mode, "dtype": str(dtype).removeprefix("torch."),
        "batch": B, "T": T, "R": ring.R, "backend": "triton", "us": took * 1e6, "x": took * bandwidth / nbytes,
        "gbps": nbytes / took / 1e9, "plain_us": plain * 1e6, "plain_x": plain * bandwidth / nbytes,
        "speedup": T * plain / took if mode == "verify" else plain / took,
        "config": dataclasses.asdict(config(layer, T)),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the rows here as well")
    parser.add_argument("--quick", action="store_true", help="two batches and the first shape of each recurrence")
    args = parser.parse_args()
    for recurrence in (MAMBA2, GDN, KDA):
        for dtype in (torch.float32, torch.bfloat16):
            for T in (1, 4):
                row = check_backend("triton", recurrence, dtype=dtype, T=T, device="cuda")
                if row.skipped or not row.ok:
                    sys.exit(f"refusing to time a kernel that is wrong: {row}")
    bandwidth = read_bandwidth()
    device, commit = torch.cuda.get_device_name(), subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True)
    print(f"{device}, torch {torch.__version__}, triton {triton.__version__}, read {bandwidth / 1e9:.0f} GB/s")
    print("shape          dtype     mode         B       us      x   GB/s  plain us  speedup")
    shapes = [s for s in SHAPES if s not in ("mamba2 96x80", "gdn 16/32")] if args.quick else list(SHAPES)
    rows = []
    for shape in shapes:
        for dtype in (torch.float32, torch.bfloat16):
            for mode in MODES:
                for B in (64, 256) if args.quick else (1, 8, 32, 64, 256):
                    row = measure(shape, dtype, mode, B, bandwidth)
                    rows.append(row)
                    print(
                        f"{shape:14s} {row['dtype']!s:9s} {mode:9s} {B:4d} {row['us']:8.1f} {row['x']:6.2f} "
                        f"{row['gbps']:6.0f} {row['plain_us']:9.1f} {row['speedup']:8.2f}",
                        flush=True,
                    )
    if args.json:
        about = {
            "device": device, "torch": torch.__version__, "triton": triton.__version__, "date": str(date.today()),
            "commit": commit.stdout.decode().strip(), "command": "python benchmarks/gpu.py" + " --quick" * args.quick,
            "read_gbps": bandwidth / 1e9,
        }  # fmt: skip
        with open(args.json, "w") as file:
            json.dump({"about": about, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
