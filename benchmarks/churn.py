"""Kills workers of a run at random moments, and compares going on without them with restarts from the checkpoint.

    python benchmarks/churn.py                          two cores, 25 minutes: the table of docs/results/churn.md
    python benchmarks/churn.py --between 10 --rounds 1  fewer; writes no page
    python benchmarks/churn.py --quick                  one kill in a short run of two workers; writes nothing

All runs train the same model on the same data with six workers, and are stopped after a fixed time. For each mean time
between two kills there are several rounds. In each round one run goes on without lost workers and replaces them
(run.elastic = true), and one restarts all workers from the last checkpoint (run.elastic = false), with the same kills
at the same moments: as many as the mean says, at random moments of the run. Each round also has a quiet run. A signal
may hit a worker that is already dead.

The table has, as the median of the rounds with the smallest and the largest: the share of a run's time that went into
steps that count (a restart repeats steps, and these count once), the steps of the run compared with the quiet run of
the round in the same time, and the seconds of quiet training that one kill costs. Every run must do every step exactly
once. Until the first loss, losses have the same bits as in the quiet run; after it, sums are added in another order,
and the difference grows with the steps.
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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from harness import Found, Row, Script, extremes, numbers, say, table

from penstock.train.history import read_events, read_rows

WORKERS, QUICK_WORKERS = 6, 2
SETTINGS = (
    *(
        "model.layers=6",
        "model.hidden_size=64",
        "model.heads=4",
        "model.intermediate_size=128",
    ),
    *("data.seq_len=64", "data.global_batch=12", "schedule.name=1f1b"),
    *("schedule.microbatches=2", "run.eval_every=0"),
    *("run.device=cpu", "run.checks=memory"),
    *(
        "run.save_every=20",
        "elastic.restarts=1000",
        "run.log_every=100",
        "run.steps=1000000",
    ),
)
SHAPES = {
    WORKERS: ("parallel.pp=2", "parallel.dp_replicate=3"),
    QUICK_WORKERS: ("parallel.pp=1", "parallel.dp_replicate=2"),
}
SECONDS = {10: 40.0, 30: 60.0, 90: 90.0}  # of a run, by the mean between kills
BETWEEN = tuple(SECONDS)
QUIET_SECONDS, QUICK_SECONDS = 30.0, 4.0
INTERRUPTED = 130  # the exit code of a run that was stopped in peace
LONGEST_STOP = 120.0  # seconds that a run may take to stop


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run did."""

    kills: int
    ended: bool  # whether it stopped in peace
    once: bool  # whether every step was done exactly once
    losses: tuple[float, ...]
    working: float  # seconds of the steps that count
    seconds: float
    idle: float | None  # seconds without training, by its list of events

    @property
    def speed(self) -> float:
        """Steps per second."""
        return len(self.losses) / self.seconds


def train(
    folder: Path,
    workers: int,
    elastic: bool,
    seconds: float,
    moments: Sequence[float],
    seed: int,
) -> Outcome:
    """Run `penstock train` for a while, and kill a random worker at each of these moments."""
    words = [*SETTINGS, *SHAPES[workers], f"run.folder={folder}"]
    words.append(f"elastic.mode={'on' if elastic else 'off'}")
    changes = [word for one in words for word in ("--set", one)]
    command = [sys.executable, "-m", "penstock", "train", *changes]
    draw = random.Random(seed)
    log_file = folder.with_suffix(".log")
    with log_file.open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        while process.poll() is None and not read_rows(folder):
            time.sleep(0.1)
        began = time.monotonic()
        for moment in moments:
            time.sleep(max(0.0, began + moment - time.monotonic()))
            kill_worker(folder, draw.randrange(workers))
        time.sleep(max(0.0, began + seconds - time.monotonic()))
        passed = time.monotonic() - began
        done = read_rows(folder)
        process.send_signal(signal.SIGINT)
        try:
            process.wait(LONGEST_STOP)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    ended = process.returncode in (0, INTERRUPTED)
    if not ended:
        say(log_file.read_text()[-2000:])
    steps = [row.step for row in read_rows(folder)]
    return Outcome(
        len(moments),
        ended,
        steps == list(range(1, len(steps) + 1)),
        tuple(row.loss for row in done),
        sum(row.seconds for row in done),
        passed,
        sum(event.seconds for event in read_events(folder)) if elastic else None,
    )


