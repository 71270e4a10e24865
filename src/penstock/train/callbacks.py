"""Calls the user's own classes during a run: after steps, evaluations and checkpoints, and at the end.

    class Watch:
        def on_step(self, row): ...                   after every step: step, loss, norm, rate, seconds, ...
        def on_eval(self, row): ...                   after every evaluation; row.evaluation is the held-out loss
        def on_checkpoint(self, step, folder): ...    when a checkpoint is complete
        def on_end(self, step, stopped): ...          after the last step

A class may have any of these methods. They run in the process of rank 0, between two steps. If `on_step` or `on_eval`
returns True, all ranks save and stop after the next step, as they do after Ctrl-C.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError, RunError
from penstock.train.history import StepRow
from penstock.train.own_code import own_function

KEY = "run.callbacks"
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
