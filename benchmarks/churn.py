"""Kills workers of a run at random moments, and compares going on without them with restarts from the checkpoint.

    python benchmarks/churn.py                          half an hour; writes docs/results/churn.md
    python benchmarks/churn.py --between 10 --seconds 60 --output /tmp/churn.md

All runs train the same model on the same data with six workers, and are stopped after a fixed time. Nobody disturbs the
quiet run, which comes first and once more at the end, because other programs may use the machine. Then, for each mean
time between two kills, one run goes on without lost workers and replaces them (run.elastic = true), and one restarts
all workers from the last checkpoint (run.elastic = false). Kills come at random moments with this mean, the same for
both. With --stop, every other signal of the elastic run is SIGSTOP. A signal may hit a worker that is already dead.

The table has the steps per second from the first step to the end, the share of that time that went into steps that
count (a restart repeats steps, and these count once), whether every step was done exactly once, and how far the losses
are from those of the quiet run. Until the first loss they have the same bits; after it, sums are
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
from collections.abc import Sequence
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
    *("run.save=20", "run.restarts=1000", "run.log=100", "run.steps=1000000"),
)
BEGIN = "<!-- churn -->"
END = "<!-- /churn -->"
LONGEST_STOP = 120.0  # seconds that a run may take to stop
PAGE = Path(__file__).parents[1] / "docs" / "results" / "churn.md"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run did."""

    name: str
    between: float | None  # mean seconds between two kills; None in a quiet run
    signals: int
    noticed: int | None  # losses in its list of events; None if it keeps none
    idle: float | None  # seconds without training, by its list of events
    ended: bool  # whether it stopped in peace
    once: bool  # whether every step was done exactly once
    losses: tuple[float, ...]
    working: float  # seconds of the steps that count
    seconds: float

    @property
    def speed(self) -> float:
        """Steps per second."""
        return len(self.losses) / self.seconds


def train(
    name: str, between: float | None, folder: Path, options: argparse.Namespace
) -> Outcome:
    """Run `penstock train` for a while, and send signals to its workers."""
    run = folder / f"{name}-{between}"
    elastic = name != "restarts"
    words = [*SETTINGS, f"run.folder={run}", f"run.elastic={str(elastic).lower()}"]
    changes = [word for one in words for word in ("--set", one)]
    command = [sys.executable, "-m", "penstock", "train", "--sample", "0", *changes]
    draw = random.Random(options.seed)
    log_file = folder / f"{run.name}.log"
    with log_file.open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        while process.poll() is None and not read_rows(run):
            time.sleep(0.1)
        began = time.monotonic()
        end = began + options.seconds * (2 if between and between > 60 else 1)
        due = began + draw.expovariate(1 / between) if between else end
        signals = 0
        while process.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
            if between and time.monotonic() > due:
                stop = options.stop and elastic and signals % 2 == 1
                number = signal.SIGSTOP if stop else signal.SIGKILL
                signals += send(run, draw.randrange(WORKERS), number)
                due += draw.expovariate(1 / between)
        seconds = time.monotonic() - began
        done = read_rows(run)
        process.send_signal(signal.SIGINT)
        try:
            process.wait(LONGEST_STOP)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    ended = process.returncode == 0
    if not ended:
        print(log_file.read_text()[-2000:], file=sys.stderr)
    rows = read_rows(run)
    noticed = idle = None
    if elastic:
        lost = [event for event in read_events(run) if event.event == "lost"]
        words = [event.text for event in lost]
        # A worker that has come, or that has got a part, is not lost.
        noticed = sum(
            text.count("worker ") - text.count(" has joined") - text.count(" has part ")
            for text in words
        )
        idle = sum(event.seconds for event in read_events(run))
    once = [row.step for row in rows] == list(range(1, len(rows) + 1))
    losses = tuple(row.loss for row in done)
    working = sum(row.seconds for row in done)
    return Outcome(
        name, between, signals, noticed, idle, ended, once, losses, working, seconds
    )


def send(run: Path, worker: int, number: int) -> int:
    """Send a signal to a worker; return how many it reached."""
    with suppress(OSError, ValueError):
        os.kill(int((run / "ranks" / f"{worker}.pid").read_text()), number)
        return 1
    return 0


def row_of(one: Outcome, quiet: Sequence[Outcome]) -> str:
    """A line of the table."""
    pairs = zip(one.losses, quiet[0].losses, strict=False)
    apart = max((abs(a - b) for a, b in pairs), default=0.0)
    reference = sum(run.speed for run in quiet) / len(quiet)
    cells = [
        one.name,
        "-" if one.between is None else f"{one.between:g} s",
        f"{one.seconds:.0f} s",
        str(one.signals),
        "-" if one.noticed is None else str(one.noticed),
        "-" if one.idle is None else f"{one.idle:.1f} s",
        "yes" if one.ended else "no",
        "yes" if one.once else "no",
        f"{apart:.1e}",
        f"{one.working / one.seconds:.0%}",
        f"{one.speed:.2f}",
        f"{one.speed / reference:.0%}",
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Measure, print the table, and write it into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--between", type=float, nargs="+", default=[10.0, 30.0, 120.0], help="means"
    )
    parser.add_argument(
        "--seconds", type=float, default=180.0, help="of a run; twice from 60 s between"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stop", action="store_true", help="also SIGSTOP")
    parser.add_argument("--output", type=Path, default=PAGE)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = [train("quiet", None, folder, options)]
        for between in options.between:
            runs.append(train("elastic", between, folder, options))
            runs.append(train("restarts", between, folder, options))
        (folder / "again").mkdir()
        runs.append(train("quiet", None, folder / "again", options))
    heads = (
        "run | between kills | time | signals | losses noticed | without training | "
        "stopped in peace | each step once | loss apart | time in steps | steps/s | "
        "of quiet"
    )
    lines = [f"| {heads} |", "|" + " --- |" * 12]
    quiet = [run for run in runs if run.between is None]
    lines += [row_of(one, quiet) for one in runs]
    table = "\n".join(lines)
    print(table)
    write_table(options.output, table)


def write_table(page: Path, table: str) -> None:
    """Put the table between its marks in the page, or write a page with the table alone."""
    block = f"{BEGIN}\n{table}\n{END}"
    text = page.read_text(encoding="utf-8") if page.is_file() else block
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{block}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
