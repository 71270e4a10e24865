"""The sections of a config: plain values, each with its default, its meaning and its range.

    [model]      sizes, or a folder to start from          what to train
    [data]       text, tokenizer, lengths                  on which text
    [parallel]   pp, tp, dp_replicate, dp_shard            on how many devices
    [schedule]   name and shape                            in which order
    [optimizer]  learning rate, decay, clipping            how the weights move
    [lora]       rank, targets                             which adapters are trained instead of the model
    [run]        steps, seed, precision, when to save      for how long, and where
    [elastic]    restarts, workers of other machines       what happens when workers are lost or join

`penstock init` writes the values into a config file, and a value outside its range is refused
by name. `penstock.formats.config_toml` reads and writes files and `--set`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias, TypeVar

from penstock.shaped import Shape, read_shape, split_name

AUTO = "auto"  # the value of settings that Penstock decides itself

# ---------------------------------------------------------------- choices
PARTIAL_SCHEDULES = ("skip",)  # schedule.name: those that leave out parts
# optimizer.lr_schedule, beside the user's own code, with the shape that they have if nothing is said
RATE_SCHEDULES: dict[str, Shape] = {
    "constant": {},
    "linear": {"min": 0.1},
    "cosine": {"min": 0.1},
    "wsd": {"cooldown": 0.2, "min": 0.1},
    "inverse_sqrt": {"min": 0.1},
}
DEFAULT_PRESET = "tiny"
# The learning rate of new weights.
PRESET_RATES = {
    DEFAULT_PRESET: 1e-2,
    "llama-150m": 6e-4,
    "llama-1b": 3e-4,
    "gpt2": 6e-4,
    "bert-base": 1e-4,
}
INSIDE = ("attention", "mlp")  # run.recompute: what layers may recompute
CHECKS = ("forecast", "gradients", "memory")  # run.checks
LOSS_CHUNK = 2048  # tokens whose logits are in memory at a time, if all of them take more than 64 MiB
CROSS_ENTROPY = "cross_entropy"  # run.loss
FORMATS = ("text", "chat")  # data.format
LOSS_SHAPE = {"smoothing": float, "z": float}
MESSAGE_TYPES = ("float32", "bfloat16", "int8")
MODES = (AUTO, "on", "off")  # elastic.mode
SWITCH = (AUTO, "true", "false")  # its values may be written without quotes
CHOICES = {
    "model.family": ("llama", "gpt", "bert"),
    "run.precision": (AUTO, "float32", "bfloat16"),
    "run.comm_dtype": MESSAGE_TYPES,
    "run.device": (AUTO, "cpu", "cuda"),
    "run.compile": SWITCH,
    "run.cuda_graphs": SWITCH,
    "run.recompute": ("none", *INSIDE, "mlp,attention", "full"),
}

# ---------------------------------------------------------------- numbers with a meaning
FULL_AS_PLANNED = -1  # every so many steps run all parts: what the plan's rules say
# What a schedule.name may say about paths that leave out parts; keep=1+2 names parts.
PATH_WORDS = {
    **{"skip": float, "share": float, "swaps": int, "keep": str},
    **{"rotate": int, "warmup": int, "full": int},
}
MAX_DEFAULT_MICROBATCHES = 4096  # of a named schedule whose micro-batches are open

# ---------------------------------------------------------------- optimizer.options
OptionValue: TypeAlias = "str | int | float | bool | tuple[int | float, ...]"
Options: TypeAlias = tuple[tuple[str, OptionValue], ...]  # sorted by name

# ---------------------------------------------------------------- names of files and code
CONFIG_JSON = (
    "config.json"  # model.path: new weights for the model that this file describes
)
TRAINED_TOKENIZER = "bpe"  # data.tokenizer: byte pairs, trained on the text of the run
DEFAULT_WORDS = 8192
BYTE_TOKENIZER = "bytes"  # data.tokenizer: no file
PLANS = (".json", ".csv")  # schedule.name: suffixes of files that hold a schedule


def is_plan_file(name: str) -> bool:
    """Whether schedule.name is a file, which brings its own ranks and micro-batches."""
    return Path(split_name(name)[0]).suffix in PLANS


def _word(item: str) -> str:
    """The key of an item of a shape."""
    return item.partition("=")[0].strip()


def names_a_file(tokenizer: str) -> bool:
    """Whether data.tokenizer is the path of a tokenizer.json."""
    return tokenizer not in (AUTO, BYTE_TOKENIZER) and not trained_words(tokenizer)


def trained_words(tokenizer: str) -> int:
    """The words of a data.tokenizer that is to be trained, such as bpe:16000; 0 for any other."""
    name, text = split_name(tokenizer)
    shape = read_shape(name, text, {"words": int}) if name == TRAINED_TOKENIZER else {}
    return int(shape.get("words", DEFAULT_WORDS)) if name == TRAINED_TOKENIZER else 0


def names_own_code(value: str) -> bool:
    """Whether a value names a function or class of the user: module:name or file.py:name."""
    return ":" in value


def own_code_file(value: str) -> str:
    """The file in which a value finds code of the user; empty if it names a module, or no code."""
    source = value.rpartition(":")[0]
    return source if source.endswith(".py") else ""


def file_with_suffix(name: str) -> str:
    """The file that schedule.name is, if it is no name of a schedule."""
    file = split_name(name)[0]
    return file if Path(file).suffix else ""


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
    hidden_size: int = setting(64, "features of the hidden state", least=1)
    heads: int = setting(4, "attention heads; they must divide hidden_size", least=1)
    kv_heads: int = setting(
        4, "heads of keys and values (llama); they must divide heads", least=1
    )
    intermediate_size: int = setting(176, "features inside the MLP", least=1)
    vocab_size: int = setting(
        0, "size of the vocabulary; 0 takes that of the tokenizer", least=0
    )
    rope_theta: float = setting(
        10000.0, "base of the rotary frequencies (llama)", above=0
    )
    tie_embeddings: bool = setting(
        False, "use one matrix for the embedding and the output"
    )
    dropout: float = setting(
        0.0,
        "share of the results of attention and MLP that is dropped in training (llama, gpt)",
        least=0,
        most=0.95,
    )
    path: str = setting(
        "",
        "Hugging Face folder to start from (config.json, *.safetensors), or a config.json alone, for new weights; its "
        "sizes replace those above",
        file=str,
    )

    @property
    def weights(self) -> str:
        """The folder whose weights a run starts from; empty for new weights."""
        return "" if self.path.endswith(CONFIG_JSON) else self.path

    @property
    def folder(self) -> str:
        """The Hugging Face folder that defines the model; empty if there is none."""
        new = self.path.endswith(CONFIG_JSON)
        return str(Path(self.path).parent) if new else self.path

    @property
    def positions(self) -> int:
        """The longest sequence; 0, because it is that of the data."""
        return 0

    @property
    def written(self) -> str:
        """The line of a config that says which model it is."""
        return (
            f"model.path = {self.path}"
            if self.path
            else f"model.family = {self.family}"
        )


@dataclass(frozen=True, slots=True)
class MixtureSource:
    """Files or folders that are read with a weight of their own."""

    files: tuple[str, ...] = ()
    weight: float = 1.0
    name: str = ""  # in reports; empty takes the names of the files


@dataclass(frozen=True, slots=True)
class DataConfig:
    """The text, and how it becomes sequences."""

    sources: tuple[str | MixtureSource, ...] = setting(
        (),
        "files, folders or patterns (web/*.md): text, .jsonl (also .gz, .bz2, .xz), .parquet, .arrow; empty takes "
        'Python\'s standard library; tables have weights: [{files = ["web"], weight = 3}, {files = ["code"]}]',
        file=str,
    )
    text_field: str = setting(
        "text", "field of a JSONL line, or column of a table, that holds the text"
    )
    tokenizer: str = setting(
        AUTO,
        "bytes, the path of a tokenizer.json, or bpe:16000, which trains byte pairs on the text once; auto "
        "takes that of model.path, or else bytes",
        file=tokenizer_file,
    )
    seq_len: int = setting(128, "tokens per sequence", least=2)
    global_batch: int = setting(
        16,
        "sequences per step, over all micro-batches, copies, shards and accumulated passes",
        least=1,
    )
    document_mask: bool = setting(
        False,
        "intra-document attention mask: a token attends to and predicts only its own document",
    )
    mlm_probability: float = setting(
        0.15,
        "MLM masking probability of an encoder: 80% of the chosen words are masked, 10% are random words, 10% stay",
        above=0,
        most=0.9,
    )
    validation: float | tuple[str, ...] = setting(
        0.02,
        "what evaluations read: a share of the sequences, which is held out, or files and folders of their own",
        least=0,
        most=0.5,
        file=str,
    )
    format: str = setting(
        "text",
        "text; chat, which learns answers only (messages, or prompt and completion); or for encoders "
        "text:segments=1 ([CLS] text [SEP]) and text:segments=2 ([CLS] text [SEP] more [SEP]), both padded",
    )

    @property
    def mixture(self) -> tuple[MixtureSource, ...]:
        """The sources with their weights; empty if they have none."""
        if all(isinstance(one, str) for one in self.sources):
            return ()
        return tuple(
            MixtureSource((one,)) if isinstance(one, str) else one
            for one in self.sources
        )

    @property
    def files(self) -> tuple[str, ...]:
        """The files and folders of sources without weights."""
        return tuple(one for one in self.sources if isinstance(one, str))

    @property
    def held_out(self) -> float:
        """The share of the sequences that is held out for evaluation."""
        return 0.0 if isinstance(self.validation, tuple) else self.validation

    @property
    def validation_files(self) -> tuple[str, ...]:
        """The files that evaluations read instead of held-out sequences."""
        return self.validation if isinstance(self.validation, tuple) else ()

    @property
    def instructions(self) -> bool:
        """Whether the text is conversations, of which the answers are learned."""
        return split_name(self.format)[0] == "chat"

    @property
    def segments(self) -> int:
        """The segments of an encoder's rows; 0 fills rows with text alone."""
        shape = read_shape(*split_name(self.format), {"segments": int})
        return int(shape.get("segments", 0))

    @property
    def marked(self) -> bool:
        """Whether rows hold whole conversations or segments, with a mark for every token."""
        return self.instructions or self.segments > 0

    @property
    def apart(self) -> bool:
        """Whether a row has documents, or padding, that do not see each other."""
        return self.document_mask or self.segments > 0

    @property
    def parts(self) -> tuple[DataConfig, ...]:
        """The data of each source of the mixture; this data if there is no mixture."""
        if not self.mixture:
            return (self,)
        return tuple(replace(self, sources=one.files) for one in self.mixture)


