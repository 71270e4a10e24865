"""GPT, as GPT-2 is: learned positions, layer norms, a GELU by tanh. One device, no dropout, nothing of pipelines.

x ──┬─ norm ─ attention ─(+)─┬─ norm ─ mlp ─(+)─►        one layer
    └───────────────────────┘└──────────────┘
q, k, v = Wqkv x                                         rows of Wqkv: q, k, v of head 0, then of head 1, ...
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from penstock.carry import Slice
from penstock.errors import ShapeError
from penstock.models.attention import attend
from penstock.models.hf import inverse_names, rename
from penstock.models.split import Decoder, draw_weights, require_multiple, require_sizes


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """Sizes of a GPT. `inner` features in the MLP (GPT-2: 4 * width); at most `positions` tokens in a sequence."""

    vocab: int
    width: int
    layers: int
    heads: int
    inner: int
    positions: int
    eps: float = 1e-5
    tied: bool = True

    def __post_init__(self) -> None:
        require_sizes(
            1, vocab=self.vocab, width=self.width, layers=self.layers, heads=self.heads
        )
        require_sizes(1, inner=self.inner, positions=self.positions)
        require_multiple("width", self.width, "heads", self.heads)
        if self.eps <= 0:
            raise ShapeError(f"eps must be above 0, not {self.eps}")


class GPTEmbedding(nn.Module):
    """A token's vector plus its position's."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.positions, config.width)

    def forward(self, tokens: Tensor, piece: Slice | None = None) -> Tensor:
        """Token ids to hidden state."""
        length = tokens.shape[1] if piece is None else piece.tokens
        if length > self.positions.num_embeddings:
            raise ShapeError(
                f"{length} tokens, but only {self.positions.num_embeddings} positions"
            )
        place = (
            torch.arange(length, device=tokens.device)
            if piece is None
            else piece.positions(tokens.device)
        )
        x: Tensor = self.tokens(tokens) + self.positions(place)
        return x


class GPTAttention(nn.Module):
    """Causal, all heads with keys and values of their own."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.output = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor, piece: Slice | None = None) -> Tensor:
        """Of all of x, or of a slice."""
        q, k, v = (
            self.qkv(x).unflatten(-1, (-1, 3, self.head_width)).permute(3, 0, 2, 1, 4)
        )
        y: Tensor = self.output(attend(self, q, k, v, piece))
        return y


class GPTMLP(nn.Module):
    """down(gelu(up(x)))."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, config.inner)
        self.down = nn.Linear(config.inner, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Token by token."""
        y: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return y


class GPTLayer(nn.Module):
    """Attention, then MLP, each on a normed x and added to it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, eps=config.eps)
        self.attention = GPTAttention(config)
        self.mlp_norm = nn.LayerNorm(config.width, eps=config.eps)
        self.mlp = GPTMLP(config)

    def forward(self, x: Tensor, piece: Slice | None = None) -> Tensor:
        """Hidden state to hidden state."""
        x = x + self.attention(self.attention_norm(x), piece)
        y: Tensor = x + self.mlp(self.mlp_norm(x))
        return y


class GPTHead(nn.Module):
    """Last norm, then a score for every word."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width, eps=config.eps)
        self.output = nn.Linear(config.width, config.vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Hidden state to logits."""
        logits: Tensor = self.output(self.norm(x))
        return logits


class GPT(Decoder):
    """A GPT with weights drawn at random from torch's generator."""

    def __init__(self, config: GPTConfig) -> None:
        embed, head = GPTEmbedding(config), GPTHead(config)
        if config.tied:
            head.output.weight = embed.tokens.weight
        super().__init__(
            config.width, embed, (GPTLayer(config) for _ in range(config.layers)), head
        )
        self.config = config
        draw_weights(self)


# ---------------------------------------------------------------- names, ours and Hugging Face's
GPT_NAMES = {
    "embed.tokens": "transformer.wte",
    "embed.positions": "transformer.wpe",
    "layers.*.attention_norm": "transformer.h.*.ln_1",
    "layers.*.attention.qkv": "transformer.h.*.attn.c_attn",
    "layers.*.attention.output": "transformer.h.*.attn.c_proj",
    "layers.*.mlp_norm": "transformer.h.*.ln_2",
    "layers.*.mlp.up": "transformer.h.*.mlp.c_fc",
    "layers.*.mlp.down": "transformer.h.*.mlp.c_proj",
    "head.norm": "transformer.ln_f",
    "head.output": "lm_head",
}
TRANSPOSED = ("qkv.weight", "attention.output.weight", "up.weight", "down.weight")
BUFFERS = (".attn.bias", ".attn.masked_bias")


def gpt_from_hf(state: Mapping[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """The weights of a GPT2LMHeadModel, or of a bare GPT2Model, for `GPT.load_state_dict`."""
    bare = (
        "" if any(name.startswith("transformer.") for name in state) else "transformer."
    )
    named = {
        name if name == "lm_head.weight" else bare + name: w
        for name, w in state.items()
    }
    ours = _transpose(
        rename(
            {n: w for n, w in named.items() if not n.endswith(BUFFERS)},
            inverse_names(GPT_NAMES),
        )
    )
    ours = {name: _regrouped(name, w, (3, config.heads)) for name, w in ours.items()}
    return (
        ours | {"head.output.weight": ours["embed.tokens.weight"]}
        if config.tied
        else ours
    )


def gpt_to_hf(state: Mapping[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """The way back: the names that Hugging Face saves, a tied weight once."""
    once = {
        name: w
        for name, w in state.items()
        if name != "head.output.weight" or not config.tied
    }
    return rename(
        _transpose(
            {name: _regrouped(name, w, (config.heads, 3)) for name, w in once.items()}
        ),
        GPT_NAMES,
    )


def _transpose(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """GPT-2 keeps the matrices of its layers the other way round."""
    return {
        name: w.t().contiguous() if name.endswith(TRANSPOSED) else w
        for name, w in state.items()
    }


def _regrouped(name: str, w: Tensor, groups: tuple[int, int]) -> Tensor:
    """GPT-2 has the queries of all heads, then all keys, then all values; ours go head by head, so that a run of rows
    has some heads whole."""
    if ".qkv." not in name or w.is_meta:
        return w
    return w.reshape(*groups, -1, *w.shape[1:]).transpose(0, 1).reshape(w.shape)
