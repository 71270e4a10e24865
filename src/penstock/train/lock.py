"""Lets only one process at a time train in a folder.

Two processes would mix up their steps, and delete each other's unfinished checkpoints.
The process that holds the lock also creates the folder if it is missing. If it then trains
no step, it removes the folder again.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from penstock.errors import ConfigError
from penstock.train.checkpoint import CHECKPOINTS_FOLDER, STEP_PREFIX
from penstock.train.history import METRICS

LOCK = "lock"  # in the folder of a run
# A folder in which one of these is not empty is worth keeping.
PROGRESS_FILES = (METRICS, f"{CHECKPOINTS_FOLDER}/{STEP_PREFIX}*")


class Lock:
    """The lock of one folder. The system releases it when the process ends."""

    def __init__(self) -> None:
        self.handle = -1
        self.created: list[Path] = []  # folders that were missing, innermost first

    def claim(self, folder: Path) -> None:
        """Create the folder if it is missing; raise if another process trains there."""
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        self.handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.free()
            raise ConfigError(
                f"another process trains in {folder}\n"
                "  wait until it has ended, or name another run.folder"
            ) from None
        except OSError:  # This file system has no locks.
            self.free()
        else:
            self.created = missing

    def clean_up(self) -> None:
        """Remove the folder if this process created it and trained no step.

        Call it while the lock is held.
        """
        if not self.created or self.handle < 0:
            return
        folder, *parents = self.created
        for pattern in PROGRESS_FILES:
            for file in folder.glob(pattern):
                if file.is_dir() or file.stat().st_size:
                    return
        shutil.rmtree(folder, ignore_errors=True)
        for parent in parents:
            with suppress(OSError):  # It holds other files, such as the token cache.
                parent.rmdir()

    def free(self) -> None:
        """Release the lock."""
        if self.handle >= 0:
            with suppress(OSError):
                os.close(self.handle)
            self.handle = -1


@contextmanager
def locking() -> Iterator[Lock]:
    """Yield a lock that is released afterwards, and clean up if no step was trained."""
    lock = Lock()
    try:
        yield lock
    finally:
        lock.clean_up()
        lock.free()
