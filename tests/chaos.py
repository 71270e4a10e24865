"""Trains with twelve workers, some of which are killed, stopped, slowed or cut off, and compares with a quiet run.

    python tests/chaos.py --steps 300 --seed 0      three ranks in four copies, with rotating partial paths
    make chaos STEPS=300 SEED=0

Every second on average, at a random moment, something happens to a random worker:

    kill    SIGKILL; the launcher starts another worker in its place, which joins
    stop    SIGSTOP; the launcher ends it after a second
    slow    a burst of SIGSTOP and SIGCONT, so that it runs a third of the time
    cut     one of its connections to another worker is shut down

The script fails if the run does not end, if a step is lost or done twice, or if a loss differs from that of the quiet
run, which has the same data and paths, by more than sums in another order explain.

It also fails if the speed does not follow the workers that are present. A part with three of its four workers can do
three quarters of its work in the same time, and other parts may have less to do. So every event has a limit: the
speed that no plan for these workers can exceed. The speed of the plan, by its simulation, must be at least LEAST_SPEED
of this limit. A busy machine changes neither. The script prints what it has tried, and beside the planned speeds those
that were measured, which depend on the machine.

The launcher replaces the first RESTARTS workers that are lost. After that, workers move to parts that have too few.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median

from penstock.train.history import Event, StepRow, read_events, read_rows

RANKS = 3  # of one copy of the pipeline
COPIES = 4
WORKERS = RANKS * COPIES
# Lost workers that the launcher replaces. A run of 300 steps loses about 30.
RESTARTS = 20
FEWEST_WORKERS = 7  # of which none is killed or stopped any more
SETTINGS = (
    *(
        "model.layers=3",
        "model.hidden_size=32",
        "model.heads=4",
        "model.intermediate_size=64",
    ),
    *("data.seq_len=32", "data.global_batch=24", "optimizer.lr=3e-4"),
    *("schedule.name=skip", f"parallel.pp={RANKS}", f"parallel.dp_replicate={COPIES}"),
    *("schedule.microbatches=3", "schedule.name=skip:share=0.33,rotate=4,full=10"),
    *("run.device=cpu", "run.checks=memory"),
    *(
        "elastic.mode=on:slow=3",
        f"elastic.restarts={RESTARTS}",
        "run.timeout=1200",
    ),
    *("run.eval_every=0", "run.save_every=25", "run.log_every=25"),
)
# Losses differ because sums over replicas are added in another order, and a little more
# with every step.
TOLERANCE = 1e-4
# The smallest speed of a plan, compared with its limit.
LEAST_SPEED = 0.85
PIDFD_OPEN, PIDFD_GETFD = 434, 438  # system calls of Linux
BURST_SECONDS = 1.5  # how long a worker is slow
TCP_ESTABLISHED = "01"  # in /proc/net/tcp


def start(folder: Path, name: str, steps: int) -> subprocess.Popen:
    """Start `penstock train` with its output in a file."""
    words = [*SETTINGS, f"run.folder={folder / name}", f"run.steps={steps}"]
    changes = [word for one in words for word in ("--set", one)]
    command = [sys.executable, "-m", "penstock", "train", *changes]
    with (folder / f"{name}.log").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


# ---------------------------------------------------------------- what happens to workers
def kill(pid: int, draw: random.Random) -> None:
    """End a worker."""
    os.kill(pid, signal.SIGKILL)


def stop(pid: int, draw: random.Random) -> None:
    """Stop a worker for good."""
    os.kill(pid, signal.SIGSTOP)


def slow(pid: int, draw: random.Random) -> None:
    """Let a worker run only a third of the time for a while."""
    end = time.monotonic() + BURST_SECONDS
    while time.monotonic() < end:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.1)
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.05)


def cut(pid: int, draw: random.Random) -> None:
    """Shut down one of a worker's connections to other workers."""
    library = ctypes.CDLL(None, use_errno=True)
    process = library.syscall(PIDFD_OPEN, pid, 0)
    if process < 0:
        raise OSError(ctypes.get_errno(), "cannot open a process")
    try:
        numbers = worker_sockets(pid)
        if not numbers:
            raise ProcessLookupError("it has no connections")
        copy = library.syscall(PIDFD_GETFD, process, draw.choice(numbers), 0)
        if copy < 0:
            raise OSError(ctypes.get_errno(), "cannot take a connection")
        with socket.socket(fileno=copy) as connection:
            connection.shutdown(socket.SHUT_RDWR)
    finally:
        os.close(process)


def worker_sockets(pid: int) -> list[int]:
    """The connections of a worker to other workers, by file descriptor; not those to the launcher's store."""
    ours = connections(pid)
    server = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    launcher = int(
        Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()[1]
    )
    stores = {near for near, _ in connections(launcher).values()}
    return [number for number, (_, far) in ours.items() if far not in stores]


def connections(pid: int) -> dict[int, tuple[str, str]]:
    """The TCP connections of a process: file descriptor, near and far end."""
    ends = {}
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == TCP_ESTABLISHED:
            ends[f"socket:[{words[9]}]"] = (words[1], words[2])
    found = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            target = os.readlink(entry)
            if target in ends:
                found[int(entry.name)] = ends[target]
    return found


