"""What is wrong with the values of a config: ranges, choices, and values that contradict each other.

config ──► check_config ──┬── the same config, with the open values of a named schedule settled
                          └── ConfigError: every fault on a line of its own
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from math import inf, isfinite
from operator import attrgetter
from typing import Any

from penstock.config.sections import (
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
    Config,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
    is_plan_file,
    names_own_code,
    own_code_file,
)
from penstock.config.words import OTHER_VALUES
from penstock.errors import ConfigError, UnknownNameError


def check_config(config: Config, counted: bool = False) -> Config:
    """Return the config, or raise one error that lists all of its faults.

    A plan file brings its own micro-batches, and auto may choose them. Their number is
    not checked until the plan is known, which the caller says with `counted`. A named
    schedule gets numbers for the values that the config leaves open.
    """
    config = _settle_named(config)
    faults = [
        *_range_faults(config),
        *_choice_faults(config),
        *_optimizer_faults(config.optimizer),
        *_training_faults(config),
        *_schedule_faults(config, counted or config.schedule.is_named),
        *_model_faults(config),
        *_option_faults(config),
        *_joining_faults(config),
        *_path_faults(config),
    ]
    if 0 < config.run.slow <= 1:
        faults.append(
            f"run.slow = {config.run.slow:g} would call every worker slow; it must be more than 1, or 0"
        )
    if faults:
        raise ConfigError("\n".join(faults))
    return config


def _optimizer_faults(optimizer: OptimizerConfig) -> Iterator[str]:
    """The values of [optimizer] that no torch is needed to refuse."""
    schedule = optimizer.schedule
    if not names_own_code(schedule) and schedule not in RATE_SCHEDULES:
        wrong = UnknownNameError("optimizer.schedule", schedule, RATE_SCHEDULES)
        yield f"{wrong}; your own is module:function or file.py:function"
    for group in optimizer.groups:
        name = f"optimizer.groups with match = {group.match!r}"
        if not group.match:
            yield f"{name} matches nothing; give a pattern such as '*.bias'"
        for key, value in (("rate", group.rate), ("decay", group.decay)):
            if value is not None and not 0 <= value < inf:
                yield f"{name} has {key} = {value:g}; it must be at least 0"
        if group.frozen and (group.rate, group.decay) != (None, None):
            yield f"{name} is frozen, so it can have no rate or decay"


def _training_faults(config: Config) -> Iterator[str]:
    """The values of [lora] and [run] that do not go with others, and names of the user's own code that are none."""
    rank = config.lora.rank
    mesh = config.mesh
    run = config.run
    if rank and not config.model.weights:
        yield f"lora.rank = {rank} trains adapters beside a trained model: name its folder in model.weights"
    if rank and mesh.size > 1:
        yield (
            f"lora.rank = {rank} does not go with mesh.shard = {mesh.shard} and "
            f"mesh.tensor = {mesh.tensor}: use schedule.copies instead"
        )
    named = [("loss", run.loss)] if run.loss else []
    named += [("callbacks", name) for name in run.callbacks]
    for key, name in named:
        if not names_own_code(name):
            yield f"run.{key} = {name!r} is not module:name or file.py:name"
    if run.loss and (run.smoothing or run.z_loss):
        yield "run.loss replaces the cross entropy, so it does not go with run.smoothing and run.z_loss"
    if run.reduction != "sum" and not run.loss:
        yield "run.reduction = mean is for a loss of your own: name it in run.loss"
    for block in run.recomputed_inside if run.recompute else ():
        yield (
            f"run.recompute = true recomputes everything, so run.recompute_{block} = true adds nothing: "
            "set one of them"
        )
    if run.early_stop and not run.evaluate:
        yield f"run.early_stop = {run.early_stop} counts evaluations, but run.evaluate = 0 makes none"


def _option_faults(config: Config) -> Iterator[str]:
    """The options of [run] that contradict other values."""
    reasons = {
        "graphs": reasons_against_recording,
        "compile": reasons_against_compiling,
    }
    for key, reasons_against in reasons.items():
        if getattr(config.run, key) == "true":
            for reason in reasons_against(config):
                yield f"run.{key} = true does not go with {reason}"


def _joining_faults(config: Config) -> Iterator[str]:
    """The options for workers of other machines that would change nothing, or that contradict others."""
    run = config.run
    if not run.listen:
        for key in ("key", "workers"):
            if getattr(run, key):
                yield f"run.{key} is for workers of other machines: set run.listen=HOST:PORT too"
    elif run.elastic == "false":
        yield "run.listen lets workers join, which run.elastic = false does not allow"
    else:
        own = [("optimizer.schedule", config.optimizer.schedule)]
        own += [("run.loss", run.loss)]
        own += [("run.callbacks", name) for name in run.callbacks]
        for key, name in own:
            if own_code_file(name):
                yield (
                    f"{key} = {name} is a file that workers of other machines do not have (run.listen): "
                    "name a module that is installed on all machines"
                )


