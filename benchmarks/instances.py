"""SkipPipe's published instances A and B, and searches for paths on them beside full pipelines.

`paths.py` and `wan.py` share these.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from penstock.cost import Cluster, Node
from penstock.cost.cost import PartCost
from penstock.plan.paths.planner import PathPlan, plan_paths, rule_faults
from penstock.plan.paths.problem import PUBLISHED, Policy, Problem
from penstock.plan.paths.rotation import full_pipeline
from penstock.plan.paths.search import Budget

CITED = json.loads(
    (Path(__file__).parent.parent / "tests" / "data" / "skippipe.json").read_text()
)
OVERHEAD, MESSAGE = 0.35, 33.5e6  # seconds of every message, and its bytes
GRADIENTS = 1.35e9  # bytes of a part, in float32
SCALES = {"A": 0.06, "B": 0.03}  # seconds in which our processes run one of theirs
# First come, first served, and slots are not reserved.
QUEUES = Policy(PUBLISHED.queue_orders, ordered=False)


class Sides(NamedTuple):
    """The two sides of a comparison."""

    full: PathPlan
    paths: PathPlan


def cited_cluster(name: str, slots: int = 3) -> Cluster:
    """The nodes and delays of a published instance. Its links have no bandwidth."""
    cited = CITED["instances"][name]
    count = len(cited["locations"])
    return Cluster(
        tuple(Node(site, 1.0, slots) for site in cited["locations"]),
        tuple(map(tuple, cited["delays"])),
        tuple((math.inf,) * count for _ in range(count)),
    )


def with_bandwidth(name: str) -> Cluster:
    """A published instance with bandwidths: a delay is 0.35 s and the time of a message of 33.5 MB."""
    delays = CITED["instances"][name]["delays"]
    latency = tuple(
        tuple(0.0 if a == b else OVERHEAD for b in range(len(delays)))
        for a in range(len(delays))
    )
    bandwidth = tuple(
        tuple(
            math.inf if a == b else MESSAGE / max(delay - OVERHEAD, 1e-9)
            for b, delay in enumerate(row)
        )
        for a, row in enumerate(delays)
    )
    return Cluster(cited_cluster(name).nodes, latency, bandwidth)


def search_sides(
    cluster: Cluster,
    parts: Sequence[PartCost],
    iterations: int,
    seed: int = 0,
    **how: Any,
) -> Sides:
    """Paths, and the full pipeline of the same search. Both follow their rules."""
    problem = Problem(cluster, tuple(parts), 6, **how)
    paths = plan_paths(problem, Budget(iterations), seed)
    sides = Sides(full_pipeline(paths, Budget(iterations), seed), paths)
    assert not any(map(rule_faults, sides))
    return sides


def best_sides(
    name: str,
    cluster: Cluster,
    parts: Sequence[PartCost],
    iterations: int,
    seeds: int,
    **how: Any,
) -> Sides:
    """The best full pipeline and the best paths of the same searches.

    The last search uses the authors' arrangement, and the others choose one.
    """
    arrangement = CITED["instances"][name]["partitions"]
    own = {**how, "data_nodes": len(arrangement[0])}
    searches = [(seed, own) for seed in range(seeds)]
    searches.append((0, {**how, "sizes": None, "arrangement": arrangement}))
    found = [
        search_sides(cluster, parts, iterations, seed, **options)
        for seed, options in searches
    ]
    return Sides(
        *(
            min(some, key=lambda plan: plan.makespan)
            for some in zip(*found, strict=True)
        )
    )
