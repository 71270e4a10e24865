"""Ctrl-C while a command starts: whatever is being imported, it prints one line and the exit code is 130."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from commands import environment

PRESSED = "import os, signal; os.kill(os.getpid(), signal.SIGINT); raise SystemExit('the interrupt was lost')\n"
AS_MODULE, AS_SCRIPT = (
    ["-m", "penstock"],
    ["-c", "from penstock.__main__ import main; main()"],
)


def interrupted_in(
    module: str, folder: Path, begin: list[str], line: str
) -> subprocess.CompletedProcess[str]:
    """Run a command line, and press Ctrl-C while it imports a module.

    A fake module of that name presses the keys.
    """
    (folder / f"{module}.py").write_text(PRESSED)
    env = environment()
    env["PYTHONPATH"] = os.pathsep.join([str(folder), env["PYTHONPATH"]])
    command = [sys.executable, *begin, *line.split()]
    return subprocess.run(
        command,
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("typer", "list"),
        ("numpy", "draw 1f1b --pp 2 --microbatches 2"),
        ("torch", "train"),
        ("rich", "list"),
    ],
)
@pytest.mark.parametrize("begin", [AS_MODULE, AS_SCRIPT], ids=["module", "script"])
def test_ctrl_c_during_an_import_prints_one_line(tmp_path, module, line, begin):
    done = interrupted_in(module, tmp_path, begin, line)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "Interrupted.\n")


def test_ctrl_c_after_the_imports_prints_one_line(tmp_path):
    code = (
        "import os, signal, penstock.cli.terminal as screen; from penstock.__main__ import main\n"
        "screen.print_table = lambda *_: os.kill(os.getpid(), signal.SIGINT)\nmain()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "draw"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (130, "Interrupted.\n")


def test_importing_the_package_loads_none_of_its_rooms():
    code = "import sys, penstock; assert not [name for name in sys.modules if name.startswith('penstock.')]"
    subprocess.run(
        [sys.executable, "-c", code], env=environment(), check=True, timeout=60
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("draw nope --pp 2 --microbatches 2", "there is no schedule 'nope'"),
        ("lab testbed --workers 0 -- true", "MPS serves 1 to 48 workers"),
    ],
)
def test_a_mistake_is_reported_on_a_machine_without_torch(tmp_path, line, words):
    done = without_torch(tmp_path, line)
    assert (done.returncode, words in done.stderr) == (2, True), done.stderr
    assert "Traceback" not in done.stderr


def without_torch(tmp_path, line):
    """Run a command on a machine whose torch cannot be imported."""
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('no torch')\n")
    path = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    return subprocess.run(
        [sys.executable, "-m", "penstock", *line.split()],
        env=environment(PYTHONPATH=path),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_python_without_torch_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "penstock.pipeline", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it fails
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'penstock\[torch\]'"):
        _ = penstock.Pipeline
