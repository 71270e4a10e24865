"""Measures what a runtime costs: sleeping stages in ours, in torch's and in a bare loop, in turns within one run.

    chrt -r 10 python benchmarks/overhead.py          all cells, writes docs/results/overhead.md (about ten minutes)
    chrt -r 10 python benchmarks/overhead.py --quick  two cells, under a minute, writes nothing
    python benchmarks/overhead.py --json              one JSON object to stdout

A stage sleeps instead of computing, so a rank does not need its own core. The tensors are real, either small or of 4
MiB. All contestants run the same order of actions. `bare` is a plain loop of isend, irecv and sleep without autograd:
the limit of gloo and this machine. `floor` is that loop with the autograd of the sleeping stage and a loss, and
nothing else: no runtime can avoid this. A cell consists of many short rounds of bare, floor, ours and torch in turn.
Ratios are taken within a round, so noise that affects all of them cancels. `recorded` is ours with a measured
timeline. The last column is CPU time, which is less sensitive to noise. Real-time priority (chrt) keeps wake-ups from
queueing behind those of other processes. It must be round-robin (-r), not first-in-first-out (-f): a thread of gloo
keeps asking for a lock that another thread holds, and under -f it would keep that thread off its core forever.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from sleeping import Sleeping
from tables import priority, table
from torch import nn
from torch.distributed.pipelining import PipelineStage

from penstock import ModelCost, PartCost, Seconds, make, simulate
from penstock.ir import Op, Schedule, lower
from penstock.ir.program import Receive, RunAction, Send
from penstock.runtime import Executor, Ledger, ProcessComm, batch_of
from penstock.runtime.backward import record_in
from penstock.torch_internals import schedule_runtime, walk_back

RESULT = Path(__file__).parent.parent / "docs" / "results" / "overhead.md"
NAMES = {
    "1f1b": {},
    "interleaved": {"chunks": 2},
    "zb-v": {},
    "interleaved-zb": {"chunks": 2},
    "hanayo": {"waves": 1},
}
SMALL, LARGE = 16, 1 << 20  # floats in a message


class Total(torch.autograd.Function):
    """The loss: a number, and a gradient that is there already, so that it costs nobody anything."""

    ones: ClassVar[dict[int, torch.Tensor]] = {}

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
        ctx.ones = Total.ones.get(y.numel())
        if ctx.ones is None:
            ctx.ones = Total.ones[y.numel()] = torch.ones_like(y)
        return y.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return ctx.ones


class SleepInput(torch.autograd.Function):
    """For torch, which splits a backward by asking for some gradients and then for others: the input's path."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return grad, None