def _path_faults(config: Config) -> Iterator[str]:
    """The values of [paths] that would change nothing, or that contradict others."""
    paths = config.paths
    data = config.data
    schedule = config.schedule
    searched = schedule.name == AUTO and schedule.skip > 0
    planned = searched or is_plan_file(schedule.name)
    changed = [
        f"paths.{item.name}"
        for item in fields(paths)
        if getattr(paths, item.name) != item.default
    ]
    if not planned and schedule.name not in PARTIAL_SCHEDULES:
        for key in changed:
            yield (
                f"{key} is for schedules that leave out parts, and {schedule.name} leaves out none: "
                "set schedule.name=skip, a plan of `penstock paths`, or schedule.skip with auto"
            )
        return
    uneven = [
        key for key in ("separate", "instructions", "segments") if getattr(data, key)
    ]
    if paths.mean == "visits" and uneven and config.mesh.shard > 1:
        yield (
            f"paths.mean = visits does not go with data.{uneven[0]} and mesh.shard > 1: "
            "shards would weigh their documents differently; set paths.mean=all"
        )
    if planned:
        for key in changed:
            if key in ("paths.share", "paths.swaps", "paths.keep"):
                yield f"{key} is for schedule.name = skip; {schedule.name} has its own paths, so leave it out"
        return
    if paths.share and schedule.skips:
        yield (
            f"paths.share = {paths.share:g} and schedule.skips = {schedule.skips} both say how many "
            "parts are left out: give one of them"
        )
    unknown = [part for part in paths.keep if not 0 <= part < schedule.ranks]
    if unknown:
        yield (
            f"paths.keep names part {unknown[0]}, but the parts of {schedule.ranks} ranks are "
            f"0 to {schedule.ranks - 1}"
        )


def allows_meshes(config: Config) -> bool:
    """Whether the options of a run go with ranks of several processes."""
    return not any(_option_faults(replace(config, mesh=MeshConfig(shard=2))))


