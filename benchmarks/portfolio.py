"""Compares the planner with the best fixed order of the literature, under costs that neither has seen.

    python benchmarks/portfolio.py            all cells, writes docs/results/portfolio.md (some ten minutes)
    python benchmarks/portfolio.py --quick    one cell; writes nothing
    python benchmarks/portfolio.py --json     one JSON object to stdout

A rank may hold `ranks` micro-batches, there is one copy of the weights, and sequences are whole (no slices). `best
fixed` is the fastest order of the registry in that cell, and `planned` is the fastest of all candidates. Both are
then timed under 20 costs with 10% of noise on every op and link, which took no part in the choice. `ratio` is planned
over fixed, as mean and range.

The second table is the search with slices, for 8 ranks and 8 micro-batches with a latency of 0.03, as the memory of a
rank shrinks. Its bound holds for every plan of the space, and not for one order of lanes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

from tables import table

from penstock import UnitCost, portfolio, simulate
from penstock.cost import NoisyCost
from penstock.plan import title
from penstock.plan.pricing import unit_question
from penstock.plan.search import search
from penstock.plan.space import Limits

CELLS = [
    (p, m, c) for p in (4, 8, 16) for m in (p, 2 * p, 4 * p) for c in (0.0, 0.05, 0.1)
]
# memory of a rank, most slices, and the time that the search must reach
TARGETS = (
    (8.0, 1, 26.65),
    (8.0, 16, 24.5),
    (4.0, 16, 24.5),
    (2.0, 16, 24.5),
    (1.5, 16, 25.2),
)
TARGET_SIZES = (8, 8, 0.03)  # ranks, micro-batches, latency
SEEDS = range(1000, 1020)
RESULT = Path(__file__).parent.parent / "docs" / "results" / "portfolio.md"


def measure(ranks: int, microbatches: int, comm: float) -> dict[str, object]:
    cost = UnitCost(comm=comm)
    found = portfolio(ranks, microbatches, cost, memory=ranks, slices=1)
    fixed = min(
        (c for c in found.candidates if c.order_kind == "fixed"),
        key=lambda c: c.makespan,
    )
    planned = found.best
    noises = [NoisyCost(cost, seed=seed) for seed in SEEDS]
    ratios = [
        simulate(planned.schedule, n).makespan / simulate(fixed.schedule, n).makespan
        for n in noises
    ]
    return {
        "ranks": ranks,
        "microbatches": microbatches,
        "comm": comm,
        "fixed": title(fixed.name, fixed.shape),
        "fixed_makespan": fixed.makespan,
        "planned": title(planned.name, planned.shape),
        "order": planned.sort,
        "planned_makespan": planned.makespan,
        "bound": planned.bound,
        "ratio": statistics.mean(ratios),
        "ratio_least": min(ratios),
        "ratio_most": max(ratios),
    }


def measure_target(memory: float, slices: int, target: float) -> dict[str, object]:
    ranks, microbatches, comm = TARGET_SIZES
    question = unit_question(
        ranks, microbatches, UnitCost(comm=comm), memory, Limits(slices=slices)
    )
    found = search(question)
    best = found.best
    return {
        "memory": memory,
        "slices": slices,
        "target": target,
        "planned": title(best.name, best.shape),
        "order": best.sort,
        "makespan": best.makespan,
        "peak": best.peak,
        "bound": found.bound,
        "gap": found.gap,
    }


def shown_targets(rows: list[dict[str, object]]) -> str:
    heads = "memory | most slices | target | planned | makespan | peak | bound | gap"
    lines = [
        [
            f"{r['memory']:g}",
            f"{r['slices']}",
            f"{r['target']:g}",
            f"{r['planned']}",
            f"{r['makespan']:.5g}",
            f"{r['peak']:.3g}",
            f"{r['bound']:.5g}",
            f"{r['gap']:.1%}",
        ]
        for r in rows
    ]
    return table(heads, lines, ("planned",))


def shown(rows: list[dict[str, object]]) -> str:
    heads = "P | M | comm | best fixed | makespan | planned | makespan | its bound | ratio under noise"
    lines = [
        [
            f"{r['ranks']}",
            f"{r['microbatches']}",
            f"{r['comm']}",
            f"{r['fixed']}",
            f"{r['fixed_makespan']:.5g}",
            f"{r['planned']}",
            f"{r['planned_makespan']:.5g}",
            f"{r['bound']:.5g}",
            f"{r['ratio']:.3f} ({r['ratio_least']:.3f}-{r['ratio_most']:.3f})",
        ]
        for r in rows
    ]
    return table(heads, lines, ("best fixed", "planned"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one cell; writes nothing")
    parser.add_argument("--json", action="store_true", help="one JSON object to stdout")
    given = parser.parse_args()
    rows = [measure(*cell) for cell in (CELLS[4:5] if given.quick else CELLS)]
    targets = [measure_target(*one) for one in TARGETS[: 1 if given.quick else None]]
    mean = statistics.mean(float(str(r["ratio"])) for r in rows)
    text = (
        "# Planned against the best fixed order\n\n"
        "`python benchmarks/portfolio.py`: times are in units of F. A rank may hold P micro-batches, there is one "
        "copy of\nthe weights, and sequences are whole. The last column is the time of the plan over that of the best "
        "fixed order\nunder 20 noisy costs that neither has seen: the mean, and the range in brackets.\n\n"
        f"{shown(rows)}\n\n"
        f"The mean ratio over all rows is {mean:.3f}. Above 1, the planner's choice, which was fitted to the nominal "
        "cost, loses\nunder costs that it has not seen.\n\n"
        "## With slices, under less and less memory\n\n"
        "8 ranks, 8 micro-batches, a latency of 0.03. The memory is that of a rank, in micro-batches. No plan of the\n"
        "whole space takes less than the bound.\n\n"
        f"{shown_targets(targets)}\n"
    )
    if not given.quick:
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(text)
    sys.stdout.write(
        json.dumps({"rows": rows, "mean_ratio": mean, "targets": targets}) + "\n"
        if given.json
        else text
    )


if __name__ == "__main__":
    main()
