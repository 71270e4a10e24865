"""Who there is to train on, as measured: a `Cluster` of the ranks that run this, to be kept in a cluster.toml.

    rank 0 ─┐ host, memory, speed             site, memory and speed of its nodes, a node a rank
    rank 1 ─┼──────────────────────► Cluster
    rank 2 ─┘ the link of every pair          latency and bandwidth, both ways

A speed is that of multiplying matrices, all ranks at once, over that of the quickest rank. A rank's memory is its
GPU's, or its share of its host's.
"""

from __future__ import annotations

import os
import time
from collections import Counter

import torch

from penstock.cost.cluster import Cluster, Matrix, Node
from penstock.cost.network import PerPair
from penstock.errors import ShapeError
from penstock.measure.links import gather_rows, hosts_of, network_of
from penstock.runtime.comm.comm import Comm
from penstock.runtime.comm.process import ProcessComm
from penstock.runtime.process.launch import run_on_ranks, spawn, under_launcher

MATRIX_WIDTH, TIMES = 768, 12  # of the matrices, and how often they are multiplied
SURVEY_PATIENCE = 3600.0  # seconds that a rank waits while others are measured


def survey(ranks: int, slots: int | None = None) -> Cluster | None:
    """The cluster of torchrun's ranks (None on all but the first), or of so many new ones on this machine."""
    if under_launcher():
        return run_on_ranks(_cluster, slots, patience=SURVEY_PATIENCE)
    return spawn(ranks, _cluster, slots, patience=SURVEY_PATIENCE)[0]


def _cluster(comm: ProcessComm, slots: int | None) -> Cluster:
    return cluster_of(comm, slots, comm.device)


def cluster_of(
    comm: Comm, slots: int | None = None, device: torch.device | str = "cpu"
) -> Cluster:
    """The ranks as nodes, and the links between them. All ranks call it. `slots`: of each, where they are known."""
    if comm.ranks < 2:
        raise ShapeError(
            "one rank has no links; measure between two at least: --ranks 2, or start it with torchrun"
        )
    hosts = hosts_of(comm)
    facts = torch.zeros(comm.ranks, 2, dtype=torch.float64)
    comm.barrier()
    facts[comm.rank, 0] = _product_seconds(device)
    facts[comm.rank, 1] = _memory(device, Counter(hosts)[hosts[comm.rank]])
    seconds, memory = gather_rows(comm, facts).T.tolist()
    network = network_of(comm, True, device)
    nodes = tuple(
        Node(host, round(min(seconds) / took, 2), slots, size)
        for host, took, size in zip(hosts, seconds, memory, strict=True)
    )
    return Cluster(
        nodes, _shown(network.latency), _shown(network.bandwidth), network.serial
    )


def _shown(matrix: PerPair) -> Matrix:
    """With as many digits as a measurement has."""
    assert isinstance(matrix, tuple)
    return tuple(tuple(float(f"{number:.4g}") for number in row) for row in matrix)


def _product_seconds(device: torch.device | str) -> float:
    """The least of several products: what disturbs one of them disturbs it for a while, not for good."""
    x = torch.randn(MATRIX_WIDTH, MATRIX_WIDTH, device=device)
    took = []
    for _ in range(TIMES):
        begin = time.perf_counter()
        x @ x
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize()
        took.append(time.perf_counter() - begin)
    return min(took)


def _memory(device: torch.device | str, neighbours: int) -> float:
    """Bytes of this rank's own; on a host with others, its share."""
    device = torch.device(device)
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // neighbours)
