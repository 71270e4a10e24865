"""How many parameters a model has, counted from its sizes without building it."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.models.gpt import GPTConfig
from penstock.models.llama import LlamaConfig


@dataclass(frozen=True, slots=True)
class Counts:
    """Parameters of the pieces of a model. A tied output matrix is in `embed` and in `head`; `total` counts it once."""

    embed: int
    layer: int
    head: int
    total: int


def parameters_of(sizes: LlamaConfig | GPTConfig) -> Counts:
    """Counts the embedding, one layer, the head, and the whole model."""
    width, inner, words = sizes.width, sizes.inner, sizes.vocab * sizes.width
    if isinstance(sizes, GPTConfig):
        attention = (
            4 * width**2 + 4 * width
        )  # query, key, value and output, each with a bias
        mlp = 2 * width * inner + inner + width
        embed, layer, head = (
            words + sizes.positions * width,
            attention + mlp + 4 * width,
            words + 2 * width,
        )
    else:
        keys = sizes.kv_heads * sizes.head_width
        attention = 2 * width**2 + 2 * width * keys
        embed, layer, head = (
            words,
            attention + 3 * width * inner + 2 * width,
            words + width,
        )
    total = embed + sizes.layers * layer + head - (words if sizes.tied else 0)
    return Counts(embed, layer, head, total)
