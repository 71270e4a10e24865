"""Runs command lines for the tests, in this process or in another one."""

from __future__ import annotations

import math
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import penstock
from forked import Command
from penstock.cli.app import main
from penstock.train.history import StepRow, read_rows

SMALL_CONFIG = """
[model]
layers = 4
hidden_size = 32
heads = 4
intermediate_size = 64
[data]
seq_len = 32
global_batch = 8
[schedule]
name = "hanayo"
microbatches = 4
[parallel]
pp = 2
[optimizer]
warmup_steps = 5
[run]
steps = 12
eval_every = 0
save_every = 3
checks = "gradients,memory"
"""


def write_text_run(folder: Path, text: str) -> None:
    """Write a small config.toml that trains on a file of this text."""
    (folder / "text.txt").write_text(text)
    config = SMALL_CONFIG.replace("[data]", '[data]\nsources = ["text.txt"]')
    (folder / "config.toml").write_text(config)


def called(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str
) -> tuple[int, str, str]:
    """Run a command line, given without `penstock`; return exit code, stdout, stderr."""
    # A slow machine prints as much as a fast one.
    monkeypatch.setattr("penstock.cli.terminal.LINE_SECONDS", math.inf)
    monkeypatch.setattr(sys, "argv", ["penstock", *shlex.split(line, comments=True)])
    code = 0
    try:
        main()
    except SystemExit as stopped:
        code = stopped.code if isinstance(stopped.code, int) else 0
    out, err = capsys.readouterr()
    return code, out, err


def environment(**more: str) -> dict[str, str]:
    """Return the environment of another process: this penstock, and wide lines."""
    return (
        os.environ
        | {"PYTHONPATH": str(Path(penstock.__file__).parents[1]), "COLUMNS": "200"}
        | more
    )


def train_elsewhere(folder: Path, *settings: str) -> tuple[str, list[StepRow]]:
    """Train in a fresh process, which may use GPUs; return what it printed and its steps."""
    line = [sys.executable, "-m", "penstock", "train"]
    for setting in (*settings, f"run.folder={folder}"):
        line += ["--set", setting]
    done = subprocess.run(
        line,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr, read_rows(folder)


def free_port() -> int:
    """A port that nothing listens on. Nobody else takes it that soon."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# Starts torchrun with these arguments, as `Command` does. It and its workers are forks.
torchrun = partial(Command, script=Path(__file__).parent / "torchrun.py")


def ended(folder: Path, line: str, after: float) -> tuple[int, str]:
    """Run a command line in another process, and press Ctrl-C `after` seconds.

    Returns the exit code and stderr. It is another process because Python drops an
    interrupt that arrives inside a callback of the garbage collector, and hypothesis has
    such a callback here.
    """
    process = Command(folder, shlex.split(line), environment())
    try:
        time.sleep(after)
        assert process.poll() is None, "it ended before Ctrl-C"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=600)  # numba may have to compile first
    finally:
        process.kill()
        process.wait()
    assert process.returncode is not None
    return process.returncode, err


def wait_until(condition: Callable[[], bool], seconds: float = 600.0) -> None:
    """Wait until something is so, which must not take longer than this."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def wait_for(folder: Path, steps: int) -> None:
    """Wait until the run in this folder has trained `steps` steps."""
    wait_until(lambda: len(read_rows(folder)) >= steps)
