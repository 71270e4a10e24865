"""Compares planned paths with SkipPipe's published plans, fair baselines and a bound; compositions and growth.

    python benchmarks/paths.py            everything, writes docs/results/paths.md (about three minutes)
    python benchmarks/paths.py --quick    short searches, up to 200 nodes, in under a minute; writes nothing
    python benchmarks/paths.py --json     one JSON object to stdout

Instances A and B are SkipPipe's, with its own cost model (tests/data/skippipe.json): 20 nodes in 12 places, 6 parts,
paths over 4 of them, 3 slots, and 6 micro-batches per data node. All times are simulated seconds of a step. `search`
is the planner's own time on one core, after its compiled loops are loaded, in processor seconds, since other
processes may use the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from baselines import random_paths, shortest_paths
from instances import (
    CITED,
    GRADIENTS,
    MESSAGE,
    QUEUES,
    cited_cluster,
    search_sides,
    with_bandwidth,
)

from penstock import simulate
from penstock.cost import Cluster
from penstock.cost.cluster import CITIES
from penstock.plan.paths.planner import PathPlan, plan_paths, rule_faults
from penstock.plan.paths.problem import (
    PLANNED,
    PUBLISHED,
    Policy,
    Problem,
    even_parts,
)
from penstock.plan.paths.rotation import (
    DEFAULT_RECOVERY_MOVES,
    full_pipeline,
    replan,
    rotate,
)
from penstock.plan.paths.search import DEFAULT_SEARCH_MOVES, Budget

ROOT = Path(__file__).parent.parent
GAPS = {"gap": CITED["model"]["gap"], "first_gap": CITED["model"]["gap_after_first"]}
RESULT = ROOT / "docs" / "results" / "paths.md"
PLACES = list(CITIES)[:42]
CLOCK = time.process_time
# Moves of a search of three, four and five stages.
SHORT, DEFAULT, LONG = (6_300, DEFAULT_SEARCH_MOVES, 65_500)
# Moves for each number of nodes.
GROWTH = {20: DEFAULT, 42: 165_500, 200: 645_500, 1000: 645_500}

SUM_LEVERS: dict[str, dict[str, Any]] = {
    "none": {},
    "rings": {"gradients": GRADIENTS, "planned_sums": False},
    "planned": {"gradients": GRADIENTS},
}

Row = dict[str, object]


def published(
    name: str, policy: Policy, given: bool, iterations: int, slots: int = 3
) -> PathPlan:
    """Plan a published instance with its cost model. If `given`, on the authors' arrangement."""
    cited = CITED["instances"][name]
    problem = Problem(
        cited_cluster(name, slots),
        even_parts(6, cited["forward"]),
        6,
        policy=policy,
        arrangement=cited["partitions"] if given else None,
        **GAPS,
    )
    return plan_paths(problem, work(iterations))


def work(iterations: int) -> Budget:
    """So many moves, timed by the processor's clock."""
    return Budget(iterations, clock=CLOCK)


def places(count: int, serial: bool = True) -> Cluster:
    return Cluster.geo([PLACES[n % len(PLACES)] for n in range(count)], serial=serial)


def row(plan: PathPlan, **more: object) -> Row:
    assert not rule_faults(plan)
    return {
        **more,
        "makespan": plan.makespan,
        "bound": plan.bound,
        "gap": plan.gap,
        "search": plan.seconds,
        "simulations": plan.simulations,
    }


# ---------------------------------------------------------------- what is measured
def same_rules(iterations: int) -> list[Row]:
    rows = []
    for name in "AB":
        theirs = CITED["instances"][name]["plans"]["planned"]["seconds"]
        wall = (
            CITED["instances"][name]
            .get("published search", {})
            .get("coarsened", {})
            .get("wall")
        )
        for given in (True, False):
            found = published(name, PUBLISHED, given, iterations)
            rows.append(
                row(
                    found,
                    instance=name,
                    arrangement="theirs" if given else "ours",
                    theirs=theirs,
                    wall=wall,
                )
            )
    return rows


