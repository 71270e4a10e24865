"""`penstock`, except that worker 1 sleeps in every forward while a file exists in the folder of its run."""

from __future__ import annotations

import time
from inspect import signature
from pathlib import Path
from runpy import run_module

from penstock.runtime.stage_actions import ComputedActions
from penstock.train import session
from penstock.train.worker import Verdict

SLOW_FILE = "slow"
SLEEP_SECONDS = 0.15
SLOW_WORKER = 1
run_member = session.run_member


def run_slow_member(*arguments: object) -> Verdict:
    """Train as a worker of a crew that is sometimes slow."""
    given = signature(run_member).bind(*arguments).arguments
    slow_file = Path(given["folder"]) / SLOW_FILE
    forward = ComputedActions.forward

    def sleep_and_forward(actions, step):
        if slow_file.exists():
            time.sleep(SLEEP_SECONDS)
        forward(actions, step)

    if given["worker"] == SLOW_WORKER:
        ComputedActions.forward = sleep_and_forward
    return run_member(*arguments)


if __name__ == "__main__":
    import slow_worker

    session.run_member = slow_worker.run_slow_member
    run_module("penstock", run_name="__main__", alter_sys=True)
