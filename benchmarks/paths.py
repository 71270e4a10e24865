"""Compares planned paths with SkipPipe's published plans, fair baselines and a bound; slices, growth and losses.

    python benchmarks/paths.py            all tables of docs/results/networks.md but those of wan.py (three minutes)
    python benchmarks/paths.py --quick    searches of a few moves; writes nothing

Instances A and B are SkipPipe's, with its own cost model (tests/data/skippipe.json): 20 nodes in 12 places, 6 parts,
paths over 4 of them, 3 slots, and 6 micro-batches per data node. All times are simulated seconds of a step. `search`
is the planner's own time on one core, after its compiled loops are loaded, in processor seconds, since other
processes may use the machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import replace

import numpy as np
from harness import Found, Row, Script, table
from instances import (
    CITED,
    QUEUES,
    cited_cluster,
    search_sides,
)

from penstock.cost import Cluster
from penstock.cost.cluster import CITIES
from penstock.plan.paths.planner import (
    PathPlan,
    finish_plan,
    plan_paths,
    rule_faults,
)
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
)
from penstock.plan.paths.search import DEFAULT_SEARCH_MOVES, Budget
from penstock.plan.paths.simulator import (
    choose_queueing,
    simulate_solution,
    solution_of,
)
from penstock.plan.paths.starts import random_routes

GAPS = {"gap": CITED["model"]["gap"], "first_gap": CITED["model"]["gap_after_first"]}
PLACES = list(CITIES)[:42]
CLOCK = time.process_time
# Moves of a search.
QUICK, DEFAULT, LONG = (60, DEFAULT_SEARCH_MOVES, 65_500)
# Moves for each number of nodes.
GROWTH = {20: DEFAULT, 42: 165_500, 200: 645_500, 1000: 645_500}


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


def places(count: int, serial: bool = False) -> Cluster:
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
        found = {
            "full pipeline": (
                full_pipeline(plan, work(iterations)).makespan,
                cited["full"]["seconds"],
            ),
            "random paths, median of 20": (statistics.median(dice), theirs),
            "random paths, best of 20": (min(dice), None),
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


def random_paths(plan: PathPlan, seed: int) -> PathPlan:
    """The same arrangement with random paths: any legal order, any replica with a free place."""
    problem = plan.problem
    paths = random_routes(problem, plan.solution.part_of_node, seed)
    start = solution_of(problem, plan.solution.part_of_node, paths)
    solution = choose_queueing(problem, start)
    if not np.isfinite(simulate_solution(problem, solution).makespan):
        solution = replace(solution, avoid_deadlock=True)
    return finish_plan(problem, solution, plan.bound, Budget(0))


def best_full_pipelines(iterations: int) -> list[Row]:
    """The comparison that `penstock lab paths` prints: each side has its own arrangement."""
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


def sliced(iterations: int) -> list[Row]:
    """Slices overlap transfers with work: links carry one message at a time, a micro-batch has 33 MB."""
    parts = even_parts(6, 0.5, tokens=1024, message=33e6)
    rows = []
    for slices in (1, 2, 4, 8):
        problem = Problem(places(20, True), parts, 6, tokens=1024, slices=slices)
        rows.append(row(plan_paths(problem, work(iterations)), slices=slices))
    return rows


def growth(sizes: dict[int, int]) -> list[Row]:
    parts = even_parts(6, 0.5, message=16e6)
    return [
        row(
            plan_paths(Problem(places(count), parts, 6), work(moves)),
            nodes=count,
        )
        for count, moves in sizes.items()
    ]


def losses(iterations: int, recovery: int) -> list[Row]:
    plan = published("A", PLANNED, False, iterations)
    cases: dict[str, list[int]] = {
        "nobody": [],
        "a hop": [plan.partitions[3][0]],
        "a data node": [plan.partitions[0][0]],
        "a hop and a data node": [plan.partitions[0][1], plan.partitions[2][0]],
        "all of part 4": list(plan.partitions[4]),
    }
    rows: list[Row] = []
    for what, lost in cases.items():
        found = replan(plan, work(recovery), lost) if lost else plan
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


# ---------------------------------------------------------------- the script
def measure(given: argparse.Namespace) -> Found:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    for reserved in (PUBLISHED, PLANNED):  # loads the compiled loops
        published("A", reserved, False, 100)
    usual, long = (QUICK, QUICK) if given.quick else (DEFAULT, LONG)
    return {
        "published": same_rules(usual),
        "rules": our_rules(long),
        "baselines": baselines(usual),
        "default": best_full_pipelines(usual),
        "slices": sliced(usual),
        "growth": growth({20: QUICK} if given.quick else GROWTH),
        "losses": losses(usual, QUICK if given.quick else DEFAULT_RECOVERY_MOVES),
    }


def tables(found: Found) -> dict[str, str]:
    instance = {"instance": "{instance}"}
    bounded = {
        "step, s": "{makespan:.2f}",
        "bound, s": "{bound:.2f}",
        "optimality gap": "{gap:.1%}",
        "search, s": "{search:.2f}",
        "moves": "{simulations:,}",
    }
    columns = {
        "published": instance
        | {"arrangement": "{arrangement}", "theirs, s": "{theirs:.2f}"}
        | {"their search, s": "{wall:.2f}"}
        | bounded,
        "rules": instance | {"rules": "{rules}"} | bounded,
        "baselines": instance
        | {
            "paths": "{what}",
            "step, s": "{seconds:.2f}",
            "of planned": "{ratio:.2f}",
            "theirs, s": "{theirs:.2f}",
        },
        "default": instance
        | {
            "full pipeline, s": "{full:.2f}",
            "planned paths, s": "{paths:.2f}",
            "less by": "{saved:.1%}",
        },
        "slices": {"slices": "{slices}"} | bounded,
        "growth": {"nodes": "{nodes:,}"} | bounded,
        "losses": {
            "lost": "{lost}",
            "micro-batches": "{micro-batches}",
            "step, s": "{step:.2f}",
            "search, s": "{search:.2f}",
        },
    }
    return {f"paths: {name}": table(found[name], columns[name]) for name in columns}


if __name__ == "__main__":
    Script(__doc__, measure, tables).main()
