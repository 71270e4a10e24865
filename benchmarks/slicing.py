"""Compares the slicing planner with TeraPipe's published solver: latency, CPU seconds, passes, and scaling.

    python benchmarks/slicing.py            the tables of docs/results/slices.md (about a minute)
    python benchmarks/slicing.py --quick    one case and the smallest sizes; writes nothing

The solver's figures are in tests/data/terapipe.json, with the formula of the tables it was given. They were measured
on another machine, so ratios of CPU time are rough, and passes are the better comparison. Ours is the least CPU time
of five runs in one process with compiled code loaded, from the tables in memory to the cuts, including the checks of
the tables.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from batches import best_batch
from harness import ROOT, Found, Row, Script, read, table

from penstock.plan.slices import SliceTimes, best_cuts
from penstock.plan.slices.curves import tabulated_times

DATA = read(ROOT / "tests" / "data" / "terapipe.json")
GRAIN = 8
PEAK, SHARE, HALF = 112e12, 0.45, 192.0


# ---------------------------------------------------------------- the solver's tables
def layer(case: Row, rows: int, length: np.ndarray) -> np.ndarray:
    """Seconds of one layer's forward without a prefix, by the formula of the data."""
    tokens, hidden, op = rows * length, case["hidden"], case["op"]
    flops = 24 * tokens * hidden**2 + 2 * rows * hidden * length**2
    reduce = (
        0.0 if op == 1 else 2 * (40e-6 + 4 * tokens * hidden * (op - 1) / op / 100e9)
    )
    return 150e-6 + flops / (PEAK * op * SHARE * tokens / (tokens + HALF)) + reduce


def tables_of(case: Row) -> dict[int, np.ndarray]:
    """Seconds [prefix, length - 1] for every number of rows."""
    points, c = case["tokens"] // GRAIN, case["context"]
    prefix, length = (
        GRAIN * axis.astype(float) for axis in np.indices((points, points))
    )
    length += GRAIN
    found = {}
    for rows in range(1, case["batch"] + 1):
        wire = 2 * (60e-6 + 2 * case["hidden"] * rows * length / 3.125e9)
        work = 3 * layer(case, rows, length) + rows * (c[0] * length + c[1] * prefix)
        found[rows] = (
            case["layers"] * (work + c[2] * rows * length * prefix + c[3]) + wire
        )
    return found


def long_table(tokens: int, grain: int) -> np.ndarray:
    """The analytic table of the long rows."""
    case = {"hidden": 5120, "op": 8}
    points = tokens // grain
    prefix, length = (
        grain * axis.astype(float) for axis in np.indices((points, points))
    )
    length += grain
    flops = 24 * length * 5120**2 + 4 * 5120 * (length * prefix + length**2 / 2)
    work = (
        150e-6
        + flops / (PEAK * case["op"] * SHARE * length / (length + HALF))
        + 80e-6
        + 4 * length * 5120 / 100e9
    )
    return 3 * work + 2 * (60e-6 + 2 * 5120 * length / 3.125e9)


def times_from_table(table: np.ndarray) -> SliceTimes:
    """The times of whole slices, one peak each."""
    return tabulated_times(table, table, np.zeros_like(table))


# ---------------------------------------------------------------- measuring
def timed(work: Callable[[], Any], runs: int = 5) -> tuple[float, Any]:
    """The least CPU seconds of some runs after a first, and the result."""
    found = work()
    least = math.inf
    for _ in range(runs):
        begin = time.process_time()
        found = work()
        least = min(least, time.process_time() - begin)
    return least, found


def official(case: Row) -> Row:
    given = tables_of(case)
    seconds, found = timed(
        lambda: best_batch(
            {r: times_from_table(t) for r, t in given.items()},
            case["batch"],
            case["stages"],
        )
    )
    least = case["least_cpu"] or case["cpu"]
    return {
        "case": case["name"],
        "official": case["latency"],
        "ours": found.latency + case.get("update", update(case)),
        "official_cpu": least,
        "single": case["least_cpu"] is None,
        "official_calls": case["calls"],
        "cpu": seconds,
        "passes": found.passes,
        "ratio": least / seconds,
        "rows": found.groups[0].rows,
        "slices": len(found.lengths),
    }


def update(case: Row) -> float:
    """Seconds of the optimizer, which the solver adds: by the formula of its tables."""
    return case["layers"] * 24 * case["hidden"] ** 2 * 16 / case["op"] / 700e9


def scaled(row: Row) -> Row:
    table = long_table(row["tokens"], row["granularity"])
    seconds, found = timed(lambda: best_cuts(times_from_table(table), row["stages"]), 3)
    prefix, length = (
        row["granularity"] * axis.astype(float) for axis in np.indices(table.shape)
    )
    pairs = (length + row["granularity"]) * (prefix + (length + row["granularity"]) / 2)
    forward, backward = table / 3, table * 2 / 3 + 2 * 5120 * pairs / (PEAK * 8 * SHARE)
    both = tabulated_times(forward + backward, forward, backward)
    two_seconds, two = timed(lambda: best_cuts(both, row["stages"]), 1)
    return {
        "tokens": row["tokens"],
        "granularity": row["granularity"],
        "points": len(table),
        "latency": found.latency,
        "earlier": row["latency"],
        "slices": len(found.lengths),
        "cpu": seconds,
        "passes": found.passes,
        "estimated": row["estimated_seconds"],
        "earlier_cpu": row["exact_seconds"],
        "earlier_calls": row["calls"],
        "two_cpu": two_seconds,
        "two_passes": two.passes,
    }


# ---------------------------------------------------------------- the script
def measure(given: argparse.Namespace) -> Found:
    if given.quick:
        small = min(DATA["long"], key=lambda row: row["tokens"] // row["granularity"])
        return {
            "cases": [official(DATA["official"][0])],
            "long": [scaled(small)],
        }
    return {
        "cases": [official(case) for case in DATA["official"]],
        "long": [scaled(row) for row in DATA["long"]],
    }


def tables(found: Found) -> dict[str, str]:
    """A dagger marks a single run of the official solver."""
    columns = {
        "case": "{case}",
        "official, s": "{official:.6g}",
        "ours, s": "{ours:.6g}",
        "better by": lambda row: (
            f"{round(1 - row['ours'] / row['official'], 6) + 0.0:.4%}"
        ),
        "official, CPU s": lambda row: (
            f"{row['official_cpu']:.3g}{'†' if row['single'] else ''}"
        ),
        "ours, CPU ms": "{cpu!m:.1f}",
        "times less": "{ratio:.0f}",
        "official passes": "{official_calls}",
        "ours": "{passes}",
        "slices": "{slices}",
        "rows": "{rows}",
    }
    sizes = {"tokens": "{tokens:,}", "step": "{granularity}", "points": "{points:,}"}
    ours = {"CPU ms": "{cpu!m:.1f}", "passes": "{passes:,}", "slices": "{slices}"}
    long = {
        "two tables, ms": "{two_cpu!m:.0f}",
        "its passes": "{two_passes:,}",
        "earlier, s": "{earlier_cpu:.2f}",
        "earlier passes": "{earlier_calls}",
        "official, s": "{estimated:.0f}",
        "latency, s": "{latency:.6g}",
    }
    return {
        "slicing": table(found["cases"], columns),
        "slicing: long": table(found["long"], sizes | ours | long),
    }


if __name__ == "__main__":
    Script(__doc__, measure, tables).main()
