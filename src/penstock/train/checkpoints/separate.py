"""Finds checkpoints on machines with separate folders.

    node1   RUN/checkpoints/step-00000050/   files of ranks 0 and 1, checkpoint.json     ┐ the same checkpoint.json,
    node2   RUN/checkpoints/step-00000050/   files of ranks 2 and 3, checkpoint.json     ┘ which lists all files
    run.checkpoint_url      step-00000050/      each rank puts its own file there, rank 0 checkpoint.json at the end

An old checkpoint is deleted only after all machines have completed the new one, so there is always one that all have.
To resume, the machines complete the newest checkpoint that they have together:

    node1   step-00000050: files of ranks 0, 1        node2   step-00000050: files of ranks 2, 3
               └──── what the other machine lacks travels between them ────┘
    a new machine has nothing: it gets all files from the others, or from run.checkpoint_url
    a file that is damaged on one machine: an intact copy of another one, or of run.checkpoint_url, takes its place
    a file that nobody has intact: the checkpoint is left out, and an earlier one is tried

What each folder and storage has is told by size and checksum:

                 step-00000050                      step-00000100
        node1    a.safetensors, b is missing        a, b does not have its checksum
        node2    b.safetensors, a is missing        b, a is missing
        storage  a, b

A machine that has another description of a step has another version of it, perhaps from a try before.
"""

from __future__ import annotations

import json
import logging
import shutil
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeAlias

from penstock.errors import FileError, RunError
from penstock.runtime.comm.comm import Comm, exchange
from penstock.train.checkpoints.checkpoint import (
    MISSING,
    NOTE,
    Fingerprint,
    file_fault,
    newest,
    read_facts,
    saved_where,
    step_name,
    step_of,
    tensor_faults,
)
from penstock.train.checkpoints.folders import (
    PART,
    FileRelay,
    RunFolders,
    failing_together,
    relay_files,
    work_together,
)
from penstock.train.checkpoints.place import (
    RemoteCheckpoints,
    Storage,
    fetch_files,
    fetch_step,
    tell_mended,
)


@dataclass(frozen=True, slots=True)
class Inventory:
    """What one folder has of a checkpoint."""

    files: dict[
        str, Fingerprint
    ]  # all files of the checkpoint, the description included
    faults: dict[
        str, str
    ]  # the files that are missing or damaged here, and what is wrong
    saved: dict[str, str]  # where files were saved that are missing here

    def has(self, name: str) -> bool:
        """Whether a file is here and, as far as is known, intact."""
        return name in self.files and name not in self.faults


Holders = Mapping[int, Inventory]  # by keeper


StoredNote: TypeAlias = tuple[int, Fingerprint]  # the number of a storage; its note


@dataclass(frozen=True, slots=True)
class Version:
    """Those who have one and the same checkpoint of a step; another try may have left others elsewhere."""

    holders: dict[int, Inventory]
    storages: list[int]


def versions_of(holders: Holders, stored: Iterable[StoredNote]) -> list[Version]:
    """The checkpoints of a step; first the one that the first rank has."""
    found: dict[str, Version] = {}
    for rank, inventory in sorted(holders.items()):
        version = found.setdefault(json.dumps(inventory.files[NOTE]), Version({}, []))
        version.holders[rank] = inventory
    for number, note in stored:
        found.setdefault(json.dumps(note), Version({}, [])).storages.append(number)
    return list(found.values())


def take_inventory(folder: Path) -> Iterable[tuple[int, Inventory]]:
    """Yield the steps of all checkpoints in a folder, and what is there of each, by the sizes of the files."""
    for path in newest(folder):
        try:
            facts = read_facts(path)
            note = (path / NOTE).read_bytes()
        except (FileError, OSError):
            continue
        files = {**facts["files"], NOTE: _note_fingerprint(note)}
        faults, saved = {}, {}
        for name, known in files.items():
            fault = file_fault(path / name, known, quick=True)
            if fault:
                faults[name] = fault
                saved[name] = saved_where(facts, name)
        yield step_of(path), Inventory(files, faults, saved)


