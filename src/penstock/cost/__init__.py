"""Seconds, bytes and links: the numbers that the simulator and the planners work with."""

from penstock.cost.cluster import City, Cluster, Node
from penstock.cost.cost import (
    Cost,
    ModelCost,
    NoisyCost,
    PartCost,
    PausedCost,
    UnitCost,
    WrappedCost,
    finer,
)
from penstock.cost.curve import CorrectedCurve, Curve, Seconds
from penstock.cost.network import Network
from penstock.cost.placed import ProfileCost
from penstock.cost.profile import Profile, RowProfiles

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
