"""Kills workers of a run at random moments, and compares going on without them with restarts from the checkpoint.

    python benchmarks/churn.py                          two cores, 25 minutes; writes docs/results/churn.md
    python benchmarks/churn.py --between 10 --rounds 1 --output /tmp/churn.md

All runs train the same model on the same data with six workers, and are stopped after a fixed time. For each mean time
between two kills there are several rounds. In each round one run goes on without lost workers and replaces them
(elastic.mode = on), and one restarts all workers from the last checkpoint (elastic.mode = off), with the same kills
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

from tables import middle_and_range

from penstock.train.history import read_events, read_rows

WORKERS = 6
SETTINGS = (
    *(
        "model.layers=6",
        "model.hidden_size=64",
        "model.heads=4",
        "model.intermediate_size=128",
    ),
    *("data.seq_len=64", "data.global_batch=12", "schedule.name=1f1b", "parallel.pp=2"),
    *(
        "parallel.dp_replicate=3",
        "schedule.microbatches=2",
        "run.eval_every=0",
    ),
    *("run.device=cpu", "run.checks=memory"),
    *(
        "run.save_every=20",
        "elastic.restarts=1000",
        "run.log_every=100",
        "run.steps=1000000",
    ),
)
SECONDS = {10.0: 40.0, 30.0: 60.0, 90.0: 90.0}  # of a run, by the mean between kills
QUIET_SECONDS = 30.0
BEGIN = "<!-- churn -->"
END = "<!-- /churn -->"
LONGEST_STOP = 120.0  # seconds that a run may take to stop
PAGE = Path(__file__).parents[1] / "docs" / "results" / "churn.md"


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


@dataclass(frozen=True, slots=True)
class Round:
    """A run with kills, and the quiet run beside it."""

    run: Outcome
    quiet: Outcome

    @property
    def share_in_steps(self) -> float:
        """The share of the time that went into steps that count."""
        return self.run.working / self.run.seconds

    @property
    def share_of_quiet(self) -> float:
        """The steps that were done, compared with a quiet run."""
        return self.run.speed / self.quiet.speed

    @property
    def cost_of_kill(self) -> float:
        """The seconds of quiet training that one kill has cost."""
        return self.run.seconds * (1 - self.share_of_quiet) / self.run.kills

    @property
    def apart(self) -> float:
        """How far the losses are from those of the quiet run."""
        pairs = zip(self.run.losses, self.quiet.losses, strict=False)
        return max((abs(a - b) for a, b in pairs), default=0.0)


def train(
    folder: Path, elastic: bool, seconds: float, moments: Sequence[float], seed: int
) -> Outcome:
    """Run `penstock train` for a while, and kill a random worker at each of these moments."""
    words = [
        *SETTINGS,
        f"run.folder={folder}",
        f"elastic.mode={'on' if elastic else 'off'}",
    ]
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
            kill_worker(folder, draw.randrange(WORKERS))
        time.sleep(max(0.0, began + seconds - time.monotonic()))
        passed = time.monotonic() - began
        done = read_rows(folder)
        process.send_signal(signal.SIGINT)
        try:
            process.wait(LONGEST_STOP)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.returncode != 0:
        print(log_file.read_text()[-2000:], file=sys.stderr)
    steps = [row.step for row in read_rows(folder)]
    return Outcome(
        len(moments),
        process.returncode == 0,
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


def measure(
    folder: Path, means: Sequence[float], rounds: int, seed: int
) -> dict[tuple[float, bool], list[Round]]:
    """Train in all rounds; return them by the mean between kills, and whether the run was elastic."""
    found: dict[tuple[float, bool], list[Round]] = {}
    for number in range(rounds):
        place = folder / str(number)
        place.mkdir()
        quiet = train(place / "quiet", True, QUIET_SECONDS, (), seed)
        for mean in means:
            seconds = SECONDS.get(mean, 2 * mean)
            draw = random.Random(f"{seed} {number} {mean}")
            kills = max(1, round(seconds / mean))
            moments = sorted(draw.uniform(0.0, seconds) for _ in range(kills))
            for elastic in (True, False):
                name = f"{'elastic' if elastic else 'restarts'}-{mean:g}"
                run = train(place / name, elastic, seconds, moments, number)
                one = Round(run, quiet)
                print(
                    f"round {number}  {name:12}  {one.share_in_steps:.0%} in steps, "
                    f"{one.share_of_quiet:.0%} of quiet, {one.cost_of_kill:.1f} s a kill",
                    flush=True,
                )
                found.setdefault((mean, elastic), []).append(one)
    return found


def row_of(mean: float, elastic: bool, rounds: Sequence[Round]) -> str:
    """A line of the table."""
    idle = [one.run.idle / one.run.kills for one in rounds if one.run.idle is not None]
    cells = [
        f"{mean:g} s",
        "elastic" if elastic else "restarts",
        f"{len(rounds)} x {rounds[0].run.kills} in {rounds[0].run.seconds:.0f} s",
        middle_and_range([one.share_in_steps for one in rounds], ".0%"),
        middle_and_range([one.share_of_quiet for one in rounds], ".0%"),
        middle_and_range([one.cost_of_kill for one in rounds], ".1f", " s"),
        middle_and_range(idle, ".2f", " s") if idle else "-",
        "yes" if all(one.run.ended and one.run.once for one in rounds) else "no",
        f"{max(one.apart for one in rounds):.1e}",
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Measure, print the table, and write it into the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--between",
        type=float,
        nargs="+",
        default=list(SECONDS),
        help="mean seconds between two kills",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=PAGE)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        found = measure(Path(name), options.between, options.rounds, options.seed)
    heads = (
        "between kills | run | rounds x kills | time in steps | steps, of quiet | "
        "cost of a kill | without training, for each kill | each step once | loss apart"
    )
    lines = [f"| {heads} |", "|" + " --- |" * 9]
    lines += [row_of(*key, rounds) for key, rounds in found.items()]
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
