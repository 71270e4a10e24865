"""What follows from the sizes of a model: its parameters, and the floating point operations of training on one token.

    matrices     6 per weight that a token is multiplied with: 2 forward, 4 backward
    attention    12 x layers x width x tokens: scores and mixing, each 2 forward and 4 backward

The embedding is a look-up and does not count, but a head tied to it does. Attention counts as if every token saw the
whole sequence, and recomputation does not count. PaLM defined model FLOPs utilization (MFU) in this way (Chowdhery et
al. 2022), and others report it so.
"""

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
    matrices = 6.0 * _matrix_weights(sizes)
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
    return _matrix_weights(sizes) // (2 * sizes.layers * sizes.width)


def _matrix_weights(sizes: AnyModelConfig) -> int:
    """Return the number of weights in the matrices that multiply every token."""
    if isinstance(sizes, DecoderConfig):
        return count_decoder(sizes).matrices
    head = sizes.vocab * sizes.width
    if isinstance(sizes, GPTConfig | BertConfig):
        layer = 4 * sizes.width**2 + 2 * sizes.width * sizes.inner
        dense = sizes.width**2 if isinstance(sizes, BertConfig) else 0
        return sizes.layers * layer + dense + head
    keys = sizes.kv_heads * sizes.head_width
    attention = 2 * sizes.width**2 + 2 * sizes.width * keys
    layer = attention + 3 * sizes.width * sizes.inner
    return sizes.layers * layer + head
