"""How a run resumes: what its checkpoints say about it, which one it takes, and whether that one fits."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from penstock.errors import FileError, RunError
from penstock.models.decoder import DecoderConfig, config_differences
from penstock.runtime import Comm
from penstock.train.checkpoint import (
    CheckpointFacts,
    lost_files,
    newest,
    newest_good,
    read_facts,
)
from penstock.train.data.corpus import Corpus
from penstock.train.data.loader import Loader, check_same_data
from penstock.train.hooks import Progress
from penstock.train.job import Job
from penstock.train.lora import describe_adapters
from penstock.train.optimizer import describe_optimizer
from penstock.train.weights import Sizes


def checkpoint_facts(job: Job, loader: Loader, progress: Progress) -> CheckpointFacts:
    """Return the description of a run that goes into its checkpoints."""
    config = job.config
    return {
        "model": describe_model(job.sizes),
        "data": loader.state(),
        "tokenizer": config.data.tokenizer,
        "optimizer": describe_optimizer(config.optimizer),
        "progress": progress.describe(),
        **describe_adapters(config),
        "schedule": job.plan.name,
        "ranks": job.plan.schedule.ranks,
        "partition": list(job.partition),
        "mesh": asdict(config.mesh),
    }


def describe_model(sizes: Sizes) -> dict[str, object]:
    """Describe a model in plain values."""
    family = type(sizes).__name__.removesuffix("Config").lower()
    return {"family": family, **asdict(sizes)}


def checkpoint_to_resume(job: Job, comm: Comm, names: tuple[str, ...]) -> Path | None:
    """Return the checkpoint that a run goes on from; None if it starts at the beginning.

    All ranks must call it. `names` are the parameters that a checkpoint must hold.
    """
    if not job.resume:
        return None
    if job.remote_files is not None:
        job.remote_files.fetch(job.checkpoints)
    if job.separate is not None:
        search = job.separate.checkpoints(job.checkpoints, comm)
        checkpoint = search.newest_good(names)
        if checkpoint is None and not job.fresh:
            raise search.nothing_found()
        return checkpoint
    checkpoint = newest_good(job.checkpoints, comm, names)
    if checkpoint is None and not job.fresh:
        raise nothing_to_resume(job.checkpoints)
    return checkpoint


def nothing_to_resume(checkpoints: Path) -> RunError:
    """Return the error for a run that cannot resume."""
    lost = lost_files(checkpoints)
    if lost:
        return RunError(lost)
    if newest(checkpoints):
        return RunError(
            f"no checkpoint in {checkpoints} is good: "
            "all are damaged or lack weights of this model\n"
            "  start a new run in another run.folder, "
            "or delete that folder and start without --resume"
        )
    return RunError(
        f"there is no good checkpoint in {checkpoints}\n  start without --resume"
    )


def check_same_model(path: Path, facts: CheckpointFacts, sizes: Sizes) -> None:
    """Raise RunError if a checkpoint belongs to a model with other sizes."""
    theirs = facts.get("model", {})
    mine = describe_model(sizes)
    differences = []
    if isinstance(sizes, DecoderConfig):
        differences = config_differences(str(theirs.get("config")), sizes)
        del mine["config"]
    for key, value in mine.items():
        if theirs.get(key) != value:
            differences.append(f"its {key} is {theirs.get(key)}, here it is {value}")
    if differences:
        raise RunError(
            f"{path} is of another model: {'; '.join(differences)}\n"
            "  go on with its own sizes, or start a new run in another run.folder"
        )


def check_resumable(checkpoints: Path, sizes: Sizes, corpus: Corpus, seed: int) -> None:
    """Raise RunError if a run cannot resume from its newest checkpoint.

    This happens before the run overwrites any file.
    """
    for path in newest(checkpoints):
        try:
            facts = read_facts(path)
        except FileError:
            # It is damaged. The ranks will report that and look for an earlier one.
            continue
        check_same_model(path, facts, sizes)
        check_same_data(facts.get("data", {}), corpus, seed)
        return
