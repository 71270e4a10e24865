"""Parts of a model for paths, with the times and sizes of a profile.

    embed  layer layer | layer layer layer | layer layer layer | head       8 layers in 3 parts and a head
    '---- part 0 ----'   '--- part 1 ----'   '--- part 2 ----'   part 3

A data node holds the first part and the head. So the first part gets fewer layers than the others,
if embedding and head take much time, and the head gets no layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.cost.model import PartCost
from penstock.cost.placed import block_seconds
from penstock.cost.profile import Profile
from penstock.errors import ShapeError
from penstock.ir.plan import Facts
from penstock.partition import even_partition
from penstock.plan.workload import divisors


@dataclass(frozen=True, slots=True)
class ModelParts:
    """A model divided for paths: the layers of each part, and their costs, the head last."""

    partition: tuple[int, ...]
    costs: tuple[PartCost, ...]
    turn: float  # seconds that the executor takes between two actions
    recompute: tuple[int, ...]  # parts that keep only their input
    facts: Facts  # what the plan.json says about it


def model_parts(
    profile: Profile, parts: int, tokens: int, recompute: bool, source: str
) -> ModelParts:
    """Divide a profiled model into parts and a head. The busiest node has as little work as possible.

    source: where the profile comes from, for the plan.json.
    """
    if parts > profile.layers:
        raise ShapeError(
            f"{profile.layers} layers cannot fill {parts} parts; give --parts {profile.layers} or less"
        )
    layer = block_seconds(profile.layer, tokens)
    ends = block_seconds(profile.embed, tokens) + block_seconds(profile.head, tokens)
    best: tuple[int, ...] = ()
    least = float("inf")
    for first in range(1, profile.layers - (parts - 1) + 1):
        others = even_partition(profile.layers - first, parts - 1) if parts > 1 else ()
        busiest = max(first * layer + ends, max(others, default=0) * layer)
        if busiest < least:
            best = (first, *others, 0)
            least = busiest
    working = replace(profile, turn=0.0)  # It is a pause here, and no work.
    last = len(best) - 1
    costs = [
        working.part(layers, number == 0, number == last, recompute)
        for number, layers in enumerate(best)
    ]
    again = tuple(range(len(best))) if recompute else ()
    facts: Facts = (("profile", source), ("tokens", tokens), ("rows", profile.rows))
    return ModelParts(best, tuple(costs), profile.turn, again, facts)


def choose_data_nodes(batch: int, microbatches: int, wanted: int, given: bool) -> int:
    """Return a number of data nodes that share a batch equally: the wanted one, or fewer.

    given: whether the number was asked for, and must not change.
    """
    shares, left = divmod(batch, microbatches)
    fitting = [count for count in divisors(shares) if count <= wanted] if shares else []
    if left or not fitting or (given and fitting[-1] != wanted):
        nearest = -(-batch // (microbatches * wanted)) * microbatches * wanted
        raise ShapeError(
            f"data.batch = {batch} sequences cannot be dealt out evenly to {wanted} data nodes with "
            f"{microbatches} micro-batches each; {nearest} can\n"
            "  change --microbatches, --data-nodes or --set data.batch"
        )
    return fitting[-1]


def waved_partition(partition: tuple[int, ...]) -> tuple[int, ...]:
    """Return the layers of each part of a wave: half of a part on the way down, the rest on the way up.

    >>> waved_partition((3, 4, 4, 0))
    (2, 2, 2, 2, 2, 1)
    """
    down = [(layers + 1) // 2 for layers in partition[:-1]]
    up = [layers - half for layers, half in zip(partition, down, strict=False)]
    return (*down, *reversed(up))
