"""Models for one device, the loss they are trained with, and the way they are split into parts."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from penstock.families import BertConfig, GPTConfig, LlamaConfig
from penstock.models.bert import Bert
from penstock.models.decoder import (
    DecoderConfig,
    EncoderConfig,
    any_layer,
    decoder_blueprint,
    give_memory,
    initial_constants,
    padding_rows,
)
from penstock.models.gpt import GPT
from penstock.models.llama import Llama
from penstock.models.split import (
    Decoder,
    Part,
    Stack,
    layer_count,
    model_width,
    part_parameters,
    shared_names,
    split,
)
from penstock.partition import even_partition

__all__ = [
    "GPT",
    "IGNORED_LABEL",
    "Bert",
    "BertConfig",
    "Decoder",
    "DecoderConfig",
    "EncoderConfig",
    "GPTConfig",
    "Llama",
    "LlamaConfig",
    "Part",
    "Stack",
    "any_layer",
    "decoder_blueprint",
    "document_starts",
    "even_partition",
    "give_memory",
    "initial_constants",
    "layer_count",
    "model_width",
    "padding_rows",
    "part_parameters",
    "shared_names",
    "shift_labels",
    "smoothed_loss",
    "split",
    "token_loss",
    "valid_tokens",
]

IGNORED_LABEL = -100
"""The label of a token whose prediction does not count."""


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross entropy, summed (not averaged) over the labels that count.

    Sums of micro-batches and slices of any size can be added up. Dividing once by the
    `valid_tokens` of the whole batch gives the mean.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(
        wide.flatten(0, -2),
        labels.flatten(),
        ignore_index=IGNORED_LABEL,
        reduction="sum",
    )


def smoothed_loss(
    logits: Tensor, labels: Tensor, smoothing: float = 0.0, z_loss: float = 0.0
) -> Tensor:
    """Return the cross entropy with smoothed labels, and `z_loss` times log² of the softmax's denominator.

    Both are summed over the labels that count.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    words = labels.flatten()
    loss = F.cross_entropy(
        wide,
        words,
        ignore_index=IGNORED_LABEL,
        reduction="sum",
        label_smoothing=smoothing,
    )
    if not z_loss:
        return loss
    squares = wide.logsumexp(-1).square()
    return loss + z_loss * squares.where(words != IGNORED_LABEL, 0.0).sum()


def valid_tokens(labels: Tensor) -> int:
    """Return the number of labels that count."""
    return int((labels != IGNORED_LABEL).sum())


def shift_labels(tokens: Tensor, starts: Tensor | None = None) -> Tensor:
    """Label each token with the next one, which a causal model must predict.

    The last token of a row or of a document has no next one. Shift before cutting into
    slices: the label of a slice's last token is in the next slice.

    >>> shift_labels(torch.tensor([[5, 6, 7]])).tolist()
    [[6, 7, -100]]
    >>> shift_labels(torch.tensor([[5, 6, 7]]), document_starts(torch.tensor([2, 1]))[None]).tolist()
    [[6, -100, -100]]
    """
    labels = F.pad(tokens[:, 1:], (0, 1), value=IGNORED_LABEL)
    if starts is None:
        return labels
    next_is_other = starts[:, 1:] != starts[:, :-1]
    ends_document = F.pad(next_is_other, (0, 1), value=True)
    return labels.masked_fill(ends_document, IGNORED_LABEL)


def document_starts(lengths: Tensor) -> Tensor:
    """Return the position where each token's document starts.

    The row is packed with documents of these lengths.

    >>> document_starts(torch.tensor([2, 3])).tolist()
    [0, 0, 2, 2, 2]
    """
    starts = lengths.cumsum(0) - lengths
    return torch.repeat_interleave(starts, lengths)
