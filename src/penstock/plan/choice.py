"""The plan to recommend: the fastest of the portfolio and, where a profile knows tokens, of the sliced plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.plan.candidates import Candidate, Portfolio, portfolio
from penstock.plan.price import Price
from penstock.plan.slices.planner import SlicedPlans, sliced_plans


@dataclass(frozen=True, slots=True)
class Limits:
    """What the candidates must keep to."""

    memory: float | None = None  # micro-batches of a rank's work; with a profile MiB
    stages: int = 16  # stages of a rank at most
    slices: int = 8  # slices of a sequence at most; 1: do not slice
    weights: int = 1  # copies of the weights at most
    granularity: int | None = None  # tokens that cuts are multiples of


@dataclass(frozen=True, slots=True)
class Choice:
    """The candidates of both rankings. `sliced` is None if slices were not considered."""

    portfolio: Portfolio
    sliced: SlicedPlans | None

    @property
    def best(self) -> Candidate:
        """The fastest candidate of both rankings."""
        best = self.portfolio.best
        if self.sliced is None:
            return best
        return min(best, self.sliced.best.candidate, key=lambda one: one.makespan)


def choose_plan(
    ranks: int,
    microbatches: int,
    price: Price,
    limits: Limits,
    watch: Callable[[str], None],
    show_size: Callable[[float], str],
) -> Choice:
    """Build, simulate and rank every schedule that keeps to the limits.

    Calls `watch` with the name of each candidate in turn. Error messages write sizes
    with `show_size`.
    """
    memory = price.memory_limit(limits.memory)
    ranking = portfolio(
        ranks,
        microbatches,
        price.cost,
        memory,
        limits.stages,
        limits.slices,
        limits.weights,
        watch,
        show_size,
    )
    if price.profile is None or limits.slices < 2:
        return Choice(ranking, None)
    sliced = sliced_plans(
        ranks,
        microbatches,
        price.tokens,
        price.cost,
        price.granularity(limits.granularity),
        memory,
        regrouped=lambda parts: price.cost,
        watch=watch,
        limit=limits.slices,
    )
    return Choice(ranking, sliced)
