"""How the whole suite runs: which tests see a GPU, in which order, in which shares, and how many may be skipped.

    pytest -n 4                     pytest-xdist runs the tests in four processes; no GPU is visible to them
    pytest -m gpu                   the tests of a GPU, in this process, which sees it
    pytest --part 1/3               a third of the files, by their recorded durations
    pytest --most-skips 0           fails if more tests than that were skipped
    pytest --record-durations       writes tests/durations.json

A process that has used a GPU cannot fork, so tests that fork never see one.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from importlib.metadata import Distribution
from pathlib import Path

import pytest

DURATIONS = Path(__file__).parent / "durations.json"
# A checkout may be tested without being installed: `make test SETUP=none`.
installed = pytest.mark.skipif(
    not list(Distribution.discover(name="penstock")), reason="penstock is not installed"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="1/1", help="run a share of the files: 2/3")
    parser.addoption(
        "--most-skips", type=int, help="fail if more tests than this are skipped"
    )
    parser.addoption(
        "--record-durations",
        action="store_true",
        help="write the seconds of each file to tests/durations.json",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Hide the GPUs from this process and from all that it starts, unless tests of the GPU were asked for."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_finish() -> None:
    trace_without_a_gpu()


def trace_without_a_gpu() -> None:
    """Keep torch 2.11 from a crash in all that it compiles where a GPU is hidden: it looks for the driver's devices."""
    torch = sys.modules.get("torch")
    if torch is not None and os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        torch._C._ensureCUDADeviceGuardSet = lambda: None


# ---------------------------------------------------------------- order and shares
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Keep this share of the files, the longest first, so that all workers end at about the same time."""
    number, parts = _part(config.option.part)
    by_file: dict[str, list[pytest.Item]] = {}
    for item in items:
        by_file.setdefault(file_of(item.nodeid), []).append(item)
    shares = shares_of(list(by_file), recorded_durations(), parts)
    kept = [item for name in shares[number - 1] for item in by_file[name]]
    if parts > 1:
        ours = set(kept)
        config.hook.pytest_deselected(
            items=[item for item in items if item not in ours]
        )
    items[:] = kept


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def recorded_durations() -> dict[str, float]:
    return json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}


def shares_of(
    names: list[str], seconds: dict[str, float], parts: int
) -> list[list[str]]:
    """Deal the files out, the longest first, each to the share that has the least to do so far.

    A file that is new counts as a second.

    >>> shares_of(["a", "b", "c", "new"], {"a": 1.0, "b": 5.0, "c": 3.0}, 2)
    [['b'], ['c', 'a', 'new']]
    """
    shares: list[list[str]] = [[] for _ in range(parts)]
    loads = [0.0] * parts
    expected = {name: seconds.get(name, 1.0) for name in names}
    for name in sorted(names, key=lambda name: (-expected[name], name)):
        least = loads.index(min(loads))
        shares[least].append(name)
        loads[least] += expected[name]
    return shares


def _part(text: str) -> tuple[int, int]:
    number, _, parts = text.partition("/")
    if not (
        number.isdecimal() and parts.isdecimal() and 1 <= int(number) <= int(parts)
    ):
        raise pytest.UsageError(f"--part is a share such as 1/3, not {text}")
    return int(number), int(parts)


# ---------------------------------------------------------------- skips and durations
# These hooks get the reports of all workers in the process that runs them.
@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    terminal = config.pluginmanager.getplugin("terminalreporter")
    if terminal is None or hasattr(config, "workerinput"):  # a worker of xdist
        return
    most = config.option.most_skips
    skipped = len(terminal.stats.get("skipped", []))
    if most is not None and skipped > most and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if config.option.record_durations:
        DURATIONS.write_text(_seconds_by_file(terminal))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    most = config.option.most_skips
    skipped = len(terminalreporter.stats.get("skipped", []))
    if most is not None and skipped > most:
        terminalreporter.write_line(
            f"{skipped} tests were skipped, but --most-skips allows {most}; the reasons are below",
            red=True,
        )


def _seconds_by_file(terminal: pytest.TerminalReporter) -> str:
    seconds: Counter[str] = Counter()
    for reports in terminal.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[file_of(report.nodeid)] += report.duration
    rounded = {name: round(seconds[name], 1) for name in sorted(seconds)}
    return json.dumps(rounded, indent=1) + "\n"
