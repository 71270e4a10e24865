"""What a run is told: six sections of plain values, frozen, checked before anything starts.

    [model]      sizes, or a folder to start from          what is trained
    [data]       text, tokenizer, tokens, batch            on what
    [schedule]   name and shape                            in which order
    [mesh]       processes of a rank                       who holds what of a part
    [optimizer]  rates, decay, clipping                    how the weights move
    [run]        steps, seed, precision, when to save      for how long, and where

Each value knows its default, what it is for, and its range: `penstock init` writes that down, and a value outside is
refused by its name. Files and `--set`: `penstock.formats.config_toml`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from penstock.errors import ConfigError, UnknownNameError

Value = TypeVar("Value")
MODEL_FAMILIES = ("llama", "gpt")
PRECISIONS = ("float32", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")
AUTO = "auto"
BYTE_TOKENIZER = "bytes"
PLANS = (".json", ".csv")  # endings of files that hold a schedule


def is_plan_file(name: str) -> bool:
    """Whether schedule.name is a file, which has its own ranks and micro-batches."""
    return Path(name).suffix in PLANS


def names_a_file(tokenizer: str) -> bool:
    """Whether data.tokenizer is a tokenizer.json."""
    return tokenizer not in (AUTO, BYTE_TOKENIZER)


def setting(
    default: Value,
    about: str,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
) -> Value:
    """A field with its default, what it is for, and its range."""
    limits = {"about": about, "least": least, "most": most, "above": above}
    made: Value = field(default=default, metadata=MappingProxyType(limits))
    return made


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of the model; or a Hugging Face folder, which has its own."""

    family: str = setting("llama", "llama or gpt")
    layers: int = setting(8, "layers", least=1, most=10_000)
    width: int = setting(64, "features of the hidden state", least=1)
    heads: int = setting(4, "attention heads; width is a multiple of it", least=1)
    kv_heads: int = setting(
        4, "heads of keys and values (llama); heads is a multiple of it", least=1
    )
    inner: int = setting(176, "features inside the MLP", least=1)
    vocab: int = setting(0, "words; 0: as many as the tokenizer has", least=0)
    positions: int = setting(
        0, "the longest sequence (gpt); 0: as long as data.tokens", least=0
    )
    theta: float = setting(10000.0, "base of the rotary frequencies (llama)", above=0)
    tied: bool = setting(False, "one weight for embedding and output")
    weights: str = setting(
        "",
        "a folder with config.json and *.safetensors to start from; its sizes are taken",
    )


@dataclass(frozen=True, slots=True)
class DataConfig:
    """Text, and how it becomes sequences."""

    sources: tuple[str, ...] = setting(
        (),
        "files or folders: text or .jsonl, also as .gz, .bz2 or .xz; none: Python's own standard library",
    )
    endings: tuple[str, ...] = setting(
        (".txt", ".md", ".py", ".jsonl", ".txt.gz", ".jsonl.gz"),
        "files taken from folders",
    )
    field: str = setting("text", "the field of a JSONL line that holds its text")
    tokenizer: str = setting(
        AUTO,
        "bytes, or a tokenizer.json of Hugging Face's; auto: that of model.weights, else bytes",
    )
    tokens: int = setting(128, "tokens of a sequence", least=2)
    batch: int = setting(
        16,
        "sequences of a step, over all micro-batches, copies, shards and accumulated passes",
        least=1,
    )
    separate: bool = setting(
        False,
        "packed documents apart: a token sees, and guesses, only its own; false: across them",
    )
    held_out: float = setting(
        0.02, "share of the sequences kept for evaluation", least=0, most=0.5
    )
    cache: str = setting(
        "", "folder of the token cache; empty: cache, next to the run's folder"
    )


@dataclass(frozen=True, slots=True)
class ScheduleConfig:
    """Which schedule; 0 leaves a word of the shape out."""

    name: str = setting(AUTO, "auto, a name of `penstock list`, or a plan.json")
    ranks: int = setting(4, "workers of one copy of the pipeline", least=1)
    microbatches: int = setting(8, "micro-batches of one copy, shard and pass", least=1)
    waves: int = setting(0, "waves over the ranks (hanayo)", least=0)
    chunks: int = setting(0, "chunks of the model on a rank (interleaved)", least=0)
    slices: int = setting(0, "token slices of a micro-batch", least=0)
    skips: int = setting(0, "parts each micro-batch leaves out (skip)", least=0)
    copies: int = setting(
        1, "copies of the pipeline side by side (data parallel)", least=1
    )
    split: bool = setting(False, "split each backward into input and weight gradient")
    partition: tuple[int, ...] = setting(
        (), "layers of each part; none: as equal as it goes"
    )


