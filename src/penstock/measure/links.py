"""Measures the latency and bandwidth between ranks, by timing messages and their replies.

    rank 0  t0 ─── bytes ───► rank 1       t1 - t0 = round trip + bytes / bandwidth of that direction,
    rank 0  t1 ◄── reply ──── rank 1       fitted over several sizes

Each direction of a pair has its own bandwidth. Both have the same latency, half of the round
trip, because two clocks never agree well enough to tell the directions apart. Pairs without a
common host are measured at the same time, all others one after the other:

    turn 0    0-1   2-3        four hosts with one rank each: three turns
    turn 1    0-2   1-3
    turn 2    0-3   1-2
"""

from __future__ import annotations

import math
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.cost.curve import least_squares
from penstock.cost.network import (
    BufferedMessage,
    Network,
    PerPair,
    pair_matrix,
    slowest_link,
    value_of_pair,
)
from penstock.cost.sizes import FLOAT32_BYTES
from penstock.runtime.comm.comm import Comm, exchange
from penstock.runtime.process.machine import keep_freed_memory
from penstock.torch_internals import sleep_on_gpu

MESSAGE_BYTES = (1 << 10, 1 << 16, 1 << 19, 1 << 20, 1 << 22)

# Messages of each size; their median counts, because single ones are sometimes delayed.
MIN_REPEATS = 3

MAX_REPEATS = 9

SECONDS_PER_SIZE = 0.1  # unless MIN_REPEATS messages take longer

MAX_MESSAGE_SECONDS = 1.5  # after a slower message, no larger ones are sent

Pair = tuple[int, int]


class MeasuredLink(NamedTuple):
    """What was measured between two ranks."""

    latency: float  # seconds
    there: float  # seconds per byte from the first rank to the second
    back: float  # seconds per byte from the second rank to the first


def measured_network(
    comm: Comm, every: bool = False, device: torch.device | str = "cpu"
) -> Network:
    """Measure the links between all ranks, how fast sums are, and over NCCL its buffers; all ranks must call this.

    `every` is that of `measured_links`.
    """
    links = measured_links(comm, every, device)
    if comm.ranks == 1:
        return links
    sums = measured_sum_bandwidth(comm, links, device)
    buffers: tuple[BufferedMessage, ...] = ()
    if links.channels is not None:
        buffers = measured_buffers(comm, links, device)
    return replace(links, sum_bandwidth=sums, buffers=buffers)


def measured_links(
    comm: Comm, every: bool = False, device: torch.device | str = "cpu"
) -> Network:
    """Measure the links between all ranks; all ranks must call this.

    With `every`, each pair gets its own numbers; otherwise all get the median of neighboring
    ranks. The links are serial, because they are measured with one message at a time. Over NCCL the
    network also says how many channels the messages of a rank share.
    """
    if comm.ranks == 1:
        return Network()
    choose = partial(combinations, r=2) if every else pairwise
    links = _measure_links(comm, list(choose(range(comm.ranks))), device)
    latencies: dict[Pair, float] = {}
    byte_seconds: dict[Pair, float] = {}
    for (first, second), link in links.items():
        latencies[first, second] = latencies[second, first] = link.latency
        byte_seconds[first, second] = link.there
        byte_seconds[second, first] = link.back
    latency: PerPair = statistics.median(latencies.values())
    bandwidth: PerPair = _bandwidth(statistics.median(byte_seconds.values()))
    if every:
        ranks = range(comm.ranks)
        latency = pair_matrix(ranks, lambda a, b: latencies.get((a, b), 0.0), 0.0)
        bandwidth = pair_matrix(
            ranks, lambda a, b: _bandwidth(byte_seconds.get((a, b), 0.0)), math.inf
        )
    return Network(latency, bandwidth, serial=True, channels=comm.channels)


def hosts_of(comm: Comm) -> tuple[str, ...]:
    """The host name of every rank; all ranks must call this."""
    told = exchange(comm, {"host": socket.gethostname()})
    return tuple(facts["host"] for facts in told)


# ---------------------------------------------------------------- pair by pair
def _measure_links(
    comm: Comm, pairs: Sequence[Pair], device: torch.device | str
) -> dict[Pair, MeasuredLink]:
    """Measure each pair in both directions, as many pairs at a time as hosts allow."""
    keep_freed_memory()  # as in a step, whose messages use the same memory again
    # For each pair, the round trip and the seconds per byte, measured from both ends.
    table = torch.zeros(len(pairs), 4, dtype=torch.float64)
    for turn in disjoint_pairs(pairs, hosts_of(comm)):
        comm.barrier()
        for pair in turn:
            if comm.rank not in pair:
                continue
            row = table[pairs.index(pair)]
            mine = pair.index(comm.rank)
            other = pair[1 - mine]
            for asking in range(2):  # the first rank of the pair asks first
                if asking == mine:
                    measured = ask(comm, other, device)
                    row[2 * mine : 2 * mine + 2] = torch.tensor(
                        measured, dtype=torch.float64
                    )
                else:
                    answer(comm, other, device)
    links = {}
    rows = gather_rows(comm, table).tolist()
    for pair, (trip, there, trip_back, back) in zip(pairs, rows, strict=True):
        # A latency is half of a round trip, and there are two of them.
        links[pair] = MeasuredLink((trip + trip_back) / 4, there, back)
    return links