@dataclass(frozen=True, slots=True)
class ScheduleConfig:
    """The schedule and its shape; 0 leaves a value to the schedule."""

    name: str = setting(
        AUTO,
        "auto, which searches; a schedule with its shape (penstock draw), such as hanayo:waves=2,slices=4,split; or a "
        "plan.json. auto:skip=0.25 may leave out layers; where parts are left out, such as in skip:share=0.25, "
        "warmup=100 and full=10 run all parts in the first 100 and in every 10th step",
        file=file_with_suffix,
    )
    microbatches: int = setting(
        8, "micro-batches per copy, shard and pass; 0 lets auto choose", least=0
    )
    partition: tuple[int, ...] = setting(
        (), "number of layers of each part; empty makes them as equal as possible"
    )

    @property
    def kind(self) -> str:
        """The name without its shape."""
        return split_name(self.name)[0]

    def at(self, file: str) -> ScheduleConfig:
        """The same schedule, whose plan is in another file."""
        return replace(self, name=f"{file}{self.name.removeprefix(self.kind)}")

    @property
    def is_named(self) -> bool:
        """Whether this is a schedule of `penstock draw`, neither planned nor read from a file."""
        return self.kind != AUTO and not is_plan_file(self.name)

    @property
    def own_name(self) -> str:
        """The name with the shape of the schedule itself, without what it says about paths."""
        kind, text = split_name(self.name)
        own = [one for one in text.split(",") if _word(one) not in PATH_WORDS]
        return f"{kind}:{','.join(own)}".rstrip(":")

    @property
    def path_shape(self) -> Shape:
        """What the name says about paths that leave out parts."""
        kind, text = split_name(self.name)
        about = [one for one in text.split(",") if _word(one) in PATH_WORDS]
        return read_shape(kind, ",".join(about), PATH_WORDS)

    @property
    def skip(self) -> float:
        """The share of the layers that auto may let each micro-batch leave out."""
        return float(self.path_shape.get("skip", 0.0))

    @property
    def paths(self) -> PathsConfig:
        """Which parts micro-batches visit from step to step."""
        shape = {key: one for key, one in self.path_shape.items() if key != "skip"}
        kept = str(shape.pop("keep", ""))
        keep = tuple(int(one) for one in kept.split("+") if one.isdigit())
        return PathsConfig(**shape, keep=keep)


