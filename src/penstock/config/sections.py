"""The sections of a config: plain values, each with its default, its meaning and its range.

    [model]      sizes, or a folder to start from          what to train
    [data]       text, tokenizer, tokens, batch            on which text
    [schedule]   name and shape                            in which order
    [paths]      rotation, full steps, warm-up             through which parts, if some are left out
    [mesh]       processes of a rank                       how a rank shares its part
    [optimizer]  rates, decay, clipping                    how the weights move
    [lora]       rank, targets                             which adapters are trained instead of the model
    [run]        steps, seed, precision, when to save      for how long, and where

`penstock init` writes the values into a config file, and a value outside its range is refused
by name. `penstock.formats.config_toml` reads and writes files and `--set`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias, TypeVar

AUTO = "auto"  # the value of settings that Penstock decides itself

# ---------------------------------------------------------------- choices
PARTIAL_SCHEDULES = ("skip",)  # schedule.name: those that leave out parts
# optimizer.schedule, beside the user's own code
RATE_SCHEDULES = ("constant", "linear", "cosine", "wsd", "inverse_sqrt")
AS_PLANNED = "planned"  # paths.sum_messages: the type that the plan was made for
MESSAGE_TYPES = ("float32", "bfloat16", "int8")
SWITCH = (AUTO, "true", "false")  # its values may be written without quotes
CHOICES = {
    "model.family": ("llama", "gpt", "bert"),
    "run.precision": (AUTO, "float32", "bfloat16"),
    "run.messages": MESSAGE_TYPES,
    "run.device": (AUTO, "cpu", "cuda"),
    "run.compile": SWITCH,
    "run.graphs": SWITCH,
    "run.elastic": SWITCH,
    "run.reduction": ("sum", "mean"),
    "run.mirror": SWITCH,
    "paths.mean": ("all", "visits"),
    "paths.sum_messages": (*MESSAGE_TYPES, AS_PLANNED),
}

# ---------------------------------------------------------------- numbers with a meaning
FULL_AS_PLANNED = -1  # paths.full: what the plan's rules say
MAX_DEFAULT_MICROBATCHES = 4096  # of a named schedule whose micro-batches are open

# ---------------------------------------------------------------- optimizer.options
OptionValue: TypeAlias = "str | int | float | bool | tuple[int | float, ...]"
Options: TypeAlias = tuple[tuple[str, OptionValue], ...]  # sorted by name

# ---------------------------------------------------------------- names of files and code
BYTE_TOKENIZER = "bytes"  # data.tokenizer: no file
PLANS = (".json", ".csv")  # schedule.name: suffixes of files that hold a schedule


def is_plan_file(name: str) -> bool:
    """Whether schedule.name is a file, which brings its own ranks and micro-batches."""
    return Path(name).suffix in PLANS


def names_a_file(tokenizer: str) -> bool:
    """Whether data.tokenizer is the path of a tokenizer.json."""
    return tokenizer not in (AUTO, BYTE_TOKENIZER)


def names_own_code(value: str) -> bool:
    """Whether a value names a function or class of the user: module:name or file.py:name."""
    return ":" in value


def own_code_file(value: str) -> str:
    """The file in which a value finds code of the user; empty if it names a module, or no code."""
    source = value.rpartition(":")[0]
    return source if source.endswith(".py") else ""


def file_with_suffix(name: str) -> str:
    """The file that schedule.name is, if it is no name of a schedule."""
    return name if Path(name).suffix else ""


def tokenizer_file(name: str) -> str:
    """The file that data.tokenizer is, if it is no word."""
    return name if names_a_file(name) else ""


# ---------------------------------------------------------------- sections
SettingValue = TypeVar("SettingValue")
# What a number must be, and how it is compared with the limit. NaN is never inside.
LIMITS = {"at least": operator.ge, "above": operator.gt, "at most": operator.le}


def limits_of(
    least: float | None, above: float | None, most: float | None
) -> dict[str, float]:
    """The limits that are given, by the words for them."""
    limits = zip(LIMITS, (least, above, most), strict=True)
    return {words: limit for words, limit in limits if limit is not None}


def broken_limits(value: float, limits: Mapping[str, float]) -> list[str]:
    """The limits that a value breaks, in words."""
    return [
        f"{words} {limit:g}"
        for words, limit in limits.items()
        if not LIMITS[words](value, limit)
    ]


def setting(
    default: SettingValue,
    about: str,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    file: Callable[[str], str] | None = None,
) -> SettingValue:
    """Declare a field with its default, its meaning and its range; `file` says which file a value of it names."""
    facts = {"about": about, "limits": limits_of(least, above, most), "file": file}
    value: SettingValue = field(default=default, metadata=MappingProxyType(facts))
    return value


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The sizes of the model, or a Hugging Face folder that defines them."""

    family: str = setting("llama", "model family: llama, gpt or bert")
    layers: int = setting(8, "number of layers", least=1, most=10_000)
    width: int = setting(64, "features of the hidden state", least=1)
    heads: int = setting(4, "attention heads; they must divide width", least=1)
    kv_heads: int = setting(
        4, "heads of keys and values (llama); they must divide heads", least=1
    )
    inner: int = setting(176, "features inside the MLP", least=1)
    vocab: int = setting(
        0, "size of the vocabulary; 0 takes that of the tokenizer", least=0
    )
    positions: int = setting(
        0, "longest sequence, in tokens (gpt, bert); 0 takes data.tokens", least=0
    )
    theta: float = setting(10000.0, "base of the rotary frequencies (llama)", above=0)
    tied: bool = setting(False, "use one matrix for the embedding and the output")
    dropout: float = setting(
        0.0,
        "share of the results of attention and MLP that is dropped in training (llama, gpt)",
        least=0,
        most=0.95,
    )
    weights: str = setting(
        "",
        "Hugging Face folder to start from (config.json, *.safetensors); its sizes replace those above",
        file=str,
    )
    config: str = setting(
        "",
        "Hugging Face folder whose config.json defines the model; its weights, if any, are not read",
        file=str,
    )

    @property
    def folder(self) -> str:
        """The Hugging Face folder that defines the model; empty if there is none."""
        return self.weights or self.config

    @property
    def folder_key(self) -> str:
        """The key that names this folder."""
        return "model.weights" if self.weights else "model.config"

    @property
    def written(self) -> str:
        """The line of a config that says which model it is."""
        if self.folder:
            return f"{self.folder_key} = {self.folder}"
        return f"model.family = {self.family}"