class SleepWeight(torch.autograd.Function):
    """And the weight's."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return grad, None


class InTwo(nn.Module):
    """The first stage has no input gradient: all of its backward is its weights'."""

    def __init__(self, seconds: float, first: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.naps = (seconds, 2 * seconds if first else seconds)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = SleepInput.apply(x, self.naps[0]) + SleepWeight.apply(
            self.weight, self.naps[1]
        )
        return y


def ideal_cost(schedule: Schedule, seconds: float) -> ModelCost:
    one = Seconds(seconds)
    parts = [PartCost(one, one, one) for _ in range(schedule.parts)]
    parts[0] = PartCost(one, Seconds(0.0), Seconds(2 * seconds))
    return ModelCost(tuple(parts))


# ---------------------------------------------------------------- three machines
Machine = Callable[[], None]


def ours(
    schedule: Schedule, rank: int, seconds: float, size: int, timed: bool = False
) -> Machine:
    parts = ideal_cost(schedule, seconds).parts
    stages = {
        number: Sleeping(parts[s.part])
        for number, s in enumerate(schedule.stages)
        if s.rank == rank
    }
    executor = Executor(
        lower(schedule), stages, ProcessComm(60), lambda y, _: Total.apply(y)
    )
    count = len(schedule.microbatches)
    batch = batch_of(
        [torch.zeros(1, 1, size)] * count, [torch.zeros(1, 1, dtype=torch.long)] * count
    )
    return lambda: executor.step(batch, timed) and None


def torchs(schedule: Schedule, rank: int, seconds: float, size: int) -> Machine:
    mine = [number for number, s in enumerate(schedule.stages) if s.rank == rank]
    total, count = len(schedule.stages), len(schedule.microbatches)
    stages = [
        PipelineStage(InTwo(seconds, n == 0), n, total, torch.device("cpu"))
        for n in mine
    ]
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


def bare(schedule: Schedule, rank: int, seconds: float, size: int) -> Machine:
    program, count = lower(schedule), len(schedule.microbatches)
    lane = [i for i in program.lanes[rank] if isinstance(i, RunAction | Send | Receive)]
    arriving = [i for i in lane if isinstance(i, Receive)]
    buffers = [torch.zeros(1, 1, size) for _ in arriving]
    out, table = torch.zeros(1, 1, size), schedule.table
    number = {table.action(n): n for n in range(len(table))}
    needs = {
        i.action: [
            table.action(int(n)) for n in table.needs[number[i.action]] if n >= 0
        ]
        for i in lane
    }
    cost = ideal_cost(schedule, seconds)
    nap = {
        i.action: cost.seconds(schedule, i.action)
        for i in lane
        if isinstance(i, RunAction)
    }
    assert count

    def step() -> None:
        due = {
            i.action: dist.irecv(b, i.peer)
            for i, b in zip(arriving, buffers, strict=True)
        }
        sent = []
        for i in lane:
            if isinstance(i, RunAction):
                for needed in needs[i.action]:
                    work = due.pop(needed, None)
                    if work is not None:
                        work.wait()
                if nap[i.action]:
                    time.sleep(nap[i.action])
            elif isinstance(i, Send):
                sent.append(dist.isend(out, i.peer))
        for work in sent:
            work.wait()

    return step


def floor(schedule: Schedule, rank: int, seconds: float, size: int) -> Machine:
    program, table = lower(schedule), schedule.table
    lane = [i for i in program.lanes[rank] if isinstance(i, RunAction | Send | Receive)]
    arriving = [i for i in lane if isinstance(i, Receive)]
    buffers = [torch.zeros(1, 1, size) for _ in arriving]
    number = {table.action(n): n for n in range(len(table))}
    needs = {
        i.action: [
            table.action(int(n)) for n in table.needs[number[i.action]] if n >= 0
        ]
        for i in lane
    }
    parts = ideal_cost(schedule, seconds).parts
    stages = {
        n: Sleeping(parts[s.part])
        for n, s in enumerate(schedule.stages)
        if s.rank == rank
    }
    first, one, last = torch.zeros(1, 1, size), torch.ones(()), len(schedule.stages) - 1

    def step() -> None:
        due = {
            i.action: (dist.irecv(b, i.peer), b)
            for i, b in zip(arriving, buffers, strict=True)
        }
        sent, value, kept = [], {}, {}
        for i in lane:
            action = i.action
            if isinstance(i, RunAction):
                given = None
                for needed in needs[action]:
                    if needed in due:
                        work, value[needed] = due.pop(needed)
                        work.wait()
                    given = value[needed] if needed.stage != action.stage else given
                where = (action.stage, action.microbatch)
                if action.op is Op.F:
                    x = first if given is None else given.detach().requires_grad_()
                    ledger = Ledger()
                    record_in(ledger)
                    y = stages[action.stage](x)
                    y = Total.apply(y) if action.stage == last else y
                    kept[where], value[action] = (x, y, ledger), y.detach()
                elif action.op is Op.W:
                    kept[where][2].settle()
                else:
                    x, y, ledger = kept[where]
                    ledger.open = action.op is Op.I
                    walk_back((y,), (one if action.stage == last else given,))
                    value[action] = x.grad
            elif isinstance(i, Send):
                sent.append(dist.isend(value[action], i.peer))
        for work in sent:
            work.wait()

    return step


def recorded(schedule: Schedule, rank: int, seconds: float, size: int) -> Machine:
    return ours(schedule, rank, seconds, size, timed=True)


MACHINES = {
    "bare": bare,
    "floor": floor,
    "ours": ours,
    "recorded": recorded,
    "torch": torchs,
}
SHOWN = ("bare", "floor", "ours", "torch")


# ---------------------------------------------------------------- measuring
def rank_main(
    rank: int, ranks: int, port: int, cells: list[dict[str, Any]], out: str
) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        WORLD_SIZE=str(ranks),
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = []
    for cell in cells:
        schedule = make(
            cell["name"],
            ranks=ranks,
            microbatches=cell["microbatches"],
            **NAMES[cell["name"]],
        )
        seconds = cell["forward"] / 1000 / int(schedule.table.stages_on_rank.max())
        machines = {
            name: build(schedule, rank, seconds, cell["size"])
            for name, build in MACHINES.items()
        }
        times: dict[str, list[float]] = {name: [] for name in machines}
        cpu: dict[str, list[float]] = {name: [] for name in machines}
        for turn in range(2 + cell["rounds"]):
            for name, step in machines.items():
                dist.barrier()
                begin, busy = time.perf_counter(), time.process_time()
                step()
                took = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
                used = torch.tensor([time.process_time() - busy], dtype=torch.float64)
                dist.all_reduce(took, dist.ReduceOp.MAX)
                dist.all_reduce(used)
                if turn >= 2:
                    times[name].append(float(took))
                    cpu[name].append(float(used))
        if rank == 0:
            ideal = simulate(schedule, ideal_cost(schedule, seconds)).makespan
            actions = max(len(lane) for lane in schedule.lanes)
            facts = {
                "ranks": ranks,
                "ideal": ideal,
                "chunk": 1000 * seconds,
                "lane": actions,
            }
            facts |= {"actions": len(schedule.table), "times": times, "cpu": cpu}
            rows.append({**cell, **facts})
    if rank == 0:
        Path(out).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def measure(ranks: int, cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    port, out = (
        20000 + os.getpid() % 20000 + ranks,
        f"/tmp/penstock-overhead-{os.getpid()}-{ranks}.json",
    )
    mp.spawn(rank_main, (ranks, port, cells, out), nprocs=ranks)
    rows: list[dict[str, Any]] = json.loads(Path(out).read_text())
    Path(out).unlink()
    return [summary(row) for row in rows]


def summary(row: dict[str, Any]) -> dict[str, Any]:
    times, cpu = row.pop("times"), row.pop("cpu")
    for name, base in (
        ("floor", "bare"),
        ("ours", "bare"),
        ("torch", "bare"),
        ("recorded", "ours"),
    ):
        ratios = sorted(a / b for a, b in zip(times[name], times[base], strict=True))
        row[f"{name}_over_{base}"] = statistics.median(ratios)
        row[f"{name}_spread"] = (
            ratios[len(ratios) // 4],
            ratios[-1 - len(ratios) // 4],
        )
    for name in MACHINES:
        row[f"{name}_efficiency"] = row["ideal"] / statistics.median(times[name])
        row[f"{name}_quiet"] = row["ideal"] / min(times[name])
        row[f"{name}_microseconds"] = (
            1e6 * (statistics.median(times[name]) - row["ideal"]) / row["lane"]
        )
        row[f"{name}_cpu"] = 1e6 * statistics.median(cpu[name]) / row["actions"]
    return row


def cells(quick: bool) -> dict[int, list[dict[str, Any]]]:
    def cell(
        name: str, microbatches: int, chunk: float, size: int, rounds: int
    ) -> dict[str, Any]:
        forward = chunk if name == "1f1b" else 2 * chunk
        return {
            "name": name,
            "microbatches": microbatches,
            "forward": forward,
            "size": size,
            "rounds": rounds,
        }

    if quick:
        return {4: [cell("zb-v", 8, 5, SMALL, 5), cell("zb-v", 8, 1, SMALL, 15)]}
    four = [
        cell(n, 8, chunk, SMALL, 25 if chunk == 1 else 12)
        for chunk in (5, 1)
        for n in NAMES
    ]
    four += [cell(n, 8, 5, LARGE, 8) for n in NAMES]
    return {
        4: four,
        8: [
            cell(n, 16, chunk, SMALL, 12 if chunk == 1 else 6)
            for chunk in (5, 1)
            for n in NAMES
        ],
    }


FORMS = {"efficiency": ".3f", "quiet": ".3f", "microseconds": ".0f", "cpu": ".0f"}


def listed(row: dict[str, Any], what: str, form: str) -> str:
    return ", ".join(format(row[f"{name}_{what}"], form) for name in SHOWN)


def ratio(row: dict[str, Any], name: str, base: str = "bare") -> str:
    low, high = row[f"{name}_spread"]
    return f"{row[f'{name}_over_{base}']:.3f} ({low:.3f}-{high:.3f})"


def cells_table(rows: list[dict[str, Any]]) -> str:
    heads = (
        "schedule | P | M | chunk F/B, ms | message | floor / bare | ours / bare | torch / bare | recorded / ours "
        "| efficiency: bare, floor, ours, torch | quietest | µs per action over ideal | CPU µs per action"
    )
    return table(heads, map(line, rows), ("schedule",))


def line(r: dict[str, Any]) -> list[str]:
    return [
        r["name"],
        str(r["ranks"]),
        str(r["microbatches"]),
        f"{r['chunk']:.3g}/{2 * r['chunk']:.3g}",
        "4 MiB" if r["size"] == LARGE else "64 B",
        *(ratio(r, name) for name in ("floor", "ours", "torch")),
        ratio(r, "recorded", "ours"),
        *(listed(r, what, form) for what, form in FORMS.items()),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="two cells; writes nothing"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object to stdout")
    given = parser.parse_args()
    rows = [
        row
        for ranks, some in cells(given.quick).items()
        for row in measure(ranks, some)
    ]
    text = (
        "# Overhead of the runtime\n\n"
        "`chrt -r 10 python benchmarks/overhead.py`: stages sleep instead of computing and communicate through gloo "
        f"on\none host, with {priority()}, {os.cpu_count()} cores and torch {torch.__version__}. All columns run the "
        "same order of\nactions. *Bare* is a plain loop of sends, receives and sleeps without autograd. *Floor* is "
        "that loop with the\nautograd of the sleeping stage and a loss, which no runtime can avoid. *Recorded* is ours "
        "with a measured\ntimeline. Ratios are medians over the rounds, with quartiles in brackets. *Efficiency* is "
        "the ideal time over\nthe measured time, and *quietest* is the efficiency of the fastest round."
        f"\n\n{cells_table(rows)}\n"
    )
    if not given.quick:
        RESULT.write_text(text)
    sys.stdout.write(json.dumps({"rows": rows}) + "\n" if given.json else text)


if __name__ == "__main__":
    main()
