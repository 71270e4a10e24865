"""Hugging Face folders: where training may start, and what it may end with. Only safetensors; nothing is unpickled.

folder/config.json          sizes       ◄──►   LlamaConfig, GPTConfig
folder/*.safetensors        weights     ◄──►   our names, one tensor at a time: a rank reads its own alone
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from penstock.config import AUTO, BYTE_TOKENIZER, Config, names_a_file
from penstock.errors import ConfigError, FileError, ShapeError
from penstock.models import GPTConfig, LlamaConfig, gpt, llama
from penstock.train.data.tokenizer import TOKENIZER, ByteTokenizer
from penstock.train.weights import Sizes

LLAMA = {
    "vocab": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "inner": "intermediate_size",
    "eps": "rms_norm_eps",
}
GPT2 = {
    "vocab": "vocab_size",
    "width": "n_embd",
    "layers": "n_layer",
    "heads": "n_head",
    "positions": "n_positions",
    "eps": "layer_norm_epsilon",
}


# ---------------------------------------------------------------- sizes
def read_sizes(folder: Path) -> Sizes:
    """The sizes of the model in a folder; an error if it is one that ours are not."""
    file = folder / "config.json"
    try:
        said: Any = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        what = f"cannot read {file}: {error.strerror}"
        raise FileError(
            f"{what}\n  model.weights is a folder with config.json and *.safetensors"
        ) from None
    except (ValueError, RecursionError) as error:
        raise FileError(f"{file} is no JSON: {error}") from None
    if not isinstance(said, dict):
        raise FileError(f"{file} is no JSON object")
    family = said.get("model_type")
    if family not in ("llama", "gpt2"):
        raise FileError(f"{file} is of a model of type {family!r}; known: llama, gpt2")
    try:
        return _llama(said, file) if family == "llama" else _gpt(said, file)
    except KeyError as error:
        raise FileError(f"{file} does not say {error}") from None
    except (
        TypeError,
        AttributeError,
        ValueError,
        ZeroDivisionError,
        ShapeError,
    ) as error:
        raise FileError(f"{file} does not say the sizes of a model: {error}") from None


def _llama(said: dict[str, Any], file: Path) -> LlamaConfig:
    sizes = {ours: said[theirs] for ours, theirs in LLAMA.items()}
    rope = said.get("rope_parameters") or {}
    theta = float(rope.get("rope_theta", said.get("rope_theta", 10000.0)))
    scaled = said.get("rope_scaling") or (
        rope if rope.get("rope_type", "default") != "default" else None
    )
    head = said.get("head_dim") or sizes["width"] // sizes["heads"]
    _refuse(
        file,
        {
            "rope_scaling": scaled,
            "attention_bias": said.get("attention_bias"),
            "mlp_bias": said.get("mlp_bias"),
            "hidden_act": said.get("hidden_act", "silu")
            if said.get("hidden_act", "silu") != "silu"
            else None,
            "head_dim": head if head * sizes["heads"] != sizes["width"] else None,
        },
    )
    tied = bool(said.get("tie_word_embeddings", False))
    return LlamaConfig(
        kv_heads=said.get("num_key_value_heads") or sizes["heads"],
        theta=theta,
        tied=tied,
        **sizes,
    )


def _gpt(said: dict[str, Any], file: Path) -> GPTConfig:
    act = said.get("activation_function", "gelu_new")
    _refuse(
        file,
        {
            "activation_function": act if act != "gelu_new" else None,
            "add_cross_attention": said.get("add_cross_attention"),
        },
    )
    inner = said.get("n_inner") or 4 * said["n_embd"]
    tied = bool(said.get("tie_word_embeddings", True))
    return GPTConfig(
        inner=inner, tied=tied, **{ours: said[theirs] for ours, theirs in GPT2.items()}
    )


def _refuse(file: Path, features: Mapping[str, object]) -> None:
    for name, value in features.items():
        if value:
            raise FileError(
                f"{file} asks for {name} = {value}, which our model of this family does not have"
            )


def config_json(sizes: Sizes) -> dict[str, object]:
    """What transformers reads; the longest sequence is what it takes by default."""
    plain: dict[str, object] = {
        "dtype": "float32",
        "tie_word_embeddings": sizes.tied,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if isinstance(sizes, GPTConfig):
        return (
            plain
            | {theirs: getattr(sizes, ours) for ours, theirs in GPT2.items()}
            | {
                "architectures": ["GPT2LMHeadModel"],
                "model_type": "gpt2",
                "n_inner": sizes.inner,
                "n_ctx": sizes.positions,
                "activation_function": "gelu_new",
                "attn_pdrop": 0.0,
                "embd_pdrop": 0.0,
                "resid_pdrop": 0.0,
            }
        )
    return (
        plain
        | {theirs: getattr(sizes, ours) for ours, theirs in LLAMA.items()}
        | {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_key_value_heads": sizes.kv_heads,
            "rope_theta": sizes.theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": sizes.theta},
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
        }
    )


# ---------------------------------------------------------------- tokenizer
def settle_tokenizer(config: Config) -> Config:
    """The same config, with "auto" as the tokenizer of the folder to start from; without such a folder, as bytes.

    Raises if the folder has no tokenizer.json and its model has more or fewer words than there are bytes.
    """
    if config.data.tokenizer != AUTO:
        return config
    name, folder = BYTE_TOKENIZER, config.model.weights
    if folder and (Path(folder) / TOKENIZER).is_file():
        name = str(Path(folder) / TOKENIZER)
    elif folder and (words := read_sizes(Path(folder)).vocab) != ByteTokenizer.vocab:
        raise ConfigError(
            f"the model in {folder} has {words} words, so it was not trained on bytes, but there is no {TOKENIZER} "
            "beside it\n  name one in data.tokenizer; data.tokenizer=bytes trains it on bytes all the same"
        )
    return replace(config, data=replace(config.data, tokenizer=name))


# ---------------------------------------------------------------- weights
def read_weights(
    folder: Path, names: Iterable[str], sizes: Sizes
) -> Iterator[tuple[str, Tensor]]:
    """Of these parameters of ours the tensors that a folder has."""
    where = weight_files(folder)
    for name in names:
        theirs = _their_name(name, sizes)
        found = next(
            (
                one
                for one in (theirs, theirs.removeprefix("transformer."))
                if one in where
            ),
            None,
        )
        if found is None:
            raise FileError(f"{folder} has no weights {theirs}, which {name} needs")
        with safe_open(where[found], framework="pt") as file:
            yield name, _ours(theirs, file.get_tensor(found), sizes)


def weight_files(folder: Path) -> dict[str, Path]:
    """In which file each tensor is."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileError(
            f"{folder} has no *.safetensors\n  older files are pickles, which Penstock does not open"
        )
    where: dict[str, Path] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                where |= dict.fromkeys(file.keys(), path)
        except SafetensorError as error:
            raise FileError(f"{path} is damaged: {error}") from None
    return where


