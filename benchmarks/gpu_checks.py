"""Everything that CI, which has no GPU, leaves to a machine that has one: `python benchmarks/gpu_checks.py --out DIR`.

The tests on CUDA in processes side by side, the long random walk, and compute-sanitizer over verifies, a tree and a
fold of each recurrence. A line a job, its output in DIR; exit code 1 where one fails."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTEST = [
    sys.executable,
    "-m",
    "pytest",
    "-q",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:benchmark",
    "-W",
    "ignore::DeprecationWarning",
    "-W",
    "ignore::UserWarning",  # of torch's own: products could be faster in TF32
]
SANITIZED = """
import torch
from replayssm import GDN, KDA, MAMBA2, LayerSpec, StatePool, ops
from replayssm.testing import make_inputs
from replayssm.tree import commit_path, verify_tree

rng = torch.Generator().manual_seed(0)
for recurrence in (MAMBA2, GDN, KDA):
    for dtype in (torch.float32, torch.bfloat16):
        pool = StatePool(5, fold_every=3, window=4, device="cuda")
        layer = pool.add_layer(LayerSpec(recurrence, 2, 4, 128, 64, dtype, torch.bfloat16))
        conv, taps = pool.add_conv(300, dtype=dtype), torch.randn(300, 4, device="cuda", dtype=dtype)
        slots = torch.tensor([3, -1, 0, 4], dtype=torch.int32, device="cuda")
        for T in (1, 4, 4, 1):
            x = [y.cuda() for y in make_inputs(recurrence, 4, T, 2, 4, 128, 64, torch.bfloat16, rng)]
            ops.verify(layer, *x, slots=slots, backend="triton")
            conv.convolve(torch.randn(4, 300, T, device="cuda", dtype=dtype), slots, taps, silu=True)
            pool.commit(slots, T)
        parents = torch.tensor([-1, 0, 0, 2], device="cuda").expand(4, 4)
        x = [y.cuda() for y in make_inputs(recurrence, 4, 4, 2, 4, 128, 64, torch.bfloat16, rng)]
        verify_tree(layer, *x, parents, slots=slots, backend="triton")
        path, accepted = torch.tensor([0, 2, 3], device="cuda").expand(4, 3), torch.full((4,), 3, device="cuda")
        commit_path(pool.layers, path, accepted, slots)
        ops.fold(pool.layers, slots, backend="triton")
        torch.cuda.synchronize()
"""


def jobs(steps: int) -> Iterator[tuple[str, list[str], dict[str, str]]]:
    """Name, command and environment of each, the longest first."""
    sys.path.insert(0, str(ROOT / "tests"))
    from tiny_models import BUILDERS, CHAINS_ONLY

    for recurrence in ("mamba2", "gdn", "kda", "fourth"):
        own = f"triton-cuda and {recurrence}"
        yield f"test_ops triton {recurrence}", [*PYTEST, "tests/test_ops.py", "-k", own], {}
    yield "test_ops sequential", [*PYTEST, "tests/test_ops.py", "-k", "sequential-cuda"], {}
    for file in ("test_drift", "test_pool", "test_norm"):
        for backend in ("triton", "sequential"):
            yield f"{file} {backend}", [*PYTEST, f"tests/{file}.py", "-k", f"{backend}-cuda"], {}
    for name in BUILDERS:
        yield f"static {name}", [*PYTEST, "tests/test_hf_static.py", "-k", f"captured and {name}-cuda"], {}
        if name not in CHAINS_ONLY:
            own = f"captured_on_a_gpu and [{name}]"
            yield f"drafts {name}", [*PYTEST, "tests/test_speculative_static.py", "-k", own], {}
    own = "captured and not (cpu or cuda)"
    yield "static others", [*PYTEST, "tests/test_hf_static.py", "-k", own], {}
    for recurrence in ("mamba2", "gdn", "kda", "fourth"):
        walk = f"cuda and triton and {recurrence}"
        yield f"walk {recurrence}", [*PYTEST, "tests/test_walk.py", "-k", walk], {"WALK_STEPS": str(steps // 4)}
    yield "test_conv", [*PYTEST, "tests/test_conv.py", "-k", "cuda"], {}
    yield "test_hf_few", [*PYTEST, "tests/test_hf_few.py", "-k", "cuda"], {}
    yield "test_speculative_tree", [*PYTEST, "tests/test_speculative_tree.py", "-k", "cuda"], {}
    yield "verify", [sys.executable, "-m", "replayssm", "verify"], {}
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    for tool in ("memcheck", "racecheck"):
        yield tool, [sanitizer, "--tool", tool, "--error-exitcode", "1", sys.executable, "-c", SANITIZED], {}


def main() -> int:
    """Runs them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for the output of each job")
    parser.add_argument("--only", default="", metavar="TEXT", help="jobs whose name contains it")
    parser.add_argument("--workers", type=int, default=8, metavar="N", help="at a time; default: 8")
    parser.add_argument("--seconds", type=int, default=540, metavar="N", help="a job may take; default: 540")
    parser.add_argument("--steps", type=int, default=10_000, metavar="N", help="of the random walks, all together")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    def run(job: tuple[str, list[str], dict[str, str]]) -> bool:
        name, command, more = job
        begin, log = time.monotonic(), args.out / f"{name.replace(' ', '-')}.log"
        with log.open("wb") as out:
            try:
                environment = os.environ | {"OMP_NUM_THREADS": "2"} | more
                code = subprocess.run(
                    command, cwd=ROOT, env=environment, stdout=out, stderr=out, timeout=args.seconds
                ).returncode
            except (subprocess.TimeoutExpired, OSError) as error:
                out.write(f"\n{type(error).__name__}: {error}".encode()[:300])
                code = -1
        last = log.read_text("utf-8", "replace").strip().splitlines()[-1:] or [""]
        print(
            f"{'ok' if code == 0 else 'FAILED':6} {time.monotonic() - begin:5.0f} s  {name:40} {last[0][:100]}",
            flush=True,
        )
        return code == 0

    chosen = [job for job in jobs(args.steps) if args.only in job[0]]
    with ThreadPoolExecutor(args.workers) as pool:
        results = list(pool.map(run, chosen))
    print(f"{sum(results)} of {len(results)} jobs passed")
    return 0 if results and all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
