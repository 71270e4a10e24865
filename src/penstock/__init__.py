"""Penstock trains language models through a pipeline of workers, and treats the schedule as data."""

from penstock.cost import Cost, UnitCost
from penstock.errors import PenstockError
from penstock.ir import Action, MicroBatch, Op, Schedule, Stage, check, needs
from penstock.ir.timeline import Span, Timeline
from penstock.schedules import REGISTRY, make
from penstock.sim import simulate

__all__ = [
    "REGISTRY",
    "Action",
    "Cost",
    "MicroBatch",
    "Op",
    "PenstockError",
    "Schedule",
    "Span",
    "Stage",
    "Timeline",
    "UnitCost",
    "check",
    "make",
    "needs",
    "simulate",
]
