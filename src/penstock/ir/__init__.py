"""The tables, the rules, and the files they are kept in. Everything else is derived from these."""

from penstock.ir.action import Action, Op, parse_action
from penstock.ir.check import check
from penstock.ir.needs import needs
from penstock.ir.schedule import MicroBatch, Schedule, Stage, schedule_of

__all__ = ["Action", "MicroBatch", "Op", "Schedule", "Stage", "check", "needs", "parse_action", "schedule_of"]
