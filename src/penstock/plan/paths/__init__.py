"""Plans which nodes each micro-batch visits, as in SkipPipe (Blagoev et al., 2025)."""

from penstock.plan.paths.bound import path_bound
from penstock.plan.paths.planner import PathPlan, paths_plan, plan_paths, rule_faults
from penstock.plan.paths.problem import (
    PLANNED,
    PUBLISHED,
    Policy,
    Problem,
    even_parts,
)
from penstock.plan.paths.rotation import (
    Rotation,
    StepPair,
    best_pair,
    full_steps,
    replan,
    rotate,
)
from penstock.plan.paths.rules import (
    RuleFault,
    Rules,
    check_schedule_rules,
    find_rule_faults,
)
from penstock.plan.paths.search import Budget

__all__ = [
    "PLANNED",
    "PUBLISHED",
    "Budget",
    "PathPlan",
    "Policy",
    "Problem",
    "Rotation",
    "RuleFault",
    "Rules",
    "StepPair",
    "best_pair",
    "check_schedule_rules",
    "even_parts",
    "find_rule_faults",
    "full_steps",
    "path_bound",
    "paths_plan",
    "plan_paths",
    "replan",
    "rotate",
    "rule_faults",
]
