"""``replayssm bench``: what a step costs here. ``bench kernels``, the default, times one layer's kernels."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from replayssm.cli import bench_e2e, bench_speculative
from replayssm.cli.args import UsageError, check_backend, number
from replayssm.cli.bench_args import Progress, add_common, check_files, chosen, command, open_device, whole_numbers

if TYPE_CHECKING:
    import torch

    from replayssm.bench.kernels import Bench, Row
    from replayssm.bench.shapes import Case
    from replayssm.bench.tune import Tuned

HEAD = (
    f"{'shape':14} {'mode':8} {'dtype':8} {'B':>4} {'T':>2} {'R':>3}  {'backend':12} {'us':>9} {'x':>6} {'GB/s':>6} "
    f"{'share':>5} {'plain us':>9} {'speed-up':>8}"
)
NOTE = (
    "us: one step, mean of whole fold cycles. x: over reading the checkpoint once. GB/s: all that a step must move; "
    "share: of\nwhat this machine reads. plain: the recurrence that writes its state each token; speed-up: over one "
    "such step a token\n(a fold, which takes the place of many: over one). *: StatePool.at and static caches take "
    "the plain recurrence here."
)


def add(commands: Any) -> None:
    """Declares the command and what it can time. Options of the default stand on both levels, without defaults of
    their own, so that neither level overwrites the other's."""
    parser = commands.add_parser(
        "bench", help="time the kernels against the memory's speed", description=f"Default: kernels. {run.__doc__}"
    )
    _add_kernel_options(parser)
    parser.set_defaults(run=run)
    what = parser.add_subparsers(title="what to time", metavar="[kernels | speculative | e2e]", required=False)
    kernels = what.add_parser(
        "kernels", help="a step of one layer (the default)", argument_default=argparse.SUPPRESS, description=run.__doc__
    )
    _add_kernel_options(kernels)
    kernels.set_defaults(run=run)
    bench_speculative.add(what)
    bench_e2e.add(what)


def _add_kernel_options(parser: argparse.ArgumentParser) -> None:
    def some(option: str, help: str) -> None:
        parser.add_argument(f"--{option}", metavar="A,B", help=help)

    some("recurrence", "mamba2, gdn, kda (default: all)")
    some("shape", "named layers, such as 'gdn 16/64' (default: those of the recurrences)")
    some("dtype", "of the checkpoint: float32, bfloat16, float16 (default: the first two; on a CPU the first)")
    some("batch", "sequences a step (default: 1,8,32,64,256; on a CPU 1,8,64)")
    some("mode", "standard, verify, fold (default: all)")
    whole = number(int, 1)
    parser.add_argument("--draft", type=whole, metavar="T", help="new tokens a step of mode verify (default: 4)")
    parser.add_argument("--accepted", type=whole, metavar="N", help="of them committed (default: all but one)")
    parser.add_argument("--rows", type=whole, metavar="R", help="ring rows (default: a fold about every 16 tokens)")
    parser.add_argument("--backend", metavar="NAME", help="default: auto")
    parser.add_argument("--no-peers", action="store_true", help="leave other implementations out")
    parser.add_argument("--tune", action="store_true", help="try every launch configuration instead (GPU)")
    add_common(parser, quick="few cases, few repeats; on a CPU small layers", plot="x over the batch")


def run(args: argparse.Namespace) -> int:
    """Times each kernel of a layer after a check against the float64 oracle; exit code 1 where one is wrong."""

    from replayssm.bench.about import about
    from replayssm.bench.gate import WrongKernel
    from replayssm.bench.kernels import Bench
    from replayssm.bench.timing import Clock
    from replayssm.bench.tune import Tuned

    device = open_device(args)
    check_backend(args.backend or "auto")
    cases = _cases(args, device)
    _check_files(args, device)
    on_gpu = device.type != "cpu"
    bench = Bench(device, Clock(device, repeats=(11 if on_gpu else 5) if not args.quick else (5 if on_gpu else 3)))
    _check_serves(bench, cases, args.backend or "auto")
    facts = about(device, "replayssm " + " ".join(command(args, "kernels")), bench.clock.read_bandwidth() / 1e9)
    print(", ".join(f"{key} {value}" for key, value in facts.items()), file=sys.stderr if args.json else sys.stdout)
    work = _tune(cases, bench, args.json) if args.tune else _measure(cases, bench, args)
    rows, machine, code = [], [], 0
    try:
        for row in work:
            rows.append(row)
            machine.append(row.plain() if isinstance(row, Tuned) else dataclasses.asdict(row))
            if args.out:  # after each row, so that a run which is cut short leaves what it had
                args.out.write_text(json.dumps({"about": facts, "rows": machine}, indent=1) + "\n", "utf-8")
    except (WrongKernel, KeyboardInterrupt) as error:
        print(f"replayssm: {error or 'interrupted'}", file=sys.stderr)
        code = 1 if isinstance(error, WrongKernel) else 130
    if args.json:
        print(json.dumps(machine, indent=1))
    elif rows and not args.tune:
        print(f"\n{NOTE}")
    if args.plot and rows:
        from replayssm.bench.plot import plot

        plot(rows, args.plot, f"{facts['device']}, torch {facts['torch']}, reads {facts['read_gbps']:.0f} GB/s")
    return code


