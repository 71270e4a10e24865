"""Tests how the suite runs: shares, skips and durations, and that what forks has not touched a GPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

import suite
from forked import LOADED, Command

pytest_plugins = ["pytester"]
SKIPPING = """
import os
import pytest

@pytest.mark.parametrize("number", range(3))
def test_that_is_skipped(number):
    pytest.skip("there is no gold")

def test_that_runs():
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
"""
OPTIONS = ("-p", "suite", "-p", "no:cacheprovider", "-rs")


@pytest.fixture
def inner(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> pytest.Pytester:
    """A folder with tests, for a pytest in a process of its own."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(test_one=SKIPPING, test_two="def test_of_two(): pass")
    return pytester


def test_more_skips_than_are_allowed_fail_the_run(inner: pytest.Pytester) -> None:
    allowed = inner.runpytest_subprocess(*OPTIONS, "--most-skips", "3")
    assert allowed.ret == pytest.ExitCode.OK
    refused = inner.runpytest_subprocess(*OPTIONS, "--most-skips", "2")
    assert refused.ret == pytest.ExitCode.TESTS_FAILED
    refused.stdout.fnmatch_lines(
        ["3 tests were skipped, but --most-skips allows 2;*", "*there is no gold*"]
    )


def test_skips_in_the_processes_of_xdist_count(inner: pytest.Pytester) -> None:
    pytest.importorskip("xdist")
    refused = inner.runpytest_subprocess(
        *OPTIONS, "-p", "xdist", "-n", "2", "--most-skips", "2"
    )
    assert refused.ret == pytest.ExitCode.TESTS_FAILED
    refused.assert_outcomes(passed=2, skipped=3)


def test_the_parts_of_the_suite_are_all_of_it(inner: pytest.Pytester) -> None:
    ran = []
    for part in ("1/2", "2/2"):
        done = inner.runpytest_subprocess(*OPTIONS, "--part", part)
        ran.append(done.parseoutcomes()["passed"])
    assert ran == [1, 1]
    wrong = inner.runpytest_subprocess(*OPTIONS, "--part", "3/2")
    wrong.stderr.fnmatch_lines(["*--part is a share such as 1/3, not 3/2*"])


def test_the_durations_name_files_that_exist() -> None:
    root = Path(__file__).parents[1]
    assert suite.recorded_durations()
    for name in suite.recorded_durations():
        assert (root / name).is_file(), f"run `make durations`: {name} is gone"


# ---------------------------------------------------------------- forks and GPUs
LOADS = """
import sys, torch
def touched(*_):
    raise AssertionError("what is loaded before a fork asks for the GPUs")
torch.cuda.is_available = torch.cuda.device_count = torch.cuda._lazy_init = touched
for name in sys.argv[1:]:
    __import__(name)
assert not torch.cuda.is_initialized()
"""
TRAINS = """
import torch
assert not torch.cuda.is_initialized()
print(float(torch.ones(3, device="cuda").sum()))
"""


def test_what_is_loaded_before_a_fork_asks_for_no_gpu(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [Path(__file__).parent, Path(torch.__file__).parents[1]]
    sources = Path(suite.__file__).parents[1] / "src"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, [*folders, sources])))
    done = pytester.run(sys.executable, "-c", LOADS, *LOADED)
    assert done.ret == 0, done.errlines


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_fork_of_the_server_of_commands_can_use_the_gpu(tmp_path: Path) -> None:
    torch.ones(1, device="cuda")  # This process has touched it; the server has not.
    script = tmp_path / "script.py"
    script.write_text(TRAINS)
    command = Command(tmp_path, [], os.environ, script=script)
    out, err = command.communicate()
    assert (command.returncode, out) == (0, "3.0\n"), err
