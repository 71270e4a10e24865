"""Measures what the runtime costs on CPU workers, beside torch's, and how checking and simulating grow.

    chrt -r 10 python benchmarks/cpu.py                   all tables of docs/results/cpu.md (some fifteen minutes)
    chrt -r 10 python benchmarks/cpu.py --parts llama     some of overhead, llama, scale; writes no page
    python benchmarks/cpu.py --quick                      each once with tiny sizes; writes nothing

`overhead`: a stage sleeps instead of computing, so a rank does not need its own core. The tensors are real, either
small or of 4 MiB. All machines run the same order of actions. `bare` is a plain loop of isend, irecv and sleep without
autograd: the limit of gloo and this machine. Many short rounds of bare, ours and torch take turns, and ratios are taken
within a round, so noise that affects all of them cancels. CPU time is less sensitive to noise. Real-time priority
(chrt) keeps wake-ups from queueing behind those of other processes. It must be round-robin (-r), not first-in-first-out
(-f): a thread of gloo keeps asking for a lock that another thread holds, and under -f it would keep that thread off its
core forever.

`llama`: a 7 M-parameter Llama on two ranks with one thread each, and 8 micro-batches of one sequence of 128 tokens.
Both runtimes run the same schedules on the same parts with the same weights. Before timing, all of them must have the
same loss and the same norm of the gradients. The last column is the time of our step over the time that a
runtime without any cost would take for the same actions, each at its measured duration.

`scale`: 1F1B over 64 to 256 ranks is built, checked and simulated, each size in its own process on one core, after a
warm-up that loads the compiled loops. The claim is about the time per action, which grows less than twofold from a
hundred thousand to ten million actions.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from gpu.bench import Ours, Size, Step, Torchs, clocked, gathered, stages_of
from harness import (
    Found,
    Row,
    Script,
    alternate,
    priority,
    quartiles,
    ratios,
    table,
    words,
)
from sleeping import Sleeping
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from penstock import ModelCost, PartCost, Seconds, UnitCost, make, simulate
from penstock.ir import Schedule, lower
from penstock.ir.program import Receive, RunAction, Send
from penstock.models import LlamaConfig
from penstock.runtime import Comm, Executor, batch_of, spawn
from penstock.schedules.one_f_one_b import one_f_one_b
from penstock.sim.simulate import own_cost
from penstock.torch_internals import schedule_runtime

PARTS = ("overhead", "llama", "scale")
SMALL, LARGE = 16, 1 << 20  # floats in a message
SLEEPING: dict[str, dict[str, int]] = {
    "1f1b": {},
    "interleaved": {"chunks": 2},
    "zb-v": {},
    "interleaved-zb": {"chunks": 2},
    "hanayo": {"waves": 1},
}
CONFIG = LlamaConfig(vocab=2048, width=256, layers=8, heads=8, kv_heads=8, inner=672)
SIZE = Size(CONFIG, 128, "cpu")
COMPUTING = {**SLEEPING, "zb-h1": {}}
MICROBATCHES = 8
SIZES = ((64, 78), (256, 196), (256, 1954), (256, 19_532))  # ranks, micro-batches
Machine = Callable[[], object]


def timed(comm: Comm, machine: Machine) -> float:
    """Seconds of a step, of the slowest rank."""
    comm.barrier()
    begin = time.perf_counter()
    machine()
    took = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


# ---------------------------------------------------------------- stages that sleep
class Total(torch.autograd.Function):
    """The loss: a number, and a gradient that is there already, so that it costs nobody anything."""

    ones: ClassVar[dict[int, Tensor]] = {}

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.ones = Total.ones.get(y.numel())
        if ctx.ones is None:
            ctx.ones = Total.ones[y.numel()] = torch.ones_like(y)
        return y.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return ctx.ones


class SleepInput(torch.autograd.Function):
    """For torch, which splits a backward by asking for some gradients and then for others: the input's path."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grad, None


