"""Latency and bandwidth between ranks, by messages that go there and back.

    rank 0  t0 ──────► rank 1       half of t1 - t0 = latency + bytes / bandwidth, fitted over several sizes
    rank 0  t1 ◄────── rank 1

Pairs are measured one after the other, each while all other ranks wait.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from itertools import combinations

import numpy as np
import torch

from penstock.cost.fit import least_squares
from penstock.cost.network import Network
from penstock.runtime.comm.comm import Comm

SIZES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22)  # bytes
TURNS = 15  # there and back, of each size; medians, for a message is now and then held up


def network_of(comm: Comm, every: bool = False, device: torch.device | str = "cpu") -> Network:
    """The links between all ranks: `every` pair with its own numbers, else the median of neighbours for all.

    All ranks call it. A link is serial: its bandwidth was measured by one message at a time.
    """
    if comm.ranks == 1:
        return Network()
    pairs = list(combinations(range(comm.ranks), 2)) if every else [(r, r + 1) for r in range(comm.ranks - 1)]
    found = torch.zeros(len(pairs), 2, dtype=torch.float64)
    for number, pair in enumerate(pairs):
        comm.barrier()
        if comm.rank in pair:
            link = ping_pong(comm, pair[0] + pair[1] - comm.rank, comm.rank == pair[0], device)
            found[number] = torch.tensor(link if comm.rank == pair[0] else (0.0, 0.0), dtype=torch.float64)
    comm.add(found, tuple(range(comm.ranks))).wait()
    links = [(float(latency), _per_second(float(byte))) for latency, byte in found]
    if not every:
        return Network(statistics.median(a for a, _ in links), statistics.median(b for _, b in links), serial=True)
    latency = _matrix(comm.ranks, pairs, [latency for latency, _ in links], 0.0)
    return Network(latency, _matrix(comm.ranks, pairs, [bandwidth for _, bandwidth in links], math.inf), serial=True)


def ping_pong(comm: Comm, other: int, begins: bool, device: torch.device | str) -> tuple[float, float]:
    """Seconds of latency, and of a byte. Both ranks call it; one begins."""
    took: list[float] = []
    for size in SIZES:
        trips = [_trip(comm, other, size, begins, device) for _ in range(2 + TURNS)]
        took.append(statistics.median(trips[2:]) / 2)
    rows = np.array([(1.0, float(size)) for size in SIZES]) / np.array(took)[:, None]
    latency, byte = least_squares(rows, np.ones(len(SIZES)))
    return float(latency), float(byte)


def _trip(comm: Comm, other: int, size: int, begins: bool, device: torch.device | str) -> float:
    shape = (size // 4,)
    begin = time.perf_counter()
    if begins:
        comm.send(torch.zeros(shape, device=device), other).wait()
        comm.give_back(comm.receive(shape, torch.float32, other).wait())
    else:
        came = comm.receive(shape, torch.float32, other).wait()
        comm.send(came, other).wait()
        comm.give_back(came)
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()  # NCCL's waits are the GPU's
    return time.perf_counter() - begin


def _per_second(byte: float) -> float:
    return 1.0 / byte if byte > 0 else math.inf


def _matrix(
    ranks: int, pairs: Sequence[tuple[int, int]], values: Sequence[float], own: float
) -> tuple[tuple[float, ...], ...]:
    """One number for each way of each pair; to itself a rank needs no link."""
    both = {(a, b): value for (a, b), value in zip(pairs, values, strict=True)}
    return tuple(
        tuple(own if s == t else both[min(s, t), max(s, t)] for t in range(ranks)) for s in range(ranks)
    )
