"""What follows from the sizes of a model: its parameters, and the floating point operations of training on one token.

    matrices     6 per weight that a token is multiplied with: 2 forward, 4 backward
    attention    12 x layers x width x tokens: scores and mixing, each 2 forward and 4 backward

The embedding is a look-up and does not count, but a head tied to it does. Attention counts as if every token saw the
whole sequence, and recomputation does not count. PaLM defined model FLOPs utilization (MFU) in this way (Chowdhery et
al. 2022), and others report it so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from penstock.families import (
    BertConfig,
    FamilySizes,
    GPTConfig,
    LlamaConfig,
    ParameterCounts,
)
from penstock.models.bert import Bert, bert_to_hf
from penstock.models.decoder import DecoderConfig, count_decoder
from penstock.models.gpt import GPT, gpt_from_hf, gpt_to_hf
from penstock.models.llama import Llama, llama_from_hf, llama_to_hf

AnyModelConfig = FamilySizes | DecoderConfig
Weights = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Family:
    """What differs between our own families of models."""

    name: str
    build: Callable[[Any], nn.Module]
    count: Callable[[Any], ParameterCounts]
    to_hf: Callable[[Weights, Any], dict[str, Tensor]]  # names of Hugging Face
    from_hf: Callable[[Weights, Any], dict[str, Tensor]] | None  # None: one by one


def family_of(sizes: FamilySizes) -> Family:
    """The family that a model of these sizes belongs to."""
    return FAMILIES[type(sizes)]


# ---------------------------------------------------------------- parameters
def count_parameters(sizes: AnyModelConfig) -> ParameterCounts:
    """Count the parameters of the embedding, one layer, the head and the whole model."""
    if isinstance(sizes, DecoderConfig):
        return count_decoder(sizes)
    return family_of(sizes).count(sizes)


def _count_llama(sizes: LlamaConfig) -> ParameterCounts:
    """Nothing has a bias; a layer has two norms, and the head has one."""
    keys = sizes.kv_heads * sizes.head_width
    attention = 2 * sizes.width**2 + 2 * sizes.width * keys
    layer = attention + 3 * sizes.width * sizes.inner
    return _counts(sizes, 0, (layer, 2 * sizes.width), (0, sizes.width))


def _count_gpt(sizes: GPTConfig) -> ParameterCounts:
    """The norm of the head has a bias."""
    return _counts(sizes, sizes.positions, _biased_layer(sizes), (0, 2 * sizes.width))


def _count_bert(sizes: BertConfig) -> ParameterCounts:
    """The embedding has a norm; the head has a dense layer, a norm, and a bias for every word."""
    rows = sizes.positions + sizes.types + 2
    head = (sizes.width**2, sizes.vocab + 3 * sizes.width)
    return _counts(sizes, rows, _biased_layer(sizes), head)


def _biased_layer(sizes: GPTConfig | BertConfig) -> tuple[int, int]:
    """Query, key, value, output and the MLP, all with biases, and two norms: matrices and vectors."""
    matrices = 4 * sizes.width**2 + 2 * sizes.width * sizes.inner
    return matrices, 9 * sizes.width + sizes.inner


def _counts(
    sizes: FamilySizes, rows: int, layer: tuple[int, int], head: tuple[int, int]
) -> ParameterCounts:
    """Counts of a model whose embedding has these rows besides words; layer and head have matrices and vectors.

    The output matrix comes on top.
    """
    matrix = sizes.vocab * sizes.width  # of the embedding, and of the output
    embed = matrix + rows * sizes.width
    outputs = matrix + sum(head)
    total = embed + sizes.layers * sum(layer) + outputs
    if sizes.tied:
        total -= matrix
    matrices = sizes.layers * layer[0] + head[0] + matrix
    return ParameterCounts(embed, sum(layer), outputs, total, matrices)


FAMILIES: dict[type, Family] = {
    LlamaConfig: Family("llama", Llama, _count_llama, llama_to_hf, llama_from_hf),
    GPTConfig: Family("gpt", GPT, _count_gpt, gpt_to_hf, gpt_from_hf),
    BertConfig: Family("bert", Bert, _count_bert, bert_to_hf, None),
}


# ---------------------------------------------------------------- operations
# Dense bf16 operations per second, from the vendors' data sheets, by a part of the name
# that torch gives the device. The first match counts.
PEAK_FLOPS = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "B100": 1750e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A40": 150e12,
    "A30": 165e12,
    "A10G": 70e12,
    "A10": 125e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "MI300X": 1307e12,
    "MI250X": 383e12,
}


def peak_flops(device: str) -> float | None:
    """Return the peak of a device in bf16 operations per second; None if unknown.

    >>> peak_flops("NVIDIA H200"), peak_flops("NVIDIA A100-SXM4-80GB"), peak_flops("some CPU")
    (989000000000000.0, 312000000000000.0, None)
    """
    for name, peak in PEAK_FLOPS.items():
        if name in device:
            return peak
    return None


def flops_per_token(sizes: AnyModelConfig, tokens: int) -> float:
    """Return the operations of training on one token of a sequence of `tokens`."""
    matrices = 6.0 * count_parameters(sizes).matrices
    attention = 12.0 * sizes.layers * sizes.width * tokens
    return matrices + attention


def share_of_flops(sizes: AnyModelConfig, tokens: int, layers: float) -> float:
    """Return the share of the operations that is left if a token passes through only this many layers and the head.

    >>> share_of_flops(GPTConfig(256, 64, 8, 4, 256, 128), 128, layers=8)
    1.0
    """
    whole = flops_per_token(sizes, tokens)
    head = 6.0 * sizes.vocab * sizes.width
    return 1.0 - (whole - head) * (1.0 - layers / sizes.layers) / whole


def keys_per_token(sizes: AnyModelConfig) -> int:
    """Return the number of keys with which attention takes as long as a token's matrices."""
    return count_parameters(sizes).matrices // (2 * sizes.layers * sizes.width)
