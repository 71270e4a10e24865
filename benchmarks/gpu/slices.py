"""Times token slices on one GPU: one or two long sequences on eight workers, whole, in equal slices, and as planned.

    penstock testbed --workers 8 -- python benchmarks/gpu/slices.py --profile profile.json     measures a layer first
    python benchmarks/gpu/slices.py --plan profile.json --plans plans/                         plans, anywhere
    penstock testbed --workers 8 -- python benchmarks/gpu/slices.py --plans plans/ --out slices.json

The model is a Llama with 2 layers per rank in bfloat16. *Planned* are the best cuts for 1F1B or GPipe over slices;
*composed* is the best combination that the planner knows (waves, split backwards, slices). Both come from a profile
of all ranks at the same time, taken at 16,384 tokens. A step of M whole sequences takes M + P - 1 turns, of which M
are work, so slicing can gain at most (M + P - 1) / M.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from bench import (
    DRY,
    REAL,
    Ours,
    Size,
    arguments,
    clocked,
    free_memory,
    gathered,
    memory,
    note,
    profile_of,
    quartiles,
    rings,
    stages_of,
    write,
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
from penstock.runtime import Comm, spawn

DEPTH, LENGTHS, EVEN = 2, (4096, 8192, 16384, 32768, 65536), (4, 8, 16)
SIMPLE = ("gpipe", "1f1b", "terapipe", "seq1f1b")
GRAIN = 128  # tokens
SLICES = 16  # at most
SHORT = 16384  # longer ones take seconds a step: one round


@dataclass(frozen=True)
class Setting:
    """What one run does."""

    size: Size
    lengths: tuple[int, ...]
    sequences: tuple[int, ...]
    plans: Path | None
    rounds: int
    seconds: float
    out: Path | None
    recorded: bool = False


def work(comm: Comm, setting: Setting) -> dict[str, Any]:
    """Length after length."""
    begin, rows = time.perf_counter(), []
    for tokens in setting.lengths:
        for count in setting.sequences:
            for label, schedule in variants(
                comm.ranks, tokens, count, setting.plans
            ).items():
                if time.perf_counter() - begin > setting.seconds:
                    continue
                rows.append(
                    {
                        "tokens": tokens,
                        "sequences": count,
                        "name": label,
                        **one(
                            comm,
                            replace(setting.size, tokens=tokens),
                            schedule,
                            setting,
                        ),
                    }
                )
                if comm.rank == 0:
                    write(setting.out, {"ranks": comm.ranks, "rows": rows})
                row = rows[-1]
                text = (
                    f"{1e3 * row['seconds']:.1f} ms, {max(row['memory']) / 1e9:.2f} GB"
                )
                note(
                    comm,
                    f"{tokens} x{count} {label}: {text} [{time.perf_counter() - begin:.0f} s]",
                )
    return {"ranks": comm.ranks, "rows": rows}


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


def one(comm: Comm, size: Size, schedule: Schedule, setting: Setting) -> dict[str, Any]:
    """Seconds, memory and timeline of a schedule."""
    stages = stages_of(schedule, comm, size)
    # Such a step takes ten seconds, and an action half a second.
    long = size.tokens > 2 * SHORT and schedule.slices == 1
    recorded = setting.recorded and not long
    ours = Ours(schedule, stages, comm, size, recorded)
    memory(comm, size)
    first, loss = clocked(comm, ours, stages, size)
    if not long:
        memory(comm, size)
    before = allocations(size)
    rounds = 0 if long else setting.rounds if size.tokens <= SHORT else 1
    times = [clocked(comm, ours, stages, size)[0] for _ in range(rounds)] or [first]
    row: dict[str, Any] = {
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
    del ours, stages
    free_memory(size.device)
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
                sys.stdout.write(
                    f"{tokens} x{count} {kind}: {name}, {best.makespan:.4g} s, whole {whole:.4g} s\n"
                )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--sequences", default="1,2")
    parser.add_argument(
        "--profile", type=Path, help="only measure a layer, into this file"
    )
    parser.add_argument(
        "--plan",
        type=Path,
        help="only plan, from this profile, into the folder of --plans",
    )
    parser.add_argument("--plans", type=Path, help="folder of plans")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=500.0)
    parser.add_argument(
        "--graphs", action="store_true", help="with recorded actions (CUDA graphs)"
    )
    given = parser.parse_args()
    ranks = 2 if given.dry else given.ranks
    size = DRY.with_layers(4) if given.dry else REAL.with_layers(DEPTH * ranks)
    size = replace(
        size, config=replace(size.config, vocab=min(size.config.vocab, 2048))
    )
    lengths = (64, 128) if given.dry else tuple(map(int, given.lengths.split(",")))
    sequences = tuple(map(int, given.sequences.split(",")))
    backend = "gloo" if given.dry else "penstock_ipc"
    if given.plan:
        plan_all(given.plan, given.plans, ranks, lengths, sequences)
    elif given.profile:
        at = replace(size, tokens=64 if given.dry else 16384)
        given.profile.write_text(
            spawn(ranks, profiled, at, 1, patience=120.0, backend=backend)[0]
        )
    else:
        out = given.out.absolute() if given.out else None
        plans = given.plans.absolute() if given.plans else None
        setting = Setting(
            size,
            lengths,
            sequences,
            plans,
            given.rounds,
            given.seconds,
            out,
            given.graphs,
        )
        write(
            given.out, spawn(ranks, work, setting, patience=120.0, backend=backend)[0]
        )


if __name__ == "__main__":
    main()
