"""Tests of the launcher of a run: the signals that end it."""

from __future__ import annotations

import os
import signal
import time

import pytest

from penstock.train import launcher


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
            for _ in range(1000):
                time.sleep(0.01)

    with pytest.raises(SystemExit) as ended:
        work()
    assert ended.value.code == 128 + signal.SIGTERM
    assert said == ["by SIGTERM"]
    assert signal.getsignal(signal.SIGTERM) is handler
