"""One process at a time trains in a folder: two would write each other's steps, and sweep away what the other saves.

The process that has the lock also made the folder, if it was not there. If it trains no step, it removes it again.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from penstock.errors import ConfigError
from penstock.train.history import METRICS

LOCK = "lock"  # in the folder of a run
PROGRESS = (
    METRICS,
    "checkpoints/step-*",
)  # a folder with one of these holds something worth keeping


class Lock:
    """Of one folder, once it is there. It ends with its process, however that ends."""

    def __init__(self) -> None:
        self.handle = -1
        self.made: list[Path] = []  # folders that were missing, the innermost first

    def claim(self, folder: Path) -> None:
        """Makes the folder if it is missing. Raises if another process trains there."""
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        self.handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.free()
            raise ConfigError(
                f"another process trains in {folder}\n  wait until it has ended, or name another "
                "run.folder"
            ) from None
        except OSError:  # a file system that has no locks
            self.free()
        else:
            self.made = missing

    def clean_up(self) -> None:
        """Removes the folder if this start has made it and no step was trained. Call it while the lock is held."""
        if not self.made or self.handle < 0:
            return
        folder, *parents = self.made
        if any(
            file.is_dir() or file.stat().st_size
            for name in PROGRESS
            for file in folder.glob(name)
        ):
            return
        shutil.rmtree(folder, ignore_errors=True)
        for parent in parents:
            with suppress(OSError):  # not empty: the token cache stays
                parent.rmdir()

    def free(self) -> None:
        """The folder is anybody's again."""
        if self.handle >= 0:
            with suppress(OSError):
                os.close(self.handle)
            self.handle = -1


@contextmanager
def locking() -> Iterator[Lock]:
    """A lock that is free again afterwards; nothing is left of a start that trained no step."""
    lock = Lock()
    try:
        yield lock
    finally:
        lock.clean_up()
        lock.free()
