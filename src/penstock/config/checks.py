"""What is wrong with the values of a config: ranges, choices, and values that contradict each other.

config ──► check_config ──┬── the same config, with the open values of a named schedule settled
                          └── ConfigError: every fault on a line of its own
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from math import isfinite
from typing import Any

from penstock.config.other_words import OTHER_VALUES
from penstock.config.recording import (
    reasons_against_compiling,
    reasons_against_recording,
)
from penstock.config.sections import (
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
)
from penstock.config.values import (
    AS_PLANNED,
    AUTO,
    DEVICES,
    MAX_DEFAULT_MICROBATCHES,
    MEANS,
    MESSAGE_TYPES,
    MODEL_FAMILIES,
    PARTIAL_SCHEDULES,
    PRECISIONS,
    RATE_SCHEDULES,
    REDUCTIONS,
    SWITCHES,
    is_plan_file,
    names_own_code,
    own_code_file,
)
from penstock.errors import ConfigError, UnknownNameError


def check_config(config: Config, counted: bool = False) -> Config:
    """Return the config, or raise one error that lists all of its faults.

    A plan file brings its own micro-batches, and auto may choose them. Their number is
    not checked until the plan is known, which the caller says with `counted`. A named
    schedule gets numbers for the values that the config leaves open.
    """
    config = _settle_named(config)
    faults = []
    for section in fields(config):
        faults += _range_faults(section.name, getattr(config, section.name))
    faults += _choice_faults(config)
    faults += _optimizer_faults(config.optimizer)
    faults += _lora_faults(config)
    faults += _own_code_faults(config)
    faults += _device_faults(config)
    faults += _skip_faults(config)
    faults += _size_faults(config, counted or config.schedule.is_named)
    faults += _option_faults(config)
    faults += _joining_faults(config)
    faults += _path_faults(config)
    if 0 < config.run.slow <= 1:
        faults.append(
            f"run.slow = {config.run.slow:g} would call every worker slow; it must be more than 1, or 0"
        )
    if faults:
        raise ConfigError("\n".join(faults))
    return config


def _optimizer_faults(optimizer: OptimizerConfig) -> list[str]:
    """The values of [optimizer] that no torch is needed to refuse."""
    faults = []
    schedule = optimizer.schedule
    if not names_own_code(schedule) and schedule not in RATE_SCHEDULES:
        wrong = UnknownNameError("optimizer.schedule", schedule, RATE_SCHEDULES)
        faults.append(f"{wrong}; your own is module:function or file.py:function")
    for group in optimizer.groups:
        name = f"optimizer.groups with match = {group.match!r}"
        if not group.match:
            faults.append(f"{name} matches nothing; give a pattern such as '*.bias'")
        for key, value in (("rate", group.rate), ("decay", group.decay)):
            if value is not None and not 0 <= value < float("inf"):
                faults.append(f"{name} has {key} = {value:g}; it must be at least 0")
        if group.frozen and (group.rate, group.decay) != (None, None):
            faults.append(f"{name} is frozen, so it can have no rate or decay")
    return faults


def _lora_faults(config: Config) -> list[str]:
    """The values that do not go with adapters."""
    if not config.lora.rank:
        return []
    faults = []
    if not config.model.weights:
        faults.append(
            f"lora.rank = {config.lora.rank} trains adapters beside a trained model: name its folder in model.weights"
        )
    if config.mesh.size > 1:
        faults.append(
            f"lora.rank = {config.lora.rank} does not go with mesh.shard = {config.mesh.shard} and "
            f"mesh.tensor = {config.mesh.tensor}: use schedule.copies instead"
        )
    return faults


def _own_code_faults(config: Config) -> list[str]:
    """The values of [run] that name the user's own code or go with it, and those that exclude each other."""
    run = config.run
    faults = []
    for key, names in (("loss", (run.loss,)), ("callbacks", run.callbacks)):
        faults += [
            f"run.{key} = {name!r} is not module:name or file.py:name"
            for name in names
            if name and not names_own_code(name)
        ]
    if run.loss and (run.smoothing or run.z_loss):
        faults.append(
            "run.loss replaces the cross entropy, so it does not go with run.smoothing and run.z_loss"
        )
    if run.reduction != "sum" and not run.loss:
        faults.append(
            "run.reduction = mean is for a loss of your own: name it in run.loss"
        )
    faults += [
        f"run.recompute = true recomputes everything, so run.recompute_{block} = true adds nothing: set one of them"
        for block in run.recomputed_inside
        if run.recompute
    ]
    if run.early_stop and not run.evaluate:
        faults.append(
            f"run.early_stop = {run.early_stop} counts evaluations, but run.evaluate = 0 makes none"
        )
    return faults


def _option_faults(config: Config) -> list[str]:
    """The options of [run] that contradict other values."""
    reasons = []
    if config.run.graphs == "true":
        reasons += [("graphs", one) for one in reasons_against_recording(config)]
    if config.run.compile == "true":
        reasons += [("compile", one) for one in reasons_against_compiling(config)]
    return [f"run.{key} = true does not go with {reason}" for key, reason in reasons]


