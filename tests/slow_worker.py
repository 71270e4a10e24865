"""`penstock`, except that worker 1 sleeps in every forward while a file exists in the folder of its run."""

from __future__ import annotations

import time
from pathlib import Path
from runpy import run_module

from penstock.runtime.stage_actions import ComputedActions
from penstock.train import entry
from penstock.train.worker import Verdict

SLOW_FILE = "slow"
SLEEP_SECONDS = 0.15
SLOW_WORKER = 1
run_member = entry.run_member


def run_slow_member(
    worker: int,
    workers: int,
    host: str,
    port: int,
    folder: str,
    resume: bool,
    newcomer: bool,
) -> Verdict:
    """Train as a worker of a crew that is sometimes slow."""
    forward = ComputedActions.forward

    def sleep_and_forward(actions, step):
        if (Path(folder) / SLOW_FILE).exists():
            time.sleep(SLEEP_SECONDS)
        forward(actions, step)

    if worker == SLOW_WORKER:
        ComputedActions.forward = sleep_and_forward
    return run_member(worker, workers, host, port, folder, resume, newcomer)


if __name__ == "__main__":
    import slow_worker

    entry.run_member = slow_worker.run_slow_member
    run_module("penstock", run_name="__main__", alter_sys=True)
