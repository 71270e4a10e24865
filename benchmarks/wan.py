"""Runs planned paths on a slow network: twenty processes, real messages, links as slow as in SkipPipe's instances.

    chrt -f 10 python benchmarks/wan.py                        all pieces, writes docs/results/wan.md (about 20 minutes)
    chrt -f 10 python benchmarks/wan.py --only A --out FOLDER  one piece: A, B, levers (which can be resumed) or sums
    chrt -f 10 python benchmarks/wan.py --only sums            sums of gradients; writes only their section of the page
    python benchmarks/wan.py --merge FOLDER                    the page of the pieces in a folder
    chrt -f 10 python benchmarks/wan.py --quick                A alone, short searches, two rounds; writes nothing
    python benchmarks/wan.py ... --json                        one JSON object to stdout

Stages sleep instead of computing, links are emulated in user space (`ShapedComm`), and time runs faster by the factor
in the table. Everything else is the real runtime: processes, gloo, autograd, the executor on the planned lanes. The
full pipeline leaves out nothing, has the same nodes, slots, micro-batches and rules, uses all data nodes, and is
planned like the paths, by the function that `penstock paths` compares with: with the same number of searches and of
moves in each, its own arrangement, and its own number of nodes for each part
(and once with the published numbers). Rounds alternate. `predicted` is the simulator's time for the same lanes.
`levers` is only simulated. `sums` runs the sums of gradients as well (`wan_sums.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import wan_sums
from instances import CITED, QUEUES, SCALES, Sides, best_sides, cited_cluster
from sleeping import Sleeping
from tables import priority

from penstock import ModelCost, lower
from penstock.formats import dump_plan, load_plan
from penstock.ir import Timeline
from penstock.plan.paths import even_parts, paths_plan
from penstock.runtime import Executor, ProcessComm, batch_of, spawn
from penstock.view.chart import COLOURS, Series, chart

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "docs" / "results" / "wan.md"
IMAGES = ROOT / "docs" / "images"
WIDTH = 16
EVEN = (5, 3, 3, 3, 3, 3)
FREER = 4  # rows of the levers of which each allows what those above it do
LEVERS: dict[str, dict[str, Any]] = {
    "first come, first served, on the authors' arrangement": {
        "policy": QUEUES,
        "given": True,
    },
    "planned order": {"given": True},
    "planned order, own arrangement": {"sizes": EVEN},
    "planned order, own arrangement, own sizes": {},
    "the same with 2 slots": {"slots": 2},
    "the same with 6 slots": {"slots": 6},
    "the same with 12 micro-batches a data node": {"microbatches": 12},
    "the same with 2 token slices": {"slices": 2},
    "the same in waves": {"waves": True},
}

Row = dict[str, Any]


# ---------------------------------------------------------------- plans
def plan_sides(
    name: str,
    iterations: int,
    seeds: int,
    slots: int = 3,
    slices: int = 1,
    **how: Any,
) -> Sides:
    """The best full pipeline and the best paths of an instance."""
    forward = CITED["instances"][name]["forward"]
    return best_sides(
        name,
        cited_cluster(name, slots),
        even_parts(6, forward, tokens=slices),
        iterations,
        seeds,
        tokens=slices,
        slices=slices,
        **how,
    )


@contextmanager
def ordinary() -> Iterator[None]:
    """Give up real-time priority during a search: only the timed processes need it."""
    policy, priority = os.sched_getscheduler(0), os.sched_getparam(0)
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    yield
    os.sched_setscheduler(0, policy, priority)


def levers(file: Path, iterations: int, seeds: int) -> list[Row]:
    """Return all rows. Rows that the file lacks are computed and written there one by one."""
    rows: list[Row] = json.loads(file.read_text())["rows"] if file.exists() else []
    for name in "AB":
        for number, (what, how) in enumerate(LEVERS.items()):
            if any(row["instance"] == name and row["lever"] == what for row in rows):
                continue
            found = plan_sides(name, iterations, seeds, **how)
            row: Row = {
                "instance": name,
                "lever": what,
                "searches": seeds,
                "iterations": iterations,
            }
            for side, plan in (("full", found.full), ("ours", found.paths)):
                row |= {side: plan.makespan, f"{side}_bound": plan.bound}
                if 0 < number < FREER:  # it may do as the row above does
                    above = next(
                        r
                        for r in rows
                        if r["instance"] == name
                        and r["lever"] == list(LEVERS)[number - 1]
                    )
                    row[side] = min(row[side], above[side])
            rows.append(row | {"saved": 1 - row["ours"] / row["full"]})
            file.write_text(json.dumps({"rows": rows}))
    return rows


# ---------------------------------------------------------------- processes
def work(
    comm: ProcessComm,
    texts: list[str],
    costs: list[ModelCost],
    scale: float,
    rounds: int,
) -> list[list[tuple[float, list[float]]]]:
    """Run one rank of all schedules in turn.

    Return the makespan of each round and the times at which its micro-batches were finished.
    """
    torch.set_num_threads(1)
    executors, batches = [], []
    for text, cost in zip(texts, costs, strict=True):
        schedule = load_plan(text, "a plan").schedule
        mine = {
            number: Sleeping(cost.parts[stage.part], scale=scale)
            for number, stage in enumerate(schedule.stages)
            if stage.rank == comm.rank
        }
        shaped = wan_sums.ShapedMessages(comm, cost.network, scale)
        executors.append(Executor(lower(schedule), mine, shaped, lambda y, _: y.sum()))
        executors[-1].recorder.offset = 0.0  # All processes share a clock.
        count = len(schedule.microbatches)
        batches.append(
            batch_of(
                [torch.zeros(1, 1, WIDTH)] * count,
                [torch.zeros(1, 1, dtype=torch.long)] * count,
            )
        )
    took: list[list[tuple[float, list[float]]]] = [[] for _ in texts]
    for turn in range(1 + rounds):
        for number, (executor, batch) in enumerate(
            zip(executors, batches, strict=True)
        ):
            comm.barrier()
            timeline = executor.step(batch, timed=True).timeline
            assert timeline is not None
            if turn:
                took[number].append(
                    (timeline.makespan / scale, finishes(timeline, scale))
                )
    return took


def finishes(timeline: Timeline, scale: float = 1.0) -> list[float]:
    """The times at which the first micro-batch was finished, the second, and so on."""
    ends = np.zeros(len(timeline.schedule.microbatches))
    np.maximum.at(ends, timeline.schedule.table.microbatch, timeline.end)
    return [float(end) / scale for end in sorted(ends)]


def measure(name: str, iterations: int, seeds: int, rounds: int) -> list[Row]:
    scale = SCALES[name]
    with ordinary():
        even = plan_sides(name, iterations, seeds, sizes=EVEN)
        own = plan_sides(name, iterations, seeds)
    found = {
        "full pipeline": own.full,
        "full pipeline, published sizes": even.full,
        "planned paths": min(own.paths, even.paths, key=lambda plan: plan.makespan),
    }
    sys.stderr.write(
        f"{name}: "
        + ", ".join(f"{what} {plan.makespan:.2f} s" for what, plan in found.items())
        + "\n"
    )
    texts = [dump_plan(paths_plan(plan)) for plan in found.values()]
    costs = [plan.problem.cluster.cost(plan.problem.pieces) for plan in found.values()]
    took = spawn(
        len(CITED["instances"][name]["locations"]), work, texts, costs, scale, rounds
    )[0]
    rows: list[Row] = []
    for (what, plan), turns in zip(found.items(), took, strict=True):
        times = [seconds for seconds, _ in turns]
        rows.append(
            {
                "instance": name,
                "what": what,
                "faster": 1 / scale,
                "predicted": plan.timeline.makespan,
                "bound": plan.bound,
                "sizes": [len(nodes) for nodes in plan.partitions],
                "measured": statistics.median(times),
                "spread": (min(times), max(times)),
                "rounds": rounds,
                "over": statistics.median(times) / plan.timeline.makespan,
                "finishes": turns[times.index(statistics.median_low(times))][1],
                "due": finishes(plan.timeline),
            }
        )
    for row, theirs in zip(rows[:-1], took, strict=False):
        saved = [
            1 - ours[0] / other[0] for other, ours in zip(theirs, took[-1], strict=True)
        ]
        row |= {
            "saved": statistics.median(saved),
            "saved_spread": (min(saved), max(saved)),
        }
    return rows


# ---------------------------------------------------------------- the page
def measured_table(rows: list[Row]) -> str:
    lines = [
        "| instance | what | nodes of each part | times faster | predicted, s | measured, s (range) | of predicted "
        "| paths take less by |",
        "|---|---|---|--:|--:|--:|--:|--:|",
    ]
    for r in rows:
        less = (
            f"{r['saved']:.1%} ({r['saved_spread'][0]:.1%}-{r['saved_spread'][1]:.1%})"
            if "saved" in r
            else ""
        )
        lines.append(
            f"| {r['instance']} | {r['what']} | {' '.join(map(str, r['sizes']))} | {r['faster']:.0f} "
            f"| {r['predicted']:.2f} | {r['measured']:.2f} ({r['spread'][0]:.2f}-{r['spread'][1]:.2f}) "
            f"| {r['over']:.3f} | {less} |"
        )
    return "\n".join(lines)


def lever_table(rows: list[Row]) -> str:
    heads = (
        "| rules, the same for both | A: full | paths | less | B: full | paths | less |"
    )
    lines = [heads, "|---|--:|--:|--:|--:|--:|--:|"]
    cited = [CITED["instances"][name] for name in "AB"]
    published = [
        (one["full"]["seconds"], one["plans"]["planned"]["seconds"]) for one in cited
    ]
    cells = "".join(
        f" {full:.2f} | {ours:.2f} | {1 - ours / full:.1%} |"
        for full, ours in published
    )
    lines.append(
        f"| as published: full pipeline of 27 micro-batches on 3 of 5 data nodes |{cells}"
    )
    for what in LEVERS:
        cells = "".join(
            f" {r['full']:.2f} | {r['ours']:.2f} | {r['saved']:.1%} |"
            for name in "AB"
            for r in rows
            if r["lever"] == what and r["instance"] == name
        )
        lines.append(f"| {what} |{cells}")
    return "\n".join(lines)


def picture(name: str, rows: list[Row]) -> str:
    lines = []
    for colour, row in zip((COLOURS[1], COLOURS[3], COLOURS[0]), rows, strict=True):
        count = tuple(float(n) for n in range(len(row["finishes"]) + 1))
        short = (
            row["what"]
            .replace("full pipeline", "full")
            .replace("planned paths", "paths")
        )
        lines.append(Series(short, (0.0, *row["finishes"]), count, colour=colour))
        lines.append(
            Series("simulated", (0.0, *row["due"]), count, dashed=True, colour=colour)
        )
    title = f"Instance {name}: finished micro-batches"
    return chart(lines, title, "seconds on the emulated network", "micro-batches")


def page(pieces: dict[str, Any]) -> str:
    rows = [row for name in "AB" for row in pieces[name]["rows"]]
    full, even, paths = (
        {row["instance"]: row for row in rows[number::3]} for number in range(3)
    )
    most = {name: 1 - paths[name]["bound"] / full[name]["predicted"] for name in "AB"}
    where, first = pieces["A"]["where"], pieces["levers"]["rows"][0]
    searches = f"{first['searches']} of {first['iterations']:,} moves"
    pictures = "\n\n".join(
        f"![finished micro-batches over time, {name}](../images/wan-{name}.svg)"
        for name in "AB"
    )
    sums = ""
    if "sums" in pieces:
        found = pieces["sums"]
        sums = wan_sums.section(found["rows"], found["where"]) + "\n"
    return f"""# Planned paths on a slow network

