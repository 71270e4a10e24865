"""The files of a run, for machines that do not see its folder.

    joining    config.toml, plan.json, tokenizer, tokens, the model to start from  ──►  worker
    saving     worker  ──►  checkpoints/step-00000100.saving/
    resuming   checkpoints/step-00000100/  ──►  worker

The launcher gives out only what a worker needs, and accepts only files of unfinished checkpoints.

If another launcher such as torchrun has started the ranks, rank 0's folder goes to the machines that do not see it:

    rank 0   config.toml, plan.json, tokenizer, tokens of the text, the model to start from
                 │  what a folder has already, by size and time, is not copied again
                 ▼
    keeper of another folder     RUN/config.toml with its own paths, RUN/plan.json, RUN/tokens.bin, RUN/model/...

If a machine sees the very file of rank 0, for instance tokens on a shared disk, its folder gets a link to it. The
config of each folder names the copies in it, so any machine can be rank 0 when the run resumes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import ssl
import threading
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.config import CONFIG_JSON, Config, DataConfig, is_plan_file, own_code_file
from penstock.crew.store import Dial
from penstock.crew.tls import MAX_PLAN_BYTES, receive_bytes, receive_frame, send_frame
from penstock.errors import ConfigError, FileError, PeerLostError, RunError
from penstock.formats.config_toml import (
    CONFIG_FILE,
    apply_changes,
    dump_config,
    load_config,
    read_config,
    read_source,
)
from penstock.formats.text import put_in_place
from penstock.runtime.comm.comm import Comm, exchange
from penstock.runtime.process.launch import Meeting, hear_first
from penstock.train.before.start import (
    check_storage,
    check_unused,
    fetch_checkpoint,
    has_checkpoint,
)
from penstock.train.checkpoints.checkpoint import (
    CHECKPOINTS_FOLDER,
    SAVING,
    STEP_PREFIX,
    newest,
)
from penstock.train.checkpoints.folders import (
    FileRelay,
    RunFolders,
    compare_folders,
    failing_together,
    relay_files,
    work_together,
)
from penstock.train.checkpoints.place import Storage, fetch_newest, remote_checkpoints
from penstock.train.checkpoints.separate import SeparateFolders
from penstock.train.data.cache import cached_tokens, file_of_marks
from penstock.train.data.corpus import validation_data
from penstock.train.data.files import ENCODED
from penstock.train.data.tokenizer import TOKENIZER, side_files
from penstock.train.history import PLAN_FILE, SayLine
from penstock.train.job import cache_of, settle_model, with_kept_files
from penstock.train.launch import (
    RESTART_COUNT,
    STOP_FILE,
    forget_previous_end,
    read_failure,
    restarted,
)

VALIDATION = "validation"  # the name of the text of data.validation
TOKENS_SUFFIX = ".bin"
MODEL_FOLDER = "model"
MODEL_SUFFIXES = (".json", ".safetensors")
MAX_SENT_BYTES = 1 << 20  # sent at once
FILE_NAME = r"[\w.-]+\.(?:safetensors|json)"
STEP_FOLDER = rf"{CHECKPOINTS_FOLDER}/{STEP_PREFIX}\d+"
SAVED_FILE = re.compile(rf"{STEP_FOLDER}/{FILE_NAME}")
UNFINISHED_FILE = re.compile(rf"{STEP_FOLDER}{re.escape(SAVING)}/{FILE_NAME}")
# Sees the name and the size of a file before it comes.
Watch = Callable[[str, int], None]


def texts_of(data: DataConfig) -> dict[str, DataConfig]:
    """The texts of a run, by the names of the files that workers keep their tokens in.

    A mixture has several texts, and data.validation is one more.
    """
    texts = {}
    for number, part in enumerate(data.parts):
        texts[f"tokens-{number}" if number else "tokens"] = part
    validation = validation_data(data)
    if validation is not None:
        texts[VALIDATION] = validation
    return texts


# ---------------------------------------------------------------- the launcher's side
class RunFiles:
    """The files of a run on the launcher's machine, by the names that workers use."""

    def __init__(self, folder: Path, config: Config) -> None:
        self.folder = folder
        self.inputs = {
            CONFIG_FILE: folder / CONFIG_FILE,
            PLAN_FILE: folder / PLAN_FILE,
        }
        for name, text in texts_of(config.data).items():
            row, note = cached_tokens(text, cache_of(folder))
            # With this ending, the config of a worker can name the tokens.
            self.inputs[f"{name}{ENCODED}"] = note
            self.inputs[f"{name}{TOKENS_SUFFIX}"] = row
            if text.marked:
                marks = file_of_marks(row)
                self.inputs[f"{name}{marks.suffix}"] = marks
        tokenizer = folder / TOKENIZER
        if tokenizer.is_file():
            for file in (tokenizer, *side_files(tokenizer)):
                self.inputs[file.name] = file
        if config.model.folder:
            for file in sorted(Path(config.model.folder).iterdir()):
                if file.suffix in MODEL_SUFFIXES:
                    self.inputs[f"{MODEL_FOLDER}/{file.name}"] = file

    def find(self, name: str) -> Path | None:
        """The file that a worker may read under this name."""
        if SAVED_FILE.fullmatch(name):
            return self.folder / name
        return self.inputs.get(name)

    def sizes(self, kind: str) -> dict[str, int]:
        """The names and sizes of what joining or resuming needs."""
        if kind == CHECKPOINTS_FOLDER:
            files = [
                file
                for path in newest(self.folder / CHECKPOINTS_FOLDER)
                for file in sorted(path.iterdir())
            ]
            found = {str(file.relative_to(self.folder)): file for file in files}
        else:
            found = self.inputs
        return {name: file.stat().st_size for name, file in found.items()}


