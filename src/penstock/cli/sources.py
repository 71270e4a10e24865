"""What the words of a command stand for: models, schedules and costs.

config.toml   RUN   HF_FOLDER   HF_FOLDER/config.json   llama-1b                       a model

hanayo:waves=2,split   mine.py:eager   plan.json   orders.csv   RUN/timeline.json      a schedule
F=1,B=2,comm=0.05      profile.json    profile.json:channels=1                         what its actions cost
"""

from __future__ import annotations

import runpy
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.terminal import beginning, option, tell
from penstock.config import BYTE_TOKENIZER, DEFAULT_PRESET, PRESETS, Config
from penstock.cost import ProfileCost, RowProfiles
from penstock.cost.cost import UnitCost
from penstock.cost.gpus import GPUS
from penstock.cost.profile import MAX_ERROR, error_warning
from penstock.errors import (
    FileError,
    ShapeError,
    UnknownNameError,
    refuse_first,
)
from penstock.formats import read_plan, read_row_profiles, read_torch_csv
from penstock.formats.config_toml import (
    CONFIG_FILE,
    is_folder,
    read_source,
)
from penstock.ir import Plan, Schedule
from penstock.plan.pricing import Price
from penstock.plan.workload import Workload
from penstock.schedules import REGISTRY, make, read_name
from penstock.shaped import read_shape, split_name, write_shape
from penstock.train.data.tokenizer import kept_tokenizer
from penstock.train.history import PLAN_FILE, TIMELINE, is_timeline
from penstock.train.own_models import folder_sizes, settled_sizes
from penstock.view.numbers import count_of

if TYPE_CHECKING:
    from penstock.train.weights import Sizes  # loads torch

DEFAULT_PP, DEFAULT_MICROBATCHES = 4, 8
MAX_ACTION_TIME = 1e12  # sums of longer times would overflow
# What --cost takes, with the smallest and the largest value that makes sense.
UNIT_KINDS = {"F": float, "B": float, "comm": float, "sum": float, "channels": int}
UNIT_LIMITS = {"comm": 0.0, "sum": 0.0}  # the others must be above 0
MAX_CHANNELS = 2
SCHEDULE_HELP = (
    "A schedule with its shape, such as 1f1b or hanayo:waves=2,split; a plan.json, a CSV file from torch, "
    "a function in mine.py:eager, or the timeline.json of a run."
)
COST_HELP = (
    "What actions cost: F=1,B=2,comm=0.05 (a forward of a micro-batch on a rank takes 1), a profile.json of "
    "`penstock profile`, or profile.json:channels=1,seq_len=512."
)


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """The size of a pipeline that a name alone leaves open."""

    pp: int | None = option(
        None, f"Ranks of the pipeline. Default without a model: {DEFAULT_PP}.", "--pp"
    )
    microbatches: int | None = option(
        None,
        f"Micro-batches in a step. Default without a model: {DEFAULT_MICROBATCHES}.",
    )

    def sizes(self, beside: Schedule | None = None) -> dict[str, int]:
        """The sizes for a schedule by name: as given, or as those of a schedule `beside` it."""
        pp, microbatches = DEFAULT_PP, DEFAULT_MICROBATCHES
        if beside is not None:
            pp, microbatches = beside.ranks, len(beside.microbatches)
        return {
            "ranks": pp if self.pp is None else self.pp,
            "microbatches": microbatches
            if self.microbatches is None
            else self.microbatches,
        }

    def refuse_for(self, file: str) -> None:
        """Refuse sizes for a file, which has its own."""
        named = {"--pp": self.pp, "--microbatches": self.microbatches}
        words = [name for name, value in named.items() if value is not None]
        if words:
            raise ShapeError(
                f"the file {file} has its own shape; leave out {' '.join(words)}"
            )


@dataclass(frozen=True, slots=True)
class Costs:
    """What actions cost, and how many channels messages share; None if as many as they need."""

    price: Price
    channels: int | None = None
    file: Path | None = None  # the profile


complete_schedule = beginning("schedules:REGISTRY")
complete_model = beginning("config:PRESETS")


