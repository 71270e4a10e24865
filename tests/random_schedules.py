"""Random schedules, out of all that the tables can express, for tests that claim something about every schedule.

    stages         parts anywhere, several on a rank, some of them as replicas, numbered in no order
    micro-batches  paths that skip parts, swap them and pick a replica; cut anywhere, or not at all
    backwards      whole or split, slice by slice
    lanes          a random order in which everything comes after what it needs: such lanes can always run

Use `random_schedule(rng)`; say `ranks`, `parts`, `microbatches` or `slices` to fix a size (slices: the most a
micro-batch may have). With `ends` every path begins at the first part and ends at the last.
`broken(rng, schedule)` gives its tables with something wrong, or perhaps not.
`named_schedules(name)` gives, not at random, the small schedules of a name in the registry.
"""

from __future__ import annotations

from collections.abc import Iterator
from inspect import Parameter, signature

import numpy as np

from penstock.cost import ModelCost, Network, PartCost, Seconds
from penstock.errors import ShapeError
from penstock.ir import Action, MicroBatch, Op, Schedule, Stage, schedule_of
from penstock.schedules import REGISTRY

Lanes = list[list[Action]]


def random_schedule(
    rng: np.random.Generator,
    ranks: int | None = None,
    parts: int | None = None,
    microbatches: int | None = None,
    slices: int = 3,
    ends: bool = False,
) -> Schedule:
    """Draw a valid schedule; the same generator state gives the same one."""
    ranks = ranks or int(rng.integers(1, 6))
    stages = random_stages(rng, ranks, parts or int(rng.integers(1, 7)))
    draw = random_whole_microbatch if ends else random_microbatch
    batch = [
        draw(rng, stages, slices)
        for _ in range(microbatches or int(rng.integers(1, 6)))
    ]
    split = rng.choice([0.0, 0.5, 1.0])  # share of the backwards
    safe: Lanes = [[] for _ in range(ranks)]
    for number, microbatch in enumerate(batch):
        for action in there_and_back(rng, number, microbatch, split):
            safe[stages[action.stage].rank].append(action)
    return schedule_of(
        stages, batch, random_order(rng, schedule_of(stages, batch, safe))
    )


def random_stages(rng: np.random.Generator, ranks: int, parts: int) -> list[Stage]:
    """Place every part once, and some of them again, on random ranks."""
    held = [
        *range(parts),
        *rng.integers(0, parts, size=rng.integers(0, parts + 1)).tolist(),
    ]
    rng.shuffle(held)
    return [Stage(int(rng.integers(ranks)), part) for part in held]


def random_microbatch(
    rng: np.random.Generator, stages: list[Stage], slices: int
) -> MicroBatch:
    """Draw a path over some parts, mostly in order, with one replica of each, and cuts."""
    parts = sorted({stage.part for stage in stages})
    visited = [part for part in parts if rng.random() < 0.8] or parts[:1]
    if rng.random() < 0.3:
        rng.shuffle(visited)
    path = [
        int(rng.choice([s for s, stage in enumerate(stages) if stage.part == part]))
        for part in visited
    ]
    tokens = int(rng.integers(slices, 20))
    inner = rng.permutation(np.arange(1, tokens))[: rng.integers(0, slices)]
    return MicroBatch(tuple(path), tokens, (0, *sorted(inner.tolist()), tokens))


def random_whole_microbatch(
    rng: np.random.Generator, stages: list[Stage], slices: int
) -> MicroBatch:
    """Draw a path that starts at the first part and ends at the last, as models need."""
    drawn = random_microbatch(rng, stages, slices)
    last = max(stage.part for stage in stages)
    inner = [stage for stage in drawn.path if 0 < stages[stage].part < last]
    first, final = (
        int(rng.choice([s for s, stage in enumerate(stages) if stage.part == part]))
        for part in (0, last)
    )
    return MicroBatch(
        (first, *inner, final) if last else (first,), drawn.tokens, drawn.cuts
    )


def there_and_back(
    rng: np.random.Generator, number: int, microbatch: MicroBatch, split: float
) -> Iterator[Action]:
    """Return the actions of one micro-batch in turn: forward along its path, and back."""
    pieces = range(microbatch.slices)
    for stage in microbatch.path:
        yield from (Action(Op.F, stage, number, piece) for piece in pieces)
    for stage in reversed(microbatch.path):
        for piece in reversed(pieces):
            ops = (Op.I, Op.W) if rng.random() < split else (Op.B,)
            yield from (Action(op, stage, number, piece) for op in ops)


