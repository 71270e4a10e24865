"""Counts the parameters of a model from its sizes, without building it."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.families import BertConfig, GPTConfig, LlamaConfig
from penstock.models.decoder import DecoderConfig, count_decoder

AnyModelConfig = LlamaConfig | GPTConfig | BertConfig | DecoderConfig


@dataclass(frozen=True, slots=True)
class ParameterCounts:
    """The number of parameters of the pieces of a model.

    A tied output matrix counts in both `embed` and `head`, but only once in `total`.
    """

    embed: int
    layer: int
    head: int
    total: int


def count_parameters(sizes: AnyModelConfig) -> ParameterCounts:
    """Count the parameters of the embedding, one layer, the head and the whole model."""
    if isinstance(sizes, DecoderConfig):
        counts = count_decoder(sizes)
        return ParameterCounts(counts.embed, counts.layer, counts.head, counts.total)
    matrix = sizes.vocab * sizes.width  # of the embedding, and of the output
    if isinstance(sizes, GPTConfig):
        embed = matrix + sizes.positions * sizes.width
        layer = _gpt_layer(sizes)
        head = matrix + 2 * sizes.width  # and a norm with a bias
    elif isinstance(sizes, BertConfig):
        rows = sizes.positions + sizes.types + 2  # and a norm with a bias
        embed = matrix + rows * sizes.width
        layer = _gpt_layer(sizes)
        head = matrix + sizes.vocab + sizes.width**2 + 3 * sizes.width
    else:
        embed = matrix
        layer = _llama_layer(sizes)
        head = matrix + sizes.width
    total = embed + sizes.layers * layer + head
    if sizes.tied:
        total -= matrix
    return ParameterCounts(embed, layer, head, total)


def _gpt_layer(sizes: GPTConfig | BertConfig) -> int:
    """Count query, key, value, output and the MLP, all with biases, and two norms."""
    attention = 4 * sizes.width**2 + 4 * sizes.width
    mlp = 2 * sizes.width * sizes.inner + sizes.inner + sizes.width
    norms = 4 * sizes.width
    return attention + mlp + norms


def _llama_layer(sizes: LlamaConfig) -> int:
    """Count the matrices of a layer, which have no biases, and two norms."""
    keys = sizes.kv_heads * sizes.head_width
    attention = 2 * sizes.width**2 + 2 * sizes.width * keys
    mlp = 3 * sizes.width * sizes.inner
    norms = 2 * sizes.width
    return attention + mlp + norms