def disjoint_pairs(pairs: Sequence[Pair], hosts: Sequence[str]) -> list[list[Pair]]:
    """Sort pairs into turns, so that no two pairs of a turn share a host.

    >>> disjoint_pairs([(0, 1), (0, 2), (1, 2), (0, 3), (2, 3)], "abcd")
    [[(0, 1), (2, 3)], [(0, 2)], [(1, 2), (0, 3)]]
    """
    turns: list[tuple[list[Pair], set[str]]] = []
    for pair in pairs:
        ends = {hosts[rank] for rank in pair}
        for turn, busy in turns:
            if not ends & busy:
                turn.append(pair)
                busy.update(ends)
                break
        else:
            turns.append(([pair], ends))
    return [turn for turn, _ in turns]


def ask(
    comm: Comm, other: int, device: torch.device | str = "cpu"
) -> tuple[float, float]:
    """Measure the seconds of a round trip and of a byte to a rank, which runs `answer`."""
    medians: list[float] = []
    for size in MESSAGE_BYTES:
        repeats = MAX_REPEATS
        if medians:
            if medians[-1] > MAX_MESSAGE_SECONDS:
                break
            fitting = int(SECONDS_PER_SIZE / medians[-1])
            repeats = min(max(fitting, MIN_REPEATS), MAX_REPEATS)
        count = 1 + repeats  # the first one only warms up
        _send_number(comm, count, other, device)
        trips = [_time_trip(comm, other, size, device) for _ in range(count)]
        medians.append(statistics.median(trips[1:]))
    _send_number(comm, 0, other, device)
    sizes = MESSAGE_BYTES[: len(medians)]
    terms = np.array([(1.0, float(size)) for size in sizes])
    # Divided by what was measured, so that the fit is one of relative errors.
    rows = terms / np.array(medians)[:, None]
    round_trip, byte = least_squares(rows, np.ones(len(medians)))
    return float(round_trip), float(byte)