class SleepWeight(torch.autograd.Function):
    """And the weight's."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grad, None


class InTwo(nn.Module):
    """The first stage has no input gradient: all of its backward is its weights'."""

    def __init__(self, seconds: float, first: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.naps = (seconds, 2 * seconds if first else seconds)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = SleepInput.apply(x, self.naps[0]) + SleepWeight.apply(
            self.weight, self.naps[1]
        )
        return y


def ideal_cost(schedule: Schedule, seconds: float) -> ModelCost:
    one = Seconds(seconds)
    parts = [PartCost(one, one, one) for _ in range(schedule.parts)]
    parts[0] = PartCost(one, Seconds(0.0), Seconds(2 * seconds))
    return ModelCost(tuple(parts))


def bare(schedule: Schedule, comm: Comm, seconds: float, size: int) -> Machine:
    rows, lane = schedule.table, lower(schedule).lanes[comm.rank]
    number = {rows.action(n): n for n in range(len(rows))}
    needs = {
        one.action: [rows.action(n) for n in rows.needs[number[one.action]] if n >= 0]
        for one in lane
        if isinstance(one, RunAction)
    }
    buffers = {
        one.action: (one.peer, torch.zeros(1, 1, size))
        for one in lane
        if isinstance(one, Receive)
    }
    out = torch.zeros(1, 1, size)
    cost = ideal_cost(schedule, seconds)
    nap = {
        one.action: cost.seconds(schedule, one.action)
        for one in lane
        if isinstance(one, RunAction)
    }

    def step() -> None:
        due = {
            action: dist.irecv(buffer, peer)
            for action, (peer, buffer) in buffers.items()
        }
        sent = []
        for one in lane:
            if isinstance(one, RunAction):
                for needed in needs[one.action]:
                    work = due.pop(needed, None)
                    if work is not None:
                        work.wait()
                if nap[one.action]:
                    time.sleep(nap[one.action])
            elif isinstance(one, Send):
                sent.append(dist.isend(out, one.peer))
        for work in sent:
            work.wait()

    return step


def ours(schedule: Schedule, comm: Comm, seconds: float, size: int) -> Machine:
    parts = ideal_cost(schedule, seconds).parts
    stages: dict[int, nn.Module] = {
        number: Sleeping(parts[stage.part])
        for number, stage in enumerate(schedule.stages)
        if stage.rank == comm.rank
    }
    executor = Executor(lower(schedule), stages, comm, lambda y, _: Total.apply(y))
    count = len(schedule.microbatches)
    batch = batch_of(
        [torch.zeros(1, 1, size)] * count, [torch.zeros(1, 1, dtype=torch.long)] * count
    )
    return lambda: executor.step(batch)


def torchs(schedule: Schedule, comm: Comm, seconds: float, size: int) -> Machine:
    mine = [n for n, stage in enumerate(schedule.stages) if stage.rank == comm.rank]
    total, count = len(schedule.stages), len(schedule.microbatches)
    cpu = torch.device("cpu")
    stages = [PipelineStage(InTwo(seconds, n == 0), n, total, cpu) for n in mine]
    rows = [list(map(str, lane)) for lane in schedule.lanes]
    runtime = schedule_runtime(
        stages, count, lambda y, _: Total.apply(y), rows, messages=False
    )
    x, target = torch.zeros(count, 1, size), torch.zeros(count, 1)

    def step() -> None:
        given = (x,) if 0 in mine else ()
        extra = {"target": target, "losses": []} if total - 1 in mine else {}
        runtime.step(*given, **extra)

    return step


MACHINES = {"bare": bare, "ours": ours, "torch": torchs}


def cells(quick: bool) -> dict[int, list[Row]]:
    """By ranks: schedules, micro-batches, milliseconds of a forward of a chunk, floats of a message, rounds."""

    def cell(name: str, microbatches: int, chunk: float, size: int, rounds: int) -> Row:
        forward = chunk if name == "1f1b" else 2 * chunk
        return {
            "name": name,
            "microbatches": microbatches,
            "forward": forward,
            "size": size,
            "rounds": rounds,
        }

    if quick:
        return {2: [cell("zb-v", 2, 1, SMALL, 2)]}
    four = [
        cell(n, 8, chunk, SMALL, 25 if chunk == 1 else 12)
        for chunk in (5, 1)
        for n in SLEEPING
    ]
    four += [cell(n, 8, 5, LARGE, 8) for n in SLEEPING]
    eight = [
        cell(n, 16, chunk, SMALL, 12 if chunk == 1 else 6)
        for chunk in (5, 1)
        for n in SLEEPING
    ]
    return {4: four, 8: eight}


def run_cells(comm: Comm, cells: list[Row]) -> list[Row]:
    """A rank: cell after cell, with all machines by turns."""
    torch.set_num_threads(1)
    rows = []
    for cell in cells:
        name = cell["name"]
        schedule = make(
            name,
            ranks=comm.ranks,
            microbatches=cell["microbatches"],
            **SLEEPING[name],
        )
        seconds = cell["forward"] / 1000 / int(schedule.table.stages_on_rank.max())
        machines = {
            who: build(schedule, comm, seconds, cell["size"])
            for who, build in MACHINES.items()
        }
        busy: dict[str, list[float]] = {who: [] for who in machines}

        def turn(who: str, machine: Machine, busy: Any = busy) -> float:
            before = time.process_time()
            took = timed(comm, machine)
            used = torch.tensor([time.process_time() - before], dtype=torch.float64)
            dist.all_reduce(used)
            busy[who].append(float(used))
            return took

        turns = {
            who: lambda who=who, machine=machine: turn(who, machine)
            for who, machine in machines.items()
        }
        times = alternate(turns, cell["rounds"], cold=2)
        ideal = simulate(schedule, ideal_cost(schedule, seconds)).makespan
        lane = max(len(lane) for lane in schedule.lanes)
        middle = {who: statistics.median(some) for who, some in times.items()}
        row = {**cell, "ranks": comm.ranks, "chunk": 1000 * seconds, "ideal": ideal}
        row["over_bare"] = {
            who: quartiles(ratios(some, times["bare"])) for who, some in times.items()
        }
        row["efficiency"] = {who: ideal / one for who, one in middle.items()}
        row["late"] = {who: 1e6 * (one - ideal) / lane for who, one in middle.items()}
        row["cpu"] = {
            who: 1e6 * statistics.median(some[2:]) / len(schedule.table)
            for who, some in busy.items()
        }
        rows.append(row)
    return rows


# ---------------------------------------------------------------- stages that compute
def run_llama(comm: Comm, names: list[str], rounds: int) -> list[Row]:
    """A rank: both runtimes with all schedules, by turns, on copies of the same weights."""
    torch.set_num_threads(1)
    turns: dict[str, Callable[[], float]] = {}
    executors: dict[str, Ours] = {}
    expected: tuple[float, float] | None = None
    for name in names:
        schedule = make(
            name, ranks=comm.ranks, microbatches=MICROBATCHES, **COMPUTING[name]
        )
        for who in ("ours", "torch"):
            stages = stages_of(schedule, comm, SIZE)
            step: Step
            if who == "ours":
                step = executors[name] = Ours(schedule, stages, comm, SIZE)
            else:
                step = Torchs(schedule, stages, SIZE, native=name == "1f1b")
            loss = max(gathered(comm, clocked(comm, step, stages, SIZE)[1], SIZE))
            found = (loss, norm(comm, stages))
            expected = expected or found
            assert abs(loss - expected[0]) < 1e-4, (found, expected)
            assert abs(found[1] / expected[1] - 1) < 1e-3, (found, expected)
            turns[f"{name} {who}"] = lambda step=step, stages=stages: clocked(
                comm, step, stages, SIZE
            )[0]
    times = alternate(turns, rounds)
    spans = alternate(
        {name: lambda one=one: over_own_spans(one) for name, one in executors.items()},
        rounds,
    )
    rows = []
    for name in names:
        ours, theirs = (times[f"{name} {who}"] for who in ("ours", "torch"))
        row = {"ours": statistics.median(ours), "torch": statistics.median(theirs)}
        row["over_torch"] = quartiles(ratios(ours, theirs))
        row["over_1f1b"] = quartiles(ratios(ours, times["1f1b ours"]))
        rows.append({"name": name, **row, "over_spans": quartiles(spans[name])})
    return rows


def norm(comm: Comm, stages: dict[int, nn.Module]) -> float:
    """The norm of the gradients of all ranks."""
    gradients = [p.grad for part in stages.values() for p in part.parameters()]
    squares = [float(one.pow(2).sum()) for one in gradients if one is not None]
    return sum(gathered(comm, sum(squares), SIZE)) ** 0.5


def over_own_spans(ours: Ours) -> float:
    """A step over what its own actions would take on a runtime that costs nothing."""
    timeline = ours.timeline()
    alone = simulate(timeline.schedule, own_cost(timeline, statistics.mean))
    return float(timeline.makespan / alone.makespan)


# ---------------------------------------------------------------- schedules of many actions
def run_scale(comm: Comm, ranks: int, microbatches: int) -> Row:
    """Build, check and simulate on one core."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    cost = UnitCost(comm=0.1)
    # Loads the compiled loops.
    simulate(make("1f1b", ranks=64, microbatches=256), cost)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    schedule = one_f_one_b(ranks, microbatches)  # larger than `make` allows
    built = time.perf_counter() - begin
    spans = []
    for _ in range(3):
        start = time.perf_counter()
        simulate(schedule, cost)
        spans.append(time.perf_counter() - start)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "actions": schedule.actions,
        "build": built,
        "simulate": min(spans),
        "memory": 1024 * (after - before),
        "build_each": built / schedule.actions,
        "simulate_each": min(spans) / schedule.actions,
    }


# ---------------------------------------------------------------- the script
def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", type=words, default=PARTS)


def measure(given: argparse.Namespace) -> Found:
    found: Found = {"where": f"{priority()}, {os.cpu_count()} cores"}
    if given.quick:  # in one set of processes
        return found | spawn(2, run_quickly)[0]
    if "overhead" in given.parts:
        found["overhead"] = [
            row
            for ranks, some in cells(False).items()
            for row in spawn(ranks, run_cells, some)[0]
        ]
    if "llama" in given.parts:
        found["llama"] = spawn(2, run_llama, list(COMPUTING), 20)[0]
    if "scale" in given.parts:
        found["scale"] = [spawn(1, run_scale, *size)[0] for size in SIZES]
    return found


def run_quickly(comm: Comm) -> Found:
    """A rank: all parts with tiny sizes."""
    return {
        "overhead": run_cells(comm, cells(True)[2]),
        "llama": run_llama(comm, ["1f1b"], 1),
        "scale": [run_scale(comm, *SIZES[0])],
    }


def tables(found: Found) -> dict[str, str]:
    def listed(key: str, digits: str) -> Callable[[Row], str]:
        return lambda row: ", ".join(format(one, digits) for one in row[key].values())

    columns = {
        "overhead": {
            "schedule": "{name}",
            "P": "{ranks}",
            "M": "{microbatches}",
            "forward of a chunk, ms": "{chunk:.3g}",
            "message": lambda row: "4 MiB" if row["size"] == LARGE else "64 B",
            "ours / bare": "{over_bare[ours]:.3f}",
            "torch / bare": "{over_bare[torch]:.3f}",
            "efficiency: bare, ours, torch": listed("efficiency", ".3f"),
            "µs per action over ideal": listed("late", ".0f"),
            "CPU µs per action": listed("cpu", ".0f"),
        },
        "llama": {
            "schedule": "{name}",
            "ours, ms": "{ours!m:.0f}",
            "torch, ms": "{torch!m:.0f}",
            "ours / torch": "{over_torch:.3f}",
            "ours / our 1F1B": "{over_1f1b:.3f}",
            "ours / its actions alone": "{over_spans:.3f}",
        },
        "scale": {
            "actions": "{actions:,}",
            "build and check, s": "{build:.3g}",
            "simulate, s": "{simulate:.3g}",
            "memory, MB": "{memory!M:,.0f}",
            "build, µs/action": "{build_each!u:.2f}",
            "simulate, µs/action": "{simulate_each!u:.3f}",
        },
    }
    made = {key: table(found[key], columns[key]) for key in PARTS if key in found}
    where = f"With {found['where']}, torch {torch.__version__}."
    return {key: f"{text}\n\n{where}" for key, text in made.items()}


if __name__ == "__main__":
    Script(__doc__, measure, tables, options=options).main()
