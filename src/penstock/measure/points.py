"""Where to measure: about forty slices, by length and prefix, that say most of all that a sequence can be cut into.

    prefix
    L |h
      |o  .            o  fitted: lengths spaced by their logarithm, at no prefix, little, half and all that there is
      |o  h  o         h  held out: lengths and prefixes in between
      |o  o  h  o      .  never: slice and prefix together are longer than the sequence
      +o--o--o--o--o   tokens

Lengths are halves of halves of the sequence, where even cuts fall, rounded to tiles, for kernels work in tiles and so
do good cuts. Those held out lie between two of them, and are multiples of 8. On a GPU all lengths and prefixes are
multiples of its kernels' tile, and cuts should be: a slice of 448 tokens takes as long as one of 512 there, or longer.
"""

from __future__ import annotations

from itertools import pairwise
from math import sqrt

from penstock.errors import ShapeError

HALVINGS = 6
TILE = 64
PREFIX_SHARES = (0.0, 0.1, 0.5, 1.0)  # of the longest prefix
BETWEEN = ((0.0, 0.25), (0.25, 0.75))  # by turns

Where = tuple[int, int]  # tokens, prefix


def measuring_points(
    tokens: int, sliceable: bool = True, tile: int = 1
) -> tuple[list[Where], list[Where]]:
    """Slices of a sequence to fit a curve to, and others to hold out; without a prefix if it cannot be sliced.

    All are multiples of `tile`, but for the whole of a sequence that is none.

    >>> fitted, held_out = measuring_points(1024)
    >>> len(fitted), len(held_out), fitted[:3], held_out[:2]
    (29, 14, [(16, 0), (16, 96), (16, 504)], [(24, 0), (24, 248)])
    """
    if tokens < 16:
        raise ShapeError(
            f"{tokens} tokens are too few to measure slices of; the least is 16"
        )
    halves = [tokens / 2**n for n in range(HALVINGS + 1) if tokens >= 2**n]
    rounded = {
        _round(length, max(TILE, tile)) for length in (*halves[1:], 0.75 * tokens)
    }
    lengths = sorted(
        {length for length in rounded if tile <= length < tokens} | {tokens}
    )
    between = {
        _round(sqrt(a * b), max(8 if a >= 16 else 1, tile))
        for a, b in pairwise(lengths)
    }
    halfway = sorted(between - {*lengths})
    fitted = [
        (i, _prefix(i, share, tokens, tile)) for i in lengths for share in PREFIX_SHARES
    ]
    held_out = [
        (i, _prefix(i, share, tokens, tile))
        for n, i in enumerate(halfway)
        for share in BETWEEN[n % 2]
    ]
    kept = [
        sorted({(i, j) for i, j in some if sliceable or not j})
        for some in (fitted, held_out)
    ]
    if not sliceable:
        kept[1] = [(i, 0) for i in halfway]
    return kept[0], [where for where in kept[1] if where not in kept[0]]


def _prefix(length: int, share: float, tokens: int, tile: int) -> int:
    """A share of the longest prefix there is, on a grid of 128 to the sequence; all of it is all of it."""
    grid, most = max(tokens // 128, tile), tokens - length
    return most if share == 1.0 else int(share * most) // grid * grid


def _round(length: float, tile: int) -> int:
    """The nearest multiple of a tile; of something shorter, of the largest half of a half of the tile that fits."""
    while tile > max(length, 1):
        tile //= 2
    return int(length / tile + 0.5) * tile
