"""The tables, the rules, and the files they are kept in. Everything else is derived from these."""

from penstock.ir.action import Action, Op, parse_action
from penstock.ir.check import check
from penstock.ir.files import Plan, dump_plan, load_plan, read_plan, write_plan
from penstock.ir.needs import needs
from penstock.ir.program import Program, lower
from penstock.ir.schedule import MicroBatch, Schedule, Stage, schedule_of, stretch
from penstock.ir.timeline import Message, Span, Timeline
from penstock.ir.torch_csv import dump_torch_csv, load_torch_csv
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
    "Timeline",
    "check",
    "dump_plan",
    "dump_torch_csv",
    "load_plan",
    "load_torch_csv",
    "lower",
    "needs",
    "parse_action",
    "read_plan",
    "schedule_of",
    "stretch",
    "verify",
    "write_plan",
]
