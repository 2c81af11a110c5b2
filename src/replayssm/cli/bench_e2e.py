"""``replayssm bench e2e``: a decode step of a whole model in transformers' generate, with and without replay."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from replayssm.cli.args import UsageError, need_transformers, number
from replayssm.cli.bench_args import Progress, add_common, chosen, command, start, whole_numbers

if TYPE_CHECKING:
    import torch

    from replayssm.bench.e2e import Row

HEAD = (
    f"{'model':20} {'variant':14} {'B':>4} {'T':>2} {'ms':>8} {'tokens/s':>9} {'x floor':>7} {'GB':>6} {'weights':>8} "
    f"{'state':>7} {'attn':>6} {'rest':>6} {'idle':>6} {'launches':>8}"
)
NOTE = (
    "ms: one decode step of T tokens, median of whole fold cycles. floor: weights and states read once at the "
    "memory's\nspeed. GB: peak device memory. Then milliseconds of GPU work by what it is for; compiled stock's states "
    "are in the rest."
)


def add(commands: Any) -> None:
    """Declares the command. Options that ``bench`` has too are left out where not given, so as to keep its values."""
    parser = commands.add_parser(
        "e2e", help="a whole model's decode step in transformers", argument_default=argparse.SUPPRESS,
        description=run.__doc__,
    )  # fmt: skip

    def some(option: str, help: str, **own: Any) -> None:
        parser.add_argument(f"--{option}", metavar="A,B", help=help, **own)

    some("config", "models with random weights (default: qwen3.5-4b; on a CPU tiny-gdn)", default=None)
    some(
        "variant",
        "stock-eager, stock-compiled, replay-eager, replay-off, replay-on, replay-auto, replay-verify (default: all)",
        default=None,
    )
    some("batch", "sequences (default: 1,32,128,256; on a CPU 1,8)")
    some("new-tokens", "T, tokens a step of replay-verify (default: 1,4)", default=None)
    whole = number(int, 1)
    parser.add_argument("--layers", type=whole, metavar="N", default=None, help="keep the first N layers only")
    parser.add_argument("--prompt", type=whole, metavar="N", default=None, help="tokens of the prompts (default: 64)")
    parser.add_argument("--dtype", help="of the checkpoints: float32, bfloat16, float16 (default: float32)")
    add_common(parser, quick="one fold cycle", plot="times and where they go")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Times transformers' generate on models of real size with random weights (bfloat16 on a GPU): stock eager, stock
    compiled, ours eager, and ours compiled with replay off and on; memory, and where a step's time goes."""
    need_transformers()
    from replayssm.bench.about import about
    from replayssm.bench.timing import Clock

    device = start(
        args, "e2e", "recurrence", "shape", "mode", "draft", "accepted", "rows", "backend", "no_peers", "tune"
    )
    read = Clock(device).read_bandwidth()
    rows: list[Row] = []
    code = 0
    work = _measure(args, device, read)
    facts = about(device, "replayssm " + " ".join(command(args, "e2e")), read / 1e9)
    show = print if not args.json else (lambda *text, **how: None)
    print(", ".join(f"{key} {value}" for key, value in facts.items()), file=sys.stderr if args.json else sys.stdout)
    try:
        show(f"\n{HEAD}")
        for row in work:
            rows.append(row)
            show(_line(row), flush=True)
            if args.out:  # after each row, so that a run which is cut short leaves what it had
                plain = [dataclasses.asdict(row) for row in rows]
                args.out.write_text(json.dumps({"about": facts, "rows": plain}, indent=1) + "\n", "utf-8")
        show(NOTE)
    except KeyboardInterrupt:
        print("replayssm: interrupted", file=sys.stderr)
        code = 130
    if args.json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
    if args.plot and rows:
        from replayssm.bench.plot_e2e import plot

        plot(rows, args.plot, f"{facts['device']}, torch {facts['torch']}, reads {facts['read_gbps']:.0f} GB/s")
    return code


def _measure(args: argparse.Namespace, device: torch.device, read: float) -> Iterator[Row]:
    """Checks the arguments at once; what comes back measures."""
    import torch

    from replayssm.bench.e2e import VARIANTS
    from replayssm.bench.models import CONFIGS
    from replayssm.bench.shapes import DTYPES

    cpu = device.type == "cpu"
    names = chosen(args.config, "config", CONFIGS) or ["tiny-gdn" if cpu else "qwen3.5-4b"]
    variants = chosen(args.variant, "variant", VARIANTS) or list(VARIANTS)
    batches = whole_numbers(args.batch, "batch") or ([1, 8] if cpu else [1, 32, 128, 256])
    lengths = whole_numbers(args.new_tokens, "new-tokens")
    if lengths and not any(VARIANTS[variant].verifies for variant in variants):
        raise UsageError("--new-tokens is of variant replay-verify, which is not among --variant")
    cases = [
        (batch, variant, T)
        for batch in batches
        for variant in variants
        for T in ((lengths or [1, 4]) if VARIANTS[variant].verifies else [1])
    ]
    state_dtype = DTYPES[(chosen(args.dtype, "dtype", DTYPES) or ["float32"])[0]]

    def rows() -> Iterator[Row]:
        from replayssm.bench.e2e import measure
        from replayssm.bench.models import build

        for name in names:
            model = build(name, args.layers, torch.float32 if cpu else torch.bfloat16, device)
            for batch, variant, T in cases:
                what = f"{name} {variant} B={batch}{f' T={T}' if VARIANTS[variant].verifies else ''}"
                with Progress(what, lines=args.json) as tell:
                    try:
                        row = measure(
                            name, model, variant, batch, T=T, prompt=args.prompt or 64, cycles=1 if args.quick else 4,
                            state_dtype=state_dtype, read=read, tell=tell,
                        )  # fmt: skip
                    except torch.OutOfMemoryError:
                        print(f"skipped, out of memory: {what}", file=sys.stderr)
                        continue
                    except ValueError as error:
                        raise UsageError(str(error)) from None
                yield row
            del model

    return rows()


def _line(row: Row) -> str:
    parts = row.parts or {}
    split = " ".join(
        f"{parts[name]:{width}.2f}" if name in parts else " " * width
        for name, width in (("weights", 8), ("state", 7), ("attention", 6), ("rest", 6), ("idle", 6))
    )
    memory = "" if row.peak_bytes is None else f"{row.peak_bytes / 1e9:.1f}"
    launches = "" if row.launches is None else f"{row.launches:.0f}"
    return (
        f"{row.model:20} {row.variant:14} {row.batch:>4} {row.T:>2} {row.ms:8.2f} {row.tokens_per_s:9.0f} "
        f"{row.ms / row.floor_ms:7.2f} {memory:>6} {split} {launches:>8}"
    )
