"""Bert: an encoder that sees both ways and guesses masked words. One device, no dropout, nothing of pipelines.

x ──┬─ attention ─(+)─ norm ─┬─ mlp ─(+)─ norm ─►        one layer, normed after each sum
    └────────────┘           └───────┘
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from penstock.errors import ShapeError
from penstock.models.hf import inverse_names, rename
from penstock.models.split import Stack, draw_weights, require_multiple, require_sizes


@dataclass(frozen=True, slots=True)
class BertConfig:
    """Sizes of a Bert. `inner` features in the MLP; at most `positions` tokens; `types` kinds of segments.

    `padding` is the token that fills up short rows. As in Hugging Face's model, its vector begins at zero and gets no
    gradient from being looked up. None: there is no such token.
    """

    vocab: int
    width: int
    layers: int
    heads: int
    inner: int
    positions: int
    types: int = 2
    eps: float = 1e-12
    tied: bool = True
    padding: int | None = 0

    def __post_init__(self) -> None:
        require_sizes(
            1, vocab=self.vocab, width=self.width, layers=self.layers, heads=self.heads
        )
        require_sizes(1, inner=self.inner, positions=self.positions, types=self.types)
        require_multiple("width", self.width, "heads", self.heads)
        if self.eps <= 0:
            raise ShapeError(f"eps must be above 0, not {self.eps}")
        if self.padding is not None and not 0 <= self.padding < self.vocab:
            raise ShapeError(
                f"padding must be a token, 0 to {self.vocab - 1}, or None, not {self.padding}"
            )


class BertEmbedding(nn.Module):
    """The vectors of a token, of its position and of its segment's type, summed and normed."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(
            config.vocab, config.width, padding_idx=config.padding
        )
        self.positions = nn.Embedding(config.positions, config.width)
        self.types = nn.Embedding(config.types, config.width)
        self.norm = nn.LayerNorm(config.width, eps=config.eps)

    def forward(self, tokens: Tensor, types: Tensor | None = None) -> Tensor:
        """Token ids to hidden state; without types all is of type 0."""
        if tokens.shape[1] > self.positions.num_embeddings:
            raise ShapeError(
                f"{tokens.shape[1]} tokens, but only {self.positions.num_embeddings} positions"
            )
        place = torch.arange(tokens.shape[1], device=tokens.device)
        kinds = torch.zeros_like(tokens) if types is None else types
        x: Tensor = self.norm(
            self.tokens(tokens) + self.types(kinds) + self.positions(place)
        )
        return x