def kill_worker(run: Path, worker: int) -> None:
    """Kill a worker, if it lives."""
    with suppress(OSError, ValueError):
        pid = int((run / "ranks" / f"{worker}.pid").read_text())
        os.kill(pid, signal.SIGKILL)


def run_round(folder: Path, number: int, given: argparse.Namespace) -> list[Row]:
    """Train once without kills, and for each mean time between kills in both ways."""
    workers = QUICK_WORKERS if given.quick else WORKERS
    quiet_seconds = QUICK_SECONDS if given.quick else QUIET_SECONDS
    quiet = train(folder / "quiet", workers, True, quiet_seconds, (), given.seed)
    rows = []
    for mean in given.between:
        seconds = SECONDS.get(mean, 2 * mean)
        draw = random.Random(f"{given.seed} {number} {mean}")
        kills = max(1, round(seconds / mean))
        moments = sorted(draw.uniform(0.0, seconds) for _ in range(kills))
        for elastic in (True, False):
            name = f"{'elastic' if elastic else 'restarts'}-{mean:g}"
            run = train(folder / name, workers, elastic, seconds, moments, number)
            row = compared(run, quiet) | {"mean": mean, "elastic": elastic}
            shares = (
                f"{row['share_in_steps']:.0%} in steps, {row['share']:.0%} of quiet"
            )
            say(f"round {number}  {name:12}  {shares}, {row['cost']:.1f} s a kill")
            rows.append(row)
    return rows


def compared(run: Outcome, quiet: Outcome) -> Row:
    """A run with kills beside the quiet run of its round."""
    share = run.speed / quiet.speed
    pairs = zip(run.losses, quiet.losses, strict=False)
    return {
        "kills": run.kills,
        "seconds": run.seconds,
        "share_in_steps": run.working / run.seconds,
        "share": share,
        "cost": run.seconds * (1 - share) / run.kills,  # of quiet training, in seconds
        "idle": None if run.idle is None else run.idle / run.kills,
        "right": run.ended and run.once,
        "apart": max((abs(a - b) for a, b in pairs), default=0.0),
    }


# ---------------------------------------------------------------- the script
def options(parser: argparse.ArgumentParser) -> None:
    flag = parser.add_argument
    flag("--between", type=numbers, default=BETWEEN, help="mean seconds between kills")
    flag("--rounds", type=int, default=3)
    flag("--seed", type=int, default=0)


def measure(given: argparse.Namespace) -> Found:
    rows: list[Row] = []
    if given.quick:
        given.between, given.rounds = (QUICK_SECONDS,), 1
    with tempfile.TemporaryDirectory() as name:
        for number in range(given.rounds):
            folder = Path(name) / str(number)
            folder.mkdir()
            rows += run_round(folder, number, given)
    return {"rows": rows}


def tables(found: Found) -> dict[str, str]:
    groups: dict[tuple[float, bool], list[Row]] = {}
    for row in found["rows"]:
        groups.setdefault((row["mean"], row["elastic"]), []).append(row)
    rows = []
    for some in groups.values():
        merged = {
            key: extremes([row[key] for row in some])
            for key in ("share_in_steps", "share", "cost", "idle")
            if some[0][key] is not None
        }
        merged |= {"right": all(row["right"] for row in some), "rounds": len(some)}
        rows.append({**some[0], **merged, "apart": max(row["apart"] for row in some)})
    columns = {
        "between kills, s": "{mean}",
        "run": lambda row: "elastic" if row["elastic"] else "restarts",
        "rounds x kills": "{rounds} x {kills} in {seconds:.0f} s",
        "time in steps": "{share_in_steps:.0%}",
        "steps, of quiet": "{share:.0%}",
        "cost of a kill, s": "{cost:.1f}",
        "without training, s per kill": "{idle:.2f}",
        "each step once": "{right}",
        "loss apart": "{apart:.1e}",
    }
    return {"churn": table(rows, columns)}


if __name__ == "__main__":
    Script(__doc__, measure, tables, options=options).main()