@dataclass(frozen=True, slots=True)
class MixtureSource:
    """Files or folders that are read with a weight of their own."""

    sources: tuple[str, ...] = ()
    weight: float = 1.0
    name: str = ""  # in reports; empty takes the names of the files


@dataclass(frozen=True, slots=True)
class DataConfig:
    """The text, and how it becomes sequences."""

    sources: tuple[str, ...] = setting(
        (),
        "files or folders: text, .jsonl (also .gz, .bz2, .xz), .parquet, .arrow; empty takes Python's standard library",
        file=str,
    )
    mixture: tuple[MixtureSource, ...] = setting(
        (),
        'instead of sources, several with weights, such as [{sources = ["web"], weight = 3}, {sources = ["code"]}]',
        file=str,
    )
    endings: tuple[str, ...] = setting(
        (
            *(".txt", ".md", ".py", ".jsonl", ".txt.gz", ".jsonl.gz"),
            *(".parquet", ".arrow"),
        ),
        "endings of the files that are read from folders",
    )
    split: str = setting(
        "train", "split to read of a folder that DatasetDict.save_to_disk wrote"
    )
    field: str = setting(
        "text", "field of a JSONL line, or column of a table, that holds the text"
    )
    instructions: bool = setting(
        False,
        "learn answers only: .jsonl or tables with messages, or with prompt and completion",
    )
    template: str = setting(
        "",
        "file with the chat template of messages (Jinja); empty takes the one beside the tokenizer",
        file=str,
    )
    tokenizer: str = setting(
        AUTO,
        "bytes, or the path of a tokenizer.json; auto takes that of model.weights or model.config, or else bytes",
        file=tokenizer_file,
    )
    tokens: int = setting(128, "tokens per sequence", least=2)
    batch: int = setting(
        16,
        "sequences per step, over all micro-batches, copies, shards and accumulated passes",
        least=1,
    )
    separate: bool = setting(
        False,
        "keep packed documents apart: a token attends to and predicts only its own document",
    )
    mask: float = setting(
        0.15,
        "share of the words that an encoder has to guess: 80% of them are masked, 10% are random words, 10% stay",
        above=0,
        most=0.9,
    )
    segments: int = setting(
        0,
        "segments of an encoder's rows: 1 is [CLS] text [SEP], 2 is [CLS] text [SEP] more [SEP], both padded; "
        "0 fills rows with text alone",
        least=0,
        most=2,
    )
    held_out: float = setting(
        0.02,
        "share of the sequences that is held out for evaluation",
        least=0,
        most=0.5,
    )
    validation: tuple[str, ...] = setting(
        (),
        "files or folders that evaluations read instead of held-out sequences",
        file=str,
    )
    cache: str = setting(
        "",
        "folder of the token cache; empty takes the folder cache next to the run's folder",
    )

    @property
    def marked(self) -> bool:
        """Whether rows hold whole conversations or segments, with a mark for every token."""
        return self.instructions or self.segments > 0

    @property
    def apart(self) -> bool:
        """Whether a row has documents, or padding, that do not see each other."""
        return self.separate or self.segments > 0

    @property
    def parts(self) -> tuple[DataConfig, ...]:
        """The data of each source of the mixture; this data if there is no mixture."""
        if not self.mixture:
            return (self,)
        return tuple(
            replace(self, sources=one.sources, mixture=()) for one in self.mixture
        )


