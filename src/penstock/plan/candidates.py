"""A first planner: every schedule that fits, built, simulated and ranked.

Candidates are of three sorts, and a row says which: a *fixed* order out of the registry; one *split*, with its weight
gradients moved to where ranks would idle; and one *listed* for the given cost and memory cap. The last two have seen
the cost they are ranked by, so each row also has its makespan under costs that none has seen (`noisy`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from penstock.cost.cost import Cost
from penstock.cost.wrapped import NoisyCost
from penstock.errors import ShapeError
from penstock.ir.plan import Fact, Facts, Plan
from penstock.ir.schedule import Schedule, Stage
from penstock.plan.bound import lower_bound
from penstock.schedules import REGISTRY, make, shape_of
from penstock.schedules.facts import FACTS
from penstock.schedules.list_scheduling import (
    Priority,
    backward_first,
    defer_weights,
    list_schedule,
    oldest_first,
)
from penstock.schedules.orders import (
    loop_placement,
    paths_through,
    require_at_least,
    wave_placement,
)
from penstock.schedules.size import MAX_ACTIONS, refuse_size
from penstock.schedules.transforms import split_backward
from penstock.sim.simulate import simulate

ShapeWords = tuple[tuple[str, int], ...]
CHOICES = {"chunks": (2, 4, 8), "waves": (1, 2, 4, 8), "slices": (2, 4, 8)}
NOT_COMPARABLE = (
    "skip",
)  # leaves out part of the work: no fair match for the others, so it is planned only by name
NOISE_SEEDS = range(4)  # of the noise
RIVALS = 6  # candidates beside the chosen one that a plan.json keeps
BOUND_HOLDS_FOR = "every order of this placement and these cuts"
WITH_WHOLE_BACKWARDS = (
    "1f1b",
    "interleaved",
    "chimera",
    "hanayo",
)  # whole backwards, worth splitting
PRIORITIES: dict[str, Priority] = {
    "list-backward": backward_first,
    "list-oldest": oldest_first,
}


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule with what it takes. Times in seconds of the cost, peak in its bytes, the fullest rank's."""

    name: str
    shape: ShapeWords
    sort: str  # fixed, split or listed; of sliced plans: whole, even or planned
    schedule: Schedule
    makespan: float
    bubble: float
    peak: float  # activations
    weights: float  # copies of the model's weights over all ranks
    bound: float  # no order of lanes for this placement and these cuts takes less
    noisy: float  # mean makespan under noise of a tenth; nan: not asked for

    @property
    def gap(self) -> float:
        """How much longer than the bound of its own placement and cuts, as a fraction of it."""
        return self.makespan / self.bound - 1.0


@dataclass(frozen=True, slots=True)
class Portfolio:
    """All that fit, the fastest first, and why others are not there."""

    candidates: tuple[Candidate, ...]
    too_large: tuple[
        tuple[str, float], ...
    ]  # name and peak of what exceeds the memory cap

    @property
    def best(self) -> Candidate:
        """The fastest."""
        return self.candidates[0]


