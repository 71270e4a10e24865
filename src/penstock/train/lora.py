"""LoRA: small trained matrices beside frozen ones, with the modules of the library peft.

    x ──┬── base_layer (frozen) ──(+)──►        y = W x + alpha / rank · B A x
        └── lora_A ── lora_B ──────┘            A begins at random, B at zero

The base model comes from model.path and is never saved again: checkpoints hold the adapters, and an export is a
folder that peft loads, or the model with its adapters merged.

    layers.0.attention.query                             the name of a matrix here
    layers.0.attention.query.base_layer.weight           its names once peft has adapted it
    layers.0.attention.query.lora_A.default.weight
    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight      in adapter_model.safetensors
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from penstock.config import Config, LoraConfig
from penstock.errors import ConfigError, RunError
from penstock.models import BertConfig, DecoderConfig, EncoderConfig, GPTConfig
from penstock.models.decoder import weightless
from penstock.models.layer import Dropout
from penstock.models.split import find_layout
from penstock.runtime import cut_share, local_share
from penstock.train.hub import their_matrix, their_rows
from penstock.train.weights import (
    Holding,
    Sizes,
    blueprint,
    generator_of,
    model_name,
)

BASE = ".base_layer"
DOWN = ".lora_A.default.weight"
UP = ".lora_B.default.weight"
ADAPTERS_FILE = "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class Adapter:
    """The two matrices beside one matrix of the model, whose path is `path`."""

    path: str
    down: Tensor  # A, (rank, inputs)
    up: Tensor  # B, (outputs, rank)


def import_peft() -> Any:
    """Import peft, or say how to install it."""
    try:
        import peft  # noqa: PLC0415  # an optional extra
    except ModuleNotFoundError as error:
        raise missing_peft(str(error.name)) from None
    return peft


def missing_peft(module: str) -> RunError:
    """Return the error for a missing library."""
    return RunError(f"[lora] needs peft, but there is no {module}: pip install peft")


# ---------------------------------------------------------------- which matrices
def target_paths(model: nn.Module, sizes: Sizes, lora: LoraConfig) -> list[str]:
    """Return the matrices of the layers that get adapters, by their paths in the model.

    A target is the end of a path, in our names or in those of Hugging Face.
    """
    found = []
    used: set[str] = set()
    leaves: set[str] = set()
    for layer in find_layout(model).layers:
        for inner, module in model.get_submodule(layer).named_modules():
            if not is_matrix(module):
                continue
            path = f"{layer}.{inner}"
            names = (path, their_matrix(path, sizes))
            leaves.add(names[1].rpartition(".")[2])
            mine = [one for one in lora.targets if any(_ends(n, one) for n in names)]
            used.update(mine)
            if mine or not lora.targets:
                found.append(path)
    unknown = [target for target in lora.targets if target not in used]
    if unknown:
        raise ConfigError(
            f"lora.targets: no matrix of a layer is called {unknown[0]!r}\n"
            f"  known: {', '.join(sorted(leaves))}"
        )
    return found


def is_matrix(module: nn.Module) -> bool:
    """Whether a module multiplies by a matrix: a Linear, or the Conv1D of transformers."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _ends(path: str, target: str) -> bool:
    return path == target or path.endswith(f".{target}")


@lru_cache(maxsize=4)
def adapted_paths(sizes: Sizes, lora: LoraConfig) -> tuple[str, ...]:
    """Return the matrices that get adapters in a model of these sizes."""
    return tuple(target_paths(blueprint(sizes), sizes, lora))


def inner_paths(paths: Iterable[str]) -> list[str]:
    """Return paths inside of a layer, each once.

    >>> inner_paths(["model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"])
    ['mlp.up_proj']
    """
    return sorted({re.sub(r"^.*?\.\d+\.", "", path, count=1) for path in paths})


def check_adapters(sizes: Sizes, lora: LoraConfig) -> None:
    """Refuse adapters without peft, or for matrices that the model does not have."""
    if importlib.util.find_spec("peft") is None:
        raise missing_peft("peft")
    if isinstance(sizes, BertConfig | EncoderConfig):
        name = model_name(sizes)
        raise ConfigError(
            f"[lora] is for decoders; a {name} is trained without adapters\n  set lora.rank=0"
        )
    adapted_paths(sizes, lora)


def trained_names(sizes: Sizes, lora: LoraConfig) -> list[str]:
    """Return the names of all parameters of a model, with its adapters if it has any."""
    return [name for name, _ in adapted_blueprint(sizes, lora).named_parameters()]


def adapted_blueprint(sizes: Sizes, lora: LoraConfig) -> nn.Module:
    """Build the whole model without memory for its weights, with its adapters if it has any."""
    model = blueprint(sizes)
    if lora.rank:
        adapt(model, sizes, lora)
    return model


# ---------------------------------------------------------------- a model that trains adapters
def adapt(model: nn.Module, sizes: Sizes, lora: LoraConfig, empty: bool = True) -> None:
    """Put the modules of peft into a model; only adapters train then.

    Unless `empty` is False, the adapters have no memory, like the model in a blueprint.
    """
    peft = import_peft()
    paths = target_paths(model, sizes, lora)
    settings = _peft_config(peft, lora, inner_paths(paths), _has_transposed(sizes))
    with weightless() if empty else nullcontext():
        peft.inject_adapter_in_model(settings, model)
    if lora.dropout:
        for path in paths:
            # peft's own would draw other numbers on other ranks.
            adapted: Any = model.get_submodule(path)
            adapted.lora_dropout["default"] = Dropout(f"lora {path}", lora.dropout)