# ---------------------------------------------------------------- models
# The settings that options stand for, and those that name a model's folder.
PIPELINE_SETTINGS = {"pp": "parallel.pp", "microbatches": "schedule.microbatches"}
PATH_SETTING = "model.path"
TOKENIZER_SETTING = "data.tokenizer"
PLANNED_PRESET = "llama-1b"  # has the data of a model that comes without a config
MODEL_JSON = "config.json"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model comes from: a config or the folder of a run, or a preset; and changes of its settings."""

    file: Path | None
    preset: str | None
    changes: tuple[str, ...]


def find_model(
    source: Path | None, changes: Sequence[str] | None, trained: bool = False
) -> ModelSource:
    """Return what MODEL stands for. To be `trained`, a Hugging Face folder gives its weights, otherwise its sizes."""
    given = tuple(changes or ())
    if source is None or source.exists():
        folder = source if source is not None and source.is_dir() else None
        if folder is not None and (folder / CONFIG_FILE).is_file():
            return ModelSource(folder, None, given)
        is_json = (
            source is not None and source.suffix == ".json" and not _is_plan(source)
        )
        if source is None or not (
            is_json or (folder and (folder / MODEL_JSON).is_file())
        ):
            return ModelSource(source, None, given)
        place = source
        if folder is not None and not trained:
            place = folder / MODEL_JSON
        preset = None if trained else PLANNED_PRESET
        if not trained:  # Nobody needs words to measure or to plan a model.
            given = (f"{TOKENIZER_SETTING}={BYTE_TOKENIZER}", *given)
        return ModelSource(None, preset, (f"{PATH_SETTING}={place}", *given))
    if str(source) in PRESETS:
        return ModelSource(None, str(source), given)
    if source.suffix:
        return ModelSource(source, None, given)
    raise FileError(
        f"there is neither a file nor a preset {source}\n  name a config (`penstock init` writes one), the folder "
        f"of a run or of a Hugging Face model, or a preset: {', '.join(PRESETS)}"
    )


def _is_plan(file: Path) -> bool:
    """Whether a JSON file is a plan of ours, and not the config of a model."""
    return '"penstock"' in file.read_text(encoding="utf-8", errors="replace")[:200]


def config_file(source: Path | None) -> Path | None:
    """The config that MODEL names, if it names one."""
    return find_model(source, ()).file


def read_model(source: Path | None, changes: Sequence[str]) -> tuple[Config, Sizes]:
    """Return the config of a model, and its sizes; neither torch nor a tokenizer is needed for most models."""
    found = find_model(source, changes)
    config = read_source(found.file, found.preset, found.changes)
    if config.model.folder:
        sizes = folder_sizes(Path(config.model.folder))
        data = replace(config.data, tokenizer=BYTE_TOKENIZER)
        return replace(config, data=data), sizes
    if found.file is not None and is_folder(found.file):
        tokenizer = kept_tokenizer(config.data.tokenizer, found.file)
        config = replace(config, data=replace(config.data, tokenizer=tokenizer))
    return settled_sizes(config)


def describe_model(source: Path | None, workload: Workload) -> str:
    """Say in a line what is planned."""
    name = (
        f"preset {DEFAULT_PRESET}, changed by --set" if source is None else str(source)
    )
    return (
        f"model: {name}, {workload.layers} layers; {workload.batch:,} sequences of {workload.tokens:,} tokens a step "
        f"on {count_of(workload.devices, 'device', 'devices')}"
    )


# ---------------------------------------------------------------- schedules
def is_file(source: str) -> bool:
    """Whether a schedule is in a file, which has its own shape."""
    path = Path(source)
    return not _is_function(source) and bool(path.suffix or path.exists())


def read_schedule(source: str, sizes: dict[str, int]) -> Plan:
    """Return the plan that a word stands for; `sizes` are those of a schedule by name or of a function."""
    if source not in REGISTRY and is_file(source):
        return _read(Path(source))
    if _is_function(source):
        file, _, name = source.rpartition(":")
        return Plan(_own_schedule(Path(file), name, *sizes.values()), name)
    schedule = make(source, **sizes)
    return Plan(schedule, write_shape(*read_name(source)))


def _is_function(source: str) -> bool:
    return source.rpartition(":")[0].endswith(".py")


def _own_schedule(file: Path, name: str, ranks: int, microbatches: int) -> Schedule:
    """Call a function of the user's file that makes a schedule."""
    function = _own_function(file, name)
    try:
        made = function(ranks, microbatches)
    except (ShapeError, FileError):
        raise
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise ShapeError(
            f"{name}({ranks}, {microbatches}) failed in {place.filename}:{place.lineno}: "
            f"{type(error).__name__}: {error}"
        ) from None
    if not isinstance(made, Schedule):
        raise ShapeError(
            f"{name} of {file} returned {type(made).__name__}, not a Schedule\n"
            "  it is called with the number of ranks and of micro-batches; see `penstock.ir.Schedule`"
        )
    return made


