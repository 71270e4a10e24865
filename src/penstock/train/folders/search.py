"""Finds the newest checkpoint that machines with separate folders have together, and completes it on each of them.

node1   step-00000050: files of ranks 0, 1        node2   step-00000050: files of ranks 2, 3
           └──── what the other machine lacks travels between them ────┘
a new machine has nothing: it gets all files from the others, or from run.checkpoints
a file that is damaged on one machine: an intact copy of another one, or of run.checkpoints, takes its place
a file that nobody has intact: the checkpoint is left out, and an earlier one is tried
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeAlias

from penstock.errors import RunError
from penstock.runtime import Comm
from penstock.runtime.comm.texts import gather_texts
from penstock.train.checkpoint import (
    MISSING,
    NOTE,
    PART,
    Fingerprint,
    file_fault,
    find_missing_tensors,
    step_name,
)
from penstock.train.folders.group import RunFolders, failing_together, work_together
from penstock.train.folders.stock import (
    Holders,
    Stock,
    Survey,
    Version,
    lost_everywhere,
    read_notes,
    take_stock,
)
from penstock.train.folders.travel import Passage, pass_files
from penstock.train.remote import Storage, fetch_files, fetch_step, tell_mended

_log = logging.getLogger(__name__)
StoredNote: TypeAlias = tuple[int, Fingerprint]  # the number of a storage; its note
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
        survey = self.survey()
        for step in survey.steps:
            if self.complete(step, survey, self.folders.keepers):
                path = self.folder / step_name(step)
                if self._has_tensors(path, names):
                    return path
        return None

    def collect(self, step: int) -> bool:
        """Complete the checkpoint of a step in rank 0's folder; return whether it is complete there."""
        return self.complete(step, self.survey(), (0,))

    def survey(self) -> Survey:
        """What every folder has, by the sizes of files, and which storages have which steps."""
        own: dict[int, dict[str, object]] = {}
        stored: dict[int, list[StoredNote]] = {}
        with failing_together(self.comm):
            if self.folders.keeps(self.comm.rank):
                own = {step: asdict(one) for step, one in take_stock(self.folder)}
            if self.comm.rank == 0:
                stored = self._read_storages()
        told = self._tell([own, stored])
        stocks: dict[int, dict[int, Stock]] = {}
        for rank in self.folders.keepers:
            stocks_of_rank, _ = told[rank]
            for step, stock in stocks_of_rank.items():
                stocks.setdefault(int(step), {})[rank] = Stock(**stock)
        _, stored_notes = told[0]
        return Survey(stocks, {int(step): ones for step, ones in stored_notes.items()})

    def _read_storages(self) -> dict[int, list[StoredNote]]:
        """The numbers of the storages that have a step, and the fingerprints of its description there."""
        stored: dict[int, list[StoredNote]] = {}
        for number, storage in enumerate(self.storages):
            for step, note in read_notes(storage):
                stored.setdefault(step, []).append((number, note))
        return stored

    def _tell(self, facts: object) -> list[Any]:
        """Tell all ranks something, as JSON; return what each of them has told."""
        texts = gather_texts(self.comm, json.dumps(facts))
        return [json.loads(text) for text in texts]

    # ------------------------------------------------------------ completing one
    def complete(self, step: int, survey: Survey, receivers: Sequence[int]) -> bool:
        """Complete the checkpoint of a step in the folders of these keepers, without damage; tell of success."""
        versions = survey.versions(step)
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
        for rank, stock in holders.items():
            wrong[self.folders.place(rank)] = stock.faults
        self._note_lost(step, holders, wrong)
        return False

    def _verify(
        self, step: int, holders: Holders, wanted: Mapping[int, Sequence[str]]
    ) -> dict[int, Stock]:
        """Read files, and return the stocks with the damage that was found.

        The ranks of a machine divide its files:

            a.safetensors  b.safetensors  c.safetensors  d.safetensors
               rank 0         rank 1         rank 0         rank 1
        """
        faults: dict[str, str] = {}

        def read() -> None:
            owner = self.folders.owners[self.comm.rank]
            if owner in holders:
                names = self._own_share(holders[owner], wanted.get(owner, ()))
                faults.update(self._read_faults(step, holders[owner], names))

        work_together(self.comm, read)
        told = self._tell(faults)
        found = {}
        for keeper, stock in holders.items():
            merged = dict(stock.faults)
            for neighbour in self.folders.neighbours(keeper):
                merged |= told[neighbour]
            found[keeper] = replace(stock, faults=merged)
        return found

    def _own_share(self, stock: Stock, wanted: Iterable[str]) -> list[str]:
        """The files of this machine that this rank reads."""
        neighbours = self.folders.neighbours(self.comm.rank)
        here = sorted(name for name in wanted if stock.has(name))
        first = neighbours.index(self.comm.rank)
        return here[first :: len(neighbours)]

    def _read_faults(
        self, step: int, stock: Stock, names: Iterable[str]
    ) -> dict[str, str]:
        """What is wrong with files, by name, according to their checksums."""
        faults = {}
        for name in names:
            file = self.folder / step_name(step) / name
            fault = file_fault(file, stock.files[name])
            if fault:
                faults[name] = fault
        return faults

    def _fetch(
        self, step: int, number: int, holders: Holders, receivers: Sequence[int]
    ) -> tuple[dict[int, Stock], dict[str, str]]:
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
                lost = lost_everywhere(holders)
                faults.update(self._fetch_lost(storage, step, own, lost))
                mended = set(lost) - faults.keys()
                left = dict(own.faults)
                for name in mended:
                    left.pop(name, None)
                own = replace(own, faults=left)
            elif not holders and self.comm.rank in receivers:
                faults.update(fetch_step(storage, step, self.folder))
                if not faults:
                    own = dict(take_stock(self.folder))[step]

        work_together(self.comm, fetch, ROOM_HINT)
        told = self._tell([asdict(own) if own else None, faults])
        stocks: dict[int, Stock] = {}
        wrong: dict[str, str] = {}
        for rank, (stock, faults_of_rank) in enumerate(told):
            wrong |= faults_of_rank
            if stock:
                stocks[rank] = Stock(**stock)
        return stocks, wrong

    def _fetch_lost(
        self, storage: Storage, step: int, own: Stock, lost: Iterable[str]
    ) -> dict[str, str]:
        """Fetch files from a storage; return those that are wrong there, too."""
        path = self.folder / step_name(step)
        wanted = {name: own.files[name] for name in lost}
        faults = fetch_files(storage, step, path, wanted)
        for name in wanted.keys() - faults.keys():
            tell_mended(path / name, own.faults[name], storage.place)
        return faults

    def _exchange(self, step: int, holders: Holders, receivers: Sequence[int]) -> bool:
        """Send intact files from machines that have them to those that lack them, the description last.

        Returns whether all of them have arrived without damage.
        """
        path = self.folder / step_name(step)
        files = next(iter(holders.values())).files
        chains = _chains(files, holders, receivers)
        with failing_together(self.comm, ROOM_HINT):
            if self.comm.rank in receivers:
                self._make_place(path, holders)
            self._tell_of_mended(path, holders, chains)
            passages = []
            for name, chain in chains.items():
                passages.append(Passage(path / name, files[name]["bytes"], chain))
            pass_files(self.comm, passages)
        arriving: dict[int, list[str]] = {rank: [] for rank in receivers}
        for name, (_, *wanting) in chains.items():
            for rank in wanting:
                arriving[rank].append(name)
        return not chains or self._arrived_intact(step, files, arriving)

    def _make_place(self, path: Path, holders: Holders) -> None:
        """Remove what is left of earlier tries where files of a checkpoint will arrive."""
        if self.comm.rank not in holders:
            shutil.rmtree(path, ignore_errors=True)
        for left in path.glob(f"*{PART}"):
            # An error would keep this rank away from what all of them do next.
            with suppress(OSError):
                left.unlink()

    def _tell_of_mended(
        self, path: Path, holders: Holders, chains: Mapping[str, Sequence[int]]
    ) -> None:
        """Log which damaged files of this rank are replaced, and by whose."""
        own = holders.get(self.comm.rank)
        if own is None:
            return
        for name, (source, *wanting) in chains.items():
            if self.comm.rank not in wanting:
                continue
            fault = own.faults[name]
            if fault != MISSING:  # Each machine lacks the files of others.
                tell_mended(path / name, fault, self.folders.place(source))

    def _arrived_intact(
        self,
        step: int,
        files: dict[str, Fingerprint],
        arriving: Mapping[int, Sequence[str]],
    ) -> bool:
        """Whether the files that have arrived on each rank are without damage; notes the first one that is not."""
        complete = {rank: Stock(files, {}, {}) for rank in arriving}
        arrived = self._verify(step, complete, arriving)
        for rank, stock in arrived.items():
            for name, fault in stock.faults.items():
                where = self.folders.place(rank)
                self._note_fault(f"{step_name(step)}: {name} {fault} in {where}")
                self.damaged = True
                return False
        return True

    def _has_tensors(self, path: Path, names: Collection[str]) -> bool:
        """Whether a checkpoint has all tensors of these names; the first rank of each machine looks."""
        own = ""
        if self.folders.keeps(self.comm.rank):
            own = find_missing_tensors(path, names)
        found = list(filter(None, gather_texts(self.comm, own)))
        for fault in found[:1]:
            self._note_fault(f"{path} is damaged: {fault}")
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
            "with run.checkpoints, machines may change"
        )
        if self.damaged:
            hint = (
                "put a good copy of that file into one of these folders, or start a new run in another run.folder; "
                "with run.checkpoints, there is one more copy of each file"
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
