"""Copies checkpoints to object storage and back, through fsspec: s3://, gs://, abfs://, or any other of its kinds.

    RUN/checkpoints/step-00000050/ ──► s3://bucket/run/step-00000050/      on a thread, after the checkpoint is complete
                                       checkpoint.json goes last: without it, a remote checkpoint is not complete
    RUN/checkpoints/               ◄── the newest complete one, if the run resumes and has none as new,
                                       or single files of it that are damaged in the folder of the run

A machine that disappears takes its disk with it; what was copied stays. Machines with separate folders each copy the
files of their own ranks (`penstock.train.checkpoints.folders`).
"""

from __future__ import annotations

import logging
import shutil
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from errno import ENOSPC
from pathlib import Path
from typing import Protocol

from penstock.config import RunConfig
from penstock.errors import FileError, RunError
from penstock.formats.text import hide_secrets
from penstock.train.checkpoints.checkpoint import (
    MISSING,
    NOTE,
    SAVING,
    STEP_PREFIX,
    Fingerprint,
    describe_failure,
    faults,
    file_fault,
    newest,
    read_facts,
    step_name,
    step_of,
)
from penstock.train.checkpoints.folders import PART

_log = logging.getLogger(__name__)
TRIAL = "penstock-may-write"  # a file that is written and deleted at once
# The kinds of storage that have buckets instead of folders.
HAVE_BUCKETS = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "oci", "hf"}
REFUSED = ("denied", "forbidden", "credential", "unauthorized", "403", "401")


class Storage(Protocol):
    """A place outside the folder of a run that has complete checkpoints."""

    @property
    def place(self) -> str:
        """What messages call it."""

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, the newest first."""

    def read_note(self, step: int) -> bytes:
        """Return the description of a checkpoint; raise FileNotFoundError if there is none."""

    def fetch_file(self, step: int, name: str, target: Path) -> None:
        """Copy a file of a checkpoint; raise FileNotFoundError if the storage lacks it."""


def fetch_newest(storage: Storage, folder: Path) -> Path | None:
    """Let a folder have the newest checkpoint that it and a storage have without damage between them.

    Damaged and missing files are copied from the storage. Returns the checkpoint if any were.
    """
    stored = storage.steps()
    here = [step_of(path) for path in newest(folder)]
    for step in sorted({*stored, *here}, reverse=True):
        path = folder / step_name(step)
        wrong = faults(path)
        if not wrong:
            return None
        if step in stored and _mend(storage, path, wrong):
            return path
    return None


def _mend(storage: Storage, path: Path, wrong: Mapping[str, str]) -> bool:
    """Replace damaged files by those of a storage, or all files if its checkpoint is another one; tell of success."""
    step = step_of(path)
    if NOTE not in wrong and has_note(storage, step, path):
        files = read_facts(path)["files"]
        left = fetch_files(storage, step, path, {name: files[name] for name in wrong})
        for name in wrong.keys() - left.keys():
            tell_mended(path / name, wrong[name], storage.place)
    else:
        left = fetch_step(storage, step, path.parent)
    for name, fault in left.items():
        here = f"{name} {wrong[name]}, and " if name in wrong else ""
        _log.warning(
            "%s cannot be mended: %sin %s %s %s; looking for an earlier one",
            *(path, here, storage.place, "it" if here else name, fault),
        )
    return not left


def has_note(storage: Storage, step: int, path: Path) -> bool:
    """Whether a storage has the very checkpoint of a folder, by its description."""
    try:
        return storage.read_note(step) == (path / NOTE).read_bytes()
    except OSError:
        return False


def tell_mended(file: Path, fault: str, place: str) -> None:
    """Say where a file came from, with a warning if it took the place of a damaged one."""
    if fault.startswith(MISSING):
        _log.info("fetched %s/%s from %s", file.parent.name, file.name, place)
    else:
        _log.warning("%s %s; the copy from %s took its place", file, fault, place)


def fetch_files(
    storage: Storage, step: int, path: Path, wanted: Mapping[str, Fingerprint]
) -> dict[str, str]:
    """Copy files of a checkpoint into its folder if they are intact; return what is wrong with the others."""
    wrong = {}
    for name, known in wanted.items():
        part = path / f"{name}{PART}"
        try:
            storage.fetch_file(step, name, part)
            fault = file_fault(part, known)
            if fault:
                wrong[name] = fault
            else:
                part.replace(path / name)
        except FileNotFoundError:
            wrong[name] = MISSING
        finally:
            part.unlink(missing_ok=True)
    return wrong


def fetch_step(storage: Storage, step: int, folder: Path) -> dict[str, str]:
    """Copy the checkpoint of a step into a folder, in place of what is there, if it is intact.

    Returns what is wrong with it in the storage, by file; then nothing is replaced.
    """
    final = folder / step_name(step)
    part = final.with_name(f"{final.name}{SAVING}")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        try:
            note = storage.read_note(step)
        except FileNotFoundError:
            return {NOTE: MISSING}
        (part / NOTE).write_bytes(note)
        wrong = faults(part, quick=True)  # All files, as long as they are missing.
        if NOTE not in wrong:
            wrong = fetch_files(storage, step, part, read_facts(part)["files"])
        if not wrong:
            shutil.rmtree(final, ignore_errors=True)
            part.rename(final)
            _log.info("fetched %s from %s", final.name, storage.place)
        return wrong
    finally:
        shutil.rmtree(part, ignore_errors=True)


def remote_checkpoints(run: RunConfig) -> RemoteCheckpoints | None:
    """Return the copies of a run's checkpoints in object storage; None if it keeps none."""
    return (
        RemoteCheckpoints(run.checkpoint_url, run.keep_checkpoints)
        if run.checkpoint_url
        else None
    )