def _their_name(name: str, sizes: Sizes) -> str:
    blank = torch.empty(1, 1, device="meta")
    if isinstance(sizes, GPTConfig):
        return next(iter(gpt.gpt_to_hf({name: blank}, replace(sizes, tied=False))))
    return next(iter(llama.llama_to_hf({name: blank}, replace(sizes, tied=False))))


def _ours(theirs: str, tensor: Tensor, sizes: Sizes) -> Tensor:
    if isinstance(sizes, GPTConfig):
        return next(
            iter(gpt.gpt_from_hf({theirs: tensor}, replace(sizes, tied=False)).values())
        )
    return next(
        iter(llama.llama_from_hf({theirs: tensor}, replace(sizes, tied=False)).values())
    )


def write_folder(
    folder: Path,
    weights: Mapping[str, Tensor],
    sizes: Sizes,
    tokenizer: str = BYTE_TOKENIZER,
) -> None:
    """A folder that `transformers` loads; a tokenizer.json goes along."""
    states = (
        gpt.gpt_to_hf(weights, sizes)
        if isinstance(sizes, GPTConfig)
        else llama.llama_to_hf(weights, sizes)
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(
            {name: tensor.contiguous() for name, tensor in states.items()},
            folder / "model.safetensors",
            metadata={"format": "pt"},
        )
        (folder / "config.json").write_text(
            json.dumps(config_json(sizes), indent=2) + "\n", encoding="utf-8"
        )
        if names_a_file(tokenizer):
            shutil.copyfile(tokenizer, folder / TOKENIZER)
    except (OSError, SafetensorError) as error:
        for name in (
            "model.safetensors",
            "config.json",
            TOKENIZER,
        ):  # half of it is no model
            (folder / name).unlink(missing_ok=True)
        raise FileError(
            f"cannot write {folder}: {getattr(error, 'strerror', None) or error}"
        ) from None
