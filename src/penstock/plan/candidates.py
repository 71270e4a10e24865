"""Builds, simulates and ranks every schedule that fits.

There are three sorts of candidates, and a row says which: a *fixed* order from the registry; one with *split*
backwards, whose weight gradients moved to where ranks would idle; and one *listed* for the given cost and memory cap.
The last two have seen the cost by which they are ranked. So each row also has its makespan under costs that none of
them has seen (`noisy`).
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
from penstock.schedules.size import MAX_ACTIONS, refuse_if_too_large
from penstock.schedules.transforms import split_backward
from penstock.sim.simulate import simulate

ShapeWords = tuple[tuple[str, int], ...]
TRIED_COUNTS = {"chunks": (2, 4, 8), "waves": (1, 2, 4, 8), "slices": (2, 4, 8)}
TRIED_LISTED_COUNTS = (1, 2, 4)  # chunks or waves of listed schedules
# `skip` leaves out part of the work, so it cannot be compared with the others.
NOT_COMPARABLE = ("skip",)
WITH_WHOLE_BACKWARDS = ("1f1b", "interleaved", "chimera", "hanayo")  # worth splitting
PRIORITIES: dict[str, Priority] = {
    "list-backward": backward_first,
    "list-oldest": oldest_first,
}
NOISE_SEEDS = range(4)
MAX_SHOWN_RIVALS = 6  # candidates that a plan.json stores besides the chosen one
BOUND_HOLDS_FOR = "every order of this placement and these cuts"
ROUNDING = 1e-9  # relative tolerance of times and sizes


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule with its time and memory.

    sort: fixed, split or listed; for sliced plans whole, even or planned.
    makespan: in the cost's seconds.
    peak: activations on the fullest rank, in the cost's bytes.
    weights: copies of the model's weights over all ranks.
    bound: a time that no order of lanes can beat with this placement and these cuts.
    noisy: mean makespan if all times vary by a tenth; nan if it was not computed.
    """

    name: str
    shape: ShapeWords
    sort: str
    schedule: Schedule
    makespan: float
    bubble: float
    peak: float
    weights: float
    bound: float
    noisy: float

    @property
    def gap(self) -> float:
        """How far the makespan is above the bound, as a fraction of the bound."""
        return self.makespan / self.bound - 1.0


