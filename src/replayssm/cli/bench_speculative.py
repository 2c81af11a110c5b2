"""``replayssm bench speculative``: what verifying drafts costs a layer, and what it gives the tiny trained models."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from replayssm.cli.args import UsageError, check_backend, need_transformers, number
from replayssm.cli.bench_args import Progress, add_common, chosen, command, start, whole_numbers

if TYPE_CHECKING:
    import torch

    from replayssm.bench.drafts import Length, ModelRow
    from replayssm.bench.kernels import Bench
    from replayssm.bench.shapes import Case
    from replayssm.bench.speculative import LayerRow

    Row = LayerRow | ModelRow

PARTS = ("layers", "models")
LAYER_HEAD = (
    f"{'shape':14} {'dtype':8} {'B':>4} {'T':>2} {'backend':10} {'us':>9} {'T plain':>9} {'snapshots':>9} "
    f"{'traffic':>9} {'KiB':>7} {'plain':>7} {'snapshots':>9}"
)
LAYER_NOTE = (
    "us: a step of T new tokens, mean of whole fold cycles. T plain: as many steps of the plain recurrence, without\n"
    "rollback. snapshots: a state kept after each token, in torch; traffic: time of one state read, T written.\n"
    "KiB: recurrent memory of a sequence: on the ring, of the plain recurrence, with snapshots."
)
MODEL_HEAD = (
    f"{'model':8} {'drafter':16} {'drafts':>6} {'tokens/s':>9} {'x stock':>7} {'accepted':>8} {'a forward':>9} "
    f"{'KiB':>7} {'snapshots':>9} {'text':>7}"
)
MODEL_NOTE = (
    "stock: transformers without drafts. accepted: of all drafts; a forward: tokens that one gives. KiB: recurrent\n"
    "states and convolution windows of a sequence; snapshots: a state for each token of a step. text: is it stock's?"
)


def add(commands: Any) -> None:
    """Declares the command. Options that ``bench`` has too are left out where not given, so as to keep its values."""
    parser = commands.add_parser(
        "speculative", help="drafts: what verifying them costs, what it gives", argument_default=argparse.SUPPRESS,
        description=run.__doc__,
    )  # fmt: skip

    def some(option: str, help: str, **own: Any) -> None:
        parser.add_argument(f"--{option}", metavar="A,B", help=help, **own)

    some("part", "layers, models (default: both)", default=None)
    some("recurrence", "mamba2, gdn, kda (default: all), of layers and of models")
    some("shape", "named layers, such as 'gdn 16/64' (default: those of the recurrences)")
    some("dtype", "of the layers' checkpoint: float32, bfloat16, float16 (default: float32)")
    some("batch", "sequences a step of a layer (default: 8; on a GPU 64)")
    some("new-tokens", "T, tokens a step of a layer (default: 1,2,4,8,16)", default=None)
    whole = number(int, 1)
    parser.add_argument("--accepted", type=whole, metavar="N", help="of them committed at most (default: all but one)")
    some(
        "backend",
        "default: auto; of several, models take the first (auto,torch: layers also in torch, as the snapshots)",
    )
    some("drafter", "none, prompt-lookup, earlier-outputs (default: all)", default=None)
    some("draft-tokens", "drafts a forward: numbers, auto (default: 2,4,8,auto)", default=None)
    parser.add_argument(
        "--tokens", type=number(int, 2), default=None, metavar="N", help="a model writes to each prompt; default: 128"
    )
    parser.add_argument(
        "--temperature",
        type=number(float, 0),
        default=None,
        metavar="X",
        help="default: 0: greedy, and texts are compared",
    )
    add_common(parser, quick="few repeats, short texts; on a CPU small layers", plot="times over T, and tokens/s")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Times a layer's step of T new tokens beside T plain steps and beside keeping a state for each token, after a
    check against the float64 oracle; then the tiny models' tokens a second by drafter. Exit code 1 where a kernel is
    wrong or a text is not stock's."""
    import torch

    from replayssm.bench.about import about
    from replayssm.bench.gate import WrongKernel
    from replayssm.bench.kernels import Bench
    from replayssm.bench.timing import Clock

    device = start(args, "speculative", "mode", "draft", "rows", "no_peers", "tune")
    parts = chosen(args.part, "part", PARTS) or list(PARTS)
    backends = [name.strip() for name in (args.backend or "").split(",") if name.strip()]
    for name in backends:
        check_backend(name)
    repeats = (5 if args.quick else 11) if device.type != "cpu" else (3 if args.quick else 5)
    bench = Bench(device, Clock(device, repeats=repeats))
    work: list[tuple[str, str, Iterator[Row], Callable[[Any], str]]] = []
    if "layers" in parts:
        work.append((LAYER_HEAD, LAYER_NOTE, _layers(args, bench, backends or ["auto"]), _layer_line))
    if "models" in parts:
        work.append((MODEL_HEAD, MODEL_NOTE, _models(args, device, (backends or ["auto"])[0]), _model_line))
    threads = torch.get_num_threads()
    if args.quick and device.type == "cpu":
        torch.set_num_threads(1)  # on layers this small more threads only wait for each other
    facts = about(device, "replayssm " + " ".join(command(args, "speculative")), bench.clock.read_bandwidth() / 1e9)
    show = print if not args.json else (lambda *text, **how: None)
    print(", ".join(f"{key} {value}" for key, value in facts.items()), file=sys.stderr if args.json else sys.stdout)
    rows: list[Row] = []
    code = 0
    try:
        for head, note, part, line in work:
            show(f"\n{head}")
            for row in part:
                rows.append(row)
                show(line(row), flush=True)
                if getattr(row, "identical", None) is False:
                    code = 1
                if args.out:  # after each row, so that a run which is cut short leaves what it had
                    args.out.write_text(json.dumps({"about": facts, "rows": _plain(rows)}, indent=1) + "\n", "utf-8")
            show(note)
    except (WrongKernel, KeyboardInterrupt) as error:
        print(f"replayssm: {error or 'interrupted'}", file=sys.stderr)
        code = 1 if isinstance(error, WrongKernel) else 130
    finally:
        torch.set_num_threads(threads)  # loading a tiny model lowers them too
    if args.json:
        print(json.dumps(_plain(rows), indent=1))
    if args.plot and rows:
        from replayssm.bench.plot_speculative import plot

        plot(rows, args.plot, f"{facts['device']}, torch {facts['torch']}, reads {facts['read_gbps']:.0f} GB/s")
    return code


