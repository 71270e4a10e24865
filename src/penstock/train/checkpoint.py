"""Checkpoints that any split can take up: tensors under their names in the unsplit model, a file a rank, then a rename.

    checkpoints/
      step-00000050/                                  whole and checked: a note with every file's size and checksum
        shard-00001-model-00001-of-00004.safetensors      layers.0.…, optimizer.exp_avg.layers.0.…
        …
        checkpoint.json
      step-00000100.saving/                           on its way, or left by a crash: nobody reads it

    step 100   copy to memory ┐                       ranks write on threads while training goes on;
    step 101   .......  write ┤ "done" goes with the   no thread talks to another rank
    step 102   .......        ┘ sum of step 102 ──► all done: rank 0 renames

Files are written and read by torch's DCP in its safetensors storage, each rank for itself (`no_dist`): no plan goes
over the network, and no pickle is written or read. (DCP's own default, `.metadata`, is a pickle.) Which rank saves a
replica is known from the schedule. Of a tensor that several processes share (`penstock.train.mesh`) each writes its own
share, with its place in the whole; any other split reads from these what it needs. All ranks must see the folder.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import warnings
import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from penstock.errors import FileError, RunError
from penstock.runtime import Comm, local_share, share_offset

CheckpointFacts: TypeAlias = dict[str, Any]  # JSON
NOTE = "checkpoint.json"
SAVING = ".saving"
CHECKPOINT_VERSION = 1
_log = logging.getLogger(__name__)


# ---------------------------------------------------------------- saving
class Saver:
    """One rank's share of saving, step after step. `begin` copies and returns; `commit` when all ranks are done."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        ranks: int,
        keep: int,
        names: Collection[str] = (),
    ) -> None:
        self.folder, self.rank, self.ranks, self.keep = folder, rank, ranks, keep
        self.names = (
            names  # of the model's parameters: a complete checkpoint has them all
        )
        self.step: int | None = None  # what is on its way; the same on all ranks
        self.facts: CheckpointFacts = {}
        self.thread: threading.Thread | None = None
        self.failure: str = ""

    def begin(
        self, step: int, tensors: Mapping[str, Tensor], facts: CheckpointFacts
    ) -> None:
        """Copies what is to be saved, and begins to write it."""
        assert self.step is None, f"step {self.step} is still on its way"
        self.step, self.facts, self.failure = step, facts, ""
        copies = {
            name: local_share(one).detach().to("cpu", copy=True).contiguous()
            for name, one in tensors.items()
        }
        corners = {name: share_offset(one) for name, one in tensors.items()}
        self.thread = threading.Thread(
            target=self._write,
            args=(self.path, copies, corners),
            name=f"saves step {step}",
        )
        self.thread.start()

    @property
    def path(self) -> Path:
        """Where the step that is on its way goes meanwhile."""
        return self.folder / f"step-{self.step:08d}{SAVING}"

    def _write(
        self,
        path: Path,
        tensors: dict[str, Tensor],
        corners: dict[str, tuple[int, ...]],
    ) -> None:
        """On its own thread: this rank's file, and a note on it."""
        try:
            path.mkdir(parents=True, exist_ok=True)
            if tensors:
                _save(path, tensors, corners, self.rank, self.ranks)
            mine = path.glob(f"*-{self.rank + 1:05d}-of-{self.ranks:05d}.safetensors")
            note = path / f"rank-{self.rank:05d}.json"
            _write_synced(
                note, json.dumps({file.name: _fingerprint(file) for file in mine})
            )
        except OSError as error:
            self.failure = f"cannot write {path}: {error.strerror or error}"
        except BaseException as error:
            self.failure = f"cannot write {path}: {_cause(error)}"

    def done(self) -> bool:
        """Whether this rank's share is written; an error if it cannot be."""
        if self.thread is None or self.thread.is_alive():
            return False
        self.thread.join()
        if self.failure:
            good = newest(self.folder)
            last = (
                f"the last good checkpoint is {good[0]}; make room, then go on with --resume"
                if good
                else "there is no checkpoint yet; make room, then start again, without --resume"
            )
            raise RunError(f"{self.failure}\n  {last}")
        return True

    def commit(self) -> Path:
        """All ranks are done: gives the checkpoint its name, and drops old ones. Rank 0 does it, the others note it."""
        assert self.step is not None
        path, final = self.path, self.folder / f"step-{self.step:08d}"
        if self.rank == 0:
            try:
                _publish(path, final, self.facts | {"step": self.step})
                prune(self.folder, self.keep, self.names, self.step)
            except OSError as error:
                raise RunError(
                    f"cannot finish the checkpoint {final}: {error.strerror or error}"
                ) from None
        self.step = self.thread = None
        return final

    def finish(self, comm: Comm) -> None:
        """Waits for what is on its way. All ranks call it."""
        if self.step is not None:
            assert self.thread is not None
            self.thread.join()
            self.done()
            comm.barrier()
            self.commit()
        comm.barrier()


