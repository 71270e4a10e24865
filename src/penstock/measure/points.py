"""Chooses which slices to measure: about forty, by length and prefix, that tell most about all possible slices.

    prefix
    L |h
      |o  .            o  fitted: logarithmically spaced lengths, with no, a small, a medium and the longest prefix
      |o  h  o         h  held out: lengths and prefixes in between
      |o  o  h  o      .  impossible: slice and prefix together are longer than the sequence
      +o--o--o--o--o   tokens

The lengths come from halving the sequence again and again, because even cuts fall there. They
are rounded to tiles, because kernels work in tiles, and good cuts follow them. The lengths
that are held out lie between two of these, and are multiples of 8. On a GPU all lengths and
prefixes are multiples of its kernels' tile, as cuts should be: there a slice of 448 tokens
takes as long as one of 512, or longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import log, sqrt

from penstock.errors import ShapeError

MIN_TOKENS = 16
HALVINGS = 6
LENGTH_STEP_TOKENS = 64  # tokens to which lengths are rounded
GRID_STEPS = 128  # prefixes are multiples of this fraction of the sequence
# Prefixes as shares of the longest one: of fitted lengths, and of held-out ones by turns.
MEASURED_PREFIX_SHARES = (0.0, 0.1, 0.5, 1.0)
HELD_OUT_SHARES = ((0.0, 0.25), (0.25, 0.75))
# The parts of a sequence that a quick measurement fits, and those that it holds out.
QUICK_PARTS = (1, 2, 4, 16)
QUICK_HELD_OUT_PARTS = (6, 3)

SlicePoint = tuple[int, int]  # the tokens of a slice, and of the prefix before it


def measuring_points(
    tokens: int, sliceable: bool = True, tile: int = 1
) -> tuple[list[SlicePoint], list[SlicePoint]]:
    """Choose slices of a sequence to fit a curve to, and others to hold out of the fit.

    If the module cannot be sliced, all prefixes are empty. All lengths are multiples of
    `tile`, except for the whole sequence if that is not one.

    >>> fitted, held_out = measuring_points(1024)
    >>> len(fitted), len(held_out), fitted[:3], held_out[:2]
    (29, 14, [(16, 0), (16, 96), (16, 504)], [(24, 0), (24, 248)])
    """
    if tokens < MIN_TOKENS:
        raise ShapeError(
            f"{tokens} tokens are too few to measure slices of; use at least {MIN_TOKENS}"
        )
    lengths = _fitted_lengths(tokens, tile)
    between = _held_out_lengths(lengths, tile)
    fitted: set[SlicePoint] = set()
    for length in lengths:
        fitted |= _with_prefixes(length, MEASURED_PREFIX_SHARES, tokens, tile)
    held_out: set[SlicePoint] = set()
    for number, length in enumerate(between):
        held_out |= _with_prefixes(length, HELD_OUT_SHARES[number % 2], tokens, tile)
    if not sliceable:
        fitted = {(length, prefix) for length, prefix in fitted if prefix == 0}
        held_out = {(length, 0) for length in between}
    return sorted(fitted), sorted(held_out - fitted)


def quick_points(
    tokens: int, sliceable: bool = True, tile: int = 1
) -> tuple[list[SlicePoint], list[SlicePoint]]:
    """Choose about ten slices, for a measurement that must not take long.

    They are a subset of those of `measuring_points`: the whole sequence, a half, a quarter
    and a sixteenth of it with no prefix and with the longest one, and two slices between
    them that are held out.

    >>> quick_points(128)
    ([(8, 0), (8, 120), (32, 0), (32, 96), (64, 0), (64, 64), (128, 0)], [(24, 26), (48, 20)])
    """
    fitted, held_out = measuring_points(tokens, sliceable, tile)
    lengths = sorted({length for length, _ in fitted})
    chosen = {_nearest(lengths, tokens / part) for part in QUICK_PARTS}
    few = {(length, 0) for length in chosen}
    if sliceable:
        few |= {(length, tokens - length) for length in chosen}
    between = sorted({length for length, _ in held_out})
    judges = set()
    for number, part in enumerate(QUICK_HELD_OUT_PARTS if between else ()):
        length = _nearest(between, tokens / part)
        choices = sorted(prefix for size, prefix in held_out if size == length)
        judges.add((length, choices[-1] if number else choices[0]))
    return sorted(few), sorted(judges - few)


def _nearest(lengths: Sequence[int], target: float) -> int:
    """The length whose logarithm is nearest to that of a target."""
    return min(lengths, key=lambda length: abs(log(length / target)))


def _fitted_lengths(tokens: int, tile: int) -> list[int]:
    """Halves of halves of the sequence, three quarters of it, and all of it."""
    targets = [0.75 * tokens]
    targets += [tokens / 2**n for n in range(1, HALVINGS + 1) if tokens >= 2**n]
    lengths = {tokens}
    for target in targets:
        length = _round_to_tile(target, max(LENGTH_STEP_TOKENS, tile))
        if tile <= length < tokens:
            lengths.add(length)
    return sorted(lengths)


def _held_out_lengths(lengths: Sequence[int], tile: int) -> list[int]:
    """Lengths between each two neighbors, in the middle of their logarithms."""
    between = set()
    for shorter, longer in pairwise(lengths):
        multiple = 8 if shorter >= 16 else 1
        between.add(_round_to_tile(sqrt(shorter * longer), max(multiple, tile)))
    return sorted(between - set(lengths))


def _with_prefixes(
    length: int, shares: Sequence[float], tokens: int, tile: int
) -> set[SlicePoint]:
    """A length with prefixes that are shares of the longest possible one.

    The longest prefix is exact; the others are rounded down to a grid.
    """
    longest = tokens - length
    grid = max(tokens // GRID_STEPS, tile)
    points = set()
    for share in shares:
        prefix = int(share * longest) // grid * grid
        points.add((length, longest if share == 1.0 else prefix))
    return points


def _round_to_tile(length: float, tile: int) -> int:
    """The nearest multiple of a tile, which is halved until it is not longer than `length`."""
    while tile > max(length, 1):
        tile //= 2
    return int(length / tile + 0.5) * tile
