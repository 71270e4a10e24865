"""Tests of the launcher of a run: the signals that end it."""

from __future__ import annotations

import os
import signal
import time

import pytest

from penstock.errors import RunError
from penstock.runtime.process.launch import WorkerOutcome
from penstock.train import launch as launcher
from penstock.train.launch import run_worker


class Deaf:
    """Asks this process to end while it is deleted, where Python drops all exceptions."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0)  # lets the handler run in here


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_that_python_drops_comes_again(monkeypatch):
    monkeypatch.setattr(launcher, "SIGNAL_REPEAT_SECONDS", 0.05)
    handler = signal.getsignal(signal.SIGTERM)
    said = []

    def work() -> None:
        with launcher.ended_by_signals(said.append):
            Deaf()
            for _ in range(60_000):
                time.sleep(0.01)

    with pytest.raises(SystemExit) as ended:
        work()
    assert ended.value.code == 128 + signal.SIGTERM
    assert said == ["by SIGTERM"]
    assert signal.getsignal(signal.SIGTERM) is handler


def test_workers_that_end_on_a_full_disk_leave_nothing_half_written(
    tmp_path, monkeypatch
):
    good = tmp_path / "checkpoints" / "step-00000002"
    good.mkdir(parents=True)

    def run(*_: object) -> list[WorkerOutcome]:
        (tmp_path / "checkpoints" / "step-00000004.saving").mkdir()
        (tmp_path / "failure.json").touch()  # There is room for names, not for text.
        return [WorkerOutcome(0, 1, error="OSError", text="no room")]

    monkeypatch.setattr(launcher, "run_workers", run)
    with pytest.raises(RunError, match="No space left on device"):
        launcher.launch(run_worker, tmp_path, 1, 0, False)
    assert sorted(tmp_path.rglob("*")) == [good.parent, good]
