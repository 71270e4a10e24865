"""Latency and bandwidth between ranks, by messages and their answers.

    rank 0  t0 ─── bytes ───► rank 1       t1 - t0 = there and back + bytes / bandwidth of that way,
    rank 0  t1 ◄── a word ─── rank 1       fitted over several sizes

Each way of a pair has a bandwidth of its own. A latency is half of there and back: two clocks never agree well enough
to part it. Pairs without a host in common are measured at the same time, all others one after the other:

    turn 0    0-1   2-3        four hosts of one rank each: three turns
    turn 1    0-2   1-3
    turn 2    0-3   1-2
"""

from __future__ import annotations

import math
import socket
import statistics
import time
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.cost.fit import least_squares
from penstock.cost.network import Network
from penstock.runtime.comm.comm import Comm

SIZES = (1 << 10, 1 << 16, 1 << 19, 1 << 20, 1 << 22)  # bytes
MIN_REPEATS, MAX_REPEATS = (
    3,
    9,
)  # messages of a size; medians, for one is now and then held up
SECONDS_PER_SIZE = (
    0.1  # seconds that are given to a size, if a message does not take longer
)
MAX_MESSAGE_SECONDS = 1.5  # seconds of a message after which no larger one is sent
PING = ((1,), torch.float64)
HOST_NAME_LETTERS = 64  # of a host's name that are told

Pair = tuple[int, int]


class Link(NamedTuple):
    """Of a pair: seconds of latency, and of a byte from the first to the second, and from the second to the first."""

    latency: float
    there: float
    back: float


def network_of(
    comm: Comm, every: bool = False, device: torch.device | str = "cpu"
) -> Network:
    """The links between all ranks: `every` pair with its own numbers, else the median of neighbours for all.

    All ranks call it. A link is serial: its bandwidth was measured by one message at a time.
    """
    if comm.ranks == 1:
        return Network()
    pairs = (
        list(combinations(range(comm.ranks), 2))
        if every
        else [(r, r + 1) for r in range(comm.ranks - 1)]
    )
    links = _measured(comm, pairs, device)
    if not every:
        bytes_ = [byte for link in links.values() for byte in (link.there, link.back)]
        latency = statistics.median(link.latency for link in links.values())
        return Network(latency, _per_second(statistics.median(bytes_)), serial=True)
    latencies = _matrix(
        comm.ranks, {pair: (link.latency,) * 2 for pair, link in links.items()}, 0.0
    )
    ways = {
        pair: (_per_second(link.there), _per_second(link.back))
        for pair, link in links.items()
    }
    return Network(latencies, _matrix(comm.ranks, ways, math.inf), serial=True)


def hosts_of(comm: Comm) -> tuple[str, ...]:
    """The name of every rank's machine. All ranks call it."""
    letters = list(socket.gethostname().encode()[:HOST_NAME_LETTERS])
    row = torch.zeros(comm.ranks, HOST_NAME_LETTERS, dtype=torch.float64)
    row[comm.rank, : len(letters)] = torch.tensor(letters, dtype=torch.float64)
    told = gather_rows(comm, row)
    return tuple(
        bytes(int(letter) for letter in name if letter).decode(errors="replace")
        for name in told.tolist()
    )


def gather_rows(comm: Comm, rows: Tensor) -> Tensor:
    """The rows of all ranks, of which each has filled its own and left the others zero."""
    comm.add(rows, tuple(range(comm.ranks))).wait()
    return rows


# ---------------------------------------------------------------- pair by pair
def _measured(
    comm: Comm, pairs: Sequence[Pair], device: torch.device | str
) -> dict[Pair, Link]:
    found = torch.zeros(
        len(pairs), 4, dtype=torch.float64
    )  # there and back and a byte, as the one asks, and the other
    for turn in disjoint_pairs(pairs, hosts_of(comm)):
        comm.barrier()
        for pair in turn:
            if comm.rank not in pair:
                continue
            mine, (one, other) = found[pairs.index(pair)], pair
            if comm.rank == one:
                mine[:2] = torch.tensor(ask(comm, other, device), dtype=torch.float64)
                answer(comm, other, device)
            else:
                answer(comm, one, device)
                mine[2:] = torch.tensor(ask(comm, one, device), dtype=torch.float64)
    rows = gather_rows(comm, found).tolist()
    return {
        pair: Link((a + b) / 4, there, back)
        for pair, (a, there, b, back) in zip(pairs, rows, strict=True)
    }


def disjoint_pairs(pairs: Sequence[Pair], hosts: Sequence[str]) -> list[list[Pair]]:
    """Pairs that are measured at once: no two of a turn share a host.

    >>> disjoint_pairs([(0, 1), (0, 2), (1, 2), (0, 3), (2, 3)], "abcd")
    [[(0, 1), (2, 3)], [(0, 2)], [(1, 2), (0, 3)]]
    """
    turns: list[tuple[list[Pair], set[str]]] = []
    for pair in pairs:
        ends = {hosts[rank] for rank in pair}
        for turn, taken in turns:
            if not ends & taken:
                turn.append(pair)
                taken.update(ends)
                break
        else:
            turns.append(([pair], ends))
    return [turn for turn, _ in turns]


def ask(
    comm: Comm, other: int, device: torch.device | str = "cpu"
) -> tuple[float, float]:
    """Seconds there and back, and of a byte there. The other rank answers meanwhile."""
    took: list[float] = []
    for size in SIZES:
        if took and took[-1] > MAX_MESSAGE_SECONDS:
            break
        count = 1 + (
            MAX_REPEATS
            if not took
            else min(max(int(SECONDS_PER_SIZE / took[-1]), MIN_REPEATS), MAX_REPEATS)
        )
        comm.send(
            torch.tensor([count], dtype=torch.float64, device=device), other
        ).wait()
        took.append(
            statistics.median(
                [_trip(comm, other, size, device) for _ in range(count)][1:]
            )
        )
    comm.send(torch.zeros(1, dtype=torch.float64, device=device), other).wait()
    rows = (
        np.array([(1.0, float(size)) for size in SIZES[: len(took)]])
        / np.array(took)[:, None]
    )
    both, byte = least_squares(rows, np.ones(len(took)))
    return float(both), float(byte)


def answer(comm: Comm, other: int, device: torch.device | str = "cpu") -> None:
    """A word for every message of a rank that asks, until it has asked enough."""
    for size in (*SIZES, 0):
        word = comm.receive(*PING, other).wait()
        count = int(word)
        comm.give_back(word)
        if not count:
            return
        for _ in range(count):
            came = comm.receive((size // 4,), torch.float32, other).wait()
            comm.send(torch.zeros(1, dtype=torch.float64, device=device), other).wait()
            comm.give_back(came)


def _trip(comm: Comm, other: int, size: int, device: torch.device | str) -> float:
    begin = time.perf_counter()
    sent = comm.send(torch.zeros(size // 4, device=device), other)
    comm.give_back(comm.receive(*PING, other).wait())
    sent.wait()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()  # NCCL's waits are the GPU's
    return time.perf_counter() - begin


def _per_second(byte: float) -> float:
    return 1.0 / byte if byte > 0 else math.inf


def _matrix(
    ranks: int, ways: dict[Pair, tuple[float, float]], own: float
) -> tuple[tuple[float, ...], ...]:
    """One number for each way of each pair; to itself a rank needs no link."""
    found = [[own] * ranks for _ in range(ranks)]
    for (one, other), (there, back) in ways.items():
        found[one][other], found[other][one] = there, back
    return tuple(map(tuple, found))