def _peft_config(
    peft: Any, lora: LoraConfig, targets: list[str], transposed: bool, **more: Any
) -> Any:
    return peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=targets,
        lora_dropout=lora.dropout,
        fan_in_fan_out=transposed,
        **more,
    )


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter.

    >>> is_adapter("layers.0.mlp.up.lora_A.default.weight"), is_adapter("layers.0.mlp.up.base_layer.weight")
    (True, False)
    """
    return name.endswith((DOWN, UP))


def base_name(name: str) -> str:
    """Return the name of a parameter of the base model without adapters.

    >>> base_name("layers.0.mlp.up.base_layer.weight")
    'layers.0.mlp.up.weight'
    """
    return name.replace(f"{BASE}.", ".")


def base_parameters(holding: Holding) -> dict[str, str]:
    """Return the parameters of the base model that a rank holds: plain names, and names beside adapters."""
    return {
        base_name(name): name for name in holding.parameters if not is_adapter(name)
    }


def draw_adapters(holding: Holding, seed: int) -> None:
    """Fill a rank's adapters as peft does, but from the seed and their names."""
    with torch.no_grad():
        for name, parameter in holding.parameters.items():
            if name.endswith(UP):
                nn.init.zeros_(parameter)
            elif name.endswith(DOWN):
                bound = 1 / math.sqrt(parameter.shape[1])
                numbers = torch.empty(parameter.shape)
                numbers.uniform_(-bound, bound, generator=generator_of(seed, name))
                local_share(parameter).copy_(cut_share(numbers, parameter))


# ---------------------------------------------------------------- a trained model
def empty_adapters(
    parameters: Mapping[str, nn.Parameter], sizes: Sizes, lora: LoraConfig
) -> Iterator[Adapter]:
    """Yield blank adapters for a model in one piece, to be filled from a checkpoint."""
    transposed = _has_transposed(sizes)
    for path in adapted_paths(sizes, lora):
        outputs, inputs = parameters[f"{path}.weight"].shape
        if transposed:
            outputs, inputs = inputs, outputs
        yield Adapter(
            path, torch.empty(lora.rank, inputs), torch.empty(outputs, lora.rank)
        )


def _has_transposed(sizes: Sizes) -> bool:
    """Whether weights lie the other way round here, as in the Conv1D of GPT-2."""
    return isinstance(sizes, DecoderConfig) and sizes.architecture == "GPT2LMHeadModel"


def adapter_tensors(adapters: Iterable[Adapter]) -> dict[str, Tensor]:
    """Return the tensors of adapters by their names in a checkpoint."""
    tensors = {}
    for adapter in adapters:
        tensors[f"{adapter.path}{DOWN}"] = adapter.down
        tensors[f"{adapter.path}{UP}"] = adapter.up
    return tensors


def merge(
    parameters: Mapping[str, nn.Parameter],
    adapters: Iterable[Adapter],
    sizes: Sizes,
    lora: LoraConfig,
) -> None:
    """Add adapters to the matrices beside which they were trained."""
    transposed = _has_transposed(sizes)
    with torch.no_grad():
        for adapter in adapters:
            change = adapter.up @ adapter.down * (lora.alpha / lora.rank)
            weight = parameters[f"{adapter.path}.weight"]
            weight.add_(change.t() if transposed else change)


def write_adapters(
    folder: Path,
    adapters: Iterable[Adapter],
    sizes: Sizes,
    lora: LoraConfig,
    base: str,
    dtype: torch.dtype,
) -> None:
    """Write a folder that `PeftModel.from_pretrained` loads beside the base model."""
    peft = import_peft()
    tensors = {}
    theirs = []
    for adapter in adapters:
        path = their_matrix(adapter.path, sizes)
        theirs.append(path)
        up = their_rows(adapter.path, adapter.up, sizes)
        for side, matrix in (("lora_A", adapter.down), ("lora_B", up)):
            name = f"base_model.model.{path}.{side}.weight"
            tensors[name] = matrix.to(dtype).contiguous()
    settings = _peft_config(
        peft,
        lora,
        inner_paths(theirs),
        transposed=isinstance(sizes, GPTConfig) or _has_transposed(sizes),
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        inference_mode=True,
    )
    settings.save_pretrained(folder)
    save_file(tensors, folder / ADAPTERS_FILE, metadata={"format": "pt"})


# ---------------------------------------------------------------- checkpoints
def describe_adapters(config: Config) -> dict[str, Any]:
    """Describe the adapters in a checkpoint, and the model that they belong to; empty without adapters."""
    if not config.lora.rank:
        return {}
    return {"lora": asdict(config.lora), "base": config.model.weights}


def read_lora(facts: Mapping[str, Any]) -> LoraConfig:
    """Read what a checkpoint says about its adapters; rank 0 if it has none."""
    said = facts.get("lora") or {}
    known = {item.name for item in fields(LoraConfig)}
    values = {key: value for key, value in said.items() if key in known}
    values["targets"] = tuple(values.get("targets", ()))
    return LoraConfig(**values)


def check_same_adapters(path: Path, facts: Mapping[str, Any], lora: LoraConfig) -> None:
    """Raise RunError if a checkpoint does not have the adapters of this run."""
    theirs = read_lora(facts)
    for key in ("rank", "alpha", "targets"):
        value = getattr(lora, key)
        other = getattr(theirs, key)
        if value != other and (lora.rank or theirs.rank):
            raise RunError(
                f"{path} was trained with lora.{key} = {other}, here it is {value}\n"
                "  go on with the same [lora], or start a new run in another run.folder"
            )
