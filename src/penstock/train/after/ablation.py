"""Measures how well a model does when only some of its parts run.

    all     0 1 2 3 4 5  head      perplexity with every part
    random  0 . 2 3 . .  head      several draws: mean and spread
    best    0 1 . . . 5  head      the subset that does best
    chosen  0 1 2 3 . .  head      the parts that somebody asked for, such as an early exit

The first part, which has the embedding, and the head always run. Parts keep their order, and
nothing is rescaled to make up for those left out. A whole model is cut into one layer per
part and the head; if parts are given, the last one must be the head.
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

from penstock.errors import RunError, ShapeError
from penstock.models import layer_count, split, token_loss, valid_tokens
from penstock.runtime import Batch
from penstock.schedules.skip import PartPath, skips_of
from penstock.train.after.passage import run_along_paths

WholeOrParts = nn.Module | Sequence[nn.Module]  # a whole model, or its parts

MAX_EXPONENT = 700.0  # exp of more would overflow.
MAX_SUBSETS = 200  # If there are more subsets, the best one is searched greedily.


@dataclass(frozen=True, slots=True)
class AblationRow:
    """The perplexity of one way to leave out parts."""

    way: str  # all, random, best, chosen
    kept: int  # parts that run, without the head
    parts: int  # all parts, without the head
    perplexity: float  # for random draws, the mean
    spread: float  # for random draws, the standard deviation
    ratio: float  # to the perplexity with all parts
    path: PartPath  # for random draws, empty


TokenRows = tuple[AblationRow, ...]


def single_layer_parts(model: WholeOrParts) -> list[nn.Module]:
    """Cut a model into parts of one layer and the head; return parts as they are."""
    if isinstance(model, nn.Module):
        return [*split(model, [1] * layer_count(model) + [0])]
    if len(model) < 2:
        raise ShapeError(
            "a single part leaves nothing to leave out; "
            "make the head its own part: split(model, [..., 0])"
        )
    return list(model)


def chosen_path(
    layers: int, omit: Sequence[int] = (), exit_after: int | None = None
) -> PartPath:
    """Return the layers that run if some are left out, or if the head follows after one of them.

    Layers are counted from 0.

    >>> chosen_path(6, omit=[2]), chosen_path(6, exit_after=3)
    ((0, 1, 3, 4, 5), (0, 1, 2, 3))
    """
    last = layers - 1
    unknown = [layer for layer in omit if not 0 <= layer <= last]
    if unknown:
        raise ShapeError(
            f"layer {unknown[0]} cannot be left out: the layers are 0 to {last}"
        )
    if 0 in omit:
        raise ShapeError(
            "layer 0 cannot be left out: it always runs in training, so the others rely on it\n"
            f"  leave out some of the layers 1 to {last}"
        )
    if exit_after is not None and not 0 <= exit_after <= last:
        raise ShapeError(
            f"there is no layer {exit_after} to exit after: the layers are 0 to {last}"
        )
    end = last if exit_after is None else exit_after
    beyond = [layer for layer in omit if layer > end]
    if beyond:
        raise ShapeError(
            f"layer {beyond[0]} comes after the exit, so it is left out already\n"
            f"  exit after a later layer than {end}, or omit only layers up to {end}"
        )
    return tuple(layer for layer in range(end + 1) if layer not in omit)


def parse_layers(text: str) -> list[int]:
    """Read the numbers of layers from a text such as 2,5."""
    try:
        return [int(word) for word in text.split(",") if word.strip()]
    except ValueError:
        raise ShapeError(
            f"{text!r} does not name layers; write their numbers with commas, such as 2,5"
        ) from None


def parse_omission(text: str) -> float | list[int]:
    """Read what to leave out: a share of the layers, such as 0.25, or the layers themselves, such as 2,5.

    >>> parse_omission("0.25"), parse_omission("2,5"), parse_omission("3")
    (0.25, [2, 5], [3])
    """
    try:
        share = float(text)
    except ValueError:
        return parse_layers(text)
    is_layer = text.strip().isdecimal() and share >= 1
    return [int(text)] if is_layer else share


def omit_parts(
    parts: int, share: float, draws: int = 1, seed: int = 0
) -> tuple[PartPath, ...]:
    """Return different random paths that leave out a share of the parts.

    If fewer than `draws` exist, return all of them.

    >>> omit_parts(4, 0.5, draws=9)
    ((0, 1), (0, 2), (0, 3))
    """
    skips = skips_of(parts, share)
    draw = Random(f"omission {seed}")
    if math.comb(parts - 1, skips) <= draws:
        return _subsets(parts, skips)
    paths: dict[PartPath, None] = {}
    while len(paths) < draws:
        others = sorted(draw.sample(range(1, parts), parts - 1 - skips))
        paths[(0, *others)] = None
    return tuple(paths)


@torch.no_grad()
def perplexity(
    model: WholeOrParts, batches: Sequence[Batch], keep: Sequence[int] | None = None
) -> float:
    """Return exp of the mean loss per token when only the parts in `keep` and the head run.

    Without `keep`, all parts run.
    """
    parts = single_layer_parts(model)
    path = tuple(range(len(parts) - 1)) if keep is None else tuple(keep)
    loss = 0.0
    valid = 0
    with _without_dropout(parts):
        for batch in batches:
            paths = [path] * len(batch.inputs)
            outputs = run_along_paths(
                parts, batch.inputs, paths, batch.starts, batch.named
            )
            losses = [
                token_loss(logits, labels).double()
                for logits, labels in zip(outputs, batch.labels, strict=True)
            ]
            loss += float(sum(losses))
            valid += sum(valid_tokens(labels) for labels in batch.labels)
    mean_loss = loss / max(valid, 1)
    if math.isnan(mean_loss):
        raise RunError(
            "the model produces NaN, so it has no perplexity\n"
            "  check the losses of its training, and train again with a lower optimizer.rate"
        )
    return math.exp(min(mean_loss, MAX_EXPONENT))


def best_subset(
    model: WholeOrParts,
    batches: Sequence[Batch],
    share: float,
    subsets: int = MAX_SUBSETS,
) -> PartPath:
    """Return the path that does best without a share of the parts.

    If there are more than `subsets` subsets, search greedily: start with all parts, and
    always leave out the one that is missed least.
    """
    parts = single_layer_parts(model)
    count = len(parts) - 1
    skips = skips_of(count, share)
    if math.comb(count - 1, skips) <= subsets:
        return min(
            _subsets(count, skips), key=lambda path: perplexity(parts, batches, path)
        )
    return list(_greedy_paths(parts, batches, skips))[skips]


def evaluate_ablation(
    model: WholeOrParts,
    batches: Sequence[Batch],
    omit: Sequence[float],
    draws: int = 8,
    seed: int = 0,
    search: Sequence[Batch] = (),
    subsets: int = MAX_SUBSETS,
    chosen: Sequence[PartPath] = (),
) -> TokenRows:
    """Measure the perplexity with all parts, without each share in `omit`, and along the `chosen` paths.

    Each share gets a row of random draws and one of the best subset. The best subset is
    searched on the batches of `search`; without any, on those it is then measured on, which
    flatters it a little.
    """
    parts = single_layer_parts(model)
    count = len(parts) - 1
    whole = perplexity(parts, batches)
    rows = [AblationRow("all", count, count, whole, 0.0, 1.0, tuple(range(count)))]
    deepest = max((skips_of(count, share) for share in omit), default=0)
    greedy = [tuple(range(count))]
    if any(math.comb(count - 1, skips_of(count, share)) > subsets for share in omit):
        greedy = list(_greedy_paths(parts, search or batches, deepest))
    for share in omit:
        skips = skips_of(count, share)
        found = [
            perplexity(parts, batches, path)
            for path in omit_parts(count, share, draws, seed)
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
    for path in chosen:
        single = perplexity(parts, batches, path)
        rows.append(
            AblationRow("chosen", len(path), count, single, 0.0, single / whole, path)
        )
    return tuple(rows)


def _subsets(parts: int, skips: int) -> tuple[PartPath, ...]:
    return tuple(
        (0, *others) for others in combinations(range(1, parts), parts - 1 - skips)
    )


def _greedy_paths(
    parts: Sequence[nn.Module], batches: Sequence[Batch], skips: int
) -> Iterator[PartPath]:
    """Yield all parts, then one fewer each time, without the one that is missed least."""
    path = tuple(range(len(parts) - 1))
    yield path
    for _ in range(skips):
        shorter = [(*path[:n], *path[n + 1 :]) for n in range(1, len(path))]
        path = min(shorter, key=lambda shorter: perplexity(parts, batches, shorter))
        yield path


@contextmanager
def _without_dropout(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Switch dropout off for a while."""
    before = [part.training for part in parts]
    try:
        for part in parts:
            part.eval()
        yield
    finally:
        for part, training in zip(parts, before, strict=True):
            part.train(training)
