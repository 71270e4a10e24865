"""Measures how building, checking and simulating grow from ten thousand to ten million actions.

    python benchmarks/scale.py            all sizes, writes docs/results/scale.md (a few minutes, 5 GB)
    python benchmarks/scale.py --quick    up to a million actions, in under a minute, writes nothing
    python benchmarks/scale.py --json     one JSON object to stdout

The schedule is 1F1B over 64 to 256 ranks. Each size runs in its own process on one core, after a warm-up that loads
the compiled loops. Absolute times mean little on a shared machine. The claim is about the last column, the time per
action: from a hundred thousand to ten million actions it grows less than twofold.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from tables import table

from penstock import UnitCost, make, simulate
from penstock.schedules.one_f_one_b import one_f_one_b

# actions: ranks, micro-batches
SIZES = {
    10_000: (64, 78),
    100_000: (256, 196),
    1_000_000: (256, 1954),
    10_000_000: (256, 19_532),
}
RESULT = Path(__file__).parent.parent / "docs" / "results" / "scale.md"


def measure(ranks: int, microbatches: int) -> dict[str, float]:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    cost = UnitCost(comm=0.1)
    simulate(make("1f1b", ranks=64, microbatches=256), cost)  # loads the compiled loops
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    schedule = one_f_one_b(ranks, microbatches)  # larger than `make` allows
    built = time.perf_counter()
    spans = []
    for _ in range(3):
        start = time.perf_counter()
        timeline = simulate(schedule, cost)
        spans.append(time.perf_counter() - start)
    assert abs(timeline.makespan / timeline.schedule.actions) > 0
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "actions": schedule.actions,
        "build_and_check_seconds": built - begin,
        "simulate_seconds": min(spans),
        "memory_mb": (after - before) / 1024,
    }


def in_its_own_process(ranks: int, microbatches: int) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, __file__, "--one", str(ranks), str(microbatches)],
        capture_output=True,
        text=True,
        check=True,
    )
    row: dict[str, float] = json.loads(done.stdout)
    return row


def shown(rows: list[dict[str, float]]) -> str:
    heads = "actions | build and check, s | simulate, s | memory, MB | build, µs/action | simulate, µs/action"
    lines = []
    for row in rows:
        build, sim, actions = (
            row["build_and_check_seconds"],
            row["simulate_seconds"],
            row["actions"],
        )
        lines.append(
            [
                f"{actions:,.0f}",
                f"{build:.3g}",
                f"{sim:.3g}",
                f"{row['memory_mb']:,.0f}",
                f"{1e6 * build / actions:.2f}",
                f"{1e6 * sim / actions:.3f}",
            ]
        )
    return table(heads, lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="up to a million actions; writes nothing"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object to stdout")
    parser.add_argument("--one", nargs=2, type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        sys.stdout.write(json.dumps(measure(*given.one)))
        return
    sizes = [size for size in SIZES if not given.quick or size <= 1_000_000]
    rows = [in_its_own_process(*SIZES[size]) for size in sizes]
    text = (
        "# Scale\n\n`python benchmarks/scale.py` builds, checks and simulates 1F1B on one core. Each simulation is the "
        f"best of three.\n\n{shown(rows)}\n"
    )
    if not given.quick:
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(text)
    sys.stdout.write(json.dumps({"rows": rows}) + "\n" if given.json else text)


if __name__ == "__main__":
    main()
