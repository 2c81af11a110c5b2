"""``python -m replayssm``: the command line."""

import os
import sys

from replayssm.cli import main


def entry() -> None:
    """Runs the command line and ends the process with its exit code."""
    code = main()
    if code == 130:  # LLVM, interrupted while it compiles the CPU kernels, crashes as the interpreter is taken down
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    entry()
