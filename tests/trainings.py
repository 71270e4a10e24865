"""Small training runs for the tests of the trainer. Every rank is a thread with its own parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock import Plan, make
from penstock.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    ScheduleConfig,
)
from penstock.formats.config_toml import apply_changes
from penstock.runtime import Batch, Executor, Result, run_threads
from penstock.train.data.corpus import Corpus, cut_corpus
from penstock.train.history import StepRow, read_rows
from penstock.train.job import Job, Verdict
from penstock.train.loop import Trainer
from penstock.train.weights import sizes_of

VOCAB = 31
LENGTH = 8
END = 7  # the last word of a document, where documents are kept apart
SMALL = Config(
    ModelConfig(
        layers=4,
        hidden_size=16,
        heads=4,
        kv_heads=2,
        intermediate_size=24,
        vocab_size=VOCAB,
    ),
    DataConfig(seq_len=LENGTH, global_batch=8, validation=0.1),
    ScheduleConfig(name="1f1b", microbatches=4),
    OptimizerConfig(lr=1e-2, warmup_steps=5, clip_norm=0.5),
    RunConfig(steps=12, eval_every=0, save_every=0, checks="forecast,memory"),
    parallel=ParallelConfig(pp=2),
)


def corpus(config: Config = SMALL) -> Corpus:
    """Return words that can be learned, because each depends on the one before."""
    draw = np.random.default_rng(0)
    noise, words = draw.integers(0, 3, 4000), [1]
    for step in noise:
        words.append((words[-1] * 3 + int(step)) % VOCAB)
    return cut_corpus(
        np.array(words, dtype=np.uint16),
        config.data,
        "made up",
        END if config.data.document_mask else None,
    )


def job_of(
    folder: Path,
    name: str = "1f1b",
    *changes: str,
    config: Config = SMALL,
    resume: bool = False,
    **shape: int,
) -> Job:
    """Return a run with the schedule of this name and shape."""
    given = {"ranks": 2, "microbatches": 4, **shape}
    total = len(make(name, **given).microbatches)
    config = replace(
        config,
        schedule=ScheduleConfig(name=name, microbatches=total),
        parallel=replace(config.parallel, pp=given["ranks"], dp_replicate=1),
    )
    config = apply_changes(config, changes)
    sizes = sizes_of(config.model, VOCAB, config.data.seq_len)
    return Job(
        config, Plan(make(name, **given), name), sizes, corpus(config), folder, resume
    )


def train(
    job: Job, stop: Callable[[int], Callable[[], bool]] = lambda rank: lambda: False
) -> list[StepRow]:
    """Run a job with one thread per rank, and return its history."""
    outcomes(job, stop)
    return read_rows(job.folder)


def outcomes(
    job: Job, stop: Callable[[int], Callable[[], bool]] = lambda rank: lambda: False
) -> list[Verdict]:
    return run_threads(
        job.plan.schedule.ranks,
        lambda comm: Trainer(job, comm).run(stop(comm.rank)),
        patience=300,
    )


def watch_batches(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """Return a list to which every step and evaluation adds the batch that rank 0 gets."""
    seen: list[Batch] = []
    step = Executor.step

    def spy(executor: Executor, batch: Batch, *given: bool, **options: bool) -> Result:
        if executor.comm.rank == 0:
            seen.append(batch)
        return step(executor, batch, *given, **options)

    monkeypatch.setattr(Executor, "step", spy)
    return seen


def losses(rows: list[StepRow]) -> list[float]:
    return [row.loss for row in rows]


def apart(ours: list[StepRow], theirs: list[float]) -> float:
    """Return the largest difference between two loss curves."""
    assert len(ours) == len(theirs)
    return max(abs(a - b) for a, b in zip(losses(ours), theirs, strict=True))


def weights_of(trainer: Trainer) -> dict[str, Tensor]:
    return {
        name: parameter.detach().clone()
        for name, parameter in trainer.holding.parameters.items()
    }


torch.set_num_threads(1)
