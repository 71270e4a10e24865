"""Training from Python: `fit` does what `penstock train` does, with a config and, if you like, a dataset of your own.

    from penstock import fit

    run = fit("config.toml", dataset)      # texts, tokens or conversations: datasets.Dataset, a list, a generator
    run.folder, run.step                   # penstock eval, generate and export take the folder

The dataset is encoded once, before the first step, into a file that the workers map into their memory. A run that is
resumed, here or by `penstock train RUN --resume`, finds its tokens there and needs no dataset.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.config import AUTO, Config
from penstock.cost import RowProfiles
from penstock.crew.coordinator import launch_crew
from penstock.crew.decision import is_elastic
from penstock.crew.member import run_member
from penstock.errors import ConfigError
from penstock.formats import read_plan
from penstock.formats.config_toml import written_keys
from penstock.ir import Plan
from penstock.plan.planner import plan_run
from penstock.plan.search import SearchProgress
from penstock.runtime.process.launch import under_launcher
from penstock.train.auto import (
    AutoPlan,
    machine_workload,
    measure_workload,
    plan_workload,
)
from penstock.train.capacity import check_memory, check_timing
from penstock.train.data.cache import encode_dataset
from penstock.train.data.corpus import Corpus
from penstock.train.data.files import ProgressBytes
from penstock.train.forecast import keep_profiles
from penstock.train.history import PLAN_FILE, StepRow, read_rows
from penstock.train.launch import (
    Verdict,
    cache_of,
    launch,
    load_ahead,
    model_sizes,
    run_worker,
)
from penstock.train.lock import Lock, locking
from penstock.train.mesh import check_launched
from penstock.train.placement import (
    Placement,
    check_gpus_suffice,
    decide_placement,
    prepare_cpu,
)
from penstock.train.screen import SayLine
from penstock.train.start import (
    check_sources,
    check_start,
    check_training,
    find_run,
    prepare_run,
    read_run,
)
from penstock.version import read_version

# Values of a config that a plan depends on; a change of any of them needs a new plan.
PLANNED_WITH = (
    "schedule.",
    "mesh.",
    "model.",
    "data.batch",
    "data.tokens",
    "data.segments",
    "data.separate",
    "run.accumulate",
    "run.compile",
    "run.device",
    "run.graphs",
    "run.messages",
    "run.precision",
    "run.recompute",
    "run.threads",
)
WatchSearch = Callable[[SearchProgress], None]


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
    cache = cache_of(config, folder)
    if dataset is not None:
        if data.sources or data.mixture:
            raise ConfigError(
                "a dataset was handed over, but data.sources or data.mixture names text too\n"
                "  leave one of them out; for a mixture with a dataset, write it with encode_dataset and name its file"
            )
        file = encode_dataset(dataset, data, cache, vocab)
        data = replace(data, sources=(str(file),))
    if validation is not None:
        if data.validation:
            raise ConfigError(
                "a validation set was handed over, but data.validation names files too\n  leave one of them out"
            )
        file = encode_dataset(validation, data, cache, vocab)
        data = replace(data, validation=(str(file),))
    return replace(config, data=data)


# ---------------------------------------------------------------- before the workers start
@dataclass(frozen=True, slots=True)
class Display:
    """Shows what happens before the workers start, as long as each of its contexts lasts; by default nothing."""

    timing: Callable[[], AbstractContextManager[object]] = nullcontext
    planning: Callable[[], AbstractContextManager[WatchSearch]] = lambda: nullcontext(
        lambda progress: None
    )
    reading: Callable[[], AbstractContextManager[ProgressBytes]] = lambda: nullcontext(
        lambda done, total: None
    )


NO_DISPLAY = Display()


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """Everything that is known before the workers start."""

    config: Config
    plan: Plan
    placement: Placement
    corpus: Corpus
    profiles: RowProfiles | None  # that auto planned with; None if the plan was given


def plan_and_prepare(
    config: Config,
    folder: Path,
    resume: bool,
    lock: Lock | None,
    given: Collection[str],
    kept: Plan | None = None,
    display: Display = NO_DISPLAY,
    launched: int = 0,
) -> PreparedRun:
    """Plan, read the text and write the files of the run. A dry run has no lock, and writes nothing but the tokens.

    A plan that was `kept` from before is used instead of a new one. If a launcher has started the processes already,
    `launched` is their number.
    """
    sizes = model_sizes(config)
    check_training(config, sizes)  # Under a launcher nobody has done it before.
    config, plan, profiles = plan_config(config, given, kept, display)
    placement = decide_placement(config, plan.schedule.ranks * config.mesh.size)
    if launched:
        check_launched(config.mesh, plan.schedule.ranks, launched)
    else:
        check_gpus_suffice(config, placement)
        is_elastic(config, plan, placement)  # Raises if the config asks for too much.
    if lock is None:
        check_timing(config, sizes, placement)
    else:  # A dry run shows how much memory it would need before it refuses.
        check_memory(config, plan, sizes, placement)
    with display.reading() as watch:
        corpus = read_run(config, folder, resume, watch)
    if lock is None:
        return PreparedRun(config, plan, placement, corpus, profiles)
    config = prepare_run(config, plan, corpus, folder, resume, lock)
    if profiles is not None:
        keep_profiles(profiles, folder, config, plan, searched=True)
    return PreparedRun(config, plan, placement, corpus, profiles)


def plan_config(
    config: Config,
    given: Collection[str],
    kept: Plan | None = None,
    display: Display = NO_DISPLAY,
) -> tuple[Config, Plan, RowProfiles | None]:
    """Make the plan of a run. If auto measured the model for it, its profiles come too.

    A plan that was `kept` from before is used instead of a new one.
    """
    layers = model_sizes(config).layers
    measured: list[RowProfiles] = []

    def plan_auto(config: Config) -> Plan:
        if kept is not None:
            return kept
        auto = _measure_and_plan(config, layers, given, display)
        measured.append(auto.profiles)
        return auto.plan

    config, plan = plan_run(config, layers, given, plan_auto)
    return config, plan, measured[0] if measured else None


def _measure_and_plan(
    config: Config, layers: int, given: Collection[str], display: Display
) -> AutoPlan:
    """Measure the model on this machine and search for the fastest plan."""
    workload, placement = machine_workload(config, layers, given)
    check_timing(config, model_sizes(config), placement)
    load_ahead(run_worker)
    with display.timing():
        profiles = measure_workload(workload, placement)
    with display.planning() as watch:
        return plan_workload(workload, profiles, watch=watch)


def kept_plan(config: Config, folder: Path, changes: Sequence[str]) -> Plan | None:
    """Return the plan of the run in a folder, if auto made it and nothing that it depends on has changed."""
    file = folder / PLAN_FILE
    changed = any(change.strip().startswith(PLANNED_WITH) for change in changes)
    if config.schedule.name != AUTO or changed or not file.is_file():
        return None
    return read_plan(file)


# ---------------------------------------------------------------- the workers
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
        config.run.restarts,
        resume,
        say_stopping,
    )
