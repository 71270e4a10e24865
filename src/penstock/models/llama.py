"""Llama: rotary positions, grouped queries, RMS norms and a gated MLP.

It runs on one device and knows nothing about pipelines. Dropout (`penstock.models.layer`) is off unless it is set.

x ──┬─ norm ─ attention ─(+)─┬─ norm ─ mlp ─(+)─►        one layer
    └───────────────────────┘└──────────────┘
q = turn(Wq x)   k = turn(Wk x)   v = Wv x               turn: rotate pairs of features by position * frequency
heads share keys and values in groups of heads / kv_heads
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from penstock.families import LlamaConfig
from penstock.models.attention import attend, token_positions
from penstock.models.hf import inverse_names, rename, saved_once
from penstock.models.layer import NormedHead, PreNormLayer
from penstock.models.slice import Slice
from penstock.models.split import Decoder, draw_weights


class Rotary(nn.Module):
    """The angles by which each position turns its queries and keys.

    It stores no table, so there is nothing to move, cast or save. The angles are
    computed in float32 whatever the type of x is, because every Llama was trained so.
    """

    def __init__(self, head_width: int, theta: float) -> None:
        super().__init__()
        self.head_width = head_width
        self.theta = theta

    def forward(self, x: Tensor, piece: Slice | None = None) -> tuple[Tensor, Tensor]:
        """Return the cosines, and the sines with a negative first half.

        Both are (tokens, head_width), or (rows, 1, tokens, head_width) if rows differ.
        """
        return self.angles(x, token_positions(x, piece))

    def forward_slice(
        self, call: Callable[..., Any], x: Tensor, piece: Slice
    ) -> tuple[Tensor, Tensor]:
        """Run a slice, with `call` for the methods that see only tensors, so that they can be compiled."""
        angles: tuple[Tensor, Tensor] = call(self.angles, x, token_positions(x, piece))
        return angles

    def angles(self, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of these positions, for an x of this type."""
        pair = torch.arange(0, self.head_width, 2, device=x.device, dtype=torch.float32)
        frequency = 1.0 / self.theta ** (pair / self.head_width)
        if position.dim() > 1:
            position = position[:, None]
        angles = position[..., None].float() * frequency
        dtype = torch.promote_types(x.dtype, torch.float32)
        cos = angles.cos().to(dtype)
        sin = angles.sin().to(dtype)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


class _Turn(torch.autograd.Function):
    """Takes four kernels forward and four backward, and saves only the angles."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, sin, -1.0), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, direction: float) -> Tensor:
    """Turn x by the angles if the direction is 1, back if it is -1."""
    other_half = x.roll(x.shape[-1] // 2, -1)
    y = torch.addcmul(x * cos, other_half, sin, value=direction)
    return y.to(x.dtype)


def rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate feature i with feature i + half, in float32 or more."""
    if torch.compiler.is_compiling():  # the compiler fuses it into one kernel
        return _turn(x, cos, sin, 1.0)
    y: Tensor = _Turn.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return y


class LlamaAttention(nn.Module):
    """Causal attention in which groups of heads share keys and values."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_width = config.head_width
        self.grouped = config.kv_heads != config.heads
        kv_width = config.kv_heads * config.head_width
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, kv_width, bias=False)
        self.value = nn.Linear(config.width, kv_width, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=False)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, piece: Slice | None = None
    ) -> Tensor:
        """Mix the tokens of x: a whole sequence, or a slice of one."""
        q, k, v = self.project(x, cos, sin)
        y: Tensor = self.output(self.mix(q, k, v, piece))
        return y

    def project(
        self, x: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries, keys and values of x."""
        q = rotate_half(self.heads(self.query(x)), cos, sin)
        k = rotate_half(self.heads(self.key(x)), cos, sin)
        return q, k, self.heads(self.value(x))

    def mix(self, q: Tensor, k: Tensor, v: Tensor, piece: Slice | None) -> Tensor:
        """Mix the values of all heads."""
        return attend(self, q, k, v, piece, self.grouped)

    def heads(self, x: Tensor) -> Tensor:
        """Reshape (batch, tokens, heads * head_width) to (batch, heads, tokens, head_width)."""
        return x.view(*x.shape[:-1], -1, self.head_width).transpose(1, 2)


class LlamaMLP(nn.Module):
    """The MLP of a layer: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.inner, bias=False)
        self.up = nn.Linear(config.width, config.inner, bias=False)
        self.down = nn.Linear(config.inner, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the MLP to each token."""
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class LlamaLayer(PreNormLayer):
    """Attention, then MLP. Each reads a normed x and is added to x."""

    def __init__(self, config: LlamaConfig, number: int = 0) -> None:
        norm = partial(nn.RMSNorm, config.width, eps=config.eps)
        super().__init__(norm, LlamaAttention(config), LlamaMLP(config), number)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, piece: Slice | None = None
    ) -> Tensor:
        """Return the next hidden state."""
        return self.run(x, cos, sin, piece)

    def forward_slice(
        self,
        call: Callable[..., Any],
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        piece: Slice,
    ) -> Tensor:
        """Run a slice, with `call` for the methods that see only tensors, so that they can be compiled."""
        q, k, v = call(self.before_mixing, x, cos, sin)
        y: Tensor = call(self.after_mixing, x, self.attention.mix(q, k, v, piece))
        return y


class Llama(Decoder):
    """A Llama with random weights, drawn from torch's generator."""

    def __init__(self, config: LlamaConfig) -> None:
        embed = nn.Embedding(config.vocab, config.width)
        norm = nn.RMSNorm(config.width, eps=config.eps)
        head = NormedHead(norm, config.width, config.vocab)
        if config.tied:
            head.output.weight = embed.weight
        layers = (LlamaLayer(config, number) for number in range(config.layers))
        rotary = Rotary(config.head_width, config.theta)
        super().__init__(config.width, embed, layers, head, rotary)
        self.config = config
        draw_weights(self)


# ---------------------------------------------------------------- Hugging Face's names
LLAMA_NAMES = {
    "embed": "model.embed_tokens",
    "layers.*.attention_norm": "model.layers.*.input_layernorm",
    "layers.*.attention.query": "model.layers.*.self_attn.q_proj",
    "layers.*.attention.key": "model.layers.*.self_attn.k_proj",
    "layers.*.attention.value": "model.layers.*.self_attn.v_proj",
    "layers.*.attention.output": "model.layers.*.self_attn.o_proj",
    "layers.*.mlp_norm": "model.layers.*.post_attention_layernorm",
    "layers.*.mlp.gate": "model.layers.*.mlp.gate_proj",
    "layers.*.mlp.up": "model.layers.*.mlp.up_proj",
    "layers.*.mlp.down": "model.layers.*.mlp.down_proj",
    "head.norm": "model.norm",
    "head.output": "lm_head",
}


def llama_from_hf(
    state: Mapping[str, Tensor], config: LlamaConfig
) -> dict[str, Tensor]:
    """Convert the weights of a LlamaForCausalLM for `Llama.load_state_dict`."""
    weights = {name: w for name, w in state.items() if not name.endswith("inv_freq")}
    ours = rename(weights, inverse_names(LLAMA_NAMES))
    if config.tied:
        ours["head.output.weight"] = ours["embed.weight"]
    return ours


def llama_to_hf(state: Mapping[str, Tensor], config: LlamaConfig) -> dict[str, Tensor]:
    """Convert weights back to the names that Hugging Face saves, a tied weight once."""
    return rename(saved_once(state, config.tied), LLAMA_NAMES)
