"""Kills workers of a run at random moments, and compares going on without them with restarts from the checkpoint.

    python benchmarks/churn.py                      300 steps of a small Llama on six workers: some minutes
    python benchmarks/churn.py --steps 3000 --between 10 --seed 7

Three runs have the same data. One has no kills; one goes on without lost workers and replaces them (run.elastic =
true); one restarts all workers from the last checkpoint (run.elastic = false). With --stop, every other signal of the
elastic run is SIGSTOP. The table has the signals that were sent, the losses that the run has noticed, whether every
step was done exactly once, how far the losses are from those of the quiet run, and the speed over all. A signal may hit
a worker that is already dead. Until the first loss, the losses have the bits of the quiet run; after it, sums are
added in another order, and the difference grows with the steps.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.train.crew.events import read_events
from penstock.train.history import read_rows

WORKERS = 6
SETTINGS = (
    *("model.layers=6", "model.width=64", "model.heads=4", "model.inner=128"),
    *("data.tokens=64", "data.batch=12", "schedule.name=1f1b", "schedule.ranks=2"),
    *("schedule.copies=3", "schedule.microbatches=2", "run.evaluate=0", "run.timed=0"),
    *("run.device=cpu", "run.threads=1", "run.forecast=false", "run.prove=false"),
    *("run.save=20", "run.restarts=1000", "run.log=100"),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run did."""

    name: str
    signals: int
    noticed: int | None  # losses in its list of events; None if it keeps none
    ended: bool
    once: bool  # whether every step was done exactly once
    losses: tuple[float, ...]
    seconds: float


def train(
    name: str, folder: Path, options: argparse.Namespace, elastic: str, disturb: bool
) -> Outcome:
    """Run `penstock train`, and send signals to its workers until it ends."""
    run = folder / name
    words = [f"run.steps={options.steps}", f"run.folder={run}", *SETTINGS]
    changes = [
        word for one in (*words, f"run.elastic={elastic}") for word in ("--set", one)
    ]
    command = [sys.executable, "-m", "penstock", "train", "--sample", "0", *changes]
    draw = random.Random(options.seed)
    begin = time.monotonic()
    with (folder / f"{name}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        while process.poll() is None and not read_rows(run):
            time.sleep(0.1)
        began = time.monotonic()
        due = began + draw.expovariate(1 / options.between)
        signals = 0
        while process.poll() is None:
            time.sleep(0.05)
            if disturb and time.monotonic() > due:
                stop = options.stop and elastic == "true" and signals % 2 == 1
                number = signal.SIGSTOP if stop else signal.SIGKILL
                signals += send(run, draw.randrange(WORKERS), number)
                due = time.monotonic() + draw.expovariate(1 / options.between)
            if time.monotonic() - begin > options.limit:
                process.send_signal(signal.SIGTERM)
                process.wait()
    seconds = time.monotonic() - began
    rows = read_rows(run)
    noticed = None
    if elastic == "true":
        noticed = sum(event.text.count("worker ") for event in lost_events(run))
    once = [row.step for row in rows] == list(range(1, options.steps + 1))
    losses = tuple(row.loss for row in rows)
    ended = process.returncode == 0
    return Outcome(name, signals, noticed, ended, once, losses, seconds)


def lost_events(run: Path) -> list:
    """The events of a run in which workers were lost."""
    return [event for event in read_events(run) if event.event == "lost"]


def send(run: Path, worker: int, number: int) -> int:
    """Send a signal to a worker; return how many it reached."""
    with suppress(OSError, ValueError):
        os.kill(int((run / "ranks" / f"{worker}.pid").read_text()), number)
        return 1
    return 0


def row_of(one: Outcome, quiet: Outcome, steps: int) -> str:
    """A line of the table."""
    pairs = zip(one.losses, quiet.losses, strict=False)
    apart = max((abs(a - b) for a, b in pairs), default=0.0)
    noticed = "-" if one.noticed is None else str(one.noticed)
    speed = steps / one.seconds if one.ended else 0.0
    cells = [
        *(one.name, str(one.signals), noticed, "yes" if one.ended else "no"),
        *("yes" if one.once else "no", f"{apart:.1e}", f"{speed:.2f}"),
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--between", type=float, default=10.0, help="mean seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stop", action="store_true", help="also SIGSTOP")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds of a run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = (
            train("quiet", folder, options, "true", disturb=False),
            train("elastic", folder, options, "true", disturb=True),
            train("restarts", folder, options, "false", disturb=True),
        )
    heads = (
        "run | signals | losses noticed | ended | each step once | loss apart | steps/s"
    )
    print(f"| {heads} |\n|{' --- |' * 7}")
    for one in runs:
        print(row_of(one, runs[0], options.steps))


if __name__ == "__main__":
    main()
