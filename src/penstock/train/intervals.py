"""Which steps of a run are timed, evaluated and saved."""

from __future__ import annotations

from penstock.config import RunConfig
from penstock.train.step_paths import StepPaths

# Earlier steps are not worth timing, because caches are still cold.
FIRST_TIMED_STEP = 3


def is_timed(step: int, settings: RunConfig, paths: StepPaths) -> bool:
    """Whether to record the timeline of a step, counted from 1.

    An early step and the last are included, so that short and stopped runs have one too. If
    some steps are full and others are not, the next one of the other kind is timed as well.
    """
    if not settings.timed:
        return False
    first_candidate = paths.previous(step - 1) + 2
    return any(
        is_due(one, settings.timed) or one in (FIRST_TIMED_STEP, settings.steps)
        for one in range(first_candidate, step + 1)
    )


def is_due(step: int, every: int) -> bool:
    """Whether something that happens every few steps happens after this one; 0 is never."""
    return every > 0 and step % every == 0
