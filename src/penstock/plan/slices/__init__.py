"""TeraPipe's question: where to cut sequences into slices."""

from penstock.plan.slices.cuts import Slicing, best_batch, best_cuts, latency_of
from penstock.plan.slices.documents import (
    DocumentPlan,
    document_planner,
    documents_schedule,
    equal_work_cuts,
    plan_documents,
)
from penstock.plan.slices.layouts import Layout, layouts
from penstock.plan.slices.planner import (
    CutChoice,
    SlicedCandidate,
    SlicedPlans,
    cut_choices,
    sliced_plans,
)
from penstock.plan.slices.slice_times import (
    SliceTimes,
    times_from_curves,
    times_from_table,
)
from penstock.plan.slices.uneven_stages import (
    UnevenSlicing,
    longest_path,
    uneven_cuts,
)

__all__ = [
    "CutChoice",
    "DocumentPlan",
    "Layout",
    "SliceTimes",
    "SlicedCandidate",
    "SlicedPlans",
    "Slicing",
    "UnevenSlicing",
    "best_batch",
    "best_cuts",
    "cut_choices",
    "document_planner",
    "documents_schedule",
    "equal_work_cuts",
    "latency_of",
    "layouts",
    "longest_path",
    "plan_documents",
    "sliced_plans",
    "times_from_curves",
    "times_from_table",
    "uneven_cuts",
]
