"""Times token slices on one GPU: one or two long sequences on eight workers, whole, in equal slices, and as planned.

    penstock lab testbed --workers 8 -- python benchmarks/gpu/slices.py --profile profile.json   measures a layer first
    python benchmarks/gpu/slices.py --plan profile.json --plans plans/                         plans, anywhere
    penstock lab testbed --workers 8 -- python benchmarks/gpu/slices.py --plans plans/ --out slices.json
    python benchmarks/gpu/slices.py --kept         puts the table of docs/results/h200 into docs/results/gpu.md
    python benchmarks/gpu/slices.py --quick        all three on a CPU with tiny sizes; writes nothing

The model is a Llama with 2 layers per rank in bfloat16. *Planned* are the best cuts for 1F1B or GPipe over slices;
*composed* is the best combination that the planner knows (waves, split backwards, slices). Both come from a profile
of all ranks at the same time, taken at 16,384 tokens. A step of M whole sequences takes M + P - 1 turns, of which M
are work, so slicing can gain at most (M + P - 1) / M.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
from bench import (
    Ours,
    Size,
    clocked,
    gathered,
    measure_cases,
    memory,
    on_ranks,
    profile_of,
    rings,
    size_of,
    stages_of,
)
from harness import (
    RESULTS,
    Found,
    Row,
    Script,
    kept,
    numbers,
    quartiles,
    say,
    table,
)

from penstock import Schedule, make, simulate
from penstock.cost import ProfileCost
from penstock.cost.profile import RowProfiles
from penstock.formats import dump_profile, read_plan, read_profile, write_plan
from penstock.ir import Plan
from penstock.plan.pricing import profile_question
from penstock.plan.search import search
from penstock.plan.space import Limits
from penstock.plan.workload import profile_workload
from penstock.runtime import Comm

DEPTH, LENGTHS, EVEN = 2, (4096, 8192, 16384, 32768, 65536), (4, 8, 16)
SIMPLE = ("gpipe", "1f1b", "terapipe", "seq1f1b")
GRAIN = 128  # tokens
SLICES = 16  # at most
SHORT = 16384  # longer ones take seconds a step: one round


def work(comm: Comm, given: argparse.Namespace) -> list[Row]:
    """Length after length."""
    cases = {}
    for tokens, count in product(given.lengths, given.sequences):
        some = variants(comm.ranks, tokens, count, given.plans)
        for label, schedule in some.items():
            key = {"tokens": tokens, "sequences": count, "name": label}
            cases[f"{tokens} x{count} {label}"] = partial(
                one, comm, key, schedule, given
            )
    return measure_cases(comm, given, given.size, cases)


def variants(
    ranks: int, tokens: int, count: int, plans: Path | None
) -> dict[str, Schedule]:
    """Whole, in equal slices, as planned."""
    found = {"whole": make("1f1b", ranks=ranks, microbatches=count)}
    for slices in EVEN if tokens <= SHORT else EVEN[-1:]:
        if tokens // slices >= 4:
            found[f"{slices} equal"] = make(
                "seq1f1b", ranks=ranks, microbatches=count, slices=slices
            )
    for kind in ("planned", "composed"):
        file = (plans or Path()) / f"{tokens}-{count}-{kind}.json"
        if plans is not None and file.exists():
            plan = read_plan(file)
            found[f"{kind}: {plan.name}"] = plan.schedule
    return found


def one(comm: Comm, key: Row, schedule: Schedule, given: argparse.Namespace) -> Row:
    """Seconds, memory and timeline of a schedule."""
    size = replace(given.size, tokens=key["tokens"])
    stages = stages_of(schedule, comm, size)
    # Such a step takes ten seconds, and an action half a second.
    long = size.tokens > 2 * SHORT and schedule.slices == 1
    recorded = given.graphs and not long
    ours = Ours(schedule, stages, comm, size, recorded)
    memory(comm, size)
    first, loss = clocked(comm, ours, stages, size)
    if not long:
        memory(comm, size)
    before = allocations(size)
    rounds = 0 if long else given.rounds if size.tokens <= SHORT else 1
    times = [clocked(comm, ours, stages, size)[0] for _ in range(rounds)] or [first]
    row: Row = {
        **key,
        "seconds": quartiles(times)[0],
        "spread": quartiles(times)[1:],
        "loss": loss,
        "memory": memory(comm, size, recorded),
        "actions": schedule.actions,
        "recorded": recorded,
        "allocations": gathered(comm, allocations(size) - before, size),
        "rings": gathered(comm, rings(comm), size),
    }
    if not long:
        timeline = ours.timeline()
        row |= {
            "bubble": timeline.bubble,
            "work": timeline.busy.tolist(),
            "makespan": timeline.makespan,
        }
    if schedule.slices > 1 and comm.rank == 0:
        row["spans"] = [
            (str(a), round(s, 6), round(e, 6)) for _, a, s, e in timeline.spans()
        ]
    return row


def allocations(size: Size) -> int:
    """How often this process has asked the GPU itself for memory: each time all its work is waited for."""
    return (
        int(torch.cuda.memory_stats().get("num_device_alloc", 0))
        if size.device == "cuda"
        else 0
    )


def profiled(comm: Comm, size: Size, rounds: int) -> str:
    """The profile of all ranks at the same time, as a file's text."""
    return dump_profile(profile_of(comm, size, rounds))


