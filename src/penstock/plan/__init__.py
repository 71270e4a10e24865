"""Planners: from what there is to the schedule that uses it best, with a bound on how much better any could be."""

from penstock.plan.bounds import lower_bound
from penstock.plan.path_bounds import path_bound
from penstock.plan.paths import PathPlan, as_file, plan_paths, rule_faults
from penstock.plan.portfolio import Candidate, Portfolio, as_plan, portfolio, title
from penstock.plan.problem import PLANNED, PUBLISHED, Policy, even_parts
from penstock.plan.recovery import replan
from penstock.plan.rotation import Rotation, rotate
from penstock.plan.rules import Fault, Rules, faults, obey

__all__ = [
    "PLANNED",
    "PUBLISHED",
    "Candidate",
    "Fault",
    "PathPlan",
    "Policy",
    "Portfolio",
    "Rotation",
    "Rules",
    "as_file",
    "as_plan",
    "even_parts",
    "faults",
    "lower_bound",
    "obey",
    "path_bound",
    "plan_paths",
    "portfolio",
    "replan",
    "rotate",
    "rule_faults",
    "title",
]
