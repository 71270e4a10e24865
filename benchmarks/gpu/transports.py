"""Times a pipeline over both transports of one GPU: its memory (penstock_ipc), and NCCL through sockets.

    penstock lab testbed --workers 8 --backend nccl -- python benchmarks/gpu/transports.py --out transports.json
    python benchmarks/gpu/transports.py --kept     puts the tables of docs/results/h200 into docs/results/nccl.md
    python benchmarks/gpu/transports.py --quick    all once on two CPU workers over gloo; writes nothing

Eight workers, each a share of one GPU, run the same recorded steps over `penstock_ipc` and over NCCL, with messages in
float32 and in bfloat16. Weights are float32 and products bfloat16 (autocast), as `penstock train` has them. NCCL is
tried with three layouts of communicators:

    one         a single one for all messages: what we use with few cores for each rank
    direction   one for the messages to higher ranks, and one for those to lower ranks: what we use otherwise
    link        one for each direction between each two ranks that talk

A step is compared with simulated ones: the mean times of its own actions, and the network as a profile measures it.
`simulated` lets every message leave at once, and `in_order` lets the messages of a rank wait for each other, with the
buffers between ranks (`penstock.sim.simulate`). `hop` is the time of a message on these links. For comparison, `lone`
is the mean of many messages of this size between two ranks, and `summing` between all ranks while all sum gradients.

These are the ends of the last actions. Replicas then still sum gradients, so the whole step is compared with
`simulated_with_sums` and `in_order_with_sums`: the ends of the last sums, which send with the bandwidth that sums had
while all ranks summed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import isinf
from pathlib import Path

import torch
import torch.distributed as dist
from bench import (
    clocked,
    data,
    measure_cases,
    note,
    on_ranks,
    size_of,
    stages_of,
)
from harness import (
    Found,
    Row,
    Script,
    kept,
    table,
    words,
    write,
)
from torch import nn

from penstock import Schedule, lower, make, simulate
from penstock.cost.network import Network
from penstock.ir.program import Program
from penstock.ir.timeline import Timeline, split_idle_time
from penstock.measure.links import (
    gather_rows,
    groups_that_sum,
    measured_network,
    settle,
)
from penstock.models import token_loss
from penstock.runtime import CudaTape, Executor, ProcessComm, batch_of, spawn
from penstock.runtime.comm.comm import Pending
from penstock.runtime.executor import RunOptions
from penstock.sim.simulate import own_cost, simulate_in_order

SCHEDULES: dict[str, tuple[str, dict[str, int]]] = {
    "1f1b": ("1f1b", {}),
    "hanayo W=2": ("hanayo", {"waves": 2}),
    "zb-v": ("zb-v", {}),
    "interleaved-zb v=2": ("interleaved-zb", {"chunks": 2}),
    "chimera": ("chimera", {}),
}
DEPTH = 4  # layers of a rank
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BACKENDS = {"ipc": "penstock_ipc"}  # by layout; others are NCCL's
COLD = 2  # steps that are not counted
TIMED_STEPS = 5
HOP_ROUNDS = 20
# A sum that lasts longer than the messages beside it: about 0.2 s on eight workers.
SUM_BYTES = 1 << 28
DRY_SUM_BYTES = 1 << 20


def types_of(given: argparse.Namespace, layout: str) -> tuple[str, ...]:
    """The types of messages to try with a layout."""
    usual = tuple(TYPES) if layout in ("ipc", "one") else ("float32",)
    return given.dtypes or usual


def use_layout(comm: ProcessComm, layout: str) -> None:
    """Let the messages of a rank take other communicators than they usually do."""
    if layout == "one":
        comm.downward = comm.upward
    elif layout == "direction":
        device = torch.device("cuda", torch.cuda.current_device())
        down = dist.new_group(list(comm.everyone), device_id=device)
        assert isinstance(down, dist.ProcessGroup)
        comm.downward = down
    elif layout == "link":
        # Without a device, torch makes a communicator for each pair that talks.
        comm.upward = comm.world
        other = dist.new_group(list(comm.everyone))
        assert isinstance(other, dist.ProcessGroup)
        comm.downward = other


def work(comm: ProcessComm, given: argparse.Namespace, layout: str) -> list[Row]:
    """A rank: schedule after schedule, over one transport."""
    use_layout(comm, layout)
    device = torch.device(given.size.device)
    network = measured_network(comm, every=False, device=device)
    took = 1e3 * float(network.latency)  # type: ignore[arg-type]
    rate = float(network.bandwidth) / 1e9  # type: ignore[arg-type]
    sums = float(network.sum_bandwidth) / 1e9  # type: ignore[arg-type]
    note(comm, f"{layout}: {took:.3f} ms, {rate:.2f} GB/s a link, {sums:.2f} in sums")
    cases = {
        f"{label}, {dtype} over {layout}": partial(
            one, comm, given, network, (label, dtype, layout)
        )
        for label in given.only
        for dtype in types_of(given, layout)
    }
    return measure_cases(comm, given, given.size, cases)


def one(
    comm: ProcessComm,
    given: argparse.Namespace,
    network: Network,
    key: tuple[str, str, str],
) -> Row:
    """Steps of a schedule with messages of a type, and what the simulator makes of their actions."""
    label, dtype, layout = key
    size = given.size
    name, shape = SCHEDULES[label]
    schedule = make(name, ranks=comm.ranks, microbatches=given.microbatches, **shape)
    stages = stages_of(schedule, comm, size)
    for part in stages.values():
        part.float()
    tokens = data(schedule, size)
    batch = batch_of(tokens, tokens)
    on_gpu = size.device == "cuda"
    executor = Executor(
        lower(schedule),
        stages,
        comm,
        token_loss,
        autocast=torch.bfloat16 if on_gpu else None,
        tape=CudaTape() if on_gpu else None,
        options=RunOptions(messages=TYPES[dtype]),
    )

    def step() -> float:
        return executor.step(batch).loss

    message = size.tokens * size.config.width * TYPES[dtype].itemsize
    device = torch.device(size.device)
    hops = {
        "hop": float(network.latency) + message / float(network.bandwidth),  # type: ignore[arg-type]
        "lone_hop": mean_hop(comm, message, device, None, talking=2),
        "summing_hop": mean_hop(comm, message, device, sum_work(comm, device)),
    }
    gradients = gradient_bytes(comm, schedule, stages)
    for _ in range(COLD):
        _, loss = clocked(comm, step, stages, size)
    times = [clocked(comm, step, stages, size)[0] for _ in range(given.rounds)]
    timelines: list[Timeline] = []
    for _ in range(TIMED_STEPS):
        measured = executor.step(batch, timed=True).timeline
        assert measured is not None
        timelines.append(measured)
    timeline = sorted(timelines, key=lambda each: each.makespan)[TIMED_STEPS // 2]
    row = {
        "transport": layout,
        "name": label,
        "messages": dtype,
        "message_bytes": message,
        "latency": network.latency,
        "bandwidth": network.bandwidth,
        "sum_bandwidth": network.sum_bandwidth,
        "buffers": [
            (one.bytes, None if isinf(one.send) else one.send, one.receive)
            for one in network.buffers
        ],
        "gradient_bytes": gradients,
        **hops,
        "step": statistics.median(times),
        "makespan": timeline.makespan,
        "bubble": timeline.bubble,
        "loss": loss,
        **predictions(
            comm, executor.program, timeline, network, message, gradients, hops
        ),
    }
    if given.timelines:
        row["start"] = timeline.start.tolist()
        row["end"] = timeline.end.tolist()
    return row


def predictions(
    comm: ProcessComm,
    program: Program,
    timeline: Timeline,
    network: Network,
    message: int,
    gradients: Sequence[float],
    hops: dict[str, float],
) -> dict[str, float]:
    """Ends with the times of the step's own actions and several links, and why ranks were idle."""
    schedule = program.schedule
    channels = comm.channels or 1
    cost = own_cost(timeline, statistics.mean)
    tokens = schedule.microbatches[0].cuts[-1]
    parts = tuple(
        replace(part, message=message / tokens, gradients=size)
        for part, size in zip(cost.parts, gradients, strict=True)
    )
    at_once = replace(network, channels=None)  # Every message leaves at once.
    measured = replace(cost, parts=parts, network=at_once)
    simulated = simulate(schedule, measured)
    in_order = simulate_in_order(schedule, measured, channels)
    found = {
        "free": simulate(schedule, cost).makespan,
        "simulated": float(simulated.end.max()),
        "in_order": float(in_order.end.max()),
        "sums": len(in_order.sums),
        "simulated_with_sums": simulated.makespan,
        "in_order_with_sums": in_order.makespan,
    }
    idle = split_idle_time(timeline, hops["hop"])
    whole = comm.ranks * timeline.makespan
    found["schedule"] = (sum(idle.schedule) + sum(idle.end)) / whole
    found["on_the_way"] = sum(idle.hop) / whole
    found["host"] = sum(idle.host) / whole
    return found