def serve_files(connection: ssl.SSLSocket, files: RunFiles) -> None:
    """Give and take files until the connection ends."""
    while True:
        request = receive_frame(connection)
        try:
            if "list" in request:
                answer = {"files": files.sizes(str(request["list"]))}
                send_frame(connection, answer)
            elif "get" in request:
                _give(connection, files, str(request["get"]))
            else:
                name = str(request.get("put"))
                _take(connection, files, name, int(request["bytes"]))
        except OSError as error:
            reason = error.strerror or str(error)
            send_frame(connection, {"error": f"on the launcher's machine: {reason}"})


def _give(connection: ssl.SSLSocket, files: RunFiles, name: str) -> None:
    file = files.find(name)
    if file is None:
        send_frame(connection, {"error": f"the run has no file {name!r} for workers"})
        return
    _send_file(connection, file)


def _take(connection: ssl.SSLSocket, files: RunFiles, name: str, size: int) -> None:
    if not UNFINISHED_FILE.fullmatch(name):
        raise PeerLostError(f"{name!r} is not a file of an unfinished checkpoint")
    _receive_file(connection, files.folder / name, size)
    send_frame(connection, {"put": name})


# ---------------------------------------------------------------- a worker's side
class LauncherFiles:
    """The launcher's files, used from another machine over connections of its own."""

    def __init__(self, dial: Dial) -> None:
        self.dial = dial
        self.lock = threading.Lock()

    def bring_inputs(self, folder: Path, watch: Watch) -> None:
        """Copy what a worker needs into its folder; tokens that it has already stay."""
        with self.lock, self.dial() as connection:
            sizes = self._list(connection, "inputs")
            before = {
                name: _bytes(inside(folder, name))
                for name in sizes
                if name.endswith(ENCODED)
            }
            for name, size in sizes.items():
                file = inside(folder, name)
                note = file.with_suffix(ENCODED)
                unchanged = before.get(note.name) and before[note.name] == _bytes(note)
                is_here = file.is_file() and file.stat().st_size == size
                if name != note.name and unchanged and is_here:
                    continue
                watch(name, size)
                self._get(connection, name, file)
        settle_config(folder)

    def fetch(self, folder: Path) -> None:
        """Copy all checkpoints of the run into a folder, in place of what it has."""
        shutil.rmtree(folder, ignore_errors=True)
        with self.lock, self.dial() as connection:
            for name in self._list(connection, CHECKPOINTS_FOLDER):
                self._get(connection, name, inside(folder.parent, name))

    def put(self, path: Path) -> None:
        """Send the files of an unfinished checkpoint to the launcher."""
        with self.lock, self.dial() as connection:
            for file in sorted(path.iterdir()):
                name = f"{CHECKPOINTS_FOLDER}/{path.name}/{file.name}"
                _send_file(connection, file, put=name)
                _answer(connection)

    def _list(self, connection: ssl.SSLSocket, kind: str) -> dict[str, int]:
        send_frame(connection, {"list": kind})
        return {str(name): int(n) for name, n in _answer(connection)["files"].items()}

    def _get(self, connection: ssl.SSLSocket, name: str, file: Path) -> None:
        send_frame(connection, {"get": name})
        _receive_file(connection, file, int(_answer(connection)["bytes"]))


