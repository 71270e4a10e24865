"""A candidate: a schedule with its time, its memory, and how good any other order of its lanes could be.

A row of the ranking says how the order of the lanes came about:

    fixed      an order from the registry, the same for any cost
    split      the same with split backwards, whose weight gradients moved to where ranks would idle
    listed     built action by action for this cost and this memory
    improved   a listed order after a local search

All but the first have seen the cost by which they are ranked. So the best rows are also timed under costs that none of
them has seen (`noisy`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from penstock.cost.columns import columns, levels
from penstock.cost.cost import CopiedCost, Cost, NoisyCost, WaitingCost
from penstock.cost.memory import device_bytes
from penstock.cost.placed import PlacedCost
from penstock.ir.plan import Facts, Plan
from penstock.ir.schedule import Schedule, Stage
from penstock.ir.timeline import Timeline
from penstock.plan.bound import lower_bound
from penstock.plan.workload import Division
from penstock.schedules.transforms import replicate
from penstock.shaped import write_shape
from penstock.sim.shared import simulate_shared
from penstock.sim.simulate import simulate

ShapeWords = tuple[tuple[str, int], ...]
ORDER_KINDS = ("fixed", "split", "listed")  # of names: the published ones first
NOISE_SEEDS = range(4)
ROUNDING = 1e-9  # relative tolerance of times and sizes


class Runtime(Protocol):
    """The runtime of another framework, which a plan is for. A search leaves out what it cannot run."""

    @property
    def name(self) -> str:
        """The name of the framework, as people write it."""

    @property
    def takes_lists(self) -> bool:
        """Whether it runs any order of actions, or only orders that have a name there."""

    def refuse_division(self, division: Division, tied: bool | None) -> str:
        """Why it can run no plan of a division; empty if it can. `tied` is None if the model is not known."""

    def refuse_stages(self, stages: Sequence[Stage]) -> str:
        """Why it cannot place stages in this way; empty if it can."""

    def refuse_order(self, schedule: Schedule) -> str:
        """Why it cannot run a schedule; empty if it can."""

    def waits(self, schedule: Schedule) -> bool:
        """Whether ranks wait until their messages have arrived."""


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Times and weighs schedules: by a cost, for devices with a memory, on processors that ranks may share."""

    cost: Cost
    memory: float | None = None  # of a device, in the cost's bytes
    processors: int | None = None  # that the ranks share; None for one each
    passes: int = 1  # through the pipeline in a step
    copies: int = 1  # of the schedule
    uneven: bool = False  # whether copies differ, because devices or links do
    recorded: bool = False  # whether actions are recorded as CUDA graphs
    gather: float = 0.0  # seconds in which a step gathers sharded weights
    runtime: Runtime | None = None  # None for our own

    def timeline(self, schedule: Schedule, pair: Schedule | None = None) -> Timeline:
        """Return the predicted timeline of one pass, with all copies or with two of them.

        `pair` is the schedule in two copies, if it exists already.
        """
        cost = self.cost
        if self.runtime is not None and self.runtime.waits(schedule):
            cost = WaitingCost(cost)
        if self.processors is not None:
            whole = replicate(schedule, self.copies)
            return simulate_shared(whole, cost, self.processors)
        if self.uneven:
            return simulate(replicate(schedule, self.copies), cost)
        if self.copies == 1:
            return simulate(schedule, cost)
        cost = CopiedCost(cost, self.copies)
        return simulate(pair or replicate(schedule, 2), cost)

    def step(self, schedule: Schedule, makespan: float) -> float:
        """Return the seconds of a step whose passes take `makespan`: gather, passes and optimizer."""
        return self.gather + self.passes * makespan + self.update(schedule)

    def update(self, schedule: Schedule) -> float:
        """Return the seconds of the optimizer: of the slowest rank, or of all on shared processors."""
        updates = self.cost.updates(schedule)
        if self.processors is None:
            return max(updates)
        return max(*updates, self.copies * sum(updates) / self.processors)

    def peak(self, schedule: Schedule, pair: Schedule | None = None) -> float:
        """Return the bytes of the fullest device; in the units of the papers, its activations."""
        if not self.cost.units.bytes:
            return float(levels(schedule, columns(schedule, self.cost)).max())
        if self.copies > 1:
            # It also holds what sums need.
            schedule = pair or replicate(schedule, 2)
        return float(device_bytes(schedule, self.cost, self.recorded).max())

    def fits(self, peak: float) -> bool:
        """Whether a device can hold this many bytes."""
        return self.memory is None or peak <= self.memory * (1 + ROUNDING)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule of a division, with its time and memory.

    order_kind: fixed, split or listed.
    step: the time of a step, with all passes and the optimizer, in the cost's seconds.
    makespan: the time of one pass.
    peak: weights and activations on the fullest rank, in the cost's bytes.
    weights: copies of the model's weights over all ranks.
    bound: a time that no order of lanes can beat with this placement and these cuts.
    noisy: mean time of a step if all times vary by a tenth; nan if it was not computed.
    partition: the layers of each part; empty if the cost knows no layers.
    recompute: the parts that are computed again in the backward.
    """

    division: Division
    name: str
    shape: ShapeWords
    order_kind: str
    schedule: Schedule
    step: float
    makespan: float
    bubble: float
    peak: float
    weights: float
    bound: float
    noisy: float = math.nan
    partition: tuple[int, ...] = ()
    recompute: tuple[int, ...] = ()

    @property
    def gap(self) -> float:
        """How far the makespan is above the bound, as a fraction of the bound."""
        return self.makespan / self.bound - 1.0

    @property
    def slices(self) -> int:
        """The most slices of a sequence."""
        return self.schedule.slices


def evaluate_schedule(
    division: Division,
    name: str,
    shape: ShapeWords,
    order_kind: str,
    schedule: Schedule,
    evaluator: Evaluator,
) -> Candidate:
    """Simulate a schedule of a division and weigh it."""
    pair = replicate(schedule, 2) if evaluator.copies > 1 else None
    timeline = evaluator.timeline(schedule, pair)
    makespan = timeline.makespan
    cost = evaluator.cost
    partition: tuple[int, ...] = ()
    recompute: tuple[int, ...] = ()
    if isinstance(cost, PlacedCost):
        partition = cost.partition_of(schedule)
        recompute = cost.recomputed_parts(schedule)
    return Candidate(
        division,
        name,
        shape,
        order_kind,
        schedule,
        evaluator.step(schedule, makespan),
        makespan,
        timeline.bubble,
        evaluator.peak(schedule, pair),
        len(schedule.stages) / schedule.parts,
        lower_bound(schedule, cost),
        math.nan,
        partition,
        recompute,
    )


def add_noise(
    candidate: Candidate, evaluator: Evaluator, seeds: Sequence[int] = NOISE_SEEDS
) -> Candidate:
    """Return the candidate with the mean time of its step under noise, one simulation for each seed.

    Noise that makes all of the work longer or shorter would only blur the comparison, so
    each makespan is scaled back to the amount of work without noise.
    """
    work = float(evaluator.timeline(candidate.schedule).busy.sum())
    makespans = []
    for seed in seeds:
        noisy_evaluator = replace(evaluator, cost=NoisyCost(evaluator.cost, seed=seed))
        timeline = noisy_evaluator.timeline(candidate.schedule)
        makespans.append(timeline.makespan * work / float(timeline.busy.sum()))
    # On average noise only delays, so a smaller mean is an error of the few samples.
    mean = max(candidate.makespan, float(np.mean(makespans)))
    return replace(candidate, noisy=evaluator.step(candidate.schedule, mean))


def merge_equal(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return each schedule once, under its published name if one of its names is published.

    Recipes that differ may lead to the same three tables: `zb-h1` is often what `1f1b+split` becomes.
    """
    found: dict[Schedule, Candidate] = {}
    for one in candidates:
        known = found.setdefault(one.schedule, one)
        if ORDER_KINDS.index(one.order_kind) < ORDER_KINDS.index(known.order_kind):
            found[one.schedule] = replace(
                known, name=one.name, shape=one.shape, order_kind=one.order_kind
            )
    return list(found.values())


