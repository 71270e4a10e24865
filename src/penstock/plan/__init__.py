"""Planners: from what there is to a good schedule, with a lower bound on its makespan.

A bound holds for what was fixed when it was computed. That of `portfolio` and `lower_bound` is for one placement and
one set of cuts: no other order of the same stages and slices takes less, but another placement may. That of
`plan_paths` is for all plans under the same rules: for every arrangement of the nodes, or for the given one.
"""

from penstock.plan.bounds import lower_bound
from penstock.plan.cuts import Slicing, best_batch, best_cuts, latency_of
from penstock.plan.documents import DocumentPlan, document_desk, documents_schedule, plan_documents
from penstock.plan.grid import Times, curved, tabled
from penstock.plan.layouts import Layout, layouts
from penstock.plan.path_bounds import path_bound
from penstock.plan.paths import PathPlan, as_file, plan_paths, rule_faults
from penstock.plan.portfolio import Candidate, Portfolio, as_plan, portfolio, rivals, title
from penstock.plan.problem import PLANNED, PUBLISHED, Policy, even_parts
from penstock.plan.recovery import replan
from penstock.plan.rotation import Rotation, rotate
from penstock.plan.rules import Fault, Rules, faults, obey
from penstock.plan.slicing import Sliced, SlicedPlans, sliced_plans
from penstock.plan.uneven import UnevenSlicing, longest_path, uneven_cuts

__all__ = [
    "PLANNED",
    "PUBLISHED",
    "Candidate",
    "DocumentPlan",
    "Fault",
    "Layout",
    "PathPlan",
    "Policy",
    "Portfolio",
    "Rotation",
    "Rules",
    "Sliced",
    "SlicedPlans",
    "Slicing",
    "Times",
    "UnevenSlicing",
    "as_file",
    "as_plan",
    "best_batch",
    "best_cuts",
    "curved",
    "document_desk",
    "documents_schedule",
    "even_parts",
    "faults",
    "latency_of",
    "layouts",
    "longest_path",
    "lower_bound",
    "obey",
    "path_bound",
    "plan_documents",
    "plan_paths",
    "portfolio",
    "replan",
    "rivals",
    "rotate",
    "rule_faults",
    "sliced_plans",
    "tabled",
    "title",
    "uneven_cuts",
]
