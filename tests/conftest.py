"""Makes Ctrl-C and SIGHUP work in all tests, and gives them what they share.

A shell or `nohup` may have started pytest with these signals turned off. Commands and workers
that tests start are forks of one process that has torch loaded.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import hypothesis
import pytest

pytest_plugins = ["suite"]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# How long an example takes says more about the machine than about our code.
hypothesis.settings.register_profile(
    "any machine",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    print_blob=True,
)
hypothesis.settings.load_profile("any machine")


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
    if "PYTEST_XDIST_WORKER" in os.environ:
        import savings  # noqa: F401, PLC0415  # loads numba and torch
        from forked import start_server  # noqa: PLC0415

        start_server()
    yield
    if "forked" in sys.modules:
        sys.modules["forked"].end_commands()
