"""Pauses the garbage collector of Python while ranks run a step.

    rank 0   ├── walks ──────┤
    rank 1         ├── walks ─────────┤
    collector  on  │ off              │ on

Ranks may be threads of one process, which has one collector. So the first one switches it off, and the last one
switches it on again. If each rank switched it back to what it had found, one that began late would find it off, and
could leave it off for good.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Pauses:
    """The pauses that are under way in this process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0
        self.was_on = False  # before the first of them


_pauses = Pauses()


@contextmanager
def collector_paused() -> Iterator[None]:
    """Let the collector rest; afterwards it does what it did before, unless another thread still wants it to rest."""
    with _pauses.lock:
        if _pauses.count == 0:
            _pauses.was_on = gc.isenabled()
            gc.disable()
        _pauses.count += 1
    try:
        yield
    finally:
        with _pauses.lock:
            _pauses.count -= 1
            if _pauses.count == 0 and _pauses.was_on:
                gc.enable()
