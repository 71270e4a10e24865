"""Compares planned schedules with the best fixed order of the literature, and with what people set up by hand.

    python benchmarks/planner.py            all tables and pictures of docs/results/planner.md (some ten minutes)
    python benchmarks/planner.py --quick    one small cell of each; writes nothing

`portfolio`: a rank may hold `ranks` micro-batches, there is one copy of the weights, and sequences are whole. `best
fixed` is the fastest order of the registry in that cell, and `planned` is the fastest of all candidates. Both are then
timed under 20 costs with 10% of noise on every op and link, which took no part in the choice. The last column is
planned over fixed: the mean and the range.

`memory`: the search with slices, for 8 ranks and 8 micro-batches with a latency of 0.03, as the memory of a rank
shrinks. Its bound holds for every plan of the space, and not for one order of lanes.

`surprises`: workloads with analytic profiles of known GPUs, so nothing was measured. The usual choice is the fastest of
1F1B and interleaved 1F1B with whole sequences and equal parts that fits into the memory, with no more recomputed parts
than it must have.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass, replace
from itertools import product

from harness import Found, Row, Script, table

from penstock import UnitCost, portfolio, simulate
from penstock.config import Config, ModelConfig
from penstock.cost import NoisyCost
from penstock.cost.gpus import gpu_of
from penstock.partition import even_partition
from penstock.plan import title
from penstock.plan.candidates import Candidate, evaluate_schedule
from penstock.plan.pricing import gpu_question, unit_question
from penstock.plan.search import row_title, search
from penstock.plan.space import Limits
from penstock.plan.workload import (
    RECOMPUTED_SHARES,
    Hardware,
    Workload,
    divisions_of,
    workload_of,
)
from penstock.schedules import make
from penstock.view import svg

CELLS = [
    (p, m, c) for p in (4, 8, 16) for m in (p, 2 * p, 4 * p) for c in (0.0, 0.05, 0.1)
]
SEEDS = range(1000, 1020)
# memory of a rank, most slices, and the time that the search must reach
TARGETS = ((8.0, 1, 26.65), (8.0, 16, 24.5), (4.0, 16, 24.5), (2.0, 16, 24.5))
TARGETS += ((1.5, 16, 25.2),)
TARGET_SIZES = (8, 8, 0.03)  # ranks, micro-batches, latency
GIB = 2.0**30
USUAL = (
    ("1f1b", ()),
    ("interleaved", (("chunks", 2),)),
    ("interleaved", (("chunks", 4),)),
)
LLAMA_7B = ModelConfig(
    layers=32,
    hidden_size=4096,
    heads=32,
    kv_heads=32,
    intermediate_size=11_008,
    vocab_size=32_000,
)
LLAMA_1B = ModelConfig(
    layers=16,
    hidden_size=2048,
    heads=32,
    kv_heads=8,
    intermediate_size=8192,
    vocab_size=128_256,
)


@dataclass(frozen=True, slots=True)
class Case:
    """A workload on H100 with 72 GiB for a plan."""

    name: str
    model: ModelConfig
    tokens: int
    batch: int
    ranks: int
    microbatches: int


GPU, MEMORY = "h100", 72
CASES = (
    Case("long", LLAMA_7B, tokens=32_768, batch=2, ranks=8, microbatches=2),
    Case("tight", LLAMA_7B, tokens=16_384, batch=8, ranks=8, microbatches=8),
    Case("vocabulary", LLAMA_1B, tokens=4_096, batch=8, ranks=4, microbatches=8),
)
QUICK = Case("quick", LLAMA_1B, tokens=1_024, batch=2, ranks=2, microbatches=2)


def workload_for(case: Case) -> Workload:
    config = Config()
    config = replace(
        config,
        model=case.model,
        data=replace(config.data, seq_len=case.tokens, global_batch=case.batch),
        schedule=replace(config.schedule, microbatches=case.microbatches),
        parallel=replace(config.parallel, pp=case.ranks, dp_replicate=1),
        run=replace(config.run, precision="bfloat16", device="cuda"),
    )
    hardware = Hardware(case.ranks, MEMORY * GIB)
    layers = case.model.layers
    return workload_of(
        config, layers, hardware=hardware, granularity=128, model=case.model
    )


# ---------------------------------------------------------------- beside fixed orders
def measure_cell(ranks: int, microbatches: int, comm: float) -> Row:
    cost = UnitCost(comm=comm)
    found = portfolio(ranks, microbatches, cost, memory=ranks, slices=1)
    fixed = min(
        (c for c in found.candidates if c.order_kind == "fixed"),
        key=lambda c: c.makespan,
    )
    planned = found.best
    noises = [NoisyCost(cost, seed=seed) for seed in SEEDS]
    over = [
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
        "planned_makespan": planned.makespan,
        "bound": planned.bound,
        "ratio": [statistics.mean(over), min(over), max(over)],
    }


def measure_target(memory: float, slices: int, target: float) -> Row:
    ranks, microbatches, comm = TARGET_SIZES
    found = search(
        unit_question(
            ranks, microbatches, UnitCost(comm=comm), memory, Limits(slices=slices)
        )
    )
    best = found.best
    return {
        "memory": memory,
        "slices": slices,
        "target": target,
        "planned": title(best.name, best.shape),
        "makespan": best.makespan,
        "peak": best.peak,
        "bound": found.bound,
        "gap": found.gap,
    }


# ---------------------------------------------------------------- beside usual choices
def measure_case(case: Case, is_quick: bool) -> Row:
    """Search a workload; the chosen plan, and the usual choice."""
    workload = workload_for(case)
    limits = Limits(stages=2, slices=2) if is_quick else Limits(stages=4, slices=16)
    question = gpu_question(workload, case.model, gpu_of(GPU), limits)
    landscape = search(question)
    rows = {"usual": usual_plan(case, workload), "planned": landscape.best}
    found: Row = {"case": case.name, "bound": landscape.bound}
    for who, row in rows.items():
        found[who] = {
            "plan": row_title(row, landscape),
            "step": row.step,
            "idle": row.bubble,
            "peak": row.peak,
            "partition": row.partition,
            "cuts": row.schedule.microbatches[0].cuts,
            "picture": picture(case, who, row),
        }
    return found


def usual_plan(case: Case, workload: Workload) -> Candidate:
    """The fastest plan with a usual schedule, equal parts and whole sequences that fits."""
    rows = []
    for (name, shape), share in product(USUAL, RECOMPUTED_SHARES):
        schedule = make(
            name, ranks=case.ranks, microbatches=case.microbatches, **dict(shape)
        )
        if schedule.parts > case.model.layers:
            continue
        equal = even_partition(case.model.layers, schedule.parts)
        fixed = replace(workload.fixed, partition=equal)
        pricing = gpu_question(
            replace(workload, fixed=fixed), case.model, gpu_of(GPU), Limits()
        ).pricing
        cell = next(one for one in divisions_of(workload) if one.recomputed == share)
        evaluator = pricing.evaluator(cell)
        found = evaluate_schedule(cell, name, shape, "fixed", schedule, evaluator)
        if evaluator.fits(found.peak):
            rows.append(found)
    return min(rows, key=lambda row: row.step)


def picture(case: Case, who: str, row: Candidate) -> str:
    """The timeline of a plan."""
    workload = workload_for(case)
    fixed = replace(workload.fixed, partition=row.partition)
    pricing = gpu_question(
        replace(workload, fixed=fixed), case.model, gpu_of(GPU), Limits()
    ).pricing
    timeline = pricing.evaluator(row.division).timeline(row.schedule)
    name = title(row.name, row.shape)
    return svg(timeline, f"{who}: {name}, {row.step * 1e3:,.0f} ms per step")


# ---------------------------------------------------------------- the script
def measure(given: argparse.Namespace) -> Found:
    quick = given.quick
    targets = [(1.5, 2, 35.0)] if quick else TARGETS
    cases = (QUICK,) if quick else CASES
    return {
        "portfolio": [measure_cell(*cell) for cell in (CELLS[:1] if quick else CELLS)],
        "memory": [measure_target(*one) for one in targets],
        "surprises": [measure_case(case, quick) for case in cases],
    }


def tables(found: Found) -> dict[str, str]:
    mean = statistics.mean(row["ratio"][0] for row in found["portfolio"])
    cells = table(
        found["portfolio"],
        {
            "P": "{ranks}",
            "M": "{microbatches}",
            "comm": "{comm}",
            "best fixed": "{fixed}",
            "makespan, F": "{fixed_makespan:.5g}",
            "planned": "{planned}",
            "its makespan, F": "{planned_makespan:.5g}",
            "its bound": "{bound:.5g}",
            "ratio under noise": "{ratio:.3f}",
        },
    )
    memory = table(
        found["memory"],
        {
            "memory, micro-batches": "{memory:g}",
            "most slices": "{slices}",
            "target": "{target:g}",
            "planned": "{planned}",
            "makespan, F": "{makespan:.5g}",
            "peak": "{peak:.3g}",
            "bound": "{bound:.5g}",
            "optimality gap": "{gap:.1%}",
        },
    )
    columns = {
        "choice": "{who}",
        "plan": "{plan}",
        "step, ms": "{step!m:,.0f}",
        "no plan below, ms": "{bound!m:,.0f}",
        "times as fast": "{gain:.2f}",
        "idle": "{idle:.1%}",
        "peak memory, GiB": lambda row: f"{row['peak'] / GIB:.1f}",
    }
    made = {
        "portfolio": f"{cells}\n\nThe mean ratio over all rows is {mean:.3f}.",
        "portfolio: memory": memory,
    }
    for row in found["surprises"]:
        usual = row["usual"]["step"]
        rows = [
            {**row[who], "who": who, "bound": row["bound"]}
            | {"gain": usual / row[who]["step"]}
            for who in ("usual", "planned")
        ]
        made[f"surprises: {row['case']}"] = table(rows, columns)
    return made


def pictures(found: Found) -> dict[str, str]:
    return {
        f"results/surprises/{row['case']}-{who}.svg": row[who]["picture"]
        for row in found["surprises"]
        for who in ("usual", "planned")
    }


if __name__ == "__main__":
    Script(__doc__, measure, tables, pictures=pictures).main()
