"""Path plans of clusters from 4 to 200 nodes, searched with equal moves from fixed seeds.

    python tests/frozen/cases_paths.py       compare the means with the frozen ones

A plan may change as long as it is no worse: in each case the step is at most 0.1% longer, the bound is no lower, and
the search tries no more moves.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from penstock import PartCost, Seconds
from penstock.cost import Cluster, Node
from penstock.plan.paths import (
    PLANNED,
    PUBLISHED,
    Budget,
    PathPlan,
    Problem,
    Rules,
    even_parts,
    full_steps,
    plan_paths,
    replan,
    rotate,
    rule_faults,
)

TOLERANCE = 1e-9
LONGER = 1e-3  # share by which one step may be longer
CITED = json.loads(
    (Path(__file__).parents[1] / "data" / "skippipe.json").read_text("utf-8")
)
GAPS = {"gap": CITED["model"]["gap"], "first_gap": CITED["model"]["gap_after_first"]}
CITIES = (
    "Paris",
    "London",
    "Tokyo",
    "Osaka",
    "Lisbon",
    "Rome",
    "Seattle",
    "Boston",
    "Sydney",
    "Madrid",
)


def geo(count: int, serial: bool = False) -> Cluster:
    """Nodes in ten cities, one after the other."""
    return Cluster.geo([CITIES[n % len(CITIES)] for n in range(count)], serial=serial)


def places(**nodes: int) -> Cluster:
    """As many nodes as given in each city."""
    return Cluster.geo([city for city, count in nodes.items() for _ in range(count)])


def uneven(cluster: Cluster, memory: Sequence[float | None] = (None,)) -> Cluster:
    """The same nodes with several speeds, and with these memories in turn instead of slots."""
    speeds = (1.0, 0.6, 1.4, 1.0, 0.8)
    nodes = tuple(
        Node(
            node.site,
            speeds[number * 7 % len(speeds)],
            None if memory[number % len(memory)] else 2 + number % 3,
            memory[number % len(memory)],
        )
        for number, node in enumerate(cluster.nodes)
    )
    return Cluster(nodes, cluster.latency, cluster.bandwidth, cluster.serial)


def instance(name: str, slots: int = 3) -> Cluster:
    """A published instance."""
    cited = CITED["instances"][name]
    count = len(cited["locations"])
    return Cluster(
        tuple(Node(site, 1.0, slots) for site in cited["locations"]),
        tuple(map(tuple, cited["delays"])),
        ((math.inf,) * count,) * count,
    )


def answer(plan: PathPlan) -> dict[str, object]:
    """All that must be no worse."""
    return {
        "makespan": plan.makespan,
        "last_backward": float(plan.timeline.end.max()),
        "bound": plan.bound,
        "moves": plan.simulations,
        "faults": len(rule_faults(plan)),
        "nodes": len(plan.problem.cluster.nodes),
    }


def searched(*args: Any, iterations: int, seed: int = 0, **how: Any) -> PathPlan:
    """The plan of a search."""
    return plan_paths(Problem(*args, **how), Budget(iterations), seed)


def planned(*args: Any, **how: Any) -> Callable[[], object]:
    """A case that plans paths."""
    return lambda: answer(searched(*args, **how))


def memory_parts() -> tuple[PartCost, ...]:
    part = PartCost(*(Seconds(token=1.0),) * 3, held=4.0, weights=8.0, message=0.1)
    head = PartCost(*(Seconds(token=0.1),) * 3, weights=50.0, message=0.1)
    return (*(part,) * 4, head)


def recovered() -> list[dict[str, object]]:
    """A node is lost, then a whole part and a data node, and the nodes come back."""
    plan = searched(geo(12), even_parts(4, 0.5, message=8e6), 3, iterations=500)
    without = replan(plan, Budget(500), [plan.partitions[1][0]])
    gone = [*plan.partitions[2], plan.partitions[0][0]]
    alone = replan(without, Budget(500), gone)
    back = replan(alone, Budget(500), (), gone)
    return [answer(one) for one in (without, alone, back)]


def rotated() -> dict[str, object]:
    plan = searched(geo(10), even_parts(6, 0.5), 2, iterations=300)
    found = rotate(plan, Budget(30000), slack=0.02)
    return {
        **answer(max(found.plans, key=lambda one: one.makespan)),
        "plans": len(found.plans),
        "left_out": len(found.left_out),
    }


def with_full_steps() -> list[dict[str, object]]:
    plan = searched(geo(10), even_parts(5, 0.5, message=8e6), 3, iterations=300)
    return [answer(plan), answer(full_steps(plan, Budget(300)))]


def cases() -> dict[str, Callable[[], object]]:
    parts = even_parts(6, 0.5, message=8e6)
    sliced = even_parts(6, 0.5, message=8e6, tokens=64)
    small = even_parts(4, 0.5, message=8e6)
    heavy = even_parts(6, 0.5, message=8e6, gradients=2e8)
    quarter = Rules(share=0.25)
    a, b = (CITED["instances"][name]["partitions"] for name in "AB")
    published_a, published_b = (
        even_parts(6, CITED["instances"][name]["forward"]) for name in "AB"
    )
    return {
        "4 nodes": planned(geo(4), even_parts(3, 0.5), 3, iterations=400),
        "5 nodes, unequal": planned(uneven(geo(5)), small, 3, quarter, iterations=600),
        "6 equal nodes": planned(
            Cluster.even(6, 0.1), even_parts(3, 1.0), 4, iterations=600
        ),
        "7 nodes, one data node": planned(
            geo(7), small, 5, quarter, data_nodes=1, iterations=1600
        ),
        "9 nodes, sizes": planned(
            geo(9), small, 3, quarter, sizes=[3, 2, 2, 2], iterations=800
        ),
        "9 nodes, half": planned(
            geo(9), parts, 4, Rules(share=0.5, full=0), iterations=800
        ),
        "12 nodes, nothing left out": planned(
            geo(12), parts, 4, Rules(share=0.0), iterations=800
        ),
        "12 nodes, unequal": planned(uneven(geo(12)), parts, 4, iterations=1600),
        "12 nodes, serial links": planned(
            geo(12, serial=True), sliced, 4, slices=2, tokens=64, iterations=500
        ),
        "12 nodes, waves": planned(geo(12), small, 3, waves=True, iterations=800),
        "12 nodes, slices and gaps": planned(
            geo(12), sliced, 3, slices=2, tokens=64, iterations=400, **GAPS
        ),
        "12 nodes, planned sums": planned(geo(12), heavy, 3, quarter, iterations=1000),
        "12 nodes, rings": planned(
            geo(12), heavy, 3, quarter, planned_sums=False, iterations=1000
        ),
        "12 nodes, passes": planned(
            uneven(geo(12)), heavy, 3, quarter, passes=4, iterations=700
        ),
        "12 nodes, waves with sums": planned(
            geo(12), heavy, 3, quarter, waves=True, iterations=600
        ),
        "12 nodes, arrangement": planned(
            geo(12),
            small,
            4,
            arrangement=[[0, 5, 9], [1, 6, 10], [2, 7, 11], [3, 4, 8]],
            iterations=1000,
        ),
        "8 nodes, memories": planned(
            uneven(geo(8), [20.0, 80.0, 20.0, 80.0, 80.0]),
            memory_parts(),
            4,
            quarter,
            iterations=600,
        ),
        "13 nodes, memories": planned(
            uneven(geo(13), [28.0, 80.0, 90.0]),
            memory_parts(),
            4,
            quarter,
            iterations=600,
        ),
        "16 nodes, wait": planned(
            geo(16), small, 2, Rules(share=0.25, wait=0.5), iterations=1600
        ),
        "16 nodes, wait in one site": planned(
            Cluster.even(16, 0.2), parts, 4, Rules(wait=1.0), iterations=1000
        ),
        "20 nodes": planned(geo(20), parts, 6, iterations=1600),
        "20 nodes, another seed": planned(geo(20), parts, 6, seed=5, iterations=1600),
        "20 nodes, stages from the best": planned(
            geo(10), small, 2, quarter, iterations=26500
        ),
        "A, published policy": planned(
            instance("A"), published_a, 6, Rules(), PUBLISHED, iterations=1600, **GAPS
        ),
        "A, arrangement": planned(
            instance("A"),
            published_a,
            6,
            Rules(),
            PUBLISHED,
            arrangement=a,
            iterations=1600,
            **GAPS,
        ),
        "B, planned": planned(
            instance("B"), published_b, 6, Rules(), PLANNED, iterations=1600, **GAPS
        ),
        "B, arrangement": planned(
            instance("B"),
            published_b,
            6,
            Rules(),
            PLANNED,
            arrangement=b,
            iterations=1600,
            **GAPS,
        ),
        "30 nodes in three places": planned(
            places(Paris=14, Tokyo=10, Boston=6), heavy, 4, iterations=1000
        ),
        "36 nodes, unequal, by groups": planned(
            uneven(geo(36)), parts, 2, iterations=1500
        ),
        "40 nodes in cells": planned(
            places(Paris=19, Rome=5, Milan=5, Tokyo=11), parts, 4, iterations=5000
        ),
        "48 nodes in sites": planned(
            places(Paris=3, Oslo=18, Tokyo=3, Boston=21, Rome=3),
            parts,
            2,
            data_nodes=15,
            iterations=6000,
        ),
        "48 nodes, unequal, with sums": planned(
            uneven(places(Paris=20, Tokyo=20, Boston=8)), heavy, 2, iterations=5000
        ),
        "64 nodes, alike": planned(
            Cluster.geo([CITIES[n // 8] for n in range(64)]),
            parts,
            3,
            iterations=6000,
        ),
        "64 nodes of one site": planned(
            Cluster.even(64, 0.05), parts, 2, iterations=3000
        ),
        "64 nodes, memories": planned(
            uneven(Cluster.geo([CITIES[n // 8] for n in range(64)]), [80.0, 90.0]),
            memory_parts(),
            2,
            quarter,
            iterations=3000,
        ),
        "100 nodes": planned(geo(100), small, 2, iterations=3000),
        "200 nodes": planned(
            Cluster.geo([CITIES[n // 20] for n in range(200)]),
            parts,
            2,
            iterations=2000,
        ),
        "200 nodes, unequal": planned(uneven(geo(200)), small, 1, iterations=400),
        "lost and returned": recovered,
        "rotation": rotated,
        "full steps": with_full_steps,
    }


def no_worse(name: str, frozen: object, now: object) -> str:
    """What is worse than it was, or an empty string."""
    if isinstance(frozen, list) and isinstance(now, list):
        pairs = zip(frozen, now, strict=True)
        return " ".join(filter(None, (no_worse(name, *pair) for pair in pairs)))
    assert isinstance(frozen, dict)
    assert isinstance(now, dict)
    faults = []
    if now["makespan"] > frozen["makespan"] * (1 + LONGER):
        faults.append("a longer step")
    if now["bound"] < frozen["bound"] * (1 - TOLERANCE):
        faults.append("a lower bound")
    if now["moves"] > frozen["moves"]:
        faults.append("more moves")
    if now["faults"] > frozen["faults"]:
        faults.append("broken rules")
    if now.get("left_out", 0) > frozen.get("left_out", 0):
        faults.append("sets of parts that no plan meets")
    if not faults:
        return ""
    return f"{name}: {', '.join(faults)}; {now} instead of {frozen}"


def compare_means() -> None:
    """Print how much longer the steps are than the frozen ones, each and on average."""
    frozen = json.loads(Path(__file__).with_name("paths.json").read_text("utf-8"))
    changes = []
    for name, case in cases().items():
        for before, now in zip(_listed(frozen[name]), _listed(case()), strict=True):
            changes.append(now["makespan"] / before["makespan"] - 1)
            sys.stdout.write(f"{changes[-1]:+9.5%}  {name}\n")
    sys.stdout.write(f"{statistics.mean(changes):+9.5%}  mean\n")


def _listed(answers: object) -> list[dict[str, float]]:
    return answers if isinstance(answers, list) else [answers]  # type: ignore[list-item]


if __name__ == "__main__":
    compare_means()