`chrt -f 10 python benchmarks/wan.py` runs 20 processes on {where}. Seconds are those of the emulated network, and all
times are medians over {pieces["A"]["rows"][0]["rounds"]} rounds. Stages sleep and links are emulated; processes,
messages, autograd and the executor are real. The full pipeline leaves out nothing. It has the same nodes, slots,
micro-batches and rules, and the same number of searches with the same work. It chooses which nodes hold which part,
and how many. With *published sizes* there are five data nodes and three nodes for each other part, as SkipPipe uses
for its paths.

All searches are limited by the moves that they try, so every machine finds the same plans.

{measured_table(rows)}

{pictures}

{sums}## Lever by lever

The table shows simulated seconds of a step with 30 micro-batches (60 in one row) on 20 nodes with 3 slots, unless a
row says otherwise. Both sides use the lever of the row and the same number of searches: {searches}, and one more of
the same size on the authors' arrangement. Searches this short leave a few percent unused.

{lever_table(pieces["levers"]["rows"])}

SkipPipe's best claim is 55% less time than a full pipeline on three of five data nodes. Compared with a full pipeline
that is planned by the same means, paths take {full["A"]["saved"]:.0%} less on A and {full["B"]["saved"]:.0%} less on
B ({even["A"]["saved"]:.0%} and {even["B"]["saved"]:.0%} with the published sizes). Waves, which use every link twice,
come closest to 55%, but there both sides take longer than without waves, so that row is no gain.

