"""Seconds, bytes and links: what the simulator and the planners reckon with."""

from penstock.cost.cost import Cost
from penstock.cost.curve import Curve, Seconds, Table
from penstock.cost.model import ModelCost, PartCost
from penstock.cost.network import Network
from penstock.cost.noisy import NoisyCost
from penstock.cost.profile import Profile, ProfileCost
from penstock.cost.profile_file import dump_profile, load_profile, read_profile, write_profile
from penstock.cost.unit import UnitCost

__all__ = [
    "Cost",
    "Curve",
    "ModelCost",
    "Network",
    "NoisyCost",
    "PartCost",
    "Profile",
    "ProfileCost",
    "Seconds",
    "Table",
    "UnitCost",
    "dump_profile",
    "load_profile",
    "read_profile",
    "write_profile",
]
