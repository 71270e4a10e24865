"""Penstock trains language models through a pipeline of workers, and treats the schedule as data."""

from penstock.cost import Cost, ModelCost, Network, PartCost, Profile, ProfileCost, Seconds, UnitCost, read_profile
from penstock.errors import PenstockError
from penstock.ir import (
    Action,
    MicroBatch,
    Op,
    Plan,
    Program,
    Schedule,
    Span,
    Stage,
    Timeline,
    check,
    lower,
    needs,
    read_plan,
    verify,
    write_plan,
)
from penstock.plan import lower_bound, portfolio
from penstock.schedules import REGISTRY, make
from penstock.sim import simulate

__all__ = [
    "REGISTRY",
    "Action",
    "Cost",
    "MicroBatch",
    "ModelCost",
    "Network",
    "Op",
    "PartCost",
    "PenstockError",
    "Plan",
    "Profile",
    "ProfileCost",
    "Program",
    "Schedule",
    "Seconds",
    "Span",
    "Stage",
    "Timeline",
    "UnitCost",
    "check",
    "lower",
    "lower_bound",
    "make",
    "needs",
    "portfolio",
    "read_plan",
    "read_profile",
    "simulate",
    "verify",
    "write_plan",
]
