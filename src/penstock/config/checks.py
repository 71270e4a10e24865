"""What is wrong with the values of a config: ranges, choices, and values that contradict each other.

config ──► check_config ──┬── the same config, with the open values of a named schedule settled
                          └── ConfigError: every fault on a line of its own
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from math import inf, isfinite
from operator import attrgetter
from typing import NamedTuple

from penstock.config.names import OTHER_VALUES
from penstock.config.sections import (
    AUTO,
    CHECKS,
    CHOICES,
    FORMATS,
    MAX_DEFAULT_MICROBATCHES,
    MODES,
    PARTIAL_SCHEDULES,
    RATE_SCHEDULES,
    SECTIONS,
    Config,
    ParallelConfig,
    broken_limits,
    is_plan_file,
    names_own_code,
    own_code_file,
)
from penstock.errors import ConfigError, ShapeError, UnknownNameError
from penstock.shaped import Shape, split_name


def check_config(config: Config, counted: bool = False) -> Config:
    """Return the config, or raise one error that lists all of its faults.

    A plan file brings its own micro-batches, and auto may choose them. Their number is
    not checked until the plan is known, which the caller says with `counted`. A named
    schedule gets numbers for the values that the config leaves open.
    """
    config = _settle_named(config)
    counted = counted or config.schedule.is_named
    faults = [*_range_faults(config), *_choice_faults(config)]
    for rule in RULES:
        if counted or rule is not EVEN_BATCH:
            faults += rule.faults(config)
    if faults:
        raise ConfigError("\n".join(faults))
    return config


class Rule(NamedTuple):
    """What values of a config must not say together.

    `broken` is true for a config that breaks the rule, or lists what breaks it: the fault is then said of each, as
    `it`. In the fault, {run.steps} stands for a value of the config.
    """

    broken: Callable[[Config], object]
    fault: str

    def faults(self, config: Config) -> Iterator[str]:
        """The faults of a config by this rule."""
        broken = self.broken(config)
        sections = {name: getattr(config, name) for name in SECTIONS}
        for it in broken if isinstance(broken, list) else [None] * bool(broken):
            yield self.fault.format(it=it, config=config, **sections)


# ---------------------------------------------------------------- what breaks a rule
def _own_code(config: Config) -> list[tuple[str, str]]:
    """The names of the user's own code in [run], by their keys."""
    run = config.run
    named = [("run.loss", run.own_loss)] if run.own_loss else []
    return named + [("run.callbacks", name) for name in run.callbacks]


def _impossible_options(config: Config) -> list[tuple[str, str]]:
    """The options of [run] that contradict other values, and why."""
    reasons = {
        "cuda_graphs": reasons_against_recording,
        "compile": reasons_against_compiling,
    }
    return [
        (key, reason)
        for key, reasons_against in reasons.items()
        if getattr(config.run, key) == "true"
        for reason in reasons_against(config)
    ]


def _wrong_shapes(config: Config) -> list[tuple[str, str, str]]:
    """The settings whose shape makes no sense, with what is wrong."""
    shapes: dict[str, Callable[[Config], Shape]] = {
        "run.loss": lambda c: c.run.cross_entropy,
        "schedule.name": lambda c: {"skip": c.schedule.skip, "share": c.paths.share},
    }
    if not config.optimizer.own_schedule:
        shapes["optimizer.lr_schedule"] = lambda c: c.optimizer.rate_shape
    wrong = []
    for key, read in shapes.items():
        try:
            out = [part for part, value in read(config).items() if not 0 <= value <= 1]
            reason = f"{out[0]} must be from 0 to 1" if out else ""
        except ShapeError as error:
            reason = str(error)
        if reason:
            wrong.append((key, attrgetter(key)(config), reason))
    return wrong


def _files_of_own_code(config: Config) -> list[tuple[str, str]]:
    """The names of the user's own code that name a file, by their keys."""
    named = [
        ("optimizer.lr_schedule", config.optimizer.lr_schedule),
        *_own_code(config),
    ]
    return [(key, name) for key, name in named if own_code_file(name)]


def _has_planned_paths(config: Config) -> bool:
    """Whether paths come from a plan, or from a search that may leave out layers."""
    schedule = config.schedule
    searched = schedule.kind == AUTO and schedule.skip > 0
    return searched or is_plan_file(schedule.name)


def _has_paths(config: Config) -> bool:
    """Whether some micro-batches may leave out parts."""
    return config.schedule.kind in PARTIAL_SCHEDULES or _has_planned_paths(config)


