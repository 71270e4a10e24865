"""Bert: an encoder that sees both ways and predicts masked words.

It runs on one device, has no dropout, and knows nothing about pipelines.

x ──┬─ attention ─(+)─ norm ─┬─ mlp ─(+)─ norm ─►        one layer, normed after each sum
    └────────────┘           └───────┘
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from penstock.errors import ShapeError
from penstock.families import BertConfig
from penstock.models.attention import token_positions
from penstock.models.hf import rename, saved_once
from penstock.models.layer import GeluMLP
from penstock.models.slice import Slice
from penstock.models.split import Stack, draw_weights


class BertEmbedding(nn.Module):
    """The sum of the vectors of a token, its position and its segment type, normed."""

    asked_names = ("types",)

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(
            config.vocab, config.width, padding_idx=config.padding
        )
        self.positions = nn.Embedding(config.positions, config.width)
        self.types = nn.Embedding(config.types, config.width)
        self.norm = nn.LayerNorm(config.width, eps=config.eps)

    def forward(
        self,
        tokens: Tensor,
        piece: Slice | None = None,
        types: Tensor | None = None,
    ) -> Tensor:
        """Turn token ids into a hidden state; without `types`, all segments are of type 0.

        If a `piece` is given, rows may be packed with documents, and positions begin again at 0 in each.
        """
        if tokens.shape[1] > self.positions.num_embeddings:
            raise ShapeError(
                f"{tokens.shape[1]} tokens, but only {self.positions.num_embeddings} positions"
            )
        if types is None:
            types = torch.zeros_like(tokens)
        positions = token_positions(tokens, piece)
        total = self.tokens(tokens) + self.types(types) + self.positions(positions)
        x: Tensor = self.norm(total)
        return x


class BertAttention(nn.Module):
    """Attention in which every token sees all tokens, or those that a mask lets it see."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.heads
        self.query = nn.Linear(config.width, config.width)
        self.key = nn.Linear(config.width, config.width)
        self.value = nn.Linear(config.width, config.width)
        self.output = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor, seen: Tensor | None) -> Tensor:
        """Mix the tokens; `seen` is False where a query does not see a key."""
        q = self.heads(self.query(x))
        k = self.heads(self.key(x))
        v = self.heads(self.value(x))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        y: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return y

    def heads(self, x: Tensor) -> Tensor:
        """Reshape (batch, tokens, width) to (batch, heads, tokens, head_width)."""
        return x.view(*x.shape[:-1], -1, self.head_width).transpose(1, 2)


class BertLayer(nn.Module):
    """Attention, then MLP. Each is added to x, and the sum is normed."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention = BertAttention(config)
        self.attention_norm = nn.LayerNorm(config.width, eps=config.eps)
        self.mlp = GeluMLP(config.width, config.inner)
        self.mlp_norm = nn.LayerNorm(config.width, eps=config.eps)

    def forward(
        self, x: Tensor, piece: Slice | None = None, real: Tensor | None = None
    ) -> Tensor:
        """Return the next hidden state.

        Tokens see those that are `real`, and only their own document if a `piece` has several.
        """
        seen = None if real is None else real[:, None, None, :]
        if piece is not None:
            seen = same_document(piece, x.device)
        x = self.attention_norm(x + self.attention(x, seen))
        y: Tensor = self.mlp_norm(x + self.mlp(x))
        return y


class BertHead(nn.Module):
    """A dense layer and a norm, then a logit for every word."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.width, config.width)
        self.norm = nn.LayerNorm(config.width, eps=config.eps)
        self.output = nn.Linear(config.width, config.vocab)

    def forward(self, x: Tensor) -> Tensor:
        """Turn a hidden state into logits."""
        logits: Tensor = self.output(self.norm(F.gelu(self.dense(x))))
        return logits


class Bert(Stack):
    """A Bert with random weights, drawn from torch's generator.

    Its parts take packed documents, and padding as a document of its own; the first part
    also takes types. Only the whole model takes a padding mask.
    """

    def __init__(self, config: BertConfig) -> None:
        embed = BertEmbedding(config)
        head = BertHead(config)
        if config.tied:
            head.output.weight = embed.tokens.weight
        layers = (BertLayer(config) for _ in range(config.layers))
        super().__init__(config.width, embed, layers, head)
        self.config = config
        draw_weights(self)

    def forward(
        self, tokens: Tensor, types: Tensor | None = None, real: Tensor | None = None
    ) -> Tensor:
        """Turn token ids, (batch, tokens), into logits.

        `types` are the types of the segments; `real` is False for padding.
        """
        x = self.embed(tokens, types=types)
        for layer in self.layers:
            x = layer(x, real=real)
        logits: Tensor = self.head(x)
        return logits


def same_document(piece: Slice, device: torch.device) -> Tensor | None:
    """Which tokens are in the same document, (rows, 1, tokens, tokens); None if a row is one document.

    All layers of a part use one mask, which the piece keeps.
    """
    starts = piece.carry.starts
    if starts is None:
        return None
    if piece.added is None:
        starts = starts.to(device)
        piece.added = (starts[:, :, None] == starts[:, None, :])[:, None]
    return piece.added


# ---------------------------------------------------------------- Hugging Face's names
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


def bert_to_hf(state: Mapping[str, Tensor], config: BertConfig) -> dict[str, Tensor]:
    """Convert weights to the names that Hugging Face saves, a tied weight once.

    Hugging Face has the output bias twice. If weights are tied, both are the same; otherwise only the decoder's is
    used.
    """
    names = BERT_NAMES
    if not config.tied:
        names = BERT_NAMES | {"head.output.bias": "cls.predictions.decoder.bias"}
    return rename(saved_once(state, config.tied), names)
