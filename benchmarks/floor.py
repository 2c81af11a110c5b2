"""What reading every state and writing a few takes where nothing else is done: `python benchmarks/floor.py`. A GPU.

A replay step reads each checkpoint and writes those whose fold is due. Here a program of one warp reads 8 KiB, and
those of every N-th run of programs write it back: the least that any kernel of that shape can take, as `x` counts it
(over the time in which all is read once). Lines of JSON: every (0: nothing is written), run, us, x, and what a byte
written costs in bytes read."""

from __future__ import annotations

import json

import torch
import triton
import triton.language as tl

from replayssm.bench.timing import gpu_read_bandwidth, graph_seconds

BLOCK = 2048  # float32 numbers a program
NEVER = 1 << 30


@triton.jit
def floor_kernel(x, out, every, phase, RUN: tl.constexpr, BLOCK: tl.constexpr):
    """Reads all of ``x`` and halves what the due programs have read."""
    pid = tl.program_id(0).to(tl.int64)
    p = x + pid * BLOCK + tl.arange(0, BLOCK)
    b = tl.load(p)
    total = tl.sum(b, 0)
    if total == 1.25e30:  # never: keeps the loads
        tl.store(out, total)
    if (pid // RUN * 2654435761 >> 7) % every == phase:
        tl.store(p, b * 0.5)


def main() -> None:
    """Prints the table."""
    device = torch.device("cuda")
    x, out = torch.zeros(1 << 30, device=device), torch.zeros(1, device=device)
    least = x.nbytes / gpu_read_bandwidth(device)
    programs = x.numel() // BLOCK
    for run in (1, 512, 8192):
        for every in (0, 16, 5, 1):

            def steps(run: int = run, every: int = every) -> None:
                for phase in range(max(every, 1)):
                    floor_kernel[(programs,)](x, out, every or NEVER, phase, RUN=run, BLOCK=BLOCK, num_warps=1)

            seconds = graph_seconds(steps, device) / max(every, 1)
            row = {"every": every, "run": run, "us": seconds * 1e6, "x": seconds / least}
            row["written"] = (row["x"] - 1) * every
            print(json.dumps({name: round(y, 3) for name, y in row.items()}), flush=True)


if __name__ == "__main__":
    main()
