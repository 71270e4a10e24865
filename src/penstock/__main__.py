"""The start of the command line: `penstock`, `python -m penstock`, `torchrun -m penstock`.

Imports take a noticeable part of a second, and torch aborts if an exception interrupts its own import. So a Ctrl-C that
arrives during an import ends the process at once; at any other moment it is a KeyboardInterrupt, as usual.
"""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False  # as in typing, which takes time to import
if TYPE_CHECKING:
    from types import FrameType

INTERRUPTED = 130  # exit code: 128 + SIGINT
IMPORT = "<frozen importlib._bootstrap>"  # the file of Python's own import code, as frames have it
SHOW_CURSOR = "\x1b[?25h"  # a spinner hides it


def main() -> None:
    """Runs the command line."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    from penstock.cli.app import main as run  # noqa: PLC0415  # not before Ctrl-C is taken care of

    try:
        run()
    finally:
        if signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, leave)


def interrupt(number: int, frame: FrameType | None) -> None:
    """Ends the process if an import is under way; raises KeyboardInterrupt otherwise."""
    while frame is not None:
        if frame.f_code.co_filename == IMPORT:
            leave(number, frame)
        frame = frame.f_back
    raise KeyboardInterrupt


def leave(number: int, frame: FrameType | None) -> None:
    """Ends the process at once, with one line."""
    start = SHOW_CURSOR if sys.stderr.isatty() else ""
    os.write(2, f"{start}Interrupted.\n".encode())
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