@dataclass(frozen=True, slots=True)
class ScheduleConfig:
    """The schedule and its shape; 0 leaves a value to the schedule."""

    name: str = setting(
        AUTO,
        "auto, a name from `penstock list`, or the path of a plan.json",
        file=file_with_suffix,
    )
    devices: int = setting(
        0,
        "processes to divide into copies and ranks; 0 takes ranks x copies",
        least=0,
    )
    ranks: int = setting(
        4,
        "ranks of one copy of the pipeline; 0 lets auto choose, or takes all devices",
        least=0,
    )
    microbatches: int = setting(
        8, "micro-batches per copy, shard and pass; 0 lets auto choose", least=0
    )
    waves: int = setting(0, "waves over the ranks (hanayo)", least=0)
    chunks: int = setting(0, "chunks of the model per rank (interleaved)", least=0)
    slices: int = setting(0, "token slices per micro-batch", least=0)
    skips: int = setting(0, "parts that each micro-batch skips (skip)", least=0)
    skip: float = setting(
        0.0,
        "share of the layers that auto may let each micro-batch leave out; this changes what is computed",
        least=0,
        most=0.9,
    )
    copies: int = setting(
        1, "data-parallel copies of the pipeline; 0 lets auto choose", least=0
    )
    split: bool = setting(
        False, "split each backward into input gradient and weight gradient"
    )
    partition: tuple[int, ...] = setting(
        (), "number of layers of each part; empty makes them as equal as possible"
    )

    @property
    def is_named(self) -> bool:
        """Whether this is a schedule of `penstock list`, neither planned nor read from a file."""
        return self.name != AUTO and not is_plan_file(self.name)


@dataclass(frozen=True, slots=True)
class PathsConfig:
    """Which parts micro-batches visit from step to step, if the schedule leaves out parts."""

    rotate: int = setting(
        0,
        "sets of paths that steps take in turn; 1 keeps one set, 0 takes all sets of the plan",
        least=0,
        most=10_000,
    )
    full: int = setting(
        FULL_AS_PLANNED,
        "every full-th step runs all parts; 0 never does, -1 does what the plan's rules say",
        least=-1,
    )
    warmup: int = setting(0, "steps at the beginning that run all parts", least=0)
    mean: str = setting(
        "all",
        "tokens over which the gradient of a part is a mean: all, or visits, those that visited the part",
    )
    sum_messages: str = setting(
        AS_PLANNED,
        "type in which planned sums of gradients travel: float32, bfloat16, int8 with error feedback, or as planned",
    )
    share: float = setting(
        0.0,
        "share of the parts that each micro-batch leaves out (skip); 0 takes schedule.skips",
        least=0,
        most=0.99,
    )
    swaps: int = setting(
        0, "pairs of neighboring parts that may change places on a path (skip)", least=0
    )
    keep: tuple[int, ...] = setting(
        (), "parts that every micro-batch visits, besides the first one (skip)"
    )


