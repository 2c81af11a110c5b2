"""The command line, ``replayssm`` or ``python -m replayssm``.

Each command is a module with ``add(commands)``, which declares its options, and ``run(args)``, which returns the exit
code: 0, 1 for a check that failed, 2 for bad input, 130 when interrupted. Whatever is heavy is imported inside ``run``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from replayssm import __version__
from replayssm.cli import bench, demo, doctor, generate, verify
from replayssm.cli.args import Parser, UsageError

COMMANDS = (demo, generate, bench, doctor, verify)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    parser = Parser(prog="replayssm", description="Decode hybrid language models from a checkpoint and a ring.")
    parser.add_argument("--version", action="version", version=f"replayssm {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(commands)
    try:
        args = parser.parse_args(argv)
        code = args.run(args)
        sys.stdout.flush()
        return code
    except UsageError as error:
        print(f"replayssm: error: {_one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("replayssm: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output is gone, as with `| head`; nothing is left to say to it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