def _answer(connection: ssl.SSLSocket) -> dict[str, Any]:
    """Return the launcher's answer; raise OSError if the launcher reports an error."""
    answer = receive_frame(connection, MAX_PLAN_BYTES)
    if "error" in answer:
        raise OSError(str(answer["error"]))
    return answer


def inside(folder: Path, name: str) -> Path:
    """A file in a folder; raise an error for a name that leads out of it."""
    if name.startswith("/") or ".." in name.split("/"):
        raise FileError(f"the launcher names a file {name!r} outside of its folder")
    return folder / name


def _bytes(file: Path) -> bytes:
    return file.read_bytes() if file.is_file() else b""


def _send_file(connection: ssl.SSLSocket, file: Path, **fields: str) -> None:
    """Send the size of a file in a message with these fields, and then exactly as many bytes of it."""
    with file.open("rb") as opened:
        left = os.fstat(opened.fileno()).st_size
        send_frame(connection, {**fields, "bytes": left})
        while left:
            piece = opened.read(min(left, MAX_SENT_BYTES))
            if not piece:
                raise PeerLostError("a file has become shorter while it was sent")
            connection.sendall(piece)
            left -= len(piece)


def _receive_file(connection: ssl.SSLSocket, file: Path, size: int) -> None:
    """Receive a file under another name, and rename it when it is complete."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.part")
    with part.open("wb") as opened:
        left = size
        while left:
            piece = receive_bytes(connection, min(left, MAX_SENT_BYTES))
            opened.write(piece)
            left -= len(piece)
    part.replace(file)


@dataclass(frozen=True, slots=True)
class Input:
    """A file that every machine needs, as rank 0 has it."""

    name: str  # in the folder of another machine
    path: str  # on rank 0's machine
    size: int
    time: int  # of its last change, in nanoseconds

    def is_at(self, file: Path) -> bool:
        """Whether a file of this machine is the same, by its size and time."""
        try:
            status = file.stat()
        except OSError:
            return False
        return (status.st_size, status.st_mtime_ns) == (self.size, self.time)


def bring_inputs(comm: Comm, folders: RunFolders, folder: Path) -> None:
    """Copy what the run reads from rank 0's folder into all others; all ranks must call it."""
    inputs = _list_inputs(comm, folder)
    keeps = folders.keeps(comm.rank) and comm.rank != 0
    wanted: list[str] = []
    with failing_together(comm):
        if keeps:
            wanted = [one.name for one in inputs if not _find_here(one, folder)]
    told = exchange(comm, wanted)
    with failing_together(
        comm, "make room on this machine, or name another run.folder"
    ):
        relays = []
        for one in inputs:
            lacking = [rank for rank in folders.keepers if one.name in told[rank]]
            if lacking:
                file = Path(one.path) if comm.rank == 0 else folder / one.name
                relays.append(FileRelay(file, one.size, [0, *lacking]))
        relay_files(comm, relays)
    with failing_together(comm):
        if keeps:
            for one in inputs:
                if one.name in wanted:
                    os.utime(folder / one.name, ns=(one.time, one.time))
            settle_config(folder)


