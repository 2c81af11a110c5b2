"""``replayssm generate``: continues a prompt with a local checkpoint, streaming."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from replayssm.cli.args import UsageError, add_replay_options, check_backend, check_prompt, check_serves, number

PROBE = "def f(x):\n    return {'é': 12.5}[x]  # Ω\tthe quick brown fox, 漢字"
"""Two tokenizers that agree on it are taken for one."""
COMPILE_FROM = 512  # new tokens; an eager step of a model of 4B parameters takes 60 ms, compiling 40 s
COLDEST = 1e-6
"""The lowest temperature that logits are divided by, so that they stay finite."""


def add(commands: Any) -> None:
    """Declares the command."""
    parser = commands.add_parser("generate", help="continue a prompt with a local checkpoint of a supported type")
    parser.add_argument(
        "--model", required=True, type=Path, metavar="DIR",
        help="directory of config.json and *.safetensors, such as models/gdn",
    )  # fmt: skip
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="the text to continue; - reads standard input")
    parser.add_argument("--max-new-tokens", type=number(int, 1), default=128, metavar="N", help="default: 128")
    parser.add_argument("--temperature", type=number(float, 0), default=0.0, metavar="X", help="default: 0, greedy")
    parser.add_argument("--top-k", type=number(int, 1), metavar="N", help="sample among the N most likely tokens")
    parser.add_argument("--top-p", type=number(float, 0, 1), metavar="X", help="sample among the most likely share X")
    parser.add_argument("--seed", type=number(int, 0), default=0, metavar="N", help="of sampling; default: 0")
    parser.add_argument(
        "--draft", metavar="HOW",
        help="verify several drafted tokens in a forward: prompt-lookup finds them in the text itself, prompt-tree at "
        "three places of it, mtp is the head for them that the checkpoint has, a directory is that of a smaller model "
        "with the same tokens",
    )  # fmt: skip
    parser.add_argument(
        "--draft-tokens", type=_draft_tokens, default="auto", metavar="N", help="drafts a forward; default: auto"
    )
    parser.add_argument(
        "--compile", choices=["auto", "on", "off"], default="auto",
        help=f"decode with a static cache and a compiled, captured step, which takes up to a minute to make and then a "
        f"few milliseconds a token; default: auto, on a GPU from {COMPILE_FROM} new tokens on, without --draft",
    )  # fmt: skip
    parser.add_argument("--no-replay", action="store_true", help="stock transformers instead")
    add_replay_options(parser)
    parser.add_argument(
        "--explain", action="store_true", help="say on stderr which backend runs, and why not the others"
    )
    parser.add_argument(
        "--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"],
        help="of the weights; default: auto, the checkpoint's. In float32 tokens equal stock's",
    )  # fmt: skip
    parser.add_argument("--device", default="auto", help="cpu, cuda, mps, ...; default: cuda if there is one, else cpu")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    if args.temperature == 0 and (args.top_k is not None or args.top_p is not None):
        raise UsageError("--top-k and --top-p choose among samples; they need --temperature above 0")
    if 0 < args.temperature < COLDEST:
        raise UsageError(f"--temperature must be 0, or at least {COLDEST:g}; got {args.temperature:g}")
    if args.top_p == 0:
        raise UsageError("--top-p must be above 0; the likeliest token alone is --top-k 1")
    if args.draft is None and args.draft_tokens != "auto":
        raise UsageError("--draft-tokens is the number of drafts; it needs --draft")
    if args.draft is not None and args.no_replay:
        raise UsageError("--draft needs ReplaySSM: stock transformers cannot take drafts back; leave out --no-replay")
    check_backend(args.backend)
    prompt = _prompt(args.prompt)

    from replayssm.cli.checkpoint import check_device, load

    device = check_device(args.device)
    check_serves(args.backend, device)
    checkpoint = load(args.model, dtype=args.dtype, device=device, replay=not args.no_replay)
    ids = checkpoint.encode(prompt)
    if not ids:
        raise UsageError("the prompt has no tokens")
    draft = None if args.draft is None else _drafter(args.draft, checkpoint, device, args)
    with contextlib.ExitStack() as attached:
        if not args.no_replay:
            attached.enter_context(_attached(checkpoint.model, args))
        if _replayed(draft):
            attached.enter_context(_attached(draft, args))
        return _generate(checkpoint, ids, device, args, draft)


def _generate(checkpoint: Any, ids: list[int], device: Any, args: argparse.Namespace, draft: Any) -> int:
    import torch

    from replayssm.cli.stream import TextStream, sampling
    from replayssm.hf.static import static_arguments

    model, compiled = checkpoint.model, _compiles(args, device)
    on_gpu = str(device).startswith("cuda")  # where generate compiles; elsewhere it is the static cache alone
    if compiled and on_gpu:
        print("compiling the step, up to a minute (--compile off: not)", file=sys.stderr)
    static = static_arguments(model.device) if compiled else {}
    warm = 4 if compiled else 1  # the steps that compile are no decoding
    stream = TextStream(checkpoint.decode, _write, _counter(args.max_new_tokens), warm)
    prompt, drafted = torch.tensor([ids], device=device), None
    how = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}
    torch.manual_seed(args.seed)
    begin = time.perf_counter()
    try:
        if draft is None:
            model.generate(
                prompt, attention_mask=torch.ones_like(prompt), streamer=stream, **static,
                **sampling(args.max_new_tokens, **how),
            )  # fmt: skip
        else:
            drafted = _speculate(model, prompt, draft, args, stream, how)
    finally:
        if stream.tokens:
            print(flush=True)
        _report(stream, begin, drafted)
    if args.explain:
        from replayssm.hf import explain

        print(explain(model), file=sys.stderr)
    return 0


def _compiles(args: argparse.Namespace, device: Any) -> bool:
    """Whether generate is to compile its step: by default where the text is long enough to make up for it."""
    if args.compile != "auto":
        return args.compile == "on"
    return str(device).startswith("cuda") and args.draft is None and args.max_new_tokens >= COMPILE_FROM


def _speculate(model: Any, prompt: Any, draft: Any, args: argparse.Namespace, stream: Any, how: dict[str, Any]) -> Any:
    import torch

    import replayssm

    stream.put(prompt)
    try:
        return replayssm.generate(
            model, prompt, max_new_tokens=args.max_new_tokens, draft=draft, draft_tokens=args.draft_tokens,
            sampling=replayssm.Sampling(**how), on_tokens=lambda row, tokens: stream.put(torch.tensor(tokens)),
            static=args.compile == "on",
        )  # fmt: skip
    except ValueError as error:
        raise UsageError(str(error)) from None
    finally:
        stream.end()


def _drafter(name: str, checkpoint: Any, device: Any, args: argparse.Namespace) -> Any:
    """What ``--draft`` names: a way, the model's own head, or the model in a directory."""
    if name in ("prompt-lookup", "prompt-tree"):
        return name
    if name == "mtp":
        from replayssm.hf.mtp import MTPHead

        try:
            return MTPHead.load(checkpoint.model, args.model)
        except ValueError as error:
            raise UsageError(str(error)) from None
    if not name or not Path(name).is_dir():
        raise UsageError(f"--draft must be prompt-lookup, prompt-tree, mtp or a checkpoint directory; got {name!r}")
    from replayssm.cli.checkpoint import load

    draft = load(Path(name), dtype=args.dtype, device=device, replay=False)
    same_size = draft.config.vocab_size == checkpoint.config.vocab_size  # where not, generate says so
    if same_size and draft.encode(PROBE) != checkpoint.encode(PROBE):
        raise UsageError(f"--draft {name}: its tokenizer is not that of {args.model}; drafts must be the same tokens")
    return draft.model


def _replayed(draft: Any) -> bool:
    """Whether it is a model that can be attached."""
    from transformers import PreTrainedModel

    from replayssm.hf import SUPPORTED

    return isinstance(draft, PreTrainedModel) and draft.config.get_text_config(decoder=True).model_type in SUPPORTED


def _draft_tokens(text: str) -> Any:
    return text if text == "auto" else number(int, 1)(text)


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


def _report(stream: Any, begin: float, drafted: Any) -> None:
    if not stream.times:
        return
    rate = f", {stream.rate:.1f} tokens/s" if stream.rate else ""
    first = stream.times[0] - begin
    n = len(stream.tokens)
    print(f"{n} token{'s' * (n != 1)}{rate}, first after {first:.2f} s", file=sys.stderr)
    if drafted is not None:
        print(
            f"{drafted.accepted} of {drafted.drafted} drafts accepted, {drafted.tokens_per_step:.2f} tokens a forward",
            file=sys.stderr,
        )
