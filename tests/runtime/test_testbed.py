"""Tests `penstock lab testbed` with a fake MPS daemon that only logs its commands."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from commands import called, wait_until
from penstock.runtime.process.mps import (
    be_own_host,
    environment,
    highest_good_share,
    products_are_complete,
    workers_of_a_gpu,
)

PATIENCE = 240.0  # seconds for a process to start or to end on a busy machine
DAEMON = """#!/bin/sh
if [ "$1" = "-d" ]; then
    echo "start $CUDA_MPS_PIPE_DIRECTORY" >> "$TOLD"
    [ -z "$BROKEN" ] || { echo no gpu >&2; exit 3; }
else read word; echo "$word $CUDA_MPS_PIPE_DIRECTORY" >> "$TOLD"; fi
"""


@pytest.fixture
def told(tmp_path, monkeypatch) -> Path:
    daemon = tmp_path / "bin" / "nvidia-cuda-mps-control"
    daemon.parent.mkdir()
    daemon.write_text(DAEMON)
    daemon.chmod(0o755)
    monkeypatch.setenv("PATH", f"{daemon.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("TOLD", str(tmp_path / "told"))
    return tmp_path / "told"


def lines(told: Path) -> list[str]:
    return [line.split()[0] for line in told.read_text().splitlines()]


def test_a_command_runs_with_a_share_of_the_gpu(told, tmp_path, monkeypatch, capsys):
    script = tmp_path / "show.sh"
    script.write_text(
        "echo $CUDA_MPS_ACTIVE_THREAD_PERCENTAGE $CUDA_DEVICE_MAX_CONNECTIONS "
        f"> {tmp_path}/seen; test -d $CUDA_MPS_LOG_DIRECTORY"
    )
    assert (
        called(monkeypatch, capsys, f"lab testbed --workers 8 -- sh {script}")[0] == 0
    )
    assert (tmp_path / "seen").read_text().split() == ["12", "8"]
    assert lines(told) == ["start", "quit"]
    first, last = (line.split()[1] for line in told.read_text().splitlines())
    assert first == last
    assert not Path(first).exists()


def test_it_exits_with_the_code_of_the_command_and_stops_the_daemon(
    told, monkeypatch, capsys
):
    assert called(monkeypatch, capsys, "lab testbed --workers 2 -- false")[0] == 1
    assert lines(told) == ["start", "quit"]


def test_a_share_with_incomplete_products_is_lowered(
    told, tmp_path, monkeypatch, capsys
):
    """A fake Python stands in for the check, which needs a GPU."""
    script = tmp_path / "show.sh"
    script.write_text(
        "echo $CUDA_MPS_ACTIVE_THREAD_PERCENTAGE $PENSTOCK_TESTBED_WORKERS "
        f"> {tmp_path}/seen"
    )
    for name, body in (("nvidia-smi", ""), ("checker", 'test "$3" = 16 && echo 13')):
        program = told.parent / "bin" / name
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(told.parent / "bin" / "checker"))
    line = f"lab testbed --workers {{}} -- sh {script}"
    assert called(monkeypatch, capsys, line.format(6))[0] == 0
    assert (tmp_path / "seen").read_text().split() == ["13", "6"]
    assert called(monkeypatch, capsys, line.format(8))[0] == 0  # its check fails
    assert (tmp_path / "seen").read_text().split() == ["12", "8"]


def test_a_lowered_share_leaves_the_number_of_workers(monkeypatch):
    for name, value in environment(6, Path("mps")).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "13")
    assert workers_of_a_gpu() == 6


def test_it_is_an_error_that_no_share_is_good():
    with pytest.raises(SystemExit, match="incomplete on every share up to 12%"):
        highest_good_share(12, lambda share: False)


def test_the_check_of_a_share_finds_a_block_that_is_not_written(monkeypatch):
    sizes = {"rows": (8,), "columns": ((16, 24),)}
    assert products_are_complete("cpu", **sizes)
    multiply = torch.mm

    def leave_a_block(a, b, out):
        multiply(a[:-4], b, out=out[:-4])

    monkeypatch.setattr(torch, "mm", leave_a_block)
    assert not products_are_complete("cpu", **sizes)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_a_signal_reaches_the_command_and_no_process_stays(
    told, tmp_path, number, code
):
    script = tmp_path / "long.sh"
    script.write_text(
        f"sleep 300 & echo $! > {tmp_path}/pid.new; mv {tmp_path}/pid.new {tmp_path}/pid; wait"
    )
    line = [
        sys.executable,
        "-m",
        "penstock",
        "testbed",
        "--workers",
        "4",
        "--",
        "sh",
        str(script),
    ]
    process = subprocess.Popen(line)
    file = tmp_path / "pid"
    wait_until(file.exists, PATIENCE)
    process.send_signal(number)
    assert process.wait(300) == code
    assert lines(told) == ["start", "quit"]
    command = Path(f"/proc/{file.read_text().strip()}/cmdline")
    # A process that nobody has waited for yet is there, without a command line.
    wait_until(lambda: not command.exists() or not command.read_bytes(), PATIENCE)


def test_a_testbed_names_its_backend_to_the_processes(
    told, tmp_path, monkeypatch, capsys
):
    """Each process then takes itself for a host, which NCCL reaches through sockets."""
    script = tmp_path / "show.sh"
    script.write_text(f"echo $PENSTOCK_TESTBED_BACKEND > {tmp_path}/seen")
    for option, name in (("", "penstock_ipc"), ("--backend nccl ", "nccl")):
        line = f"lab testbed --workers 2 {option}-- sh {script}"
        assert called(monkeypatch, capsys, line)[0] == 0
        assert (tmp_path / "seen").read_text().split() == [name]
    for name in ("NCCL_HOSTID", "NCCL_NET", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    be_own_host(3)
    assert os.environ["NCCL_HOSTID"] == "testbed-3"
    assert os.environ["NCCL_NET"] == "Socket"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth7"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("lab testbed --backend ncll -- true", "did you mean 'nccl'?"),
        ("lab testbed --workers 0 -- true", "1 to 48"),
        ("lab testbed -- no-such-command-here", "no-such-command-here"),
    ],
)
def test_a_mistake_gets_a_message(told, monkeypatch, capsys, line, words):
    code, _, err = called(monkeypatch, capsys, line)
    assert code == 2
    assert words in err
    assert not told.exists()


def test_a_daemon_that_does_not_start_gets_a_message(told, monkeypatch, capsys):
    monkeypatch.setenv("BROKEN", "1")
    code, _, err = called(monkeypatch, capsys, "lab testbed -- true")
    assert code == 2
    assert "no gpu" in err


def test_a_machine_without_mps_says_so(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    code, _, err = called(monkeypatch, capsys, "lab testbed -- true")
    assert code == 2
    assert "nvidia-cuda-mps-control" in err
