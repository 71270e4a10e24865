"""Penstock in Ray Train: `train_loop` is the function that Ray's `TorchTrainer` runs on every worker.

    TorchTrainer(train_loop, train_loop_config={"config": "config.toml", "set": ["run.folder=/shared/run"]},
                 scaling_config=ScalingConfig(num_workers=(2, 4)), run_config=RunConfig(failure_config=...)).fit()

    Ray      starts the workers, calls init_process_group, starts them again after a loss, perhaps another number
    here     plans for the number of workers, resumes the newest checkpoint, trains, reports loss and checkpoints

The ranks of the schedule follow the number of workers: a checkpoint of any number of ranks resumes on any other. All
workers may see one folder of the run, or every machine has its own (`penstock.train.checkpoints.folders`).
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

try:
    from ray.train import Checkpoint, get_checkpoint, report
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"penstock.integrations.ray needs Ray Train: {error}\n  pip install 'penstock[ray]'",
        name=error.name,
    ) from None

from penstock.config import Config, check_config, is_plan_file
from penstock.crew.files import can_resume, hear_run, settle_folders
from penstock.errors import ConfigError, FileError
from penstock.formats.config_toml import CONFIG_FILE, read_config, written_keys
from penstock.ir import Plan
from penstock.runtime import ProcessComm
from penstock.runtime.process.launch import after_first, meet
from penstock.train.before.start import (
    check_sources,
    find_run,
    kept_plan,
    locking,
    plan_and_prepare,
)
from penstock.train.checkpoints.checkpoint import (
    NOTE,
    step_name,
)
from penstock.train.checkpoints.separate import SeparateFolders
from penstock.train.job import job_of
from penstock.train.launch import STOP_FILE, forget_previous_end, join
from penstock.train.loop import Trainer
from penstock.train.placement import launched_placement

_log = logging.getLogger(__name__)
KEYS = ("config", "set")  # of the dictionary that Ray hands to the loop


def train_loop(settings: Mapping[str, Any]) -> None:
    """Train as one worker of Ray Train.

    `settings["config"]` is a config.toml or the folder of a run, and `settings["set"]` a list of changes such as
    "run.steps=100". One of them must name `run.folder`.
    """
    source, changes = read_settings(settings)
    meeting = meet()
    found = find_run(source, None, changes, exists=True) if meeting.rank == 0 else None
    config, folder = hear_run(meeting, found, source, changes)
    comm = join(config, launched_placement(config), meeting)
    config = fit_ranks(config, comm.ranks)
    storage = RayStorage()
    resume = can_resume(comm, config, folder, [storage])
    with locking() as lock:

        def prepare() -> None:
            check_sources(config)
            given = written_keys(source, changes)
            kept = fitting_plan(config, folder, comm.ranks) if resume else None
            plan_and_prepare(
                config, folder, resume, lock, given, kept, launched=comm.ranks
            )
            forget_previous_end(folder)

        after_first(comm, prepare)
        separate = settle_folders(comm, config, folder, resume, _log.info, [storage])
        train(folder, resume, comm, separate)


def read_settings(settings: Mapping[str, Any]) -> tuple[Path, list[str]]:
    """The config and the changes to it, from the dictionary that Ray hands to the loop."""
    unknown = sorted(settings.keys() - set(KEYS))
    if unknown or "config" not in settings:
        wrong = f"has no use for {', '.join(unknown)}" if unknown else "lacks 'config'"
        raise ConfigError(
            f"train_loop_config {wrong}\n"
            "  give it 'config', the path of a config.toml, and perhaps 'set', a list such as ['run.steps=100']"
        )
    return Path(settings["config"]), list(settings.get("set", ()))


def fit_ranks(config: Config, workers: int) -> Config:
    """Return the config with a rank for each worker, or for each mesh of workers."""
    if is_plan_file(config.schedule.name):
        return config  # It has its own ranks, which are compared later.
    parallel = config.parallel
    each = max(1, parallel.dp_replicate) * parallel.size
    if workers % each:
        raise ConfigError(
            f"Ray has started {workers} workers, but parallel.dp_replicate x parallel.dp_shard x parallel.tp = "
            f"{each} of them make one rank of all copies\n  set num_workers of the "
            f"ScalingConfig to a multiple of {each}"
        )
    parallel = replace(parallel, pp=workers // each, devices=0)
    return check_config(replace(config, parallel=parallel))


def fitting_plan(config: Config, folder: Path, workers: int) -> Plan | None:
    """The plan that auto has made for a run before, if it is for as many workers as there are now."""
    kept = kept_plan(config, folder, ())
    if kept is None or kept.schedule.ranks * config.parallel.size != workers:
        return None
    return kept


def train(
    folder: Path, resume: bool, comm: ProcessComm, separate: SeparateFolders | None
) -> None:
    """Train what a folder describes, until its last step."""
    config = read_config(folder / CONFIG_FILE)
    job = replace(job_of(folder, config, resume, fresh=True), separate=separate)
    stop_file = folder / STOP_FILE
    trainer = ReportingTrainer(job, comm, comm.device)
    trainer.run(lambda: job.keeps_folder(comm.rank) and stop_file.exists())


class RayStorage:
    """The newest checkpoint that was reported to Ray, in Ray's storage."""

    def __init__(self) -> None:
        self.checkpoint = get_checkpoint()

    def steps(self) -> list[int]:
        """The step of this checkpoint; nothing if there is none."""
        if self.checkpoint is None:
            return []
        try:
            return [int(json.loads(self.read_note(0))["step"])]
        except FileNotFoundError:
            return []

    @property
    def place(self) -> str:
        """What messages call it."""
        return "the storage of Ray"

    def read_note(self, step: int) -> bytes:
        """Return the description of the checkpoint."""
        with self.open(NOTE) as stream:
            return bytes(stream.read())

    def fetch_file(self, step: int, name: str, target: Path) -> None:
        """Copy a file of the checkpoint; raise FileNotFoundError if it is not there."""
        with self.open(name) as stream, target.open("wb") as opened:
            shutil.copyfileobj(stream, opened)

    def open(self, name: str) -> Any:
        """Open a file of the checkpoint."""
        assert self.checkpoint is not None
        path = f"{self.checkpoint.path}/{name}"
        try:
            return self.checkpoint.filesystem.open_input_stream(path)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise FileError(
                f"cannot read {path} in the storage of Ray: {error}"
            ) from None


class ReportingTrainer(Trainer):
    """A trainer that reports losses and checkpoints to Ray.

    Ray asks all workers to report, and takes the figures of the first. It copies the checkpoint to its own storage.
    """

    def commit(self, *args: Any, **options: Any) -> None:
        """Count the step, and report it if its figures are to be logged."""
        super().commit(*args, **options)
        settings = self.job.config.run
        if self.step % settings.log_every == 0 and self.step < settings.steps:
            report(self.report_figures())

    def save(self) -> None:
        """Save a checkpoint, wait until all workers have, and report it."""
        super().save()
        saved = self.step
        self.saver.finish()
        checkpoint = None
        # Ray joins the files of all workers that report some.
        if self.job.keeps_folder(self.comm.rank):
            folder = self.job.checkpoints / step_name(saved)
            checkpoint = Checkpoint.from_directory(str(folder))
        report(self.report_figures(), checkpoint=checkpoint)

    def report_figures(self) -> dict[str, float]:
        """The figures of the last step, which are the same on all workers."""
        figures = self.figures
        assert figures is not None
        return {
            "step": self.step,
            "loss": figures.loss,
            "norm": figures.norm,
            "seconds": figures.seconds,
            "workers": self.comm.ranks,
        }
