"""Any language model of transformers, as the trainer sees it: its sizes, and the config that builds it.

    config.json ──► DecoderConfig ──► blueprint     the whole model; its weights take no memory, its buffers are real
                                        │ split
                                        ▼
                                      parts         a rank gives memory to the weights of its own parts only

Buffers are computed when a model is built (rotary frequencies, the scale of an embedding) and are in no checkpoint, so
they must exist from the start. They are small. Buffers that another trainer has learned without gradients (the biases
with which DeepSeek balances its experts) are in checkpoints; here they are parameters that do not train.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import FileError, PenstockError, RunError, ShapeError
from penstock.families import BertConfig, GPTConfig, ParameterCounts
from penstock.models.hf import BUILDING, Encoding, config_value, small_config
from penstock.models.split import find_layout, tied_names

# The features of an MLP, by the names that configs have for them; `hidden_dim` is DistilBERT's.
INNER_NAMES = ("moe_intermediate_size", "intermediate_size", "hidden_dim", "n_inner")
INITIAL_STD = 0.02  # of matrices, unless a config names an initializer_range
FAR_FROM_ZERO = 10  # standard deviations; a mean that normal weights do not have
Constants = dict[str, float]
# A weight, its shape in a file and its shape in the model.
Misshapen = tuple[str, Sequence[int], Sequence[int]]


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A decoder of transformers: its sizes, and its config.json as text."""

    architecture: str  # such as Qwen3ForCausalLM
    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    inner: int  # features of the MLP that a token goes through; of all experts that it visits
    positions: int  # the longest sequence
    tied: bool
    std: float  # of initial matrices
    config: str  # JSON

    @property
    def digest(self) -> str:
        """A short text that differs where configs differ."""
        return hashlib.sha256(self.config.encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class EncoderConfig(DecoderConfig):
    """An encoder of transformers, which guesses masked words; the trainer handles it like a decoder in all else."""

    types: int = 0  # kinds of segments that it tells apart


def read_decoder(folder: Path) -> DecoderConfig:
    """Read the config.json of a folder."""
    transformers = import_transformers(f"the model in {folder}")
    if not (folder / "config.json").is_file():
        raise FileError(
            f"there is no config.json in {folder}\n"
            "  name the folder of a Hugging Face model"
        )
    try:
        with BUILDING:
            config: Any = transformers.AutoConfig.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        return decoder_of(config)
    except PenstockError:
        raise
    except Exception as error:  # of transformers, which checks its configs in many ways
        raise FileError(f"cannot make a model of {folder}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """The first line of an error, or two lines where the first one ends with a colon."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    goes_on = lines[0].endswith(":") and len(lines) > 1
    return f"{lines[0]} {lines[1].strip()}" if goes_on else lines[0]


def import_transformers(purpose: str) -> Any:
    """Import transformers, or say what needs it."""
    try:
        import transformers  # noqa: PLC0415  # an optional extra
    except ModuleNotFoundError:
        raise RunError(
            f"{purpose} needs transformers, which is not installed: pip install transformers"
        ) from None
    quiet: Any = transformers.utils.logging
    quiet.disable_progress_bar()
    return transformers


def decoder_of(config: Any) -> DecoderConfig:
    """Return the sizes of a config of transformers, which may also be that of an encoder."""
    transformers = import_transformers(f"a {type(config).__name__}")
    auto = transformers.models.auto.modeling_auto
    architecture = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    encoders = auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    encodes = config.model_type in encoders and not getattr(config, "is_decoder", False)
    if encodes:
        architecture = encoders[config.model_type]
    if isinstance(architecture, tuple | list):
        architecture = architecture[0]
    if architecture is None:
        raise ValueError(
            f"transformers has neither a causal nor a masked language model of type {config.model_type!r}"
        )
    if not isinstance(getattr(config, "hidden_size", None), int):
        raise ValueError(
            f"a {type(config).__name__} has several models in it; save its language model alone, with "
            "save_pretrained, and name that folder"
        )
    width = int(config.hidden_size)
    heads = int(config_value(config, "num_attention_heads") or 1)  # Mamba has none
    visited = _visited_experts(config)
    inner = _first_value(config, *INNER_NAMES) or 4 * width
    inner = max(inner) if isinstance(inner, list | tuple) else inner
    sizes = DecoderConfig(
        str(architecture),
        int(config.vocab_size),
        width,
        int(config.num_hidden_layers),
        heads,
        int(config_value(config, "num_key_value_heads") or heads),
        int(config_value(config, "head_dim") or width // heads),
        int(inner) * visited,
        int(getattr(config, "max_position_embeddings", None) or 0),
        bool(getattr(config, "tie_word_embeddings", False)),
        float(getattr(config, "initializer_range", None) or INITIAL_STD),
        json.dumps(_said_by(config), sort_keys=True),
    )
    return _encoder_of(sizes, config) if encodes else sizes


def _first_value(config: Any, *names: str) -> Any:
    """The first of these values of a config that is not zero or missing; None if all are."""
    values = (config_value(config, name) for name in names)
    return next(filter(None, values), None)


def _said_by(config: Any) -> dict[str, Any]:
    """What a config says about the model, in plain values."""
    said: dict[str, Any] = config.to_dict()
    for key in ("transformers_version", "_name_or_path"):  # neither changes a model
        said.pop(key, None)
    said["dtype"] = "float32"
    return said


def config_differences(recorded: str, sizes: DecoderConfig) -> list[str]:
    """What a recorded config says otherwise than that of a model, as the installed transformers reads both.

    Another version may have recorded fewer values, or other names for them.
    """
    try:
        theirs = _said_by(transformers_config(replace(sizes, config=recorded)))
    except Exception as error:  # of transformers, which checks its configs in many ways
        return [f"its config cannot be read ({_reason(error)})"]
    mine = _said_by(transformers_config(sizes))
    return [
        f"its {key} is {theirs.get(key)}, here it is {mine.get(key)}"
        for key in sorted({*theirs, *mine})
        if theirs.get(key) != mine.get(key)
    ]


@lru_cache(maxsize=8)
def _encoding_of(sizes: EncoderConfig) -> Encoding:
    """How an encoder takes its words, read off a small model of its class."""
    try:
        pieces = find_layout(_small_model(sizes)).pieces
    except PenstockError:
        raise
    except Exception as error:
        raise _unbuildable(sizes, error) from None
    assert pieces is not None
    assert pieces.encoding is not None
    return pieces.encoding


def _encoder_of(sizes: DecoderConfig, config: Any) -> EncoderConfig:
    """The sizes of an encoder. Its positions are those that words can have: a RoBERTa has two more."""
    values = asdict(sizes)
    encoding = _encoding_of(EncoderConfig(**values))
    if encoding.table:
        values["positions"] = sizes.positions - encoding.first
    types = int(getattr(config, "type_vocab_size", 0)) if encoding.types else 0
    return EncoderConfig(**values, types=types)


def auto_class(sizes: DecoderConfig) -> Any:
    """The class of transformers that builds and reads such a model."""
    transformers = import_transformers(f"a {sizes.architecture}")
    if isinstance(sizes, EncoderConfig):
        return transformers.AutoModelForMaskedLM
    return transformers.AutoModelForCausalLM


def transformers_config(sizes: DecoderConfig, layers: int = 0) -> Any:
    """Return the config of transformers; with another number of layers, if one is given."""
    transformers = import_transformers(f"a {sizes.architecture}")
    said = json.loads(sizes.config)
    if layers:
        for name, value in said.items():
            if isinstance(value, list) and len(value) == sizes.layers:
                said[name] = value[:layers]
        own = said.get("per_layer_config") or {}
        kept = {number: one for number, one in own.items() if int(number) < layers}
        if own:
            said["per_layer_config"] = kept
        names = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
        said[next(name for name in names if name in said)] = layers
    config = transformers.AutoConfig.for_model(said.pop("model_type"), **said)
    config.use_cache = False
    return config


# ---------------------------------------------------------------- the model without weights
def decoder_blueprint(sizes: DecoderConfig, layers: int = 0) -> nn.Module:
    """Build the model; its parameters are on the meta device, its buffers are real."""
    with weightless():
        return build_decoder(sizes, layers)


def build_decoder(sizes: DecoderConfig, layers: int = 0) -> nn.Module:
    """Build the model, with the weights that transformers draws."""
    config = transformers_config(sizes, layers)
    try:
        with BUILDING:
            model: nn.Module = auto_class(sizes).from_config(
                config, dtype=torch.float32
            )
    except Exception as error:  # of transformers, which checks its configs in many ways
        raise _unbuildable(sizes, error) from None
    keep_learned_buffers(model)
    # Dropout is random numbers that depend on who draws them; the trainer has none.
    return model.eval()


def _unbuildable(sizes: DecoderConfig, error: Exception) -> PenstockError:
    return PenstockError(f"cannot build a {sizes.architecture}: {_reason(error)}")


def keep_learned_buffers(model: nn.Module) -> None:
    """Turn buffers that belong to the weights of a model into parameters that do not train.

    Such a buffer is saved with the weights and begins as one number. Others follow from the config.
    """
    saved = model.state_dict(keep_vars=True)
    for path, buffer in list(model.named_buffers()):
        learned = path in saved and buffer.dim() and buffer.is_floating_point()
        if learned and bool((buffer == buffer.flatten()[0]).all()):
            owner, _, name = path.rpartition(".")
            module = model.get_submodule(owner)
            delattr(module, name)
            frozen = nn.Parameter(buffer, requires_grad=False)
            module.register_parameter(name, frozen)


@contextmanager
def weightless() -> Iterator[None]:
    """Let modules that are built here have parameters without memory, but real buffers.

    Ranks may be threads, so one builds after the other, and modules of other threads keep their memory.
    """
    with BUILDING:
        register = nn.Module.register_parameter
        builder = threading.get_ident()

        def register_empty(
            self: nn.Module, name: str, param: nn.Parameter | None
        ) -> None:
            mine = threading.get_ident() == builder
            if mine and param is not None and param.device.type != "meta":
                empty = param.to("meta")
                param = nn.Parameter(empty, requires_grad=param.requires_grad)
            register(self, name, param)

        nn.Module.register_parameter = register_empty  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.register_parameter = register  # type: ignore[method-assign]


def give_memory(part: nn.Module, device: torch.device) -> None:
    """Give the parameters of a part memory on a device, and move its buffers there."""
    buffers = {
        name: one.clone() for name, one in part.named_buffers() if not one.is_meta
    }
    part.to_empty(device=device)
    for name, buffer in part.named_buffers():
        if name in buffers:
            buffer.copy_(buffers[name])


# ---------------------------------------------------------------- initial numbers
@lru_cache(maxsize=8)
def initial_constants(sizes: DecoderConfig) -> Constants:
    """The parameters that begin as one number, such as norms and biases, read off a small model.

    In the names, `*` stands for the number of a layer.
    """
    model = _small_model(sizes)
    constants = {}
    for name, parameter in model.named_parameters():
        first = parameter.detach().flatten()[0]
        if bool((parameter == first).all()):
            constants[any_layer(name)] = float(first)
        elif abs(float(parameter.detach().mean())) > FAR_FROM_ZERO * sizes.std:
            raise PenstockError(
                f"cannot draw new weights for a {sizes.architecture}: transformers begins {any_layer(name)} with "
                "numbers of its own, and not around zero\n"
                "  let transformers save a new model (save_pretrained), and name its folder in model.path"
            )
    return constants


@lru_cache(maxsize=8)
def padding_rows(sizes: EncoderConfig) -> dict[str, int]:
    """The rows of an encoder's embeddings that begin as zeros, those of padding, by the names of the weights."""
    model = _small_model(sizes)
    tied = tied_names(model)
    rows = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            name = f"{path}.weight"
            if not bool(module.weight[module.padding_idx].any()):
                rows[tied.get(name, name)] = module.padding_idx
    return rows


def _small_model(sizes: DecoderConfig) -> nn.Module:
    """A small model with the weights that transformers draws."""
    encodes = isinstance(sizes, EncoderConfig)
    small = small_config(transformers_config(sizes), padded=encodes)
    with BUILDING, torch.random.fork_rng(devices=[]), torch.device("cpu"):
        model: nn.Module = auto_class(sizes).from_config(small)
    keep_learned_buffers(model)
    return model


def any_layer(name: str) -> str:
    """Replace the number of a layer by a star.

    >>> any_layer("model.layers.11.mlp.up_proj.weight")
    'model.layers.*.mlp.up_proj.weight'
    """
    return re.sub(r"\.\d+\.", ".*.", name, count=1)


# ---------------------------------------------------------------- what follows from the sizes
@lru_cache(maxsize=8)
def count_decoder(sizes: DecoderConfig) -> ParameterCounts:
    """Count the parameters of a decoder without giving it memory; those of a layer are the mean of all layers."""
    model = decoder_blueprint(sizes)
    layout = find_layout(model)
    embed = _numel(model, layout.embed)
    layers = _numel(model, layout.layers)
    head = _numel(model, layout.head)
    total = sum(parameter.numel() for parameter in model.parameters())
    used = _share_of_experts(model.config)
    matrices = 0.0
    for path in layout.layers:
        for name, parameter in model.get_submodule(path).named_parameters():
            if parameter.dim() >= 2:
                is_of_experts = "experts" in name.split(".")
                matrices += (used if is_of_experts else 1.0) * parameter.numel()
    output = sizes.vocab * sizes.width
    return ParameterCounts(
        embed, layers // sizes.layers, head, total, int(matrices) + output
    )


def _share_of_experts(config: Any) -> float:
    """The share of a layer's experts that a token visits; shared ones, which all tokens visit, are not among them."""
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        experts = config_value(config, name)
        if isinstance(experts, int) and experts > 1:
            return _visited_experts(config) / experts
    return 1.0


def _visited_experts(config: Any) -> int:
    """The number of experts that a token visits; 1 without experts."""
    return int(_first_value(config, "num_experts_per_tok", "top_k_experts") or 1)


def _numel(model: nn.Module, paths: tuple[str, ...]) -> int:
    modules = map(model.get_submodule, paths)
    return sum(one.numel() for module in modules for one in module.parameters())


def check_positions(sizes: DecoderConfig | BertConfig | GPTConfig, tokens: int) -> None:
    """Refuse sequences that are longer than the model knows positions."""
    if sizes.positions and tokens > sizes.positions:
        family = type(sizes).__name__.removesuffix("Config")
        name = getattr(sizes, "architecture", family)
        raise ShapeError(
            f"{tokens} tokens, but a {name} of this config is for "
            f"{sizes.positions} at most (max_position_embeddings)\n  set data.seq_len={sizes.positions} or less"
        )


def load_whole(folder: Path, sizes: DecoderConfig) -> dict[str, Tensor]:
    """Let transformers read all weights, for folders whose names of weights differ from the model's.

    Meanwhile transformers replaces methods of all its models, so ranks that are threads take turns. Weights that are
    missing or have another shape are refused: transformers would draw them at random.
    """
    with BUILDING, held_reports() as reports:
        try:
            model, told = auto_class(sizes).from_pretrained(
                folder,
                config=transformers_config(sizes),
                dtype=torch.float32,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below
            )
        except Exception as error:  # of transformers, which reads files in many ways
            raise _unreadable(folder, error, reports) from None
    missing: Collection[str] = told["missing_keys"]
    misshapen: Collection[Misshapen] = told["mismatched_keys"]
    if missing:
        more = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise FileError(
            f"{folder} has no weights {min(missing)}{more}, which a {sizes.architecture} needs\n"
            "  is config.json that of these weights? name the config.json in model.path to train new weights"
        )
    if misshapen:
        name, found, needed = min(misshapen)
        raise FileError(
            f"in {folder}, weights of a {sizes.architecture} have other shapes than its config.json says: {name} is "
            f"{tuple(found)} instead of {tuple(needed)}\n"
            "  is config.json that of these weights?"
        )
    for report in reports:
        LOADER.handle(report)
    return dict(model.state_dict())


def _unreadable(
    folder: Path, error: Exception, reports: Iterable[logging.LogRecord]
) -> FileError:
    """The error for weights that transformers does not read at all."""
    rows = (UNMADE.search(report.getMessage()) for report in reports)
    # The first weight that could not be put together from several tensors of the files.
    unmade = next(filter(None, rows), None)
    if unmade is None:
        what = f"transformers cannot read the weights in {folder}: {_reason(error)}"
    else:
        what = (
            f"transformers cannot put {unmade['name']} together from the tensors in {folder}: one of them is missing "
            "or has another shape"
        )
    return FileError(
        f"{what}\n  is config.json that of these weights? if it is, copy or download the files again"
    )


LOADER = logging.getLogger("transformers.modeling_utils")
UNMADE = re.compile(r"^(?P<name>\S+) *\| *CONVERSION", re.MULTILINE)
TITLES = ("LOAD REPORT", "Some weights of")  # the second one is of transformers 4


@contextmanager
def held_reports() -> Iterator[list[logging.LogRecord]]:
    """Hold back the reports of transformers on one load, in a list; every other message passes."""
    held: list[logging.LogRecord] = []

    def passes(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        is_report = any(title in message for title in TITLES)
        if is_report:
            held.append(record)
        return not is_report

    LOADER.addFilter(passes)
    try:
        yield held
    finally:
        LOADER.removeFilter(passes)
