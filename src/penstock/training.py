"""Training from Python: `fit` does what `penstock train` does, with a config and, if you like, a dataset of your own.

    from penstock import fit

    run = fit("config.toml", dataset)      # texts, tokens or conversations: datasets.Dataset, a list, a generator
    run.folder, run.step                   # penstock eval, generate and export take the folder

The dataset is encoded once, before the first step, into a file that the workers map into their memory. A run that is
resumed, here or by `penstock train RUN --resume`, finds its tokens there and needs no dataset.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.config import Config
from penstock.crew.coordinator import launch_crew
from penstock.crew.member import run_member
from penstock.errors import ConfigError
from penstock.formats.config_toml import written_keys
from penstock.ir import Plan
from penstock.runtime.process.launch import under_launcher
from penstock.train.before.start import (
    check_sources,
    check_start,
    find_run,
    kept_plan,
    locking,
    plan_and_prepare,
)
from penstock.train.data.cache import encode_dataset
from penstock.train.elastic import is_elastic
from penstock.train.history import SayLine, StepRow, read_rows
from penstock.train.job import Verdict, cache_of, model_sizes
from penstock.train.launch import launch, run_worker
from penstock.train.placement import (
    Placement,
    prepare_cpu,
)
from penstock.version import read_version


@dataclass(frozen=True, slots=True)
class TrainedRun:
    """A run that has ended: its folder, its last step, and whether it was asked to stop before its end."""

    folder: Path
    step: int
    stopped: bool

    @property
    def rows(self) -> list[StepRow]:
        """What was written down about each step, such as its loss."""
        return read_rows(self.folder)


def fit(
    config: str | Path | None = None,
    dataset: Iterable[Any] | None = None,
    validation: Iterable[Any] | None = None,
    *,
    changes: Sequence[str] = (),
    preset: str | None = None,
    resume: bool = False,
) -> TrainedRun:
    """Train a model in workers on this machine, and return when it is trained.

    config: a config.toml or the folder of a run; without one, a preset.
    dataset: texts, tokens or conversations that take the place of data.sources; anything to iterate over.
    validation: the same for evaluations, in place of data.validation.
    changes: values that differ from the config, such as "run.steps=100".
    """
    if under_launcher():
        raise ConfigError(
            "fit starts its own workers, so it does not run under torchrun\n"
            "  start this script with python, or write the dataset with encode_dataset, name its file in "
            "data.sources, and use torchrun -m penstock train"
        )
    source = None if config is None else Path(config)
    settings, folder = find_run(source, preset, changes, resume)
    given = written_keys(source, changes)
    prepare_cpu(settings)
    check_start(settings, folder, resume)  # Encoding a dataset may take long.
    settings = with_datasets(settings, folder, dataset, validation)
    check_sources(settings)
    kept = kept_plan(settings, folder, changes) if resume else None
    with locking() as lock:
        run = plan_and_prepare(settings, folder, resume, lock, given, kept)
        with _main_hidden():
            verdict = start_workers(run.config, run.plan, run.placement, folder, resume)
    return TrainedRun(folder, verdict.step, verdict.stopped)


@contextmanager
def _main_hidden() -> Iterator[None]:
    """Keep new processes from importing the user's script, which would start the run again.

    Multiprocessing does so for functions that a script defines, and workers run none of them. So the script needs no
    `if __name__ == "__main__"`.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def with_datasets(
    config: Config,
    folder: Path,
    dataset: Iterable[Any] | None,
    validation: Iterable[Any] | None,
) -> Config:
    """Encode the user's datasets beside a run, and return a config that names their files."""
    vocab = model_sizes(config).vocab
    data = config.data
    cache = cache_of(folder)
    if dataset is not None:
        if data.sources:
            raise ConfigError(
                "a dataset was handed over, but data.sources names text too\n"
                "  leave one of them out; for a mixture with a dataset, write it with encode_dataset and name its file"
            )
        file = encode_dataset(dataset, data, cache, vocab)
        data = replace(data, sources=(str(file),))
    if validation is not None:
        if data.validation_files:
            raise ConfigError(
                "a validation set was handed over, but data.validation names files too\n  leave one of them out"
            )
        file = encode_dataset(validation, data, cache, vocab)
        data = replace(data, validation=(str(file),))
    return replace(config, data=data)


def start_workers(
    config: Config,
    plan: Plan,
    placement: Placement,
    folder: Path,
    resume: bool,
    say_stopping: SayLine = lambda line: None,
    say_event: SayLine = lambda line: None,
) -> Verdict:
    """Train with a crew that survives losses, or with workers that restart together; return how it ended."""
    if is_elastic(config, plan, placement):
        return launch_crew(
            run_member,
            folder,
            plan,
            config,
            resume,
            read_version(),
            say_stopping,
            say_event,
        )
    return launch(
        run_worker,
        folder,
        placement.processes,
        config.elastic.restarts,
        resume,
        say_stopping,
    )
