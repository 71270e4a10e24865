"""The entry point of the command line: `penstock`, `python -m penstock`, `torchrun -m penstock`.

Imports take a noticeable time, and torch aborts if an exception interrupts its own import. So a
Ctrl-C during an import ends the process at once. At any other moment it raises
KeyboardInterrupt, as usual.
"""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False  # as in typing, which takes time to import
if TYPE_CHECKING:
    from types import FrameType

INTERRUPTED = 130  # exit code: 128 + SIGINT
IMPORT = "<frozen importlib._bootstrap>"  # the file name of Python's import code in stack frames
SHOW_CURSOR = "\x1b[?25h"  # a spinner hides it


def main() -> None:
    """Run the command line."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    from penstock.cli.app import main as run  # noqa: PLC0415  # only after Ctrl-C is handled

    try:
        run()
    finally:
        if signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, leave)


def interrupt(number: int, frame: FrameType | None) -> None:
    """End the process if an import is running; otherwise raise KeyboardInterrupt."""
    while frame is not None:
        if frame.f_code.co_filename == IMPORT:
            leave(number, frame)
        frame = frame.f_back
    raise KeyboardInterrupt


def leave(number: int, frame: FrameType | None) -> None:
    """End the process at once, with one line."""
    prefix = SHOW_CURSOR if sys.stderr.isatty() else ""
    os.write(2, f"{prefix}Interrupted.\n".encode())
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
