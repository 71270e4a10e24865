"""Copies checkpoints to object storage and back, through fsspec: s3://, gs://, abfs://, or any other of its kinds.

    RUN/checkpoints/step-00000050/ ──► s3://bucket/run/step-00000050/      on a thread, after the checkpoint is complete
                                       checkpoint.json goes last: without it, a remote checkpoint is not complete
    RUN/checkpoints/               ◄── the newest complete one, if the run resumes and has none as new

A machine that disappears takes its disk with it; what was copied stays.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.errors import FileError, RunError
from penstock.train.checkpoint import NOTE, SAVING, STEP_PREFIX, newest, step_name

_log = logging.getLogger(__name__)


class RemoteCheckpoints:
    """The checkpoints of a run under a URL."""

    def __init__(self, url: str, keep: int) -> None:
        self.url = url.rstrip("/")
        self.keep = keep
        self.thread: threading.Thread | None = None
        self.failure: Exception | None = None
        with self._explained("open"):
            import fsspec  # noqa: PLC0415  # only where there is a URL

            self.files, self.root = fsspec.url_to_fs(self.url)

    # ------------------------------------------------------------ to the storage
    def put(self, folder: Path) -> None:
        """Begin to copy a complete checkpoint, after waiting for the copy of an earlier one."""
        self.wait()
        self.failure = None
        self.thread = threading.Thread(
            target=self._copy, args=(folder,), name=f"copies {folder.name}"
        )
        self.thread.start()

    def wait(self) -> None:
        """Wait until the copy in progress has ended. One that fails is no reason to stop the run."""
        if self.thread is None:
            return
        self.thread.join()
        self.thread = None
        if self.failure is not None:
            _log.warning("cannot copy to %s: %s", self.url, self.failure)

    def finish(self) -> None:
        """Wait until the last copy has ended; raise an error if it failed."""
        self.wait()
        if self.failure is not None:
            raise RunError(
                f"cannot copy the last checkpoint to {self.url}: {self.failure}\n"
                "  the checkpoint itself is complete in the folder of the run"
            ) from self.failure

    def _copy(self, folder: Path) -> None:
        """Copy the files of a checkpoint, its description last, and delete old copies."""
        target = f"{self.root}/{folder.name}"
        try:
            self.files.makedirs(target, exist_ok=True)
            files = sorted(folder.iterdir(), key=lambda file: file.name == NOTE)
            for file in files:
                self.files.put_file(str(file), f"{target}/{file.name}")
            for step in self.steps()[self.keep :]:
                self._delete(step)
        except Exception as error:  # each kind of storage has its own errors
            self.failure = error

    def _delete(self, step: int) -> None:
        """Delete a checkpoint, its description first, so that nobody takes the rest for one."""
        target = f"{self.root}/{step_name(step)}"
        self.files.rm_file(f"{target}/{NOTE}")
        self.files.rm(target, recursive=True)

    # ------------------------------------------------------------ from the storage
    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, the newest first."""
        self.files.invalidate_cache()
        found = []
        for note in self.files.glob(f"{self.root}/{STEP_PREFIX}*/{NOTE}"):
            number = Path(note).parent.name.removeprefix(STEP_PREFIX)
            if number.isdigit():
                found.append(int(number))
        return sorted(found, reverse=True)

    def fetch(self, folder: Path) -> Path | None:
        """Copy the newest checkpoint into a folder, unless the folder has one as new; return what was copied."""
        with self._explained("read"):
            steps = self.steps()
        have = newest(folder)
        least = int(have[0].name.removeprefix(STEP_PREFIX)) if have else -1
        if not steps or steps[0] <= least:
            return None
        final = folder / f"{STEP_PREFIX}{steps[0]:08d}"
        part = folder / f"{final.name}{SAVING}"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        with self._explained("read"):
            for file in self.files.ls(f"{self.root}/{final.name}", detail=False):
                self.files.get_file(file, str(part / Path(file).name))
        part.rename(final)
        _log.info("fetched %s from %s", final.name, self.url)
        return final

    @contextmanager
    def _explained(self, verb: str) -> Iterator[None]:
        """Turn the errors of a storage into one that says what to do."""
        try:
            yield
        except ImportError as error:
            raise FileError(
                f"cannot {verb} {self.url}: {error}\n  install what fsspec needs for this kind of storage"
            ) from None
        except Exception as error:  # each kind of storage has its own errors
            raise FileError(
                f"cannot {verb} {self.url}: {error}\n  run.checkpoints must be a URL that fsspec knows and may write to"
            ) from None
