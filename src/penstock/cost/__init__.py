"""Seconds, bytes and links: what the simulator and the planners reckon with."""

from penstock.cost.cities import City
from penstock.cost.cluster import Cluster, Node
from penstock.cost.cluster_file import dump_cluster, load_cluster, read_cluster, write_cluster
from penstock.cost.cost import Cost
from penstock.cost.model import ModelCost, PartCost, Seconds
from penstock.cost.network import Network
from penstock.cost.noisy import NoisyCost
from penstock.cost.paused import PausedCost, PausingCost
from penstock.cost.unit import UnitCost

__all__ = [
    "City",
    "Cluster",
    "Cost",
    "ModelCost",
    "Network",
    "Node",
    "NoisyCost",
    "PartCost",
    "PausedCost",
    "PausingCost",
    "Seconds",
    "UnitCost",
    "dump_cluster",
    "load_cluster",
    "read_cluster",
    "write_cluster",
]
