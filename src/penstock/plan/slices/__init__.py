"""TeraPipe's question: where to cut sequences into slices."""

from penstock.plan.slices.choices import cut_choices, equal_work_cuts
from penstock.plan.slices.curves import (
    SliceTimes,
    StageTables,
    sliced_pipeline,
    times_from_curves,
)
from penstock.plan.slices.cuts import Slicing, best_cuts
from penstock.plan.slices.uneven import UnevenSlicing, longest_path, uneven_cuts

__all__ = [
    "SliceTimes",
    "Slicing",
    "StageTables",
    "UnevenSlicing",
    "best_cuts",
    "cut_choices",
    "equal_work_cuts",
    "longest_path",
    "sliced_pipeline",
    "times_from_curves",
    "uneven_cuts",
]