def gradient_bytes(
    comm: ProcessComm, schedule: Schedule, stages: Mapping[int, nn.Module]
) -> list[float]:
    """The bytes of the gradients of each part."""
    rows = torch.zeros(comm.ranks, schedule.parts, dtype=torch.float64)
    for stage, module in stages.items():
        size = sum(one.nbytes for one in module.parameters() if one.requires_grad)
        rows[comm.rank, schedule.stages[stage].part] = size
    found: list[float] = gather_rows(comm, rows).amax(0).tolist()
    return found


def mean_hop(
    comm: ProcessComm,
    message: int,
    device: torch.device,
    work: Callable[[], Pending | None] | None,
    talking: int | None = None,
) -> float:
    """The mean seconds of a message between neighbours while all ranks talk at once, and work or do not.

    If `talking` is given, only so many ranks talk.
    """
    talking = talking or comm.ranks
    payload = torch.ones(message // 4, device=device)
    rows = torch.zeros(comm.ranks, 2, 2, dtype=torch.float64)
    on_gpu = device.type == "cuda"
    for shift in (0, 1):
        peer = ((comm.rank + shift) ^ 1) - shift
        has_peer = max(comm.rank, peer) < talking and peer >= 0
        for counted in (1, HOP_ROUNDS):  # The first message connects two ranks.
            comm.barrier()
            settle(device)
            begun = work() if work is not None and counted > 1 else None
            stream = torch.cuda.Stream() if on_gpu else None
            began = time.perf_counter()
            with torch.cuda.stream(stream):
                for _ in range(counted if has_peer else 0):
                    exchange(comm, payload, peer)
            if stream is not None:
                stream.synchronize()
            took = time.perf_counter() - began
            if begun is not None:
                begun.wait()
            settle(device)
        if has_peer:
            rows[comm.rank, shift] = torch.tensor([took / (2 * HOP_ROUNDS), 1.0])
    total, count = gather_rows(comm, rows).sum((0, 1)).tolist()
    return float(total / count)


def sum_work(comm: ProcessComm, device: torch.device) -> Callable[[], Pending]:
    """A function that begins a sum of this rank with another one, and returns it."""
    groups = groups_that_sum(comm.ranks)
    comm.prepare(groups)
    (mine,) = (group for group in groups if comm.rank in group)
    size = SUM_BYTES if device.type == "cuda" else DRY_SUM_BYTES
    gradients = torch.zeros(size // 4, device=device)

    def work() -> Pending:
        return comm.add(gradients, mine)

    return work


def exchange(comm: ProcessComm, payload: torch.Tensor, peer: int) -> None:
    """A message to a neighbour and one back; the lower rank sends first."""
    for sends in (comm.rank < peer, comm.rank > peer):
        if sends:
            comm.send(payload, peer).wait()
        else:
            comm.receive((len(payload),), payload.dtype, peer).wait()


# ---------------------------------------------------------------- the script
def options(parser: argparse.ArgumentParser) -> None:
    flag = parser.add_argument
    flag("--ranks", type=int, default=8)
    flag("--only", type=words, default=tuple(SCHEDULES), help="schedules")
    flag("--layouts", type=words, default=("ipc", "one", "direction", "link"))
    flag("--dtypes", type=words, default=(), help="of messages: float32, bfloat16")
    flag("--rounds", type=int, default=7)
    flag("--seconds", type=float, default=60.0, help="of a transport, at most")
    flag("--timelines", action="store_true", help="keep the times of all actions")


def measure(given: argparse.Namespace) -> Found:
    given.size = size_of(given, DEPTH * given.ranks)
    given.microbatches = 4 if given.quick else 2 * given.ranks
    if given.quick:
        given.only, given.rounds = ("1f1b", "chimera"), 1
        return {"rows": on_ranks(given, work, given, "ipc", threads=False)}
    rows: list[Row] = []
    found: Found = {"ranks": given.ranks, "tokens": given.size.tokens, "rows": rows}
    for layout in given.layouts:
        backend = BACKENDS.get(layout, "nccl")
        rows += spawn(given.ranks, work, given, layout, patience=90.0, backend=backend)[
            0
        ]
        write(given.out, found)
    return found


def committed(folder: Path) -> Found:
    """The runs on one H200; the rows with a star are from an earlier one on another machine."""
    latest = kept(folder, "transports-8.json")
    one = [row for row in latest if row["transport"] == "one"]
    known = [_key(row) for row in one]
    starred = [
        {**row, "name": f"{row['name']} *"}
        for row in kept(folder, "transports-8-earlier.json")
        if _key(row) not in known and row["transport"] == "one"
    ]
    return {
        "rows": sorted(one + starred, key=_key),
        "four": sorted(kept(folder, "transports-4.json"), key=_key),
    }


def _key(row: Row) -> tuple[str, str, str]:
    """What a row is about: in this order, those of a schedule stand together."""
    return row["name"], row["transport"], row["messages"]


def tables(found: Found) -> dict[str, str]:
    names = {"ipc": "penstock_ipc", "one": "nccl", "direction": "nccl, two ways"}

    def predicted(row: Row) -> float:
        """Only over NCCL messages wait for each other."""
        rule = "simulated" if row["transport"] == "ipc" else "in_order"
        return float(row[f"{rule}_with_sums"])

    columns = {
        "schedule": "{name}",
        "transport": lambda row: names.get(row["transport"], row["transport"]),
        "messages": "{messages}",
        "step, ms": "{step!m:.0f}",
        "free": "{free!m:.0f}",
        "simulated": "{simulated_with_sums!m:.0f}",
        "in order": "{in_order_with_sums!m:.0f}",
        "error": lambda row: f"{row['step'] / predicted(row) - 1:+.1%}",
        "idle": "{bubble:.1%}",
    }
    made = {}
    for key, name in (("rows", "transports: eight"), ("four", "transports: four")):
        if key in found:
            made[name] = table(found[key], columns)
    nccl = [row for row in found.get("rows", ()) if row["transport"] == "one"]
    for row in [row for row in nccl if _key(row)[::2] == ("chimera", "float32")]:
        made["transports: messages"] = buffers(row)
    return made


def buffers(row: Row) -> str:
    """How long messages of each size keep their ranks busy."""

    def sender(row: Row) -> str:
        return "until it arrives" if row["send"] is None else f"{1e3 * row['send']:.2f}"

    rows = [
        {
            "KiB": size / 1024,
            "way": row["latency"] + size / row["bandwidth"],
            "send": send,
            "receive": receive,
        }
        for size, send, receive in row["buffers"]
    ]
    columns = {
        "message, KiB": "{KiB:,.0f}",
        "way, ms": "{way!m:.2f}",
        "sender, ms": sender,
        "late receiver, ms": "{receive!m:.2f}",
    }
    return table(rows, columns)


if __name__ == "__main__":
    Script(__doc__, measure, tables, committed, True, options).main()
