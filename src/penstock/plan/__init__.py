"""Planners: from what there is to the schedule that uses it best, with a bound on how much better any could be."""

from penstock.plan.bounds import lower_bound
from penstock.plan.cuts import Slicing, best_batch, best_cuts, latency_of
from penstock.plan.documents import DocumentPlan, document_desk, documents_schedule, plan_documents
from penstock.plan.grid import Times, curved, tabled
from penstock.plan.layouts import Layout, layouts
from penstock.plan.portfolio import Candidate, Portfolio, as_plan, portfolio, title
from penstock.plan.slicing import Sliced, SlicedPlans, sliced_plans
from penstock.plan.uneven import UnevenSlicing, longest_path, uneven_cuts

__all__ = [
    "Candidate",
    "DocumentPlan",
    "Layout",
    "Portfolio",
    "Sliced",
    "SlicedPlans",
    "Slicing",
    "Times",
    "UnevenSlicing",
    "as_plan",
    "best_batch",
    "best_cuts",
    "curved",
    "document_desk",
    "documents_schedule",
    "latency_of",
    "layouts",
    "longest_path",
    "lower_bound",
    "plan_documents",
    "portfolio",
    "sliced_plans",
    "tabled",
    "title",
    "uneven_cuts",
]