def portfolio(
    ranks: int,
    microbatches: int,
    cost: Cost,
    memory: float | None = None,
    stages: int = 16,
    slices: int = 8,
    weights: int = 1,
    watch: Callable[[str], None] = lambda name: None,
    shown: Callable[[float], str] = "{:g}".format,
) -> Portfolio:
    """Every schedule for so many ranks and micro-batches whose fullest rank holds at most `memory`, ranked by makespan.

    At most so many `stages` on a rank (a model has so many layers only), `slices` of a sequence (1 for models that
    cannot be cut) and copies of the `weights` (their all-reduce is not in the cost). `watch` is told each name in turn;
    `shown` says how sizes read in an error.
    """
    require_at_least(
        1,
        ranks=ranks,
        microbatches=microbatches,
        stages=stages,
        slices=slices,
        weights=weights,
    )
    refuse_size(
        2 * ranks * microbatches,
        f"any schedule with ranks={ranks} microbatches={microbatches}",
    )
    limits = {"chunks": stages, "waves": stages // 2, "slices": slices}
    fits: list[Candidate] = []
    too_large: list[tuple[str, float]] = []
    refused: ShapeError | None = None
    for name, shape, sort, build in _builds(
        ranks, microbatches, cost, memory, limits, weights
    ):
        watch(title(name, shape))
        try:
            found = noisy_makespan(name, shape, sort, build(), cost)
        except ShapeError as error:
            refused = (
                refused or error
            )  # a shape that this schedule does not have, or that the cost does not
            continue
        if memory is not None and found.peak > memory * (1 + 1e-9):
            too_large.append((title(name, shape), found.peak))
        else:
            fits.append(found)
    if not fits and not too_large:
        raise ShapeError(f"no schedule can be built: {refused}")
    if not fits:
        least = min(too_large, key=lambda row: row[1])
        raise ShapeError(
            f"nothing fits into a memory of {shown(memory or 0.0)}; the least is {least[0]} with {shown(least[1])}"
        )
    fits.sort(key=lambda found: (found.makespan, found.peak, found.schedule.actions))
    return Portfolio(tuple(fits), tuple(sorted(too_large, key=lambda row: row[1])))


def title(name: str, shape: ShapeWords) -> str:
    """A name with its shape, as a row shows it."""
    return " ".join([name, *(f"{word}={value}" for word, value in shape)])


def candidate_plan(
    candidate: Candidate, given: Facts = (), partition: tuple[int, ...] = ()
) -> Plan:
    """A candidate as a plan.json keeps it, with the figures that chose it, what was given, and the layers of parts."""
    noisy: Facts = (
        () if math.isnan(candidate.noisy) else (("noisy_makespan", candidate.noisy),)
    )
    why: Facts = (
        ("shape", " ".join(f"{word}={value}" for word, value in candidate.shape)),
        ("order", candidate.sort),
        ("makespan", candidate.makespan),
        ("bubble", candidate.bubble),
        ("peak_activations", candidate.peak),
        ("lower_bound", candidate.bound),
        ("gap", candidate.gap),
        ("bound_holds_for", BOUND_HOLDS_FOR),
        *noisy,
        *given,
    )
    return Plan(candidate.schedule, candidate.name, partition, why)


def rivals(found: Sequence[Candidate], chosen: Candidate, too_large: int = 0) -> Facts:
    """The candidates that a plan was chosen from, as facts: how many, and time and memory of the best of the others.

    The plain `1f1b` is always among them: everybody knows what it does.
    """
    others = [one for one in found if one is not chosen]
    shown = [
        one for place, one in enumerate(others) if place < RIVALS or one.name == "1f1b"
    ]
    facts: dict[str, Fact] = {"candidates": len(found), "too_large": too_large}
    for one in shown:
        name = title(one.name, one.shape)
        facts |= {
            f"makespan of {name}": one.makespan,
            f"peak_activations of {name}": one.peak,
        }
    return tuple(facts.items())


def noisy_makespan(
    name: str,
    shape: ShapeWords,
    sort: str,
    schedule: Schedule,
    cost: Cost,
    seeds: Sequence[int] = NOISE_SEEDS,
) -> Candidate:
    """A schedule, simulated; without `seeds` not under noise, which then is nan."""
    timeline = simulate(schedule, cost)
    noisy = [
        simulate(schedule, NoisyCost(cost, seed=seed)).makespan for seed in seeds
    ] or [math.nan]
    return Candidate(
        name,
        shape,
        sort,
        schedule,
        timeline.makespan,
        timeline.bubble,
        float(timeline.peak_activations.max()),
        len(schedule.stages) / schedule.parts,
        lower_bound(schedule, cost),
        float(np.mean(noisy)),
    )


# ---------------------------------------------------------------- what is tried
Build = tuple[str, ShapeWords, str, Callable[[], Schedule]]


def _builds(
    ranks: int,
    microbatches: int,
    cost: Cost,
    memory: float | None,
    limits: dict[str, int],
    weights: int,
) -> Iterator[Build]:
    for name in REGISTRY:
        if name in NOT_COMPARABLE or FACTS[name].weights > weights:
            continue
        for shape in _shapes(name, limits):
            fixed = partial(
                _fixed,
                name,
                {"ranks": ranks, "microbatches": microbatches, **dict(shape)},
            )
            yield name, shape, "fixed", fixed
            if name in WITH_WHOLE_BACKWARDS:
                yield (
                    f"{name}+split",
                    shape,
                    "split",
                    partial(_split, fixed, cost, memory),
                )
    for word, place in (("waves", wave_placement), ("chunks", loop_placement)):
        for count in (1, 2, 4):
            for label, priority in PRIORITIES.items():
                if (
                    count <= limits[word]
                    and 6 * ranks * count * microbatches <= MAX_ACTIONS
                ):
                    build = partial(
                        _listed,
                        partial(place, ranks, count),
                        microbatches,
                        cost,
                        memory,
                        priority,
                    )
                    yield label, ((word, count),), "listed", build


def _fixed(name: str, shape: dict[str, int]) -> Schedule:
    return make(name, **shape)


def _split(fixed: Callable[[], Schedule], cost: Cost, memory: float | None) -> Schedule:
    return with_split(fixed(), cost, memory)


def with_split(schedule: Schedule, cost: Cost, memory: float | None) -> Schedule:
    """With split backwards, each W where its rank would idle: in the memory that it has, or in all there is. More of it
    lets more W wait, which is not always the better for what comes after them."""
    split = split_backward(schedule)
    found = defer_weights(split, cost)
    timeline = simulate(found, cost)
    if memory is not None and (timeline.peak_activations >= memory).all():
        return found
    if timeline.makespan <= lower_bound(found, cost) * (1 + 1e-9):
        return found
    other = defer_weights(split, cost, math.inf if memory is None else memory)
    return other if simulate(other, cost).makespan < timeline.makespan else found


def _listed(
    place: Callable[[], list[Stage]],
    microbatches: int,
    cost: Cost,
    memory: float | None,
    priority: Priority,
) -> Schedule:
    stages = place()
    return list_schedule(
        stages,
        paths_through(stages, microbatches),
        cost,
        memory,
        split=True,
        priority=priority,
    )


def _shapes(name: str, limits: dict[str, int]) -> Iterator[ShapeWords]:
    """The shapes of a schedule that are tried, beside ranks and micro-batches."""
    own = [word for word in CHOICES if word in shape_of(name)]
    if not own:
        yield ()
    for word in own:
        yield from (
            ((word, count),) for count in CHOICES[word] if count <= limits[word]
        )
