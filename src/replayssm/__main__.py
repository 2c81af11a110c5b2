"""``python -m replayssm``: the command line."""

import _thread
import os
import signal
import sys
import threading
from typing import Any

from replayssm.cli import main


def entry() -> None:
    """Runs the command line and ends the process with its exit code."""
    sys.unraisablehook = _interrupt_again
    code = main()
    sys.unraisablehook = sys.__unraisablehook__
    if code == 130:
        # A second interrupt is not to break the end; and LLVM, interrupted while it compiles the CPU kernels, crashes
        # as the interpreter is taken down.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _interrupt_again(unraisable: Any) -> None:
    """Ctrl-C that Python dropped, as it came in a destructor or in a callback from C, comes again a little later."""
    if unraisable.exc_type is not KeyboardInterrupt:
        return sys.__unraisablehook__(unraisable)
    timer = threading.Timer(0.02, _thread.interrupt_main)
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    entry()
