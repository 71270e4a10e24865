"""What happens before any worker starts.

find_run       the config, and the folder of the run
check_sources  refuses text that is missing or empty
check_start    refuses what no worker could begin with
read_run       reads the text, and refuses it or a checkpoint that does not go with the run
prepare_run    writes the files that every rank will read

A dry run does all but the last.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from errno import EACCES, EEXIST, ENOSPC
from pathlib import Path

from penstock.config import (
    AUTO,
    DEFAULT_PRESET,
    Config,
    DataConfig,
    ModelConfig,
    is_plan_file,
)
from penstock.cost import RowProfiles
from penstock.cost.profile import enlarge, tile_of
from penstock.errors import ConfigError, FileError
from penstock.formats import dump_plan, read_plan, write_plan
from penstock.formats.config_toml import (
    CONFIG_FILE,
    dump_config,
    is_folder,
    read_source,
    with_absolute_paths,
)
from penstock.formats.text import put_in_place
from penstock.ir import Plan
from penstock.models import DecoderConfig, initial_constants
from penstock.models.layer import recompute_inside, set_dropout
from penstock.plan.planner import chosen_plan, plan_run
from penstock.plan.pricing import profile_question
from penstock.plan.search import Landscape, SearchProgress, search
from penstock.plan.space import Limits
from penstock.plan.workload import (
    MIN_GRANULARITY,
    USABLE_SHARE,
    Hardware,
    Workload,
    divisions_of,
    workload_of,
)
from penstock.runtime.process.launch import under_launcher
from penstock.train.before.capacity import check_memory, check_timing, memory_pools
from penstock.train.before.forecast import keep_profiles
from penstock.train.before.profile import (
    ProfileRequest,
    affordable,
    measure_rows_of,
    profile_rows,
    request_of,
)
from penstock.train.checkpoints.checkpoint import (
    CHECKPOINTS_FOLDER,
    STEP_PREFIX,
    newest,
)
from penstock.train.checkpoints.place import fetch_newest, remote_checkpoints
from penstock.train.data.chat import keep_template
from penstock.train.data.corpus import PROMPT, Corpus, find_prompt
from penstock.train.data.files import ProgressBytes, source_files
from penstock.train.data.tokenizer import (
    keep_tokenizer,
    tokenizer_of,
)
from penstock.train.elastic import is_elastic
from penstock.train.history import FULL_TIMELINE, METRICS, PLAN_FILE, TIMELINE
from penstock.train.hooks import checked_callback
from penstock.train.hub import keep_origin, weight_files
from penstock.train.job import (
    check_resumable,
    corpus_of,
    model_sizes,
    nothing_to_resume,
    settle_model,
    validation_of,
    with_kept_files,
)
from penstock.train.launch import load_ahead, run_worker
from penstock.train.lora import check_adapters, trained_names
from penstock.train.optimizer import check_groups, check_optimizer, own_factor
from penstock.train.own_models import limits_of
from penstock.train.placement import (
    Placement,
    check_gpu_exists,
    check_gpus_suffice,
    decide_placement,
)
from penstock.train.user_code import probe_loss
from penstock.train.weights import Sizes, blueprint, check_launched, model_name
from penstock.view.numbers import write_size

# Values of a config that a plan depends on; a change of any of them needs a new plan.
PLANNED_WITH = (
    "schedule.",
    "parallel.",
    "model.",
    "data.global_batch",
    "data.seq_len",
    "data.format",
    "data.document_mask",
    "run.accumulate",
    "run.compile",
    "run.device",
    "run.cuda_graphs",
    "run.comm_dtype",
    "run.precision",
    "run.recompute",
)
WatchSearch = Callable[[SearchProgress], None]
MAX_RUNS_OF_A_NAME = 1000
RUNS_FOLDER = Path("runs")


def find_run(
    source: Path | None, preset_name: str | None, changes: Sequence[str], exists: bool
) -> tuple[Config, Path]:
    """Return the config of a run and its folder.

    The source is a config, the folder of a run, or None for a preset. If `exists` is
    False, the folder must not contain a run yet.
    """
    config = read_source(source, preset_name, changes)
    folder = _run_folder(source, preset_name, changes, config, exists)
    if not exists:
        check_unused(folder)
    config = replace(config, run=replace(config.run, folder=str(folder)))
    config = settle_model(config)
    if is_folder(source) and not _changes_key(changes, "data.tokenizer"):
        config = with_kept_files(config, folder)
    return config, folder


def check_unused(folder: Path) -> None:
    """Refuse a folder that has checkpoints, whose steps would be mixed up with those of a new run."""
    if newest(folder / CHECKPOINTS_FOLDER):
        raise ConfigError(
            f"{folder} already contains a run\n"
            "  continue it with --resume, or name another run.folder"
        )


def check_start(config: Config, folder: Path, resume: bool) -> None:
    """Refuse what no worker could begin with, before any worker starts."""
    check_gpu_exists(config)
    check_training(config, model_sizes(config))
    if config.model.weights:
        weight_files(Path(config.model.weights))
    check_storage(config)
    check_folder(folder)
    if resume and not has_checkpoint(config, folder):
        raise nothing_to_resume(folder / CHECKPOINTS_FOLDER)


def check_folder(folder: Path) -> None:
    """Refuse a folder that cannot be made, or that nobody may write to."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    with explaining_writes(folder):
        if not there.is_dir():
            raise FileExistsError(EEXIST, os.strerror(EEXIST))
        if not os.access(there, os.W_OK):
            raise PermissionError(EACCES, os.strerror(EACCES))


