"""A schedule and a cost in, a timeline out."""

from penstock.sim.simulate import simulate

__all__ = ["simulate"]