def _own_function(file: Path, name: str) -> Callable[..., Any]:
    if not file.is_file():
        raise FileError(f"cannot read {file}: No such file")
    try:
        found = runpy.run_path(str(file))
    except Exception as error:
        raise FileError(
            f"{file} cannot be imported: {type(error).__name__}: {error}"
        ) from None
    own = [word for word, one in found.items() if callable(one) and word[:1] != "_"]
    if name not in own:
        raise UnknownNameError(f"function in {file}", name, own)
    function: Callable[..., Any] = found[name]
    return function


def _read(file: Path) -> Plan:
    """Read a plan.json or a CSV file from torch; without a name it takes the file's."""
    refuse_first(
        FileError,
        (
            is_timeline(file),
            f"{file} holds the times of a measured step, not a plan\n"
            f"  draw it, or name {file.parent / PLAN_FILE}",
        ),
        (
            (file / PLAN_FILE).is_file(),
            f"{file} is the folder of a run\n  name {file / PLAN_FILE}, or {file / TIMELINE} "
            "to draw the step that was measured",
        ),
        (
            file.suffix.lower() == ".toml",
            f"{file} is a config or a cluster, not a plan\n"
            f"  `penstock plan {file} -o plan.json` makes a plan of a config",
        ),
    )
    if file.suffix.lower() == ".csv":
        return Plan(read_torch_csv(file), file.stem)
    plan = read_plan(file)
    return plan if plan.name else replace(plan, name=file.stem)


# ---------------------------------------------------------------- costs
def read_costs(text: str | None, seq_len: int | None = None) -> Costs:
    """Return the costs that --cost and --seq-len ask for."""
    name, shape = split_name(text or "")
    if "=" not in name and (Path(name).suffix or (name and Path(name).exists())):
        words = read_shape(name, shape, {"channels": int, "seq_len": int})
        channels, length = words.get("channels"), words.get("seq_len")
        seq_len = length if seq_len is None else seq_len
        _check_units({} if channels is None else {"channels": channels})
        profiles = read_cost_profile(Path(name))
        profile = profiles.measured[0]
        if seq_len is not None and seq_len < 1:
            raise ShapeError(f"--seq-len must be at least 1, not {seq_len}")
        length = profile.tokens if seq_len is None else seq_len
        price = Price(ProfileCost(profile, seq_len), profile, length, profiles)
        return Costs(price, channels, Path(name))
    if name.casefold() in GPUS:
        raise ShapeError(
            f"--cost {name}: the times of a GPU are those of a model on it\n"
            f"  penstock profile MODEL --gpu {name} -o {name}.json, then --cost {name}.json"
        )
    if seq_len is not None:
        raise ShapeError(
            "--seq-len needs the times of a model: add --cost profile.json"
        )
    units = read_shape("--cost", text or "", UNIT_KINDS)
    _check_units(units)
    channels = units.pop("channels", None)
    return Costs(Price(UnitCost(**units)), channels)


def _check_units(units: dict[str, float]) -> None:
    """Refuse costs that make no sense, such as negative ones."""
    for key, value in units.items():
        if key == "channels" and not 1 <= value <= MAX_CHANNELS:
            raise ShapeError(f"--cost: channels must be 1 or 2, not {value}")
        least = UNIT_LIMITS.get(key)
        in_range = value > 0 if least is None else value >= least
        if not in_range or not value <= MAX_ACTION_TIME:
            wanted = "above 0" if least is None else f"at least {least:g}"
            raise ShapeError(
                f"--cost: {key} must be {wanted} and at most {MAX_ACTION_TIME:g}, not {value:g}"
            )


def read_cost_profile(file: Path) -> RowProfiles:
    """Read profiles, and warn if they are too far from what was measured."""
    profiles = read_row_profiles(file)
    if profiles.measured[0].worst_error > MAX_ERROR:
        tell("WARNING", f"{file}: {error_warning(profiles.measured[0])}")
    return profiles
