"""The search where memory is short: it refuses only what no plan can hold, and it always ends with a plan that fits."""

from __future__ import annotations

from functools import cache

import pytest

from penstock.config import ModelConfig
from penstock.cost import Profile
from penstock.cost.gpus import analytic_profile
from penstock.errors import ShapeError
from penstock.plan.pricing import ProfilePricing, Question
from penstock.plan.search import search
from penstock.plan.space import Limits, fixed_recipes
from penstock.plan.workload import Division, Fixed, Workload, divisions_of

MODEL = ModelConfig(
    layers=4, hidden_size=64, heads=2, kv_heads=2, intermediate_size=96, vocab_size=64
)
LIMITS = Limits(stages=2)


def profile_at(rows: int) -> Profile:
    return analytic_profile(MODEL, 32, rows, "h100", ranks=2)


def pricing_for(memory: float) -> ProfilePricing:
    fixed = Fixed(ranks=2, copies=1, tensor=1, shard=1)
    workload = Workload(4, 32, 2, 2, memory=memory, fixed=fixed)
    return ProfilePricing(workload, profile_at, LIMITS)


def peaks(pricing: ProfilePricing, division: Division) -> list[float]:
    evaluator = pricing.evaluator(division)
    found = []
    for slices in (1, 2):
        for recipe in fixed_recipes(pricing.pipeline(division), slices):
            try:
                found.append(evaluator.peak(recipe.build()))
            except ShapeError:
                continue
    return found


@cache
def least_peaks() -> dict[Division, float]:
    """The least peak of a fixed order in each division, with room for everything."""
    roomy = pricing_for(1e12)
    return {
        division: min(peaks(roomy, division))
        for division in divisions_of(roomy.workload)
    }


def test_no_schedule_of_a_division_holds_less_than_its_least_bytes():
    pricing = pricing_for(1e12)
    for division, peak in least_peaks().items():
        assert pricing.least_bytes(division) <= peak, division.name


@pytest.mark.parametrize("share", [0.01, 0.3])
def test_a_plan_is_found_wherever_a_fixed_order_fits(share):
    lows = list(least_peaks().values())
    memory = 1.02 * min(lows) + share * (max(lows) - min(lows))
    pricing = pricing_for(memory)
    best = search(Question(pricing.workload, pricing)).best
    assert best.peak <= memory
