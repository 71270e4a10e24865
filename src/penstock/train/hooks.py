"""What happens beside the steps of a run: calls of the user's own classes, and an early end.

Callbacks are told of steps, evaluations and checkpoints, and of the end:

    class Watch:
        def on_step(self, row): ...                   after every step: step, loss, norm, rate, seconds, ...
        def on_eval(self, row): ...                   after every evaluation; row.evaluation is the held-out loss
        def on_checkpoint(self, step, folder): ...    when a checkpoint is complete
        def on_end(self, step, stopped): ...          after the last step

A class may have any of these methods. They run in the process of rank 0, between two steps. If `on_step` or `on_eval`
returns True, all ranks save and stop after the next step, as they do after Ctrl-C.

Early stop ends a run that no longer gets better, and gives it the weights of its best evaluation:

    held-out loss   2.9   2.4   2.2   2.3   2.25        run.early_stop = 2: two evaluations in a row were not better
                                 ^                      best, kept in RUN/best; the last checkpoint has its weights

All ranks know the held-out loss, so all of them decide alike.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError, RunError
from penstock.runtime import Comm
from penstock.train.checkpoints.checkpoint import (
    CheckpointFacts,
    newest_good,
    read_facts,
)
from penstock.train.history import StepRow
from penstock.train.job import Job
from penstock.train.rank_weights import RankWeights
from penstock.train.user_code import own_function

KEY = "run.callbacks"
_log = logging.getLogger(__name__)
BEST_FOLDER = "best"  # in the folder of a run
METHODS = ("on_step", "on_eval", "on_checkpoint", "on_end")


class Callbacks:
    """The objects of a run that are told what happens."""

    def __init__(self, names: Sequence[str]) -> None:
        self.watchers: list[tuple[str, object]] = []
        for name in names:
            kind = checked_callback(name)
            try:
                self.watchers.append((name, kind()))
            except Exception as error:
                raise _failed(name, "__init__", error) from error
        self.wants_stop = False

    def on_step(self, row: StepRow) -> None:
        """Tell of a step, and of its evaluation if it has one."""
        methods = ["on_step"] if row.evaluation is None else ["on_step", "on_eval"]
        for method in methods:
            if any(answer is True for answer in self._call(method, row)):
                self.wants_stop = True

    def on_checkpoint(self, step: int, folder: Path) -> None:
        """Tell of a complete checkpoint."""
        self._call("on_checkpoint", step, folder)

    def on_end(self, step: int, stopped: bool) -> None:
        """Tell of the end of the run."""
        self._call("on_end", step, stopped)

    def _call(self, method: str, *values: object) -> list[object]:
        answers = []
        for name, watcher in self.watchers:
            function: Any = getattr(watcher, method, None)
            if function is None:
                continue
            try:
                answers.append(function(*values))
            except Exception as error:
                raise _failed(name, method, error) from error
        return answers


def checked_callback(name: str) -> Callable[[], object]:
    """Return the class that a config names, or raise ConfigError if it has none of our methods."""
    kind = own_function(name, KEY)
    if not any(callable(getattr(kind, method, None)) for method in METHODS):
        raise ConfigError(
            f"{KEY}: {name} has none of the methods {', '.join(METHODS)}\n  give it at least one"
        )
    return kind


def _failed(name: str, method: str, error: Exception) -> RunError:
    return RunError(
        f"{method} of the callback {name} failed: {type(error).__name__}: {error}\n"
        f"  fix it, or leave it out of {KEY}, and continue with --resume"
    )


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


def read_progress(facts: Mapping[str, Any]) -> Progress:
    """Read what a checkpoint says about the evaluations before it."""
    said = facts.get("progress") or {}
    known = {item.name for item in fields(Progress)}
    return Progress(**{key: value for key, value in said.items() if key in known})


class EarlyStop:
    """Notes the evaluations of a run, and keeps the weights of the best one beside its checkpoints."""

    def __init__(self, job: Job, comm: Comm, weights: RankWeights) -> None:
        self.limit = job.config.run.early_stop
        self.weights = weights
        self.progress = Progress()
        self.separate = job.separate
        folder = job.folder / BEST_FOLDER
        self.saver = job.saver(folder, comm, 1, weights.saved_names)

    @property
    def gets_no_better(self) -> bool:
        """Whether enough evaluations in a row had no lower loss, so that the run ends."""
        return 0 < self.limit <= self.progress.worse

    def note(self, step: int, evaluation: float | None) -> bool:
        """Note an evaluation; return whether it is the best so far, so that its weights are kept."""
        if evaluation is None or not self.limit:
            return False
        known = self.progress.step
        self.progress = self.progress.after(step, evaluation)
        return self.progress.step != known

    def keep(self, step: int, facts: CheckpointFacts) -> None:
        """Save the weights of this step as the best."""
        self.saver.begin(step, self.weights.tensors(), facts)
        self.saver.finish()

    def take_best(self, step: int) -> None:
        """Go back from a step to the weights of the best evaluation, if the run has kept them."""
        if self.progress.best is None or self.progress.step == step:
            return
        names, folder, comm = self.saver.names, self.saver.folder, self.saver.comm
        if self.separate is not None:
            search = self.separate.checkpoints(folder, comm, copied=False)
            path = search.newest_good(names)
        else:
            path = newest_good(folder, comm, names)
        if path is None or int(read_facts(path)["step"]) != self.progress.step:
            return
        self.weights.read_checkpoint(path)
        if self.saver.leads:
            _log.info("took the weights of step %d, the best", self.progress.step)