def _changed_paths(config: Config) -> list[str]:
    """The words about paths in schedule.name, besides what auto may leave out."""
    return [word for word in config.schedule.path_shape if word != "skip"]


def _unknown_parts(config: Config) -> list[tuple[int, int]]:
    """The parts in `keep` that the schedule does not have, each with the last one that it has."""
    last = config.parallel.pp - 1
    return [(part, last) for part in config.paths.keep if not 0 <= part <= last]


# ---------------------------------------------------------------- the rules
EVEN_BATCH = Rule(
    lambda c: (
        []
        if c.data.global_batch % (c.passages or 1) == 0
        else [-(-c.data.global_batch // c.passages) * c.passages]
    ),
    "data.global_batch = {data.global_batch} is not divisible by {config.passages}: schedule.microbatches "
    "{schedule.microbatches} x parallel.dp_replicate {parallel.dp_replicate} x parallel.dp_shard "
    "{parallel.dp_shard} x run.accumulate {run.accumulate}; {it} is",
)
RULES = (
    # ------------------------------------------------ [optimizer]
    Rule(
        lambda c: (
            len(c.optimizer.betas) != 2
            or not all(0 <= beta < 1 for beta in c.optimizer.betas)
        ),
        "optimizer.betas = {optimizer.betas} must be two numbers of at least 0 and below 1",
    ),
    Rule(
        lambda c: [one for one in c.optimizer.groups if not one.match],
        "optimizer.groups with match = {it.match!r} matches nothing; give a pattern such as '*.bias'",
    ),
    Rule(
        lambda c: [
            (group.match, key, value)
            for group in c.optimizer.groups
            for key, value in (("lr", group.lr), ("weight_decay", group.weight_decay))
            if value is not None and not 0 <= value < inf
        ],
        "optimizer.groups with match = {it[0]!r} has {it[1]} = {it[2]:g}; it must be at least 0",
    ),
    Rule(
        lambda c: [
            group
            for group in c.optimizer.groups
            if group.frozen and (group.lr, group.weight_decay) != (None, None)
        ],
        "optimizer.groups with match = {it.match!r} is frozen, so it can have no lr or weight_decay",
    ),
    # ------------------------------------------------ [lora] and [run]
    Rule(
        lambda c: c.lora.rank and not c.model.weights,
        "lora.rank = {lora.rank} trains adapters beside a trained model: name its folder in model.path",
    ),
    Rule(
        lambda c: c.lora.rank and c.parallel.size > 1,
        "lora.rank = {lora.rank} does not go with parallel.dp_shard = {parallel.dp_shard} and "
        "parallel.tp = {parallel.tp}: use parallel.dp_replicate instead",
    ),
    Rule(
        lambda c: [one for one in _own_code(c) if not names_own_code(one[1])],
        "{it[0]} = {it[1]!r} is not module:name or file.py:name",
    ),
    Rule(
        lambda c: sorted({*c.run.checks.split(",")} - {*CHECKS, "none"}),
        "run.checks has {it!r}; there are forecast, gradients and memory, and none",
    ),
    Rule(_wrong_shapes, "{it[0]} = {it[1]}: {it[2]}"),
    Rule(
        lambda c: c.run.early_stop and not c.run.eval_every,
        "run.early_stop = {run.early_stop} counts evaluations, but run.eval_every = 0 makes none",
    ),
    # ------------------------------------------------ [schedule]
    Rule(
        lambda c: (
            c.schedule.is_named
            and c.parallel.devices
            and c.processes > c.parallel.devices
        ),
        "parallel.devices = {parallel.devices}, but {schedule.name} needs {config.processes} "
        "(pp {parallel.pp} x dp_replicate {parallel.dp_replicate} x dp_shard {parallel.dp_shard} x tp {parallel.tp}); "
        "set parallel.devices=0, or a smaller pp or dp_replicate",
    ),
    Rule(
        lambda c: c.schedule.skip and c.schedule.kind != AUTO,
        "schedule.name = {schedule.name}: skip says what auto may leave out; for the schedule skip, write "
        "skip:share=0.25 or skip:skips=1",
    ),
    EVEN_BATCH,
    # ------------------------------------------------ [model] and [data]
    Rule(
        lambda c: c.model.family == "bert" and "slices=" in c.schedule.name,
        "schedule.name = {schedule.name} does not go with {model.written}: the words of an encoder see later "
        "words, so a slice cannot run before the others; leave slices out",
    ),
    Rule(
        lambda c: c.model.family == "bert" and c.data.instructions,
        "data.format = {data.format} does not go with {model.written}: "
        "an encoder guesses masked words and answers nothing",
    ),
    Rule(  # The model of a folder may still turn out to be an encoder.
        lambda c: (
            [segments_fault(c)]
            if c.model.family != "bert" and c.data.segments and not c.model.folder
            else []
        ),
        "{it}",
    ),
    Rule(
        lambda c: [
            number for number, one in enumerate(c.data.mixture) if not one.files
        ],
        "table {it} of data.sources names no files: files is empty",
    ),
    Rule(
        lambda c: [
            (number, one.weight)
            for number, one in enumerate(c.data.mixture)
            if not (isfinite(one.weight) and one.weight > 0)
        ],
        "table {it[0]} of data.sources has weight {it[1]:g}, which must be above 0",
    ),
    Rule(
        lambda c: (
            [sum(c.schedule.partition)]
            if not c.model.folder
            and c.schedule.partition
            and sum(c.schedule.partition) != c.model.layers
            else []
        ),
        "schedule.partition has {it} layers, but model.layers = {model.layers}",
    ),
    # ------------------------------------------------ how a run computes, and workers of other machines
    Rule(_impossible_options, "run.{it[0]} = true does not go with {it[1]}"),
    Rule(
        lambda c: c.elastic.workers and not c.elastic.listen,
        "elastic.workers is for workers of other machines: set elastic.listen=HOST:PORT too",
    ),
    Rule(
        lambda c: c.elastic.listen and c.elastic.named == "off",
        "elastic.listen lets workers join, which elastic.mode = off does not allow",
    ),
    Rule(
        lambda c: (
            _files_of_own_code(c)
            if c.elastic.listen and c.elastic.named != "off"
            else []
        ),
        "{it[0]} = {it[1]} is a file that workers of other machines do not have (elastic.listen): "
        "name a module that is installed on all machines",
    ),
    # ------------------------------------------------ paths that leave out parts
    Rule(
        lambda c: [
            word
            for word, value in c.schedule.path_shape.items()
            if isinstance(value, int) and value < (-1 if word == "full" else 0)
        ],
        "{it} in schedule.name = {schedule.name} must be at least 0",
    ),
    Rule(
        lambda c: [] if _has_paths(c) else _changed_paths(c),
        "{it} in schedule.name = {schedule.name} is for schedules that leave out parts, and this one leaves out none: "
        "take skip, a plan of `penstock lab paths`, or auto:skip=0.25",
    ),
    Rule(
        lambda c: [
            word
            for word in _changed_paths(c)
            if _has_planned_paths(c) and word in ("share", "swaps", "keep")
        ],
        "{it} in schedule.name is for skip; {schedule.kind} has its own paths, so leave it out",
    ),
    Rule(
        lambda c: (
            c.schedule.kind in PARTIAL_SCHEDULES
            and c.paths.share
            and "skips=" in c.schedule.own_name
        ),
        "schedule.name = {schedule.name}: share and skips both say how many parts are left out; give one of them",
    ),
    Rule(
        lambda c: _unknown_parts(c)[:1] if c.schedule.kind in PARTIAL_SCHEDULES else [],
        "keep in schedule.name names part {it[0]}, but the parts of {parallel.pp} ranks are 0 to {it[1]}",
    ),
    Rule(
        lambda c: c.elastic.named in MODES and 0 < c.elastic.slow <= 1,
        "elastic.mode = {elastic.mode} would call every worker slow; give more than 1",
    ),
)


def allows_meshes(config: Config) -> bool:
    """Whether the options of a run go with ranks of several processes."""
    return not _impossible_options(replace(config, parallel=ParallelConfig(dp_shard=2)))


def _range_faults(config: Config) -> Iterator[str]:
    """The values that are outside their ranges."""
    for section in SECTIONS:
        values = getattr(config, section)
        for item in fields(values):
            value = getattr(values, item.name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            wanted = _wanted_range(value, item.metadata["limits"])
            if wanted:
                shown = f"{value:g}" if isinstance(value, float) else str(value)
                yield f"{section}.{item.name} = {shown} must be {wanted}"


def _wanted_range(value: float, limits: Mapping[str, float]) -> str:
    """The range that a value violates, in words; empty if it is inside."""
    if isinstance(value, float) and not isfinite(value):
        return "a finite number"
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        return "between -2^63 and 2^63"
    return next(iter(broken_limits(value, limits)), "")


def _choice_faults(config: Config) -> Iterator[str]:
    """The values that are not among the known names."""
    for key, known in CHOICES.items():
        value = attrgetter(key)(config)
        if value not in known:
            meant = OTHER_VALUES.get(value.casefold(), "")
            yield str(
                UnknownNameError(key, value, known, meant if meant in known else "")
            )
    if split_name(config.data.format)[0] not in FORMATS:
        yield str(UnknownNameError("data.format", config.data.format, FORMATS))
    if config.data.segments not in (0, 1, 2):
        yield f"data.format = {config.data.format}: segments must be 1 or 2"
    if config.elastic.named not in MODES:
        yield str(UnknownNameError("elastic.mode", config.elastic.mode, MODES))
    schedule = config.optimizer.lr_schedule
    if config.optimizer.own_schedule and not names_own_code(schedule):
        wrong = UnknownNameError("optimizer.lr_schedule", schedule, RATE_SCHEDULES)
        yield f"{wrong}; your own is module:function or file.py:function"


def _settle_named(config: Config) -> Config:
    """Return the config with numbers in place of what a named schedule leaves open.

    Only auto chooses these numbers by their times. A named schedule takes all devices as
    ranks of one copy, and about twice as many micro-batches as ranks.
    """
    schedule = config.schedule
    if not schedule.is_named:
        return config
    parallel = config.parallel
    copies = parallel.dp_replicate or 1
    default = parallel.devices // (copies * max(1, config.parallel.size))
    ranks = parallel.pp or default or ParallelConfig().pp
    microbatches = schedule.microbatches
    if not microbatches:
        passes = copies * max(1, config.parallel.dp_shard * config.run.accumulate)
        share = max(1, config.data.global_batch // passes)
        most = min(2 * ranks, share, MAX_DEFAULT_MICROBATCHES)
        fitting = [one for one in range(1, most + 1) if share % one == 0]
        microbatches = max(fitting, default=1)
    return replace(
        config,
        schedule=replace(schedule, microbatches=microbatches),
        parallel=replace(parallel, pp=ranks, dp_replicate=copies),
    )


def segments_fault(config: Config) -> str:
    """Say that only an encoder has segments."""
    model = config.model
    wrong = f"data.format = {config.data.format} is for an encoder, but "
    if model.folder:
        return f"{wrong}the model of {model.written} is a decoder: set data.format=text"
    return f"{wrong}{model.written}: set model.family=bert, or data.format=text"


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
    if config.data.document_mask:
        reasons.append("data.document_mask = true: documents differ from step to step")
    elif config.data.apart:
        reasons.append(
            f"data.format = {config.data.format}: the padding differs from step to step"
        )
    reasons += _mesh_reason(config, "the processes of a mesh talk within an action")
    if config.run.device == "cpu":
        reasons.append("run.device = cpu: a CPU has no graphs")
    return reasons


def _mesh_reason(config: Config, reason: str) -> list[str]:
    mesh = config.parallel
    if mesh.size <= 1:
        return []
    return [
        f"parallel.dp_shard = {mesh.dp_shard} and parallel.tp = {mesh.tp}: {reason}"
    ]


def _changing_calls(config: Config) -> list[str]:
    """Why the calls of a stage are not all alike, which compiling and recording both need."""
    reasons = [
        f"run.recompute = {config.run.recompute}: the {block} runs again inside a backward"
        for block in config.run.recomputed_inside
    ]
    if config.drops:
        reasons.insert(0, "dropout, which depends on the step and the micro-batch")
    return reasons


def is_recording(config: Config, on_gpu: bool) -> bool:
    """Whether a run records its actions, if it computes on GPUs or not.

    `auto` records on GPUs, where it was measured to help, if nothing is in its way. Models
    that are not Penstock's own (model.path) may read a number back from the
    GPU, which a recording cannot do.
    """
    if config.run.cuda_graphs == AUTO:
        own_model = not config.model.folder
        return on_gpu and own_model and not reasons_against_recording(config)
    return config.run.cuda_graphs == "true"


def precision_of(config: Config, on_gpu: bool) -> str:
    """Return the type in which a run computes, on GPUs that have bfloat16 or elsewhere."""
    if config.run.precision == AUTO:
        return "bfloat16" if on_gpu else "float32"
    return config.run.precision