@dataclass(frozen=True, slots=True)
class Portfolio:
    """All candidates that fit, the fastest first.

    too_large: name and peak of the candidates that exceed the memory cap.
    """

    candidates: tuple[Candidate, ...]
    too_large: tuple[tuple[str, float], ...]

    @property
    def best(self) -> Candidate:
        """The fastest candidate."""
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
    """Rank every schedule whose fullest rank holds at most `memory` bytes of activations.

    stages: the largest number of stages per rank, because a model has only so many layers.
    slices: the largest number of slices of a sequence; 1 for models that cannot be cut.
    weights: the largest number of copies of the weights. The cost does not include their all-reduce.
    watch: called with the name of each candidate before it is built.
    shown: formats sizes in error messages.
    """
    require_at_least(
        1,
        ranks=ranks,
        microbatches=microbatches,
        stages=stages,
        slices=slices,
        weights=weights,
    )
    refuse_if_too_large(
        2 * ranks * microbatches,
        f"any schedule with ranks={ranks} microbatches={microbatches}",
    )
    limits = {"chunks": stages, "waves": stages // 2, "slices": slices}
    fits: list[Candidate] = []
    too_large: list[tuple[str, float]] = []
    first_error: ShapeError | None = None
    for recipe in _recipes(ranks, microbatches, cost, memory, limits, weights):
        name = title(recipe.name, recipe.shape)
        watch(name)
        try:
            schedule = recipe.build()
            candidate = evaluate_schedule(
                recipe.name, recipe.shape, recipe.sort, schedule, cost
            )
        except ShapeError as error:  # this schedule, or the cost, has no such shape
            first_error = first_error or error
            continue
        if memory is not None and candidate.peak > memory * (1 + ROUNDING):
            too_large.append((name, candidate.peak))
        else:
            fits.append(candidate)
    too_large.sort(key=lambda row: row[1])
    if not fits and not too_large:
        raise ShapeError(f"no schedule can be built: {first_error}")
    if not fits:
        name, peak = too_large[0]
        raise ShapeError(
            f"nothing fits into a memory of {shown(memory or 0.0)}; "
            f"the least is {name} with {shown(peak)}"
        )
    fits.sort(
        key=lambda candidate: (
            candidate.makespan,
            candidate.peak,
            candidate.schedule.actions,
        )
    )
    return Portfolio(tuple(fits), tuple(too_large))


def title(name: str, shape: ShapeWords) -> str:
    """Return a name with its shape, as a row shows it."""
    return " ".join([name, *_shape_words(shape)])


def _shape_words(shape: ShapeWords) -> list[str]:
    return [f"{word}={value}" for word, value in shape]


def candidate_plan(
    candidate: Candidate, given: Facts = (), partition: tuple[int, ...] = ()
) -> Plan:
    """Return a candidate as a plan.json stores it.

    given: more facts to store.
    partition: the number of layers of each part.
    """
    noisy: Facts = ()
    if not math.isnan(candidate.noisy):
        noisy = (("noisy_makespan", candidate.noisy),)
    why: Facts = (
        ("shape", " ".join(_shape_words(candidate.shape))),
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


def rival_facts(
    candidates: Sequence[Candidate], chosen: Candidate, too_large: int = 0
) -> Facts:
    """Return facts about the candidates that a plan was chosen from.

    These are their number, and the time and memory of the best of the others. The plain `1f1b` is
    always among them, because everybody knows it.
    """
    others = [candidate for candidate in candidates if candidate is not chosen]
    facts: dict[str, Fact] = {"candidates": len(candidates), "too_large": too_large}
    for place, rival in enumerate(others):
        if place < MAX_SHOWN_RIVALS or rival.name == "1f1b":
            name = title(rival.name, rival.shape)
            facts[f"makespan of {name}"] = rival.makespan
            facts[f"peak_activations of {name}"] = rival.peak
    return tuple(facts.items())


def evaluate_schedule(
    name: str,
    shape: ShapeWords,
    sort: str,
    schedule: Schedule,
    cost: Cost,
    seeds: Sequence[int] = NOISE_SEEDS,
) -> Candidate:
    """Simulate a schedule, once as planned and once with noise for each of the `seeds`.

    Without seeds the noisy makespan is nan.
    """
    timeline = simulate(schedule, cost)
    noisy = math.nan
    if seeds:
        costs = [NoisyCost(cost, seed=seed) for seed in seeds]
        makespans = [simulate(schedule, noisy_cost).makespan for noisy_cost in costs]
        noisy = float(np.mean(makespans))
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
        noisy,
    )


# ---------------------------------------------------------------- the schedules to try
@dataclass(frozen=True, slots=True)
class _Recipe:
    """A candidate that has not been built yet."""

    name: str
    shape: ShapeWords
    sort: str
    build: Callable[[], Schedule]


def _recipes(
    ranks: int,
    microbatches: int,
    cost: Cost,
    memory: float | None,
    limits: dict[str, int],
    weights: int,
) -> Iterator[_Recipe]:
    """Yield all candidates to try."""
    for name in REGISTRY:
        if name in NOT_COMPARABLE or FACTS[name].weights > weights:
            continue
        for shape in _shapes(name, limits):
            build = partial(
                make, name, ranks=ranks, microbatches=microbatches, **dict(shape)
            )
            yield _Recipe(name, shape, "fixed", build)
            if name in WITH_WHOLE_BACKWARDS:
                build_split = partial(_build_split, build, cost, memory)
                yield _Recipe(f"{name}+split", shape, "split", build_split)
    for word, place in (("waves", wave_placement), ("chunks", loop_placement)):
        for count in TRIED_LISTED_COUNTS:
            actions = 6 * ranks * count * microbatches
            if count > limits[word] or actions > MAX_ACTIONS:
                continue
            stages = partial(place, ranks, count)
            for name, priority in PRIORITIES.items():
                build = partial(
                    _build_listed, stages, microbatches, cost, memory, priority
                )
                yield _Recipe(name, ((word, count),), "listed", build)


def _build_split(
    build: Callable[[], Schedule], cost: Cost, memory: float | None
) -> Schedule:
    return split_and_defer(build(), cost, memory)


def split_and_defer(schedule: Schedule, cost: Cost, memory: float | None) -> Schedule:
    """Split the backwards, and put each W where its rank would idle.

    Two ways are tried: in the memory that the schedule needs anyway, and in all of the memory. More
    memory lets more W wait, which does not always help the actions after them.
    """
    split = split_backward(schedule)
    in_own_memory = defer_weights(split, cost)
    timeline = simulate(in_own_memory, cost)
    if memory is not None and (timeline.peak_activations >= memory).all():
        return in_own_memory
    if timeline.makespan <= lower_bound(in_own_memory, cost) * (1 + ROUNDING):
        return in_own_memory
    cap = math.inf if memory is None else memory
    in_all_memory = defer_weights(split, cost, cap)
    if simulate(in_all_memory, cost).makespan < timeline.makespan:
        return in_all_memory
    return in_own_memory


def _build_listed(
    place: Callable[[], list[Stage]],
    microbatches: int,
    cost: Cost,
    memory: float | None,
    priority: Priority,
) -> Schedule:
    stages = place()
    paths = paths_through(stages, microbatches)
    return list_schedule(stages, paths, cost, memory, split=True, priority=priority)


def _shapes(name: str, limits: dict[str, int]) -> Iterator[ShapeWords]:
    """Yield the shapes of a schedule to try, without ranks and micro-batches."""
    words = [word for word in TRIED_COUNTS if word in shape_of(name)]
    if not words:
        yield ()
    for word in words:
        for count in TRIED_COUNTS[word]:
            if count <= limits[word]:
                yield ((word, count),)
