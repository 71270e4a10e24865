"""The layer and the head that Llama and GPT share, the MLP of GPT and Bert, with selective recomputation and dropout.

In a layer, attention and MLP each read a normed x, and are added to it:

x ──┬─ norm ─ attention ─(+)─┬─ norm ─ mlp ─(+)─►
    └────────────────────────┘└──────────────┘

Either of them can run again in the backward, so that less need be kept:

    kept without it    x, norm(x), q, k, v, their mixture │ x, norm(x), gate, silu(gate), up, their product
    kept with it       x                                  │ x

A stage that is recomputed as a whole (`run.recompute`) runs everything twice and keeps only its input. This is the
middle way. The MLP sees each token by itself, so it does not matter whether a sequence comes in slices. The attention
of a slice sees keys and values of earlier slices, which the carry keeps in any case; running again, it writes the same
numbers into the same rows.

Dropout drops the same numbers however a model is split, sliced, recomputed or resumed:

    seed, step ─► module (its site) ─► row of the step ─► token ─► feature ─► kept, if its hash is large enough

A generator would draw other numbers on other ranks, and again when a forward is recomputed. Here a number is kept or
dropped by a hash of where it is: nothing is drawn, so nothing has to be repeated. The executor says which rows and
tokens a stage sees, and the trainer says which step it is. Outside of a step that trains, nothing is dropped.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.errors import ShapeError


class PreNormLayer(nn.Module):
    """A layer with a norm before its attention and before its MLP."""

    recomputes_attention = False
    recomputes_mlp = False

    def __init__(
        self,
        make_norm: Callable[[], nn.Module],
        attention: nn.Module,
        mlp: nn.Module,
        number: int,
    ) -> None:
        super().__init__()
        self.attention_norm = make_norm()
        self.attention: Any = attention
        self.mlp_norm = make_norm()
        self.mlp = mlp
        self.attention_dropout = Dropout(f"attention {number}")
        self.mlp_dropout = Dropout(f"mlp {number}")

    def run(self, x: Tensor, *arguments: Any) -> Tensor:
        """Return the next hidden state; the attention takes the arguments after x."""

        def attend(x: Tensor) -> Tensor:
            mixed: Tensor = self.attention(self.attention_norm(x), *arguments)
            return mixed

        mixed = recomputed(attend, x, self.recomputes_attention)
        return self.add_mlp(x + self.attention_dropout(mixed))

    def before_mixing(
        self, x: Tensor, *angles: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries, keys and values of x."""
        q, k, v = self.attention.project(self.attention_norm(x), *angles)
        return q, k, v

    def after_mixing(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Return the next hidden state, given the mixed values."""
        x = x + self.attention_dropout(self.attention.output(mixed))
        return self.add_mlp(x)

    def add_mlp(self, x: Tensor) -> Tensor:
        """Add the result of the MLP to a hidden state."""
        mixed = recomputed(self.run_mlp, x, self.recomputes_mlp)
        y: Tensor = x + self.mlp_dropout(mixed)
        return y

    def run_mlp(self, x: Tensor) -> Tensor:
        """Norm a hidden state, and run the MLP."""
        y: Tensor = self.mlp(self.mlp_norm(x))
        return y


class GeluMLP(nn.Module):
    """The MLP of a GPT or a Bert: down(gelu(up(x)))."""

    def __init__(self, width: int, inner: int, approximate: str = "none") -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        """Apply the MLP to each token."""
        y: Tensor = self.down(F.gelu(self.up(x), approximate=self.approximate))
        return y


class NormedHead(nn.Module):
    """The last norm, then a logit for every word."""

    def __init__(self, norm: nn.Module, width: int, vocab: int) -> None:
        super().__init__()
        self.norm = norm
        self.output = nn.Linear(width, vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Turn a hidden state into logits."""
        logits: Tensor = self.output(self.hidden(x))
        return logits

    def hidden(self, x: Tensor) -> Tensor:
        """Return what the output layer makes logits of."""
        y: Tensor = self.norm(x)
        return y


def recomputed(call: Callable[[Tensor], Tensor], x: Tensor, wanted: bool) -> Tensor:
    """Return call(x); if wanted, keep only x of it for the backward."""
    if not wanted or not torch.is_grad_enabled():
        return call(x)
    place = current_place()

    def call_there(x: Tensor) -> Tensor:
        with standing_at(place):  # Other micro-batches may have run in between.
            return call(x)

    y: Tensor = checkpoint(call_there, x, use_reentrant=False, preserve_rng_state=False)
    return y


def recompute_inside(model: nn.Module, blocks: Iterable[str]) -> int:
    """Let all layers of one of our models recompute their "attention" or "mlp"; return how many layers can."""
    layers: list[Any] = list(model.modules())
    layers = [one for one in layers if hasattr(one, "recomputes_mlp")]
    for layer in layers:
        for block in blocks:
            setattr(layer, f"recomputes_{block}", True)
    return len(layers)


_MASK = 0xFFFFFFFF  # hashes have 32 bits
_GOLDEN = 0x9E3779B1  # spreads neighboring numbers over all bits


@dataclass(frozen=True, slots=True)
class DropoutPlace:
    """Where the numbers are that a stage computes now."""

    key: int  # of the seed and the step
    first_row: int = 0  # of the pass, in the step
    row: int = 0  # the first row of the micro-batch, in the pass
    token: int = 0  # the first token of the slice


class _Current(threading.local):
    """The place of each thread, because ranks may be threads; None while nothing is dropped."""

    place: DropoutPlace | None = None


_current = _Current()


@contextmanager
def dropping(seed: int, step: int, first_row: int = 0) -> Iterator[None]:
    """Inside, drop numbers as the step of this seed does. `first_row` is that of this pass and shard in the step."""
    _current.place = DropoutPlace(zlib.crc32(f"{seed}/{step}".encode()), first_row)
    try:
        yield
    finally:
        _current.place = None


def current_place() -> DropoutPlace | None:
    """The place of what this thread computes now; None if nothing is dropped."""
    return _current.place


@contextmanager
def standing_at(place: DropoutPlace | None) -> Iterator[None]:
    """Inside, drop what is dropped at this place: for a forward that runs once more, perhaps in another thread."""
    before = _current.place
    _current.place = place
    try:
        yield
    finally:
        _current.place = before


def place_at(row: int, token: int) -> None:
    """Say which row of the pass and which token the first number of a stage's input belongs to."""
    place = _current.place
    if place is not None:
        _current.place = replace(place, row=row, token=token)


class Dropout(nn.Module):
    """Drops a share of the numbers of x, (rows, tokens, features), and enlarges the others to make up for it."""

    def __init__(self, site: str, share: float = 0.0) -> None:
        super().__init__()
        self.site = zlib.crc32(site.encode())
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        """Return x with some numbers set to zero, in steps that train."""
        if not self.share:
            return x
        place = _current.place
        if place is None:
            return x
        if x.dim() != 3:
            raise ShapeError(
                f"dropout needs an x of rows, tokens and features, not of shape {tuple(x.shape)}\n"
                "  train this model without dropout"
            )
        kept = hashes(place, self.site, x) >= round(self.share * (_MASK + 1))
        return x * (kept.to(x.dtype) / (1 - self.share))

    def extra_repr(self) -> str:
        """Return the share."""
        return f"share={self.share}"


def hashes(place: DropoutPlace, site: int, x: Tensor) -> Tensor:
    """Return a hash of 32 bits for each number of x: of its row in the step, its token and its feature."""
    rows, tokens, width = x.shape
    device = x.device
    row = torch.arange(rows, device=device) + place.first_row + place.row
    token = torch.arange(tokens, device=device) + place.token
    feature = torch.arange(width, device=device) * _GOLDEN & _MASK
    by_row = _mix(_mix(row) ^ place.key ^ site)
    by_token = _mix(by_row[:, None] ^ _mix(token + _GOLDEN))
    return _mix(by_token[:, :, None] ^ feature)


def _mix(x: Tensor) -> Tensor:
    """Mix the 32 bits of whole numbers: the last rounds of the hash MurmurHash3."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)


def set_dropout(model: nn.Module, share: float) -> int:
    """Let all dropout modules of a model drop this share; return how many there are."""
    found = [module for module in model.modules() if isinstance(module, Dropout)]
    for module in found:
        module.share = share
    return len(found)
