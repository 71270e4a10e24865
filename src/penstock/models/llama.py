"""Llama: rotary positions, grouped queries, RMS norms, a gated MLP. One device, no dropout, nothing of pipelines.

x ──┬─ norm ─ attention ─(+)─┬─ norm ─ mlp ─(+)─►        one layer
    └───────────────────────┘└──────────────┘
q = turn(Wq x)   k = turn(Wk x)   v = Wv x               turn: rotate pairs of features by position * frequency
heads share keys and values in groups of heads / kv_heads
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from penstock.carry import Slice
from penstock.errors import ShapeError
from penstock.models.attention import attend
from penstock.models.hf import inverse_names, rename
from penstock.models.split import Decoder, draw_weights, require_multiple, require_sizes


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Sizes of a Llama. `inner` features in the MLP; `theta` the base of the rotary frequencies."""

    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    theta: float = 10000.0
    eps: float = 1e-5
    tied: bool = False

    def __post_init__(self) -> None:
        require_sizes(
            1, vocab=self.vocab, width=self.width, layers=self.layers, heads=self.heads
        )
        require_sizes(1, kv_heads=self.kv_heads, inner=self.inner)
        require_multiple("width", self.width, "heads", self.heads)
        require_multiple("heads", self.heads, "kv_heads", self.kv_heads)
        require_multiple("width / heads", self.head_width, "2 (rotary turns pairs)", 2)
        if self.theta <= 0 or self.eps <= 0:
            raise ShapeError(
                f"theta and eps must be above 0, not {self.theta} and {self.eps}"
            )

    @property
    def head_width(self) -> int:
        """Features of one head."""
        return self.width // self.heads


class Rotary(nn.Module):
    """The angles by which each position turns its queries and keys.

    It keeps no table: nothing to move, cast or save. The angles are float32 by definition, whatever x is, for this is
    how every Llama was trained.
    """

    def __init__(self, head_width: int, theta: float) -> None:
        super().__init__()
        self.head_width, self.theta = head_width, theta

    def forward(self, x: Tensor, piece: Slice | None = None) -> tuple[Tensor, Tensor]:
        """Cosines, and sines whose first half is negative: (tokens, head_width) each, or (rows, 1, tokens, head_width)
        if rows differ."""
        pair = torch.arange(0, self.head_width, 2, device=x.device, dtype=torch.float32)
        token = (
            torch.arange(x.shape[1], device=x.device)
            if piece is None
            else piece.positions(x.device)
        )
        token = token if token.dim() == 1 else token[:, None]
        angles = token[..., None].float() * (
            1.0 / self.theta ** (pair / self.head_width)
        )
        kept = torch.promote_types(x.dtype, torch.float32)
        cos, sin = angles.cos().to(kept), angles.sin().to(kept)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


class _Turn(torch.autograd.Function):
    """Four kernels there and four back, nothing kept but the angles."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, sin, -1.0), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, way: float) -> Tensor:
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin, value=way).to(
        x.dtype
    )


def rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates feature i with feature i + half, in float32 at least."""
    if torch.compiler.is_compiling():  # which makes one kernel of it anyway
        return _turned(x, cos, sin, 1.0)
    y: Tensor = _Turn.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return y


class LlamaAttention(nn.Module):
    """Causal, with groups of heads on the same keys and values."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_width, self.grouped = (
            config.head_width,
            config.kv_heads != config.heads,
        )
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(
            config.width, config.kv_heads * config.head_width, bias=False
        )
        self.value = nn.Linear(
            config.width, config.kv_heads * config.head_width, bias=False
        )
        self.output = nn.Linear(config.width, config.width, bias=False)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, piece: Slice | None = None
    ) -> Tensor:
        """Of all of x, or of a slice."""
        q, k, v = (self.heads(to(x)) for to in (self.query, self.key, self.value))
        y: Tensor = self.output(
            attend(
                self,
                rotate_half(q, cos, sin),
                rotate_half(k, cos, sin),
                v,
                piece,
                self.grouped,
            )
        )
        return y

    def heads(self, x: Tensor) -> Tensor:
        """(batch, tokens, heads * head_width) to (batch, heads, tokens, head_width)."""
        return x.view(*x.shape[:-1], -1, self.head_width).transpose(1, 2)


class LlamaMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.inner, bias=False)
        self.up = nn.Linear(config.width, config.inner, bias=False)
        self.down = nn.Linear(config.inner, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Token by token."""
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class LlamaLayer(nn.Module):
    """Attention, then MLP, each on a normed x and added to it."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=config.eps)
        self.attention = LlamaAttention(config)
        self.mlp_norm = nn.RMSNorm(config.width, eps=config.eps)
        self.mlp = LlamaMLP(config)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, piece: Slice | None = None
    ) -> Tensor:
        """Hidden state to hidden state."""
        x = x + self.attention(self.attention_norm(x), cos, sin, piece)
        y: Tensor = x + self.mlp(self.mlp_norm(x))
        return y


class LlamaHead(nn.Module):
    """Last norm, then a score for every word."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.width, eps=config.eps)
        self.output = nn.Linear(config.width, config.vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Hidden state to logits."""
        logits: Tensor = self.output(self.norm(x))
        return logits


class Llama(Decoder):
    """A Llama with weights drawn at random from torch's generator."""

    def __init__(self, config: LlamaConfig) -> None:
        embed, head = nn.Embedding(config.vocab, config.width), LlamaHead(config)
        if config.tied:
            head.output.weight = embed.weight
        layers = (LlamaLayer(config) for _ in range(config.layers))
        super().__init__(
            config.width, embed, layers, head, Rotary(config.head_width, config.theta)
        )
        self.config = config
        draw_weights(self)


# ---------------------------------------------------------------- names, ours and Hugging Face's
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
    """The weights of a LlamaForCausalLM, in memory or as saved, as `Llama.load_state_dict` takes them."""
    ours = rename(
        {name: w for name, w in state.items() if not name.endswith("inv_freq")},
        inverse_names(LLAMA_NAMES),
    )
    return ours | {"head.output.weight": ours["embed.weight"]} if config.tied else ours


def llama_to_hf(state: Mapping[str, Tensor], config: LlamaConfig) -> dict[str, Tensor]:
    """The way back: the names that Hugging Face saves, a tied weight once."""
    return rename(
        {
            name: w
            for name, w in state.items()
            if name != "head.output.weight" or not config.tied
        },
        LLAMA_NAMES,
    )