def answer(comm: Comm, other: int, device: torch.device | str = "cpu") -> None:
    """Reply to every message of a rank that runs `ask`, until it is done."""
    for size in (*MESSAGE_BYTES, 0):
        count = _receive_number(comm, other)
        if not count:
            return
        for _ in range(count):
            shape = (size // FLOAT32_BYTES,)
            comm.receive(shape, torch.float32, other).wait()
            _send_number(comm, 0, other, device)


def _send_number(
    comm: Comm, number: int, target: int, device: torch.device | str
) -> None:
    tensor = torch.tensor([number], dtype=torch.float64, device=device)
    comm.send(tensor, target).wait()


def _receive_number(comm: Comm, source: int) -> int:
    return int(comm.receive((1,), torch.float64, source).wait())


def _time_trip(comm: Comm, other: int, size: int, device: torch.device | str) -> float:
    """The seconds from sending a message to receiving its reply."""
    begin = time.perf_counter()
    sent = comm.send(torch.zeros(size // FLOAT32_BYTES, device=device), other)
    comm.receive((1,), torch.float64, other).wait()
    sent.wait()
    settle(device)  # under NCCL it is the GPU that waits
    return time.perf_counter() - begin


def _bandwidth(byte_seconds: float) -> float:
    """Bytes per second; infinite if a byte takes no measurable time."""
    return 1.0 / byte_seconds if byte_seconds > 0 else math.inf


# ---------------------------------------------------------------- buffers
# Measures how long a message over NCCL keeps its sender busy, and a receiver that comes late.
#
# All ranks do this in pairs at the same time, because the messages of a step share sockets and cores, too. Both ranks
# of a pair launch their ends at once, behind a rest that hides the launch, and the receiver rests longer:
#
#     rank 0   rest ├─ send ─┤
#     rank 1   rest, and twice the time of the message ├─ receive ─┤
#
# If the sender is busy until the receiver comes, the buffers cannot hold a message of this size
# (`penstock.cost.network`).

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
        comm.receive(tuple(payload.shape), payload.dtype, peer).wait()


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


# ---------------------------------------------------------------- sums
# Measures how fast sums of gradients are while all ranks sum at the same time.
#
# Links are measured with one message at a time. But the replicas of all parts sum their gradients at
# about the same time, at the end of a step, and then ranks share sockets, cores and memory. So all
# ranks sum in pairs here, as the replicas of Chimera do, and the middle of an odd number joins a pair:
#
#     rank    0  1  2  3  4  5             0  1  2  3  4
#             │  │  └──┘  │  │             │  └──┴──┘  │
#             │  └────────┘  │             └───────────┘
#             └──────────────┘
#
# Larger and larger sums are timed until one takes long enough to be timed well. The time of a tiny sum
# is subtracted, because latencies are priced by themselves.

TINY_BYTES = 1 << 10

LEAST_BYTES = 1 << 16

GROWTH = 4

# Sums grow up to the first size, or until one takes as long as the second number says: it is timed well
# then. The models of GPUs are larger, and large sums over NCCL are faster than small ones.
LARGEST = {"cpu": (1 << 26, 0.03), "cuda": (1 << 28, 0.06)}

# Sums of each size; their median counts, because single ones are sometimes delayed.
ROUNDS = 5

Group = tuple[int, ...]


def measured_sum_bandwidth(
    comm: Comm, links: Network, device: torch.device | str = "cpu"
) -> PerPair:
    """Measure the bytes per second that a rank sends while all ranks sum; all ranks must call this.

    The slowest group counts, because a step ends with its last sum. If each pair of ranks has its
    own link, some are faster than others. A sum then gets the same share of every bandwidth: the
    median of what the groups had of their slowest link.
    """
    groups = groups_that_sum(comm.ranks)
    rates = _rates(comm, groups, device)
    if not isinstance(links.bandwidth, tuple):
        return min(rates)
    slowest = [_slowest_bandwidth(links, group) for group in groups]
    if math.inf in slowest:
        return min(rates)
    pairs = zip(rates, slowest, strict=True)
    share = statistics.median(rate / bandwidth for rate, bandwidth in pairs)
    return tuple(tuple(share * one for one in row) for row in links.bandwidth)


def groups_that_sum(ranks: int) -> list[Group]:
    """Divide at least two ranks into pairs that are mirror images; the middle rank joins a pair.

    >>> groups_that_sum(4), groups_that_sum(5), groups_that_sum(3)
    ([(0, 3), (1, 2)], [(0, 4), (1, 2, 3)], [(0, 1, 2)])
    """
    groups: list[Group] = [(rank, ranks - 1 - rank) for rank in range(ranks // 2)]
    if ranks % 2:
        first, last = groups[-1]
        groups[-1] = (first, ranks // 2, last)
    return groups


def _rates(
    comm: Comm, groups: Sequence[Group], device: torch.device | str
) -> list[float]:
    """The bytes per second that the ranks of each group send, along a ring, while all of them sum."""
    comm.prepare(list(groups))
    (mine,) = (group for group in groups if comm.rank in group)
    _timed_sums(comm, mine, TINY_BYTES, device)  # connects the ranks
    tiny = _median_sums(comm, mine, TINY_BYTES, device)
    size = LEAST_BYTES
    took = _median_sums(comm, mine, size, device) - tiny
    most_bytes, long_seconds = LARGEST[torch.device(device).type]
    while size < most_bytes and float(took.max()) < long_seconds:
        size *= GROWTH
        took = _median_sums(comm, mine, size, device) - tiny
    seconds = took.tolist()
    rates = []
    for group in groups:
        sent = 2 * (len(group) - 1) / len(group) * size
        longest = max(seconds[rank] for rank in group)
        rates.append(sent / longest if longest > 0 else math.inf)
    return rates


def _median_sums(
    comm: Comm, group: Group, size: int, device: torch.device | str
) -> Tensor:
    """The median seconds that each rank takes to sum `size` bytes."""
    rounds = [_timed_sums(comm, group, size, device) for _ in range(ROUNDS)]
    return torch.stack(rounds).median(dim=0).values


def _timed_sums(
    comm: Comm, group: Group, size: int, device: torch.device | str
) -> Tensor:
    """The seconds that each rank takes to sum `size` bytes with its group, while all others do the same."""
    gradients = torch.ones(size // FLOAT32_BYTES, device=device)
    comm.barrier()
    settle(device)
    begin = time.perf_counter()
    comm.add(gradients, group).wait()
    settle(device)  # under NCCL it is the GPU that waits
    seconds = torch.zeros(comm.ranks, dtype=torch.float64)
    seconds[comm.rank] = time.perf_counter() - begin
    return gather_rows(comm, seconds)


def settle(device: torch.device | str) -> None:
    """Let the host wait until a GPU has done everything that was launched; do nothing for a CPU."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def _slowest_bandwidth(links: Network, group: Group) -> float:
    """The least bandwidth between two ranks of a group."""
    return min(
        value_of_pair(links.bandwidth, source, target, "bandwidth")
        for source in group
        for target in group
        if source != target
    )


# ---------------------------------------------------------------- rows
# Tables of what all ranks have measured, one row for each rank.


def gather_rows(comm: Comm, rows: Tensor) -> Tensor:
    """Collect the rows of all ranks; each fills its own and leaves the others zero."""
    comm.add(rows, tuple(range(comm.ranks))).wait()
    return rows
