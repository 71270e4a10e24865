"""The limit on the size of a schedule, checked before anything is built so that a mistyped number fails at once."""

from __future__ import annotations

import math
from collections.abc import Mapping

from penstock.errors import ShapeError

# Building this many takes a minute or more, and about 2 GB.
# For comparison, 256 ranks with 2,048 micro-batches have a million actions.
MAX_ACTIONS = 4_000_000

# Schedules with two stages on each rank:
TWO_STAGE_SCHEDULES = ("zb-v", "v-half", "v-min", "dualpipe-v")
# Schedules whose backwards are split into I and W:
SPLIT_SCHEDULES = ("zb-h1", "interleaved-zb", *TWO_STAGE_SCHEDULES)


def refuse_if_too_large(actions: int, what: str) -> None:
    """Refuse a schedule of more than `MAX_ACTIONS` actions; the error calls it `what`."""
    if actions > MAX_ACTIONS:
        raise ShapeError(
            f"{what} has {actions:,} actions; at most {MAX_ACTIONS:,} are possible\n"
            "  ask for fewer ranks, micro-batches, waves, chunks, slices or copies"
        )


def count_actions(name: str, shape: Mapping[str, int]) -> int:
    """Return the most actions that a schedule of this name and full shape has while it is built.

    Some generators build the order for a full pipeline first and then leave out
    micro-batches. The result is 0 if a number of the shape is below 1.

    >>> count_actions("1f1b", {"ranks": 4, "microbatches": 8})
    64
    >>> count_actions("hanayo", {"ranks": 4, "microbatches": 4, "waves": 100_000})
    6400000
    """
    ranks = shape.get("ranks", 0)
    microbatches = shape.get("microbatches", 0)
    stages = ranks * shape.get("chunks", 1)
    if name == "hanayo":
        stages = 2 * ranks * shape.get("waves", 1)
        microbatches = max(microbatches, ranks)
    elif name in TWO_STAGE_SCHEDULES:
        stages = 2 * ranks
        microbatches = max(microbatches, 2 * ranks)
    is_split = name in SPLIT_SCHEDULES or shape.get("split")
    factors = (
        stages,
        microbatches,
        3 if is_split else 2,
        shape.get("slices", 1),
        shape.get("copies", 1),
    )
    return math.prod(factors) if min(factors) >= 1 else 0