class BertAttention(nn.Module):
    """Every token sees every token that `real` allows."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.heads
        self.query = nn.Linear(config.width, config.width)
        self.key = nn.Linear(config.width, config.width)
        self.value = nn.Linear(config.width, config.width)
        self.output = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor, real: Tensor | None) -> Tensor:
        """`real`: (batch, tokens), True where a token is no padding."""
        q, k, v = (self.heads(to(x)) for to in (self.query, self.key, self.value))
        mask = None if real is None else real[:, None, None, :]
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        y: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return y

    def heads(self, x: Tensor) -> Tensor:
        """(batch, tokens, heads * head_width) to (batch, heads, tokens, head_width)."""
        return x.view(*x.shape[:-1], -1, self.head_width).transpose(1, 2)


class BertMLP(nn.Module):
    """down(gelu(up(x)))."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, config.inner)
        self.down = nn.Linear(config.inner, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Token by token."""
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y


class BertLayer(nn.Module):
    """Attention, then MLP, each added to x and normed after."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention = BertAttention(config)
        self.attention_norm = nn.LayerNorm(config.width, eps=config.eps)
        self.mlp = BertMLP(config)
        self.mlp_norm = nn.LayerNorm(config.width, eps=config.eps)

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        """Hidden state to hidden state."""
        x = self.attention_norm(x + self.attention(x, real))
        y: Tensor = self.mlp_norm(x + self.mlp(x))
        return y


class BertHead(nn.Module):
    """One more dense layer and norm, then a score for every word."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.width, config.width)
        self.norm = nn.LayerNorm(config.width, eps=config.eps)
        self.output = nn.Linear(config.width, config.vocab)

    def forward(self, x: Tensor) -> Tensor:
        """Hidden state to logits."""
        logits: Tensor = self.output(self.norm(F.gelu(self.dense(x))))
        return logits


class Bert(Stack):
    """A Bert with weights drawn at random from torch's generator.

    Types and padding are known to the whole model only: what flows between its parts is the hidden state, no mask.
    """

    def __init__(self, config: BertConfig) -> None:
        embed, head = BertEmbedding(config), BertHead(config)
        if config.tied:
            head.output.weight = embed.tokens.weight
        super().__init__(
            config.width, embed, (BertLayer(config) for _ in range(config.layers)), head
        )
        self.config = config
        draw_weights(self)

    def forward(
        self, tokens: Tensor, types: Tensor | None = None, real: Tensor | None = None
    ) -> Tensor:
        """Token ids to logits; `types` of the segments; `real` is True where a token is no padding."""
        x = self.embed(tokens, types)
        for layer in self.layers:
            x = layer(x, real)
        logits: Tensor = self.head(x)
        return logits


# ---------------------------------------------------------------- names, ours and Hugging Face's
BERT_NAMES = {
    "embed.tokens": "bert.embeddings.word_embeddings",
    "embed.positions": "bert.embeddings.position_embeddings",
    "embed.types": "bert.embeddings.token_type_embeddings",
    "embed.norm": "bert.embeddings.LayerNorm",
    "layers.*.attention.query": "bert.encoder.layer.*.attention.self.query",
    "layers.*.attention.key": "bert.encoder.layer.*.attention.self.key",
    "layers.*.attention.value": "bert.encoder.layer.*.attention.self.value",
    "layers.*.attention.output": "bert.encoder.layer.*.attention.output.dense",
    "layers.*.attention_norm": "bert.encoder.layer.*.attention.output.LayerNorm",
    "layers.*.mlp.up": "bert.encoder.layer.*.intermediate.dense",
    "layers.*.mlp.down": "bert.encoder.layer.*.output.dense",
    "layers.*.mlp_norm": "bert.encoder.layer.*.output.LayerNorm",
    "head.dense": "cls.predictions.transform.dense",
    "head.norm": "cls.predictions.transform.LayerNorm",
    "head.output.weight": "cls.predictions.decoder.weight",
    "head.output.bias": "cls.predictions.bias",
}
OTHER_HEADS = ("bert.pooler.", "cls.seq_relationship.", "bert.embeddings.position_ids")


def bert_from_hf(state: Mapping[str, Tensor], config: BertConfig) -> dict[str, Tensor]:
    """The weights of a BertForMaskedLM (a BertForPreTraining's other head is left out) for `Bert.load_state_dict`."""
    names, double = _names(config)
    ours = rename(
        {
            name: w
            for name, w in state.items()
            if not name.startswith((*OTHER_HEADS, double))
        },
        inverse_names(names),
    )
    return (
        ours | {"head.output.weight": ours["embed.tokens.weight"]}
        if config.tied
        else ours
    )


def bert_to_hf(state: Mapping[str, Tensor], config: BertConfig) -> dict[str, Tensor]:
    """The way back: the names that Hugging Face saves, a tied weight once."""
    once = {
        name: w
        for name, w in state.items()
        if name != "head.output.weight" or not config.tied
    }
    return rename(once, _names(config)[0])


def _names(config: BertConfig) -> tuple[dict[str, str], str]:
    """Hugging Face has the last bias twice: tied with the weight they are one, else only the decoder's is used."""
    used, double = "cls.predictions.bias", "cls.predictions.decoder.bias"
    return (
        (BERT_NAMES, double)
        if config.tied
        else (BERT_NAMES | {"head.output.bias": double}, used)
    )
