"""The executors of a rank, one for each schedule of a run; a step takes one of them.

    stages, comm ──┬── executor of the paths a ──┐
                   ├── executor of the paths b ──┼── step ──► gradients of the same parameters
                   └── executor of full steps ───┘

All of them are built before the first step, over the same stages and the same `Comm`, so that
switching costs nothing and needs no more memory. A lane is only a list.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.ir.program import Program
from penstock.runtime import Comm, Executor
from penstock.train.step_paths import StepPaths


class StepExecutors:
    """The executors of a rank, and the one that runs now, which the watchdog looks at."""

    def __init__(self, executors: Sequence[Executor], paths: StepPaths) -> None:
        self.executors = tuple(executors)
        self.paths = paths
        self.running = self.executors[0]
        for executor in self.executors[1:]:
            # The first one has warned already.
            executor.warns_of_deferrals = False
            # All have the same stages, so that one copy of the weights serves them.
            executor.casts = self.executors[0].casts

    def at(self, step: int) -> Executor:
        """Return the executor of a step, counted from 0, and watch it from now on."""
        self.running = self.executors[self.paths.at(step)]
        return self.running

    @property
    def covering(self) -> list[Executor]:
        """The first executor, and others as long as they visit further stages of any rank."""
        found: list[Executor] = []
        visited: set[int] = set()
        for executor in self.executors:
            stages: set[int] = set()
            for microbatch in executor.program.schedule.microbatches:
                stages.update(microbatch.path)
            if not found or not stages <= visited:
                found.append(executor)
            visited |= stages
        return found

    # ------------------------------------------------------------ for the watchdog
    @property
    def program(self) -> Program:
        """The program that runs now."""
        return self.running.program

    @property
    def comm(self) -> Comm:
        """The connection to the other ranks."""
        return self.running.comm

    @property
    def doing(self) -> str:
        """The action that runs now, or that waits for its input."""
        return self.running.doing
