"""How well a model does when only some of its parts run.

    all     0 1 2 3 4 5  head      perplexity with every part
    random  0 . 2 3 . .  head      several draws: mean and spread
    best    0 1 . . . 5  head      the subset that does best

The first part, with the embedding, and the head always run; parts keep their order; what is left out is not made up
for by any rescaling. A model is cut into one layer a part and the head alone; of given parts the last is the head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from random import Random
from statistics import mean, stdev

import torch
from torch import nn

from penstock.errors import ShapeError
from penstock.models import layer_count, split, token_loss, valid_tokens
from penstock.runtime import Batch
from penstock.train.after.passage import run_along_paths

PartPath = tuple[int, ...]
WholeOrParts = nn.Module | Sequence[nn.Module]  # whole, or its parts

MAX_SUBSETS = 200  # more than so many are not all tried to find the best one


@dataclass(frozen=True, slots=True)
class AblationRow:
    """The perplexity of one way to leave out parts."""

    way: str  # all, random, best
    kept: int  # parts that run, the head not counted
    parts: int  # that there are
    perplexity: float  # of random draws the mean
    spread: float  # of random draws the standard deviation
    ratio: float  # to the perplexity with all parts
    path: PartPath  # of random draws none


Rows = tuple[AblationRow, ...]


def parts_of(model: WholeOrParts) -> list[nn.Module]:
    """A model as parts of one layer, and the head; parts as they are."""
    if isinstance(model, nn.Module):
        return [*split(model, [1] * layer_count(model) + [0])]
    if len(model) < 2:
        raise ShapeError(
            "one part has nothing to leave out; make the head a part of its own: split(model, [..., 0])"
        )
    return list(model)


def skips_of(parts: int, share: float) -> int:
    """How many of so many parts, the head not counted, make up a share of them, to the nearest.

    >>> skips_of(12, 0.33), skips_of(12, 0.25)
    (4, 3)
    """
    if not 0.0 <= share < 1.0 or parts < 1:
        raise ShapeError(
            f"a share of {share:g} of {parts} parts cannot be left out; give one from 0 to below 1"
        )
    return min(math.floor(parts * share + 0.5), parts - 1)


def omit_parts(
    parts: int, share: float, draws: int = 1, seed: int = 0
) -> tuple[PartPath, ...]:
    """Paths that leave out a share of the parts, drawn at random, all different; all there are, if these are fewer.

    >>> omit_parts(4, 0.5, draws=9)
    ((0, 1), (0, 2), (0, 3))
    """
    skips, draw = skips_of(parts, share), Random(f"omission {seed}")
    if math.comb(parts - 1, skips) <= draws:
        return _subsets(parts, skips)
    found: dict[PartPath, None] = {}
    while len(found) < draws:
        found[(0, *sorted(draw.sample(range(1, parts), parts - 1 - skips)))] = None
    return tuple(found)


@torch.no_grad()
def perplexity(
    model: WholeOrParts, batches: Sequence[Batch], keep: Sequence[int] | None = None
) -> float:
    """exp of the mean loss of a token, when only the parts in `keep` run (without it: all), and the head."""
    parts = parts_of(model)
    path = tuple(range(len(parts) - 1)) if keep is None else tuple(keep)
    loss, valid = 0.0, 0
    with _resting(parts):
        for batch in batches:
            made = run_along_paths(
                parts, batch.inputs, [path] * len(batch.inputs), batch.starts
            )
            loss += float(
                sum(
                    token_loss(x, y).double()
                    for x, y in zip(made, batch.labels, strict=True)
                )
            )
            valid += sum(valid_tokens(y) for y in batch.labels)
    return math.exp(min(loss / max(valid, 1), 700.0))  # beyond, it is no number


def best_subset(
    model: WholeOrParts,
    batches: Sequence[Batch],
    share: float,
    subsets: int = MAX_SUBSETS,
) -> PartPath:
    """The path that does best without a share of the parts: of all, or, if there are too many, found greedily.

    Greedily: from all parts, always the one is left out that is missed least.
    """
    parts = parts_of(model)
    count = len(parts) - 1
    skips = skips_of(count, share)
    if math.comb(count - 1, skips) <= subsets:
        return min(
            _subsets(count, skips), key=lambda path: perplexity(parts, batches, path)
        )
    return list(_shrinking(parts, batches, skips))[skips]


def evaluate_ablation(
    model: WholeOrParts,
    batches: Sequence[Batch],
    omit: Sequence[float],
    draws: int = 8,
    seed: int = 0,
    search: Sequence[Batch] = (),
    subsets: int = MAX_SUBSETS,
) -> Rows:
    """Perplexity with all parts, and without each share in `omit`: random draws, and the best subset.

    The best subset is looked for on the batches of `search`: without any, on those it is then measured on, which
    flatters it a little.
    """
    parts = parts_of(model)
    count = len(parts) - 1
    whole = perplexity(parts, batches)
    rows = [AblationRow("all", count, count, whole, 0.0, 1.0, tuple(range(count)))]
    deepest = max((skips_of(count, share) for share in omit), default=0)
    greedy = [tuple(range(count))]
    if any(math.comb(count - 1, skips_of(count, share)) > subsets for share in omit):
        greedy = list(_shrinking(parts, search or batches, deepest))
    for share in omit:
        skips = skips_of(count, share)
        found = [
            perplexity(parts, batches, path)
            for path in _drawn(count, share, draws, seed)
        ]
        spread = stdev(found) if len(found) > 1 else 0.0
        rows.append(
            AblationRow(
                "random",
                count - skips,
                count,
                mean(found),
                spread,
                mean(found) / whole,
                (),
            )
        )
        many = math.comb(count - 1, skips) > subsets
        path = (
            greedy[skips]
            if many
            else best_subset(parts, search or batches, share, subsets)
        )
        single = perplexity(parts, batches, path)
        rows.append(
            AblationRow("best", count - skips, count, single, 0.0, single / whole, path)
        )
    return tuple(rows)


_drawn = omit_parts  # `evaluate` has a word of the same name


def _subsets(parts: int, skips: int) -> tuple[PartPath, ...]:
    return tuple(
        (0, *others) for others in combinations(range(1, parts), parts - 1 - skips)
    )


def _shrinking(
    parts: Sequence[nn.Module], batches: Sequence[Batch], skips: int
) -> Iterator[PartPath]:
    """All parts, then one less, then one less ..., each time without the one that is missed least."""
    path = tuple(range(len(parts) - 1))
    yield path
    for _ in range(skips):
        shorter = [(*path[:at], *path[at + 1 :]) for at in range(1, len(path))]
        path = min(shorter, key=lambda one: perplexity(parts, batches, one))
        yield path


@contextmanager
def _resting(parts: Sequence[nn.Module]) -> Iterator[None]:
    """No dropout meanwhile."""
    before = [part.training for part in parts]
    try:
        for part in parts:
            part.eval()
        yield
    finally:
        for part, training in zip(parts, before, strict=True):
            part.train(training)
