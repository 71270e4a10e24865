"""The files of a run, for workers on machines that do not see its folder.

    joining    config.toml, plan.json, tokenizer, tokens, the model to start from  ──►  worker
    saving     worker  ──►  checkpoints/step-00000100.saving/
    resuming   checkpoints/step-00000100/  ──►  worker

The launcher gives out only what a worker needs, and accepts only files of unfinished checkpoints.
"""

from __future__ import annotations

import os
import re
import shutil
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from penstock.config import Config, DataConfig
from penstock.errors import FileError, PeerLostError
from penstock.runtime.wire.frames import (
    MAX_PLAN_BYTES,
    receive_bytes,
    receive_frame,
    send_frame,
)
from penstock.runtime.wire.store import Dial
from penstock.train.checkpoint import CHECKPOINTS_FOLDER, SAVING, STEP_PREFIX, newest
from penstock.train.data.corpus import validation_data
from penstock.train.data.document_end import side_files
from penstock.train.data.token_cache import cached_tokens, file_of_marks
from penstock.train.data.tokenizer import TOKENIZER
from penstock.train.history import PLAN_FILE
from penstock.train.run_source import CONFIG_FILE
from penstock.train.worker import cache_of

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


def files_of_tokens(folder: Path, name: str) -> tuple[Path, Path]:
    """The file with the tokens of a text in a worker's folder, and the note on them."""
    return folder / f"{name}{TOKENS_SUFFIX}", folder / f"{name}.json"


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
            row, note = cached_tokens(text, cache_of(config, folder))
            # A worker compares notes before it copies tokens. That of a dataset has another ending here.
            self.inputs[f"{name}.json"] = note
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
    with file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        send_frame(connection, {"bytes": size})
        _send_file(connection, opened, size)


def _take(connection: ssl.SSLSocket, files: RunFiles, name: str, size: int) -> None:
    if not UNFINISHED_FILE.fullmatch(name):
        raise PeerLostError(f"{name!r} is not a file of an unfinished checkpoint")
    file = files.folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    _receive_file(connection, file, size)
    send_frame(connection, {"put": name})


# ---------------------------------------------------------------- a worker's side
class RemoteDepot:
    """The launcher's files, used from another machine over connections of its own."""

    def __init__(self, dial: Dial) -> None:
        self.dial = dial
        self.lock = threading.Lock()

    def bring_inputs(self, folder: Path, watch: Watch) -> None:
        """Copy what a worker needs into its folder; tokens that it has already stay."""
        with self.lock, self.dial() as connection:
            sizes = self._list(connection, "inputs")
            before = {
                name: _bytes(inside(folder, name)) for name in sizes if is_note(name)
            }
            for name, size in sizes.items():
                file = inside(folder, name)
                note = file.with_suffix(".json")
                unchanged = before.get(note.name) and before[note.name] == _bytes(note)
                is_here = file.is_file() and file.stat().st_size == size
                if name != note.name and unchanged and is_here:
                    continue
                watch(name, size)
                self._get(connection, name, file)

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
                with file.open("rb") as opened:
                    size = os.fstat(opened.fileno()).st_size
                    send_frame(connection, {"put": name, "bytes": size})
                    _send_file(connection, opened, size)
                _answer(connection)

    def _list(self, connection: ssl.SSLSocket, kind: str) -> dict[str, int]:
        send_frame(connection, {"list": kind})
        return {str(name): int(n) for name, n in _answer(connection)["files"].items()}

    def _get(self, connection: ssl.SSLSocket, name: str, file: Path) -> None:
        send_frame(connection, {"get": name})
        size = int(_answer(connection)["bytes"])
        file.parent.mkdir(parents=True, exist_ok=True)
        _receive_file(connection, file, size)


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


def is_note(name: str) -> bool:
    """Whether a file is a note on tokens, which changes whenever they do."""
    return re.fullmatch(rf"(tokens(-\d+)?|{VALIDATION})\.json", name) is not None


def _bytes(file: Path) -> bytes:
    return file.read_bytes() if file.is_file() else b""


def _send_file(connection: ssl.SSLSocket, opened: BinaryIO, size: int) -> None:
    """Send exactly `size` bytes of an open file."""
    left = size
    while left:
        piece = opened.read(min(left, MAX_SENT_BYTES))
        if not piece:
            raise PeerLostError("a file has become shorter while it was sent")
        connection.sendall(piece)
        left -= len(piece)


def _receive_file(connection: ssl.SSLSocket, file: Path, size: int) -> None:
    """Receive a file under another name, and rename it when it is complete."""
    part = file.with_name(f"{file.name}.part")
    with part.open("wb") as opened:
        left = size
        while left:
            piece = receive_bytes(connection, min(left, MAX_SENT_BYTES))
            opened.write(piece)
            left -= len(piece)
    part.replace(file)
