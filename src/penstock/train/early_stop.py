"""Ends a run that no longer gets better, and gives it the weights of its best evaluation.

    held-out loss   2.9   2.4   2.2   2.3   2.25        run.early_stop = 2: two evaluations in a row were not better
                                 ^                      best, kept in RUN/best; the last checkpoint has its weights

All ranks know the held-out loss, so all of them decide alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

BEST_FOLDER = "best"  # in the folder of a run


@dataclass(frozen=True, slots=True)
class Progress:
    """How the evaluations of a run went so far."""

    best: float | None = None  # the lowest held-out loss
    step: int = 0  # its step
    worse: int = 0  # evaluations since then

    def after(self, step: int, loss: float) -> Progress:
        """Return the progress after one more evaluation.

        >>> Progress(2.5, 10).after(20, 2.6)
        Progress(best=2.5, step=10, worse=1)
        >>> Progress(2.5, 10, 1).after(30, 2.4)
        Progress(best=2.4, step=30, worse=0)
        """
        if self.best is None or loss < self.best:
            return Progress(loss, step)
        return replace(self, worse=self.worse + 1)

    def describe(self) -> dict[str, Any]:
        """Describe it for a checkpoint."""
        return asdict(self)


def read_progress(facts: Mapping[str, Any]) -> Progress:
    """Read what a checkpoint says about the evaluations before it."""
    said = facts.get("progress") or {}
    known = {item.name for item in fields(Progress)}
    return Progress(**{key: value for key, value in said.items() if key in known})