def _joining_faults(config: Config) -> list[str]:
    """The options for workers of other machines that would change nothing, or that contradict others."""
    run = config.run
    if run.listen:
        if run.elastic == "false":
            return [
                "run.listen lets workers join, which run.elastic = false does not allow"
            ]
        own = [("optimizer.schedule", config.optimizer.schedule)]
        own += [("run.loss", run.loss)]
        own += [("run.callbacks", name) for name in run.callbacks]
        return [
            f"{key} = {name} is a file that workers of other machines do not have (run.listen): "
            "name a module that is installed on all machines"
            for key, name in own
            if own_code_file(name)
        ]
    return [
        f"run.{key} is for workers of other machines: set run.listen=HOST:PORT too"
        for key in ("key", "workers")
        if getattr(run, key)
    ]


def _path_faults(config: Config) -> list[str]:
    """The values of [paths] that would change nothing, or that contradict others."""
    paths = config.paths
    schedule = config.schedule
    searched = schedule.name == AUTO and schedule.skip > 0
    planned = searched or is_plan_file(schedule.name)
    changed = []
    for item in fields(paths):
        value = getattr(paths, item.name)
        if value != item.default:
            changed.append(f"paths.{item.name}")
    if not planned and schedule.name not in PARTIAL_SCHEDULES:
        return [
            f"{key} is for schedules that leave out parts, and {schedule.name} leaves out none: "
            "set schedule.name=skip, a plan of `penstock paths`, or schedule.skip with auto"
            for key in changed
        ]
    faults = []
    uneven = [
        key
        for key in ("separate", "instructions", "segments")
        if getattr(config.data, key)
    ]
    if paths.mean == "visits" and uneven and config.mesh.shard > 1:
        faults.append(
            f"paths.mean = visits does not go with data.{uneven[0]} and mesh.shard > 1: "
            "shards would weigh their documents differently; set paths.mean=all"
        )
    if planned:
        own = ("paths.share", "paths.swaps", "paths.keep")
        faults += [
            f"{key} is for schedule.name = skip; {schedule.name} has its own paths, so leave it out"
            for key in changed
            if key in own
        ]
        return faults
    if paths.share and schedule.skips:
        faults.append(
            f"paths.share = {paths.share:g} and schedule.skips = {schedule.skips} both say how many "
            "parts are left out: give one of them"
        )
    unknown = [part for part in paths.keep if not 0 <= part < schedule.ranks]
    if unknown:
        faults.append(
            f"paths.keep names part {unknown[0]}, but the parts of {schedule.ranks} ranks are "
            f"0 to {schedule.ranks - 1}"
        )
    return faults


def allows_meshes(config: Config) -> bool:
    """Whether the options of a run go with ranks of several processes."""
    return not _option_faults(replace(config, mesh=MeshConfig(shard=2)))


