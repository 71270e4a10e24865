"""Times eight schedules in twelve shapes, and plans, on one GPU, beside torch's runtime on the same backend.

    penstock testbed --workers 8 -- python benchmarks/gpu/schedules.py --ranks 8 --tokens 2048 --out schedules-8.json
    penstock testbed --workers 8 -- python benchmarks/gpu/schedules.py --ranks 4 --tokens 2048 --out schedules-4.json

The model is a Llama with 8 layers per rank in bfloat16, and a micro-batch is one sequence. For each schedule, steps
of our runtime and of torch's alternate on the same modules, with the same actions in the same order. Ratios are taken
within a round. `--graphs` adds ours with recorded actions (CUDA graphs). `page.py` makes the predictions afterwards.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from bench import (
    DRY,
    REAL,
    Ours,
    Size,
    Step,
    Torchs,
    arguments,
    clocked,
    free_memory,
    memory,
    note,
    quartiles,
    stages_of,
    warm,
    write,
)

from penstock import Schedule, make, simulate
from penstock.cost.network import Network
from penstock.formats import read_plan
from penstock.ir.timeline import split_idle_time
from penstock.measure.links import measured_network
from penstock.runtime import Comm, spawn
from penstock.sim.simulate import own_cost

NAMES: dict[str, tuple[str, dict[str, int]]] = {
    "gpipe": ("gpipe", {}),
    "1f1b": ("1f1b", {}),
    "interleaved v=2": ("interleaved", {"chunks": 2}),
    "interleaved v=4": ("interleaved", {"chunks": 4}),
    "chimera": ("chimera", {}),
    "hanayo W=1": ("hanayo", {"waves": 1}),
    "hanayo W=2": ("hanayo", {"waves": 2}),
    "hanayo W=4": ("hanayo", {"waves": 4}),
    "zb-h1": ("zb-h1", {}),
    "zb-v": ("zb-v", {}),
    "interleaved-zb v=2": ("interleaved-zb", {"chunks": 2}),
    "interleaved-zb v=4": ("interleaved-zb", {"chunks": 4}),
}
DEPTH = 8  # layers of a rank


@dataclass(frozen=True)
class Setting:
    """What one run does."""

    size: Size
    microbatches: tuple[int, ...]
    rounds: int
    plans: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    seconds: float = 500.0  # no new schedule is begun after so many
    out: Path | None = None
    peer: bool = True
    recorded: bool = False  # ours once more, with recorded actions


def schedules(setting: Setting, ranks: int, count: int) -> dict[str, Schedule]:
    """All that fit, by name."""
    found = {}
    for label, (name, shape) in NAMES.items():
        if not setting.only or label in setting.only:
            found[label] = make(name, ranks=ranks, microbatches=count, **shape)
    for file in setting.plans:
        plan = read_plan(Path(file))
        if plan.schedule.ranks == ranks and len(plan.schedule.microbatches) == count:
            found[f"planned: {plan.name}"] = plan.schedule
    if count > ranks and "gpipe" in found:
        found["gpipe"] = found.pop("gpipe")  # needs most memory, so it comes last
    return {
        label: one
        for label, one in found.items()
        if one.parts <= setting.size.config.layers
    }


def work(comm: Comm, setting: Setting) -> dict[str, Any]:
    """A rank: schedule after schedule."""
    begin = time.perf_counter()
    size = setting.size
    if size.device == "cpu":
        torch.set_num_threads(1)
    network = measured_network(comm, every=False, device=torch.device(size.device))
    rows = []
    for count in setting.microbatches:
        for label, schedule in schedules(setting, comm.ranks, count).items():
            if time.perf_counter() - begin > setting.seconds:
                note(comm, f"no time for {label} M={count}")
                continue
            row = one(comm, setting, network, label, schedule)
            rows.append(row)
            if comm.rank == 0:
                # What there is, should the time run out.
                write(setting.out, {"ranks": comm.ranks, "rows": rows})
            note(
                comm,
                f"{label} M={count}: {1e3 * row['ours']:.1f} ms, its actions alone {1e3 * row['own']:.1f}"
                f", torch {1e3 * (row['torch'] or 0):.1f}  [{time.perf_counter() - begin:.0f} s]",
            )
    return {
        "ranks": comm.ranks,
        "size": {**asdict(size.config), "tokens": size.tokens},
        "rows": rows,
    }


def one(
    comm: Comm, setting: Setting, network: Network, label: str, schedule: Schedule
) -> dict[str, Any]:
    """A schedule: steps of all runtimes by turns, then one of ours with its timeline."""
    size = setting.size
    stages = stages_of(schedule, comm, size)
    warm(stages, size)
    ours = Ours(schedule, stages, comm, size)
    machines: dict[str, Step] = {"ours": ours}
    theirs = peer_of(schedule, stages, size, label) if setting.peer else None
    if theirs is not None:
        machines["torch"] = theirs
    if setting.recorded:
        machines["recorded"] = Ours(schedule, stages, comm, size, recorded=True)
    losses = {}
    for who, machine in machines.items():
        losses[who] = clocked(comm, machine, stages, size)[1]
        note(comm, f"  {label}: {who} runs")
    memory(comm, size)
    times: dict[str, list[float]] = {who: [] for who in machines}
    peaks: dict[str, list[float]] = {}
    for turn in range(1 + setting.rounds):
        for who, machine in machines.items():
            took, _ = clocked(comm, machine, stages, size)
            peaks[who] = memory(comm, size, who == "recorded")
            if turn:
                times[who].append(took)
    timelines = [ours.timeline() for _ in range(3)]
    timeline = sorted(timelines, key=lambda t: t.makespan)[1]
    message = size.tokens * size.config.width * size.dtype.itemsize
    hop = float(network.latency) + message / float(network.bandwidth)  # type: ignore[arg-type]
    row: dict[str, Any] = {
        "name": label,
        "microbatches": len(schedule.microbatches),
        "actions": schedule.actions,
        "ours": quartiles(times["ours"])[0],
        "ours_spread": quartiles(times["ours"])[1:],
        "makespan": timeline.makespan,
        "own": simulate(schedule, own_cost(timeline)).makespan,
        "bubble": timeline.bubble,
        "work": timeline.busy.tolist(),
        "idle": split_idle_time(timeline, hop)._asdict(),
        "hop": hop,
        "memory": peaks["ours"],
        "loss": losses,
        "chunk": float((timeline.end - timeline.start).mean()),
        "torch": None,
        "over": None,
        "torch_memory": peaks.get("torch"),
    }
    if theirs is not None:
        over = quartiles(
            [b / a for a, b in zip(times["ours"], times["torch"], strict=True)]
        )
        row |= {
            "torch": quartiles(times["torch"])[0],
            "over": over[0],
            "over_spread": over[1:],
        }
    if setting.recorded:
        row["recorded"] = quartiles(times["recorded"])
        row["recorded_memory"] = peaks["recorded"]
        again = machines["recorded"].timeline()  # type: ignore[attr-defined]
        row["recorded_bubble"], row["recorded_idle"] = (
            again.bubble,
            split_idle_time(again, hop)._asdict(),
        )
        for who in machines:
            over = [b / a for a, b in zip(times["recorded"], times[who], strict=True)]
            row[f"{who}_over_recorded"] = quartiles(over)
    if comm.rank == 0 and label in ("1f1b", "hanayo W=2", "zb-v"):
        row["spans"] = [(str(a), s, e) for _, a, s, e in timeline.spans()]
    del ours, theirs, machines, machine, stages
    free_memory(size.device)
    return row


def peer_of(schedule: Schedule, stages: Any, size: Size, label: str) -> Torchs | None:
    """Torch's runtime with the same actions; None where it has no such thing (two copies of a part)."""
    if schedule.parts != len(schedule.stages):
        return None
    return Torchs(schedule, stages, size, native=label in ("gpipe", "1f1b"))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument(
        "--microbatches", default="", help="comma-separated; P and 2P unless given"
    )
    parser.add_argument("--tokens", type=int, default=REAL.tokens, help="of a sequence")
    parser.add_argument("--depth", type=int, default=DEPTH, help="layers of a rank")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument(
        "--plans", nargs="*", default=[], help="plan.json files to run too"
    )
    parser.add_argument("--only", default="", help="comma-separated names")
    parser.add_argument("--seconds", type=float, default=500.0)
    parser.add_argument("--no-torch", action="store_true", help="ours alone")
    parser.add_argument(
        "--graphs", action="store_true", help="ours with recorded actions too"
    )
    given = parser.parse_args()
    ranks = 2 if given.dry else given.ranks
    size = (
        DRY
        if given.dry
        else replace(REAL.with_layers(given.depth * ranks), tokens=given.tokens)
    )
    counts = (
        tuple(map(int, given.microbatches.split(",")))
        if given.microbatches
        else (ranks, 2 * ranks)
    )
    only = tuple(filter(None, given.only.split(",")))
    setting = Setting(
        size,
        counts,
        given.rounds,
        tuple(given.plans),
        only,
        given.seconds,
        given.out.absolute() if given.out else None,
        not given.no_torch,
        given.graphs,
    )
    found = spawn(
        ranks,
        work,
        setting,
        patience=60.0,
        backend="gloo" if given.dry else "penstock_ipc",
    )[0]
    write(given.out, found)


if __name__ == "__main__":
    main()
