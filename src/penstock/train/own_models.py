"""The model of a config as numbers: our own families need no torch, so that a plan for known GPUs needs none either."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.config import AUTO, BYTE_TOKENIZER, Config, ModelConfig, trained_words
from penstock.errors import ConfigError, FileError
from penstock.families import (
    BertConfig,
    FamilySizes,
    GPTConfig,
    LlamaConfig,
    check_family_shares,
)
from penstock.formats.text import read_text
from penstock.plan.space import Limits
from penstock.train.data.masking import bert_words
from penstock.train.data.tokenizer import tokenizer_of

if TYPE_CHECKING:
    from penstock.models.family import AnyModelConfig


def settled_sizes(config: Config) -> tuple[Config, FamilySizes]:
    """Return a config with its tokenizer settled, and the sizes of its model, which is not in a folder."""
    if config.data.tokenizer == AUTO:
        data = replace(config.data, tokenizer=BYTE_TOKENIZER)
        config = replace(config, data=data)
    sizes = sizes_of(config.model, vocab_of(config), config.data.seq_len)
    check_family_shares(sizes, config.parallel.tp)
    return config, sizes


def vocab_of(config: Config) -> int:
    """Return the number of words that the tokenizer of a config has for its model."""
    data = config.data
    words = trained_words(data.tokenizer)
    if words and config.model.family != "bert":
        return words  # Planning trains no tokenizer.
    tokenizer = tokenizer_of(data.tokenizer)
    if config.model.family == "bert":
        return bert_words(tokenizer, data.segments).vocab
    return tokenizer.vocab


def sizes_of(model: ModelConfig, vocab: int, tokens: int) -> FamilySizes:
    """Return the sizes that a config, its tokenizer and its data ask for."""
    words = model.vocab_size or vocab
    if words < vocab:
        raise ConfigError(
            f"model.vocab_size = {words} is less than the vocabulary size of the tokenizer, {vocab}; "
            "0 takes as many"
        )
    shape = (words, model.hidden_size, model.layers, model.heads)
    if model.family == "gpt":
        return GPTConfig(
            *shape, model.intermediate_size, tokens, tied=model.tie_embeddings
        )
    if model.family == "bert":
        return BertConfig(
            *shape,
            model.intermediate_size,
            tokens,
            tied=model.tie_embeddings,
            padding=None,
        )
    return LlamaConfig(
        *shape,
        model.kv_heads,
        model.intermediate_size,
        theta=model.rope_theta,
        tied=model.tie_embeddings,
    )


def config_of(sizes: AnyModelConfig) -> ModelConfig:
    """Return the config of a model with these sizes; the inverse of `sizes_of`."""
    if isinstance(sizes, GPTConfig | BertConfig):
        return ModelConfig(
            "gpt" if isinstance(sizes, GPTConfig) else "bert",
            sizes.layers,
            sizes.width,
            sizes.heads,
            sizes.heads,
            sizes.inner,
            sizes.vocab,
            tie_embeddings=sizes.tied,
        )
    theta = sizes.theta if isinstance(sizes, LlamaConfig) else ModelConfig().rope_theta
    return ModelConfig(
        "llama",
        sizes.layers,
        sizes.width,
        sizes.heads,
        sizes.kv_heads,
        sizes.inner,
        sizes.vocab,
        rope_theta=theta,
        tie_embeddings=sizes.tied,
    )


# What a config.json of transformers leaves out if the embedding and the head share their weights.
TIED_BY_DEFAULT = ("gpt2", "gemma", "gemma2", "gemma3_text")
OWN_TYPES = ("llama", "gpt2")


def folder_sizes(folder: Path) -> AnyModelConfig:
    """Return the sizes of a Hugging Face model, for planning, from its config.json.

    A Llama or a GPT-2 needs no torch, and no other decoder without experts if transformers is missing.
    """
    file = folder / "config.json"
    text = read_text(file, "config", "model.path is a Hugging Face folder")
    try:
        content = json.loads(text)
        kind = content.get("model_type")
        installed = find_spec("torch") and find_spec("transformers")
        if kind in OWN_TYPES or not installed:
            return _sizes_in(content, kind)
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise FileError(f"{file} does not have the sizes of a model: {error}") from None
    from penstock.train.hub import read_sizes  # noqa: PLC0415  # torch

    return read_sizes(folder)


def _sizes_in(content: dict[str, Any], kind: str | None) -> FamilySizes:
    tied = bool(content.get("tie_word_embeddings", kind in TIED_BY_DEFAULT))
    if kind == "gpt2":
        width = content["n_embd"]
        return GPTConfig(
            content["vocab_size"],
            width,
            content["n_layer"],
            content["n_head"],
            content.get("n_inner") or 4 * width,
            content["n_positions"],
            tied=tied,
        )
    heads = content["num_attention_heads"]
    return LlamaConfig(
        content["vocab_size"],
        content["hidden_size"],
        content["num_hidden_layers"],
        heads,
        content.get("num_key_value_heads") or heads,
        content["intermediate_size"],
        tied=tied,
    )


def is_sliceable(sizes: AnyModelConfig) -> bool:
    """Whether a model of these sizes can run slice by slice."""
    if isinstance(sizes, LlamaConfig | GPTConfig | BertConfig):
        return not isinstance(sizes, BertConfig)
    from penstock.models import decoder_blueprint  # noqa: PLC0415  # torch
    from penstock.models.split import find_layout  # noqa: PLC0415  # torch

    return not find_layout(decoder_blueprint(sizes)).unsliceable


def limits_of(sizes: AnyModelConfig, limits: Limits) -> Limits:
    """Return the limits without slices, if a model of these sizes cannot run slice by slice."""
    return limits if is_sliceable(sizes) else replace(limits, slices=1)
