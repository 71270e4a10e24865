"""The machines to train on: nodes of different speed and memory, and the links between them.

    node  site    speed  slots          from \\ to   0      1      2
    0     Tokyo   1.0    3              0           -      0.4 s  1.2 s      latency; bandwidth has the same shape
    1     Osaka   0.5    6              1           0.4 s  -      1.1 s
    2     Paris   1.0    3              2           1.2 s  1.1 s  -

Rank 2 runs on node 2. `penstock.formats.cluster_toml` reads and writes clusters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from penstock.cost.cities import CITIES, City
from penstock.cost.cities import bandwidth as bandwidth_between
from penstock.cost.cities import latency as latency_between
from penstock.cost.model import ModelCost, PartCost
from penstock.cost.network import Network
from penstock.errors import ShapeError, UnknownNameError

UNLIMITED_SLOTS = 2**31 - 1
Matrix = tuple[tuple[float, ...], ...]  # [source][target]
PlaceType = TypeVar("PlaceType")


@dataclass(frozen=True, slots=True)
class Node:
    """One machine: its site, its speed (2 is twice as fast) and what it can hold."""

    site: str = ""
    speed: float = 1.0
    slots: int | None = None  # how many micro-batches it can hold at once
    memory: float | None = None  # bytes; used if the slots are not given

    def __post_init__(self) -> None:
        if not (self.speed > 0 and math.isfinite(self.speed)):
            raise ShapeError(
                f"a node at {self.site!r} has speed {self.speed:g}; a speed must be more than 0"
            )
        if self.slots is not None and self.slots < 1:
            raise ShapeError(
                f"a node at {self.site!r} has {self.slots} slots, but it needs at least 1"
            )
        if self.memory is not None and not self.memory > 0:
            raise ShapeError(
                f"a node at {self.site!r} has a memory of {self.memory:g} bytes, but it needs more than 0"
            )


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes and links. Each ordered pair has a latency in seconds and a bandwidth in bytes per second."""

    nodes: tuple[Node, ...]
    latency: Matrix
    bandwidth: Matrix
    serial: bool = False  # whether a link carries one message at a time

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ShapeError("a cluster needs at least one node")
        for word, matrix in (("latency", self.latency), ("bandwidth", self.bandwidth)):
            if len(matrix) != len(self.nodes):
                raise ShapeError(
                    f"the {word} matrix is for {len(matrix)} nodes, but there are {len(self.nodes)}"
                )
        self.network()  # rejects numbers that make no sense

    @classmethod
    def geo(
        cls,
        sites: Sequence[str | City],
        speed: float = 1.0,
        slots: int = 3,
        serial: bool = False,
    ) -> Cluster:
        """One node in each of these cities; a city may occur several times.

        Latency follows from distance, and bandwidth from latency.

        >>> there = Cluster.geo(["Tokyo", "Osaka", "Paris"])
        >>> [round(seconds, 3) for seconds in there.latency[0]]
        [0.0, 0.003, 0.073]
        """
        cities = [_city(site) for site in sites]
        nodes = tuple(Node(city.name, speed, slots) for city in cities)
        return cls(
            nodes,
            _matrix(cities, latency_between, diagonal=0.0),
            _matrix(cities, bandwidth_between, diagonal=math.inf),
            serial,
        )

    @classmethod
    def even(
        cls,
        nodes: int,
        latency: float = 0.0,
        bandwidth: float = math.inf,
        slots: int = 3,
        serial: bool = False,
    ) -> Cluster:
        """Equal nodes, with equal links between all of them."""
        numbers = range(nodes)
        return cls(
            (Node(slots=slots),) * nodes,
            _matrix(numbers, lambda one, other: latency, diagonal=0.0),
            _matrix(numbers, lambda one, other: bandwidth, diagonal=math.inf),
            serial,
        )

    def network(self) -> Network:
        """The links in the form that the simulator takes."""
        return Network(self.latency, self.bandwidth, self.serial)

    def cost(self, parts: Sequence[PartCost]) -> ModelCost:
        """The cost of running a model of these parts on this cluster."""
        return ModelCost(
            tuple(parts), self.network(), tuple(node.speed for node in self.nodes)
        )

    def slots(self, held: float = 0.0, weights: float = 0.0) -> tuple[int, ...]:
        """How many micro-batches each node can hold.

        Each takes `held` bytes, next to `weights` bytes that are always there.
        """
        return tuple(
            _slots(number, node, held, weights)
            for number, node in enumerate(self.nodes)
        )


def with_memory(cluster: Cluster, memory: float) -> Cluster:
    """Return the cluster with this memory for every node that has neither slots nor memory."""
    nodes = []
    for node in cluster.nodes:
        is_unknown = node.slots is None and node.memory is None
        nodes.append(replace(node, memory=memory) if is_unknown else node)
    return replace(cluster, nodes=tuple(nodes))


def with_slots(cluster: Cluster, slots: int) -> Cluster:
    """Return the cluster with this number of slots for every node."""
    nodes = tuple(replace(node, slots=slots) for node in cluster.nodes)
    return replace(cluster, nodes=nodes)


def _matrix(
    places: Sequence[PlaceType],
    value: Callable[[PlaceType, PlaceType], float],
    diagonal: float,
) -> Matrix:
    """A value for each ordered pair of places, and `diagonal` from a place to itself."""
    rows = []
    for i, one in enumerate(places):
        row = [value(one, other) for other in places]
        row[i] = diagonal
        rows.append(tuple(row))
    return tuple(rows)


def _slots(number: int, node: Node, held: float, weights: float) -> int:
    if node.slots is not None:
        return node.slots
    if node.memory is None or held <= 0:
        fact = "has neither slots nor memory"
        if node.memory is not None:
            fact = "has a memory, but the bytes of a micro-batch are unknown"
        raise ShapeError(
            f"node {number} {fact}\n"
            "  give its slots, or its memory and the held bytes of the parts"
        )
    free = node.memory - weights
    fit = int(min(free / held * (1 + 1e-12), UNLIMITED_SLOTS))
    if fit < 1:
        raise ShapeError(
            f"node {number} cannot hold a single micro-batch: one takes {held:g} bytes, "
            f"and the node has {node.memory:g}, less {weights:g} for weights"
        )
    return fit


def _city(site: str | City) -> City:
    if isinstance(site, City):
        return site
    if site not in CITIES:
        raise UnknownNameError("city", site, CITIES)
    return CITIES[site]