def _range_faults(config: Config) -> Iterator[str]:
    """The values that are outside their ranges."""
    for section in fields(config):
        values = getattr(config, section.name)
        for item in fields(values):
            value = getattr(values, item.name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            wanted = _wanted_range(value, item.metadata)
            if wanted:
                shown = f"{value:g}" if isinstance(value, float) else str(value)
                yield f"{section.name}.{item.name} = {shown} must be {wanted}"


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


CHOICES = {
    "model.family": MODEL_FAMILIES,
    "run.precision": PRECISIONS,
    "run.messages": MESSAGE_TYPES,
    "run.device": DEVICES,
    "run.compile": SWITCHES,
    "run.graphs": SWITCHES,
    "run.elastic": SWITCHES,
    "run.reduction": REDUCTIONS,
    "run.mirror": SWITCHES,
    "paths.mean": MEANS,
    "paths.sum_messages": (*MESSAGE_TYPES, AS_PLANNED),
}


def _choice_faults(config: Config) -> Iterator[str]:
    """The values that are not among the known names."""
    for key, known in CHOICES.items():
        value = attrgetter(key)(config)
        if value not in known:
            meant = OTHER_VALUES.get(value.casefold(), "")
            yield str(
                UnknownNameError(key, value, known, meant if meant in known else "")
            )


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


def _schedule_faults(config: Config, counted: bool) -> Iterator[str]:
    """The values of [schedule] that contradict others."""
    schedule = config.schedule
    mesh = config.mesh
    passages = config.passages
    batch = config.data.batch
    processes = schedule.ranks * schedule.copies * mesh.size
    if schedule.is_named and schedule.devices and processes > schedule.devices:
        yield (
            f"schedule.devices = {schedule.devices}, but {schedule.name} needs {processes} "
            f"(ranks {schedule.ranks} x copies {schedule.copies} x mesh {mesh.size}); "
            "set schedule.devices=0, or fewer ranks or copies"
        )
    if schedule.skip and schedule.is_named:
        yield (
            f"schedule.skip = {schedule.skip:g} says what auto may leave out, but "
            f"schedule.name = {schedule.name}; for the schedule skip, set schedule.skips"
        )
    if counted and passages and batch % passages:
        fitting = -(-batch // passages) * passages
        yield (
            f"data.batch = {batch} sequences cannot be dealt out evenly to {passages} "
            f"micro-batches (microbatches {schedule.microbatches} x copies "
            f"{schedule.copies} x shard {mesh.shard} x accumulate "
            f"{config.run.accumulate}); {fitting} can"
        )


def _model_faults(config: Config) -> Iterator[str]:
    """The values of [model] and [data] that contradict others."""
    model = config.model
    data = config.data
    schedule = config.schedule
    written = _written_model(model)
    if model.family == "bert" and schedule.slices > 1:
        yield (
            f"schedule.slices = {schedule.slices} does not go with {written}: the words of an encoder see later "
            "words, so a slice cannot run before the others; set schedule.slices=0"
        )
    if model.family == "bert" and data.instructions:
        yield (
            f"data.instructions = true does not go with {written}: "
            "an encoder guesses masked words and answers nothing"
        )
    # The model of a folder may still turn out to be an encoder.
    if model.family != "bert" and data.segments and not model.folder:
        yield segments_fault(config)
    if data.mixture and data.sources:
        yield "data.sources and data.mixture both name text: give one of them"
    for number, source in enumerate(data.mixture):
        name = f"source {number} of data.mixture"
        if not source.sources:
            yield f"{name} names no files: sources is empty"
        if not (isfinite(source.weight) and source.weight > 0):
            yield f"{name} has weight {source.weight:g}, which must be above 0"
    if model.weights and model.config:
        yield (
            "model.weights and model.config both name a folder; "
            "weights starts from a trained model, config from new weights"
        )
    if model.folder:
        return  # It has its own sizes.
    if model.family in ("gpt", "bert") and 0 < model.positions < data.tokens:
        yield f"data.tokens = {data.tokens} is more than model.positions = {model.positions}"
    layers = sum(schedule.partition)
    if schedule.partition and layers != model.layers:
        yield f"schedule.partition has {layers} layers, but model.layers = {model.layers}"


def segments_fault(config: Config) -> str:
    """Say that only an encoder has segments."""
    model = config.model
    wrong = f"data.segments = {config.data.segments} is for an encoder, but "
    if model.folder:
        return f"{wrong}the model of {_written_model(model)} is a decoder: set data.segments=0"
    return f"{wrong}{_written_model(model)}: set model.family=bert, or data.segments=0"


def _written_model(model: ModelConfig) -> str:
    """The line of a config that says which model it is."""
    if model.folder:
        return f"{model.folder_key} = {model.folder}"
    return f"model.family = {model.family}"


# ---------------------------------------------------------------- how a run computes
def reasons_against_compiling(config: Config) -> list[str]:
    """Return why the stages of a run cannot be compiled; empty if they can."""
    reasons = "layers that are shared by processes are not compiled"
    return [*_changing_calls(config), *_mesh_reason(config, reasons)]


def reasons_against_recording(config: Config) -> list[str]:
    """Return why the actions of a run cannot be recorded as CUDA graphs; empty if they can.

    A graph replays what is the same in every step, on one GPU.
    """
    reasons = _changing_calls(config)
    if config.data.separate:
        reasons.append("data.separate = true: documents differ from step to step")
    elif config.data.apart:
        reasons.append("data.segments > 0: the padding differs from step to step")
    reasons += _mesh_reason(config, "the processes of a mesh talk within an action")
    if config.run.device == "cpu":
        reasons.append("run.device = cpu: a CPU has no graphs")
    return reasons


def _mesh_reason(config: Config, reason: str) -> list[str]:
    mesh = config.mesh
    if mesh.size <= 1:
        return []
    return [f"mesh.shard = {mesh.shard} and mesh.tensor = {mesh.tensor}: {reason}"]


def _changing_calls(config: Config) -> list[str]:
    """Why the calls of a stage are not all alike, which compiling and recording both need."""
    reasons = [
        f"run.recompute_{block} = true: it runs again inside a backward"
        for block in config.run.recomputed_inside
    ]
    if config.drops:
        reasons.insert(0, "dropout, which depends on the step and the micro-batch")
    return reasons


def is_recording(config: Config, on_gpu: bool) -> bool:
    """Whether a run records its actions, if it computes on GPUs or not.

    `auto` records on GPUs, where it was measured to help, if nothing is in its way. Models
    that are not Penstock's own (model.weights, model.config) may read a number back from the
    GPU, which a recording cannot do.
    """
    if config.run.graphs == AUTO:
        own_model = not config.model.folder
        return on_gpu and own_model and not reasons_against_recording(config)
    return config.run.graphs == "true"


def precision_of(config: Config, on_gpu: bool) -> str:
    """Return the type in which a run computes, on GPUs that have bfloat16 or elsewhere."""
    if config.run.precision == AUTO:
        return "bfloat16" if on_gpu else "float32"
    return config.run.precision
