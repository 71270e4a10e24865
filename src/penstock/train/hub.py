"""Reads and writes Hugging Face folders: a model to start from, or the model that training made.

folder/config.json          sizes       ◄──►   LlamaConfig, GPTConfig
folder/*.safetensors        weights     ◄──►   our names, one tensor at a time: a rank reads only its own

Only safetensors are read; nothing is unpickled. A run that starts from a folder keeps what it holds besides weights,
and an export gives it back:

folder of the user                    folder of the run              folder of the export
config.json                 ──►       huggingface/config.json   ──►  config.json, with the new dtype
generation_config.json, chat_template.jinja, tokenizer_config.json, ...  unchanged
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from penstock.config import (
    names_a_file,
)
from penstock.errors import FileError, ShapeError
from penstock.models import (
    BertConfig,
    DecoderConfig,
    GPTConfig,
    LlamaConfig,
)
from penstock.models.decoder import decoder_blueprint, load_whole, read_decoder
from penstock.models.family import family_of
from penstock.models.gpt import gpt_to_hf
from penstock.models.split import tied_names
from penstock.train.data.tokenizer import TOKENIZER
from penstock.train.weights import Sizes

# Our names of sizes, and those in a config.json.
LLAMA_KEYS = {
    "vocab": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "inner": "intermediate_size",
    "eps": "rms_norm_eps",
}
BERT_KEYS = {
    "vocab": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "inner": "intermediate_size",
    "positions": "max_position_embeddings",
    "types": "type_vocab_size",
    "eps": "layer_norm_eps",
}
GPT2_KEYS = {
    "vocab": "vocab_size",
    "width": "n_embd",
    "layers": "n_layer",
    "heads": "n_head",
    "positions": "n_positions",
    "eps": "layer_norm_epsilon",
}


def _download(folder: Path) -> str:
    """How to get a model if a name on the Hub was given instead of a folder."""
    if folder.exists() or folder.is_absolute():
        return ""
    name = folder.as_posix()
    return f"\n  `hf download {name} --local-dir {name}` gets one of this name from the Hugging Face Hub"


# ---------------------------------------------------------------- sizes
def read_sizes(folder: Path) -> Sizes:
    """Read the sizes of the model in a folder; raise if we have no such model."""
    file = folder / CONFIG
    try:
        content: Any = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        what = f"cannot read {file}: {error.strerror}"
        raise FileError(
            f"{what}\n  model.path is a folder with config.json and *.safetensors, or a config.json for new weights"
            f"{_download(folder)}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise FileError(f"{file} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise FileError(f"{file} is not a JSON object")
    if content.get("quantization_config"):
        raise FileError(
            f"{file} has a quantization_config: its weights are quantized, and Penstock trains plain ones\n"
            "  load the model with transformers, call model.dequantize() and save it with save_pretrained"
        )
    family = content.get("model_type")
    readers: dict[object, Callable[[dict[str, Any]], Sizes | None]] = {
        "llama": _llama,
        "gpt2": _gpt,
        "bert": partial(_bert, file),
    }
    try:
        ours = readers[family](content) if family in readers else None
    except KeyError as error:
        raise FileError(f"{file} does not have {error}") from None
    except (
        TypeError,
        AttributeError,
        ValueError,
        ZeroDivisionError,
        ShapeError,
    ) as error:
        raise FileError(f"{file} does not have the sizes of a model: {error}") from None
    return read_decoder(folder) if ours is None else ours


def _llama(content: dict[str, Any]) -> LlamaConfig | None:
    """The sizes of our own Llama; None if it lacks something that the config asks for."""
    sizes = {ours: content[theirs] for ours, theirs in LLAMA_KEYS.items()}
    rope = content.get("rope_parameters") or {}
    theta = float(rope.get("rope_theta", content.get("rope_theta", 10000.0)))
    scaled = content.get("rope_scaling") or (
        rope if rope.get("rope_type", "default") != "default" else None
    )
    head = content.get("head_dim") or sizes["width"] // sizes["heads"]
    activation = content.get("hidden_act", "silu")
    if scaled or content.get("attention_bias") or content.get("mlp_bias"):
        return None
    if content.get("per_layer_config"):
        return None
    if activation != "silu" or head * sizes["heads"] != sizes["width"]:
        return None
    tied = bool(content.get("tie_word_embeddings", False))
    return LlamaConfig(
        kv_heads=content.get("num_key_value_heads") or sizes["heads"],
        theta=theta,
        tied=tied,
        **sizes,
    )


def _gpt(content: dict[str, Any]) -> GPTConfig | None:
    """The sizes of our own GPT; None if it lacks something that the config asks for."""
    activation = content.get("activation_function", "gelu_new")
    if activation != "gelu_new" or content.get("add_cross_attention"):
        return None
    if content.get("scale_attn_by_inverse_layer_idx"):
        return None
    if not content.get("scale_attn_weights", True):
        return None
    inner = content.get("n_inner") or 4 * content["n_embd"]
    tied = bool(content.get("tie_word_embeddings", True))
    return GPTConfig(
        inner=inner,
        tied=tied,
        **{ours: content[theirs] for ours, theirs in GPT2_KEYS.items()},
    )


def _bert(file: Path, content: dict[str, Any]) -> BertConfig | None:
    """The sizes of our own Bert; None if it has another activation."""
    if content.get("hidden_act", "gelu") != "gelu":
        return None
    expected = {
        "position_embedding_type": "absolute",
        "is_decoder": False,
        "add_cross_attention": False,
    }
    for key, value in expected.items():
        said = content.get(key, value)
        if said not in (value, None):
            raise FileError(
                f"{file} asks for {key} = {said!r}, which Penstock's Bert does not have; it has {value!r}"
            )
    defaults = {"type_vocab_size": 2, "layer_norm_eps": 1e-12}
    return BertConfig(
        tied=bool(content.get("tie_word_embeddings", True)),
        padding=content.get("pad_token_id", 0),
        **{ours: {**defaults, **content}[theirs] for ours, theirs in BERT_KEYS.items()},
    )


OwnSizes = LlamaConfig | GPTConfig | BertConfig


def config_json(sizes: OwnSizes) -> dict[str, object]:
    """Return the config.json of one of our models for transformers."""
    own: dict[str, object]
    if isinstance(sizes, BertConfig):
        keys = BERT_KEYS
        own = {
            "architectures": ["BertForMaskedLM"],
            "model_type": "bert",
            "hidden_act": "gelu",
            "pad_token_id": sizes.padding,
            "attention_probs_dropout_prob": 0.0,
            "hidden_dropout_prob": 0.0,
        }
    elif isinstance(sizes, GPTConfig):
        keys = GPT2_KEYS
        own = {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "n_inner": sizes.inner,
            "n_ctx": sizes.positions,
            "activation_function": "gelu_new",
            "attn_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "resid_pdrop": 0.0,
        }
    else:
        keys = LLAMA_KEYS
        own = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_key_value_heads": sizes.kv_heads,
            "rope_theta": sizes.theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": sizes.theta},
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
        }
    return {
        "dtype": "float32",
        "tie_word_embeddings": sizes.tied,
        "bos_token_id": None,
        "eos_token_id": None,
        **{theirs: getattr(sizes, ours) for ours, theirs in keys.items()},
        **own,
    }


# ---------------------------------------------------------------- weights
def read_weights(
    folder: Path, names: Iterable[str], sizes: Sizes
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a folder has for these parameters of ours."""
    if isinstance(sizes, DecoderConfig):
        yield from _read_decoder_weights(folder, names, sizes)
        return
    where = weight_files(folder)
    for name in names:
        theirs = _their_name(name, sizes)
        other_names = (
            theirs.removeprefix("transformer."),
            theirs.replace("predictions.bias", "predictions.decoder.bias"),
            # The first BERTs, among them bert-base-uncased, name the weights of a norm in this way.
            theirs.replace("LayerNorm.weight", "LayerNorm.gamma"),
            theirs.replace("LayerNorm.bias", "LayerNorm.beta"),
        )
        found = next((one for one in (theirs, *other_names) if one in where), None)
        if found is None:
            raise FileError(
                f"{folder} has no weights {theirs}, which {name} needs\n"
                "  is config.json that of these weights? name the config.json in model.path to train "
                "from scratch"
            )
        with safe_open(where[found], framework="pt") as file:
            yield name, _ours(theirs, file.get_tensor(found), sizes)