def has_checkpoint(config: Config, folder: Path) -> bool:
    """Whether the folder of a run, or its storage, has a checkpoint."""
    if newest(folder / CHECKPOINTS_FOLDER):
        return True
    remote = remote_checkpoints(config.run)
    return remote is not None and bool(remote.steps())


def check_storage(config: Config) -> None:
    """Refuse object storage that this machine cannot write to."""
    remote = remote_checkpoints(config.run)
    if remote is not None:
        remote.check_writing()


def fetch_checkpoint(config: Config, folder: Path) -> None:
    """Fetch the newest checkpoint from object storage, or what is damaged of it, if the run has copies there."""
    remote = remote_checkpoints(config.run)
    if remote is not None:
        fetch_newest(remote, folder / CHECKPOINTS_FOLDER)


def check_training(config: Config, sizes: Sizes) -> None:
    """Refuse an optimizer, groups of parameters or a schedule of rates that cannot work."""
    check_optimizer(config.optimizer, config.parallel)
    if config.model.dropout and not set_dropout(blueprint(sizes), 0.0):
        raise ConfigError(
            f"model.dropout = {config.model.dropout:g} is for our own llama and gpt; "
            f"a {model_name(sizes)} is trained without dropout"
        )
    inside = config.run.recomputed_inside
    if inside and not recompute_inside(blueprint(sizes), inside):
        raise ConfigError(
            f"run.recompute = {config.run.recompute} is for our own llama and gpt, not for a {model_name(sizes)}\n"
            "  run.recompute=full recomputes whole stages of any model"
        )
    if (
        config.model.path
        and not config.model.weights
        and isinstance(sizes, DecoderConfig)
    ):
        initial_constants(sizes)
    if config.lora.rank:
        check_adapters(sizes, config.lora)
    if config.optimizer.groups:
        names = trained_names(sizes, config.lora)
        check_groups(names, config.optimizer)
    for name in config.run.callbacks:
        checked_callback(name)
    if config.run.own_loss:
        probe_loss(config.run, sizes.vocab)
    if config.optimizer.own_schedule:
        own_factor(config.optimizer.warmup_steps, config.optimizer.lr_schedule)


def check_sources(config: Config) -> None:
    """Refuse sources that are missing, empty or not text, before anything is measured."""
    for part in config.data.parts:
        _check_files(part, "data.sources")
    if config.data.validation_files:
        validation = replace(config.data, sources=config.data.validation_files)
        _check_files(validation, "data.validation")


def _check_files(data: DataConfig, key: str) -> None:
    files = source_files(data)
    if all(file.is_file() and file.stat().st_size == 0 for file in files):
        raise FileError(
            f"there is no text in {', '.join(data.files)}: every file is empty\n  name other text in {key}"
        )


