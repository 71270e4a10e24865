"""Saves checkpoints on machines with separate folders.

    node1   RUN/checkpoints/step-00000050/   files of ranks 0 and 1, checkpoint.json     ┐ the same checkpoint.json,
    node2   RUN/checkpoints/step-00000050/   files of ranks 2 and 3, checkpoint.json     ┘ which lists all files
    run.checkpoints      step-00000050/      each rank puts its own file there, rank 0 checkpoint.json at the end

An old checkpoint is deleted only after all machines have completed the new one, so there is always one that all have.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Collection
from pathlib import Path

from penstock.errors import RunError
from penstock.runtime import Comm
from penstock.runtime.comm.texts import gather_texts
from penstock.train.checkpoint import (
    Fingerprint,
    Saver,
    newest,
    publish,
    step_name,
    sweep,
)
from penstock.train.folders.group import RunFolders, failing_together, wait_together
from penstock.train.remote import RemoteCheckpoints, describe_failure

_log = logging.getLogger(__name__)


class SeparateSaver(Saver):
    """Saves one rank's share of checkpoints in its own folder and, if there is one, in a storage.

    `commit` and `wait_for_files` talk to the other ranks, so all of them must call them.
    """

    def __init__(
        self,
        folder: Path,
        comm: Comm,
        folders: RunFolders,
        keep: int,
        names: Collection[str],
        storage: RemoteCheckpoints | None,
    ) -> None:
        super().__init__(folder, comm.rank, comm.ranks, keep, names)
        self.comm = comm
        self.folders = folders
        self.writers = tuple(folders.neighbours(comm.rank))
        self.looks = folders.keeps(comm.rank)
        self.storage = storage
        self.copy_failure = ""  # of the last checkpoint, on this rank
        self.not_copied = ""  # on rank 0: why the last checkpoint is not in the storage

    def after_writing(self, path: Path) -> None:
        """Copy this rank's files to the storage. A copy that fails is no reason to stop the run."""
        self.copy_failure = ""
        if self.storage is None:
            return
        assert self.step is not None
        try:
            self.storage.put_files(path, step_name(self.step), self.files)
        except Exception as error:  # each kind of storage has its own errors
            self.copy_failure = describe_failure(error)

    def wait_for_files(self) -> None:
        """Wait until the shares of all ranks are written and copied: a storage may be slow on some machines."""
        thread = self.thread
        assert thread is not None

        def ends_within(seconds: float) -> bool:
            thread.join(seconds)
            return not thread.is_alive()

        wait_together(self.comm, ends_within)

    def commit(self) -> Path:
        """Complete the checkpoint in every folder and in the storage, then delete old ones."""
        assert self.step is not None
        step, path = self.step, self.path
        final = self.folder / step_name(step)
        keeps = self.folders.keeps(self.comm.rank)
        told = gather_texts(self.comm, json.dumps([self.files, self.copy_failure]))
        files: dict[str, Fingerprint] = {}
        places: dict[str, str] = {}
        failures: list[str] = []
        for rank, text in enumerate(told):
            written, failure = json.loads(text)
            files |= written
            places |= dict.fromkeys(written, self.folders.place(rank))
            if failure:
                failures.append(f"rank {rank} on {self.folders.hosts[rank]}: {failure}")
        with failing_together(self.comm, "make room, then go on with --resume"):
            if keeps:
                facts = self.facts | {"step": step, "places": places}
                publish(path, final, facts, files)
        if keeps:
            self._delete_old(final)
            sweep(self.folder, step)
        self.step = self.thread = None
        if self.comm.rank == 0:
            self._complete_copy(final, failures)
            self.announce(step, final)
        return final

    def _delete_old(self, final: Path) -> None:
        """Delete all but the newest checkpoints up to this one.

        A later one is left of a try that could not be resumed, perhaps because a machine was lost.
        """
        known = newest(self.folder)
        saved = known[known.index(final) :]
        for old in saved[self.keep :]:
            shutil.rmtree(old, ignore_errors=True)

    def _complete_copy(self, final: Path, failures: list[str]) -> None:
        """Complete the copy in the storage, if all ranks have copied their files."""
        if self.storage is None:
            return
        if not failures:
            try:
                self.storage.complete(final)
            except Exception as error:  # each kind of storage has its own errors
                failures = [describe_failure(error)]
        self.not_copied = failures[0] if failures else ""
        if failures:
            _log.warning("cannot copy to %s: %s", self.storage.url, failures[0])

    def check_copy(self) -> None:
        """Raise RunError on all ranks if the last checkpoint is not in the storage."""
        if self.storage is None:
            return
        not_copied = gather_texts(self.comm, self.not_copied)[0]
        if not_copied:
            raise RunError(
                f"cannot copy the last checkpoint to {self.storage.url}: {not_copied}\n"
                "  its files are in the folders of the run on all machines"
            )
