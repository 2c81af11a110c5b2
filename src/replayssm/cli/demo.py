"""``replayssm demo``: the three tiny models write from a prompt, with stock transformers and with ReplaySSM."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from replayssm.cli.args import (
    UsageError,
    add_replay_options,
    check_backend,
    check_prompt,
    check_serves,
    need_transformers,
    number,
)
from replayssm.tiny import TINY, tiny_model

PROMPT = '''class Server:
    """A server'''


def add(commands: Any) -> None:
    """Declares the command."""
    parser = commands.add_parser("demo", help="three tiny models write the same text with and without ReplaySSM")
    parser.add_argument("--model", action="append", choices=TINY, help="only this model; may be repeated")
    parser.add_argument(
        "--prompt", default=PROMPT, metavar="TEXT", help="the text to continue (the models know Python)"
    )
    parser.add_argument("--tokens", type=number(int, 2), default=240, metavar="N", help="to write; default: 240")
    parser.add_argument(
        "--temperature", type=number(float, 0), default=0.6, metavar="X", help="default: 0.6; 0: greedy"
    )
    parser.add_argument("--seed", type=number(int, 0), default=0, metavar="N", help="of both sides; default: 0")
    parser.add_argument("--device", default="auto", help="cpu, cuda, ...; default: cuda if there is one, else cpu")
    add_replay_options(parser)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON and nothing else")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command; 1 where a text differs."""
    check_prompt(args.prompt)
    check_backend(args.backend)
    need_transformers()

    from replayssm.auto import FOLD_EVERY
    from replayssm.cli.checkpoint import check_device, load
    from replayssm.cli.compare import Comparison
    from replayssm.cli.screen import make_screen

    device = check_device(args.device)
    check_serves(args.backend, device)
    # Not what is faster for texts as small as these, but what there is to show.
    attaching = {"fold_every": args.fold_every or FOLD_EVERY, "backend": args.backend}
    sampling = {"temperature": args.temperature}
    results = []
    with make_screen(args.prompt, sys.stderr if args.json else sys.stdout, quiet=args.json) as screen:
        for name in dict.fromkeys(args.model or TINY):
            screen.loading(name)
            try:
                checkpoint = load(tiny_model(name), device=device)
            except FileNotFoundError as error:
                raise UsageError(str(error)) from None
            screen.begin(name, checkpoint)
            comparison = Comparison(
                name, checkpoint, args.prompt, args.tokens, args.seed, attaching=attaching, sampling=sampling,
                write=screen.write, status=screen.status, static=device.startswith("cuda"),
            )  # fmt: skip
            results.append(comparison.run())
            screen.end(results[-1])
        screen.table(results)
    if args.json:
        print(json.dumps({"models": [result.summary() for result in results]}, indent=2))
    return 0 if all(result.identical for result in results) else 1