class RemoteCheckpoints:
    """The checkpoints of a run under a URL."""

    def __init__(self, url: str, keep: int) -> None:
        self.place = hide_secrets(url.rstrip("/"))  # the URL as it is shown
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
            _log.warning("cannot copy to %s: %s", self.place, self.failure)

    def finish(self) -> None:
        """Wait until the last copy has ended; raise an error if it failed."""
        self.wait()
        if self.failure:
            raise RunError(
                f"cannot copy the last checkpoint to {self.place}: {self.failure}\n"
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
        """Delete an old checkpoint, its description first, so that nobody takes the rest for one.

        If that fails, the new one is complete all the same.
        """
        target = f"{self.root}/{step_name(step)}"
        try:
            self._remove(f"{target}/{NOTE}")
            self.files.rm(target, recursive=True)
        except Exception as error:  # each kind of storage has its own errors
            name, why = step_name(step), describe_failure(error)
            _log.warning("cannot delete %s in %s: %s", name, self.place, why)

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

    def read_note(self, step: int) -> bytes:
        """Return the description of a checkpoint; raise FileNotFoundError if there is none."""
        with self._explained("read", may_lack=True):
            note = f"{self.root}/{step_name(step)}/{NOTE}"
            return bytes(self.files.cat_file(note))

    def fetch_file(self, step: int, name: str, target: Path) -> None:
        """Copy a file of a checkpoint; raise FileNotFoundError if the storage lacks it."""
        with self._explained("read", may_lack=True):
            self.files.get_file(f"{self.root}/{step_name(step)}/{name}", str(target))

    @contextmanager
    def _explained(self, verb: str, may_lack: bool = False) -> Iterator[None]:
        """Turn the errors of a storage into one that says what to do.

        If it `may_lack` a file, FileNotFoundError stays what it is.
        """
        try:
            yield
        except ImportError as error:
            text = hide_secrets(str(error))
            raise FileError(
                f"cannot {verb} {self.place}: {text}\n  install what fsspec needs for this kind of storage"
            ) from None
        except Exception as error:  # each kind of storage has its own errors
            if may_lack and isinstance(error, FileNotFoundError):
                raise
            text = describe_failure(error)
            hint = "run.checkpoint_url must be a URL that fsspec knows and may write to"
            if isinstance(error, PermissionError) or any(
                word in text.lower() for word in REFUSED
            ):
                hint = "the storage refuses this process: check its credentials and permissions on this machine"
            if isinstance(error, OSError) and error.errno == ENOSPC:
                hint = "make room, or name another run.folder or run.checkpoint_url"
            raise FileError(f"cannot {verb} {self.place}: {text}\n  {hint}") from None