LISTED = "list-scheduled"  # as rows call an order that no paper has published


def title(name: str, shape: ShapeWords, copies: int = 1) -> str:
    """Return a name with its shape, as a row shows it and commands take it.

    >>> title("hanayo+split", (("waves", 2),)), title("listed", (("chunks", 1), ("slices", 4)))
    ('hanayo:waves=2,split', 'list-scheduled:slices=4')
    """
    name, plus, _ = name.partition("+")
    words: dict[str, int] = {
        word: value for word, value in shape if (word, value) != ("chunks", 1)
    }
    if plus:
        words["split"] = True
    if copies > 1:
        words["copies"] = copies
    return write_shape(LISTED if name == "listed" else name, words)


def _shape_words(shape: ShapeWords) -> list[str]:
    return [f"{word}={value}" for word, value in shape]


# ---------------------------------------------------------------- what a plan.json stores
def candidate_plan(candidate: Candidate, given: Facts = ()) -> Plan:
    """Return a candidate as a plan.json stores it, with more facts if there are any."""
    noisy: Facts = ()
    if not math.isnan(candidate.noisy):
        noisy = (("noisy_step", candidate.noisy),)
    why: Facts = (
        ("shape", " ".join(_shape_words(candidate.shape))),
        ("order", candidate.order_kind),
        ("step", candidate.step),
        ("makespan", candidate.makespan),
        ("bubble", candidate.bubble),
        ("peak", candidate.peak),
        ("order_bound", candidate.bound),
        *noisy,
        *given,
    )
    return Plan(
        candidate.schedule,
        candidate.name,
        candidate.partition,
        why,
        candidate.recompute,
    )
