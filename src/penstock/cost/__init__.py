"""Seconds, bytes and links: the numbers that the simulator and the planners work with."""

from penstock.cost.cities import City
from penstock.cost.cluster import Cluster, Node
from penstock.cost.cost import Cost
from penstock.cost.curve import CorrectedCurve, Curve, Seconds
from penstock.cost.model import ModelCost, PartCost, finer
from penstock.cost.network import Network
from penstock.cost.profile import Profile, ProfileCost
from penstock.cost.row_profiles import RowProfiles
from penstock.cost.unit import UnitCost
from penstock.cost.wrapped import NoisyCost, PausedCost, WrappedCost

__all__ = [
    "City",
    "Cluster",
    "CorrectedCurve",
    "Cost",
    "Curve",
    "ModelCost",
    "Network",
    "Node",
    "NoisyCost",
    "PartCost",
    "PausedCost",
    "Profile",
    "ProfileCost",
    "RowProfiles",
    "Seconds",
    "UnitCost",
    "WrappedCost",
    "finer",
]
