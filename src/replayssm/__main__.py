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
    interrupted = threading.Event()

    def interrupt(number: int, frame: Any) -> None:
        interrupted.set()
        signal.default_int_handler(number, frame)

    def unraisable(what: Any) -> None:
        if what.exc_type is KeyboardInterrupt:
            _interrupt_again()
        elif not interrupted.is_set():  # afterwards objects that were left half made complain as they are taken down
            sys.__unraisablehook__(what)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, or somebody else's
        signal.signal(signal.SIGINT, interrupt)
    sys.unraisablehook = unraisable
    code = main()
    if code == 130:
        # A second interrupt is not to break the end; and LLVM, interrupted while it compiles the CPU kernels, crashes
        # as the interpreter is taken down.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.unraisablehook = sys.__unraisablehook__
    sys.exit(code)


def _interrupt_again() -> None:
    """Ctrl-C that Python dropped, as it came in a destructor or in a callback from C, comes again a little later."""
    timer = threading.Timer(0.02, _thread.interrupt_main)
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    entry()