@dataclass(frozen=True, slots=True)
class MeshConfig:
    """How many processes make up a rank of the schedule: shard x tensor."""

    shard: int = setting(
        1,
        "processes that divide a rank's weights between steps and train on different data (FSDP2)",
        least=1,
    )
    tensor: int = setting(
        1,
        "processes that divide each layer's heads and features (DTensor); it must divide both",
        least=1,
    )

    @property
    def size(self) -> int:
        """The number of processes of a rank."""
        return self.shard * self.tensor

    def over(self, ranks: int) -> str:
        """Describe all processes of a schedule with `ranks` ranks.

        >>> MeshConfig().over(3), MeshConfig(shard=2, tensor=4).over(3)
        ('3 ranks', '3 ranks x shard 2 x tensor 4 = 24 processes')
        """
        if self.size == 1:
            return f"{ranks} ranks"
        processes = ranks * self.size
        mesh = f"shard {self.shard} x tensor {self.tensor}"
        return f"{ranks} ranks x {mesh} = {processes} processes"


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Parameters with settings of their own; of several groups that match, the first one counts."""

    match: str  # a pattern for names of parameters, such as "*.bias"
    rate: float | None = None  # None takes optimizer.rate
    decay: float | None = None  # None takes optimizer.decay, for matrices only
    frozen: bool = False


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """An optimizer of torch.optim, and a learning rate that rises during the warm-up and follows a schedule."""

    name: str = setting(
        "AdamW",
        "class of torch.optim: AdamW, Adam, SGD, Adafactor, Muon (AdamW for all but the layers' matrices), and others",
    )
    options: tuple[tuple[str, OptionValue], ...] = setting(
        (),
        "further keyword arguments of the class, such as {momentum = 0.9}",
    )
    groups: tuple[ParameterGroup, ...] = setting(
        (),
        'parameters with their own settings, such as [{match = "*.bias", rate = 1e-3, decay = 0.0, frozen = false}]',
    )
    rate: float = setting(
        0.0,
        "highest learning rate; 0 takes 2e-5 for the weights of model.weights, 1e-4 for adapters, and fresh_rate for "
        "new weights",
        least=0,
    )
    fresh_rate: float = setting(
        1e-2, "highest learning rate of new weights, if rate = 0", above=0
    )
    schedule: str = setting(
        "cosine",
        "course of the rate after the warm-up: constant, linear, cosine, wsd (constant, then linear), inverse_sqrt, "
        "or your own module:function from a step to a factor",
        file=own_code_file,
    )
    final: float = setting(
        0.1, "last learning rate, as a share of the highest", least=0, most=1
    )
    warmup: int = setting(20, "steps until the highest learning rate", least=0)
    cooldown: float = setting(
        0.2, "share of the steps in which wsd lets the rate fall", least=0, most=1
    )
    beta1: float = setting(
        0.9,
        "decay of the running mean of gradients (optimizers with betas)",
        least=0,
        most=0.999999,
    )
    beta2: float = setting(
        0.95,
        "decay of the running mean of squared gradients (optimizers with betas)",
        least=0,
        most=0.9999999,
    )
    eps: float = setting(
        1e-8,
        "added to the root of the mean square, against division by zero (optimizers with betas)",
        above=0,
    )
    decay: float = setting(
        0.1, "weight decay of matrices; norms and biases do not decay", least=0
    )
    clip: float = setting(
        1.0, "largest norm of all gradients together; 0 switches clipping off", least=0
    )

    @property
    def highest_rate(self) -> float:
        """The highest learning rate; that of new weights as long as nobody has looked at what is trained."""
        return self.rate or self.fresh_rate


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Adapters beside the matrices of a model that stays as it is (LoRA, with the library peft)."""

    rank: int = setting(
        0, "columns of the adapters; 0 trains the model itself", least=0
    )
    alpha: float = setting(16.0, "adapters count alpha / rank times", above=0)
    targets: tuple[str, ...] = setting(
        (),
        "ends of the names of adapted matrices, such as q_proj; empty adapts all matrices of the layers",
    )
    dropout: float = setting(
        0.0, "share of the adapters' inputs that is dropped", least=0, most=0.95
    )