def _read_decoder_weights(
    folder: Path, names: Iterable[str], sizes: DecoderConfig
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a decoder of transformers, whose parameters have the same names as in its files.

    Some families (experts) have other names in their files. Then transformers reads the whole model, and every rank
    needs memory for it while it starts.
    """
    where = weight_files(folder)
    names = list(names)
    found: dict[str, str] = {}  # names in the files that differ from ours
    if any(name not in where for name in names):
        # A file has only one of the names of a tied weight.
        for other, name in tied_names(decoder_blueprint(sizes)).items():
            if other in where:
                found.setdefault(name, other)
    if any(found.get(name, name) not in where for name in names):
        whole = load_whole(folder, sizes)
        yield from ((name, whole[name]) for name in names)
        return
    for name in names:
        theirs = name if name in where else found[name]
        with safe_open(where[theirs], framework="pt") as file:
            yield name, file.get_tensor(theirs)


def weight_files(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor."""
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


def _their_name(name: str, sizes: OwnSizes) -> str:
    blank = torch.empty(1, 1, device="meta")
    if not isinstance(sizes, BertConfig):
        sizes = replace(sizes, tied=False)  # A tied head has a name, too.
    return next(iter(family_of(sizes).to_hf({name: blank}, sizes)))


def their_matrix(path: str, sizes: Sizes) -> str:
    """Return the path that a matrix of ours has in a Hugging Face model."""
    if isinstance(sizes, DecoderConfig):
        return path
    return _their_name(f"{path}.weight", sizes).removesuffix(".weight")


def their_rows(path: str, rows: Tensor, sizes: Sizes) -> Tensor:
    """Return the rows of a matrix of ours in the order that they have in a Hugging Face model."""
    if not isinstance(sizes, GPTConfig):
        return rows
    whole = replace(sizes, tied=False)
    theirs = gpt_to_hf({f"{path}.weight": rows}, whole)
    return next(iter(theirs.values())).t()  # GPT-2 stores matrices transposed.


def _ours(theirs: str, tensor: Tensor, sizes: OwnSizes) -> Tensor:
    from_hf = family_of(sizes).from_hf
    if from_hf is None:
        return tensor
    return next(iter(from_hf({theirs: tensor}, replace(sizes, tied=False)).values()))


@contextmanager
def whole_folder(folder: Path) -> Iterator[None]:
    """Create a folder if it is missing, and empty it again if what is written there is cut off: half is no model."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except (OSError, SafetensorError) as error:
        for file in folder.glob("*"):
            file.unlink(missing_ok=True)
        raise FileError(
            f"cannot write {folder}: {getattr(error, 'strerror', None) or error}"
        ) from None


def write_model(
    folder: Path, weights: Mapping[str, Tensor], sizes: Sizes, dtype: str = "float32"
) -> None:
    """Write a model that `transformers` loads into a folder."""
    if isinstance(sizes, DecoderConfig):
        _write_decoder(folder, weights, sizes)
        return
    states = family_of(sizes).to_hf(weights, sizes)
    save_file(
        {name: tensor.contiguous() for name, tensor in states.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    content = config_json(sizes) | {"dtype": dtype}
    _write_config(folder, content)


def write_tokenizer(folder: Path, tokenizer: str) -> None:
    """Write a tokenizer.json into a folder; the tokenizer of bytes has none."""
    if names_a_file(tokenizer):
        shutil.copyfile(tokenizer, folder / TOKENIZER)


def _write_config(folder: Path, content: Mapping[str, object]) -> None:
    text = json.dumps(content, indent=2) + "\n"
    (folder / CONFIG).write_text(text, encoding="utf-8")


def _write_decoder(
    folder: Path, weights: Mapping[str, Tensor], sizes: DecoderConfig
) -> None:
    """Let transformers write its own model, in its own names and with its own config."""
    model: Any = decoder_blueprint(sizes)
    state = dict(weights)
    for other, name in tied_names(model).items():
        if name in weights:
            state[other] = weights[name]
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    model.save_pretrained(folder)


ORIGIN_FOLDER = "huggingface"
CONFIG = "config.json"
MODEL_FILES = (CONFIG, "generation_config.json")
# Files that belong to a tokenizer.json; with another tokenizer they would be wrong.
TOKENIZER_FILES = (
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
)


def keep_origin(source: Path, run: Path) -> None:
    """Copy what an export will need from a Hugging Face folder into the folder of a run."""
    kept = run / ORIGIN_FOLDER
    kept.mkdir(parents=True, exist_ok=True)
    _copy((*MODEL_FILES, *TOKENIZER_FILES), source, kept)


def find_origin(path: Path) -> Path | None:
    """The files of the model from which a run, or a checkpoint, started; None if its first weights were random."""
    for folder in (path, path.parent.parent):
        kept = folder / ORIGIN_FOLDER
        if (kept / CONFIG).is_file():
            return kept
    return path if (path / CONFIG).is_file() else None


def give_back(origin: Path, folder: Path, dtype: str) -> None:
    """Write what the original had into an export, unless training has replaced it."""
    file = origin / CONFIG
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FileError(f"cannot read {file}: {error}") from None
    key = "torch_dtype" if "torch_dtype" in content else "dtype"
    _write_config(folder, {**content, key: dtype})
    _copy([name for name in MODEL_FILES if name != CONFIG], origin, folder)
    give_back_tokenizer(origin, folder)


def give_back_tokenizer(origin: Path, folder: Path) -> None:
    """Write what belongs to the original's tokenizer into an export, if the model was trained with it."""
    theirs, ours = origin / TOKENIZER, folder / TOKENIZER
    same = ours.is_file() == theirs.is_file()
    if ours.is_file() and theirs.is_file():
        same = theirs.read_bytes() == ours.read_bytes()
    if same:
        _copy(TOKENIZER_FILES, origin, folder)


def _copy(names: Iterable[str], origin: Path, folder: Path) -> None:
    for name in names:
        if (origin / name).is_file():
            shutil.copyfile(origin / name, folder / name)
