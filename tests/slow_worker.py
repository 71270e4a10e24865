"""`penstock` on a clock that counts actions. Worker 1 is slow on it while a file exists in the folder of its run.

An action takes one second on this clock, and a forward of the slow worker twenty. So nothing depends on the machine.
"""

from __future__ import annotations

from inspect import signature
from itertools import count
from pathlib import Path
from runpy import run_module

from penstock import training
from penstock.runtime import step
from penstock.runtime.actions import ComputedActions
from penstock.train.job import Verdict

SLOW_FILE = "slow"
SLOW_SECONDS = 19
SLOW_WORKER = 1
run_member = training.run_member


def run_slow_member(*arguments: object) -> Verdict:
    """Train as a worker of a crew that is sometimes slow."""
    given = signature(run_member).bind(*arguments).arguments
    slow_file = Path(given["folder"]) / SLOW_FILE
    seconds = count()
    step.perf_counter = lambda: float(next(seconds))
    forward = ComputedActions.forward

    def forward_slowly(actions, step):
        if slow_file.exists():
            for _ in range(SLOW_SECONDS):
                next(seconds)
        forward(actions, step)

    if given["worker"] == SLOW_WORKER:
        ComputedActions.forward = forward_slowly
    return run_member(*arguments)


if __name__ == "__main__":
    import slow_worker

    training.run_member = slow_worker.run_slow_member
    run_module("penstock", run_name="__main__", alter_sys=True)