def _note_fingerprint(note: bytes) -> Fingerprint:
    return {"bytes": len(note), "crc32": zlib.crc32(note)}


def lost_everywhere(holders: Holders) -> list[str]:
    """The files that nobody has intact; if nobody has the checkpoint at all, its description."""
    if not holders:
        return [NOTE]
    files = next(iter(holders.values())).files
    return [
        name for name in files if not any(one.has(name) for one in holders.values())
    ]


_log = logging.getLogger(__name__)


ROOM_HINT = "make room on this machine, or name another run.folder"


class SeparateCheckpoints:
    """The checkpoints in the folders of all machines and, if there are any, in storages.

    All ranks must call its methods.
    """

    def __init__(
        self,
        folder: Path,
        comm: Comm,
        folders: RunFolders,
        storages: Iterable[Storage] = (),
    ) -> None:
        self.folder = folder  # of this rank's checkpoints
        self.comm = comm
        self.folders = folders
        self.storages = tuple(storages)
        self.faults: list[str] = []  # why checkpoints were left out
        self.damaged = False  # whether a damaged file is the reason

    def newest_good(self, names: Collection[str] = ()) -> Path | None:
        """Return the newest checkpoint that is complete and has no damage, now on all machines."""
        for step, versions in self.survey().items():
            if self.complete(step, versions, self.folders.keepers):
                path = self.folder / step_name(step)
                if self._has_tensors(path, names):
                    return path
        return None

    def collect(self, step: int) -> bool:
        """Complete the checkpoint of a step in rank 0's folder; return whether it is complete there."""
        return self.complete(step, self.survey().get(step, []), (0,))

    def survey(self) -> dict[int, list[Version]]:
        """What all folders and storages have of each step, by the sizes of files; the newest step first."""
        own: dict[int, dict[str, object]] = {}
        stored: dict[int, list[StoredNote]] = defaultdict(list)
        with failing_together(self.comm):
            if self.folders.keeps(self.comm.rank):
                own = {step: asdict(one) for step, one in take_inventory(self.folder)}
            storages = self.storages if self.comm.rank == 0 else ()
            for number, storage in enumerate(storages):
                for step in storage.steps():
                    with suppress(FileNotFoundError):  # It has just been deleted.
                        note = storage.read_note(step)
                        stored[step].append((number, _note_fingerprint(note)))
        told = exchange(self.comm, [own, stored])
        holders: dict[int, dict[int, Inventory]] = defaultdict(dict)
        for rank in self.folders.keepers:
            inventories, _ = told[rank]
            for step, inventory in inventories.items():
                holders[int(step)][rank] = Inventory(**inventory)
        _, stored_notes = told[0]
        notes = {int(step): ones for step, ones in stored_notes.items()}
        return {
            step: versions_of(holders.get(step, {}), notes.get(step, ()))
            for step in sorted({*holders, *notes}, reverse=True)
        }

    # ------------------------------------------------------------ completing one
    def complete(
        self, step: int, versions: Iterable[Version], receivers: Sequence[int]
    ) -> bool:
        """Complete the checkpoint of a step in the folders of these keepers, without damage; tell of success."""
        if not versions:
            self._note_fault(f"no machine has {step_name(step)}")
        return any(self._complete(step, one, receivers) for one in versions)

    def _complete(self, step: int, version: Version, receivers: Sequence[int]) -> bool:
        """The same for one version of the step."""
        every = {rank: list(one.files) for rank, one in version.holders.items()}
        holders = self._verify(step, version.holders, every)
        wrong: dict[str, dict[str, str]] = {}  # in storages
        for number in version.storages:
            if lost_everywhere(holders):
                holders, faults = self._fetch(step, number, holders, receivers)
                wrong[self.storages[number].place] = faults
        if not lost_everywhere(holders):
            return self._exchange(step, holders, receivers)
        for rank, inventory in holders.items():
            wrong[self.folders.place(rank)] = inventory.faults
        self._note_lost(step, holders, wrong)
        return False

    def _verify(
        self, step: int, holders: Holders, wanted: Mapping[int, Sequence[str]]
    ) -> dict[int, Inventory]:
        """Read files, and return the inventories with the damage that was found.

        The ranks of a machine divide its files:

            a.safetensors  b.safetensors  c.safetensors  d.safetensors
               rank 0         rank 1         rank 0         rank 1
        """
        faults: dict[str, str] = {}

        def read() -> None:
            owner = self.folders.owners[self.comm.rank]
            if owner not in holders:
                return
            inventory = holders[owner]
            neighbours = self.folders.neighbours(self.comm.rank)
            here = sorted(name for name in wanted.get(owner, ()) if inventory.has(name))
            for name in here[neighbours.index(self.comm.rank) :: len(neighbours)]:
                file = self.folder / step_name(step) / name
                fault = file_fault(file, inventory.files[name])
                if fault:
                    faults[name] = fault

        work_together(self.comm, read)
        told = exchange(self.comm, faults)
        found = {}
        for keeper, inventory in holders.items():
            merged = dict(inventory.faults)
            for neighbour in self.folders.neighbours(keeper):
                merged |= told[neighbour]
            found[keeper] = replace(inventory, faults=merged)
        return found

    def _fetch(
        self, step: int, number: int, holders: Holders, receivers: Sequence[int]
    ) -> tuple[dict[int, Inventory], dict[str, str]]:
        """Fetch what no machine has intact from a storage, each machine for itself.

        Returns what the machines have then, and what is wrong in the storage. If nobody has the checkpoint, the
        receivers fetch all of it.
        """
        storage = self.storages[number]
        own = holders.get(self.comm.rank)
        faults: dict[str, str] = {}

        def fetch() -> None:
            nonlocal own
            if own is not None:
                path = self.folder / step_name(step)
                lost = {name: own.files[name] for name in lost_everywhere(holders)}
                faults.update(fetch_files(storage, step, path, lost))
                left = dict(own.faults)
                for name in sorted(lost.keys() - faults.keys()):
                    tell_mended(path / name, left.pop(name), storage.place)
                own = replace(own, faults=left)
            elif not holders and self.comm.rank in receivers:
                faults.update(fetch_step(storage, step, self.folder))
                if not faults:
                    own = dict(take_inventory(self.folder))[step]

        work_together(self.comm, fetch, ROOM_HINT)
        told = exchange(self.comm, [asdict(own) if own else None, faults])
        inventories: dict[int, Inventory] = {}
        wrong: dict[str, str] = {}
        for rank, (inventory, faults_of_rank) in enumerate(told):
            wrong |= faults_of_rank
            if inventory:
                inventories[rank] = Inventory(**inventory)
        return inventories, wrong

    def _exchange(self, step: int, holders: Holders, receivers: Sequence[int]) -> bool:
        """Send intact files from machines that have them to those that lack them, the description last.

        Returns whether all of them have arrived without damage.
        """
        path = self.folder / step_name(step)
        files = next(iter(holders.values())).files
        chains = _chains(files, holders, receivers)
        relays = []
        arriving: dict[int, list[str]] = {rank: [] for rank in receivers}
        for name, chain in chains.items():
            relays.append(FileRelay(path / name, files[name]["bytes"], chain))
            for rank in chain[1:]:
                arriving[rank].append(name)
        own = holders.get(self.comm.rank)
        with failing_together(self.comm, ROOM_HINT):
            if self.comm.rank in receivers:
                self._make_place(path, holders)
            for name in arriving.get(self.comm.rank, ()):
                fault = own.faults[name] if own is not None else MISSING
                if fault != MISSING:  # Each machine lacks the files of others.
                    source = self.folders.place(chains[name][0])
                    tell_mended(path / name, fault, source)
            relay_files(self.comm, relays)
        return not chains or self._arrived_intact(step, files, arriving)

    def _make_place(self, path: Path, holders: Holders) -> None:
        """Remove what is left of earlier tries where files of a checkpoint will arrive."""
        if self.comm.rank not in holders:
            shutil.rmtree(path, ignore_errors=True)
        for left in path.glob(f"*{PART}"):
            # An error would keep this rank away from what all of them do next.
            with suppress(OSError):
                left.unlink()

    def _arrived_intact(
        self,
        step: int,
        files: dict[str, Fingerprint],
        arriving: Mapping[int, Sequence[str]],
    ) -> bool:
        """Whether the files that have arrived on each rank are without damage; notes the first one that is not."""
        complete = {rank: Inventory(files, {}, {}) for rank in arriving}
        arrived = self._verify(step, complete, arriving)
        for rank, inventory in arrived.items():
            for name, fault in inventory.faults.items():
                where = self.folders.place(rank)
                self._note_fault(f"{step_name(step)}: {name} {fault} in {where}")
                self.damaged = True
                return False
        return True

    def _has_tensors(self, path: Path, names: Collection[str]) -> bool:
        """Whether a checkpoint has all tensors of these names; the first rank of each machine looks."""
        own: dict[str, str] = {}
        if self.folders.keeps(self.comm.rank):
            own = tensor_faults(path, names)
        found = list(filter(None, exchange(self.comm, own)))
        for name, fault in found[0].items() if found else ():
            self._note_fault(f"{path} is damaged: {name} {fault}")
        return not found

    # ------------------------------------------------------------ saying what is wrong
    def _note_lost(
        self, step: int, holders: Holders, wrong: Mapping[str, Mapping[str, str]]
    ) -> None:
        """Note a file that nobody has intact, with what is `wrong` with it in each folder and storage."""
        lost = lost_everywhere(holders)
        if not holders:
            lost = [name for faults in wrong.values() for name in faults]
        name = min(lost)
        places: dict[str, list[str]] = {}  # by what is wrong there
        for place, faults in wrong.items():
            if name in faults:
                places.setdefault(faults[name], []).append(place)
        saved = [one.saved[name] for one in holders.values() if name in one.saved]
        text = MISSING
        if set(places) != {MISSING}:
            self.damaged = True
            clauses = [f"{why} in {', '.join(where)}" for why, where in places.items()]
            text = " and ".join(clauses)
        text += saved[0] if saved else ""
        self._note_fault(f"{step_name(step)} is not complete: {name} {text}")

    def _note_fault(self, text: str) -> None:
        self.faults.append(text)
        if self.folders.keeps(self.comm.rank):
            _log.warning("%s; looking for an earlier one", text)

    def nothing_found(self) -> RunError:
        """The error for a run that cannot resume."""
        if not self.faults:
            return RunError(
                f"no machine has a checkpoint of this run in {self.folder}\n  start without --resume"
            )
        hint = (
            "start a rank on that machine too, with the run.folder that it had, or copy its files here; "
            "with run.checkpoint_url, machines may change"
        )
        if self.damaged:
            hint = (
                "put a good copy of that file into one of these folders, or start a new run in another run.folder; "
                "with run.checkpoint_url, there is one more copy of each file"
            )
        return RunError(
            f"no checkpoint is complete on the machines of this run: {self.faults[0]}\n  {hint}"
        )


def _chains(
    files: Iterable[str], holders: Holders, receivers: Sequence[int]
) -> dict[str, list[int]]:
    """The way of each file that travels, the description last: from a rank that has it through those that lack it."""
    chains = {}
    for name in sorted(files, key=lambda name: (name == NOTE, name)):
        having = [rank for rank, one in holders.items() if one.has(name)]
        wanting = [rank for rank in receivers if rank not in having]
        if wanting:
            chains[name] = [having[0], *wanting]
    return chains


@dataclass(frozen=True, slots=True)
class SeparateFolders:
    """The folders of a run that are not all the same, and the storages that its checkpoints are copied to."""

    folders: RunFolders
    remote: RemoteCheckpoints | None = None  # run.checkpoint_url
    storages: tuple[Storage, ...] = ()  # others that a run can resume from

    def checkpoints(
        self, folder: Path, comm: Comm, copied: bool = True
    ) -> SeparateCheckpoints:
        """Return what finds checkpoints to resume from; `copied` says whether storages have them, too."""
        storages = (*self.storages, self.remote) if self.remote else self.storages
        searched = storages if copied else ()
        return SeparateCheckpoints(folder, comm, self.folders, searched)
