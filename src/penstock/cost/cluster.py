"""Who there is to train on: nodes of different speed and memory, and the links between them.

    node  site    speed  slots          from \\ to   0      1      2
    0     Tokyo   1.0    3              0           -      0.4 s  1.2 s      latency, and the same for bytes a second
    1     Osaka   0.5    6              1           0.4 s  -      1.1 s
    2     Paris   1.0    3              2           1.2 s  1.1 s  -

A node is what a rank runs on: node 2 is rank 2. Kept in a `cluster.toml`: see `penstock.formats.cluster_toml`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.cost.cities import CITIES, City
from penstock.cost.cities import bandwidth as bandwidth_of
from penstock.cost.cities import latency as latency_of
from penstock.cost.model import ModelCost, PartCost
from penstock.cost.network import Network
from penstock.errors import ShapeError, UnknownNameError

UNLIMITED_SLOTS = 2**31 - 1  # micro-batches on a node: as many as you like
Matrix = tuple[tuple[float, ...], ...]  # [source][target]


@dataclass(frozen=True, slots=True)
class Node:
    """Where it stands, how fast it is (2: twice as fast), and how much it holds: micro-batches, or bytes."""

    site: str = ""
    speed: float = 1.0
    slots: int | None = None  # micro-batches whose activations it holds at once
    memory: float | None = None  # bytes; used where the slots are not given

    def __post_init__(self) -> None:
        if not (self.speed > 0 and math.isfinite(self.speed)):
            raise ShapeError(
                f"a node at {self.site!r} has speed {self.speed:g}; a speed is more than 0"
            )
        if self.slots is not None and self.slots < 1:
            raise ShapeError(
                f"a node at {self.site!r} has {self.slots} slots; the least is 1"
            )
        if self.memory is not None and not self.memory > 0:
            raise ShapeError(
                f"a node at {self.site!r} has a memory of {self.memory:g} bytes; it needs more than 0"
            )


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes and links: latency in seconds and bandwidth in bytes a second, for each ordered pair."""

    nodes: tuple[Node, ...]
    latency: Matrix
    bandwidth: Matrix
    serial: bool = False  # a link carries one message at a time

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ShapeError("a cluster needs at least one node")
        for word, matrix in (("latency", self.latency), ("bandwidth", self.bandwidth)):
            if len(matrix) != len(self.nodes):
                raise ShapeError(
                    f"the {word} matrix is for {len(matrix)} nodes, but there are {len(self.nodes)}"
                )
        self.network()  # refuses numbers that make no sense

    @classmethod
    def geo(
        cls,
        sites: Sequence[str | City],
        speed: float = 1.0,
        slots: int = 3,
        serial: bool = False,
    ) -> Cluster:
        """One node in each of these cities (a city may come often): latency from distance, bandwidth from latency.

        >>> there = Cluster.geo(["Tokyo", "Osaka", "Paris"])
        >>> [round(seconds, 3) for seconds in there.latency[0]]
        [0.0, 0.003, 0.073]
        """
        cities = [_city(site) for site in sites]
        latency = tuple(
            tuple(0.0 if i == j else latency_of(a, b) for j, b in enumerate(cities))
            for i, a in enumerate(cities)
        )
        bandwidth = tuple(
            tuple(
                math.inf if i == j else bandwidth_of(a, b) for j, b in enumerate(cities)
            )
            for i, a in enumerate(cities)
        )
        return cls(
            tuple(Node(city.name, speed, slots) for city in cities),
            latency,
            bandwidth,
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
        """Equal nodes, each as far from each other."""
        many = range(nodes)
        return cls(
            (Node(slots=slots),) * nodes,
            tuple(tuple(0.0 if i == j else latency for j in many) for i in many),
            tuple(tuple(math.inf if i == j else bandwidth for j in many) for i in many),
            serial,
        )

    def network(self) -> Network:
        """The links, as the simulator takes them."""
        return Network(self.latency, self.bandwidth, self.serial)

    def cost(self, parts: Sequence[PartCost]) -> ModelCost:
        """What a model of these parts takes here, node by node."""
        return ModelCost(
            tuple(parts), self.network(), tuple(node.speed for node in self.nodes)
        )

    def slots(self, held: float = 0.0, weights: float = 0.0) -> tuple[int, ...]:
        """Micro-batches each node holds, where one takes `held` bytes beside the weights'."""
        return tuple(
            _slots(number, node, held, weights)
            for number, node in enumerate(self.nodes)
        )


def _slots(number: int, node: Node, held: float, weights: float) -> int:
    if node.slots is not None:
        return node.slots
    if node.memory is None or held <= 0:
        what = (
            "neither slots nor memory"
            if node.memory is None
            else "a memory, but no bytes a micro-batch are given"
        )
        raise ShapeError(
            f"node {number} has {what}\n  give its slots, or its memory and the parts' held bytes"
        )
    fit = int(min((node.memory - weights) / held * (1 + 1e-12), UNLIMITED_SLOTS))
    if fit < 1:
        raise ShapeError(
            f"node {number} holds no micro-batch, which takes {held:g} bytes: "
            f"it has {node.memory:g}, less {weights:g} of weights"
        )
    return fit


def _city(site: str | City) -> City:
    if isinstance(site, City):
        return site
    if site not in CITIES:
        raise UnknownNameError("city", site, CITIES)
    return CITIES[site]
