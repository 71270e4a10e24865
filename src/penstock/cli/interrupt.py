"""What Ctrl-C does during a search: it ends the search, and the command shows the best plan so far."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

INTERRUPTED = 130  # exit code after Ctrl-C


class ShownInterrupt(SystemExit):
    """The exit after Ctrl-C ended a command that has shown its results so far.

    It is an interrupt all the same, so `penstock train && penstock export` does not go on.
    """


@dataclass(slots=True)
class Interrupt:
    """Tells a search to stop once Ctrl-C was pressed."""

    stopped: bool = False

    def __call__(self) -> bool:
        """Whether the search must stop."""
        return self.stopped


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Let the first Ctrl-C end the search, and a second one the command.

    A script in the background ignores SIGINT, and continues to.
    """
    interrupt = Interrupt()
    before = signal.getsignal(signal.SIGINT)

    def stop(signum: int, frame: object) -> None:
        interrupt.stopped = True
        signal.signal(signal.SIGINT, before)

    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, stop)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