@dataclass(frozen=True, slots=True)
class PathsConfig:
    """Which parts micro-batches visit from step to step, if the schedule leaves out parts."""

    # Sets of paths that steps take in turn; 1 keeps one set, 0 takes all sets of the plan.
    rotate: int = 0
    # Every full-th step runs all parts; 0 never does, -1 does what the plan's rules say.
    full: int = FULL_AS_PLANNED
    warmup: int = 0  # steps at the beginning that run all parts
    # The share of the parts that each micro-batch leaves out (skip); 0 takes skips.
    share: float = 0.0
    # Pairs of neighboring parts that may change places on a path (skip).
    swaps: int = 0
    # Parts that every micro-batch visits, besides the first one (skip).
    keep: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """How many processes make up a rank of the schedule: shard x tensor."""

    devices: int = setting(
        0,
        "GPUs or processes in all; 0 takes pp x dp_replicate x dp_shard x tp",
        least=0,
    )
    pp: int = setting(
        4,
        "pipeline-parallel degree, the ranks of a pipeline; 0 lets auto choose, or takes all devices",
        least=0,
    )
    dp_replicate: int = setting(
        1, "data-parallel copies of the pipeline; 0 lets auto choose", least=0
    )
    dp_shard: int = setting(
        1,
        "processes that shard the weights of a rank and train on different data (FSDP2)",
        least=1,
    )
    tp: int = setting(
        1,
        "tensor-parallel degree (DTensor); it must divide heads and intermediate_size",
        least=1,
    )

    @property
    def size(self) -> int:
        """The number of processes of a rank."""
        return self.dp_shard * self.tp

    def over(self, ranks: int) -> str:
        """Describe all processes of a schedule with `ranks` ranks.

        >>> ParallelConfig().over(3), ParallelConfig(dp_shard=2, tp=4).over(3)
        ('3 ranks', '3 ranks x shard 2 x tensor 4 = 24 processes')
        """
        if self.size == 1:
            return f"{ranks} ranks"
        processes = ranks * self.size
        mesh = f"shard {self.dp_shard} x tensor {self.tp}"
        return f"{ranks} ranks x {mesh} = {processes} processes"


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Parameters with settings of their own; of several groups that match, the first one counts."""

    match: str  # a pattern for names of parameters, such as "*.bias"
    lr: float | None = None  # None takes optimizer.lr
    weight_decay: float | None = (
        None  # None takes optimizer.weight_decay, for matrices only
    )
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
        'parameters with their own settings, such as [{match = "*.bias", lr = 1e-3, weight_decay = 0, frozen = false}]',
    )
    lr: float = setting(
        0.0,
        "highest learning rate; auto takes 2e-5 for the weights of model.path, 1e-4 for adapters (lora), and "
        "that of the preset for new weights",
        least=0,
    )
    lr_schedule: str = setting(
        "cosine",
        "learning-rate schedule after the warm-up: constant, linear, cosine, inverse_sqrt, with the last rate as a "
        "share of the highest (cosine:min=0.1); wsd:0.2, which falls in the last fifth of the steps; or your own "
        "module:function from a step to a factor",
        file=own_code_file,
    )
    warmup_steps: int = setting(20, "steps until the highest learning rate", least=0)
    betas: tuple[float, ...] = setting(
        (0.9, 0.95),
        "decay of the running means of gradients and of their squares (optimizers with betas)",
    )
    weight_decay: float = setting(
        0.1, "weight decay of matrices; norms and biases do not decay", least=0
    )
    clip_norm: float = setting(
        1.0, "largest norm of all gradients together; 0 switches clipping off", least=0
    )

    @property
    def highest_rate(self) -> float:
        """The highest learning rate; that of new weights as long as nobody has looked at what is trained."""
        return self.lr or PRESET_RATES[DEFAULT_PRESET]

    @property
    def own_schedule(self) -> bool:
        """Whether the learning rate follows code of the user."""
        return split_name(self.lr_schedule)[0] not in RATE_SCHEDULES

    @property
    def rate_shape(self) -> Shape:
        """The shape of the learning-rate schedule."""
        name, text = split_name(self.lr_schedule)
        known = RATE_SCHEDULES[name]
        return known | read_shape(name, text, dict.fromkeys(known, float))


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Adapters beside the matrices of a model that stays as it is (LoRA, with the library peft)."""

    rank: int = setting(0, "LoRA rank (r); 0 trains the model itself", least=0)
    alpha: float = setting(
        16.0, "LoRA scaling: adapters count alpha / rank times", above=0
    )
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
    comm_dtype: str = setting(
        "float32",
        "p2p communication dtype, of hidden states and their gradients between ranks: float32; bfloat16, with half of "
        "the bytes; or int8, with a quarter of them and a scale for each token",
    )
    recompute: str = setting(
        "none",
        "what is computed again in the backward, to save memory: none; mlp, attention or both (mlp,attention) of the "
        "layers (llama, gpt); full keeps only the inputs of stages",
    )
    cuda_graphs: str = setting(
        AUTO,
        "record every action once and replay it in every step (CUDA graphs): true, false, or auto, which is true "
        "on GPUs unless model.path is given",
    )
    compile: str = setting(
        AUTO,
        "compile layers, head and loss with torch.compile: true, false, or auto, which is true on GPUs; "
        "the first step then waits for the compiler",
    )
    loss: str = setting(
        CROSS_ENTROPY,
        "cross_entropy, also with label smoothing and a weight of the squared log of the softmax's denominator, as in "
        "cross_entropy:smoothing=0.1,z=1e-4; or your own module:function or file.py:function of logits and labels",
        file=own_code_file,
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
    log_every: int = setting(10, "steps between two lines of the log", least=1)
    eval_every: int = setting(
        50,
        "steps between two evaluations; 0 evaluates only after the last step",
        least=0,
    )
    save_every: int = setting(
        50, "steps between two checkpoints; 0 saves only at the end", least=0
    )
    keep_checkpoints: int = setting(2, "number of checkpoints to keep", least=1)
    checkpoint_url: str = setting(
        "",
        "URL to copy checkpoints to, such as s3://bucket/run; a run resumes from there if its folder has none as new",
    )
    checks: str = setting(
        ",".join(CHECKS),
        "before the first step: forecast (time a layer and predict the time of a step), gradients (compare every stage "
        "with a plain call), memory (refuse a run that needs more than this machine has); none leaves out all",
    )
    timeout: float = setting(
        300.0,
        "communication timeout: seconds that a rank may wait for another one",
        above=0,
    )

    @property
    def recomputed_inside(self) -> tuple[str, ...]:
        """What is recomputed inside of layers: "attention", "mlp", both or nothing."""
        return tuple(one for one in INSIDE if one in self.recompute.split(","))

    def asks(self, check: str) -> bool:
        """Whether a check is made before the first step: forecast, gradients or memory."""
        return check in self.checks.split(",")

    @property
    def own_loss(self) -> str:
        """The user's own loss; empty if it is the cross entropy."""
        return "" if split_name(self.loss)[0] == CROSS_ENTROPY else self.loss

    @property
    def cross_entropy(self) -> Shape:
        """How the cross entropy differs from the plain one."""
        return {} if self.own_loss else read_shape(*split_name(self.loss), LOSS_SHAPE)


@dataclass(frozen=True, slots=True)
class ElasticConfig:
    """How a run goes on when workers are lost or join."""

    mode: str = setting(
        AUTO,
        "continue without a worker that is lost: on, off, or auto, which is on for CPU workers of which no one holds a "
        "part alone; on keeps in-memory replicas of such parts; on:slow=2 gives less work to workers that take twice "
        "as long as they used to",
    )
    listen: str = setting(
        "",
        "HOST:PORT of this machine at which workers of other machines join with the run's key (penstock join), over "
        "encrypted connections; worker n of this machine takes PORT + 1 + n; empty lets nobody join",
    )
    workers: int = setting(
        0,
        "workers that this machine starts, if others join; 0 starts one for every rank",
        least=0,
    )
    restarts: int = setting(
        3,
        "how often a run restarts from its checkpoint after a worker has died, or replaces a worker if it is elastic",
        least=0,
    )

    @property
    def named(self) -> str:
        """The mode without its shape: on, off or auto."""
        return split_name(self.mode)[0]

    @property
    def slow(self) -> float:
        """How many times as long as it used to a slow worker takes; 0 finds nobody slow."""
        shape = read_shape(*split_name(self.mode), {"slow": float})
        return float(shape.get("slow", 0.0))


@dataclass(frozen=True, slots=True)
class Config:
    """A whole run. `preset` says where values come from that a file leaves out."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig, kw_only=True)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig, kw_only=True)
    run: RunConfig = field(default_factory=RunConfig)
    elastic: ElasticConfig = field(default_factory=ElasticConfig, kw_only=True)
    preset: str = field(default=DEFAULT_PRESET, kw_only=True)

    @property
    def paths(self) -> PathsConfig:
        """Which parts micro-batches visit from step to step, if the schedule leaves out parts."""
        return self.schedule.paths

    @property
    def drops(self) -> bool:
        """Whether a run trains with dropout."""
        return self.model.dropout > 0 or (self.lora.rank > 0 and self.lora.dropout > 0)

    @property
    def processes(self) -> int:
        """The processes of all ranks and copies."""
        return self.parallel.pp * self.parallel.dp_replicate * self.parallel.size

    @property
    def rows(self) -> int:
        """Sequences per micro-batch."""
        return self.data.global_batch // self.passages

    @property
    def passages(self) -> int:
        """Micro-batches per step, over copies, shards and accumulated passes."""
        return (
            self.schedule.microbatches
            * self.parallel.dp_replicate
            * self.parallel.dp_shard
            * self.run.accumulate
        )


SECTIONS = tuple(item.name for item in fields(Config) if item.name != "preset")


# ---------------------------------------------------------------- presets
OPEN = ScheduleConfig(microbatches=0)  # Everything about the schedule is left to auto.


def _on_devices(count: int) -> ParallelConfig:
    """Ranks and copies are left to auto."""
    return ParallelConfig(devices=count, pp=0, dp_replicate=0)


def _long_run(steps: int, every: int) -> RunConfig:
    """A run that is evaluated, saved and timed now and then."""
    return RunConfig(
        steps=steps,
        precision="bfloat16",
        eval_every=every,
        save_every=every,
        log_every=10,
    )


_PRESETS = {
    # About a minute on two CPU cores.
    "tiny": Config(schedule=OPEN),
    "llama-150m": Config(
        ModelConfig(
            layers=12,
            hidden_size=1024,
            heads=16,
            kv_heads=4,
            intermediate_size=2752,
            vocab_size=0,
        ),
        DataConfig(seq_len=1024, global_batch=64),
        OPEN,
        OptimizerConfig(warmup_steps=200),
        _long_run(10_000, every=500),
        parallel=_on_devices(4),
    ),
    "llama-1b": Config(
        ModelConfig(
            layers=16,
            hidden_size=2048,
            heads=32,
            kv_heads=8,
            intermediate_size=8192,
            rope_theta=500_000.0,
            tie_embeddings=True,
        ),
        DataConfig(seq_len=2048, global_batch=128),
        OPEN,
        OptimizerConfig(warmup_steps=1000),
        _long_run(100_000, every=1000),
        parallel=_on_devices(8),
    ),
    "gpt2": Config(
        ModelConfig(
            family="gpt",
            layers=12,
            hidden_size=768,
            heads=12,
            kv_heads=12,
            intermediate_size=3072,
            tie_embeddings=True,
        ),
        DataConfig(seq_len=1024, global_batch=64),
        OPEN,
        OptimizerConfig(warmup_steps=200),
        _long_run(10_000, every=500),
        parallel=_on_devices(4),
    ),
    "bert-base": Config(
        ModelConfig(
            family="bert",
            layers=12,
            hidden_size=768,
            heads=12,
            kv_heads=12,
            intermediate_size=3072,
            tie_embeddings=True,
        ),
        DataConfig(seq_len=512, global_batch=256),
        OPEN,
        OptimizerConfig(warmup_steps=1000),
        _long_run(100_000, every=1000),
        parallel=_on_devices(4),
    ),
}
PRESETS = {name: replace(config, preset=name) for name, config in _PRESETS.items()}
