"""GPT as in GPT-2: learned positions, layer norms, and GELU approximated by tanh.

It runs on one device and knows nothing about pipelines. Dropout (`penstock.models.layer`) is off unless it is set.

x ──┬─ norm ─ attention ─(+)─┬─ norm ─ mlp ─(+)─►        one layer
    └───────────────────────┘└──────────────┘
q, k, v = Wqkv x                                         rows of Wqkv: q, k, v of head 0, then of head 1, ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from penstock.errors import ShapeError
from penstock.families import GPTConfig
from penstock.models.attention import attend, token_positions
from penstock.models.hf import inverse_names, rename, saved_once
from penstock.models.layer import GeluMLP, NormedHead, PreNormLayer
from penstock.models.slice import Slice
from penstock.models.split import Decoder, draw_weights


class GPTEmbedding(nn.Module):
    """The sum of the vectors of a token and its position."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.positions, config.width)

    def forward(self, tokens: Tensor, piece: Slice | None = None) -> Tensor:
        """Turn token ids into a hidden state."""
        self.refuse_length(tokens.shape[1] if piece is None else piece.tokens)
        return self.add(tokens, token_positions(tokens, piece))

    def forward_slice(
        self, call: Callable[..., Any], tokens: Tensor, piece: Slice
    ) -> Tensor:
        """Run a slice, with `call` for the methods that see only tensors, so that they can be compiled."""
        self.refuse_length(piece.tokens)
        x: Tensor = call(self.add, tokens, token_positions(tokens, piece))
        return x

    def refuse_length(self, length: int) -> None:
        """Refuse a sequence that is longer than the table of positions."""
        if length > self.positions.num_embeddings:
            raise ShapeError(
                f"{length} tokens, but only {self.positions.num_embeddings} positions\n"
                "  use shorter sequences (data.seq_len) or more positions (model.positions)"
            )

    def add(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Add the vectors of tokens and positions."""
        x: Tensor = self.tokens(tokens) + self.positions(positions)
        return x


class GPTAttention(nn.Module):
    """Causal attention in which every head has its own keys and values."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.output = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor, piece: Slice | None = None) -> Tensor:
        """Mix the tokens of x: a whole sequence, or a slice of one."""
        q, k, v = self.project(x)
        y: Tensor = self.output(attend(self, q, k, v, piece))
        return y

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries, keys and values of x."""
        by_head = self.qkv(x).unflatten(-1, (-1, 3, self.head_width))
        q, k, v = by_head.permute(3, 0, 2, 1, 4)
        return q, k, v


class GPTLayer(PreNormLayer):
    """Attention, then MLP. Each reads a normed x and is added to x."""

    def __init__(self, config: GPTConfig, number: int = 0) -> None:
        norm = partial(nn.LayerNorm, config.width, eps=config.eps)
        mlp = GeluMLP(config.width, config.inner, approximate="tanh")
        super().__init__(norm, GPTAttention(config), mlp, number)

    def forward(self, x: Tensor, piece: Slice | None = None) -> Tensor:
        """Return the next hidden state."""
        return self.run(x, piece)

    def forward_slice(
        self, call: Callable[..., Any], x: Tensor, piece: Slice
    ) -> Tensor:
        """Run a slice, with `call` for the methods that see only tensors, so that they can be compiled."""
        q, k, v = call(self.before_mixing, x)
        mixed = attend(self.attention, q, k, v, piece)
        y: Tensor = call(self.after_mixing, x, mixed)
        return y


class GPT(Decoder):
    """A GPT with random weights, drawn from torch's generator."""

    def __init__(self, config: GPTConfig) -> None:
        embed = GPTEmbedding(config)
        norm = nn.LayerNorm(config.width, eps=config.eps)
        head = NormedHead(norm, config.width, config.vocab)
        if config.tied:
            head.output.weight = embed.tokens.weight
        layers = (GPTLayer(config, number) for number in range(config.layers))
        super().__init__(config.width, embed, layers, head)
        self.config = config
        draw_weights(self)


# ---------------------------------------------------------------- Hugging Face's names
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
    """Convert the weights of a GPT2LMHeadModel or a bare GPT2Model for `GPT.load_state_dict`."""
    is_bare = not any(name.startswith("transformer.") for name in state)
    full_names = {}
    for name, w in state.items():
        prefix = "transformer." if is_bare and name != "lm_head.weight" else ""
        if not name.endswith(BUFFERS):
            full_names[prefix + name] = w
    ours = _transpose(rename(full_names, inverse_names(GPT_NAMES)))
    ours = _regroup(ours, (3, config.heads))
    if config.tied:
        ours["head.output.weight"] = ours["embed.tokens.weight"]
    return ours


def gpt_to_hf(state: Mapping[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """Convert weights back to the names that Hugging Face saves, a tied weight once."""
    once = saved_once(state, config.tied)
    theirs = _transpose(_regroup(once, (config.heads, 3)))
    return rename(theirs, GPT_NAMES)


def _transpose(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Transpose the matrices of the layers, which GPT-2 stores the other way round."""
    result = {}
    for name, w in state.items():
        result[name] = w.t().contiguous() if name.endswith(TRANSPOSED) else w
    return result


def _regroup(state: Mapping[str, Tensor], groups: tuple[int, int]) -> dict[str, Tensor]:
    """Reorder the rows of the queries, keys and values.

    GPT-2 has the queries of all heads, then all keys, then all values. Ours go head by
    head, so that consecutive rows hold whole heads.
    """
    result = dict(state)
    for name, w in state.items():
        if ".qkv." in name and not w.is_meta:
            rows = w.reshape(*groups, -1, *w.shape[1:])
            result[name] = rows.transpose(0, 1).reshape(w.shape)
    return result