def our_rules(iterations: int) -> list[Row]:
    rows = []
    steps: list[tuple[str, Policy, bool, int]] = [
        ("published rules", PUBLISHED, True, 3),
        ("slots not reserved for a path", QUEUES, True, 3),
        ("and a planned order", PLANNED, True, 3),
        ("and our arrangement", PLANNED, False, 3),
        ("and 6 slots", PLANNED, False, 6),
    ]
    for name in "AB":
        for what, policy, given, slots in steps:
            rows.append(
                row(
                    published(name, policy, given, iterations, slots),
                    instance=name,
                    rules=what,
                )
            )
    return rows


def baselines(iterations: int) -> list[Row]:
    rows = []
    for name in "AB":
        cited = CITED["instances"][name]
        plan = published(name, PUBLISHED, True, iterations)
        dice = [random_paths(plan, seed).makespan for seed in range(20)]
        theirs = cited["plans"].get("random", {}).get("seconds")
        blind = cited["plans"].get("without collision avoidance", {}).get("seconds")
        found = {
            "full pipeline": (
                full_pipeline(plan, work(iterations)).makespan,
                cited["full"]["seconds"],
            ),
            "random paths, median of 20": (statistics.median(dice), theirs),
            "random paths, best of 20": (min(dice), None),
            "no collision avoidance": (shortest_paths(plan).makespan, blind),
            "planned": (plan.makespan, cited["plans"]["planned"]["seconds"]),
        }
        rows += [
            {
                "instance": name,
                "what": what,
                "seconds": ours,
                "theirs": published_as,
                "ratio": ours / plan.makespan,
            }
            for what, (ours, published_as) in found.items()
        ]
    return rows


def best_full_pipelines(iterations: int) -> list[Row]:
    """The comparison that `penstock paths` prints: each side has its own arrangement."""
    rows: list[Row] = []
    for name in "AB":
        parts = even_parts(6, CITED["instances"][name]["forward"])
        full, paths = search_sides(cited_cluster(name), parts, iterations, data_nodes=5)
        rows.append(
            {
                "instance": name,
                "full": full.makespan,
                "paths": paths.makespan,
                "saved": 1 - paths.makespan / full.makespan,
            }
        )
    return rows


def compositions(iterations: int) -> list[Row]:
    parts = even_parts(6, 0.5, tokens=1024, message=33e6)
    campus = Cluster.even(20, latency=0.001, bandwidth=1e9, slots=8, serial=True)
    rows = []
    for where, cluster in (("20 cities", places(20)), ("one hall", campus)):
        for slices, waves in (
            (1, False),
            (2, False),
            (4, False),
            (8, False),
            (1, True),
            (4, True),
        ):
            problem = Problem(
                cluster, parts, 6, tokens=1024, slices=slices, waves=waves
            )
            found = plan_paths(problem, work(iterations))
            rows.append(row(found, where=where, slices=slices, waves=waves))
    return rows


def gradients(iterations: int) -> list[Row]:
    parts = even_parts(6, 0.5, message=16e6)
    without = Problem(places(20), parts, 6)
    summed = replace(without, gradients=100e6)
    blind = plan_paths(without, work(iterations))
    rings = plan_paths(replace(summed, planned_sums=False), work(iterations))
    planned = plan_paths(summed, work(iterations))
    after = simulate(blind.schedule, rings.problem.cost())
    rows = []
    for what, timeline in {
        "without sums": after,
        "with rings": rings.timeline,
        "with planned sums": planned.timeline,
    }.items():
        last = float(timeline.end.max())
        rows.append({"planned": what, "last": last, "step": timeline.makespan})
    return rows


def summed(iterations: int) -> list[Row]:
    """Paths and the full pipeline of the same search, without sums and with two kinds of sums."""
    rows: list[Row] = []
    for name in "AB":
        parts = even_parts(6, CITED["instances"][name]["forward"], message=MESSAGE)
        for what, how in SUM_LEVERS.items():
            full, paths = search_sides(
                with_bandwidth(name), parts, iterations, data_nodes=5, **how
            )
            rows.append(
                {
                    "instance": name,
                    "sums": what,
                    "full_last": float(full.timeline.end.max()),
                    "full": full.makespan,
                    "last": float(paths.timeline.end.max()),
                    "paths": paths.makespan,
                    "bound": paths.bound,
                    "saved": 1 - paths.makespan / full.makespan,
                }
            )
    return rows


