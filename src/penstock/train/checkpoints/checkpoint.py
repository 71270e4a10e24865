"""Checkpoints that any split of the model can load: tensors have their names in the unsplit model.

    checkpoints/
      step-00000050/                                  complete: checkpoint.json has every file's size and checksum
        shard-00001-model-00001-of-00004.safetensors      layers.0.…, optimizer.exp_avg.layers.0.…
        …
        checkpoint.json
      step-00000100.saving/                           still being written, or left by a crash: nobody reads it

    step 100   copy to memory ┐                       ranks write on threads while training goes on;
    step 101   .......  write ┤ "done" goes with the   no thread talks to another rank
    step 102   .......        ┘ sum of step 102 ──► all done: rank 0 renames

Torch's DCP writes and reads the files in its safetensors storage, each rank for itself
(`no_dist`). So no plan goes over the network, and no pickle is written or read (DCP's own
default, `.metadata`, is a pickle). The schedule says which rank saves a replica. If several
processes share a tensor (`penstock.train.weights`), each writes its own share with its place in
the whole, and any other split reads what it needs. A rank that does not see the folder sends
its files to the launcher, and gets checkpoints from there (`RemoteFiles`). If a launcher has
started ranks on machines with separate folders, each folder has the files of its own ranks
(`penstock.train.checkpoints.folders`).
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import warnings
import zlib
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from penstock.errors import FileError, RunError
from penstock.formats.text import hide_secrets
from penstock.runtime import Comm, local_share, share_offset
from penstock.runtime.comm.comm import exchange
from penstock.train.checkpoints.folders import (
    RunFolders,
    failing_together,
    wait_together,
)

if TYPE_CHECKING:
    from penstock.train.checkpoints.place import RemoteCheckpoints

CheckpointFacts: TypeAlias = dict[str, Any]  # the content of checkpoint.json
Fingerprint: TypeAlias = dict[str, int]  # the size and checksum of a file
CHECKPOINTS_FOLDER = "checkpoints"  # in the folder of a run
NOTE = "checkpoint.json"
STEP_PREFIX = "step-"
SAVING = ".saving"  # suffix of a folder that is not complete
CHECKPOINT_VERSION = 1
MISSING = "is missing"  # the fault of a file that is not there
MAX_READERS = 8  # threads that verify files
_log = logging.getLogger(__name__)


class RemoteFiles(Protocol):
    """Where the checkpoints of a run are kept, for a rank that does not see their folder."""

    def put(self, path: Path) -> None:
        """Bring this rank's files of an unfinished checkpoint there; raise OSError if it fails."""

    def fetch(self, folder: Path) -> None:
        """Copy all checkpoints from there into a folder."""


