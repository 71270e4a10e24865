"""The machines to train on: nodes of different speed and memory, and the links between them.

    node  site    speed  slots          from \\ to   0      1      2
    0     Tokyo   1.0    3              0           -      0.4 s  1.2 s      latency; bandwidth has the same shape
    1     Osaka   0.5    6              1           0.4 s  -      1.1 s
    2     Paris   1.0    3              2           1.2 s  1.1 s  -

Rank 2 runs on node 2. `penstock.formats.cluster_toml` reads and writes clusters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import asin, cos, radians, sin, sqrt
from typing import NamedTuple

from penstock.cost.cost import ModelCost, PartCost
from penstock.cost.network import Network, pair_matrix
from penstock.errors import ShapeError, UnknownNameError

UNLIMITED_SLOTS = 2**31 - 1
Matrix = tuple[tuple[float, ...], ...]  # [source][target]


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
            pair_matrix(cities, latency_between, diagonal=0.0),
            pair_matrix(cities, bandwidth_between, diagonal=math.inf),
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
            pair_matrix(numbers, lambda one, other: latency, diagonal=0.0),
            pair_matrix(numbers, lambda one, other: bandwidth, diagonal=math.inf),
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


def with_memory(cluster: Cluster, memory: float) -> Cluster:
    """Return the cluster with this memory for every node that has neither slots nor memory."""
    nodes = []
    for node in cluster.nodes:
        is_unknown = node.slots is None and node.memory is None
        nodes.append(replace(node, memory=memory) if is_unknown else node)
    return replace(cluster, nodes=tuple(nodes))


def _city(site: str | City) -> City:
    if isinstance(site, City):
        return site
    if site not in CITIES:
        raise UnknownNameError("city", site, CITIES)
    return CITIES[site]


EARTH_RADIUS_KM = 6371.0
FIBRE_KM_PER_SECOND = 200_000.0
CABLE_DETOUR = 1.5  # length of a cable over the length of the great circle
MIN_LATENCY = 0.0005  # seconds, for routers and network cards
TCP_WINDOW_BYTES = 2.5e6
MAX_BANDWIDTH_BETWEEN_CITIES = 250e6  # bytes per second
BANDWIDTH_WITHIN_CITY = 2e9  # bytes per second


class City(NamedTuple):
    """A place, in degrees north and east. A fibre between two of them has

    latency    one way: the great circle, 1.5 times as long because of the route that cables take, at two thirds of the
               speed of light
    bandwidth  one stream with at most `TCP_WINDOW_BYTES` in flight, so it falls with the round-trip time
    """

    name: str
    north: float
    east: float


def distance(one: City, other: City) -> float:
    """Kilometres along the great circle."""
    a, b = radians(one.north), radians(other.north)
    across = (
        sin((a - b) / 2) ** 2
        + cos(a) * cos(b) * sin(radians(one.east - other.east) / 2) ** 2
    )
    return 2 * EARTH_RADIUS_KM * asin(sqrt(across))


def latency_between(one: City, other: City) -> float:
    """Seconds from one city to the other, one way."""
    return MIN_LATENCY + CABLE_DETOUR * distance(one, other) / FIBRE_KM_PER_SECOND


def bandwidth_between(one: City, other: City) -> float:
    """Bytes per second of one stream."""
    if one.name == other.name:
        return BANDWIDTH_WITHIN_CITY
    return min(
        MAX_BANDWIDTH_BETWEEN_CITIES,
        TCP_WINDOW_BYTES / (2 * latency_between(one, other)),
    )


# Name, degrees north, degrees east.
_CITY_TABLE = """
Amsterdam         52.4     4.9
Athens            38.0    23.7
Atlanta           33.7   -84.4
Auckland         -36.9   174.8
Bangkok           13.8   100.5
Beijing           39.9   116.4
Berlin            52.5    13.4
Bogota             4.7   -74.1
Boston            42.4   -71.1
Brussels          50.8     4.4
Buenos Aires     -34.6   -58.4
Cairo             30.0    31.2
Cape Town        -33.9    18.4
Chicago           41.9   -87.6
Dallas            32.8   -96.8
Delhi             28.6    77.2
Denver            39.7  -105.0
Dubai             25.2    55.3
Dublin            53.3    -6.3
Frankfurt         50.1     8.7
Geneva            46.2     6.1
Helsinki          60.2    24.9
Hong Kong         22.3   114.2
Istanbul          41.0    29.0
Jakarta           -6.2   106.8
Johannesburg     -26.2    28.0
Lagos              6.5     3.4
Lima             -12.0   -77.0
Lisbon            38.7    -9.1
London            51.5    -0.1
Los Angeles       34.1  -118.2
Madrid            40.4    -3.7
Melbourne        -37.8   145.0
Mexico City       19.4   -99.1
Miami             25.8   -80.2
Milan             45.5     9.2
Montreal          45.5   -73.6
Mumbai            19.1    72.9
Munich            48.1    11.6
Nairobi           -1.3    36.8
New York          40.7   -74.0
Osaka             34.7   135.5
Oslo              59.9    10.8
Paris             48.9     2.4
Portland          45.5  -122.7
Prague            50.1    14.4
Rome              41.9    12.5
San Francisco     37.8  -122.4
Santiago         -33.4   -70.7
Sao Paulo        -23.6   -46.6
Seattle           47.6  -122.3
Seoul             37.6   127.0
Shanghai          31.2   121.5
Singapore          1.4   103.8
Sofia             42.7    23.3
Stockholm         59.3    18.1
Sydney           -33.9   151.2
Taipei            25.0   121.6
Tel Aviv          32.1    34.8
Tokyo             35.7   139.7
Toronto           43.7   -79.4
Vancouver         49.3  -123.1
Vienna            48.2    16.4
Warsaw            52.2    21.0
Washington        38.9   -77.0
Zurich            47.4     8.5
"""


def _read_cities() -> dict[str, City]:
    """The cities of the table by name."""
    cities = {}
    for line in _CITY_TABLE.strip().splitlines():
        name, north, east = line.rsplit(maxsplit=2)
        cities[name] = City(name, float(north), float(east))
    return cities


CITIES = _read_cities()