def _range_faults(section: str, values: object) -> list[str]:
    """The values of a section that are outside their ranges."""
    faults = []
    for item in fields(values):  # type: ignore[arg-type]
        value = getattr(values, item.name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        wanted = _wanted_range(value, item.metadata)
        if wanted:
            shown = f"{value:g}" if isinstance(value, float) else str(value)
            faults.append(f"{section}.{item.name} = {shown} must be {wanted}")
    return faults


def _wanted_range(value: float, limits: Mapping[str, Any]) -> str:
    """The range that a value violates, in words; empty if it is inside."""
    least = limits.get("least")
    most = limits.get("most")
    above = limits.get("above")
    if isinstance(value, float) and not isfinite(value):
        return "a finite number"
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        return "between -2^63 and 2^63"
    if least is not None and value < least:
        return f"at least {least:g}"
    if most is not None and value > most:
        return f"at most {most:g}"
    if above is not None and value <= above:
        return f"above {above:g}"
    return ""


def _choice_faults(config: Config) -> list[str]:
    """The values that are not among the known names."""
    choices = (
        ("model.family", config.model.family, MODEL_FAMILIES),
        ("run.precision", config.run.precision, PRECISIONS),
        ("run.messages", config.run.messages, MESSAGE_TYPES),
        ("run.device", config.run.device, DEVICES),
        ("run.compile", config.run.compile, SWITCHES),
        ("run.graphs", config.run.graphs, SWITCHES),
        ("run.elastic", config.run.elastic, SWITCHES),
        ("run.reduction", config.run.reduction, REDUCTIONS),
        ("run.mirror", config.run.mirror, SWITCHES),
        ("paths.mean", config.paths.mean, MEANS),
        (
            "paths.sum_messages",
            config.paths.sum_messages,
            (*MESSAGE_TYPES, AS_PLANNED),
        ),
    )
    faults = []
    for key, value, known in choices:
        if value not in known:
            meant = OTHER_VALUES.get(value.casefold(), "")
            if meant not in known:
                meant = ""
            faults.append(str(UnknownNameError(key, value, known, meant)))
    return faults


def _settle_named(config: Config) -> Config:
    """Return the config with numbers in place of what a named schedule leaves open.

    Only auto chooses these numbers by their times. A named schedule takes all devices as
    ranks of one copy, and about twice as many micro-batches as ranks.
    """
    schedule = config.schedule
    if not schedule.is_named:
        return config
    copies = schedule.copies or 1
    default = schedule.devices // (copies * max(1, config.mesh.size))
    ranks = schedule.ranks or default or ScheduleConfig().ranks
    microbatches = schedule.microbatches
    if not microbatches:
        passes = copies * max(1, config.mesh.shard * config.run.accumulate)
        share = max(1, config.data.batch // passes)
        most = min(2 * ranks, share, MAX_DEFAULT_MICROBATCHES)
        fitting = [one for one in range(1, most + 1) if share % one == 0]
        microbatches = max(fitting, default=1)
    schedule = replace(schedule, ranks=ranks, copies=copies, microbatches=microbatches)
    return replace(config, schedule=schedule)


def _device_faults(config: Config) -> list[str]:
    """A named schedule that needs more devices than there are."""
    schedule = config.schedule
    processes = schedule.ranks * schedule.copies * config.mesh.size
    if not schedule.is_named or not schedule.devices or processes <= schedule.devices:
        return []
    return [
        f"schedule.devices = {schedule.devices}, but {schedule.name} needs {processes} "
        f"(ranks {schedule.ranks} x copies {schedule.copies} x mesh {config.mesh.size}); "
        "set schedule.devices=0, or fewer ranks or copies"
    ]


def _skip_faults(config: Config) -> list[str]:
    """A share that only auto takes into account, beside a named schedule."""
    schedule = config.schedule
    if not schedule.skip or not schedule.is_named:
        return []
    return [
        f"schedule.skip = {schedule.skip:g} says what auto may leave out, but "
        f"schedule.name = {schedule.name}; for the schedule skip, set schedule.skips"
    ]


def _size_faults(config: Config, counted: bool) -> list[str]:
    """The values that contradict each other."""
    model = config.model
    data = config.data
    schedule = config.schedule
    passages = config.passages
    faults = []
    if counted and passages and data.batch % passages:
        fitting = -(-data.batch // passages) * passages
        faults.append(
            f"data.batch = {data.batch} sequences cannot be dealt out evenly to {passages} "
            f"micro-batches (microbatches {schedule.microbatches} x copies "
            f"{schedule.copies} x shard {config.mesh.shard} x accumulate "
            f"{config.run.accumulate}); {fitting} can"
        )
    if model.family == "bert":
        faults += _encoder_faults(config)
    elif data.segments and not model.folder:
        # The model of a folder may still turn out to be an encoder.
        faults.append(segments_fault(config))
    faults += _mixture_faults(data)
    if model.weights and model.config:
        faults.append(
            "model.weights and model.config both name a folder; "
            "weights starts from a trained model, config from new weights"
        )
    if model.folder:
        return faults  # Its folder has its own sizes.
    if model.family in ("gpt", "bert") and 0 < model.positions < data.tokens:
        faults.append(
            f"data.tokens = {data.tokens} is more than "
            f"model.positions = {model.positions}"
        )
    layers = sum(schedule.partition)
    if schedule.partition and layers != model.layers:
        faults.append(
            f"schedule.partition has {layers} layers, but model.layers = {model.layers}"
        )
    return faults


def _mixture_faults(data: DataConfig) -> list[str]:
    """The sources of a mixture that cannot be mixed."""
    faults = []
    if data.mixture and data.sources:
        faults.append("data.sources and data.mixture both name text: give one of them")
    for number, source in enumerate(data.mixture):
        name = f"source {number} of data.mixture"
        if not source.sources:
            faults.append(f"{name} names no files: sources is empty")
        if not (isfinite(source.weight) and source.weight > 0):
            faults.append(f"{name} has weight {source.weight:g}, which must be above 0")
    return faults


def segments_fault(config: Config) -> str:
    """Say that only an encoder has segments."""
    model = config.model
    wrong = f"data.segments = {config.data.segments} is for an encoder, but "
    if model.folder:
        return f"{wrong}the model of {_written_model(model)} is a decoder: set data.segments=0"
    return f"{wrong}{_written_model(model)}: set model.family=bert, or data.segments=0"


def _encoder_faults(config: Config) -> list[str]:
    """The values that do not go with a model whose words see both ways."""
    model = _written_model(config.model)
    faults = []
    if config.schedule.slices > 1:
        faults.append(
            f"schedule.slices = {config.schedule.slices} does not go with {model}: the words of an encoder see later "
            "words, so a slice cannot run before the others; set schedule.slices=0"
        )
    if config.data.instructions:
        faults.append(
            f"data.instructions = true does not go with {model}: an encoder guesses masked words and answers nothing"
        )
    return faults


def _written_model(model: ModelConfig) -> str:
    """The line of a config that says which model it is."""
    if model.folder:
        return f"{model.folder_key} = {model.folder}"
    return f"model.family = {model.family}"
