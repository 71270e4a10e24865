"""Copies checkpoints to object storage and back, through fsspec: s3://, gs://, abfs://, or any other of its kinds.

    RUN/checkpoints/step-00000050/ ──► s3://bucket/run/step-00000050/      on a thread, after the checkpoint is complete
                                       checkpoint.json goes last: without it, a remote checkpoint is not complete
    RUN/checkpoints/               ◄── the newest complete one, if the run resumes and has none as new

A machine that disappears takes its disk with it; what was copied stays. Machines with separate folders each copy the
files of their own ranks (`penstock.train.folders`).
"""

from __future__ import annotations

import logging
import shutil
import threading
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from penstock.errors import FileError, RunError
from penstock.train.checkpoint import (
    NOTE,
    SAVING,
    STEP_PREFIX,
    is_complete_checkpoint,
    newest,
    read_facts,
    step_name,
)
from penstock.train.urls import hide_secrets

_log = logging.getLogger(__name__)
TRIAL = "penstock-may-write"  # a file that is written and deleted at once
# The kinds of storage that have buckets instead of folders.
HAVE_BUCKETS = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "oci", "hf"}
REFUSED = ("denied", "forbidden", "credential", "unauthorized", "403", "401")


class Storage(Protocol):
    """A place outside the folder of a run that has complete checkpoints."""

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, the newest first."""
        ...

    def fetch_step(self, step: int, folder: Path) -> Path:
        """Copy the checkpoint of a step into a folder, in place of what is there."""
        ...


def fetch_newest(storage: Storage, folder: Path) -> Path | None:
    """Copy the newest checkpoint into a folder, unless the folder has one as new; return what was copied."""
    steps = storage.steps()
    least = -1
    for path in newest(folder):
        if is_complete_checkpoint(path):
            least = int(path.name.removeprefix(STEP_PREFIX))
            break
    if not steps or steps[0] <= least:
        return None
    return storage.fetch_step(steps[0], folder)


@contextmanager
def replacing(final: Path) -> Iterator[Path]:
    """Yield a new folder to fill with a checkpoint, which then takes the place of an older one."""
    part = final.with_name(f"{final.name}{SAVING}")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    yield part
    shutil.rmtree(final, ignore_errors=True)
    part.rename(final)


def describe_failure(error: Exception) -> str:
    """The kind and the text of an error of a storage, fit to be shown."""
    return hide_secrets(f"{type(error).__name__}: {error}")


class RemoteCheckpoints:
    """The checkpoints of a run under a URL."""

    def __init__(self, url: str, keep: int) -> None:
        self.url = hide_secrets(url.rstrip("/"))  # as it is shown
        self.keep = keep
        self.thread: threading.Thread | None = None
        self.failure = ""
        with self._explained("open"):
            import fsspec  # noqa: PLC0415  # only where there is a URL

            self.files, self.root = fsspec.url_to_fs(url.rstrip("/"))

    def check_writing(self) -> None:
        """Raise FileError if this process may not write there: better now than after hours of training."""
        trial = f"{self.root}/{TRIAL}-{uuid.uuid4().hex}"
        with self._explained("write to"):
            self._make_folder(self.root)
            self.files.pipe_file(trial, b"yes")
            self.files.rm_file(trial)

    # ------------------------------------------------------------ to the storage
    def put(self, folder: Path) -> None:
        """Begin to copy a complete checkpoint, after waiting for the copy of an earlier one."""
        self.wait()
        self.failure = ""
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
        if self.failure:
            _log.warning("cannot copy to %s: %s", self.url, self.failure)

    def finish(self) -> None:
        """Wait until the last copy has ended; raise an error if it failed."""
        self.wait()
        if self.failure:
            raise RunError(
                f"cannot copy the last checkpoint to {self.url}: {self.failure}\n"
                "  the checkpoint itself is complete in the folder of the run"
            )

    def _copy(self, folder: Path) -> None:
        """Copy the files of a checkpoint, its description last, and delete old copies."""
        try:
            names = [file.name for file in folder.iterdir() if file.name != NOTE]
            self.put_files(folder, folder.name, names)
            self.complete(folder)
        except Exception as error:  # each kind of storage has its own errors
            self.failure = describe_failure(error)

    def put_files(self, folder: Path, step: str, names: Iterable[str]) -> None:
        """Copy files of a folder into the copy of a step, which is not complete then."""
        target = f"{self.root}/{step}"
        self._make_folder(target)
        self._remove(f"{target}/{NOTE}")  # An earlier try may have completed this step.
        for name in names:
            self.files.put_file(str(folder / name), f"{target}/{name}")

    def complete(self, folder: Path) -> None:
        """Copy the description of a checkpoint, all of whose files are there, and delete old copies."""
        target = f"{self.root}/{folder.name}"
        facts = read_facts(folder)
        self.files.invalidate_cache()
        for found in self.files.ls(target, detail=False):
            name = Path(found).name
            if name not in facts["files"]:  # of an earlier try on other ranks
                self._remove(found)
        self.files.put_file(str(folder / NOTE), f"{target}/{NOTE}")
        # Later ones are left of a try that could not be resumed.
        saved = [step for step in self.steps() if step <= facts["step"]]
        for step in saved[self.keep :]:
            self._delete(step)

    def _make_folder(self, path: str) -> None:
        """Make a folder, unless the storage has buckets: the call would make one, perhaps of a mistyped name."""
        protocol = self.files.protocol
        names = {protocol} if isinstance(protocol, str) else set(protocol)
        if not names & HAVE_BUCKETS:
            self.files.makedirs(path, exist_ok=True)

    def _remove(self, file: str) -> None:
        try:
            self.files.rm_file(file)
        except FileNotFoundError:
            return

    def _delete(self, step: int) -> None:
        """Delete a checkpoint, its description first, so that nobody takes the rest for one."""
        target = f"{self.root}/{step_name(step)}"
        self.files.rm_file(f"{target}/{NOTE}")
        self.files.rm(target, recursive=True)

    # ------------------------------------------------------------ from the storage
    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, the newest first."""
        found = []
        with self._explained("read"):
            self.files.invalidate_cache()
            notes = self.files.glob(f"{self.root}/{STEP_PREFIX}*/{NOTE}")
        for note in notes:
            number = Path(note).parent.name.removeprefix(STEP_PREFIX)
            if number.isdigit():
                found.append(int(number))
        return sorted(found, reverse=True)

    def fetch(self, folder: Path) -> Path | None:
        """Copy the newest checkpoint into a folder, unless the folder has one as new; return what was copied."""
        return fetch_newest(self, folder)

    def fetch_step(self, step: int, folder: Path) -> Path:
        """Copy the checkpoint of a step into a folder, in place of what is there."""
        final = folder / step_name(step)
        source = f"{self.root}/{final.name}"
        with replacing(final) as part, self._explained("read"):
            self.files.get_file(f"{source}/{NOTE}", str(part / NOTE))
            for name in read_facts(part)["files"]:
                self.files.get_file(f"{source}/{name}", str(part / name))
        _log.info("fetched %s from %s", final.name, self.url)
        return final

    @contextmanager
    def _explained(self, verb: str) -> Iterator[None]:
        """Turn the errors of a storage into one that says what to do."""
        try:
            yield
        except FileError:
            raise
        except ImportError as error:
            text = hide_secrets(str(error))
            raise FileError(
                f"cannot {verb} {self.url}: {text}\n  install what fsspec needs for this kind of storage"
            ) from None
        except Exception as error:  # each kind of storage has its own errors
            text = describe_failure(error)
            hint = "run.checkpoints must be a URL that fsspec knows and may write to"
            if isinstance(error, PermissionError) or any(
                word in text.lower() for word in REFUSED
            ):
                hint = "the storage refuses this process: check its credentials and permissions on this machine"
            raise FileError(f"cannot {verb} {self.url}: {text}\n  {hint}") from None