@dataclass(frozen=True, slots=True)
class MeshConfig:
    """A rank of the schedule as several processes: shard x tensor of them."""

    shard: int = setting(
        1,
        "processes that share a rank's weights between steps, on data of their own (FSDP2)",
        least=1,
    )
    tensor: int = setting(
        1,
        "processes that share each layer's heads and features (DTensor); it divides both",
        least=1,
    )

    @property
    def size(self) -> int:
        """Processes of a rank."""
        return self.shard * self.tensor

    def over(self, ranks: int) -> str:
        """All processes of a schedule of so many ranks, in words.

        >>> MeshConfig().over(3), MeshConfig(shard=2, tensor=4).over(3)
        ('3 ranks', '3 ranks x shard 2 x tensor 4 = 24 processes')
        """
        if self.size == 1:
            return f"{ranks} ranks"
        return f"{ranks} ranks x shard {self.shard} x tensor {self.tensor} = {ranks * self.size} processes"


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """AdamW; the rate rises over the warm-up, then falls along a cosine."""

    rate: float = setting(1e-2, "the highest learning rate", above=0)
    final: float = setting(
        0.1, "the last rate, as a share of the highest", least=0, most=1
    )
    warmup: int = setting(20, "steps until the highest rate", least=0)
    beta1: float = setting(0.9, "decay of the mean gradient", least=0, most=0.999999)
    beta2: float = setting(0.95, "decay of the mean square", least=0, most=0.9999999)
    eps: float = setting(1e-8, "added to the root of the mean square", above=0)
    decay: float = setting(
        0.1, "weight decay of matrices; norms and biases have none", least=0
    )
    clip: float = setting(
        1.0, "largest norm of all gradients together; 0: not clipped", least=0
    )


@dataclass(frozen=True, slots=True)
class RunConfig:
    """For how long, and where things go."""

    folder: str = setting("", "of this run; empty: a new one in runs")
    steps: int = setting(200, "optimizer steps", least=1)
    seed: int = setting(0, "of weights and data order", least=0, most=2**63 - 1)
    device: str = setting(AUTO, "auto, cpu or cuda")
    precision: str = setting(
        "float32", "float32, or bfloat16 (autocast; weights stay float32)"
    )
    recompute: bool = setting(
        False,
        "keep only the inputs of stages, and compute the rest again in the backward",
    )
    graphs: bool = setting(
        False,
        "record every action of a stage once and replay it (CUDA graphs; takes more memory)",
    )
    accumulate: int = setting(
        1, "passes through the pipeline whose gradients make one step", least=1
    )
    log: int = setting(10, "steps between two lines", least=1)
    evaluate: int = setting(
        50, "steps between two evaluations; 0: only after the last step", least=0
    )
    evaluations: int = setting(2, "batches of an evaluation", least=1)
    save: int = setting(
        50, "steps between two checkpoints; 0: only at the end", least=0
    )
    keep: int = setting(2, "checkpoints that stay", least=1)
    timed: int = setting(
        50,
        "steps between two measured timelines, and step 3, and the last; 0: none",
        least=0,
    )
    forecast: bool = setting(
        True, "time a layer before the run, and say what a step will take"
    )
    prove: bool = setting(
        True,
        "before the first step, compare every stage as the plan runs it with a plain call of it",
    )
    check_memory: bool = setting(
        True, "refuse to start if the run needs more memory than this machine has"
    )
    restarts: int = setting(
        3,
        "times that a run whose worker died starts again from its checkpoint",
        least=0,
    )
    patience: float = setting(
        300.0, "seconds that a rank may wait for another", above=0
    )
    threads: int = setting(
        0, "CPU threads of a worker; 0: the machine's cores, shared out", least=0
    )