def random_order(rng: np.random.Generator, schedule: Schedule) -> Lanes:
    """Draw an order of the lanes in which every action follows what it needs."""
    table = schedule.table
    needed = [[n for n in row if n >= 0] for row in table.needs.tolist()]
    users: list[list[int]] = [[] for _ in needed]
    for number, row in enumerate(needed):
        for before in row:
            users[before].append(number)
    waits = [len(row) for row in needed]
    ready = [number for number, count in enumerate(waits) if not count]
    # How often the action that became ready last goes first.
    haste = rng.choice([0.0, 0.7, 1.0])
    lanes: Lanes = [[] for _ in schedule.lanes]
    for last, pick in zip(
        (rng.random(len(needed)) < haste).tolist(),
        rng.random(len(needed)).tolist(),
        strict=True,
    ):
        number = ready.pop(-1 if last else int(pick * len(ready)))
        lanes[table.rank[number]].append(table.action(number))
        for user in users[number]:
            waits[user] -= 1
            if not waits[user]:
                ready.append(user)
    return lanes


def broken(
    rng: np.random.Generator, schedule: Schedule
) -> tuple[list[Stage], list[MicroBatch], Lanes]:
    """Make one to three random changes to the lanes. The result may still be valid."""
    lanes = [list(lane) for lane in schedule.lanes]
    for _ in range(rng.integers(1, 4)):
        busy = [lane for lane in lanes if lane]
        if not busy:
            break
        lane, other = busy[rng.integers(len(busy))], lanes[rng.integers(len(lanes))]
        at, place = int(rng.integers(len(lane))), int(rng.integers(len(other) + 1))
        match rng.integers(6):
            case 0 | 1:
                here = int(rng.integers(len(lane)))
                lane[at], lane[here] = lane[here], lane[at]
            case 2:
                del lane[at]
            case 3:
                lane.insert(int(rng.integers(len(lane) + 1)), lane[at])
            case 4:
                other.insert(min(place, max(len(other) - 1, 0)), lane.pop(at))
            case _:
                lane[at] = _strange(rng, lane[at])
    return list(schedule.stages), list(schedule.microbatches), lanes


def _strange(rng: np.random.Generator, action: Action) -> Action:
    """Change one of the four fields of an action."""
    number = int(rng.integers(-1, 8))
    return (
        action._replace(op=tuple(Op)[rng.integers(4)]),
        action._replace(stage=number),
        action._replace(microbatch=number),
        action._replace(slice=number),
    )[rng.integers(4)]


def named_schedules(name: str) -> Iterator[Schedule]:
    """Yield the schedule of this name in every small shape; other options are 2."""
    told = [
        word
        for word, asked in signature(REGISTRY[name]).parameters.items()
        if asked.default is Parameter.empty
    ]
    for ranks in (1, 2, 3, 4, 8):
        for microbatches in (1, 2, 4, 8, 16):
            try:
                yield REGISTRY[name](
                    **dict.fromkeys(told, 2)
                    | {"ranks": ranks, "microbatches": microbatches}
                )
            except ShapeError:
                continue


def random_cost(
    rng: np.random.Generator, ranks: int, parts: int, serial: bool
) -> ModelCost:
    def seconds() -> Seconds:
        base, token, prefix, pair = rng.uniform(0.1, 2.0), *rng.uniform(0.0, 0.2, 3)
        return Seconds(base, token, prefix, pair)

    def matrix(low: float, high: float) -> tuple[tuple[float, ...], ...]:
        return tuple(map(tuple, rng.uniform(low, high, (ranks, ranks)).tolist()))

    costs = tuple(
        PartCost(
            seconds(),
            seconds(),
            seconds(),
            held=rng.uniform(1, 5),
            kept=rng.random(),
            message=rng.uniform(0, 9),
        )
        for _ in range(parts)
    )
    return ModelCost(
        costs,
        Network(matrix(0, 0.5), matrix(1, 50), serial),
        tuple(rng.uniform(0.5, 2, ranks).tolist()),
    )
