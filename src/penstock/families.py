"""The sizes of our own models: Llama, GPT and Bert. They say everything about a model, and need no torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from penstock.errors import ShapeError


@dataclass(frozen=True, slots=True)
class _CommonSizes:
    """What every family has."""

    vocab: int
    width: int
    layers: int
    heads: int

    def _check(self, eps: float = 1.0, **others: int) -> None:
        """Refuse sizes below 1, `others` among them, heads that do not divide the width, and an eps of 0 or less."""
        require_sizes(
            1, vocab=self.vocab, width=self.width, layers=self.layers, heads=self.heads
        )
        require_sizes(1, **others)
        require_multiple("width", self.width, "heads", self.heads)
        if eps <= 0:
            raise ShapeError(f"eps must be above 0, not {eps}")


@dataclass(frozen=True, slots=True)
class LlamaConfig(_CommonSizes):
    """Sizes of a Llama.

    The MLP has `inner` features; `theta` is the base of the rotary frequencies.
    """

    kv_heads: int
    inner: int
    theta: float = 10000.0
    eps: float = 1e-5
    tied: bool = False

    def __post_init__(self) -> None:
        self._check(kv_heads=self.kv_heads, inner=self.inner)
        require_multiple("heads", self.heads, "kv_heads", self.kv_heads)
        require_multiple(
            "width / heads", self.head_width, "2 (rotary positions turn pairs)", 2
        )
        if self.theta <= 0 or self.eps <= 0:
            raise ShapeError(
                f"theta and eps must be above 0, not {self.theta} and {self.eps}"
            )

    @property
    def head_width(self) -> int:
        """The number of features of one head."""
        return self.width // self.heads


@dataclass(frozen=True, slots=True)
class GPTConfig(_CommonSizes):
    """Sizes of a GPT.

    The MLP has `inner` features (GPT-2: 4 * width), a sequence at most `positions`
    tokens.
    """

    inner: int
    positions: int
    eps: float = 1e-5
    tied: bool = True

    def __post_init__(self) -> None:
        self._check(self.eps, inner=self.inner, positions=self.positions)


@dataclass(frozen=True, slots=True)
class BertConfig(_CommonSizes):
    """Sizes of a Bert.

    The MLP has `inner` features, a sequence at most `positions` tokens, and there are
    `types` kinds of segments. `padding` is the token that fills up short rows, or None.
    As in Hugging Face's model, its vector starts at zero and gets no gradient from
    look-ups.
    """

    inner: int
    positions: int
    types: int = 2
    eps: float = 1e-12
    tied: bool = True
    padding: int | None = 0

    def __post_init__(self) -> None:
        self._check(
            self.eps, inner=self.inner, positions=self.positions, types=self.types
        )
        if self.padding is not None and not 0 <= self.padding < self.vocab:
            raise ShapeError(
                f"padding must be None or a token from 0 to {self.vocab - 1}, not {self.padding}"
            )


FamilySizes = LlamaConfig | GPTConfig | BertConfig


@dataclass(frozen=True, slots=True)
class ParameterCounts:
    """The number of parameters of the pieces of a model.

    A tied output matrix counts in both `embed` and `head`, but only once in `total`.
    """

    embed: int
    layer: int
    head: int
    total: int
    matrices: int  # weights that multiply every token, the output's included


# ---------------------------------------------------------------- what does not fit
def require_sizes(least: int, **sizes: int) -> None:
    """Refuse any size below `least`; the error names it."""
    for name, size in sizes.items():
        if size < least:
            raise ShapeError(f"{name} must be at least {least}, not {size}")


def require_multiple(name: str, size: int, divisor_name: str, divisor: int) -> None:
    """Refuse a size that is not a multiple of the divisor; name the nearest that are."""
    if size % divisor == 0:
        return
    below = size // divisor * divisor
    above = below + divisor
    nearest = f"{below} or {above}" if below else str(above)
    raise ShapeError(
        f"{name} must be a multiple of {divisor_name}: {size} is not one of {divisor}; "
        f"{nearest} is"
    )


def check_family_shares(sizes: FamilySizes, tensor: int) -> None:
    """Refuse a number of shares that would divide a head or leave a process without words."""
    if isinstance(sizes, BertConfig):
        if tensor > 1:
            raise undividable("Bert", tensor)
        return
    counts = {"heads": sizes.heads, "inner": sizes.inner}
    if isinstance(sizes, LlamaConfig):
        counts["kv_heads"] = sizes.kv_heads
    largest = gcd(*counts.values())
    for name, count in counts.items():
        if count % tensor:
            fitting = max(n for n in range(1, tensor) if largest % n == 0)
            raise ShapeError(
                f"parallel.tp = {tensor} does not divide the model's {name} = {count}; "
                f"{fitting} does"
            )
    if (tensor - 1) * words_of_share(sizes.vocab, tensor) >= sizes.vocab:
        raise ShapeError(
            f"parallel.tp = {tensor} is too large: with {sizes.vocab} words, some process would hold no word"
        )


def undividable(name: str, tensor: int) -> ShapeError:
    """The error about a model whose layers cannot be divided between processes."""
    return ShapeError(
        f"parallel.tp = {tensor}: only our own Llama and GPT can be divided in this way, "
        f"not a {name}; use parallel.pp or parallel.dp_shard"
    )


def words_of_share(words: int, shares: int) -> int:
    """Return the size of every share but the last, as DTensor cuts them."""
    return -(-words // shares)
