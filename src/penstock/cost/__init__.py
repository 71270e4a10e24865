"""Seconds, bytes and links: what the simulator and the planners reckon with."""

from penstock.cost.around import CostAround, PausingCost
from penstock.cost.cities import City
from penstock.cost.cluster import Cluster, Node
from penstock.cost.cost import Cost
from penstock.cost.curve import CorrectedCurve, Curve, Seconds
from penstock.cost.model import ModelCost, PartCost, finer
from penstock.cost.network import Network
from penstock.cost.noisy import NoisyCost
from penstock.cost.paused import PausedCost
from penstock.cost.profile import Profile, ProfileCost
from penstock.cost.unit import UnitCost

__all__ = [
    "City",
    "Cluster",
    "CorrectedCurve",
    "Cost",
    "CostAround",
    "Curve",
    "ModelCost",
    "Network",
    "Node",
    "NoisyCost",
    "PartCost",
    "PausedCost",
    "PausingCost",
    "Profile",
    "ProfileCost",
    "Seconds",
    "UnitCost",
    "finer",
]
