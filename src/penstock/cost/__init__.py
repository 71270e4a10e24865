"""Seconds, bytes and links: what the simulator and the planners reckon with."""

from penstock.cost.cost import Cost
from penstock.cost.model import ModelCost, PartCost, Seconds, finer
from penstock.cost.network import Network
from penstock.cost.noisy import NoisyCost
from penstock.cost.unit import UnitCost

__all__ = ["Cost", "ModelCost", "Network", "NoisyCost", "PartCost", "Seconds", "UnitCost", "finer"]
