"""How large a schedule may be. Checked before anything is built, so that a mistyped number fails at once."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.errors import ShapeError

MAX_ACTIONS = 4_000_000  # a minute or more to build, and about 2 GB: 256 ranks with 2,048 micro-batches have a million

TWO_STAGES = ("zb-v", "v-half", "v-min", "dualpipe-v")  # two stages on each rank
SPLIT = ("zb-h1", "interleaved-zb", *TWO_STAGES)  # backwards in two pieces


def refuse_size(actions: int, what: str) -> None:
    """Refuses a schedule of more than `MAX_ACTIONS` actions. `what`: the schedule, as the error names it."""
    if actions > MAX_ACTIONS:
        raise ShapeError(
            f"{what} has {actions:,} actions; the most is {MAX_ACTIONS:,}\n"
            "  ask for fewer ranks, micro-batches, waves, chunks, slices or copies"
        )


def count_actions(name: str, shape: Mapping[str, int]) -> int:
    """The most actions that a schedule of this name and whole shape has while it is built; 0 if a number is below 1.

    Some generators build the order for a full pipeline first and then leave out micro-batches.

    >>> count_actions("1f1b", {"ranks": 4, "microbatches": 8})
    64
    >>> count_actions("hanayo", {"ranks": 4, "microbatches": 4, "waves": 100_000})
    6400000
    """
    ranks, microbatches = shape.get("ranks", 0), shape.get("microbatches", 0)
    stages = ranks * shape.get("chunks", 1)
    if name == "hanayo":
        stages, microbatches = (
            2 * ranks * shape.get("waves", 1),
            max(microbatches, ranks),
        )
    elif name in TWO_STAGES:
        stages, microbatches = 2 * ranks, max(microbatches, 2 * ranks)
    pieces = 3 if name in SPLIT or shape.get("split") else 2
    numbers = (
        stages,
        microbatches,
        pieces,
        shape.get("slices", 1),
        shape.get("copies", 1),
    )
    if min(numbers) < 1:
        return 0
    product = 1
    for number in numbers:
        product *= number
    return product