def read_run(
    config: Config, folder: Path, resume: bool, watch: ProgressBytes
) -> Corpus:
    """Read the text of a run, and check that it and the checkpoint go with the model.

    All of it is encoded, and stays in the token cache. Calls `watch` with the amount of text that is done, and with
    the total.
    """
    corpus = corpus_of(config, folder, watch)
    validation_of(config, folder)
    if resume:
        check_resumable(config, folder, corpus)
    return corpus


def prepare_run(
    config: Config, plan: Plan, corpus: Corpus, folder: Path, resume: bool, lock: Lock
) -> Config:
    """Lock the folder, and write the files that every rank will read. The config that comes back is one of them."""
    with explaining_writes(folder):
        lock.claim(folder)
    if resume and not under_launcher():  # Its ranks first find out who sees the folder.
        fetch_checkpoint(config, folder)
        check_resumable(config, folder, corpus)
    if is_plan_file(config.schedule.name):  # The run keeps its own copy of it.
        schedule = config.schedule.at(str(folder / PLAN_FILE))
        config = replace(config, schedule=schedule)
    config = with_absolute_paths(config)
    text = dump_config(config, f"penstock train {folder} --resume")
    with explaining_writes(folder):
        put_in_place(folder / CONFIG_FILE, text)
        if config.model.folder:
            keep_origin(Path(config.model.folder), folder)
        keep_tokenizer(config.data.tokenizer, folder)
        keep_template(config.data, folder)
        prompt = find_prompt(corpus, tokenizer_of(config.data.tokenizer))
        (folder / PROMPT).write_text(prompt, encoding="utf-8")
    _write_plan(plan, folder)
    return config


@contextmanager
def explaining_writes(folder: Path) -> Iterator[None]:
    """Turn an error of the system into one that says that a folder cannot be written to."""
    try:
        yield
    except OSError as error:
        hint = "name another run.folder"
        if error.errno == ENOSPC:
            hint = "free some space there, or name another run.folder"
        raise FileError(
            f"cannot write to {folder}: {error.strerror}\n  {hint}"
        ) from None


def _write_plan(plan: Plan, folder: Path) -> None:
    """Write the plan; a timeline that was measured with another plan is removed."""
    file = folder / PLAN_FILE
    if file.is_file() and file.read_text(encoding="utf-8") != dump_plan(plan):
        for name in (TIMELINE, FULL_TIMELINE):
            (folder / name).unlink(missing_ok=True)
    write_plan(plan, file)


# ---------------------------------------------------------------- the config
def _changes_key(changes: Sequence[str], key: str) -> bool:
    return any(change.strip().startswith(key) for change in changes)


# ---------------------------------------------------------------- the folder
def _run_folder(
    source: Path | None,
    preset_name: str | None,
    changes: Sequence[str],
    config: Config,
    exists: bool,
) -> Path:
    """Return the folder of the run: the source, the config's, or one named after it."""
    if source is not None and source.is_dir():
        if not _changes_key(changes, "run.folder"):
            return source
    elif under_launcher() and not config.run.folder:
        raise ConfigError(
            "under a launcher all ranks must know the folder: "
            "--set run.folder=runs/NAME"
        )
    if config.run.folder:
        return Path(config.run.folder)
    if source is not None and not source.is_dir():
        return _numbered_folder(source.stem, exists)
    return _numbered_folder(preset_name or DEFAULT_PRESET, exists)


def _numbered_folder(name: str, exists: bool) -> Path:
    """Return the first folder of this name that is free, or the last that exists.

    The folders are called name, name-2, name-3 and so on.
    """
    last = None
    for number in range(1, MAX_RUNS_OF_A_NAME + 1):
        folder = RUNS_FOLDER / (name if number == 1 else f"{name}-{number}")
        if folder.exists():
            last = folder
        elif not exists:
            return folder
    if exists:
        return last or RUNS_FOLDER / name
    raise ConfigError(
        f"{RUNS_FOLDER} already has {MAX_RUNS_OF_A_NAME} runs called {name}\n"
        "  remove some, or name another run.folder"
    )


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
    placement = decide_placement(config, plan.schedule.ranks * config.parallel.size)
    if launched:
        check_launched(config.parallel, plan.schedule.ranks, launched)
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
        workload, placement = machine_workload(config, layers, given)
        check_timing(config, model_sizes(config), placement)
        load_ahead(run_worker)
        with display.timing():
            profiles = measure_workload(workload, placement)
        measured.append(profiles)
        with display.planning() as watch:
            return plan_workload(workload, profiles, watch=watch).plan

    config, plan = plan_run(config, layers, given, plan_auto)
    return config, plan, measured[0] if measured else None


