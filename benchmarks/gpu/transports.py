"""Times a pipeline over both transports of one GPU: its memory (penstock_ipc), and NCCL through sockets.

    penstock testbed --workers 8 --backend nccl -- python benchmarks/gpu/transports.py --out transports.json

Eight workers, each a share of one GPU, run the same recorded steps over `penstock_ipc` and over NCCL, with messages in
float32 and in bfloat16. Weights are float32 and products bfloat16 (autocast), as `penstock train` has them. NCCL is
tried with three layouts of communicators:

    one         a single one for all messages: what we use with few cores for each rank
    direction   one for the messages to higher ranks, and one for those to lower ranks: what we use otherwise
    link        one for each direction between each two ranks that talk

A step is compared with the simulated one: the median times of its own actions, and the links as they were measured
before, with one message at a time.
"""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench import DRY, REAL, Size, arguments, clocked, data, note, stages_of, write

from penstock import Schedule, lower, make, simulate
from penstock.cost.network import Network
from penstock.ir.idle import split_idle_time
from penstock.measure.links import gather_rows, measured_network
from penstock.models import token_loss
from penstock.runtime import CudaTape, Executor, ProcessComm, batch_of, spawn
from penstock.sim.own_times import own_cost

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
CROWDED_ROUNDS = 20


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
    note(comm, f"{layout}: {took:.3f} ms and {rate:.2f} GB/s a link")
    rows = []
    for label in setting.names:
        for dtype in setting.types_of(layout):
            if time.perf_counter() - begin > setting.seconds:
                note(comm, f"no time for {label}, {dtype}")
                continue
            row = one(comm, setting, network, label, dtype)
            gc.collect()
            if setting.size.device == "cuda":
                torch.cuda.empty_cache()
            rows.append({"transport": layout, **row})
            note(
                comm,
                f"  {label}, {dtype}: {1e3 * row['step']:.1f} ms, makespan "
                f"{1e3 * row['makespan']:.1f}, simulated {1e3 * row['simulated']:.1f} "
                f"with links, {1e3 * row['crowded']:.1f} with crowded ones "
                f"({1e3 * row['crowded_hop']:.2f} ms) and {1e3 * row['free']:.1f} without, "
                f"idle {row['bubble']:.1%}  [{time.perf_counter() - begin:.0f} s]",
            )
    return rows


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
        messages=TYPES[dtype],
    )

    def step() -> float:
        return executor.step(batch).loss

    for _ in range(COLD):
        _, loss = clocked(comm, step, stages, size)
    times = [clocked(comm, step, stages, size)[0] for _ in range(setting.rounds)]
    timelines = [executor.step(batch, timed=True).timeline for _ in range(3)]
    timeline = sorted(timelines, key=lambda each: each.makespan)[1]  # type: ignore[union-attr]
    assert timeline is not None
    message = size.tokens * size.config.width * TYPES[dtype].itemsize
    crowded = crowded_hop(comm, message, torch.device(size.device))
    hop = float(network.latency) + message / float(network.bandwidth)  # type: ignore[arg-type]
    idle = split_idle_time(timeline, hop)
    whole = comm.ranks * timeline.makespan
    return {
        "name": label,
        "messages": dtype,
        "message_bytes": message,
        "latency": network.latency,
        "bandwidth": network.bandwidth,
        "step": statistics.median(times),
        "makespan": timeline.makespan,
        "simulated": simulated(schedule, timeline, network, message),
        "free": simulated(schedule, timeline, Network(), 0),
        "crowded_hop": crowded,
        "crowded": simulated(schedule, timeline, Network(crowded), 0),
        "bubble": timeline.bubble,
        "schedule": (sum(idle.schedule) + sum(idle.end)) / whole,
        "hop": sum(idle.hop) / whole,
        "host": sum(idle.host) / whole,
        "loss": loss,
    }


def crowded_hop(comm: ProcessComm, message: int, device: torch.device) -> float:
    """The seconds of a message between neighbours while all ranks talk at once and nobody computes."""
    payload = torch.ones(message // 4, device=device)
    seconds = []
    for shift in (0, 1):
        peer = ((comm.rank + shift) ^ 1) - shift
        rounds = CROWDED_ROUNDS if 0 <= peer < comm.ranks else 0
        for counted in (
            min(rounds, 1),
            rounds,
        ):  # The first message connects two ranks.
            comm.barrier()
            settle_device(device)
            began = time.perf_counter()
            for _ in range(counted):
                exchange(comm, payload, peer)
            settle_device(device)
        seconds.append((time.perf_counter() - began) / (2 * CROWDED_ROUNDS))
    rows = torch.zeros(comm.ranks, 2, dtype=torch.float64)
    rows[comm.rank] = torch.tensor(seconds)
    return float(gather_rows(comm, rows).max())


def exchange(comm: ProcessComm, payload: torch.Tensor, peer: int) -> None:
    """A message to a neighbour and one back; the lower rank sends first."""
    for sends in (comm.rank < peer, comm.rank > peer):
        if sends:
            comm.send(payload, peer).wait()
        else:
            received = comm.receive((len(payload),), payload.dtype, peer).wait()
            comm.give_back(received)


def settle_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def simulated(
    schedule: Schedule, timeline: Any, network: Network, message: int
) -> float:
    """The makespan with the times of the step's own actions and these links."""
    cost = own_cost(timeline)
    tokens = schedule.microbatches[0].cuts[-1]
    parts = [replace(part, message=message / tokens) for part in cost.parts]
    cost = replace(cost, parts=tuple(parts), network=network)
    return simulate(schedule, cost).makespan


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
    given = parser.parse_args()
    ranks = 2 if given.dry else given.ranks
    size = DRY if given.dry else replace(REAL.with_layers(DEPTH * ranks), tokens=1024)
    names = tuple(filter(None, given.only.split(","))) or tuple(SCHEDULES)
    layouts = tuple(filter(None, given.layouts.split(",")))
    dtypes = tuple(filter(None, given.dtypes.split(",")))
    setting = Setting(
        size, 2 * ranks, given.rounds, names, layouts, dtypes, given.seconds
    )
    out: Path | None = given.out.absolute() if given.out else None
    rows: list[dict[str, Any]] = []
    for layout in ("ipc",) if given.dry else layouts:
        backend = "gloo" if given.dry else BACKENDS.get(layout, "nccl")
        rows += spawn(ranks, work, setting, layout, patience=90.0, backend=backend)[0]
        write(out, {"ranks": ranks, "tokens": size.tokens, "rows": rows})


if __name__ == "__main__":
    main()
