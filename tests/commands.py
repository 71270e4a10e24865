"""A command line in this process, for the tests of the verbs."""

from __future__ import annotations

import _thread
import shlex
import sys
import threading
import time

import pytest

from penstock.cli import main


def called(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str) -> tuple[int, str, str]:
    """Runs it, without `penstock` before it; gives exit code, stdout, stderr."""
    monkeypatch.setattr(sys, "argv", ["penstock", *shlex.split(line, comments=True)])
    code = 0
    try:
        main()
    except SystemExit as stopped:
        code = stopped.code if isinstance(stopped.code, int) else 0
    out, err = capsys.readouterr()
    return code, out, err


def ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str, after: float
) -> tuple[int, str]:
    """Runs a command line in this process, and asks it to end after so many seconds; exit code and stderr."""
    over = threading.Event()

    def ask() -> None:
        time.sleep(after)
        while not over.wait(2.0 if asked else 0.0):  # one that comes inside a callback, or an import, may be lost
            asked.append(time.monotonic())
            _thread.interrupt_main()

    asked: list[float] = []
    threading.Thread(target=ask, daemon=True).start()
    begin = time.monotonic()
    try:
        code, _, err = called(monkeypatch, capsys, line)
    finally:
        over.set()
    assert time.monotonic() - begin < after + 20
    return code, err
