"""Seconds, bytes and links: what the simulator and the planners reckon with."""

from penstock.cost.cost import Cost
from penstock.cost.unit import UnitCost

__all__ = ["Cost", "UnitCost"]
