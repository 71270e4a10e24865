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
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from typing import NamedTuple

import numpy as np
import torch

from penstock.cost.buffers import BufferedMessage
from penstock.cost.fit import least_squares
from penstock.cost.network import Network
from penstock.measure.buffers import measured_buffers
from penstock.measure.rows import gather_rows
from penstock.measure.sums import measured_sum_bandwidth, settle
from penstock.runtime.comm.comm import Comm

MESSAGE_BYTES = (1 << 10, 1 << 16, 1 << 19, 1 << 20, 1 << 22)
FLOAT32_BYTES_ON_LINK = 4
# Messages of each size; their median counts, because single ones are sometimes delayed.
MIN_REPEATS = 3
MAX_REPEATS = 9
SECONDS_PER_SIZE = 0.1  # unless MIN_REPEATS messages take longer
MAX_MESSAGE_SECONDS = 1.5  # after a slower message, no larger ones are sent
MAX_HOST_NAME_BYTES = 64

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
    channels = comm.channels
    if not every:
        links = _measure_links(comm, list(pairwise(range(comm.ranks))), device)
        latency = statistics.median(link.latency for link in links.values())
        byte_seconds: list[float] = []
        for link in links.values():
            byte_seconds += [link.there, link.back]
        bandwidth = _bandwidth(statistics.median(byte_seconds))
        return Network(latency, bandwidth, serial=True, channels=channels)
    links = _measure_links(comm, list(combinations(range(comm.ranks), 2)), device)
    latencies: dict[Pair, float] = {}
    bandwidths: dict[Pair, float] = {}
    for (first, second), link in links.items():
        latencies[first, second] = link.latency
        latencies[second, first] = link.latency
        bandwidths[first, second] = _bandwidth(link.there)
        bandwidths[second, first] = _bandwidth(link.back)
    return Network(
        _matrix(comm.ranks, latencies, 0.0),
        _matrix(comm.ranks, bandwidths, math.inf),
        serial=True,
        channels=channels,
    )


def hosts_of(comm: Comm) -> tuple[str, ...]:
    """The host name of every rank; all ranks must call this."""
    letters = list(socket.gethostname().encode()[:MAX_HOST_NAME_BYTES])
    rows = torch.zeros(comm.ranks, MAX_HOST_NAME_BYTES, dtype=torch.float64)
    rows[comm.rank, : len(letters)] = torch.tensor(letters, dtype=torch.float64)
    names = []
    for row in gather_rows(comm, rows).tolist():
        raw = bytes(int(letter) for letter in row if letter)
        names.append(raw.decode(errors="replace"))
    return tuple(names)


# ---------------------------------------------------------------- pair by pair
def _measure_links(
    comm: Comm, pairs: Sequence[Pair], device: torch.device | str
) -> dict[Pair, MeasuredLink]:
    """Measure each pair in both directions, as many pairs at a time as hosts allow."""
    # For each pair, the round trip and the seconds per byte, measured from both ends.
    table = torch.zeros(len(pairs), 4, dtype=torch.float64)
    for turn in disjoint_pairs(pairs, hosts_of(comm)):
        comm.barrier()
        for pair in turn:
            if comm.rank not in pair:
                continue
            row = table[pairs.index(pair)]
            first, second = pair
            if comm.rank == first:
                measured = ask(comm, second, device)
                row[:2] = torch.tensor(measured, dtype=torch.float64)
                answer(comm, second, device)
            else:
                answer(comm, first, device)
                measured = ask(comm, first, device)
                row[2:] = torch.tensor(measured, dtype=torch.float64)
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
            shape = (size // FLOAT32_BYTES_ON_LINK,)
            message = comm.receive(shape, torch.float32, other).wait()
            _send_number(comm, 0, other, device)
            comm.give_back(message)


def _send_number(
    comm: Comm, number: int, target: int, device: torch.device | str
) -> None:
    tensor = torch.tensor([number], dtype=torch.float64, device=device)
    comm.send(tensor, target).wait()


def _receive_number(comm: Comm, source: int) -> int:
    tensor = comm.receive((1,), torch.float64, source).wait()
    number = int(tensor)
    comm.give_back(tensor)
    return number


def _time_trip(comm: Comm, other: int, size: int, device: torch.device | str) -> float:
    """The seconds from sending a message to receiving its reply."""
    begin = time.perf_counter()
    sent = comm.send(torch.zeros(size // FLOAT32_BYTES_ON_LINK, device=device), other)
    reply = comm.receive((1,), torch.float64, other).wait()
    comm.give_back(reply)
    sent.wait()
    settle(device)  # under NCCL it is the GPU that waits
    return time.perf_counter() - begin


def _bandwidth(byte_seconds: float) -> float:
    """Bytes per second; infinite if a byte takes no measurable time."""
    return 1.0 / byte_seconds if byte_seconds > 0 else math.inf


def _matrix(
    ranks: int, values: dict[Pair, float], diagonal: float
) -> tuple[tuple[float, ...], ...]:
    """A matrix with a value for each ordered pair, and one for a rank and itself."""
    rows = [[diagonal] * ranks for _ in range(ranks)]
    for (source, target), value in values.items():
        rows[source][target] = value
    return tuple(map(tuple, rows))
