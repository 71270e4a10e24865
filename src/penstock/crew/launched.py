"""How processes that a launcher has started agree on a run: torchrun, SLURM, Ray or another one.

hear_run         rank 0 reads the config; all others take it from there, and need no file of their own
settle_folders   the ranks find out whether they see one folder, and copy what the others lack
job_here         the run, as a rank finds it in its folder
"""

from __future__ import annotations

import json
import os
from collections.abc import MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path

from penstock.config import Config
from penstock.crew.files import bring_inputs
from penstock.crew.folders import compare_folders, failing_together, work_together
from penstock.crew.separate import SeparateFolders
from penstock.errors import RunError
from penstock.formats.config_toml import apply_changes, dump_config, load_config
from penstock.runtime import Comm
from penstock.runtime.comm.comm import exchange
from penstock.runtime.process.launch import Meeting, hear_first
from penstock.train.checkpoint import CHECKPOINTS_FOLDER, newest
from penstock.train.launch import (
    RESTART_COUNT,
    STOP_FILE,
    forget_previous_end,
    read_failure,
    restarted,
)
from penstock.train.place import RemoteCheckpoints, Storage, fetch_newest
from penstock.train.run_source import read_source
from penstock.train.screen import SayLine
from penstock.train.start import (
    check_storage,
    check_unused,
    fetch_checkpoint,
    has_checkpoint,
)

FOLDER_KEY = "run.folder"


# ---------------------------------------------------------------- the config
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


# ---------------------------------------------------------------- the folders
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
    the folders. `storages` are places besides run.checkpoints that the run can resume from.
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
        if config.run.checkpoints:
            remote = RemoteCheckpoints(config.run.checkpoints, config.run.keep)
            if keeps:
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