def growth(sizes: dict[int, int]) -> list[Row]:
    parts = even_parts(6, 0.5, message=16e6)
    return [
        row(
            plan_paths(Problem(places(count, serial=False), parts, 6), work(moves)),
            nodes=count,
        )
        for count, moves in sizes.items()
    ]


def turns(iterations: int) -> Row:
    plan = published("A", PUBLISHED, True, DEFAULT)
    begin = CLOCK()
    found = rotate(plan, work(iterations))
    return {
        "plans": len(found.plans),
        "makespans": [p.makespan for p in found.plans],
        "left_out": len(found.left_out),
        "seconds": CLOCK() - begin,
    }


def losses() -> list[Row]:
    plan = published("A", PLANNED, False, DEFAULT)
    cases: dict[str, list[int]] = {
        "nobody": [],
        "a hop": [plan.partitions[3][0]],
        "a data node": [plan.partitions[0][0]],
        "a hop and a data node": [plan.partitions[0][1], plan.partitions[2][0]],
        "all of part 4": list(plan.partitions[4]),
    }
    rows: list[Row] = []
    for what, lost in cases.items():
        found = replan(plan, work(DEFAULT_RECOVERY_MOVES), lost) if lost else plan
        assert not rule_faults(found)
        rows.append(
            {
                "lost": what,
                "micro-batches": len(found.schedule.microbatches),
                "step": found.makespan,
                "search": found.seconds,
            }
        )
    return rows


# ---------------------------------------------------------------- how it is shown
def cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.2f}"
    return "" if value is None else str(value)


def table(rows: list[Row], columns: dict[str, str]) -> str:
    numbers = [
        all(isinstance(r[key], int | float | None) for r in rows) for key in columns
    ]
    lines = [
        "| " + " | ".join(columns.values()) + " |",
        "|" + "|".join("--:" if n else "---" for n in numbers) + "|",
    ]
    shown = [
        [f"{r[k]:.1%}" if k in ("gap", "saved") else cell(r[k]) for k in columns]
        for r in rows
    ]
    return "\n".join([*lines, *(f"| {' | '.join(line)} |" for line in shown)])


BOUNDED = {
    "makespan": "makespan",
    "bound": "bound",
    "gap": "gap",
    "search": "search",
    "simulations": "moves",
}
SAME = {
    "instance": "instance",
    "arrangement": "arrangement",
    "theirs": "theirs",
    "wall": "wall",
    **BOUNDED,
}
COMPARED = {
    "instance": "instance",
    "what": "paths",
    "seconds": "makespan",
    "ratio": "of planned",
    "theirs": "theirs",
}
SUMMED = {
    "instance": "instance",
    "sums": "sums",
    "full_last": "full: last backward",
    "full": "full: step",
    "last": "paths: last backward",
    "paths": "paths: step",
    "bound": "bound",
    "saved": "less by",
}
FULL = {
    "instance": "instance",
    "full": "full pipeline",
    "paths": "planned paths",
    "saved": "less by",
}


