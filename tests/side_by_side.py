"""Runs tests side by side, in forks of one process that has loaded and collected everything.

    pytest: load, collect ─┬─fork─► worker: batch, batch, ...     each asks for the next batch
                           ├─fork─► worker: batch, batch, ...     and sends its reports back
                           └─fork─► worker: batch, batch, ...

pytest-xdist would load torch and collect all tests once for every worker. `tests/conftest.py`
takes the hooks from here, and `pytest --workers N` uses them.
"""

from __future__ import annotations

import gc
import os
import warnings
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from itertools import groupby
from multiprocessing import get_context
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.process import BaseProcess
from typing import Any

import pytest

# Files with the longest tests come first and go out test by test, so that all workers
# end at about the same time.
LONG_FILES = (
    "test_guides.py",
    "test_docs.py",
    "test_train_cli.py",
    "test_gpu_benchmarks.py",
    "test_models.py",
    "test_mesh.py",
    "test_process.py",
    "test_links.py",
)
# Other files go out in batches, because a batch sets up the fixtures of its module only once.
TESTS_PER_BATCH = 40

Batch = list[int]  # places in the session's list of tests


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--workers", type=int, default=0, help="run the tests in so many forks"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    count = session.config.getoption("--workers")
    if not count or session.config.option.collectonly or session.testsfailed:
        return None  # pytest's own loop
    _run_side_by_side(session, count)
    return True


def _batches(items: list[pytest.Item]) -> list[Batch]:
    """Return the tests in the order in which they go out."""

    def file_of(place: int) -> str:
        return items[place].path.name

    long: list[Batch] = []
    short: list[Batch] = []
    for name, group in groupby(range(len(items)), file_of):
        places = list(group)
        if name in LONG_FILES:
            long += [[place] for place in places]
        else:
            starts = range(0, len(places), TESTS_PER_BATCH)
            short += [places[i : i + TESTS_PER_BATCH] for i in starts]
    long.sort(key=lambda batch: LONG_FILES.index(file_of(batch[0])))
    return long + short


# ---------------------------------------------------------------- in pytest's process
@dataclass
class Worker:
    process: BaseProcess
    pipe: Connection
    batch: Batch = field(default_factory=list)  # what it has not ended yet
    is_running: bool = False  # whether it has begun the first of them


def _run_side_by_side(session: pytest.Session, count: int) -> None:
    from forked import LOADED  # noqa: PLC0415  # loads torch

    for name in LOADED:
        import_module(name)
    gc.collect()
    gc.freeze()  # what is loaded by now stays, so no worker needs to look through it
    batches = deque(_batches(session.items))
    workers = [_start_worker(session) for _ in range(count)]
    try:
        while workers:
            wait([worker.pipe for worker in workers], timeout=1.0)
            for worker in list(workers):
                ended = not worker.process.is_alive()
                _serve(session, worker, batches)
                if not ended:
                    continue
                workers.remove(worker)
                code = worker.process.exitcode
                if worker.is_running:
                    crashed, *rest = worker.batch
                    _report_crash(session, session.items[crashed], code)
                    if rest:
                        batches.appendleft(rest)
                    workers.append(_start_worker(session))
                elif code:
                    pytest.exit(f"a worker ended with code {code}, in no test", 1)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
    finally:
        for worker in workers:
            worker.process.terminate()
        gc.unfreeze()


def _start_worker(session: pytest.Session) -> Worker:
    ours, theirs = Pipe()
    process = get_context("fork").Process(target=_work, args=(session, theirs, ours))
    with warnings.catch_warnings():
        # Newer Pythons warn, because numpy has started threads. They survive a fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    theirs.close()
    return Worker(process, ours)


def _serve(session: pytest.Session, worker: Worker, batches: deque[Batch]) -> None:
    """Answer all messages that a worker has sent."""
    config = session.config
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while worker.pipe.poll():
            kind, content = worker.pipe.recv()
            match kind:
                case "next":
                    worker.batch = batches.popleft() if batches else []
                    worker.pipe.send(worker.batch)
                case "start":
                    worker.is_running = True
                case "end":
                    worker.is_running = False
                    worker.batch = worker.batch[1:]
                case "report":
                    report = config.hook.pytest_report_from_serializable(
                        config=config, data=content
                    )
                    config.hook.pytest_runtest_logreport(report=report)


def _report_crash(session: pytest.Session, item: pytest.Item, code: int | None) -> None:
    report = pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords={},
        outcome="failed",
        longrepr=f"the worker ended with code {code} in this test",
        when="call",
    )
    session.config.hook.pytest_runtest_logreport(report=report)


# ---------------------------------------------------------------- in a worker
class _Sender:
    """A plugin that sends the reports of this worker to pytest's process."""

    def __init__(self, config: pytest.Config, pipe: Connection) -> None:
        self.config = config
        self.pipe = pipe

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(
            config=self.config, report=report
        )
        self.pipe.send(("report", data))


def _work(session: pytest.Session, pipe: Connection, other_end: Connection) -> None:
    other_end.close()
    config = session.config
    _take_over(config)
    config.pluginmanager.register(_Sender(config, pipe))
    with suppress(KeyboardInterrupt):
        while batch := _next_batch(pipe):
            items = [session.items[place] for place in batch]
            # After the last test only what belongs to the whole session stays set up.
            following: list[Any] = [*items[1:], session]
            for item, next_item in zip(items, following, strict=True):
                pipe.send(("start", None))
                item.ihook.pytest_runtest_protocol(item=item, nextitem=next_item)
                pipe.send(("end", None))
    session._setupstate.teardown_exact(None)
    pipe.close()


def _next_batch(pipe: Connection) -> Batch:
    """Ask for more tests; none means that all have gone out."""
    pipe.send(("next", None))
    batch: Batch = pipe.recv()
    return batch


def _take_over(config: pytest.Config) -> None:
    """Give this fork files of its own to capture output in, and let it print nothing."""
    from forked import fork_server_from_here  # noqa: PLC0415  # loads torch

    os.environ["PYTEST_WORKER"] = str(os.getpid())
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    fork_server_from_here()
    capture.start_global_capturing()
    config.pluginmanager.unregister(name="terminalreporter")
