"""Where the ranks of a cell stand, and over which links they talk.

Devices are numbered machine by machine. Copies of a pipeline can lie one after the other or side by side:

    machines of 4     0  1  2  3 | 4  5  6  7
    in a row          copy 0       copy 1            messages stay inside a machine, sums of gradients leave it
    side by side      r0 r0 r1 r1  r2 r2 r3 r3       sums stay inside a machine, messages leave it

A cluster has its own speed for each node and its own link for each pair; process 2 of a plan runs on node 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.cost.cluster import Cluster, Node
from penstock.cost.gpus import Gpu
from penstock.cost.network import Link, Network
from penstock.errors import ShapeError
from penstock.plan.workload import Cell

SHOWN_COPIES = 2  # copies whose links are listed; all others are like these


@dataclass(frozen=True, slots=True)
class Machines:
    """Equal devices in machines, with fast links inside and slow ones between them."""

    per_machine: int
    inside: Link
    between: Link

    def network(self, cell: Cell) -> Network:
        """Return the links between the ranks of a cell's first two copies.

        If some pair of neighbouring copies is not on one machine, the sums of gradients run
        at the pace of the slow links.
        """
        if cell.processes <= self.per_machine:
            return Network(self.inside.latency, self.inside.bandwidth, serial=True)
        copies = min(cell.copies, SHOWN_COPIES)
        places = [(copy, rank) for copy in range(copies) for rank in range(cell.ranks)]

        def link(one: tuple[int, int], other: tuple[int, int]) -> Link:
            if one[0] != other[0]:
                return self.inside if self._copies_meet(cell) else self.between
            machines = {self._machine(cell, *place) for place in (one, other)}
            return self.inside if len(machines) == 1 else self.between

        def matrix(value: Callable[[Link], float]) -> tuple[tuple[float, ...], ...]:
            return tuple(
                tuple(value(link(one, other)) for other in places) for one in places
            )

        return Network(
            matrix(lambda one: one.latency),
            matrix(lambda one: one.bandwidth),
            serial=True,
        )

    def _machine(self, cell: Cell, copy: int, rank: int) -> int:
        """Return the machine of a rank's first device."""
        number = copy * cell.ranks + rank
        if cell.side_by_side:
            number = rank * cell.copies + copy
        return number * cell.tensor * cell.shard // self.per_machine

    def _copies_meet(self, cell: Cell) -> bool:
        """Whether all copies of any rank are on one machine."""
        group = cell.copies * cell.tensor * cell.shard
        return cell.side_by_side and self.per_machine % group == 0


def machines_of(gpu: Gpu) -> Machines:
    """Return the machines in which a known GPU comes."""
    return Machines(gpu.per_machine, gpu.inside, gpu.between)


def cluster_network(cluster: Cluster, cell: Cell) -> Network:
    """Return the links between all ranks of a cell, the ranks of its first copy first."""
    places = _places(cluster, cell)

    def matrix(pairs: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(pairs[one][other] for other in places) for one in places)

    return Network(matrix(cluster.latency), matrix(cluster.bandwidth), cluster.serial)


def cluster_nodes(cluster: Cluster, cell: Cell) -> list[Node]:
    """Return the nodes of all ranks of a cell, the ranks of its first copy first."""
    return [cluster.nodes[place] for place in _places(cluster, cell)]


def _places(cluster: Cluster, cell: Cell) -> list[int]:
    """Return the number of the node of each rank, copy by copy."""
    count = cell.copies * cell.ranks
    if count > len(cluster.nodes):
        raise ShapeError(f"there are {len(cluster.nodes)} nodes, but {count} ranks")
    if not cell.side_by_side:
        return list(range(count))
    return [
        rank * cell.copies + copy
        for copy in range(cell.copies)
        for rank in range(cell.ranks)
    ]