def kept_plan(config: Config, folder: Path, changes: Sequence[str]) -> Plan | None:
    """Return the plan of the run in a folder, if auto made it and nothing that it depends on has changed."""
    file = folder / PLAN_FILE
    changed = any(change.strip().startswith(PLANNED_WITH) for change in changes)
    if config.schedule.kind != AUTO or changed or not file.is_file():
        return None
    return read_plan(file)


MAX_MEASURED_ROWS = 3


@dataclass(frozen=True, slots=True)
class AutoPlan:
    """A plan, and everything that was compared with it."""

    plan: Plan
    landscape: Landscape


def machine_workload(
    config: Config,
    layers: int,
    given: Collection[str] | None = None,
    devices: int = 0,
    memory: float | None = None,
    uneven: bool = False,
    model: ModelConfig | None = None,
) -> tuple[Workload, Placement]:
    """Return the workload of a config on this machine, with its memory and processors.

    If a number of devices is given, the plan is for that many devices of their own, and
    only `memory` limits it. `model` has the sizes of the model, if they are not those of the
    config.
    """
    workload = workload_of(config, layers, given, Hardware(devices))
    placement = decide_placement(config, workload.devices)
    processors = None
    allowed = devices
    if not devices and is_better_alone(workload, placement):
        allowed = 1
        placement = decide_placement(config, allowed)
    if not devices:
        memory = memory or memory_of_process(config, placement)
        if placement.processors < placement.neighbours:
            processors = placement.processors
    workload = workload_of(
        config,
        layers,
        given,
        Hardware(
            allowed,
            memory,
            processors,
            exact=under_launcher(),
            uneven=uneven,
            on_gpu=placement.device == "cuda",
        ),
        max(MIN_GRANULARITY, tile_of(placement.device)),
        model=model,
    )
    return workload, placement


def is_better_alone(workload: Workload, placement: Placement) -> bool:
    """Whether one process does the work of all that a workload allows, only sooner.

    That is so if they take turns on one GPU: it computes for one of them at a time, it has
    one memory for all of them, and it loses time whenever it goes from one to another. What
    the user has asked for and needs several processes is an exception.
    """
    config = workload.config
    assert config is not None, "only a config has a place to run"
    fixed = workload.fixed
    wants_several = (
        max(fixed.ranks, fixed.copies, config.parallel.size) > 1
        or config.elastic.named == "on"
        or bool(config.elastic.listen or config.elastic.workers or config.schedule.skip)
        or under_launcher()
    )
    takes_turns = placement.device == "cuda" and placement.processors == 1
    return takes_turns and not wants_several


def memory_of_process(config: Config, placement: Placement) -> float | None:
    """Return the bytes that a plan may use in each process; None if that is not checked."""
    if not config.run.asks("memory"):
        return None
    pools = memory_pools(placement, config.parallel.size)
    return USABLE_SHARE * min(pool.bytes / max(1, len(pool.ranks)) for pool in pools)


def measure_workload(
    workload: Workload,
    placement: Placement,
    watch: Callable[[str], None] = lambda text: None,
    whole: bool = False,
) -> RowProfiles:
    """Measure the model of a workload, with the numbers of rows that a plan may choose.

    Numbers of rows that take too long are left out: `RowProfiles` scales them from the others. If one row is already
    too much, so are some of its tokens. With `whole`, no slices are measured. Nothing is sliced on one device either.
    """
    config = workload.config
    assert config is not None, "only the model of a config can be measured"
    request = request_of(config, placement, 1, quick=True)
    request, counts = affordable(request, quick_rows(workload, request))
    if whole or workload.devices == 1:
        request = replace(request, where=((request.tokens, 0),))
    if under_launcher():  # Only one of the launched processes plans; the others wait.
        profiles = measure_rows_of(None, request, counts, watch)
    else:
        measured = profile_rows(request, counts, placement.measurers, watch)
        assert measured is not None, "only torchrun returns None"
        profiles = measured
    tokens = config.data.seq_len
    if request.tokens == tokens:
        return profiles
    enlarged = [enlarge(each, each.rows, tokens) for each in profiles.measured]
    return RowProfiles(tuple(enlarged))


