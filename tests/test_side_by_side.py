"""Tests `pytest --workers N`: every test runs, and no crash of a worker goes unseen."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from forked import Command

TESTS = """
import os
import pytest

@pytest.mark.parametrize("number", range(6))
def test_of_a_batch(number):
    assert number != 1
    if number == 2:
        os._exit(0)
    if number == 4:
        os.kill(os.getpid(), 9)
"""

FIXTURE = """
import os
import pytest

@pytest.fixture(scope="session")
def connection():
    yield
    os._exit(3)

def test_that_passes(connection):
    pass
"""


def run_side_by_side(folder: Path, tests: str) -> tuple[int | None, list[str]]:
    """Return the exit code and the lines of a pytest that runs these tests in two forks."""
    (folder / "test_drawn.py").write_text(tests)
    spec = find_spec("pytest.__main__")
    assert spec is not None
    assert spec.origin is not None
    words = ["-p", "side_by_side", "--workers", "2", "test_drawn.py"]
    command = Command(folder, words, os.environ, script=Path(spec.origin))
    out, err = command.communicate()
    assert not err
    return command.returncode, out.splitlines()


def test_the_rest_of_a_batch_runs_after_a_crash(tmp_path: Path) -> None:
    code, lines = run_side_by_side(tmp_path, TESTS)
    assert code == 1
    assert "the worker ended with code 0 in this test" in lines
    assert "the worker ended with code -9 in this test" in lines
    assert "3 failed, 3 passed" in lines[-1]


def test_a_worker_that_dies_between_tests_fails_the_run(tmp_path: Path) -> None:
    code, lines = run_side_by_side(tmp_path, FIXTURE)
    assert code == 1
    assert any("a worker ended with code 3, in no test" in line for line in lines)
