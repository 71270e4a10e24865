"""Floating point operations of training on a token, and how many a device can do at most.

    forward and backward    6 for every weight that a token is multiplied with: 2 forward, 4 backward
    attention               12 x layers x width x tokens: scores and mixing, each 2 forward and 4 backward

The embedding is a look-up and counts nothing; a head tied to it counts. Attention counts as if every token saw the
whole sequence, and recomputing counts nothing: this is how model FLOPs utilization (MFU) was defined with PaLM
(Chowdhery et al. 2022), and what others report.
"""

from __future__ import annotations

from penstock.models.gpt import GPTConfig
from penstock.models.llama import LlamaConfig

PEAKS = {  # by the name that torch gives a device; dense bf16, from the makers' data sheets; first match counts
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
    """The most a device can do in a second, in bf16; None if it is not known.

    >>> peak_flops("NVIDIA H200"), peak_flops("NVIDIA A100-SXM4-80GB"), peak_flops("some CPU")
    (989000000000000.0, 312000000000000.0, None)
    """
    return next((peak for name, peak in PEAKS.items() if name in device), None)


def flops_per_token(sizes: LlamaConfig | GPTConfig, tokens: int) -> float:
    """Of training on one token of a sequence of so many."""
    return 6.0 * _multiplied(sizes) + 12.0 * sizes.layers * sizes.width * tokens


def _multiplied(sizes: LlamaConfig | GPTConfig) -> int:
    """Weights of the matrices that every token goes through."""
    head = sizes.vocab * sizes.width
    if isinstance(sizes, GPTConfig):
        return (
            sizes.layers * (4 * sizes.width**2 + 2 * sizes.width * sizes.inner) + head
        )
    keys = sizes.kv_heads * sizes.head_width
    layer = 2 * sizes.width**2 + 2 * sizes.width * keys + 3 * sizes.width * sizes.inner
    return sizes.layers * layer + head