@dataclass(frozen=True, slots=True)
class RunConfig:
    """How long a run takes, what it saves, and where it computes."""

    folder: str = setting("", "folder of this run; empty makes a new one in runs")
    steps: int = setting(200, "optimizer steps", least=1)
    seed: int = setting(
        0, "seed of the initial weights and of the data order", least=0, most=2**63 - 1
    )
    device: str = setting(AUTO, "cpu, cuda, or auto: GPUs if there are any")
    precision: str = setting(
        AUTO,
        "float32, bfloat16 (autocast; the weights stay float32), or auto: bfloat16 on GPUs, float32 on CPUs",
    )
    messages: str = setting(
        "float32",
        "type in which hidden states and their gradients travel between ranks: float32; bfloat16, which halves their "
        "bytes and rounds them to 8 bits; or int8, with a quarter of the bytes and a scale for each token",
    )
    recompute: bool = setting(
        False,
        "keep only the inputs of stages and recompute the rest in the backward, to save memory",
    )
    recompute_mlp: bool = setting(
        False,
        "recompute only the MLPs of the layers in the backward (llama, gpt), which saves memory for less time",
    )
    recompute_attention: bool = setting(
        False,
        "recompute only the attention of the layers in the backward (llama, gpt); goes with recompute_mlp",
    )
    graphs: str = setting(
        AUTO,
        "record every action once and replay it in every step (CUDA graphs): true, false, or auto, which is true "
        "on GPUs unless model.weights is given",
    )
    compile: str = setting(
        AUTO,
        "compile layers, head and loss with torch.compile: true, false, or auto, which is true on GPUs; "
        "the first step then waits for the compiler",
    )
    loss_chunk: int = setting(
        2048,
        "tokens whose logits are in memory at a time, if all of them take more than 64 MiB; 0 keeps all in memory",
        least=0,
    )
    loss: str = setting(
        "",
        "your own loss, module:function or file.py:function, of logits and labels; empty takes the cross entropy",
        file=own_code_file,
    )
    reduction: str = setting(
        "sum", "how your own loss combines the losses of its labels: sum or mean"
    )
    smoothing: float = setting(
        0.0,
        "label smoothing: share of each label that is spread over all words",
        least=0,
        most=0.99,
    )
    z_loss: float = setting(
        0.0, "weight of the squared log of the softmax's denominator", least=0
    )
    callbacks: tuple[str, ...] = setting(
        (),
        "your own classes, module:Class or file.py:Class, whose methods are called during the run",
        file=own_code_file,
    )
    early_stop: int = setting(
        0,
        "evaluations in a row without a lower held-out loss after which a run ends with its best weights; 0 never",
        least=0,
    )
    accumulate: int = setting(
        1, "passes through the pipeline per step; their gradients are added up", least=1
    )
    log: int = setting(10, "steps between two lines of the log", least=1)
    evaluate: int = setting(
        50,
        "steps between two evaluations; 0 evaluates only after the last step",
        least=0,
    )
    evaluations: int = setting(2, "batches per evaluation", least=1)
    save: int = setting(
        50, "steps between two checkpoints; 0 saves only at the end", least=0
    )
    keep: int = setting(2, "number of checkpoints to keep", least=1)
    checkpoints: str = setting(
        "",
        "URL to copy checkpoints to, such as s3://bucket/run; a run resumes from there if its folder has none as new",
    )
    timed: int = setting(
        50,
        "steps between two measured timelines, besides step 3 and the last; 0 measures none",
        least=0,
    )
    forecast: bool = setting(
        True, "time a layer before the run and predict the time of a step"
    )
    prove: bool = setting(
        True,
        "check before the first step that every stage computes under the plan what a plain call does",
    )
    compare: int = setting(
        100,
        "steps between two comparisons of what the ranks have read, besides the first step; 0 compares only there",
        least=0,
    )
    check_memory: bool = setting(
        True, "refuse to start if the run needs more memory than this machine has"
    )
    elastic: str = setting(
        AUTO,
        "go on without a worker that is lost: true, false, or auto, which is true for CPU workers of which "
        "no one holds a part alone",
    )
    listen: str = setting(
        "",
        "HOST:PORT of this machine at which workers of other machines join with the run's key (penstock join), over "
        "encrypted connections; worker n of this machine takes PORT + 1 + n; empty lets nobody join",
    )
    key: str = setting(
        "",
        "file with the key that workers of other machines need; empty makes key.pem in the run's folder",
        file=str,
    )
    workers: int = setting(
        0,
        "workers that this machine starts, if others join; 0 starts one for every rank",
        least=0,
    )
    mirror: str = setting(
        AUTO,
        "keep a second copy of each part that only one worker holds in the memory of another worker, so that no loss "
        "needs a checkpoint: true (which makes a run elastic), false, or auto, which is true if a run is elastic",
    )
    slow: float = setting(
        0.0,
        "an elastic run gives less work to a worker that takes this many times as long for it as it used to, such as "
        "2.0; 0 switches this off",
        least=0,
    )
    silence: float = setting(
        15.0,
        "seconds without a sign of life after which an elastic run goes on without a worker",
        above=0,
    )
    restarts: int = setting(
        3,
        "how often a run restarts from its checkpoint after a worker has died, or replaces a worker if it is elastic",
        least=0,
    )
    patience: float = setting(
        300.0, "seconds that a rank may wait for another one", above=0
    )
    threads: int = setting(
        0,
        "CPU threads per worker; 0 divides the machine's cores among the workers",
        least=0,
    )

    @property
    def recomputed_inside(self) -> tuple[str, ...]:
        """What is recomputed inside of layers: "attention", "mlp", both or nothing."""
        chosen = {"attention": self.recompute_attention, "mlp": self.recompute_mlp}
        return tuple(block for block, wanted in chosen.items() if wanted)