Why not more? If a third of the parts is left out, a micro-batch visits 4 nodes and 4 links each way instead of 6
and 6. If all nodes and links are alike, the load of a step on the cluster falls by 33% (round trips of the data nodes'
slots), 40% (work of the other nodes) or 52% (slots in total: on a path over k nodes the first slot is held for k
links, the second for k - 1, so k (k + 1) / 2, which is 10 instead of 21). Any further gain comes from links that
differ, where a full pipeline has to use bad ones; once its nodes are arranged for it, it uses few of them. Less is
proven: the bound for paths, compared with the full pipeline that was found, leaves room for {most["A"]:.0%} on A and
{most["B"]:.0%} on B. Every slice pays a whole delay here, since the instances have no bandwidths. On links with
bandwidths, slices gain ([paths](paths.md)).
"""


def written(pieces: dict[str, Any]) -> None:
    IMAGES.mkdir(exist_ok=True)
    for name in "AB":
        (IMAGES / f"wan-{name}.svg").write_text(picture(name, pieces[name]["rows"]))
    RESULT.write_text(page(pieces))


def measure_sums(iterations: int, seeds: int, rounds: int) -> list[Row]:
    """Plan and run the sums of gradients on both instances; their searches are shorter."""
    rows: list[Row] = []
    for name in "AB":
        moves = min(iterations, 25_500)
        rows += wan_sums.measure(name, moves, min(seeds, 2), min(rounds, 3), ordinary)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        choices=("A", "B", "levers", "sums"),
        help="one piece; needs --out, except sums, which writes its section of the page",
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="folder for the pieces; without it one that is thrown away",
    )
    parser.add_argument(
        "--merge",
        type=Path,
        metavar="FOLDER",
        help="write the page of the pieces in a folder",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--iterations", type=int, default=65_500, help="moves of each search"
    )
    parser.add_argument("--seeds", type=int, default=3, help="searches for each plan")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="instance A, short searches, two rounds; writes nothing",
    )
    parser.add_argument(
        "--quick-sums",
        action="store_true",
        help="the same for the sums of gradients, with one round",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object to stdout")
    given = parser.parse_args()
    if given.quick_sums:
        rows = wan_sums.measure("A", 2_500, 1, 1, ordinary)
        sys.stdout.write(wan_sums.section(rows, "a short trial"))
        return
    if given.quick:
        rows = measure("A", 6_300, 1, 2)
        sys.stdout.write(
            json.dumps({"rows": rows}) + "\n"
            if given.json
            else measured_table(rows) + "\n"
        )
        return
    where = f"{os.cpu_count()} cores, {priority()}, torch {torch.__version__}"
    with tempfile.TemporaryDirectory() as thrown_away:
        folder = given.merge or given.out or Path(thrown_away)
        folder.mkdir(parents=True, exist_ok=True)
        names = (
            []
            if given.merge
            else [given.only]
            if given.only
            else ["A", "B", "sums", "levers"]
        )
        for name in names:
            if name == "levers":
                with ordinary():
                    levers(
                        folder / "levers.json",
                        min(given.iterations, 25_500),
                        given.seeds,
                    )
            elif name == "sums":
                found = measure_sums(given.iterations, given.seeds, given.rounds)
                piece = {"rows": found, "where": where}
                (folder / "sums.json").write_text(json.dumps(piece))
            else:
                rows = measure(name, given.iterations, given.seeds, given.rounds)
                (folder / f"{name}.json").write_text(
                    json.dumps({"rows": rows, "where": where})
                )
        pieces = {
            file.stem: json.loads(file.read_text())
            for file in sorted(folder.glob("*.json"))
        }
    if {"A", "B", "levers"} <= pieces.keys() and len(
        pieces["levers"]["rows"]
    ) == 2 * len(LEVERS):
        written(pieces)
    elif given.only == "sums" and given.out is None:
        found = pieces["sums"]["rows"]
        text = wan_sums.section(found, where)
        RESULT.write_text(wan_sums.with_section(RESULT.read_text(), text))
    if given.json:
        sys.stdout.write(json.dumps(pieces) + "\n")


if __name__ == "__main__":
    main()
