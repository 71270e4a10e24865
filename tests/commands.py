"""A command line in this process, for the tests of the verbs."""

from __future__ import annotations

import shlex
import sys

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
