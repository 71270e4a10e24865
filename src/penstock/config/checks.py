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

from penstock.config.sections import (
    AUTO,
    CHOICES,
    MAX_DEFAULT_MICROBATCHES,
    PARTIAL_SCHEDULES,
    RATE_SCHEDULES,
    Config,
    MeshConfig,
    ScheduleConfig,
    broken_limits,
    is_plan_file,
    names_own_code,
    own_code_file,
)
from penstock.errors import ConfigError, UnknownNameError, nearest_name


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
        sections = {item.name: getattr(config, item.name) for item in fields(config)}
        for it in broken if isinstance(broken, list) else [None] * bool(broken):
            yield self.fault.format(it=it, config=config, **sections)


# ---------------------------------------------------------------- what breaks a rule
def _own_code(config: Config) -> list[tuple[str, str]]:
    """The names of the user's own code in [run], by their keys."""
    run = config.run
    named = [("run.loss", run.loss)] if run.loss else []
    return named + [("run.callbacks", name) for name in run.callbacks]


def _impossible_options(config: Config) -> list[tuple[str, str]]:
    """The options of [run] that contradict other values, and why."""
    reasons = {
        "graphs": reasons_against_recording,
        "compile": reasons_against_compiling,
    }
    return [
        (key, reason)
        for key, reasons_against in reasons.items()
        if getattr(config.run, key) == "true"
        for reason in reasons_against(config)
    ]


def _files_of_own_code(config: Config) -> list[tuple[str, str]]:
    """The names of the user's own code that name a file, by their keys."""
    named = [("optimizer.schedule", config.optimizer.schedule), *_own_code(config)]
    return [(key, name) for key, name in named if own_code_file(name)]


def _has_planned_paths(config: Config) -> bool:
    """Whether paths come from a plan, or from a search that may leave out layers."""
    schedule = config.schedule
    searched = schedule.name == AUTO and schedule.skip > 0
    return searched or is_plan_file(schedule.name)


def _has_paths(config: Config) -> bool:
    """Whether some micro-batches may leave out parts."""
    return config.schedule.name in PARTIAL_SCHEDULES or _has_planned_paths(config)


def _changed_paths(config: Config) -> list[str]:
    """The keys of [paths] that do not have their defaults."""
    return [
        f"paths.{item.name}"
        for item in fields(config.paths)
        if getattr(config.paths, item.name) != item.default
    ]


def _uneven_data(config: Config) -> list[str]:
    """The keys of [data] that give shards documents of different lengths."""
    uneven = ("separate", "instructions", "segments")
    return [key for key in uneven if getattr(config.data, key)]


def _unknown_parts(config: Config) -> list[tuple[int, int]]:
    """The parts of paths.keep that the schedule does not have, each with the last one that it has."""
    last = config.schedule.ranks - 1
    return [(part, last) for part in config.paths.keep if not 0 <= part <= last]


