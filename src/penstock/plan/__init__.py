"""Planners: they find a good schedule and a lower bound on its makespan.

A bound holds for whatever was fixed when it was computed. The bound of a candidate, `lower_bound`, is
for one placement and one set of cuts: no other order of the same stages and slices takes less time,
but another placement may. `space_bound` and the bound of a landscape, which `portfolio` returns, are
for all placements, partitions and cuts. The bound of `plan_paths` is for all plans under the same
rules: for every arrangement of the nodes, or for the given one.
"""

from penstock.plan.bound import lower_bound
from penstock.plan.candidates import Candidate, candidate_plan, title
from penstock.plan.improve import improve_order
from penstock.plan.orders import best_order
from penstock.plan.search import Landscape, portfolio
from penstock.plan.space_bound import space_bound

__all__ = [
    "Candidate",
    "Landscape",
    "best_order",
    "candidate_plan",
    "improve_order",
    "lower_bound",
    "portfolio",
    "space_bound",
    "title",
]
