"""Brings what a run reads to the machines that do not see rank 0's folder.

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
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.config import Config, DataConfig, is_plan_file, own_code_file
from penstock.errors import ConfigError
from penstock.formats.config_toml import dump_config, read_config
from penstock.formats.text import put_in_place
from penstock.runtime import Comm
from penstock.runtime.comm.texts import gather_texts
from penstock.train.crew.depot import (
    MODEL_FOLDER,
    VALIDATION,
    RunFiles,
    inside,
    is_note,
    texts_of,
)
from penstock.train.data.text_files import ENCODED
from penstock.train.folders.group import RunFolders, failing_together
from penstock.train.folders.travel import Passage, pass_files
from penstock.train.history import PLAN_FILE
from penstock.train.hub import settle_model
from penstock.train.run_source import CONFIG_FILE
from penstock.train.worker import with_kept_files


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
    told = [set(json.loads(text)) for text in gather_texts(comm, json.dumps(wanted))]
    with failing_together(
        comm, "make room on this machine, or name another run.folder"
    ):
        passages = []
        for one in inputs:
            lacking = [rank for rank in folders.keepers if one.name in told[rank]]
            if lacking:
                file = Path(one.path) if comm.rank == 0 else folder / one.name
                passages.append(Passage(file, one.size, [0, *lacking]))
        pass_files(comm, passages)
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
            for known, path in RunFiles(folder, config).inputs.items():
                name = known
                if is_note(name):  # With this ending, a config can name the tokens.
                    name = name.removesuffix(".json") + ENCODED
                status = path.stat()
                resolved = str(path.resolve())
                rows.append((name, resolved, status.st_size, status.st_mtime_ns))
    told = gather_texts(comm, json.dumps(rows))[0]
    return [Input(*row) for row in json.loads(told)]


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
        schedule = replace(schedule, name=str((folder / PLAN_FILE).absolute()))
    copied = str((folder / MODEL_FOLDER).absolute())
    if model.weights:
        model = replace(model, weights=copied)
    if model.config:
        model = replace(model, config=copied)
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
    validation = copies.pop(VALIDATION, ())
    files = list(copies.values())
    if not data.mixture:
        return replace(data, sources=files[0], validation=validation)
    mixture = [
        replace(source, sources=file)
        for source, file in zip(data.mixture, files, strict=True)
    ]
    return replace(data, mixture=tuple(mixture), validation=validation)


def check_code(config: Config) -> None:
    """Refuse a file with the user's own code that this machine does not have: code does not travel."""
    named = {
        "run.loss": config.run.loss,
        "optimizer.schedule": config.optimizer.schedule,
    }
    for key, name in named.items():
        file = own_code_file(name)
        if file and not Path(file).expanduser().is_file():
            raise ConfigError(
                f"{key} = {name}, but this machine has no such file, and code is not copied\n"
                "  put the file at the same path on every machine, or install it as a module and write module:name"
            )
