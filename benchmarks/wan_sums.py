"""The sums of gradients on the slow network of `wan.py`: planned, and then run by twenty processes.

Every part has 1.35 GB of gradients. The published instances have only delays, so a delay is taken as 0.35 s and the
time of a message of 33.5 MB. Messages of steps and of sums are emulated with the same bandwidths, but with small
tensors. The full pipeline and the paths are planned by the same search, each with an arrangement and sums of its own.
If several passes share a sum, a pass with the sum and one without are run, and the mean of a pass follows from both.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from instances import (
    CITED,
    GRADIENTS,
    MESSAGE,
    SCALES,
    Sides,
    best_sides,
    with_bandwidth,
)
from shaped import ShapedComm
from sleeping import Sleeping
from tables import middle_and_range, table
from torch import Tensor, nn

from penstock import Cost, ModelCost, Timeline, lower
from penstock.cost.profile import sum_as
from penstock.cost.sums import link_matrices, ring_plan
from penstock.formats import dump_plan, load_plan
from penstock.ir.sums import SumPlan
from penstock.ir.verify_sums import verify_sums
from penstock.plan.paths import even_parts, paths_plan
from penstock.plan.paths.planner import PathPlan
from penstock.runtime import Executor, ProcessComm, batch_of, spawn
from penstock.runtime.comm.comm import Pending
from penstock.runtime.executor import RunOptions
from penstock.sim.sums import sum_intervals

HEADING = "## With sums of gradients"
WIDTH = 2048  # numbers of the message that stands for those bytes
INFLATE = MESSAGE / (4 * WIDTH)
NUMBERS = round(GRADIENTS / INFLATE / 4)  # of the gradients of a part
SIDES = ("full pipeline", "planned paths")
DTYPES = {"float32": None, "int8": torch.int8}
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Lever:
    """A way to sum gradients, the same for both sides."""

    name: str
    planned: bool = True
    messages: str = "float32"
    passes: int = 1


LEVERS = (
    Lever("rings", planned=False),
    Lever("planned sums"),
    Lever("planned sums in int8", messages="int8"),
    Lever("planned sums, once every 4 passes", passes=4),
    Lever("planned sums in int8, once every 4 passes", messages="int8", passes=4),
)
EXACT_LEVER = LEVERS[1].name
CHEAPEST_LEVER = LEVERS[-1].name


# ---------------------------------------------------------------- plans
def plan_sides(name: str, lever: Lever, iterations: int, seeds: int) -> Sides:
    """The best full pipeline and the best paths of an instance, with these sums."""
    parts = even_parts(
        6, CITED["instances"][name]["forward"], message=MESSAGE, gradients=GRADIENTS
    )
    return best_sides(
        name,
        with_bandwidth(name),
        sum_as(parts, lever.messages),
        iterations,
        seeds,
        planned_sums=lever.planned,
        passes=lever.passes,
    )


def text_of(plan: PathPlan, lever: Lever) -> str:
    """A plan with its sums, as a run reads it."""
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
    """A sleeping stage with gradients to sum; a head has none."""

    def __init__(self, cost: ModelCost, part: int, scale: float) -> None:
        super().__init__(cost.parts[part], scale=scale)
        has_gradients = cost.parts[part].gradients > 0
        numbers = NUMBERS if has_gradients else 1
        self.weight = nn.Parameter(torch.zeros(numbers), requires_grad=has_gradients)


class ShapedMessages(ShapedComm):
    """Slows down messages alone: what the backend adds up here are only the measured times and the loss."""

    def add(self, tensor: Tensor, group: tuple[int, ...]) -> Pending:
        """Start a sum without a delay."""
        return self.inner.add(tensor, group)


def work(
    comm: ProcessComm,
    texts: list[str],
    costs: list[ModelCost],
    levers: list[Lever],
    scale: float,
    rounds: int,
) -> list[list[float]]:
    """Run one rank of all plans in turn; return the mean seconds of a pass of each plan and round."""
    torch.set_num_threads(1)
    executors = []
    for text, cost, lever in zip(texts, costs, levers, strict=True):
        plan = load_plan(text, "a plan")
        mine: dict[int, nn.Module] = {
            number: Weighted(cost, stage.part, scale)
            for number, stage in enumerate(plan.schedule.stages)
            if stage.rank == comm.rank
        }
        executors.append(
            Executor(
                lower(plan.schedule),
                mine,
                ShapedMessages(comm, cost.network, scale, INFLATE),
                lambda y, _: y.sum(),
                options=RunOptions(sums=plan.sums, sum_messages=DTYPES[lever.messages]),
            )
        )
        executors[-1].recorder.offset = 0.0  # All processes share a clock.
    took: list[list[float]] = [[] for _ in texts]
    for turn in range(1 + rounds):
        for number, (executor, lever) in enumerate(zip(executors, levers, strict=True)):
            count = len(executor.program.schedule.microbatches)
            batch = batch_of(
                [torch.zeros(1, 1, WIDTH)] * count,
                [torch.zeros(1, 1, dtype=torch.long)] * count,
            )
            seconds = []
            for sums in (False, True) if turn and lever.passes > 1 else (True,):
                comm.barrier()
                timeline = executor.step(batch, timed=True, sums=sums).timeline
                assert timeline is not None
                assert bool(timeline.sums) is sums
                seconds.append(timeline.makespan / scale)
            if turn:
                weights = (lever.passes - 1, 1) if lever.passes > 1 else (1,)
                total = sum(a * b for a, b in zip(weights, seconds, strict=True))
                took[number].append(total / lever.passes)
    return took


def measure(
    name: str,
    iterations: int,
    seeds: int,
    rounds: int,
    searching: Callable[[], AbstractContextManager[None]],
) -> list[Row]:
    """Plan and run all levers of an instance; return a row for each side of each."""
    cases: list[tuple[Lever, str, PathPlan]] = []
    with searching():
        for lever in LEVERS:
            found = plan_sides(name, lever, iterations, seeds)
            named = dict(zip(SIDES, found, strict=True))
            cases += [(lever, side, plan) for side, plan in named.items()]
            seconds = ", ".join(
                f"{side} {one.makespan:.2f} s" for side, one in named.items()
            )
            sys.stderr.write(f"{name}, {lever.name}: {seconds}\n")
    took = spawn(
        len(CITED["instances"][name]["locations"]),
        work,
        [text_of(plan, lever) for lever, _, plan in cases],
        [plan.problem.cluster.cost(plan.problem.pieces) for _, _, plan in cases],
        [lever for lever, _, _ in cases],
        SCALES[name],
        rounds,
    )[0]
    rows: list[Row] = []
    for (lever, side, plan), seconds_of in zip(cases, took, strict=True):
        median = statistics.median(seconds_of)
        row: Row = {
            "instance": name,
            "lever": lever.name,
            "what": side,
            "sizes": [len(nodes) for nodes in plan.partitions],
            "last": float(plan.timeline.end.max()),
            "predicted": plan.makespan,
            "bound": plan.bound,
            "measured": seconds_of,
            "over": median / plan.makespan,
        }
        if side == SIDES[1]:
            full = rows[-1]
            pairs = zip(seconds_of, full["measured"], strict=True)
            row["saved"] = [1 - ours / theirs for ours, theirs in pairs]
            row["saved_predicted"] = 1 - plan.makespan / full["predicted"]
        rows.append(row)
    return rows


# ---------------------------------------------------------------- the page
def section(rows: list[Row], where: str) -> str:
    """The section of the page with these rows."""
    cells = []
    for row in rows:
        saved = ""
        if "saved" in row:
            percent = [100 * one for one in row["saved"]]
            saved = f"{middle_and_range(percent, '.1f', '%')}, predicted {row['saved_predicted']:.1%}"
        cells.append(
            [
                row["instance"],
                row["lever"],
                row["what"],
                " ".join(map(str, row["sizes"])),
                f"{row['last']:.2f}",
                f"{row['predicted']:.2f}",
                middle_and_range(row["measured"], ".2f"),
                f"{row['over']:.3f}",
                saved,
            ]
        )
    heads = (
        "instance | sums | what | nodes of each part | last backward, s | pass, predicted, s | "
        "pass, measured, s (range) | of predicted | paths take less by (range)"
    )
    words = ("instance", "sums", "what", "nodes of each part")
    reached = [
        f"{statistics.median(row['saved']):.1%} on {row['instance']} with {row['lever']}"
        for row in rows
        if "saved" in row and row["lever"] in (EXACT_LEVER, CHEAPEST_LEVER)
    ]
    rounds = len(rows[0]["measured"])
    return f"""{HEADING}

Replicas of a part sum 1.35 GB of gradients. The instances have only delays, so a delay is taken as 0.35 s and the time
of a message of 33.5 MB, for the messages of a step as well as for those of its sums. Twenty processes send all of them,
on {where}; times are medians over {rounds} rounds. Both sides use the lever of the row, the same search, their own
arrangement and their own sums, which run beside the other work of a step. If 4 passes share a sum, times are means of a
pass; what that and int8 cost a model is [measured apart](sums.md).

{table(heads, cells, words)}

The goal was 50% less time than the full pipeline on both instances. Reached is {", ".join(reached)}.
Rings may take less time than their price, which is a cautious one, but still take longer than planned sums.
"""


def with_section(page: str, text: str) -> str:
    """A page in which the section about sums is this one; it comes before the levers."""
    before, found, rest = page.partition(HEADING)
    if found:
        rest = rest[rest.index("\n## ") + 1 :] if "\n## " in rest else ""
    else:
        before, found, rest = page.partition("## Lever by lever")
        rest = found + rest
    return f"{before}{text}\n{rest}"