@dataclass(frozen=True, slots=True)
class Config:
    """A whole run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    paths: PathsConfig = field(default_factory=PathsConfig, kw_only=True)
    mesh: MeshConfig = field(default_factory=MeshConfig, kw_only=True)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig, kw_only=True)
    run: RunConfig = field(default_factory=RunConfig)

    @property
    def drops(self) -> bool:
        """Whether a run trains with dropout."""
        return self.model.dropout > 0 or (self.lora.rank > 0 and self.lora.dropout > 0)

    @property
    def processes(self) -> int:
        """The processes of all ranks and copies."""
        return self.schedule.ranks * self.schedule.copies * self.mesh.size

    @property
    def rows(self) -> int:
        """Sequences per micro-batch."""
        return self.data.batch // self.passages

    @property
    def passages(self) -> int:
        """Micro-batches per step, over copies, shards and accumulated passes."""
        return (
            self.schedule.microbatches
            * self.schedule.copies
            * self.mesh.shard
            * self.run.accumulate
        )


# ---------------------------------------------------------------- presets
def _on_devices(count: int) -> ScheduleConfig:
    """Everything about the schedule is left to auto."""
    return ScheduleConfig(devices=count, ranks=0, microbatches=0, copies=0)


def _long_run(steps: int, every: int) -> RunConfig:
    """A run that is evaluated, saved and timed now and then."""
    return RunConfig(
        steps=steps,
        precision="bfloat16",
        evaluate=every,
        save=every,
        timed=every,
        log=10,
    )


PRESETS: dict[str, Config] = {
    # About a minute on two CPU cores.
    "tiny": Config(schedule=ScheduleConfig(microbatches=0)),
    "llama-150m": Config(
        ModelConfig(layers=12, width=1024, heads=16, kv_heads=4, inner=2752, vocab=0),
        DataConfig(tokens=1024, batch=64),
        _on_devices(4),
        OptimizerConfig(fresh_rate=6e-4, warmup=200),
        _long_run(10_000, every=500),
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
        _on_devices(8),
        OptimizerConfig(fresh_rate=3e-4, warmup=1000),
        _long_run(100_000, every=1000),
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
        _on_devices(4),
        OptimizerConfig(fresh_rate=6e-4, warmup=200),
        _long_run(10_000, every=500),
    ),
    "bert-base": Config(
        ModelConfig(
            family="bert",
            layers=12,
            width=768,
            heads=12,
            kv_heads=12,
            inner=3072,
            positions=512,
            tied=True,
        ),
        DataConfig(tokens=512, batch=256),
        _on_devices(4),
        OptimizerConfig(fresh_rate=1e-4, warmup=1000),
        _long_run(100_000, every=1000),
    ),
}
