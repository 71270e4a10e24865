"""One process at a time trains in a folder: two would write each other's steps, and sweep away what the other saves."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from penstock.errors import ConfigError

LOCK = "lock"  # in the folder of a run


class Lock:
    """Of one folder, once it is there. It ends with its process, however that ends."""

    def __init__(self) -> None:
        self.handle = -1

    def claim(self, folder: Path) -> None:
        """Raises if another process trains there."""
        self.handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.free()
            raise ConfigError(f"another process trains in {folder}\n  wait until it has ended, or name another "
                              "run.folder") from None  # fmt: skip
        except OSError:  # a file system that has no locks
            self.free()

    def free(self) -> None:
        """The folder is anybody's again."""
        if self.handle >= 0:
            with suppress(OSError):
                os.close(self.handle)
            self.handle = -1


@contextmanager
def locking() -> Iterator[Lock]:
    """A lock that is free again afterwards."""
    lock = Lock()
    try:
        yield lock
    finally:
        lock.free()