def _cases(args: argparse.Namespace, device: torch.device) -> list[Case]:
    import torch

    from replayssm.bench.shapes import DTYPES, MODES, SHAPES, make_case, select
    from replayssm.recurrence import RECURRENCES

    cpu, quick = device.type == "cpu", args.quick
    recurrences = chosen(args.recurrence, "recurrence", RECURRENCES) or list(RECURRENCES)
    shapes = select(recurrences, chosen(args.shape, "shape", SHAPES), quick, cpu)
    if not shapes:
        raise UsageError(f"no shape of --shape {args.shape} is of recurrence {', '.join(recurrences)}")
    dtypes = chosen(args.dtype, "dtype", DTYPES) or (["float32"] if cpu else ["float32", "bfloat16"])
    modes = chosen(args.mode, "mode", MODES) or [m for m in MODES if not (quick and m == "fold" and not cpu)]
    if args.tune:
        modes = [mode for mode in modes if mode != "fold"]
    batches = whole_numbers(args.batch, "batch")
    batches = batches or ([1, 8] if cpu else [64, 256]) * quick or ([1, 8, 64] if cpu else [1, 8, 32, 64, 256])
    if args.tune and not args.batch:
        batches = [256]
    inputs = torch.float32 if cpu else torch.bfloat16
    try:
        return [
            make_case(shape, mode, DTYPES[dtype], inputs, B, draft=args.draft or 4, accepted=args.accepted, R=args.rows)
            for shape in shapes
            for dtype in dtypes
            for mode in modes
            for B in batches
        ]
    except ValueError as error:
        raise UsageError(str(error)) from None


def _check_files(args: argparse.Namespace, device: torch.device) -> None:
    """Before minutes are spent: can what was asked for be done and written?"""
    if args.tune and device.type == "cpu":
        raise UsageError("--tune tries Triton's launch configurations and needs a GPU; this run is on cpu")
    if args.tune and args.plot is not None:
        raise UsageError("--plot draws measured rows, and --tune gives none")
    check_files(args)


def _check_serves(bench: Bench, cases: list[Case], backend: str) -> None:
    for case in cases:
        try:
            bench.backend(case, backend)
        except ValueError as error:
            raise UsageError(str(error)) from None


def _measure(cases: list[Case], bench: Bench, args: argparse.Namespace) -> Iterator[Row]:
    import torch

    from replayssm.bench import peers

    show = (lambda text: None) if args.json else (lambda text: print(text, flush=True))
    reasons: dict[str, None] = {}
    show(f"\n{HEAD}")
    for done, case in enumerate(cases):
        with Progress(f"{done + 1}/{len(cases)} {case}", lines=args.json):
            try:
                rows = [bench.measure(case, args.backend or "auto")]
            except torch.OutOfMemoryError:
                print(f"skipped, out of memory: {case}", file=sys.stderr)
                continue
            for peer in () if args.no_peers or case.mode != "standard" else peers.PEERS:
                row = peers.measure(peer, case, bench)
                if not isinstance(row, str):
                    rows.append(row)
                elif not row.startswith("no "):  # not made for this recurrence or dtype: nothing to explain
                    reasons[f"peer {peer.name}: not timed: {row}"] = None
        for row in rows:
            show(_line(row))
            yield row
    for reason in reasons:
        print(reason, file=sys.stderr)


def _line(row: Row) -> str:
    return (
        f"{row.shape:14} {row.mode:8} {row.dtype:8} {row.batch:>4} {row.T:>2} {row.R:>3}  {row.backend:12} "
        f"{row.us:9.1f} {row.x:6.2f} {row.gbps:6.1f} {row.share:5.0%} {row.plain_us:9.1f} {row.speedup:8.2f}"
        f"{' *' if row.taken == 'plain' else ''}"
    )


def _tune(cases: list[Case], bench: Bench, quiet: bool) -> Iterator[Tuned]:
    from replayssm.bench.tune import tune

    for done, case in enumerate(cases):
        with Progress(f"{done + 1}/{len(cases)} {case}", lines=quiet) as tell:
            tuned = tune(case, bench, tell=tell)
        if not quiet:
            print(tuned.line, flush=True)
        for config, why in tuned.refused:
            print(f"    refused: {config}: {why}", file=sys.stderr)
        yield tuned
