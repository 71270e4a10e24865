"""What the folders and storages of a run have of its checkpoints, by size and checksum.

             step-00000050                      step-00000100
    node1    a.safetensors, b is missing        a, b does not have its checksum
    node2    b.safetensors, a is missing        b, a is missing
    storage  a, b

A machine that has another description of a step has another version of it, perhaps from a try before.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import FileError
from penstock.train.checkpoint import (
    NOTE,
    Fingerprint,
    newest,
    read_facts,
    saved_where,
    size_fault,
    step_of,
)
from penstock.train.remote import Storage


@dataclass(frozen=True, slots=True)
class Stock:
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

    @property
    def note(self) -> Fingerprint:
        """The fingerprint of the description, which is the same on all machines."""
        return self.files[NOTE]


Holders = Mapping[int, Stock]  # by keeper


@dataclass(frozen=True, slots=True)
class Version:
    """Those who have one and the same checkpoint of a step; another try may have left others elsewhere."""

    holders: Holders
    storages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Survey:
    """What all folders and storages have, by step."""

    stocks: Mapping[int, Holders]
    # The storages that have a step, by number, and the fingerprint of the description there.
    stored: Mapping[int, Sequence[tuple[int, Fingerprint]]]

    @property
    def steps(self) -> list[int]:
        """All steps, the newest first."""
        return sorted({*self.stocks, *self.stored}, reverse=True)

    def versions(self, step: int) -> list[Version]:
        """The checkpoints of a step; first the one that the first rank has."""
        holders = self.stocks.get(step, {})
        stored = self.stored.get(step, ())
        notes = [stock.note for _, stock in sorted(holders.items())]
        notes += [note for _, note in stored]
        found = []
        for note in {json.dumps(note): note for note in notes}.values():
            same = {rank: one for rank, one in holders.items() if one.note == note}
            numbers = tuple(number for number, one in stored if one == note)
            found.append(Version(same, numbers))
        return found


def take_stock(folder: Path) -> Iterable[tuple[int, Stock]]:
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
            fault = size_fault(path / name, known)
            if fault:
                faults[name] = fault
                saved[name] = saved_where(facts, name)
        yield step_of(path), Stock(files, faults, saved)


def read_notes(storage: Storage) -> Iterable[tuple[int, Fingerprint]]:
    """Yield the steps of all checkpoints in a storage, and the fingerprint of the description of each."""
    for step in storage.steps():
        try:
            yield step, _note_fingerprint(storage.read_note(step))
        except FileNotFoundError:  # It has just been deleted.
            continue


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
