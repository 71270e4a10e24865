"""Predict the timeline of a schedule under a cost."""

from penstock.sim.in_order import simulate_in_order
from penstock.sim.shared import simulate_shared
from penstock.sim.simulate import simulate

__all__ = ["simulate", "simulate_in_order", "simulate_shared"]
