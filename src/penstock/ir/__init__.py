"""Schedules: the three tables, the rules that they follow, and what is derived from them.

action ──► schedule ──► needs, check      the tables, the dependencies, the legality
              │
              ├──► program ──► verify     lanes with sends and receives, and the proof that they run
              └──► timeline               when each action ran, predicted or measured
"""

from penstock.ir.action import Action, Op, parse_action
from penstock.ir.check import check
from penstock.ir.needs import needs
from penstock.ir.plan import Plan
from penstock.ir.program import Program, lower
from penstock.ir.schedule import MicroBatch, Schedule, Stage, schedule_of, stretch
from penstock.ir.timeline import Message, Span, Sum, Timeline
from penstock.ir.verify import verify

__all__ = [
    "Action",
    "Message",
    "MicroBatch",
    "Op",
    "Plan",
    "Program",
    "Schedule",
    "Span",
    "Stage",
    "Sum",
    "Timeline",
    "check",
    "lower",
    "needs",
    "parse_action",
    "schedule_of",
    "stretch",
    "verify",
]