def _list_inputs(comm: Comm, folder: Path) -> list[Input]:
    """The files that rank 0 has, on all ranks."""
    rows: list[tuple[str, str, int, int]] = []
    with failing_together(comm):
        if comm.rank == 0:
            config = settle_model(read_config(folder / CONFIG_FILE))
            for name, path in RunFiles(folder, config).inputs.items():
                status = path.stat()
                resolved = str(path.resolve())
                rows.append((name, resolved, status.st_size, status.st_mtime_ns))
    return [Input(*row) for row in exchange(comm, rows)[0]]


def _find_here(one: Input, folder: Path) -> bool:
    """Whether this machine has an input already; if rank 0's file is visible here, a link is made to it."""
    file = inside(folder, one.name)
    if one.name == CONFIG_FILE:
        return False  # Here it gets other paths, so it differs.
    if one.is_at(file):
        return True
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)  # It may be a link, which must not be written through.
    if not one.is_at(Path(one.path)):
        return False
    file.symlink_to(one.path)
    return True


def settle_config(folder: Path) -> None:
    """Let the config of a folder name the copies on this machine."""
    config = with_kept_files(read_config(folder / CONFIG_FILE), folder)
    schedule, model = config.schedule, config.model
    if is_plan_file(schedule.name):
        schedule = schedule.at(str((folder / PLAN_FILE).absolute()))
    copied = str((folder / MODEL_FOLDER).absolute())
    if model.path:
        own = f"/{CONFIG_JSON}" if not model.weights else ""
        model = replace(model, path=f"{copied}{own}")
    config = replace(
        config,
        model=model,
        data=copied_text(config.data, folder),
        schedule=schedule,
        run=replace(config.run, folder=str(folder)),
    )
    check_code(config)
    text = dump_config(config, f"penstock train {folder} --resume")
    put_in_place(folder / CONFIG_FILE, text)


def copied_text(data: DataConfig, folder: Path) -> DataConfig:
    """Return the text of a run as the tokens that were copied into a folder."""
    copies: dict[str, tuple[str, ...]] = {}
    for name in texts_of(data):
        copies[name] = (str((folder / f"{name}{ENCODED}").absolute()),)
    validation = copies.pop(VALIDATION, None) or data.validation
    files = list(copies.values())
    if not data.mixture:
        return replace(data, sources=files[0], validation=validation)
    mixture = [
        replace(source, files=file)
        for source, file in zip(data.mixture, files, strict=True)
    ]
    return replace(data, sources=tuple(mixture), validation=validation)


def check_code(config: Config) -> None:
    """Refuse a file with the user's own code that this machine does not have: code does not travel."""
    named = {
        "run.loss": config.run.loss,
        "optimizer.lr_schedule": config.optimizer.lr_schedule,
    }
    for key, name in named.items():
        file = own_code_file(name)
        if file and not Path(file).expanduser().is_file():
            raise ConfigError(
                f"{key} = {name}, but this machine has no such file, and code is not copied\n"
                "  put the file at the same path on every machine, or install it as a module and write module:name"
            )


# ---------------------------------------------------------------- ranks that a launcher has started
# How processes of torchrun, SLURM, Ray or another launcher agree on a run.
#
# hear_run         rank 0 reads the config; all others take it from there, and need no file of their own
# settle_folders   the ranks find out whether they see one folder, and copy what the others lack

FOLDER_KEY = "run.folder"