def rows_to_measure(workload: Workload) -> list[int]:
    """Return the smallest and the largest number of rows of a division, and one between them."""
    return _few(_rows_of(workload))


def quick_rows(workload: Workload, request: ProfileRequest) -> list[int]:
    """Return such numbers of rows whose passes do not take too long.

    Larger micro-batches are scaled from the largest one that is measured. A GPU is the more
    efficient the larger they are, so it should be as large as possible.
    """
    _, rows = affordable(request, _rows_of(workload))
    return _few(rows)


def _rows_of(workload: Workload) -> list[int]:
    return sorted({division.rows for division in divisions_of(workload)})


def _few(rows: list[int]) -> list[int]:
    if len(rows) <= MAX_MEASURED_ROWS:
        return rows
    return [rows[0], rows[len(rows) // 2], rows[-1]]


def workload_limits(workload: Workload, limits: Limits) -> Limits:
    """Return the limits without slices, if there is only one device.

    Slices let one rank work on a sequence while another one has the rest of it. Alone, a
    rank computes them one after the other, which takes longer than the whole sequence.
    """
    return replace(limits, slices=1) if workload.devices == 1 else limits


def plan_workload(
    workload: Workload,
    profiles: RowProfiles,
    limits: Limits | None = None,
    watch: Callable[[SearchProgress], None] = lambda progress: None,
    source: str = "measured",
) -> AutoPlan:
    """Search for the fastest plan of a workload. `source` tells where the profiles are from."""
    if limits is None:
        limits = Limits()
        if workload.config is not None:
            skip = workload.config.schedule.skip
            limits = limits_of(model_sizes(workload.config), Limits(skip=skip))
    limits = workload_limits(workload, limits)
    question = profile_question(workload, profiles.at, limits, source)
    landscape = search(question, watch, write_size)
    plan = chosen_plan(landscape, (("profile", source),))
    return AutoPlan(plan, landscape)


LOCK = "lock"  # in the folder of a run
# A folder in which one of these is not empty is worth keeping.
PROGRESS_FILES = (METRICS, f"{CHECKPOINTS_FOLDER}/{STEP_PREFIX}*")


class Lock:
    """The lock of one folder. The system releases it when the process ends."""

    def __init__(self) -> None:
        self.handle = -1
        self.created: list[Path] = []  # folders that were missing, innermost first

    def claim(self, folder: Path) -> None:
        """Create the folder if it is missing; raise if another process trains there."""
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        self.handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.free()
            raise ConfigError(
                f"another process trains in {folder}\n"
                "  wait until it has ended, or name another run.folder"
            ) from None
        except OSError:  # This file system has no locks.
            self.free()
        else:
            self.created = missing

    def clean_up(self) -> None:
        """Remove the folder if this process created it and trained no step.

        Call it while the lock is held.
        """
        if not self.created or self.handle < 0:
            return
        folder, *parents = self.created
        for pattern in PROGRESS_FILES:
            for file in folder.glob(pattern):
                if file.is_dir() or file.stat().st_size:
                    return
        shutil.rmtree(folder, ignore_errors=True)
        for parent in parents:
            with suppress(OSError):  # It holds other files, such as the token cache.
                parent.rmdir()

    def free(self) -> None:
        """Release the lock."""
        if self.handle >= 0:
            with suppress(OSError):
                os.close(self.handle)
            self.handle = -1


@contextmanager
def locking() -> Iterator[Lock]:
    """Yield a lock that is released afterwards, and clean up if no step was trained."""
    lock = Lock()
    try:
        yield lock
    finally:
        lock.clean_up()
        lock.free()
