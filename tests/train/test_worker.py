"""How one process of a run ends: which failures would repeat, which a restart may mend. One rank, in this process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import penstock
from commands import free_port
from penstock.errors import PeerLostError, RunError
from penstock.formats import write_plan
from penstock.formats.config_toml import dump_config, load_config
from penstock.ir import Plan
from penstock.runtime import Executor
from penstock.schedules import make
from penstock.train.history import read_rows
from penstock.train.job import Verdict
from penstock.train.launch import forget_previous_end, read_failure, work

CONFIG = """
model = { layers = 1, hidden_size = 16, heads = 2, kv_heads = 2, intermediate_size = 16 }
data = { sources = ["text.txt"], seq_len = 8, global_batch = 2 }
schedule = { name = "1f1b", microbatches = 2 }
parallel = { pp = 1 }
run = { steps = 3, eval_every = 0, save_every = 0, checks = "forecast,memory" }
"""
CPU_FULL = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 5000000000 bytes. Error code 12"
GPU_FULL = "CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has a total capacity of 2 GiB"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A run of one rank that is ready to start."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("the cats sat on the mats\n" * 50)
    run = tmp_path / "runs" / "one"
    run.mkdir(parents=True)
    config = load_config(CONFIG)
    (run / "config.toml").write_text(dump_config(config))
    write_plan(
        Plan(make("1f1b", ranks=1, microbatches=2), "1f1b", (1,)), run / "plan.json"
    )
    for name, value in {
        "RANK": 0,
        "WORLD_SIZE": 1,
        "LOCAL_RANK": 0,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "GLOO_SOCKET_IFNAME": "lo",
    }.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr("penstock.train.launch.end_with_parent", lambda: None)
    before = {
        number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)
    }
    yield run
    for number, handler in before.items():
        signal.signal(number, handler)
    if dist.is_initialized():
        dist.destroy_process_group()


def failing(monkeypatch, error: Exception, step: int) -> None:
    """Makes a step fail."""
    real, calls = Executor.step, []

    def instead(self, *given, **options):
        calls.append(1)
        if len(calls) == step:
            raise error
        return real(self, *given, **options)

    monkeypatch.setattr(Executor, "step", instead)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            RuntimeError(CPU_FULL),
            "rank 0 has no memory left: it tried to allocate 5.0 GB\n  fewer data.seq_len",
        ),
        (
            torch.OutOfMemoryError(GPU_FULL),
            "no memory left: CUDA out of memory. Tried to allocate 3.00 GiB\n  fewer",
        ),
        (
            MemoryError("cannot hold it"),
            "rank 0 has no memory left: cannot hold it\n  fewer",
        ),
        (
            KeyError("cheese"),
            "rank 0 failed before its first step: KeyError: 'cheese'\n  it would fail again",
        ),
    ],
)
def test_a_failure_before_the_first_step_is_not_tried_again(
    folder, monkeypatch, error, words
):
    failing(monkeypatch, error, 1)
    with pytest.raises(type(error)):
        work(folder, False)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    again = work(folder, False)
    assert again.error == "RunError"
    assert words in again.text
    assert ("Traceback" in again.text) == isinstance(error, KeyError)
    assert not read_rows(folder)


@pytest.mark.parametrize(
    "error",
    [
        PeerLostError("rank 1 is lost"),
        RuntimeError("[gloo] Connection closed by peer"),
        dist.DistNetworkError("reset"),
    ],
)
def test_a_lost_peer_is_worth_a_restart(folder, monkeypatch, error):
    failing(monkeypatch, error, 1)
    with pytest.raises(type(error)):
        work(folder, False)
    assert read_failure(folder) is None


def test_later_a_fault_is_tried_again_and_memory_only_once(folder, monkeypatch):
    failing(monkeypatch, ValueError("odd"), 2)
    with pytest.raises(ValueError, match="odd"):
        work(folder, False)
    assert read_failure(folder) is None
    for turn in range(2):
        dist.destroy_process_group()
        failing(monkeypatch, RuntimeError(CPU_FULL), 2)
        with pytest.raises(RuntimeError, match="allocate"):
            work(folder, False)
        assert (read_failure(folder) is not None) == bool(turn)


def test_the_launcher_can_end_a_worker_that_waits_with_its_error(folder, monkeypatch):
    """It could not before: if another rank crashed, the run ended 30 seconds later."""
    failing(monkeypatch, RunError("no"), 1)
    assert work(folder, False).error == "RunError"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_start_that_was_stopped_says_so_when_it_starts_again(folder, monkeypatch):
    forget_previous_end(folder)
    (folder / "stop").touch()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    verdict = work(folder, False)
    assert verdict == Verdict(0, stopped=True, interrupted=True)


def test_a_worker_process_does_not_load_the_command_line():
    """What a worker loads: its own entry, and the main module of the one that starts it."""
    script = "import sys, penstock.train.launch, penstock.__main__; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": str(Path(penstock.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = done.stdout.split()
    assert "penstock.train.launch" in loaded
    assert "typer" not in loaded
    assert not [name for name in loaded if name.startswith("penstock.cli")]
