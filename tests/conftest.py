"""Adds `pytest --workers N` and `pytest --no-skips`, and makes Ctrl-C and SIGHUP work in all tests.

A shell or `nohup` may have started pytest with these signals turned off. Commands and workers
that tests start are forks of one process that has torch loaded.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

import side_by_side
from side_by_side import pytest_runtestloop  # noqa: F401  # a hook

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    side_by_side.pytest_addoption(parser)
    parser.addoption(
        "--no-skips", action="store_true", help="count tests that are skipped as failed"
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    return refuse_skip(item.config, report)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    return refuse_skip(collector.config, report)


def refuse_skip(config: pytest.Config, report: Report) -> Report:
    """With --no-skips, turn a skip into a failure that tells its reason."""
    if report.skipped and config.getoption("--no-skips"):
        report.outcome = "failed"
        report.longrepr = f"skipped, but --no-skips was given: {report.longrepr}"
    return report


@pytest.fixture(autouse=True)
def _same_log() -> Iterator[None]:
    """Undo what a command does to the log of the package, when it runs in this process."""
    logger = logging.getLogger("penstock")
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[[str], tuple[int, str, str]]:
    """Run a command line in an empty folder; return exit code, stdout, stderr."""
    from commands import called  # noqa: PLC0415

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return partial(called, monkeypatch, capsys)


@pytest.fixture
def no_onednn() -> Iterator[None]:
    """Use torch's own bf16 kernels: some virtual machines advertise AMX but fault on it."""
    from torch.backends import mkldnn  # noqa: PLC0415

    before = mkldnn.is_available() and mkldnn.set_flags(False)
    yield
    if before:
        mkldnn.set_flags(*before)


@pytest.fixture(scope="session", autouse=True)
def _fork_server() -> Iterator[None]:
    """Start the process to fork from before a test needs it, if there are many tests."""
    if "PYTEST_WORKER" in os.environ:
        import savings  # noqa: F401, PLC0415  # loads numba and torch
        from forked import start_server  # noqa: PLC0415

        start_server()
    yield
    if "forked" in sys.modules:
        sys.modules["forked"].end_commands()