# ---------------------------------------------------------------- saving
class Saver:
    """Saves one rank's share of checkpoints in the background.

    `begin` copies the tensors and returns. All ranks call `commit` once all are done: then the rank that keeps a
    folder gives the checkpoint its name there. With `remote_files`, this rank's files go there. With a `storage`, the
    rank that leads copies complete checkpoints there; if the ranks see folders `apart`, each copies its own files.
    """

    def __init__(
        self,
        folder: Path,
        comm: Comm,
        keep: int,
        names: Collection[str] = (),
        leader: int = 0,
        remote_files: RemoteFiles | None = None,
        apart: RunFolders | None = None,
        storage: RemoteCheckpoints | None = None,
    ) -> None:
        self.folder = folder
        self.comm = comm
        self.keep = keep
        self.names = names  # all parameters of the model
        self.leads = comm.rank == leader
        self.keeps = apart.keeps(comm.rank) if apart is not None else self.leads
        self.remote_files = remote_files
        self.apart = apart
        self.storage = storage
        self.own_files = f"*-{comm.rank + 1:05d}-of-{comm.ranks:05d}.safetensors"
        self.step: int | None = None  # being saved; the same on all ranks
        self.facts: CheckpointFacts = {}
        self.thread: threading.Thread | None = None
        self.failure: str = ""
        self.files: dict[str, Fingerprint] = {}  # that this rank has written
        self.copy_failure = ""  # of the last checkpoint, on this rank
        self.not_copied = ""  # on rank 0: why the last checkpoint is not in the storage
        # Called on the rank that leads, with the step and folder of every complete checkpoint.
        self.announce: Callable[[int, Path], None] = lambda step, folder: None

    def check_room(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Raise RunError on all ranks if the disk has too little room for what they will write there; all must call it.

        The oldest checkpoint does not count as room: it is deleted only after the new one is complete.
        """
        size = sum(local_share(tensor).nbytes for tensor in tensors.values())
        free = free_bytes(self.folder) if self.keeps else None
        told = exchange(self.comm, [size, free])
        if self.apart is not None:
            told = [told[rank] for rank in self.apart.neighbours(self.comm.rank)]
        need = sum(size for size, _ in told)
        rooms = [free for _, free in told if free is not None]
        if rooms and need > rooms[0]:
            raise RunError(
                f"the checkpoint of step {step} takes {need / 1e9:,.3f} GB, but {self.folder} has room for "
                f"{rooms[0] / 1e9:,.3f} GB\n  {self._way_on()}"
            )

    def begin(
        self, step: int, tensors: Mapping[str, Tensor], facts: CheckpointFacts
    ) -> None:
        """Copy the tensors, and begin to write them."""
        assert self.step is None, f"step {self.step} is still being saved"
        if self.storage is not None:
            # What it copies might be deleted as soon as this checkpoint is complete.
            self.storage.wait()
        self.step = step
        self.facts = facts
        self.failure = self.copy_failure = ""
        copies = {}
        corners = {}
        for name, tensor in tensors.items():
            share = local_share(tensor).detach()
            copies[name] = share.to("cpu", copy=True).contiguous()
            corners[name] = share_offset(tensor)
        self.thread = threading.Thread(
            target=self._write,
            args=(self.path, copies, corners),
            name=f"saves step {step}",
        )
        self.thread.start()

    @property
    def path(self) -> Path:
        """The folder of the step that is being saved, until it is complete."""
        assert self.step is not None
        return self.folder / f"{step_name(self.step)}{SAVING}"

    def _write(
        self,
        path: Path,
        tensors: dict[str, Tensor],
        corners: dict[str, tuple[int, ...]],
    ) -> None:
        """Write this rank's file, and bring it where it is wanted; runs on a thread."""
        try:
            _save(path, tensors, corners, self.comm.rank, self.comm.ranks)
            own = path.glob(self.own_files)
            self.files = {file.name: _fingerprint(file) for file in own}
            if self.storage is not None and self.apart is not None:
                self._copy(path, self.storage)
            if self.remote_files is not None:
                self.remote_files.put(path)
                shutil.rmtree(path)
        except BaseException as error:
            self.failure = f"cannot write {path}: {_text(_cause(error))}"
            # The checkpoint will never be complete, and others need the room.
            for file in path.glob(self.own_files):
                file.unlink(missing_ok=True)
            with suppress(OSError):  # Others may have files there.
                path.rmdir()

    def _copy(self, path: Path, storage: RemoteCheckpoints) -> None:
        """Copy this rank's files to the storage. A copy that fails is no reason to stop the run."""
        try:
            storage.put_files(path, path.stem, self.files)
        except Exception as error:  # each kind of storage has its own errors
            self.copy_failure = describe_failure(error)

    def done(self) -> bool:
        """Whether this rank's share is written; raise RunError if writing failed."""
        if self.thread is None or self.thread.is_alive():
            return False
        self.thread.join()
        if not self.failure:
            return True
        raise RunError(f"{self.failure}\n  {self._way_on()}")

    def _way_on(self) -> str:
        """How to continue if there is no room for a checkpoint."""
        checkpoints = newest(self.folder)
        if checkpoints:
            return f"the last good checkpoint is {checkpoints[0]}; make room, then go on with --resume"
        return (
            "there is no checkpoint yet; make room, then start again, without --resume"
        )

    def commit(self) -> Path:
        """Complete the checkpoint in every folder and in the storage, and delete old ones, once all ranks are done."""
        assert self.step is not None
        step, path = self.step, self.path
        final = self.folder / step_name(step)
        files: dict[str, Fingerprint] = {}
        places: dict[str, str] = {}
        failures: list[str] = []
        told = exchange(self.comm, [self.files, self.copy_failure])
        for rank, (written, failure) in enumerate(told):
            files |= written
            if self.apart is not None:
                places |= dict.fromkeys(written, self.apart.place(rank))
            if self.apart is not None and failure:
                failures.append(f"rank {rank} on {self.apart.hosts[rank]}: {failure}")
        facts = self.facts | {"step": step}
        if self.apart is not None:
            facts["places"] = places
        hint = f"the checkpoint {final} is not complete; make room, then go on with --resume"
        with failing_together(self.comm, hint):
            if self.keeps:
                publish(path, final, facts, files)
        if self.keeps:  # Until all have the new one, nobody deletes an old one.
            whole = None if self.apart is None else final
            prune(self.folder, self.keep, self.names, step, whole)
        self.step = self.thread = None
        if self.leads:
            self._complete_copy(final, failures)
            self.announce(step, final)
        return final

    def _complete_copy(self, final: Path, failures: list[str]) -> None:
        """Begin to copy a checkpoint to the storage, or complete the copy if all ranks have copied their files."""
        if self.storage is None:
            return
        if self.apart is None:
            self.storage.put(final)
            return
        if not failures:
            try:
                self.storage.complete(final)
            except Exception as error:  # each kind of storage has its own errors
                failures = [describe_failure(error)]
        self.not_copied = failures[0] if failures else ""
        if failures:
            _log.warning("cannot copy to %s: %s", self.storage.place, failures[0])

    def check_copy(self) -> None:
        """Wait for the copy of the last checkpoint, and raise RunError if it is not in the storage."""
        if self.storage is None:
            return
        if self.apart is None:
            self.storage.finish()
            return
        not_copied = exchange(self.comm, self.not_copied)[0]
        if not_copied:
            raise RunError(
                f"cannot copy the last checkpoint to {self.storage.place}: {not_copied}\n"
                "  its files are in the folders of the run on all machines"
            )

    def abandon(self) -> None:
        """Give up the checkpoint in progress, which a lost rank can no longer complete."""
        if self.thread is not None:
            self.thread.join()
        self.step = self.thread = None

    def finish(self) -> None:
        """Wait until the checkpoint in progress is complete; all ranks must call it."""
        thread = self.thread
        if thread is not None:

            def ends_within(seconds: float) -> bool:
                thread.join(seconds)
                return not thread.is_alive()

            # A storage may be slow on some machines, and the others must not run out of patience.
            wait_together(self.comm, ends_within)
            self.done()
            self.comm.barrier()
            self.commit()
        self.comm.barrier()


class _Planner(DefaultSavePlanner):
    """Tells DCP where each tensor lies in the whole tensor.

    It does so after DCP's own check that a tensor is complete, since no rank has all of it.
    """

    def __init__(self, corners: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.corners = corners

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return the plan with every item moved to its place."""
        plan = super().finish_plan(new_plan)
        return replace(plan, items=[self._move(item) for item in plan.items])

    def _move(self, item: WriteItem) -> WriteItem:
        assert item.tensor_data is not None
        corner = torch.Size(self.corners[item.index.fqn])
        chunk = replace(item.tensor_data.chunk, offsets=corner)
        return replace(item, tensor_data=replace(item.tensor_data, chunk=chunk))


def _save(
    path: Path,
    tensors: dict[str, Tensor],
    corners: Mapping[str, tuple[int, ...]],
    rank: int,
    ranks: int,
) -> None:
    """Write this rank's tensors as one file of a folder, with DCP.

    A rank that gives up takes the folder away, perhaps before this file is there. Then it is made again.
    """
    # DCP warns about what we asked for.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    # The last entry only tells DCP how many files there are.
    file_numbers = dict.fromkeys(tensors, rank + 1) | {"": ranks}
    for is_last in (False, True):
        path.mkdir(parents=True, exist_ok=True)
        if not tensors:
            return
        writer = HuggingFaceStorageWriter(
            str(path), file_numbers, save_distributed=True
        )
        planner = _Planner(corners)
        try:
            dcp_save(
                dict(tensors), storage_writer=writer, planner=planner, no_dist=True
            )
            return
        except BaseException as error:
            if is_last or not isinstance(_cause(error), FileNotFoundError):
                raise


def describe_failure(error: Exception) -> str:
    """The kind and the text of an error of a storage, fit to be shown."""
    return hide_secrets(f"{type(error).__name__}: {error}")


def free_bytes(folder: Path) -> int | None:
    """The room on the disk of a folder, which may not exist yet; None if the system does not say."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        return shutil.disk_usage(there).free
    except OSError:
        return None


def publish(
    path: Path,
    final: Path,
    facts: CheckpointFacts,
    files: Mapping[str, Fingerprint],
) -> None:
    """Write checkpoint.json, and rename the folder. Some of the files may be on other machines."""
    content = {
        "penstock": "checkpoint",
        "version": CHECKPOINT_VERSION,
        **facts,
        "files": dict(files),
    }
    _write_synced(path / NOTE, json.dumps(content, indent=1) + "\n")
    if final.exists():
        # It is damaged, or the run has resumed from an earlier step.
        shutil.rmtree(final)
    path.rename(final)
    _sync_folder(final.parent)
    _log.info("saved %s", final)


def prune(
    folder: Path,
    keep: int,
    names: Collection[str] = (),
    step: int | None = None,
    complete: Path | None = None,
) -> None:
    """Delete all but the `keep` newest checkpoints, and what a crash left behind.

    The newest complete checkpoint always stays; it is `complete` if other machines have some of its files. With `step`,
    later ones are neither touched nor counted: other ranks may already be saving one, and a complete one has damage,
    so that the run has gone on from before it.
    """
    checkpoints = newest(folder)
    if step is not None:
        checkpoints = [path for path in checkpoints if step_of(path) <= step]
    if complete is None:
        whole = (path for path in checkpoints if not faults(path, names, quick=True))
        complete = next(whole, None)
    for path in checkpoints[keep:]:
        if path != complete:
            shutil.rmtree(path, ignore_errors=True)
    sweep(folder, step)


def missing_tensors(path: Path, names: Collection[str]) -> list[str]:
    """Return the names for which a checkpoint has no tensor; it reads only headers."""
    if not names:
        return []
    found: set[str] = set()
    for file in path.glob("*.safetensors"):
        try:
            with safe_open(file, framework="pt") as opened:
                found |= set(opened.keys())
        except SafetensorError as error:
            raise FileError(f"{file} is damaged: {error}") from None
    return sorted(set(names) - found)


def sweep(folder: Path, step: int | None = None) -> None:
    """Delete incomplete checkpoints, so that their files do not get into the next one.

    With `step`, those of later steps stay.
    """
    for left in folder.glob(f"{STEP_PREFIX}*{SAVING}"):
        number = left.stem.removeprefix(STEP_PREFIX)
        if step is None or not number.isdigit() or int(number) <= step:
            shutil.rmtree(left, ignore_errors=True)


# ---------------------------------------------------------------- finding
def step_name(step: int) -> str:
    """Return the name of the folder of a step's checkpoint."""
    return f"{STEP_PREFIX}{step:08d}"


def step_of(path: Path) -> int:
    """Return the step of a checkpoint, by the name of its folder."""
    return int(path.name.removeprefix(STEP_PREFIX))


def newest(folder: Path) -> list[Path]:
    """Return all checkpoints, the newest first, damaged ones included."""
    found = [path for path in folder.glob(f"{STEP_PREFIX}*") if path.is_dir()]
    numbered = (path for path in found if path.name.removeprefix(STEP_PREFIX).isdigit())
    return sorted(numbered, key=step_of, reverse=True)


def good_step(folder: Path) -> int:
    """Return the step of the newest checkpoint if it has no damage, else -1."""
    for path in newest(folder)[:1]:
        if not faults(path):
            return step_of(path)
    return -1


def newest_good(
    folder: Path, comm: Comm | None = None, names: Collection[str] = ()
) -> Path | None:
    """Return the newest checkpoint without damage; all ranks get the same answer.

    The ranks divide the files among them and verify every checksum. With `names`, a
    checkpoint that lacks one of these tensors counts as damaged.
    """
    rank, ranks = (comm.rank, comm.ranks) if comm else (0, 1)
    for path in newest(folder):
        found = faults(path, names, rank, ranks)
        for name, fault in found.items():
            _log.warning("%s is damaged: %s %s", path, name, fault)
        told = exchange(comm, found) if comm else [found]
        if not any(told):
            return path
        if rank == 0:
            _log.warning("%s is left alone; looking for an earlier one", path)
    return None


def faults(
    path: Path,
    names: Collection[str] = (),
    rank: int = 0,
    ranks: int = 1,
    quick: bool = False,
) -> dict[str, str]:
    """Return what is wrong with a checkpoint, by the names of its files; several threads read them.

    Of several ranks, each verifies its share of the files, and the first one also looks for tensors of these names.
    A `quick` look knows files by their sizes alone.
    """
    try:
        facts = read_facts(path)
    except FileError as error:
        return {NOTE: str(error).removeprefix(f"{NOTE} ")}
    files = facts["files"]

    def fault_of(name: str) -> str:
        fault = file_fault(path / name, files[name], quick)
        return fault + saved_where(facts, name) if fault == MISSING else fault

    mine = sorted(files)[rank::ranks]
    with ThreadPoolExecutor(min(MAX_READERS, os.cpu_count() or 1)) as pool:
        found = dict(zip(mine, pool.map(fault_of, mine), strict=True))
    wrong = {name: fault for name, fault in found.items() if fault}
    return wrong if wrong or rank else tensor_faults(path, names)


def tensor_faults(path: Path, names: Collection[str]) -> dict[str, str]:
    """Say which tensors of these names a checkpoint lacks; empty if it lacks none."""
    try:
        missing = missing_tensors(path, names)
    except FileError as error:  # in a file that another rank verifies
        return {"a header": f"cannot be read: {error}"}
    if not missing:
        return {}
    others = f" and {len(missing) - 1} other weights" if len(missing) > 1 else ""
    return {"it": f"has no {missing[0]}{others}"}


def file_fault(file: Path, known: Fingerprint, quick: bool = False) -> str:
    """Return what is wrong with a file of a checkpoint; empty if it is intact. Nothing else decides that.

    A `quick` look knows a file by its size alone.
    """
    try:
        size = file.stat().st_size
        if size != known["bytes"]:
            return f"has {size} bytes, not {known['bytes']}"
        intact = quick or _fingerprint(file) == known
    except FileNotFoundError:
        return MISSING
    except OSError as error:  # The disk may be damaged, too.
        return f"cannot be read: {error.strerror or error}"
    return "" if intact else "does not have its checksum"


def saved_where(facts: CheckpointFacts, name: str) -> str:
    """Say where a file was saved, if machines with separate folders have saved a checkpoint."""
    place = facts.get("places", {}).get(name)
    return f"; it was saved in {place}" if place else ""


def lost_files(folder: Path) -> str:
    """Say what the newest checkpoint lacks because it was saved on other machines; empty if it lacks nothing."""
    for path in newest(folder)[:1]:
        try:
            facts = read_facts(path)
        except FileError:
            return ""
        places = facts.get("places", {})
        lost = [name for name in places if not (path / name).is_file()]
        if lost:
            return (
                f"{path} lacks {lost[0]}, which was saved in {places[lost[0]]}\n"
                f"  copy the files from there into {path}, or start the run on all of its machines again; "
                "with run.checkpoint_url, machines may change"
            )
    return ""


def read_facts(path: Path) -> CheckpointFacts:
    """Read the step, data, model and files of a checkpoint."""
    try:
        facts = json.loads((path / NOTE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or error
        raise FileError(f"{NOTE} cannot be read: {why}") from None
    foreign = not isinstance(facts, dict) or facts.get("penstock") != "checkpoint"
    if foreign or not isinstance(facts.get("files"), dict):
        raise FileError(f"{NOTE} is not the note of a checkpoint")
    version = facts.get("version", CHECKPOINT_VERSION)
    if isinstance(version, int) and version > CHECKPOINT_VERSION:
        raise FileError(
            f"{NOTE} is of version {version}; this Penstock reads up to "
            f"{CHECKPOINT_VERSION}: upgrade it"
        )
    empty: dict[str, Any] = {}
    defaults = {"version": CHECKPOINT_VERSION, "model": empty, "data": empty}
    facts = {**defaults, **facts}
    wrong = _wrong_facts(facts)
    if wrong:
        raise FileError(
            f"{NOTE} is not the note of a checkpoint: "
            f"its {' and '.join(wrong)} cannot be read"
        )
    return facts


def _wrong_facts(facts: CheckpointFacts) -> list[str]:
    """The keys whose values have the wrong type."""
    kinds = {"version": int, "step": int, "model": dict, "data": dict}
    wrong = [key for key, kind in kinds.items() if not isinstance(facts.get(key), kind)]
    if wrong:
        return wrong
    for name, known in facts["files"].items():
        is_known = isinstance(known, dict) and {"bytes", "crc32"} <= known.keys()
        if not is_known or Path(name).name != name:  # It must lie in this folder.
            return ["files"]
    return []


def load(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill tensors by their names, whichever rank saved them."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    try:
        dcp_load(
            dict(tensors),
            storage_reader=HuggingFaceStorageReader(str(path)),
            no_dist=True,
        )
    except BaseException as error:
        cause = _cause(error)
        if not isinstance(cause, Exception):  # an interrupt, which DCP wraps as well
            raise cause from None
        raise FileError(
            f"{path} does not have what this model needs: {_text(cause)}"
        ) from None


# ---------------------------------------------------------------- bytes
def _fingerprint(file: Path) -> Fingerprint:
    """The size and checksum of a file; they reveal damage, but not an attack."""
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
    except OSError:  # Not every system can open a folder.
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _cause(error: BaseException) -> BaseException:
    """The failure inside an error of DCP, which wraps failures by rank, or the error itself."""
    if isinstance(error, CheckpointException):
        return next(failure for failure, _ in error.failures.values())
    return error


def _text(error: BaseException) -> str:
    """What an error says; that of the system without its number and file."""
    return str(getattr(error, "strerror", None) or error)