@dataclass(frozen=True, slots=True)
class Config:
    """A whole run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig, kw_only=True)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    run: RunConfig = field(default_factory=RunConfig)

    @property
    def rows(self) -> int:
        """Sequences of one micro-batch."""
        return self.data.batch // self.passages

    @property
    def passages(self) -> int:
        """Micro-batches of a step, over copies, shards and accumulated passes."""
        return (
            self.schedule.microbatches
            * self.schedule.copies
            * self.mesh.shard
            * self.run.accumulate
        )


PRESETS: dict[str, Config] = {
    "tiny": Config(),  # about a minute on two CPU cores
    "llama-150m": Config(
        ModelConfig(layers=12, width=1024, heads=16, kv_heads=4, inner=2752, vocab=0),
        DataConfig(tokens=1024, batch=64),
        ScheduleConfig(ranks=4, microbatches=16),
        OptimizerConfig(rate=6e-4, warmup=200),
        RunConfig(
            steps=10_000,
            precision="bfloat16",
            evaluate=500,
            save=500,
            timed=500,
            log=10,
        ),
    ),
    "llama-1b": Config(
        ModelConfig(
            layers=16,
            width=2048,
            heads=32,
            kv_heads=8,
            inner=8192,
            theta=500_000.0,
            tied=True,
        ),
        DataConfig(tokens=2048, batch=128),
        ScheduleConfig(ranks=8, microbatches=32),
        OptimizerConfig(rate=3e-4, warmup=1000),
        RunConfig(
            steps=100_000,
            precision="bfloat16",
            evaluate=1000,
            save=1000,
            timed=1000,
            log=10,
            recompute=True,
        ),
    ),
    "gpt2": Config(
        ModelConfig(
            family="gpt",
            layers=12,
            width=768,
            heads=12,
            kv_heads=12,
            inner=3072,
            positions=1024,
            tied=True,
        ),
        DataConfig(tokens=1024, batch=64),
        ScheduleConfig(ranks=4, microbatches=16),
        OptimizerConfig(rate=6e-4, warmup=200),
        RunConfig(
            steps=10_000,
            precision="bfloat16",
            evaluate=500,
            save=500,
            timed=500,
            log=10,
        ),
    ),
}


# ---------------------------------------------------------------- checking
def check_config(config: Config, counted: bool = False) -> Config:
    """The same config, or one error with everything that is wrong in it.

    A plan file brings its own micro-batches: until it is read, and they are `counted`, nothing is said about them.
    """
    faults = [
        fault
        for section in fields(config)
        for fault in _ranges(section.name, getattr(config, section.name))
    ]
    faults += _choices(config) + _sizes(
        config, counted or not is_plan_file(config.schedule.name)
    )
    if config.run.graphs:
        faults += [
            f"run.graphs = true does not go with {why}"
            for why in reasons_against_recording(config)
        ]
    if faults:
        raise ConfigError("\n".join(faults))
    return config


def _ranges(section: str, values: object) -> list[str]:
    faults = []
    for item in fields(values):  # type: ignore[arg-type]
        value, limits = getattr(values, item.name), item.metadata
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        words = _outside(value, limits)
        if words:
            faults.append(
                f"{section}.{item.name} = {value:g} must be {words}"
                if isinstance(value, float)
                else f"{section}.{item.name} = {value} must be {words}"
            )
    return faults


def _outside(value: float, limits: Mapping[str, Any]) -> str:
    """The range, in words, if the value is not in it."""
    least, most, above = limits.get("least"), limits.get("most"), limits.get("above")
    if isinstance(value, float) and not isfinite(value):
        return "a finite number"
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        return "between -2^63 and 2^63"
    if least is not None and value < least:
        return f"at least {least:g}"
    if most is not None and value > most:
        return f"at most {most:g}"
    return f"above {above:g}" if above is not None and value <= above else ""


def _choices(config: Config) -> list[str]:
    faults = []
    for kind, value, known in (
        ("model.family", config.model.family, MODEL_FAMILIES),
        ("run.precision", config.run.precision, PRECISIONS),
        ("run.device", config.run.device, DEVICES),
    ):
        if value not in known:
            faults.append(str(UnknownNameError(kind, value, known)))
    return faults


def _sizes(config: Config, counted: bool) -> list[str]:
    """What two values must agree on."""
    model, data, schedule = config.model, config.data, config.schedule
    faults = []
    if counted and data.batch % max(config.passages, 1):
        fit = -(-data.batch // config.passages) * config.passages
        faults.append(
            f"data.batch = {data.batch} sequences do not deal out to {config.passages} micro-batches "
            f"(microbatches {schedule.microbatches} x copies {schedule.copies} x shard {config.mesh.shard} x "
            f"accumulate {config.run.accumulate}); {fit} do"
        )
    if (
        model.family == "gpt"
        and not model.weights
        and 0 < model.positions < data.tokens
    ):
        faults.append(
            f"data.tokens = {data.tokens} is more than model.positions = {model.positions}"
        )
    if (
        schedule.partition
        and not model.weights
        and sum(schedule.partition) != model.layers
    ):
        faults.append(
            f"schedule.partition has {sum(schedule.partition)} layers, but model.layers = {model.layers}"
        )
    return faults


def reasons_against_recording(config: Config) -> list[str]:
    """What of a run cannot be recorded, and why: graphs replay what is the same in every step, on one GPU."""
    others = (
        (
            "data.separate = true",
            config.data.separate,
            "documents differ from step to step",
        ),
        (
            f"mesh.shard = {config.mesh.shard} and mesh.tensor = {config.mesh.tensor}",
            config.mesh.size > 1,
            "the processes of a mesh talk within an action",
        ),
        ("run.device = cpu", config.run.device == "cpu", "a CPU has no graphs"),
    )
    return [f"{name}: {why}" for name, false, why in others if false]
