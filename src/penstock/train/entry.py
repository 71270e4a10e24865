"""The entry of a worker process: shows rank 0's steps on a screen, and trains.

The launcher imports this module in the process that it forks workers from. It imports
nothing of the command line, so workers start faster and hold less memory.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from penstock.config import Config
from penstock.formats.config_toml import read_config
from penstock.train.crew.member import (
    Member,
    local_store,
    set_environment,
    work_in_crew,
)
from penstock.train.crew.site import own_site
from penstock.train.folders.separate import SeparateFolders
from penstock.train.history import WatchRow
from penstock.train.job import Job
from penstock.train.run_source import CONFIG_FILE
from penstock.train.screen import Screen, log_to
from penstock.train.worker import Verdict, job_of, work


def run_worker(
    folder: str, resume: bool, separate: SeparateFolders | None = None
) -> Verdict:
    """Train as the rank that the environment names; rank 0 shows how it goes."""
    first = os.environ.get("RANK") == "0"
    console = Console(stderr=True)
    log_to(console, first)

    def open_job(folder: Path, config: Config, resume: bool, fresh: bool) -> Job:
        job = job_of(folder, config, resume, fresh)
        return replace(job, separate=separate)

    if not first:
        return work(Path(folder), resume, open_job=open_job)
    run = read_config(Path(folder) / CONFIG_FILE).run
    with Screen(run.steps, run.log, console) as screen:
        return work(Path(folder), resume, screen.put, open_job)


def run_member(
    worker: int,
    workers: int,
    host: str,
    port: int,
    folder: str,
    resume: bool,
    newcomer: bool,
) -> Verdict:
    """Train as a worker of a crew; whoever is rank 0 shows how it goes."""
    run = read_config(Path(folder) / CONFIG_FILE).run
    set_environment(worker, workers, min(run.workers or workers, workers))
    console = Console(stderr=True)
    log_to(console, everything=False)
    with ExitStack() as screens:

        def show() -> WatchRow:
            log_to(console, everything=True)
            return screens.enter_context(Screen(run.steps, run.log, console)).put

        member = Member(worker, local_store(host, port))
        site = own_site(Path(folder), worker, workers)
        return work_in_crew(member, site, resume, newcomer, show)
