"""Facts about each schedule: its paper, its idle time, its memory and its size. The tests check the formulas.

P is the number of ranks, M of micro-batches, v of chunks, W of waves and s of slices. `idle` is the time that each
rank waits in a step, in units of F. `peak` is the activation memory of the fullest rank, counted in micro-batches of
one rank. Both assume that B = 2 F, I = W = F and that messages are free, and both hold where the condition `when` is
true. The bubble is idle / (3 M + idle).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.errors import ShapeError


@dataclass(frozen=True, slots=True)
class ScheduleFacts:
    """The facts about one schedule. `idle`, `peak` and `when` are Python expressions; see above for the letters."""

    paper: str
    idle: str
    peak: str
    when: str = "True"
    weights: int = 1  # copies of the weights
    stages: int = 1  # of each rank; chunks and waves multiply it
    splits: bool = False  # whether backwards are split into I and W
    exact: bool = True  # if false, `idle` and `peak` are upper bounds
    built: int = 0  # the least micro-batches of each rank for which the order is built
    own_head: bool = False  # whether the last part is the head alone, without layers


FACTS: dict[str, ScheduleFacts] = {
    "gpipe": ScheduleFacts("Huang et al. 2019, arXiv 1811.06965", "3*(P-1)", "M"),
    "1f1b": ScheduleFacts(
        "Narayanan et al. 2019 (PipeDream); Fan et al. 2021 (DAPPLE)",
        "3*(P-1)",
        "min(P, M)",
    ),
    "interleaved": ScheduleFacts(
        "Narayanan et al. 2021, arXiv 2104.04473",
        "3*(P-1)/v",
        "min(M, P + (P-1)/v)",
        "M % P == 0",
    ),
    "chimera": ScheduleFacts(
        "Li and Hoefler 2021, arXiv 2107.06925",
        "2*(P-2)",
        "P",
        "M >= P and M % 2 == 0",
        weights=2,
    ),
    "hanayo": ScheduleFacts(
        "Liu et al. 2023, arXiv 2308.15762",
        "2*(P-1)/W",
        "P",
        "M == P or (W == 1 and M > P)",
        stages=2,
        built=1,
    ),
    "zb-h1": ScheduleFacts(
        "Qi et al. 2024, arXiv 2401.10241", "P-1", "P", "M >= P", splits=True
    ),
    "interleaved-zb": ScheduleFacts(
        "Qi et al. 2024, arXiv 2401.10241 (ZB1P)",
        "(P-1)/v",
        "P",
        "M % P == 0",
        splits=True,
    ),
    "zb-v": ScheduleFacts(
        "Qi et al. 2024, arXiv 2401.10241",
        "(P-1)/2",
        "P",
        "M >= 2*P - 1",
        stages=2,
        built=2,
        splits=True,
    ),
    "v-half": ScheduleFacts(
        "Qi et al. 2024, arXiv 2405.15362",
        "1.5*P - 2",
        "P/2 + 1.5",
        "M >= P and P > 2",
        stages=2,
        built=2,
        splits=True,
        exact=False,
    ),
    "v-min": ScheduleFacts(
        "Qi et al. 2024, arXiv 2405.15362",
        "2*P - 1.5",
        "P/3 + 1.5",
        "M >= P and P > 2",
        stages=2,
        built=2,
        splits=True,
        exact=False,
    ),
    "dualpipe-v": ScheduleFacts(
        "DeepSeek-AI 2024, arXiv 2412.19437",
        "(P-1)/2",
        "P + 0.5",
        "M >= 2*P and P > 1",
        stages=2,
        built=2,
        splits=True,
    ),
    "terapipe": ScheduleFacts("Li et al. 2021, arXiv 2102.07988", "3*(P-1)/s", "M"),
    "seq1f1b": ScheduleFacts(
        "Sun et al. 2024, arXiv 2406.03488", "3*(P-1)/s", "min(M, (s+P-1)/s)"
    ),
    "skip": ScheduleFacts(
        "Blagoev et al. 2025, arXiv 2502.19913", "", "P", exact=False, own_head=True
    ),
}


# Building this many takes a minute or more, and about 2 GB.
# For comparison, 256 ranks with 2,048 micro-batches have a million actions.
MAX_ACTIONS = 4_000_000


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
    facts = FACTS[name]
    microbatches = max(microbatches, facts.built * ranks)
    is_split = facts.splits or shape.get("split")
    factors = (
        ranks * facts.stages * shape.get("chunks", 1) * shape.get("waves", 1),
        microbatches,
        (3 if is_split else 2) + (2 if shape.get("offload") else 0),
        shape.get("slices", 1),
        shape.get("copies", 1),
    )
    return math.prod(factors) if min(factors) >= 1 else 0