def page(found: dict[str, list[Row]], turn: Row) -> str:
    rotation = (
        f"{turn['plans']} plans of {min(turn['makespans']):.2f} to {max(turn['makespans']):.2f} s, found in "  # type: ignore[call-overload]
        f"{turn['seconds']:.1f} s,\non one arrangement; {turn['left_out']} of the 10 sets of parts are left out."
    )
    return f"""# Planned paths

`python benchmarks/paths.py`: the tables show simulated seconds of a step. A search is limited by its work, the number
of *moves* that it tries, and not by a clock, so every machine finds the same plans. *Search* shows the processor
seconds that this took on one core with the compiled loops loaded (the very first run compiles them, which takes about
half a minute).

The *gap* is the distance to a bound that is proven for every plan under the same rules: for all arrangements where the
arrangement is ours, and for theirs where it is theirs. The bound combines three arguments: the best order of the tasks
of one data node, whatever happens elsewhere; prices for the slots and the time of nodes that every path would like to
use; and the work of each part (`plan/paths/bound.py`). A gap of 0.0% means that no plan is better.

## The published rules

Nodes serve first come, first served; a slot belongs to a path; and two rounds use the same paths. The cost model is
that of SkipPipe's own simulator, and ours reproduces its times for its own plans to all digits
(`tests/plan/test_paths.py`). *Theirs* is the makespan of the published search, and *wall* its wall-clock seconds
where they were measured, on a loaded machine. For B without its coarsening, it reached 79.82 after 1,225 s and had
not finished.

{table(found["same"], SAME)}

## What our rules add

{table(found["ours"], {"instance": "instance", "rules": "rules", **BOUNDED})}

Each row includes the changes of all rows above it. With a free arrangement and with more slots, the bound falls
faster than the plans do: a bad node may then stay unused, and the bound must allow for that. The bound does not see
the waiting on nodes that are not data nodes, nor that a part needs replicas near every data node.

## Baselines

All rows use the same arrangement (theirs), slots and micro-batches. The full pipeline uses all five data nodes and is
searched for with as many moves as the paths. *Theirs* are SkipPipe's own figures; its full pipeline has 27
micro-batches on three of five data nodes, ours has 30 on five. Random paths that use the link of 132 s between NL and
London are hopeless. When collisions are ignored, their paths for A are better than ours (35.43 s), so planning gains 6%
over those.

{table(found["baselines"], COMPARED)}

An arrangement that was made for paths is a handicap for a full pipeline. `penstock paths` therefore compares with the
best full pipeline that the same search finds with the same number of moves, on an arrangement of its own and with its
own number of nodes for each part. With its default work of {DEFAULT:,} moves, own arrangements and five data nodes it
prints:

{table(found["full"], FULL)}

## Compositions

There are 20 nodes, links carry one message at a time, a micro-batch has 33 MB, and F = 0.5 s. *20 cities* has 3 slots
per node. *One hall* has links of 1 ms and 1 GB/s, and 8 slots per node.

{table(found["compositions"], {"where": "where", "slices": "slices", "waves": "waves", **BOUNDED})}

Slices overlap transfers with work and pay off in both places. A wave brings the loss back to the data node but uses
every link of its way twice. Between cities it loses without slices and gains almost nothing with four slices. In one
hall it gains as much as smaller pieces of work do, but slices gain that too.

## Sums of gradients

20 cities, with 100 MB of gradients per part. The rows plan without the time for summing gradients, which then happens
in rings; for rings; and for the quickest kind of sum for each part (`cost/sums.py`).

{table(found["gradients"], {"planned": "planned", "last": "last backward", "step": "step"})}

Instances A and B with 1.35 GB of gradients per part. The instances have only delays, so a delay is taken as 0.35 s and
the time of a message of 33.5 MB. The full pipeline is planned by the same search, with its own arrangement and its own
sums.

{table(found["summed"], SUMMED)}

## Growth

F = 0.5 s, a micro-batch has 16 MB, each data node has 6 micro-batches, and the list of cities repeats.

{table(found["growth"], {"nodes": "nodes", **BOUNDED})}

## Rotation, and nodes lost

Several plans of the same makespan were requested for instance A under the published rules: {rotation}

After nodes are lost, instance A is planned again under our rules for the remaining nodes:

{table(found["losses"], {"lost": "lost", "micro-batches": "micro-batches", "step": "makespan", "search": "search"})}
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="short searches; writes nothing"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object to stdout")
    given = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    quick = given.quick
    for reserved in (PUBLISHED, PLANNED):  # loads the compiled loops
        published("A", reserved, False, 100)
    measured: dict[str, Callable[[], list[Row]]] = {
        "same": lambda: same_rules(DEFAULT),
        "ours": lambda: our_rules(SHORT if quick else LONG),
        "baselines": lambda: baselines(SHORT if quick else DEFAULT),
        "full": lambda: best_full_pipelines(DEFAULT),
        "compositions": lambda: compositions(SHORT if quick else DEFAULT),
        "gradients": lambda: gradients(SHORT if quick else DEFAULT),
        "summed": lambda: summed(SHORT if quick else DEFAULT),
        "growth": lambda: growth(
            dict.fromkeys((20, 42, 200), SHORT) if quick else GROWTH
        ),
        "losses": losses,
    }
    found = {name: measure() for name, measure in measured.items()}
    turn = turns(20_000 if quick else 120_000)
    text = page(found, turn)
    if not quick:
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(text)
    sys.stdout.write(
        json.dumps({**found, "rotation": turn}) + "\n" if given.json else text
    )


if __name__ == "__main__":
    main()
