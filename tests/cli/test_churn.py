"""Workers that are killed and stopped while `penstock train` runs: the others go on in the same processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from commands import SMALL_CONFIG, environment, wait_for
from forked import Command
from penstock.crew.decision import Report, Situation, decide
from penstock.formats.config_toml import read_config
from penstock.runtime import run_threads
from penstock.train.history import read_events, read_rows
from penstock.train.job import job_of
from penstock.train.loop import Trainer
from slow_worker import SLOW_FILE

STEPS = 1_000_000  # more than any machine does while a test waits


def signal_worker(folder: Path, worker: int, number: int) -> int:
    """Send a signal to a worker, and return its process id."""
    pid = int((folder / "ranks" / f"{worker}.pid").read_text())
    os.kill(pid, number)
    return pid


def wait_for_events(process: Command, folder: Path, count: int) -> None:
    """Wait until a run has written down so many events."""
    while len(read_events(folder)) < count:
        assert process.poll() is None, "the run has ended"
        time.sleep(0.05)


def undisturbed(
    folder: Path, other: Path, crews: list[tuple[int, tuple[int, ...]]], end: int
) -> list[float]:
    """Return the losses of a run that is started anew after each of these steps, with these workers."""
    whole = job_of(folder, read_config(folder / "config.toml"))
    losses: list[float] = []
    ends = [*(step for step, _ in crews[1:]), end]
    for number, (step, workers) in enumerate(crews):
        until = ends[number]
        plan = decide(
            Situation(whole.plan, {n: Report(n) for n in workers}, 1, False)
        ).plan
        stage = other / str(number)
        if step:
            name = f"step-{step:08d}"
            kept = other / str(number - 1) / "checkpoints" / name
            shutil.copytree(kept, stage / "checkpoints" / name)
        run = replace(whole.config.run, save_every=0, checks="memory")
        job = replace(
            whole,
            plan=plan,
            folder=stage,
            resume=step > 0,
            config=replace(whole.config, run=run),
        )

        def train(comm, job=job, until=until):
            trainer = Trainer(job, comm)
            trainer.run(lambda: trainer.step + 1 >= until)

        run_threads(plan.schedule.ranks, train)
        losses += [row.loss for row in read_rows(stage) if row.step > step]
    return losses


@pytest.fixture
def text(tmp_path):
    """Return a folder with some text and a config for two copies of a pipeline."""
    lines = [f"the {n % 7} cats sat on {n % 5} mats\n" for n in range(3000)]
    (tmp_path / "text.txt").write_text("".join(lines))
    config = SMALL_CONFIG.replace("[data]", '[data]\nsources = ["text.txt"]')
    config = config.replace('"hanayo"', '"1f1b"').replace(
        "[parallel]", "[parallel]\ndp_replicate = 2"
    )
    config = config.replace("microbatches = 4", "microbatches = 2")
    (tmp_path / "config.toml").write_text(config)
    return tmp_path


def test_rank_0_is_killed_and_replaced_and_another_worker_stopped_and_no_loss_differs(
    text,
):
    words = (
        f"train config.toml --set run.steps={STEPS} --set run.timeout=6000 "
        "--set elastic.restarts=1 --set run.save_every=50"
    )
    process = Command(text, words.split(), environment())
    folder = text / "runs" / "config"
    wait_for(folder, 4)
    survivor = int((folder / "ranks" / "1.pid").read_text())
    signal_worker(folder, 0, signal.SIGKILL)
    wait_for_events(process, folder, 2)
    wait_for(folder, read_events(folder)[-1].step + 2)
    signal_worker(folder, 3, signal.SIGSTOP)
    wait_for_events(process, folder, 3)
    wait_for(folder, read_events(folder)[-1].step + 2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 130, err
    assert re.search(r"event +worker 0 was killed by SIGKILL; 3 workers go on", err)
    assert re.search(r"event +worker 0 has joined; 4 workers go on", err)
    assert re.search(r"event +worker 3 was stopped \(SIGSTOP\), so it was ended", err)
    events = read_events(folder)
    assert [len(event.members) for event in events] == [3, 4, 3]
    assert "worker 3 was stopped (SIGSTOP), so it was ended; 3 workers went on" in out
    assert int((folder / "ranks" / "1.pid").read_text()) == survivor
    rows = read_rows(folder)
    assert [row.step for row in rows] == list(range(1, len(rows) + 1))
    lost, joined, stopped = (event.step for event in events)
    crews = [(0, (0, 1, 2, 3)), (lost, (1, 2, 3)), (joined, (0, 1, 2, 3))]
    crews.append((stopped, (0, 1, 2)))
    assert [row.loss for row in rows] == undisturbed(
        folder, text / "quiet", crews, len(rows)
    )


def test_a_worker_that_held_its_part_alone_is_killed_and_its_mirror_goes_on(text):
    words = (
        f"train config.toml --set run.steps={STEPS} --set run.timeout=6000 "
        "--set elastic.mode=on --set elastic.restarts=0 --set run.save_every=0 "
        "--set parallel.dp_replicate=1 --set run.checks=gradients,memory"
    )
    process = Command(text, words.split(), environment())
    folder = text / "runs" / "config"
    wait_for(folder, 3)
    signal_worker(folder, 1, signal.SIGKILL)
    wait_for_events(process, folder, 1)
    wait_for(folder, read_events(folder)[-1].step + 2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 130, err
    assert re.search(
        r"worker 1 was killed by SIGKILL; worker 0 has part 1 from its mirror; "
        r"1 workers go on after step \d+",
        err,
    )
    rows = read_rows(folder)
    (event,) = read_events(folder)
    crews = [(0, (0, 1)), (event.step, (0,))]
    assert [row.loss for row in rows] == undisturbed(
        folder, text / "quiet", crews, len(rows)
    )
    assert "in-memory replicas" in (folder / "report.html").read_text()


def test_a_worker_that_becomes_slow_gets_less_work_until_it_is_fast_again(text):
    words = (
        f"train config.toml --set run.steps={STEPS} --set run.timeout=6000 "
        "--set elastic.mode=auto:slow=4 --set run.save_every=0 --set run.checks=gradients,memory"
    )
    script = Path(__file__).parents[1] / "slow_worker.py"
    process = Command(text, words.split(), environment(), script=script)
    folder = text / "runs" / "config"
    while len(read_rows(folder)) < 20:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    (folder / SLOW_FILE).touch()
    wait_for_events(process, folder, 1)
    (folder / SLOW_FILE).unlink()
    wait_for_events(process, folder, 2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 130, err
    slow, fast = read_events(folder)[:2]
    assert (slow.event, len(slow.members), fast.event) == ("pace", 4, "pace")
    assert re.match(r"worker 1 takes [\d.]+ times as long", slow.text)
    assert fast.text.startswith("worker 1 ")
    rows = read_rows(folder)
    assert [row.step for row in rows] == list(range(1, len(rows) + 1))
    assert json.loads((folder / "plan.json").read_text())["name"].endswith("copies=2")
