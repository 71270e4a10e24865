"""Planners: from what there is to the schedule that uses it best, with a bound on how much better any could be."""

from penstock.plan.bounds import lower_bound
from penstock.plan.portfolio import Candidate, Portfolio, as_plan, portfolio, title

__all__ = ["Candidate", "Portfolio", "as_plan", "lower_bound", "portfolio", "title"]