def _plain(rows: list[Row]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(row) for row in rows]


def _layers(args: argparse.Namespace, bench: Bench, backends: list[str]) -> Iterator[Row]:
    """Checks the arguments at once; what comes back measures."""
    layers = _cases(args, bench.device)
    for case in (case for each in layers for case in each):
        for name in backends:
            try:
                bench.backend(case, name)
            except ValueError as error:
                raise UsageError(str(error)) from None
    return _measure_layers(layers, bench, backends, args.json)


def _cases(args: argparse.Namespace, device: torch.device) -> list[list[Case]]:
    """By layer, dtype and batch, the cases of each length."""
    import torch

    from replayssm.bench.shapes import DTYPES, SHAPES, select
    from replayssm.bench.speculative import LENGTHS, cases
    from replayssm.recurrence import RECURRENCES

    cpu = device.type == "cpu"
    recurrences = chosen(args.recurrence, "recurrence", RECURRENCES) or list(RECURRENCES)
    shapes = select(recurrences, chosen(args.shape, "shape", SHAPES), args.quick, cpu)
    if not shapes:
        raise UsageError(f"no shape of --shape {args.shape} is of recurrence {', '.join(recurrences)}")
    dtypes = chosen(args.dtype, "dtype", DTYPES) or ["float32"]
    batches = whole_numbers(args.batch, "batch") or [8 if cpu else 64]
    lengths = sorted(set(whole_numbers(args.new_tokens, "new-tokens") or LENGTHS))
    inputs = torch.float32 if cpu else torch.bfloat16
    return [
        cases(shape, DTYPES[dtype], inputs, B, lengths, args.accepted)
        for shape in shapes
        for dtype in dtypes
        for B in batches
    ]