# ---------------------------------------------------------------- the rules
EVEN_BATCH = Rule(
    lambda c: (
        []
        if c.data.batch % (c.passages or 1) == 0
        else [-(-c.data.batch // c.passages) * c.passages]
    ),
    "data.batch = {data.batch} sequences cannot be dealt out evenly to {config.passages} "
    "micro-batches (microbatches {schedule.microbatches} x copies {schedule.copies} x shard {mesh.shard} x accumulate "
    "{run.accumulate}); {it} can",
)
RULES = (
    # ------------------------------------------------ [optimizer]
    Rule(
        lambda c: [one for one in c.optimizer.groups if not one.match],
        "optimizer.groups with match = {it.match!r} matches nothing; give a pattern such as '*.bias'",
    ),
    Rule(
        lambda c: [
            (group.match, key, value)
            for group in c.optimizer.groups
            for key, value in (("rate", group.rate), ("decay", group.decay))
            if value is not None and not 0 <= value < inf
        ],
        "optimizer.groups with match = {it[0]!r} has {it[1]} = {it[2]:g}; it must be at least 0",
    ),
    Rule(
        lambda c: [
            group
            for group in c.optimizer.groups
            if group.frozen and (group.rate, group.decay) != (None, None)
        ],
        "optimizer.groups with match = {it.match!r} is frozen, so it can have no rate or decay",
    ),
    # ------------------------------------------------ [lora] and [run]
    Rule(
        lambda c: c.lora.rank and not c.model.weights,
        "lora.rank = {lora.rank} trains adapters beside a trained model: name its folder in model.weights",
    ),
    Rule(
        lambda c: c.lora.rank and c.mesh.size > 1,
        "lora.rank = {lora.rank} does not go with mesh.shard = {mesh.shard} and "
        "mesh.tensor = {mesh.tensor}: use schedule.copies instead",
    ),
    Rule(
        lambda c: [one for one in _own_code(c) if not names_own_code(one[1])],
        "{it[0]} = {it[1]!r} is not module:name or file.py:name",
    ),
    Rule(
        lambda c: c.run.loss and (c.run.smoothing or c.run.z_loss),
        "run.loss replaces the cross entropy, so it does not go with run.smoothing and run.z_loss",
    ),
    Rule(
        lambda c: c.run.reduction != "sum" and not c.run.loss,
        "run.reduction = mean is for a loss of your own: name it in run.loss",
    ),
    Rule(
        lambda c: [*c.run.recomputed_inside] if c.run.recompute else [],
        "run.recompute = true recomputes everything, so run.recompute_{it} = true adds nothing: set one of them",
    ),
    Rule(
        lambda c: c.run.early_stop and not c.run.evaluate,
        "run.early_stop = {run.early_stop} counts evaluations, but run.evaluate = 0 makes none",
    ),
    # ------------------------------------------------ [schedule]
    Rule(
        lambda c: (
            c.schedule.is_named
            and c.schedule.devices
            and c.processes > c.schedule.devices
        ),
        "schedule.devices = {schedule.devices}, but {schedule.name} needs {config.processes} "
        "(ranks {schedule.ranks} x copies {schedule.copies} x mesh {mesh.size}); "
        "set schedule.devices=0, or fewer ranks or copies",
    ),
    Rule(
        lambda c: c.schedule.skip and c.schedule.is_named,
        "schedule.skip = {schedule.skip:g} says what auto may leave out, but "
        "schedule.name = {schedule.name}; for the schedule skip, set schedule.skips",
    ),
    EVEN_BATCH,
    # ------------------------------------------------ [model] and [data]
    Rule(
        lambda c: c.model.family == "bert" and c.schedule.slices > 1,
        "schedule.slices = {schedule.slices} does not go with {model.written}: the words of an encoder see later "
        "words, so a slice cannot run before the others; set schedule.slices=0",
    ),
    Rule(
        lambda c: c.model.family == "bert" and c.data.instructions,
        "data.instructions = true does not go with {model.written}: "
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
        lambda c: c.data.mixture and c.data.sources,
        "data.sources and data.mixture both name text: give one of them",
    ),
    Rule(
        lambda c: [
            number for number, one in enumerate(c.data.mixture) if not one.sources
        ],
        "source {it} of data.mixture names no files: sources is empty",
    ),
    Rule(
        lambda c: [
            (number, one.weight)
            for number, one in enumerate(c.data.mixture)
            if not (isfinite(one.weight) and one.weight > 0)
        ],
        "source {it[0]} of data.mixture has weight {it[1]:g}, which must be above 0",
    ),
    Rule(
        lambda c: c.model.weights and c.model.config,
        "model.weights and model.config both name a folder; "
        "weights starts from a trained model, config from new weights",
    ),
    Rule(  # The model of a folder has its own sizes.
        lambda c: (
            not c.model.folder
            and c.model.family in ("gpt", "bert")
            and 0 < c.model.positions < c.data.tokens
        ),
        "data.tokens = {data.tokens} is more than model.positions = {model.positions}",
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
        lambda c: [
            key
            for key in ("key", "workers")
            if getattr(c.run, key) and not c.run.listen
        ],
        "run.{it} is for workers of other machines: set run.listen=HOST:PORT too",
    ),
    Rule(
        lambda c: c.run.listen and c.run.elastic == "false",
        "run.listen lets workers join, which run.elastic = false does not allow",
    ),
    Rule(
        lambda c: (
            _files_of_own_code(c) if c.run.listen and c.run.elastic != "false" else []
        ),
        "{it[0]} = {it[1]} is a file that workers of other machines do not have (run.listen): "
        "name a module that is installed on all machines",
    ),
    # ------------------------------------------------ [paths]
    Rule(
        lambda c: [] if _has_paths(c) else _changed_paths(c),
        "{it} is for schedules that leave out parts, and {schedule.name} leaves out none: "
        "set schedule.name=skip, a plan of `penstock paths`, or schedule.skip with auto",
    ),
    Rule(
        lambda c: (
            _uneven_data(c)[:1]
            if _has_paths(c) and c.paths.mean == "visits" and c.mesh.shard > 1
            else []
        ),
        "paths.mean = visits does not go with data.{it} and mesh.shard > 1: "
        "shards would weigh their documents differently; set paths.mean=all",
    ),
    Rule(
        lambda c: [
            key
            for key in _changed_paths(c)
            if _has_planned_paths(c)
            and key in ("paths.share", "paths.swaps", "paths.keep")
        ],
        "{it} is for schedule.name = skip; {schedule.name} has its own paths, so leave it out",
    ),
    Rule(
        lambda c: (
            c.schedule.name in PARTIAL_SCHEDULES and c.paths.share and c.schedule.skips
        ),
        "paths.share = {paths.share:g} and schedule.skips = {schedule.skips} both say how many "
        "parts are left out: give one of them",
    ),
    Rule(
        lambda c: _unknown_parts(c)[:1] if c.schedule.name in PARTIAL_SCHEDULES else [],
        "paths.keep names part {it[0]}, but the parts of {schedule.ranks} ranks are "
        "0 to {it[1]}",
    ),
    Rule(
        lambda c: 0 < c.run.slow <= 1,
        "run.slow = {run.slow:g} would call every worker slow; it must be more than 1, or 0",
    ),
)


def allows_meshes(config: Config) -> bool:
    """Whether the options of a run go with ranks of several processes."""
    return not _impossible_options(replace(config, mesh=MeshConfig(shard=2)))


def _range_faults(config: Config) -> Iterator[str]:
    """The values that are outside their ranges."""
    for section in fields(config):
        values = getattr(config, section.name)
        for item in fields(values):
            value = getattr(values, item.name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            wanted = _wanted_range(value, item.metadata["limits"])
            if wanted:
                shown = f"{value:g}" if isinstance(value, float) else str(value)
                yield f"{section.name}.{item.name} = {shown} must be {wanted}"


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
    schedule = config.optimizer.schedule
    if not names_own_code(schedule) and schedule not in RATE_SCHEDULES:
        wrong = UnknownNameError("optimizer.schedule", schedule, RATE_SCHEDULES)
        yield f"{wrong}; your own is module:function or file.py:function"


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


def segments_fault(config: Config) -> str:
    """Say that only an encoder has segments."""
    model = config.model
    wrong = f"data.segments = {config.data.segments} is for an encoder, but "
    if model.folder:
        return f"{wrong}the model of {model.written} is a decoder: set data.segments=0"
    return f"{wrong}{model.written}: set model.family=bert, or data.segments=0"


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


# ---------------------------------------------------------------- the words of others
# A key that is unknown in its section is looked up in this order:
#
#     the words of others      learning_rate    is optimizer.rate here
#     a name that is near      widht            is width
#     the other sections       model.steps      is run.steps
#
# What transformers, torchtitan, Megatron and DeepSpeed call our settings.
OTHER_WORDS = {
    "hidden_size": "model.width",
    "dim": "model.width",
    "intermediate_size": "model.inner",
    "ffn_hidden_size": "model.inner",
    "num_attention_heads": "model.heads",
    "num_key_value_heads": "model.kv_heads",
    "max_position_embeddings": "model.positions",
    "rope_theta": "model.theta",
    "tie_word_embeddings": "model.tied",
    "model_name_or_path": "model.weights",
    "dataset": "data.sources",
    "batch_size": "data.batch",
    "global_batch_size": "data.batch",
    "train_batch_size": "data.batch",
    "micro_batch_size": "schedule.microbatches",
    "seq_len": "data.tokens",
    "seq_length": "data.tokens",
    "sequence_length": "data.tokens",
    "max_length": "data.tokens",
    "max_seq_length": "data.tokens",
    "packing": "data.separate",
    "pp": "schedule.ranks",
    "stages": "schedule.ranks",
    "dp": "schedule.copies",
    "tp": "mesh.tensor",
    "fsdp": "mesh.shard",
    "lora": "lora.rank",
    "lr": "optimizer.rate",
    "learning_rate": "optimizer.rate",
    "lr_scheduler_type": "optimizer.schedule",
    "min_lr": "optimizer.final",
    "max_grad_norm": "optimizer.clip",
    "gradient_clipping": "optimizer.clip",
    "clip_grad": "optimizer.clip",
    "output_dir": "run.folder",
    "epochs": "run.steps",
    "num_train_epochs": "run.steps",
    "train_iters": "run.steps",
    "dtype": "run.precision",
    "bf16": "run.precision",
    "fp16": "run.precision",
    "gradient_checkpointing": "run.recompute",
    "activation_checkpoint": "run.recompute",
    "gradient_accumulation_steps": "run.accumulate",
    "save_steps": "run.save",
    "save_interval": "run.save",
    "eval_steps": "run.evaluate",
    "eval_interval": "run.evaluate",
    "logging_steps": "run.log",
    "log_interval": "run.log",
    "save_total_limit": "run.keep",
}
# What others call the values of our settings. The nearest name of a gpu would be the cpu.
OTHER_VALUES = {
    "gpu": "cuda",
    "bf16": "bfloat16",
    "fp32": "float32",
}


def find_settings(section: str, key: str) -> tuple[str, ...]:
    """The settings that were probably meant by a key that `section` does not have.

    Those of the same section are returned without its name.

    >>> find_settings("model", "hidden_size"), find_settings("train", "lr")
    (('width',), ('optimizer.rate',))
    >>> find_settings("model", "steps"), find_settings("model", "keep")
    (('run.steps',), ('paths.keep', 'run.keep'))
    >>> find_settings("model", "quantized")
    ()
    """
    known = keys_by_section()
    own_prefix = f"{section}."
    if key.casefold() in OTHER_WORDS:
        return (OTHER_WORDS[key.casefold()].removeprefix(own_prefix),)
    own = nearest_name(key, known.get(section, ()))
    if own:
        return (own,)
    names = sorted({name for keys in known.values() for name in keys})
    near = nearest_name(key, names, letters=4)  # there are many names
    return tuple(f"{place}.{near}" for place, keys in known.items() if near in keys)


def keys_by_section() -> dict[str, list[str]]:
    """The keys of each section."""
    config = Config()
    return {
        section.name: [item.name for item in fields(getattr(config, section.name))]
        for section in fields(config)
    }
