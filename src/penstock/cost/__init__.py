"""Seconds, bytes and links: what the simulator and the planners reckon with."""

from penstock.cost.around import CostAround, PausingCost
from penstock.cost.cities import City
from penstock.cost.cluster import Cluster, Node
from penstock.cost.cluster_file import dump_cluster, load_cluster, read_cluster, write_cluster
from penstock.cost.cost import Cost
from penstock.cost.curve import Curve, Seconds, Table
from penstock.cost.model import ModelCost, PartCost, finer
from penstock.cost.network import Network
from penstock.cost.noisy import NoisyCost
from penstock.cost.paused import PausedCost
from penstock.cost.profile import Profile, ProfileCost
from penstock.cost.profile_file import dump_profile, load_profile, read_profile, write_profile
from penstock.cost.unit import UnitCost

__all__ = [
    "City",
    "Cluster",
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
    "Table",
    "UnitCost",
    "dump_cluster",
    "dump_profile",
    "finer",
    "load_cluster",
    "load_profile",
    "read_cluster",
    "read_profile",
    "write_cluster",
    "write_profile",
]
