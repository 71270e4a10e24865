"""Separate folders: what the ranks of a run need to save and resume where no folder is shared."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from penstock.runtime import Comm
from penstock.train.folders.group import RunFolders
from penstock.train.folders.saver import SeparateSaver
from penstock.train.folders.search import SeparateCheckpoints
from penstock.train.remote import RemoteCheckpoints, Storage


@dataclass(frozen=True, slots=True)
class SeparateFolders:
    """The folders of a run that are not all the same, and the storages that its checkpoints are copied to."""

    folders: RunFolders
    remote: RemoteCheckpoints | None = None  # run.checkpoints
    storages: tuple[Storage, ...] = ()  # others that a run can resume from

    def saver(
        self,
        folder: Path,
        comm: Comm,
        keep: int,
        names: Collection[str],
        copied: bool = True,
    ) -> SeparateSaver:
        """Return what saves checkpoints; `copied` says whether they go to run.checkpoints, too."""
        remote = self.remote if copied else None
        return SeparateSaver(folder, comm, self.folders, keep, names, remote)

    def checkpoints(
        self, folder: Path, comm: Comm, copied: bool = True
    ) -> SeparateCheckpoints:
        """Return what finds checkpoints to resume from; `copied` says whether storages have them, too."""
        storages: list[Storage] = []
        if copied:
            storages = [*self.storages, *([self.remote] if self.remote else [])]
        return SeparateCheckpoints(folder, comm, self.folders, storages)