def plan_all(
    file: Path,
    folder: Path,
    ranks: int,
    lengths: tuple[int, ...],
    sequences: tuple[int, ...],
) -> None:
    """Plans for every length and number of sequences."""
    profile = read_profile(file)
    folder.mkdir(parents=True, exist_ok=True)
    for tokens in lengths:
        cost = ProfileCost(profile, tokens)
        for count in sequences:
            grain = max(GRAIN, tokens // 128) if tokens > 1000 else 4
            profiles = RowProfiles((profile,))
            workload = profile_workload(profiles, ranks, count, tokens, None, grain)
            limits = Limits(stages=4, slices=SLICES)
            question = profile_question(workload, profiles.at, limits, str(file))
            rows = search(question).candidates
            for kind, some in (
                ("composed", rows),
                ("planned", [r for r in rows if r.name in SIMPLE]),
            ):
                best = some[0]
                name = f"{best.name} {best.slices} slices"
                write_plan(
                    Plan(best.schedule, name), folder / f"{tokens}-{count}-{kind}.json"
                )
                whole = simulate(
                    make("1f1b", ranks=ranks, microbatches=count), cost
                ).makespan
                say(
                    f"{tokens} x{count} {kind}: {name}, {best.makespan:.4g} s, whole {whole:.4g} s"
                )


# ---------------------------------------------------------------- the script
def options(parser: argparse.ArgumentParser) -> None:
    flag = parser.add_argument
    flag("--ranks", type=int, default=8)
    flag("--lengths", type=numbers, default=LENGTHS)
    flag("--sequences", type=numbers, default=(1, 2))
    flag("--profile", type=Path, help="only measure a layer, into this file")
    flag("--plan", type=Path, help="only plan, from this profile, into --plans")
    flag("--plans", type=Path, help="folder of plans")
    flag("--rounds", type=int, default=4)
    flag("--seconds", type=float, default=500.0)
    flag("--graphs", action="store_true", help="with CUDA graphs")


def measure(given: argparse.Namespace) -> Found:
    size = size_of(given, DEPTH * given.ranks)
    config = replace(size.config, vocab=min(size.config.vocab, 2048))
    given.size = replace(size, config=config)
    given.plans = given.plans and given.plans.absolute()
    if not given.quick:
        return measure_part(given)
    with tempfile.TemporaryDirectory() as name:
        given.lengths, given.sequences, given.rounds = (16,), (1,), 1
        given.plans, given.profile = Path(name), Path(name) / "profile.json"
        measure_part(given)
        given.profile, given.plan = None, given.profile
        measure_part(given)
        given.plan = None
        return measure_part(given)


def measure_part(given: argparse.Namespace) -> Found:
    """Measure a layer, or plan, or run."""
    found: Found = {}
    if given.profile:
        at = replace(given.size, tokens=64 if given.quick else 16384)
        given.profile.write_text(on_ranks(given, profiled, at, 1))
    elif given.plan:
        assert given.plans, "give the folder --plans"
        ranks = 2 if given.quick else given.ranks
        plan_all(given.plan, given.plans, ranks, given.lengths, given.sequences)
    else:
        found["rows"] = on_ranks(given, work, given)
    return found


def tables(found: Found) -> dict[str, str]:
    rows: list[Row] = []
    for row in found.get("rows", ()):
        count = row["sequences"]
        known = {"speedup": 1.0, "makespan": None, "bubble": None} | row
        if row["name"] == "whole":
            whole = row["seconds"]
        known |= {"speedup": whole / row["seconds"], "bound": (count + 7) / count}
        rows.append(known | {"predicted": None, "error": None} | predicted(row))
    columns = {
        "slices": "{name}",
        "tokens": "{tokens:,}",
        "sequences": "{sequences}",
        "step, ms": "{seconds!m:.0f}",
        "speed-up": "{speedup:.2f}",
        "at most": "{bound:.1f}",
        "memory, GB": lambda row: f"{max(row['memory']) / 1e9:.2f}",
        "idle": "{bubble:.1%}",
        "pass, ms": "{makespan!m:.0f}",
        "predicted, ms": "{predicted!m:.0f}",
        "error": "{error:+.1%}",
    }
    return {"gpu/slices": table(rows, columns)} if rows else {}


def predicted(row: Row) -> Row:
    """What the committed profile predicts for a committed plan."""
    kind = row["name"].partition(":")[0]
    folder = RESULTS / "h200"
    file = folder / "plans" / f"slices-{row['tokens']}-{row['sequences']}-{kind}.json"
    if kind not in ("planned", "composed") or not file.exists():
        return {}
    cost = ProfileCost(read_profile(folder / "slices-profile.json"), row["tokens"])
    seconds = simulate(read_plan(file).schedule, cost).makespan
    return {"predicted": seconds, "error": seconds / row["makespan"] - 1}


def committed(folder: Path) -> Found:
    rows = kept(folder, "slices.json")
    return {"rows": [row for row in rows if row["name"] not in ("4 equal", "8 equal")]}


if __name__ == "__main__":
    Script(__doc__, measure, tables, committed, True, options).main()
