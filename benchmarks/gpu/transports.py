"""Times a pipeline over both transports of one GPU: its memory (penstock_ipc), and NCCL through sockets.

    penstock testbed --workers 8 --backend nccl -- python benchmarks/gpu/transports.py --out transports.json

Eight workers, each a share of one GPU, run the same recorded steps over `penstock_ipc` and over NCCL, with messages in
float32 and in bfloat16. Weights are float32 and products bfloat16 (autocast), as `penstock train` has them. NCCL is
tried with three layouts of communicators:

    one         a single one for all messages: what we use with few cores for each rank
    direction   one for the messages to higher ranks, and one for those to lower ranks: what we use otherwise
    link        one for each direction between each two ranks that talk

A step is compared with simulated ones: the mean times of its own actions, and the network as a profile measures it.
`simulated` lets every message leave at once, and `in_order` lets the messages of a rank wait for each other, with the
buffers between ranks (`penstock.sim.simulate`). `hop` is the time of a message on these links. For comparison, `lone`
is the mean of many messages of this size between two ranks, `crowded` between all ranks, `busy` while all compute, too,
and `summing` while all sum gradients.

These are the ends of the last actions. Replicas then still sum gradients, so the whole step is compared with
`simulated_with_sums` and `in_order_with_sums`: the ends of the last sums, which send with the bandwidth that sums had
while all ranks summed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isinf
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench import (
    DRY,
    REAL,
    Size,
    arguments,
    clocked,
    data,
    free_memory,
    note,
    stages_of,
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
# Work that lasts longer than the messages that are timed beside it: about 0.15 ms for two products on an eighth of
# an H200.
WORK_PRODUCTS = 100
WORK_REPLAYS = 20
# A sum that lasts longer than the messages beside it: about 0.2 s on eight workers.
SUM_BYTES = 1 << 28
DRY_SUM_BYTES = 1 << 20


@dataclass(frozen=True)
class Setting:
    """What one run does."""

    size: Size
    microbatches: int
    rounds: int
    names: tuple[str, ...]
    layouts: tuple[str, ...]
    dtypes: tuple[str, ...]  # of messages; if empty, those of the layout
    seconds: float
    timelines: bool  # write the times of all actions

    def types_of(self, layout: str) -> tuple[str, ...]:
        """The types of messages to try with a layout."""
        if self.dtypes:
            return self.dtypes
        return tuple(TYPES) if layout in ("ipc", "one") else ("float32",)


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


def work(comm: ProcessComm, setting: Setting, layout: str) -> list[dict[str, Any]]:
    """A rank: schedule after schedule, over one transport."""
    begin = time.perf_counter()
    use_layout(comm, layout)
    device = torch.device(setting.size.device)
    network = measured_network(comm, every=False, device=device)
    took = 1e3 * float(network.latency)  # type: ignore[arg-type]
    rate = float(network.bandwidth) / 1e9  # type: ignore[arg-type]
    sums = float(network.sum_bandwidth) / 1e9  # type: ignore[arg-type]
    note(comm, f"{layout}: {took:.3f} ms, {rate:.2f} GB/s a link, {sums:.2f} in sums")
    rows = []
    for label in setting.names:
        for dtype in setting.types_of(layout):
            if time.perf_counter() - begin > setting.seconds:
                note(comm, f"no time for {label}, {dtype}")
                continue
            row = one(comm, setting, network, label, dtype)
            free_memory(setting.size.device)
            rows.append({"transport": layout, **row})
            note(comm, f"  {describe(row)}  [{time.perf_counter() - begin:.0f} s]")
    return rows


def describe(row: dict[str, Any]) -> str:
    """A line about a row."""
    times = ", ".join(
        f"{key} {1e3 * row[key]:.1f}"
        for key in (
            "step",
            "makespan",
            "simulated",
            "in_order",
            "simulated_with_sums",
            "in_order_with_sums",
            "free",
        )
    )
    hops = ", ".join(
        f"{key} {1e3 * row[key]:.2f}"
        for key in ("hop", "lone_hop", "crowded_hop", "busy_hop", "summing_hop")
    )
    return (
        f"{row['name']}, {row['messages']}: {times} ms; "
        f"a message: {hops} ms; idle {row['bubble']:.1%}"
    )


def one(
    comm: ProcessComm, setting: Setting, network: Network, label: str, dtype: str
) -> dict[str, Any]:
    """Steps of a schedule, and what the simulator makes of their actions."""
    size = setting.size
    name, shape = SCHEDULES[label]
    schedule = make(name, ranks=comm.ranks, microbatches=setting.microbatches, **shape)
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
        "crowded_hop": mean_hop(comm, message, device, None),
        "busy_hop": mean_hop(comm, message, device, busy_work(device)),
        "summing_hop": mean_hop(comm, message, device, sum_work(comm, device)),
    }
    gradients = gradient_bytes(comm, schedule, stages)
    for _ in range(COLD):
        _, loss = clocked(comm, step, stages, size)
    times = [clocked(comm, step, stages, size)[0] for _ in range(setting.rounds)]
    timelines: list[Timeline] = []
    for _ in range(TIMED_STEPS):
        measured = executor.step(batch, timed=True).timeline
        assert measured is not None
        timelines.append(measured)
    timeline = sorted(timelines, key=lambda each: each.makespan)[TIMED_STEPS // 2]
    row = {
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
    if setting.timelines:
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


def busy_work(device: torch.device) -> Callable[[], None] | None:
    """A function that gives a GPU work for a while: products of the size of a layer's."""
    if device.type != "cuda":
        return None
    x = torch.randn(1024, 1024, device=device, dtype=torch.bfloat16)
    up = torch.randn(1024, 2816, device=device, dtype=torch.bfloat16) / 32
    down = torch.randn(2816, 1024, device=device, dtype=torch.bfloat16) / 53
    for _ in range(2):
        x @ up @ down
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(WORK_PRODUCTS):
            x = x @ up @ down

    def work() -> None:
        for _ in range(WORK_REPLAYS):
            graph.replay()

    return work


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


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--only", default="", help="comma-separated schedules")
    parser.add_argument("--layouts", default="ipc,one,direction,link")
    parser.add_argument(
        "--dtypes", default="", help="of messages: float32, bfloat16, or both"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="of a transport, at most"
    )
    parser.add_argument(
        "--timelines", action="store_true", help="write the times of all actions, too"
    )
    given = parser.parse_args()
    ranks = 2 if given.dry else given.ranks
    size = DRY if given.dry else replace(REAL.with_layers(DEPTH * ranks), tokens=1024)
    names = tuple(filter(None, given.only.split(","))) or tuple(SCHEDULES)
    layouts = tuple(filter(None, given.layouts.split(",")))
    dtypes = tuple(filter(None, given.dtypes.split(",")))
    setting = Setting(
        size,
        2 * ranks,
        given.rounds,
        names,
        layouts,
        dtypes,
        given.seconds,
        given.timelines,
    )
    out: Path | None = given.out.absolute() if given.out else None
    rows: list[dict[str, Any]] = []
    for layout in ("ipc",) if given.dry else layouts:
        backend = "gloo" if given.dry else BACKENDS.get(layout, "nccl")
        rows += spawn(ranks, work, setting, layout, patience=90.0, backend=backend)[0]
        write(out, {"ranks": ranks, "tokens": size.tokens, "rows": rows})


if __name__ == "__main__":
    main()
