"""Dropout that drops the same numbers however a model is split, sliced, recomputed or resumed.

    seed, step ─► module (its site) ─► row of the step ─► token ─► feature ─► kept, if its hash is large enough

A generator would draw other numbers on other ranks, and again when a forward is recomputed. Here a number is kept or
dropped by a hash of where it is: nothing is drawn, so nothing has to be repeated. The executor says which rows and
tokens a stage sees, and the trainer says which step it is. Outside of a step that trains, nothing is dropped.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from penstock.errors import ShapeError

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