def _measure_layers(layers: list[list[Case]], bench: Bench, backends: list[str], quiet: bool) -> Iterator[Row]:
    import torch

    from replayssm.bench.speculative import measure

    for done, cases in enumerate(layers):
        for case in cases:
            with Progress(f"{done + 1}/{len(layers)} {case}", lines=quiet):
                try:
                    rows = measure(case, bench, backends)
                except torch.OutOfMemoryError:
                    print(f"skipped, out of memory: {case}", file=sys.stderr)
                    continue
            yield from rows


def _layer_line(row: LayerRow) -> str:
    return (
        f"{row.shape:14} {row.dtype:8} {row.batch:>4} {row.T:>2} {row.backend:10} {row.us:9.1f} {row.plain_us:9.1f} "
        f"{row.snapshot_us:9.1f} {row.traffic_us:9.1f} {row.bytes / 1024:7.0f} {row.plain_bytes / 1024:7.0f} "
        f"{row.snapshot_bytes / 1024:9.0f}"
    )


def _models(args: argparse.Namespace, device: torch.device, backend: str) -> Iterator[Row]:
    """Checks the arguments at once; what comes back measures."""
    from replayssm.tiny import TINY

    names = chosen(args.recurrence, "recurrence", TINY) or list(TINY)
    need_transformers()
    from replayssm.bench.drafts import DRAFTERS, LENGTHS

    drafters = chosen(args.drafter, "drafter", DRAFTERS) or list(DRAFTERS)
    lengths: list[Length] = [4] if args.quick else list(LENGTHS)
    if args.draft_tokens is not None:
        words = [word.strip() for word in args.draft_tokens.split(",") if word.strip()]
        lengths = [word if word == "auto" else whole_numbers(word, "draft-tokens")[0] for word in words]
    return _measure_models(args, names, drafters, list(dict.fromkeys(lengths)), device, backend)


def _measure_models(
    args: argparse.Namespace, names: list[str], drafters: list[str], lengths: list[Length], device: Any, backend: str
) -> Iterator[Row]:
    import torch

    from replayssm.bench.drafts import PROMPTS, Drafting
    from replayssm.cli.checkpoint import load
    from replayssm.tiny import tiny_model

    prompts = PROMPTS[:2] if args.quick else PROMPTS
    for done, name in enumerate(names):
        try:
            checkpoint = load(tiny_model(name), device=str(device))
        except FileNotFoundError as error:
            raise UsageError(str(error)) from None
        ids = [torch.tensor([checkpoint.encode(prompt)], device=device) for prompt in prompts]
        with Progress(f"{done + 1}/{len(names)} {name}", lines=args.json) as tell:
            drafting = Drafting(
                name, checkpoint.model, ids, args.tokens or (16 if args.quick else 128), args.temperature or 0.0,
                1 if args.quick else 3, backend, tell,
            )  # fmt: skip
            try:
                rows = list(drafting.measure(drafters, lengths))
            except ValueError as error:
                raise UsageError(str(error)) from None
        yield from rows


def _model_line(row: ModelRow) -> str:
    text = (
        "" if row.drafter == "stock" else "sampled" if row.identical is None else "same" if row.identical else "differs"
    )
    return (
        f"{row.model:8} {row.drafter:16} {row.draft_tokens or '':>6} {row.tokens_per_s:9.1f} {row.speedup:7.2f} "
        f"{f'{row.acceptance:.0%}' if row.drafted else '':>8} {row.tokens_per_forward:9.2f} {row.bytes / 1024:7.0f} "
        f"{row.snapshot_bytes / 1024:9.0f} {text:>7}"
    )
