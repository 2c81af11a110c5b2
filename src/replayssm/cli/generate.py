"""``replayssm generate``: continues a prompt with a local checkpoint, streaming."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from replayssm.cli.args import UsageError, add_replay_options, check_backend, check_prompt, number


def add(commands: Any) -> None:
    """Declares the command."""
    parser = commands.add_parser("generate", help="continue a prompt with a local checkpoint of a supported type")
    parser.add_argument(
        "--model", required=True, type=Path, metavar="DIR", help="directory of config.json, *.safetensors"
    )
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="the text to continue; - reads standard input")
    parser.add_argument("--max-new-tokens", type=number(int, 1), default=128, metavar="N", help="default: 128")
    parser.add_argument("--temperature", type=number(float, 0), default=0.0, metavar="X", help="default: 0, greedy")
    parser.add_argument("--top-k", type=number(int, 1), metavar="N", help="sample among the N most likely tokens")
    parser.add_argument("--top-p", type=number(float, 0, 1), metavar="X", help="sample among the most likely share X")
    parser.add_argument("--seed", type=number(int, 0), default=0, metavar="N", help="of sampling; default: 0")
    parser.add_argument("--no-replay", action="store_true", help="stock transformers instead")
    add_replay_options(parser)
    parser.add_argument(
        "--explain", action="store_true", help="say on stderr which backend runs, and why not the others"
    )
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument("--device", default="auto", help="cpu, cuda, mps, ...; default: cuda if there is one, else cpu")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    if args.temperature == 0 and (args.top_k is not None or args.top_p is not None):
        raise UsageError("--top-k and --top-p choose among samples; they need --temperature above 0")
    check_backend(args.backend)
    prompt = _prompt(args.prompt)

    from replayssm.cli.checkpoint import check_device, load

    device = check_device(args.device)
    checkpoint = load(args.model, dtype=args.dtype, device=device, replay=not args.no_replay)
    ids = checkpoint.encode(prompt)
    if not ids:
        raise UsageError("the prompt has no tokens")
    model = checkpoint.model
    with contextlib.nullcontext() if args.no_replay else _attached(model, args):
        return _generate(checkpoint, ids, device, args)


def _generate(checkpoint: Any, ids: list[int], device: Any, args: argparse.Namespace) -> int:
    import torch

    from replayssm.cli.stream import TextStream, sampling

    model = checkpoint.model
    stream = TextStream(checkpoint.decode, _write, _counter(args.max_new_tokens))
    torch.manual_seed(args.seed)
    begin = time.perf_counter()
    try:
        model.generate(
            torch.tensor([ids], device=device), attention_mask=torch.ones(1, len(ids), dtype=torch.long, device=device),
            streamer=stream,
            **sampling(args.max_new_tokens, temperature=args.temperature, top_k=args.top_k, top_p=args.top_p),
        )  # fmt: skip
    finally:
        print(flush=True)
        _report(stream, begin)
    if args.explain:
        from replayssm.hf import explain

        print(explain(model), file=sys.stderr)
    return 0


def _prompt(text: str) -> str:
    if text == "-":
        try:
            text = sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise UsageError(f"the prompt on standard input is not UTF-8: {error}") from None
    return check_prompt(text)


@contextlib.contextmanager
def _attached(model: Any, args: argparse.Namespace) -> Iterator[None]:
    import replayssm

    try:
        replayssm.attach(model, fold_every=args.fold_every, backend=args.backend)
    except (ValueError, RuntimeError) as error:
        raise UsageError(str(error)) from None
    try:
        yield
    finally:
        replayssm.detach(model)


def _write(text: str) -> None:
    print(text, end="", flush=True)


def _counter(total: int) -> Callable[[int], None] | None:
    """Shows the progress on stderr where the text itself is not on the screen."""
    if sys.stdout.isatty() or not sys.stderr.isatty():
        return None
    return lambda n: print(f"\r{n} of {total} tokens ", end="", file=sys.stderr, flush=True)


def _report(stream: Any, begin: float) -> None:
    if not stream.times:
        return
    rate = f", {stream.rate:.1f} tokens/s" if stream.rate else ""
    first = stream.times[0] - begin
    n = len(stream.tokens)
    print(f"{n} token{'s' * (n != 1)}{rate}, first after {first:.2f} s", file=sys.stderr)
