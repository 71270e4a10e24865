"""Measures the hosts of the ranks and the links between them, as a `Cluster` for a cluster.toml.

    rank 0 ─┐ host, memory, speed             a node for each rank, with its site, memory and speed
    rank 1 ─┼──────────────────────► Cluster
    rank 2 ─┘ the link of every pair          latency and bandwidth in both directions

A rank's speed is that of matrix products with all ranks working at once, relative to the
fastest rank. Its memory is that of its GPU, or its share of its host's memory.
"""

from __future__ import annotations

import os
import time
from collections import Counter

import torch

from penstock.cost.cluster import Cluster, Matrix, Node
from penstock.cost.network import PerPair
from penstock.errors import ShapeError
from penstock.measure.links import hosts_of, measured_links, settle
from penstock.runtime.comm.comm import Comm, exchange
from penstock.runtime.comm.process import ProcessComm
from penstock.runtime.process.launch import run_on_ranks, spawn, under_launcher

MATRIX_WIDTH = 768
PRODUCTS = 12  # how often the matrices are multiplied
SURVEY_PATIENCE = 3600.0  # seconds that a rank waits while others are measured


def survey(ranks: int) -> Cluster | None:
    """Measure the cluster of torchrun's ranks, or of new ranks on this machine.

    Under torchrun, only rank 0 gets the cluster; the others get None.
    """
    if under_launcher():
        return run_on_ranks(_survey_rank, patience=SURVEY_PATIENCE)
    return spawn(ranks, _survey_rank, patience=SURVEY_PATIENCE)[0]


def _survey_rank(comm: ProcessComm) -> Cluster:
    return cluster_of(comm, comm.device)


def cluster_of(comm: Comm, device: torch.device | str = "cpu") -> Cluster:
    """Measure the ranks as nodes, and the links between them; all ranks must call this."""
    if comm.ranks < 2:
        raise ShapeError(
            "one rank has no links; measure between at least two ranks: use --ranks 2, or "
            "start the command with torchrun"
        )
    hosts = hosts_of(comm)
    neighbors = Counter(hosts)[hosts[comm.rank]]
    comm.barrier()
    mine = _product_seconds(device), _memory_bytes(device, neighbors)
    measured = [one["measured"] for one in exchange(comm, {"measured": mine})]
    network = measured_links(comm, True, device)
    fastest = min(seconds for seconds, _ in measured)
    nodes = []
    for host, (seconds, memory) in zip(hosts, measured, strict=True):
        nodes.append(Node(host, round(fastest / seconds, 2), None, memory))
    latency = _round_matrix(network.latency)
    bandwidth = _round_matrix(network.bandwidth)
    return Cluster(tuple(nodes), latency, bandwidth, network.serial)


def _round_matrix(matrix: PerPair) -> Matrix:
    """Round the numbers to as many digits as a measurement has."""
    assert isinstance(matrix, tuple)
    return tuple(tuple(float(f"{number:.4g}") for number in row) for row in matrix)


def _product_seconds(device: torch.device | str) -> float:
    """The shortest of several matrix products, since disturbances pass."""
    x = torch.randn(MATRIX_WIDTH, MATRIX_WIDTH, device=device)
    seconds = []
    for _ in range(PRODUCTS):
        begin = time.perf_counter()
        x @ x
        settle(device)
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def _memory_bytes(device: torch.device | str, neighbors: int) -> float:
    """The memory of this rank's GPU, or its share of the memory of its host."""
    device = torch.device(device)
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    pages = os.sysconf("SC_PHYS_PAGES")
    return float(pages * os.sysconf("SC_PAGE_SIZE") // neighbors)
