"""Local workers; rank 1 runs out of memory in its first step: `starved_workers.py FOLDER`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from penstock.errors import RunError
from penstock.runtime import Executor
from penstock.train.job import Verdict
from penstock.train.launch import launch, run_worker


def starved(executor: Executor, *_: object, **options: object) -> None:
    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has a total capacity of 2 GiB"
    )


def rank(folder: str, resume: bool) -> Verdict:
    """Run a worker as the launcher does."""
    if os.environ["RANK"] == "1":
        Executor.step = starved
    return run_worker(folder, resume)


if __name__ == "__main__":
    import starved_workers

    try:
        launch(starved_workers.rank, Path(sys.argv[1]), 2, 3, False)
    except RunError as error:
        sys.exit(str(error))
