"""What follows from the sizes of a model: parameters, matrix products and activations, without torch.

    embedding   a row for each word; GPT also has one for each position
    layer       attention (query, key, value, output) and MLP, with two norms
    head        a norm, and the matrix that gives the logits

`penstock.models` builds exactly these models; a test compares the counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from penstock.errors import ShapeError

FAMILIES = ("llama", "gpt")
FLOAT32_BYTES = 4
HALF_BYTES = 2


class ModelSizes(Protocol):
    """The sizes of a Llama or a GPT, as `penstock.config.ModelConfig` has them."""

    @property
    def family(self) -> str:
        """`llama` or `gpt`."""

    @property
    def layers(self) -> int:
        """The number of layers."""

    @property
    def hidden_size(self) -> int:
        """The features of the hidden state."""

    @property
    def heads(self) -> int:
        """The attention heads."""

    @property
    def kv_heads(self) -> int:
        """The heads of keys and values (llama)."""

    @property
    def intermediate_size(self) -> int:
        """The features inside the MLP."""

    @property
    def vocab_size(self) -> int:
        """The words of the vocabulary."""

    @property
    def positions(self) -> int:
        """The longest sequence (gpt); 0 if it is that of the data."""

    @property
    def tie_embeddings(self) -> bool:
        """Whether embedding and head share a matrix."""


class Parameters(NamedTuple):
    """The numbers of parameters. A tied matrix counts in both `embed` and `head`."""

    embed: int
    layer: int
    head: int


class WeightMatrix(NamedTuple):
    """A matrix that every token is multiplied with."""

    rows: int  # features that go in
    columns: int  # features that come out


def check_sizes(sizes: ModelSizes) -> None:
    """Refuse sizes that do not describe a model."""
    if sizes.family not in FAMILIES:
        known = " and ".join(FAMILIES)
        raise ShapeError(
            f"times and sizes can be computed for {known}, but not for {sizes.family}\n"
            "  leave out --gpu: then the model is measured on this machine"
        )
    if sizes.vocab_size < 1:
        raise ShapeError("the size of the vocabulary is missing; give model.vocab_size")
    if sizes.hidden_size % sizes.heads:
        raise ShapeError(
            f"the width {sizes.hidden_size} is not a multiple of the {sizes.heads} heads"
        )


def key_width(sizes: ModelSizes) -> int:
    """The features of the keys of a token; its values have as many."""
    if sizes.family == "gpt":
        return sizes.hidden_size
    return sizes.kv_heads * (sizes.hidden_size // sizes.heads)


def parameters_of_pieces(sizes: ModelSizes, tokens: int = 0) -> Parameters:
    """The parameters of embedding, one layer and head. `tokens` replaces missing positions."""
    matrix = sizes.vocab_size * sizes.hidden_size
    products = sum(one.rows * one.columns for one in layer_matrices(sizes))
    if sizes.family == "gpt":
        positions = sizes.positions or tokens
        biases = sum(one.columns for one in layer_matrices(sizes))
        norms = 4 * sizes.hidden_size
        return Parameters(
            matrix + positions * sizes.hidden_size,
            products + biases + norms,
            matrix + 2 * sizes.hidden_size,
        )
    return Parameters(
        matrix, products + 2 * sizes.hidden_size, matrix + sizes.hidden_size
    )


def layer_matrices(sizes: ModelSizes) -> tuple[WeightMatrix, ...]:
    """The matrices of one layer."""
    width, inner = sizes.hidden_size, sizes.intermediate_size
    keys = key_width(sizes)
    if sizes.family == "gpt":
        attention = (WeightMatrix(width, 3 * width), WeightMatrix(width, width))
        return (*attention, WeightMatrix(width, inner), WeightMatrix(inner, width))
    return (
        WeightMatrix(width, width),
        WeightMatrix(width, keys),
        WeightMatrix(width, keys),
        WeightMatrix(width, width),
        WeightMatrix(width, inner),
        WeightMatrix(width, inner),
        WeightMatrix(inner, width),
    )


def held_numbers(family: str, width: int, keys: int, inner: int) -> tuple[int, int]:
    """How many numbers a token leaves in a layer for the backward.

    The first number counts the hidden state, which stays float32 and which every process of a
    rank holds whole; the second counts heads and features, which have the type in which the
    layer computes and which tensor parallelism divides.
    """
    mlp = inner_numbers(family, inner)
    if family == "gpt":
        return 4 * width, 4 * width + mlp
    return 4 * width, 3 * width + 2 * keys + mlp


def inner_numbers(family: str, inner: int) -> int:
    """How many numbers a token leaves inside of an MLP for the backward."""
    return 2 * inner if family == "gpt" else 4 * inner


def deferred_numbers(sizes: ModelSizes) -> int:
    """How many numbers a token leaves in a layer from I to W: inputs and gradients of its products."""
    inputs = (
        3 * sizes.hidden_size + sizes.intermediate_size
    )  # query, key and value read the same x
    gradients = sum(one.columns for one in layer_matrices(sizes))
    norms = 3 * sizes.hidden_size if sizes.family == "llama" else 0
    return inputs + gradients + norms


class Moments(NamedTuple):
    """Bytes of a part that exist only for a moment, or that slices carry on (see `PartCost`)."""

    working: float = 0.0  # per token
    scratch: float = 0.0
    carried: float = 0.0  # per token


# Smaller logits are computed at once: all of their copies together need little memory.
MIN_LOGITS_BYTES = 1 << 26


def chunk_in_use(chunk: int, tokens: int, vocab: int) -> int:
    """Return the tokens of a chunk of the loss; 0 if the logits of all tokens are so small that there are no chunks.

    >>> chunk_in_use(2048, 8192, 128_000), chunk_in_use(2048, 8192, 256)
    (2048, 0)
    """
    return chunk if FLOAT32_BYTES * tokens * vocab >= MIN_LOGITS_BYTES else 0


def part_moments(
    facts: Mapping[str, object],
    layers: int,
    first: bool,
    last: bool,
    rows: int,
    half: bool,
    tensor: int = 1,
    loss_chunk: int = 0,
) -> Moments:
    """The momentary bytes of a part of a model with these sizes, for `rows` sequences; nothing for unknown sizes.

    A layer's backward has the gradients of its inner features and hidden states. The head's has
    the gradients of the logits, in float32 and in the type in which products compute. A weight's
    gradient exists in that type before it is added in float32. `tensor` processes divide all but
    hidden states and logits. With `loss_chunk`, only the logits of this many tokens exist at a time.
    """
    names = ("width", "heads", "inner", "vocab")
    if not all(isinstance(facts.get(name), int) for name in names):
        return Moments()
    width, heads, inner, vocab = (_whole(facts, name) for name in names)
    kv_heads = _whole(facts, "kv_heads") or heads
    if facts.get("family") == "gpt":
        kv_heads = heads
    item = HALF_BYTES if half else FLOAT32_BYTES
    extra = FLOAT32_BYTES + (HALF_BYTES if half else 0)
    working = scratch = 0
    if layers:
        working = item * (3 * inner // tensor + 2 * width) + 2 * FLOAT32_BYTES * width
        scratch = extra * width * max(width, inner) // tensor
    if first:
        scratch = max(scratch, FLOAT32_BYTES * vocab * width // tensor)
    if last:
        if loss_chunk:
            scratch = max(scratch, extra * vocab * loss_chunk)
        else:
            working = max(working, extra * vocab)
        scratch = max(scratch, extra * vocab * width // tensor)
    keys = 2 * kv_heads * (width // max(heads, 1))
    return Moments(
        float(rows * working), float(scratch), rows * layers * item * keys / tensor
    )


def _whole(facts: Mapping[str, object], name: str) -> int:
    value = facts.get(name)
    return value if isinstance(value, int) else 0
