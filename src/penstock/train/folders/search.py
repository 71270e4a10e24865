"""Finds the newest checkpoint that machines with separate folders have together, and completes it on each of them.

node1   step-00000050: files of ranks 0, 1        node2   step-00000050: files of ranks 2, 3
           └──── what the other machine lacks travels between them ────┘
a new machine has nothing: it gets all files from the others, or from run.checkpoints
a file that nobody has: the checkpoint is left out, and an earlier one is tried
"""

from __future__ import annotations

import json
import logging
import shutil
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from penstock.errors import FileError, RunError
from penstock.runtime import Comm
from penstock.runtime.comm.texts import gather_texts
from penstock.train.checkpoint import (
    NOTE,
    STEP_PREFIX,
    find_faults,
    newest,
    read_facts,
    saved_where,
    step_name,
)
from penstock.train.folders.group import RunFolders, failing_together, work_together
from penstock.train.folders.travel import Passage, pass_files
from penstock.train.remote import Storage

_log = logging.getLogger(__name__)
ROOM_HINT = "make room on this machine, or name another run.folder"


@dataclass(frozen=True, slots=True)
class Stock:
    """What one folder has of a checkpoint."""

    digest: int  # of its description, which is the same on all machines
    sizes: dict[str, int]  # of all files of the checkpoint, the description included
    have: tuple[str, ...]  # the files that are here
    missing: dict[str, str]  # the others, each with the place where it was saved

    @property
    def whole(self) -> bool:
        """Whether all files are here."""
        return not self.missing


Stocks = Mapping[int, Mapping[int, Stock]]  # by keeper, by step


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

    def newest_good(self, names: Collection[str] = ()) -> Path | None:
        """Return the newest checkpoint that is complete and has no damage, now on all machines."""
        known, stored = self.survey()
        for step in sorted({*stored, *_steps(known)}, reverse=True):
            if self.bring(step, known, stored, self.folders.keepers):
                path = self.folder / step_name(step)
                if self._is_good(path, names):
                    return path
        return None

    def collect(self, step: int) -> bool:
        """Complete the checkpoint of a step in rank 0's folder; return whether it is complete there."""
        known, stored = self.survey()
        return self.bring(step, known, stored, (0,))

    def survey(self) -> tuple[Stocks, dict[int, int]]:
        """What every folder has, and which storage has which step."""
        own: dict[int, dict[str, object]] = {}
        stored: dict[int, int] = {}
        with failing_together(self.comm):
            if self.folders.keeps(self.comm.rank):
                own = {step: asdict(one) for step, one in _take_stock(self.folder)}
            if self.comm.rank == 0:
                for number, storage in enumerate(self.storages):
                    stored |= dict.fromkeys(storage.steps(), number)
        told = gather_texts(self.comm, json.dumps([own, stored]))
        known: dict[int, dict[int, Stock]] = {}
        for rank in self.folders.keepers:
            stocks = json.loads(told[rank])[0]
            known[rank] = {int(step): Stock(**one) for step, one in stocks.items()}
        found = json.loads(told[0])[1]
        return known, {int(step): number for step, number in found.items()}

    def bring(
        self,
        step: int,
        known: Stocks,
        stored: Mapping[int, int],
        receivers: Sequence[int],
    ) -> bool:
        """Complete the checkpoint of a step in the folders of these keepers; return whether that is possible."""
        holders = _same_checkpoint(step, known)
        lacking = [rank for rank in receivers if not _is_whole(holders.get(rank))]
        if not lacking:
            return True
        missing = _missing_everywhere(holders)
        if missing is None or missing:
            if step in stored:
                self._fetch(step, stored[step], lacking)
                return True
            name, place = next(iter((missing or {"": ""}).items()))
            self._note_fault(
                f"{step_name(step)} is not complete: {name} is missing{place}"
            )
            return False
        self._exchange(step, holders, lacking)
        return True

    def _fetch(self, step: int, number: int, lacking: Sequence[int]) -> None:
        """Fetch a checkpoint from a storage, once on each machine that lacks files of it."""

        def fetch() -> None:
            if self.comm.rank in lacking:
                self.storages[number].fetch_step(step, self.folder)

        work_together(self.comm, fetch, ROOM_HINT)

    def _exchange(
        self, step: int, holders: Mapping[int, Stock], lacking: Sequence[int]
    ) -> None:
        """Send files from the machines that have them to those that lack them, the description last."""
        path = self.folder / step_name(step)
        sizes = next(iter(holders.values())).sizes
        with failing_together(self.comm, ROOM_HINT):
            if self.comm.rank in lacking and self.comm.rank not in holders:
                shutil.rmtree(path, ignore_errors=True)
            passages = []
            for name in sorted(sizes, key=lambda name: (name == NOTE, name)):
                having = [rank for rank, one in holders.items() if name in one.have]
                wanting = [rank for rank in lacking if rank not in having]
                if wanting:
                    chain = [having[0], *wanting]
                    passages.append(Passage(path / name, sizes[name], chain))
            pass_files(self.comm, passages)

    def _is_good(self, path: Path, names: Collection[str]) -> bool:
        """Whether nobody finds damage; the ranks of a machine divide its files among them."""
        neighbours = self.folders.neighbours(self.comm.rank)
        place = neighbours.index(self.comm.rank)
        faults = find_faults(path, names, place, len(neighbours))
        host = self.folders.hosts[self.comm.rank]
        own = f"{path} on {host} is damaged: {faults[0]}" if faults else ""
        found = list(filter(None, gather_texts(self.comm, own)))
        for fault in found[:1]:
            self._note_fault(fault)
        return not found

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
        return RunError(
            f"no checkpoint is complete on the machines of this run: {self.faults[0]}\n"
            "  start a rank on that machine too, with the run.folder that it had, or copy its files here; "
            "with run.checkpoints, machines may change"
        )


def _take_stock(folder: Path) -> Iterable[tuple[int, Stock]]:
    """Yield the steps of all checkpoints in a folder, and what is there of each."""
    for path in newest(folder):
        try:
            facts = read_facts(path)
            note = (path / NOTE).read_bytes()
        except (FileError, OSError):
            continue
        sizes = {name: int(one["bytes"]) for name, one in facts["files"].items()}
        sizes[NOTE] = len(note)
        have = [name for name in sizes if _size(path / name) == sizes[name]]
        missing = {name: saved_where(facts, name) for name in sizes if name not in have}
        step = int(path.name.removeprefix(STEP_PREFIX))
        yield step, Stock(zlib.crc32(note), sizes, tuple(have), missing)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return -1


def _steps(known: Stocks) -> set[int]:
    return {step for stocks in known.values() for step in stocks}


def _is_whole(stock: Stock | None) -> bool:
    return stock is not None and stock.whole


def _same_checkpoint(step: int, known: Stocks) -> dict[int, Stock]:
    """What each keeper has of a step; those whose description differs from that of the first hold another run's."""
    found = {rank: one[step] for rank, one in known.items() if step in one}
    digest = found[min(found)].digest if found else 0
    return {rank: one for rank, one in found.items() if one.digest == digest}


def _missing_everywhere(holders: Mapping[int, Stock]) -> dict[str, str] | None:
    """The files that nobody has, each with the place where it was saved; None if nobody has any."""
    if not holders:
        return None
    missing = dict(next(iter(holders.values())).missing)
    for one in holders.values():
        for name in one.have:
            missing.pop(name, None)
    return missing
