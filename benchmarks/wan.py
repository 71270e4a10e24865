"""Planned paths on a slow network, for real: twenty processes, real messages, links as slow as SkipPipe's instances.

    chrt -f 10 python benchmarks/wan.py            instances A and B, writes docs/results/wan.md (about ten minutes)
    chrt -f 10 python benchmarks/wan.py --quick    A alone, two rounds, two minutes; writes nothing
    python benchmarks/wan.py --json                one JSON object to stdout

Stages sleep instead of computing, links are emulated in user space (`ShapedComm`), and time runs faster by the factor
in the table; everything else is the runtime as it is: processes, gloo, autograd, the executor on the planned lanes. The
full pipeline, which leaves out nothing, has the same nodes, slots and micro-batches, uses all data nodes, and is
planned as well as we can. Rounds alternate. `predicted` is the simulator's time for the same lanes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from penstock import ModelCost, lower
from penstock.cost import Cluster, Node
from penstock.ir import dump_plan, load_plan
from penstock.plan import as_file, even_parts, plan_paths
from penstock.plan.baselines import full
from penstock.runtime import Executor, ProcessComm, ShapedComm, Sleeping, batch_of, spawn

ROOT = Path(__file__).parent.parent
CITED = json.loads((ROOT / "tests" / "data" / "skippipe.json").read_text())
RESULT = ROOT / "docs" / "results" / "wan.md"
SCALES = {"A": 0.06, "B": 0.03}  # seconds here for one there
WIDTH = 16


def plans(name: str, seconds: float) -> dict[str, Any]:
    """Ours, and the full pipeline on the nodes it suits best: the authors' arrangement or ours."""
    cited = CITED["instances"][name]
    count = len(cited["locations"])
    cluster = Cluster(
        tuple(Node(site, 1.0, 3) for site in cited["locations"]),
        tuple(map(tuple, cited["delays"])), tuple((math.inf,) * count for _ in range(count)),
    )  # fmt: skip
    parts = even_parts(6, cited["forward"])
    found = plan_paths(cluster, parts, 6, seconds=seconds, clock=time.process_time)
    theirs = plan_paths(cluster, parts, 6, arrangement=cited["partitions"], seconds=0.5, clock=time.process_time)
    whole = [full(plan, seconds, clock=time.process_time) for plan in (found, theirs)]
    return {"full pipeline": min(whole, key=lambda plan: plan.makespan), "planned paths": found}


def work(comm: ProcessComm, texts: list[str], costs: list[ModelCost], scale: float, rounds: int) -> list[list[float]]:
    """One rank of all schedules, in turn; the makespan of each round."""
    torch.set_num_threads(1)
    executors, batches = [], []
    for text, cost in zip(texts, costs, strict=True):
        schedule = load_plan(text, "a plan").schedule
        mine = {
            number: Sleeping(cost.parts[stage.part], scale=scale)
            for number, stage in enumerate(schedule.stages)
            if stage.rank == comm.rank
        }
        shaped = ShapedComm(comm, cost.network, scale)
        executors.append(Executor(lower(schedule), mine, shaped, lambda y, _: y.sum(), WIDTH))
        count = len(schedule.microbatches)
        batches.append(batch_of([torch.zeros(1, 1, WIDTH)] * count, [torch.zeros(1, 1, dtype=torch.long)] * count))
    took: list[list[float]] = [[] for _ in texts]
    for turn in range(1 + rounds):
        for number, (executor, batch) in enumerate(zip(executors, batches, strict=True)):
            comm.barrier()
            timeline = executor.step(batch, timed=True).timeline
            assert timeline is not None
            if turn:
                took[number].append(timeline.makespan / scale)
    return took


def measure(name: str, seconds: float, rounds: int) -> list[dict[str, Any]]:
    found, scale = plans(name, seconds), SCALES[name]
    texts = [dump_plan(as_file(plan)) for plan in found.values()]
    costs = [plan.problem.cost() for plan in found.values()]
    ranks = len(CITED["instances"][name]["locations"])
    took = spawn(ranks, work, texts, costs, scale, rounds)[0]
    rows: list[dict[str, Any]] = []
    for (what, plan), times in zip(found.items(), took, strict=True):
        rows.append({
            "instance": name, "what": what, "faster": 1 / scale, "predicted": plan.timeline.makespan,
            "measured": statistics.median(times), "spread": (min(times), max(times)),
            "over": statistics.median(times) / plan.timeline.makespan,
        })  # fmt: skip
    saved = [1 - ours / theirs for theirs, ours in zip(*took, strict=True)]
    rows[1] |= {"saved": statistics.median(saved), "saved_spread": (min(saved), max(saved))}
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| instance | what | times faster | predicted, s | measured, s (range) | of predicted | less than full |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for r in rows:
        less = f"{r['saved']:.1%} ({r['saved_spread'][0]:.1%}-{r['saved_spread'][1]:.1%})" if "saved" in r else ""
        lines.append(
            f"| {r['instance']} | {r['what']} | {r['faster']:.0f} | {r['predicted']:.2f} "
            f"| {r['measured']:.2f} ({r['spread'][0]:.2f}-{r['spread'][1]:.2f}) | {r['over']:.3f} | {less} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="instance A, two rounds; writes nothing")
    parser.add_argument("--json", action="store_true", help="one JSON object to stdout")
    given = parser.parse_args()
    rows = [
        row
        for name in ("A" if given.quick else "AB")
        for row in measure(name, 1.0 if given.quick else 3.0, 2 if given.quick else 5)
    ]
    policy = "real-time priority" if os.sched_getscheduler(0) == os.SCHED_FIFO else "ordinary priority"
    text = (
        "# Planned paths on a slow network\n\n`chrt -f 10 python benchmarks/wan.py`; 20 processes on "
        f"{os.cpu_count()} cores, {policy}, torch {torch.__version__}. Seconds are those of the network that is "
        f"played. Medians over rounds.\n\n{table(rows)}\n"
    )
    if not given.quick:
        RESULT.write_text(text)
    sys.stdout.write(json.dumps({"rows": rows}) + "\n" if given.json else text)


if __name__ == "__main__":
    main()