DEEDS: dict[str, Callable[[int, random.Random], None]] = {
    "kill": kill,
    "stop": stop,
    "slow": slow,
    "cut": cut,
}


FATAL_DEEDS = ("kill", "stop")


def workers_left(run: Path) -> int:
    """The workers after the last event."""
    events = read_events(run)
    return len(events[-1].members) if events else WORKERS


def disturb(
    process: subprocess.Popen, run: Path, between: float, draw: random.Random
) -> Counter[str]:
    """Let something happen to workers, again and again, until the run ends."""
    done: Counter[str] = Counter()
    while process.poll() is None:
        wait = min(draw.expovariate(1 / between), 4 * between)
        with suppress(subprocess.TimeoutExpired):
            process.wait(wait)
            break
        name = draw.choice(list(DEEDS))
        worker = draw.randrange(WORKERS)
        if name in FATAL_DEEDS and workers_left(run) <= FEWEST_WORKERS:
            continue
        try:
            pid = int((run / "ranks" / f"{worker}.pid").read_text())
            DEEDS[name](pid, draw)
            done[name] += 1
        except (OSError, ValueError, IndexError):
            done[f"{name} too late"] += 1  # The worker had ended already.
    return done


# ---------------------------------------------------------------- the speed that is left
def slow_events(events: Sequence[Event]) -> list[str]:
    """The events after which the plan is slower than its workers allow. Replanning around slow ones does not count."""
    found = []
    for event in events:
        least = LEAST_SPEED * event.limit
        if event.event != "pace" and event.speed < least:
            found.append(
                f"after step {event.step}, {len(event.members)} workers are planned at "
                f"{event.speed:.0%} of the full speed, not {least:.0%}: {event.text}"
            )
    return found


def speeds_by_workers(
    events: Sequence[Event], rows: Sequence[StepRow]
) -> Iterator[str]:
    """A line for each number of workers: planned speeds, and steps per second that were measured."""
    planned: dict[int, list[float]] = {WORKERS: [1.0]}
    limits: dict[int, list[float]] = {WORKERS: [1.0]}
    measured: dict[int, list[float]] = {}
    for event in events:
        planned.setdefault(len(event.members), []).append(event.speed)
        limits.setdefault(len(event.members), []).append(event.limit)
    changes = [(event.step, len(event.members)) for event in events]
    for row in rows:
        present = [workers for step, workers in changes if step < row.step]
        workers = present[-1] if present else WORKERS
        measured.setdefault(workers, []).append(1 / row.seconds)
    for workers in sorted(planned, reverse=True):
        speeds = planned[workers]
        shares = [a / b for a, b in zip(speeds, limits[workers], strict=True)]
        line = (
            f"{workers} workers: planned {min(speeds):.0%} to {max(speeds):.0%} of the full speed, "
            f"which is {min(shares):.0%} or more of the limit"
        )
        if workers in measured:
            line += f", {median(measured[workers]):.1f} steps/s in {len(measured[workers])} steps"
        yield line


def main() -> None:
    """Train twice, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--between", type=float, default=1.0, help="mean seconds")
    parser.add_argument("--folder", type=Path, help="keeps the runs there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = options.folder or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        quiet = start(folder, "quiet", options.steps)
        quiet.wait()
        process = start(folder, "chaos", options.steps)
        run = folder / "chaos"
        while process.poll() is None and not read_rows(run):
            time.sleep(0.1)
        began = time.monotonic()
        draw = random.Random(options.seed)
        done = disturb(process, run, options.between, draw)
        seconds = time.monotonic() - began
        expected = [row.loss for row in read_rows(folder / "quiet")]
        rows = read_rows(run)
        events = read_events(run)
        kinds = Counter(event.event for event in events)
        print(f"seed {options.seed}: {len(rows)} steps in {seconds:.0f} s")
        print(
            "  tried   ", ", ".join(f"{n} {name}" for name, n in sorted(done.items()))
        )
        print("  events  ", ", ".join(f"{n} {name}" for name, n in kinds.items()))
        for line in speeds_by_workers(events, rows):
            print("  speed   ", line)
        if process.returncode != 0 or quiet.returncode != 0:
            failed = "chaos" if process.returncode else "quiet"
            print((folder / f"{failed}.log").read_text()[-3000:])
            raise SystemExit(f"the {failed} run did not end in peace")
        faults = slow_events(events)
    if [row.step for row in rows] != list(range(1, options.steps + 1)):
        raise SystemExit("a step was lost or done twice")
    apart = max(
        abs(row.loss - loss) / loss for row, loss in zip(rows, expected, strict=True)
    )
    print(f"  losses   at most {apart:.1e} from the quiet run")
    missing = [name for name in DEEDS if not done[name]]
    missing += [name for name in ("lost", "joined") if not kinds[name]]
    if missing:
        raise SystemExit(
            f"these never happened, which proves nothing: {', '.join(missing)}; try more steps"
        )
    if faults:
        raise SystemExit("\n".join(faults))
    if apart > TOLERANCE:
        raise SystemExit(f"a loss is {apart:.1e} from that of the quiet run")


if __name__ == "__main__":
    main()