def hear_run(
    meeting: Meeting,
    found: tuple[Config, Path] | None,
    source: Path | None,
    changes: Sequence[str],
) -> tuple[Config, Path]:
    """Return the config that rank 0 has `found`, and the folder of the run on this machine.

    `source` and `changes` are those of this machine's command line.
    """

    def tell() -> str:
        assert found is not None
        config, folder = found
        return json.dumps([dump_config(config), str(folder), folder == source])

    told = hear_first(meeting, "config", tell)
    if found is not None:
        return found
    text, first, is_source = json.loads(told)
    # The same command may mean another place on this machine.
    own = source if is_source else folder_here(source, changes)
    folder = own or Path(first)
    config = load_config(text, "the config of rank 0")
    return replace(config, run=replace(config.run, folder=str(folder))), folder


def can_resume(
    comm: Comm, config: Config, folder: Path, storages: Sequence[Storage] = ()
) -> bool:
    """Whether any rank or storage has a checkpoint of the run; all ranks get the same answer."""
    found = False
    with failing_together(comm):
        if comm.rank == 0:
            found = has_checkpoint(config, folder) or any(
                storage.steps() for storage in storages
            )
        else:
            found = bool(newest(folder / CHECKPOINTS_FOLDER))
    return any(exchange(comm, found))


def agree_on_restarts(
    comm: Comm, environment: MutableMapping[str, str] = os.environ
) -> None:
    """Let all ranks know that they replace others, if one of them does.

    Where torchrun itself sees a worker die, it counts a restart. On the other machines it starts the workers anew, but
    does not count.
    """
    count = environment.get(RESTART_COUNT, "0")
    environment[RESTART_COUNT] = max(exchange(comm, count), key=int)


def folder_here(source: Path | None, changes: Sequence[str]) -> Path | None:
    """The folder that the command line or the config of this machine names; None if neither does."""
    own = [change for change in changes if change.strip().startswith(FOLDER_KEY)]
    name = apply_changes(Config(), own).run.folder
    if not name and source is not None and source.is_file():
        name = read_source(source, None, own).run.folder
    return Path(name) if name else None


def settle_folders(
    comm: Comm,
    config: Config,
    folder: Path,
    resume: bool,
    say: SayLine = lambda line: None,
    storages: Sequence[Storage] = (),
) -> SeparateFolders | None:
    """Find out whether all ranks see one folder, after rank 0 has prepared its own; None if they do.

    If not, copy what the run reads to the other machines. All ranks must call it. Rank 0 calls `say` with a line about
    the folders. `storages` are places besides run.checkpoint_url that the run can resume from.
    """
    folders = compare_folders(comm, folder)
    if comm.rank == 0:
        say(str(folders))
    if folders.shared:

        def check_and_fetch() -> None:
            if comm.rank != 0:
                return
            check_storage(config)
            if resume:
                fetch_checkpoint(config, folder)
                for storage in storages:
                    fetch_newest(storage, folder / CHECKPOINTS_FOLDER)

        work_together(comm, check_and_fetch)
        return None
    if restarted():
        share_earlier_end(comm, folder)
    keeps = folders.keeps(comm.rank)
    with failing_together(comm):
        if keeps and comm.rank != 0 and not restarted():
            if not resume:
                check_unused(folder)
            forget_previous_end(folder)
    bring_inputs(comm, folders, folder)
    remote = None
    with failing_together(comm):
        remote = remote_checkpoints(config.run)
        if remote is not None and keeps:
            remote.check_writing()
    return SeparateFolders(folders, remote, tuple(storages))


def share_earlier_end(comm: Comm, folder: Path) -> None:
    """After a restart, let all ranks end if one of them was asked to stop, or has failed in a way that would repeat.

    That is written down in its own folder, which the others do not see.
    """
    with failing_together(comm):
        failure = read_failure(folder)
        if failure is not None:
            raise RunError(failure.text)
    stop_file = folder / STOP_FILE
    stopped = exchange(comm, stop_file.exists())
    with failing_together(comm):
        if any(stopped):
            stop_file.touch()
