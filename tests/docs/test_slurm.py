"""The SLURM template, under an `srun` and an `scontrol` of our own: nodes are launchers of this machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer

import pytest

from commands import SMALL_CONFIG, environment, free_port, torchrun, wait_for
from penstock.train.history import read_rows

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "slurm.sbatch"
SRUN = """#!/bin/bash
# Runs the command once a node, as srun does with one task on each.
shift
for node in $(seq "$SLURM_NNODES"); do SLURM_NODEID=$((node - 1)) "$@" & pids+=($!); done
code=0
for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
exit $code
"""
SCONTROL = """#!/bin/bash
case "$1" in
    show) for node in $(seq "$SLURM_NNODES"); do echo 127.0.0.1; sleep 0.2; done ;;  # longer than its reader listens
    requeue) echo "$2" >> requeued ;;
esac
"""
TORCHRUN = f"""#!{sys.executable} -S
# Asks the test to fork torchrun, and ends as that one does.
import json, os, socket, sys
with socket.create_connection(("127.0.0.1", int(os.environ["FORKS_PORT"]))) as test:
    test.sendall(json.dumps([sys.argv[1:], dict(os.environ)]).encode())
    test.shutdown(socket.SHUT_WR)
    with test.makefile() as answer:
        code, said = json.load(answer)
sys.stdout.write(said)
sys.exit(code)
"""


@pytest.fixture
def forks_port(tmp_path) -> Iterator[int]:
    """A port at which torchrun can be asked for. It and its workers are forks."""
    started = []

    class Node(StreamRequestHandler):
        def handle(self) -> None:
            words, env = json.load(self.rfile)
            node = torchrun(tmp_path, ["--local-addr", "127.0.0.1", *words], env)
            started.append(node)
            out, err = node.communicate()
            self.wfile.write(json.dumps([node.returncode, out + err]).encode())

    with ThreadingTCPServer(("127.0.0.1", 0), Node) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            for node in started:
                node.kill()
            server.shutdown()
            thread.join()


@pytest.fixture
def job(tmp_path, forks_port):
    """Starts the script in a folder with text and commands of SLURM's."""
    (tmp_path / "text.txt").write_text(
        "".join(f"the {n % 7} cats sat on {n % 5} mats\n" for n in range(3000))
    )
    config = SMALL_CONFIG.replace("[data]", '[data]\nsources = ["text.txt"]').replace(
        "steps = 12", "steps = 3000"
    )
    (tmp_path / "config.toml").write_text(config.replace("save = 3", "save = 0"))
    (tmp_path / "bin").mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("torchrun", TORCHRUN)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)

    def start(nodes: int, workers: int, *more: str) -> subprocess.Popen[str]:
        port = free_port()
        env = environment(
            PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            SLURM_JOB_ID="4711",
            SLURM_JOB_NAME="test",
            SLURM_NNODES=str(nodes),
            SLURM_JOB_NODELIST="node[1-2]",
            WORKERS=str(workers),
            PORT=str(port),
            GLOO_SOCKET_IFNAME="lo",
            RESTARTS="0",
            FORKS_PORT=str(forks_port),
        )
        line, pipe = (
            ["bash", str(SCRIPT), "config.toml", *more],
            subprocess.PIPE,
        )
        return subprocess.Popen(
            line,
            cwd=tmp_path,
            env=env,
            stdout=pipe,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_before_the_time_limit_it_saves_is_queued_again_and_goes_on_with_other_nodes(
    job, tmp_path
):
    run = tmp_path / "runs" / "test-4711"
    first = job(1, 2)
    try:
        wait_for(run, 4)
        first.send_signal(signal.SIGUSR1)
        out, _ = first.communicate(timeout=600)
    finally:
        first.kill()
    assert first.returncode == 0, out
    stopped = int(re.search(r"stopped after (\d+) steps", out)[1])
    assert (tmp_path / "requeued").read_text() == "4711\n"
    assert (run / "checkpoints" / f"step-{stopped:08d}").is_dir()
    second = job(2, 1, "--set", f"run.steps={stopped + 3}")
    out, _ = second.communicate(timeout=600)
    assert second.returncode == 0, out
    assert f"going on from runs/test-4711/checkpoints/step-{stopped:08d}" in out
    assert [row.step for row in read_rows(run)] == list(range(1, stopped + 4))
    assert (tmp_path / "requeued").read_text() == "4711\n"


def test_a_mistake_ends_the_job_and_it_is_not_queued_again(job, tmp_path):
    failed = job(1, 1)
    out, _ = failed.communicate(timeout=600)
    assert failed.returncode != 0
    assert "the schedule has 2 ranks, but 1 were launched" in out
    assert not (tmp_path / "requeued").exists()