class _Planner(DefaultSavePlanner):
    """Tells DCP where each tensor lies in its whole; after its check that all of it is there, as no rank has it."""

    def __init__(self, corners: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.corners = corners

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The same plan, every item moved to its place."""
        plan = super().finish_plan(new_plan)
        return replace(plan, items=[self._moved(item) for item in plan.items])

    def _moved(self, item: WriteItem) -> WriteItem:
        assert item.tensor_data is not None
        chunk = replace(
            item.tensor_data.chunk, offsets=torch.Size(self.corners[item.index.fqn])
        )
        return replace(item, tensor_data=replace(item.tensor_data, chunk=chunk))


def _save(
    path: Path,
    tensors: dict[str, Tensor],
    corners: Mapping[str, tuple[int, ...]],
    rank: int,
    ranks: int,
) -> None:
    """This rank's tensors as one file, by DCP; the last entry of the mapping only says how many files there are."""
    warnings.filterwarnings(
        "ignore", message="torch.distributed is disabled"
    )  # it says so, since we ask for it
    places = dict.fromkeys(tensors, rank + 1) | {"": ranks}
    writer = HuggingFaceStorageWriter(str(path), places, save_distributed=True)
    dcp_save(
        dict(tensors), storage_writer=writer, planner=_Planner(corners), no_dist=True
    )


def _publish(path: Path, final: Path, facts: CheckpointFacts) -> None:
    """One note out of all ranks' notes, then the rename, after which the checkpoint is there."""
    files: dict[str, Any] = {}
    for note in sorted(path.glob("rank-*.json")):
        files |= json.loads(note.read_text(encoding="utf-8"))
        note.unlink()
    whole = {
        "penstock": "checkpoint",
        "version": CHECKPOINT_VERSION,
        **facts,
        "files": files,
    }
    _write_synced(path / NOTE, json.dumps(whole, indent=1) + "\n")
    if (
        final.exists()
    ):  # a damaged one, or one of a run that went on from an earlier step
        shutil.rmtree(final)
    path.rename(final)
    _sync_folder(final.parent)
    _log.info("saved %s", final)


def prune(
    folder: Path, keep: int, names: Collection[str] = (), step: int | None = None
) -> None:
    """Keeps the newest ones, and nothing that a crash has left. The newest complete one stays in any case.

    With `step`, nothing of a later step is touched: other ranks may have begun to save it already.
    """
    found = newest(folder)
    kept = next(
        (number for number, path in enumerate(found) if is_complete(path, names)),
        len(found),
    )
    for number, old in enumerate(found):
        if number >= keep and number != kept:
            shutil.rmtree(old, ignore_errors=True)
    sweep(folder, step)


def is_complete(path: Path, names: Collection[str] = ()) -> bool:
    """Whether a checkpoint has its note, all of its files in their sizes, and these tensors; checksums are not read."""
    try:
        files = read_facts(path)["files"]
        sizes = all(
            (path / name).stat().st_size == known["bytes"]
            for name, known in files.items()
        )
        return sizes and not missing_tensors(path, names)
    except (FileError, OSError):
        return False


def missing_tensors(path: Path, names: Collection[str]) -> list[str]:
    """Of these names those under which no file of a checkpoint has a tensor; only headers are read."""
    found: set[str] = set()
    for file in path.glob("*.safetensors") if names else ():
        try:
            with safe_open(file, framework="pt") as opened:
                found |= set(opened.keys())
        except SafetensorError as error:
            raise FileError(f"{file} is damaged: {error}") from None
    return sorted(set(names) - found)


def sweep(folder: Path, step: int | None = None) -> None:
    """Drops what a crash has left, up to a step if given: a file of it must not get into the next checkpoint."""
    for left in folder.glob(f"step-*{SAVING}"):
        number = left.name[5 : -len(SAVING)]
        if step is None or not number.isdigit() or int(number) <= step:
            shutil.rmtree(left, ignore_errors=True)


# ---------------------------------------------------------------- finding
def newest(folder: Path) -> list[Path]:
    """Checkpoints by their steps, the last first, good or not."""
    found = [
        path
        for path in folder.glob("step-*")
        if path.name[5:].isdigit() and path.is_dir()
    ]
    return sorted(found, key=lambda path: int(path.name[5:]), reverse=True)


def newest_good(
    folder: Path, comm: Comm | None = None, names: Collection[str] = ()
) -> Path | None:
    """The last checkpoint that is whole; each rank reads its share of every file through, and all agree.

    With `names`, the model's parameters, one that lacks some of them is not whole.
    """
    rank, ranks = (comm.rank, comm.ranks) if comm else (0, 1)
    for path in newest(folder):
        found = list(checkpoint_faults(path, rank, ranks))
        if not found and rank == 0:
            found += _lost(path, names)
        for fault in found:
            _log.warning("%s is damaged: %s", path, fault)
        count = torch.tensor([float(len(found))], dtype=torch.float64)
        if comm is not None:
            comm.add(count, tuple(range(ranks))).wait()
        if not count.item():
            return path
        if rank == 0:
            _log.warning("%s is left alone; looking for an earlier one", path)
    return None


def _lost(path: Path, names: Collection[str]) -> list[str]:
    try:
        lost = missing_tensors(path, names)
    except FileError as error:  # a file that another rank reads through
        return [str(error)]
    return (
        [
            f"it has no {lost[0]}"
            + (f" and {len(lost) - 1} other weights" if lost[1:] else "")
        ]
        if lost
        else []
    )


def checkpoint_faults(path: Path, rank: int = 0, ranks: int = 1) -> Iterator[str]:
    """What is wrong with a checkpoint: the note, and of every ranks-th file size and checksum."""
    try:
        files = read_facts(path)["files"]
    except FileError as error:
        yield str(error)
        return
    for number, (name, known) in enumerate(sorted(files.items())):
        if number % ranks != rank:
            continue
        file = path / name
        if not file.is_file():
            yield f"{name} is missing"
        elif file.stat().st_size != known["bytes"]:
            yield f"{name} has {file.stat().st_size} bytes, not {known['bytes']}"
        elif _fingerprint(file) != known:
            yield f"{name} does not have its checksum"


def read_facts(path: Path) -> CheckpointFacts:
    """What the note says: step, data, model, files."""
    try:
        facts = json.loads((path / NOTE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or error
        raise FileError(f"{NOTE} cannot be read: {why}") from None
    if (
        not isinstance(facts, dict)
        or facts.get("penstock") != "checkpoint"
        or not isinstance(facts.get("files"), dict)
    ):
        raise FileError(f"{NOTE} is not the note of a checkpoint")
    version = facts.get("version", CHECKPOINT_VERSION)
    if isinstance(version, int) and version > CHECKPOINT_VERSION:
        raise FileError(
            f"{path} is of version {version}; this Penstock reads up to {CHECKPOINT_VERSION}: upgrade it"
        )
    facts = {
        "version": CHECKPOINT_VERSION,
        "model": dict[str, Any](),
        "data": dict[str, Any](),
        **facts,
    }
    kinds = {"version": int, "step": int, "model": dict, "data": dict}
    wrong = [key for key, kind in kinds.items() if not isinstance(facts.get(key), kind)]
    files = facts["files"].values()
    if wrong or not all(
        isinstance(one, dict) and {"bytes", "crc32"} <= one.keys() for one in files
    ):
        raise FileError(
            f"{NOTE} is not the note of a checkpoint: {' and '.join(wrong) or 'files'} cannot be that"
        )
    return facts


def load(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fills tensors by their names, whoever has saved them."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    try:
        dcp_load(
            dict(tensors),
            storage_reader=HuggingFaceStorageReader(str(path)),
            no_dist=True,
        )
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        raise FileError(
            f"{path} does not have what this model needs: {_cause(error)}"
        ) from None


# ---------------------------------------------------------------- bytes
def _fingerprint(file: Path) -> dict[str, int]:
    """Size and checksum, to find damage (not to stop somebody who wants to deceive)."""
    total = 0
    with file.open("rb") as opened:
        while piece := opened.read(1 << 20):
            total = zlib.crc32(piece, total)
    return {"bytes": file.stat().st_size, "crc32": total}


def _write_synced(file: Path, text: str) -> None:
    with file.open("w", encoding="utf-8") as opened:
        opened.write(text)
        opened.flush()
        os.fsync(opened.fileno())


def _sync_folder(folder: Path) -> None:
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:  # no such thing here
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _cause(error: BaseException) -> str:
    """DCP wraps what went wrong by rank; the innermost reason says most."""
    failures = getattr(error, "failures", None)
    inner = next(iter(failures.values())) if failures else error
    found = inner[0] if isinstance(inner, tuple) else inner
    return str(getattr(found, "strerror", None) or found)
