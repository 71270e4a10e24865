"""Runs planned paths on a slow network: twenty processes, real messages, links as slow as in SkipPipe's instances.

    chrt -f 10 python benchmarks/wan.py                    tables and pictures of docs/results/networks.md (20 minutes)
    chrt -f 10 python benchmarks/wan.py --only A           one instance; writes no page
    python benchmarks/wan.py --quick                       one lever, short searches, ranks as threads; writes nothing

Stages sleep instead of computing, links are emulated in user space (`ShapedComm`), and time runs faster, as `SCALES`
says. Everything else is the real runtime: processes, gloo, autograd, the executor on the planned lanes. The full
pipeline leaves out nothing, has the same nodes, slots, micro-batches and rules, uses all data nodes, and is planned
like the paths: with the same number of searches and of moves in each, and an arrangement and sums of its own. Rounds
alternate. `predicted` is the simulator's time for the same lanes.

Every part has 1.35 GB of gradients, except in the row without sums. The published instances have only delays, so with
sums a delay is taken as 0.35 s and the time of a message of 33.5 MB. Messages of steps and of sums are emulated with
the same bandwidths, but with small tensors. If several passes share a sum, a pass with the sum and one without are run,
and the mean of a pass follows from both.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from harness import (
    Found,
    Row,
    Script,
    Spread,
    extremes,
    priority,
    ratios,
    say,
    table,
    words,
)
from instances import (
    CITED,
    GRADIENTS,
    MESSAGE,
    SCALES,
    Sides,
    best_sides,
    cited_cluster,
    with_bandwidth,
)
from shaped import ShapedComm
from sleeping import Sleeping
from torch import Tensor, nn

from penstock import Cost, ModelCost, PartCost, Timeline, lower
from penstock.cost.profile import sum_as
from penstock.cost.sums import link_matrices, ring_plan
from penstock.formats import dump_plan, load_plan
from penstock.ir.sums import SumPlan
from penstock.ir.verify_sums import verify_sums
from penstock.plan.paths import even_parts, paths_plan
from penstock.plan.paths.planner import PathPlan
from penstock.runtime import Comm, Executor, batch_of, run_threads, spawn
from penstock.runtime.comm.comm import Pending
from penstock.runtime.executor import RunOptions
from penstock.sim.sums import sum_intervals
from penstock.view.chart import COLOURS, Series, chart

WIDTH = 2048  # numbers of the message that stands for those bytes
INFLATE = MESSAGE / (4 * WIDTH)
NUMBERS = round(GRADIENTS / INFLATE / 4)  # of the gradients of a part
QUICK_SCALE = 0.002
SIDES = ("full pipeline", "planned paths")
DTYPES = {"float32": None, "int8": torch.int8}


@dataclass(frozen=True, slots=True)
class Lever:
    """A way to sum gradients, the same for both sides."""

    name: str
    sums: bool = True
    planned: bool = True
    messages: str = "float32"
    passes: int = 1


LEVERS = (
    Lever("none", sums=False),
    Lever("rings", planned=False),
    Lever("planned sums"),
    Lever("planned sums in int8", messages="int8"),
    Lever("planned sums, once every 4 passes", passes=4),
    Lever("planned sums in int8, once every 4 passes", messages="int8", passes=4),
)


# ---------------------------------------------------------------- plans
def plan_sides(name: str, lever: Lever, iterations: int, seeds: int) -> Sides:
    """The best full pipeline and the best paths of an instance, with these sums."""
    forward = CITED["instances"][name]["forward"]
    if not lever.sums:
        parts = even_parts(6, forward)
        return best_sides(name, cited_cluster(name), parts, iterations, seeds)
    parts = even_parts(6, forward, message=MESSAGE, gradients=GRADIENTS)
    return best_sides(
        name,
        with_bandwidth(name),
        sum_as(parts, lever.messages),
        iterations,
        seeds,
        planned_sums=lever.planned,
        passes=lever.passes,
    )


@contextmanager
def ordinary() -> Iterator[None]:
    """Give up real-time priority during a search: only the timed processes need it."""
    policy, priority = os.sched_getscheduler(0), os.sched_getparam(0)
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    yield
    os.sched_setscheduler(0, policy, priority)


def text_of(plan: PathPlan, lever: Lever) -> str:
    """A plan with its sums, as a run reads it."""
    if not lever.sums:
        return dump_plan(paths_plan(plan))
    made = paths_plan(plan, sum_messages=lever.messages)
    if not lever.planned:
        made = replace(made, sums=rings_of(plan.timeline, plan.problem.cost()))
    verify_sums(made.schedule, made.sums)
    return dump_plan(made)


def rings_of(timeline: Timeline, cost: Cost) -> tuple[SumPlan, ...]:
    """A ring for each part, over the links that its price assumes."""
    plans = []
    for one in sum_intervals(timeline.schedule, cost, timeline.end):
        if one.bytes > 0:
            links = link_matrices(one.ranks, cost.latency, cost.bandwidth)
            plans.append(ring_plan(*links, one.bytes, one.ranks, one.parts))
    return tuple(plans)


# ---------------------------------------------------------------- processes
class Weighted(Sleeping):
    """A sleeping stage with gradients to sum; if there are sums, a head has none."""

    def __init__(self, part: PartCost, scale: float, sums: bool) -> None:
        super().__init__(part, scale=scale)
        numbers = NUMBERS if part.gradients > 0 else 1
        trains = part.gradients > 0 or not sums
        self.weight = nn.Parameter(torch.zeros(numbers), requires_grad=trains)


class ShapedMessages(ShapedComm):
    """Slows down messages alone: what the backend adds up here are only the measured times and the loss."""

    def add(self, tensor: Tensor, group: tuple[int, ...]) -> Pending:
        """Start a sum without a delay."""
        return self.inner.add(tensor, group)


def work(
    comm: Comm,
    texts: list[str],
    costs: list[ModelCost],
    levers: list[Lever],
    scale: float,
    rounds: int,
) -> list[list[tuple[float, list[float]]]]:
    """Run one rank of all plans in turn.

    Return the mean seconds of a pass of each plan and round, and when its micro-batches were finished.
    """
    torch.set_num_threads(1)
    executors = []
    for text, cost, lever in zip(texts, costs, levers, strict=True):
        plan = load_plan(text, "a plan")
        mine = {
            number: Weighted(cost.parts[stage.part], scale, lever.sums)
            for number, stage in enumerate(plan.schedule.stages)
            if stage.rank == comm.rank
        }
        options = RunOptions(sums=plan.sums, sum_messages=DTYPES[lever.messages])
        shaped = ShapedMessages(comm, cost.network, scale, INFLATE)
        executor = Executor(
            lower(plan.schedule), mine, shaped, lambda y, _: y.sum(), options=options
        )
        executor.recorder.offset = 0.0  # All processes share a clock.
        executors.append(executor)
    took: list[list[tuple[float, list[float]]]] = [[] for _ in texts]
    for turn in range(1 + rounds):
        for number, (executor, lever) in enumerate(zip(executors, levers, strict=True)):
            count = len(executor.program.schedule.microbatches)
            inputs = [torch.zeros(1, 1, WIDTH)] * count
            batch = batch_of(inputs, [torch.zeros(1, 1, dtype=torch.long)] * count)
            seconds = []
            for sums in (False, True) if turn and lever.passes > 1 else (lever.sums,):
                comm.barrier()
                timeline = executor.step(batch, timed=True, sums=sums).timeline
                assert timeline is not None
                assert bool(timeline.sums) is sums
                seconds.append(timeline.makespan / scale)
            if turn:
                weights = (lever.passes - 1, 1) if lever.passes > 1 else (1,)
                total = sum(a * b for a, b in zip(weights, seconds, strict=True))
                took[number].append((total / lever.passes, finishes(timeline, scale)))
    return took


def finishes(timeline: Timeline, scale: float = 1.0) -> list[float]:
    """The times at which the first micro-batch was finished, the second, and so on."""
    ends = np.zeros(len(timeline.schedule.microbatches))
    np.maximum.at(ends, timeline.schedule.table.microbatch, timeline.end)
    return [float(end) / scale for end in sorted(ends)]


def measure_instance(name: str, given: argparse.Namespace) -> list[Row]:
    """Plan and run all levers of an instance; return a row for each side of each."""
    cases: list[tuple[Lever, str, PathPlan]] = []
    levers = (LEVERS[0], LEVERS[2]) if given.quick else LEVERS
    moves, seeds = (200, 1) if given.quick else (given.iterations, given.seeds)
    with ordinary():
        for lever in levers:
            # The searches with sums are shorter, because each move takes longer.
            most = (25_500, 2) if lever.sums else (moves, seeds)
            found = plan_sides(name, lever, min(moves, most[0]), min(seeds, most[1]))
            cases += [(lever, *side) for side in zip(SIDES, found, strict=True)]
            full, paths = (plan.makespan for plan in found)
            say(f"{name}, {lever.name}: full {full:.2f} s, paths {paths:.2f} s")
    arguments = (
        [text_of(plan, lever) for lever, _, plan in cases],
        [plan.problem.cluster.cost(plan.problem.pieces) for _, _, plan in cases],
        [lever for lever, _, _ in cases],
        QUICK_SCALE if given.quick else SCALES[name],
        1 if given.quick else given.rounds,
    )
    ranks = len(CITED["instances"][name]["locations"])
    if given.quick:
        took = run_threads(ranks, lambda comm: work(comm, *arguments))[0]
    else:
        took = spawn(ranks, work, *arguments)[0]
    rows: list[Row] = []
    for (lever, side, plan), turns in zip(cases, took, strict=True):
        seconds = [one for one, _ in turns]
        row: Row = {
            "instance": name,
            "lever": lever.name,
            "what": side,
            "sizes": [len(nodes) for nodes in plan.partitions],
            "last": float(plan.timeline.end.max()),
            "predicted": plan.makespan,
            "bound": plan.bound,
            "measured": seconds,
            "over": statistics.median(seconds) / plan.makespan,
            "finishes": turns[seconds.index(statistics.median_low(seconds))][1],
            "due": finishes(plan.timeline),
        }
        if side == SIDES[1]:
            full = rows[-1]
            shares = ratios(seconds, full["measured"])
            row["saved"] = extremes([1 - share for share in shares])
            row["saved_predicted"] = 1 - plan.makespan / full["predicted"]
        rows.append(row)
    return rows


# ---------------------------------------------------------------- the script
def options(parser: argparse.ArgumentParser) -> None:
    flag = parser.add_argument
    flag("--only", type=words, default=("A", "B"), help="instances, such as A")
    flag("--rounds", type=int, default=5)
    flag("--iterations", type=int, default=65_500, help="moves of each search")
    flag("--seeds", type=int, default=3, help="searches for each plan")


def measure(given: argparse.Namespace) -> Found:
    names = given.only[:1] if given.quick else given.only
    rows = [row for name in names for row in measure_instance(name, given)]
    where = f"{os.cpu_count()} cores, {priority()}, torch {torch.__version__}"
    return {"rows": rows, "where": where}


def tables(found: Found) -> dict[str, str]:
    def less(row: Row) -> str:
        if "saved" not in row:
            return ""
        saved = format(Spread(*row["saved"]), ".1%")
        return f"{saved}, predicted {row['saved_predicted']:.1%}"

    columns = {
        "instance": "{instance}",
        "gradient all-reduce": "{lever}",
        "what": "{what}",
        "nodes of each part": "{sizes}",
        "last backward, s": "{last:.2f}",
        "pass predicted, s": "{predicted:.2f}",
        "measured, s (range)": lambda row: f"{extremes(row['measured']):.2f}",
        "of predicted": "{over:.3f}",
        "paths take less by (range)": less,
    }
    plain = [row for row in found["rows"] if row["lever"] == LEVERS[0].name]
    sums = [row for row in found["rows"] if row not in plain]
    made = {"wan": table(plain, columns), "wan: sums": table(sums, columns)}
    return {
        name: f"{text}\n\nMeasured on {found['where']}." for name, text in made.items()
    }


def pictures(found: Found) -> dict[str, str]:
    """Finished micro-batches of both sides over time, without sums."""
    drawn = {}
    for name in "AB":
        lines = []
        rows = [row for row in found["rows"] if row["instance"] == name]
        for colour, row in zip((COLOURS[1], COLOURS[0]), rows, strict=False):
            count = tuple(float(n) for n in range(len(row["finishes"]) + 1))
            for label, ends in ((row["what"], "finishes"), ("simulated", "due")):
                line = Series(label, (0.0, *row[ends]), count, colour=colour)
                lines.append(replace(line, dashed=ends == "due"))
        title = f"Instance {name}: finished micro-batches"
        across = "seconds on the emulated network"
        if lines:
            drawn[f"images/wan-{name}.svg"] = chart(
                lines, title, across, "micro-batches"
            )
    return drawn


if __name__ == "__main__":
    Script(__doc__, measure, tables, options=options, pictures=pictures).main()
