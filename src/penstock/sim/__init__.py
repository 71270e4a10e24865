"""A schedule and a cost in, a timeline out."""

from penstock.sim.shared import simulate_shared
from penstock.sim.simulate import simulate

__all__ = ["simulate", "simulate_shared"]
