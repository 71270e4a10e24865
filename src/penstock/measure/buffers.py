"""Measures how long a message over NCCL keeps its sender busy, and a receiver that comes late.

All ranks do this in pairs at the same time, because the messages of a step share sockets and cores, too. Both ranks
of a pair launch their ends at once, behind a rest that hides the launch, and the receiver rests longer:

    rank 0   rest ├─ send ─┤
    rank 1   rest, and twice the time of the message ├─ receive ─┤

If the sender is busy until the receiver comes, the buffers cannot hold a message of this size
(`penstock.cost.buffers`).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from penstock.cost.buffers import BufferedMessage
from penstock.cost.network import Network, slowest_link
from penstock.cost.sizes import FLOAT32_BYTES
from penstock.measure.rows import gather_rows
from penstock.measure.sums import settle
from penstock.runtime.comm.comm import Comm
from penstock.runtime.torch_internals import sleep_on_gpu

BUFFERED_BYTES = (1 << 12, 1 << 18, 1 << 20, 1 << 21, 1 << 22, 1 << 23, 1 << 24)
MAX_HOP_SECONDS = 0.02  # longer messages are not tried: buffers hardly shorten them
REST_SECONDS = 0.002  # longer than a launch takes
MESSAGE_ROUNDS = 5
# A sender that is busy for this share of the time until its receiver comes has waited for it.
WAITING_SHARE = 0.75


def measured_buffers(
    comm: Comm, links: Network, device: torch.device | str = "cpu"
) -> tuple[BufferedMessage, ...]:
    """Measure messages of several sizes between neighbors; all ranks must call this.

    links: the network as it was measured with one message at a time.
    """
    link = slowest_link(links)
    found = []
    for size in BUFFERED_BYTES:
        hop = link.latency + size / link.bandwidth
        if hop > MAX_HOP_SECONDS:
            break
        late = 2 * hop + REST_SECONDS
        send, receive = late_message(comm, size, late, device)
        waited = send > WAITING_SHARE * late
        found.append(BufferedMessage(size, math.inf if waited else send, receive))
    return tuple(found)


def late_message(
    comm: Comm, size: int, late: float, device: torch.device | str
) -> tuple[float, float]:
    """Return the median seconds of senders and of receivers that come `late` seconds after them.

    All ranks must call this. The last one of an odd number has no peer.
    """
    peer = comm.rank ^ 1
    sends = comm.rank < peer
    payload = torch.ones(size // FLOAT32_BYTES, device=device)
    rounds = []
    for _ in range(1 + MESSAGE_ROUNDS):  # The first message connects two ranks.
        seconds = torch.zeros(comm.ranks, dtype=torch.float64)
        comm.barrier()
        settle(device)
        if peer < comm.ranks:
            rest(REST_SECONDS if sends else REST_SECONDS + late, device)
            act = partial(pass_on, comm, payload, peer)
            seconds[comm.rank] = device_seconds(act, device)
        rounds.append(gather_rows(comm, seconds).tolist())
    paired = comm.ranks // 2 * 2
    senders = [one for row in rounds[1:] for one in row[0:paired:2]]
    receivers = [one for row in rounds[1:] for one in row[1:paired:2]]
    return statistics.median(senders), statistics.median(receivers)


def pass_on(comm: Comm, payload: torch.Tensor, peer: int) -> None:
    """Send a tensor to a higher rank, or receive one like it from a lower rank."""
    if comm.rank < peer:
        comm.send(payload, peer).wait()
    else:
        received = comm.receive(tuple(payload.shape), payload.dtype, peer).wait()
        comm.give_back(received)


def device_seconds(act: Callable[[], None], device: torch.device | str) -> float:
    """Return how long something takes, by the clock of the device."""
    if torch.device(device).type != "cuda":
        begin = time.perf_counter()
        act()
        return time.perf_counter() - begin
    start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    start.record()
    act()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def rest(seconds: float, device: torch.device | str) -> None:
    """Let the device do nothing for at least so long. The host of a GPU goes on."""
    if torch.device(device).type == "cuda":
        sleep_on_gpu(seconds)
    else:
        time.sleep(seconds)
