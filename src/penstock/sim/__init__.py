"""Predict the timeline of a schedule under a cost."""

from penstock.sim.shared import simulate_shared
from penstock.sim.simulate import (
    own_cost,
    simulate,
    simulate_in_order,
    simulate_own_times,
)

__all__ = [
    "own_cost",
    "simulate",
    "simulate_in_order",
    "simulate_own_times",
    "simulate_shared",
]
