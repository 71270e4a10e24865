"""cluster.toml: nodes and links, for people and programs to read, edit and keep.

penstock = "cluster"
version = 1
serial = false                        # true: a link carries one message at a time

[[nodes]]
site = "Tokyo"
count = 4                             # number of nodes like this one; 1 unless given
speed = 1.0
slots = 3                             # micro-batches; or memory = 16e9, in bytes

[links]                               # for all pairs: one number, or a matrix [from][to]
latency = 0.05                        # seconds
bandwidth = 100e6                     # bytes per second; inf for unlimited
                                      # or instead: cities = true, if Penstock knows the sites as cities

[[link]]                              # exceptions; later ones override earlier ones
between = ["Tokyo", "Osaka"]          # two sites; the same site twice for the links within it
latency = 0.004

[[link]]
between = [0, 5]                      # two nodes
bandwidth = 250e6
oneway = true                         # only from the first to the second; both ways unless given
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from penstock.cost.cluster import Cluster, Node
from penstock.cost.network import MIN_BANDWIDTH
from penstock.errors import PenstockError, nearest_name
from penstock.formats.fields import (
    Field,
    Read,
    anything,
    flag,
    items,
    made,
    number,
    read_keys,
    read_page,
    record,
    string,
    whole,
)
from penstock.formats.text import (
    Page,
    Steps,
    Value,
    fail,
    fail_at,
    read_text,
    write_text,
)
from penstock.formats.toml_text import TomlPage, parse_toml, value_text

CLUSTER_VERSION = 1
MAX_NODES = 100_000
MAX_SLOTS = 100_000
MAX_LATENCY = 1e12  # seconds; a missing link has a small bandwidth instead
NodePairs: TypeAlias = list[list[float]]  # [source][target]
Item = TypeVar("Item")


# ---------------------------------------------------------------- writing
def dump_cluster(cluster: Cluster) -> str:
    """The text of a cluster, from which `load_cluster` builds an equal cluster."""
    lines = [
        'penstock = "cluster"',
        f"version = {CLUSTER_VERSION}",
        f"serial = {value_text(cluster.serial)}",
        "",
    ]
    for node, run in groupby(cluster.nodes):
        lines += ["[[nodes]]", *_node_lines(node, len(list(run))), ""]
    lines.append("[links]")
    lines += _matrix_lines("latency", cluster.latency)
    lines += _matrix_lines("bandwidth", cluster.bandwidth)
    return "\n".join(lines) + "\n"


def write_cluster(cluster: Cluster, path: str | Path) -> None:
    """Write a cluster to a file."""
    write_text(path, dump_cluster(cluster))


def _node_lines(node: Node, count: int) -> list[str]:
    values = {
        "site": node.site or None,
        "count": count if count > 1 else None,
        "speed": float(node.speed),
        "slots": node.slots,
        "memory": None if node.memory is None else float(node.memory),
    }
    return [
        f"{key} = {value_text(value)}"
        for key, value in values.items()
        if value is not None
    ]


def _matrix_lines(quantity: str, matrix: Sequence[Sequence[float]]) -> list[str]:
    rows = [f"  {value_text(tuple(map(float, row)))}," for row in matrix]
    return [f"{quantity} = [", *rows, "]"]


# ---------------------------------------------------------------- reading
def _tables(read: Read[Item]) -> Read[tuple[Item, ...]]:
    """The tables of a list `[[key]]`."""

    def read_tables(page: Page, steps: Steps, value: Value) -> tuple[Item, ...]:
        key = steps[-1]
        if isinstance(value, dict):
            what = f"{key} is one table, but it should be a list of tables"
            fail(page, steps, what, f"write [[{key}]] with two brackets")
        if not isinstance(value, list):
            what = f"{key} is not a list of tables"
            fail(page, steps, what, f"write [[{key}]] above each of them")
        return items(read)(page, steps, value)

    return read_tables


def _equal_nodes(count: int, **values: Any) -> list[Node]:
    return [Node(**values)] * count


ANY_NUMBER = number(-math.inf, math.inf)  # whose range is checked elsewhere
CLUSTER = {
    "penstock": Field(anything),
    "version": Field(anything, CLUSTER_VERSION),
    "serial": Field(flag, False),
    "nodes": Field(
        _tables(
            record(
                _equal_nodes,
                {
                    "site": Field(string, ""),
                    "count": Field(whole(1, MAX_NODES), 1),
                    "speed": Field(ANY_NUMBER, 1.0),
                    "slots": Field(whole(1, MAX_SLOTS), None),
                    "memory": Field(ANY_NUMBER, None),
                },
                "correct this node",
            )
        ),
        (),
    ),
    "links": Field(anything, {}),
    "link": Field(
        _tables(
            record(
                dict,
                {
                    "between": Field(anything, None),
                    "latency": Field(number(0.0, MAX_LATENCY), None),
                    "bandwidth": Field(number(MIN_BANDWIDTH, math.inf), None),
                    "oneway": Field(flag, False),
                },
            )
        ),
        (),
    ),
}


def read_cluster(path: str | Path) -> Cluster:
    """The cluster in a file."""
    return load_cluster(read_text(path, "cluster"), str(path))


def load_cluster(text: str, source: str = "cluster.toml") -> Cluster:
    """The cluster in a text; errors call the file `source`."""
    page = TomlPage(text, source, "cluster")
    top = read_page(page, parse_toml(page), CLUSTER_VERSION, CLUSTER)
    nodes = [node for equal in top["nodes"] for node in equal]
    if not nodes:
        fail(page, (), "the cluster has no nodes", "give at least one [[nodes]]")
    latency, bandwidth = _links(page, top["links"], nodes)
    for place, link in enumerate(top["link"]):
        _apply_link(page, ("link", place), link, nodes, latency, bandwidth)
    return made(
        *(page, ("links",), "correct the links", Cluster),
        nodes=tuple(nodes),
        latency=tuple(map(tuple, latency)),
        bandwidth=tuple(map(tuple, bandwidth)),
        serial=top["serial"],
    )


# ---------------------------------------------------------------- links
def _links(page: Page, value: Value, nodes: list[Node]) -> tuple[NodePairs, NodePairs]:
    """The latency and the bandwidth of every pair of nodes, from `[links]`."""
    if not isinstance(value, dict):
        advice = "write [links], with latency and bandwidth below it"
        fail(page, ("links",), "links is not a table", advice)
    count = len(nodes)
    keys = {
        "latency": Field(_pairs(count, 0.0, MAX_LATENCY), None),
        "bandwidth": Field(_pairs(count, math.inf, math.inf), None),
        "cities": Field(flag, False),
    }
    links = read_keys(page, ("links",), value, keys)
    latency = _every_pair(count, 0.0, diagonal=0.0)
    bandwidth = _every_pair(count, math.inf, diagonal=math.inf)
    if links["cities"]:
        between = _between_cities(page, nodes)
        latency = [list(row) for row in between.latency]
        bandwidth = [list(row) for row in between.bandwidth]
    return links["latency"] or latency, links["bandwidth"] or bandwidth


def _pairs(nodes: int, diagonal: float, most: float) -> Read[NodePairs]:
    """One number for all pairs, or a matrix [from][to].

    `Cluster` rejects numbers that are too small, but not on the diagonal, since no message
    goes from a node to itself.
    """
    read_number = number(-math.inf, most)

    def read(page: Page, steps: Steps, value: Value) -> NodePairs:
        if not isinstance(value, list):
            return _every_pair(nodes, read_number(page, steps, value), diagonal)
        quantity = steps[-1]
        if len(value) != nodes:
            what = (
                f"the {quantity} matrix has {len(value)} rows, "
                f"but there are {nodes} nodes"
            )
            advice = "give one row per node, with one number per node"
            fail(page, steps, what, advice)
        for place, row in enumerate(value):
            if not isinstance(row, list) or len(row) != nodes:
                size = len(row) if isinstance(row, list) else 1
                what = (
                    f"row {place} of the {quantity} matrix has {size} numbers, "
                    f"but there are {nodes} nodes"
                )
                fail(page, steps, what, "give one number per node")
        rows = items(items(read_number))(page, steps, value)
        return list(map(list, rows))

    return read


def _every_pair(nodes: int, number: float, diagonal: float) -> NodePairs:
    matrix = [[number] * nodes for _ in range(nodes)]
    for node in range(nodes):
        matrix[node][node] = diagonal
    return matrix


def _between_cities(page: Page, nodes: list[Node]) -> Cluster:
    """A cluster with latency from distance and bandwidth from latency."""
    try:
        return Cluster.geo([node.site for node in nodes])
    except PenstockError as error:
        what, _, known = str(error).partition("\n")
        advice = f"write its latency and bandwidth instead; {known}"
        fail(page, ("links", "cities"), f"links.cities is true, but {what}", advice)


def _apply_link(
    page: Page,
    steps: Steps,
    link: dict[str, Any],
    nodes: list[Node],
    latency: NodePairs,
    bandwidth: NodePairs,
) -> None:
    """Write the numbers of a `[[link]]` into the matrices."""
    ends = link["between"]
    if not isinstance(ends, list) or len(ends) != 2:
        what = f"link[{steps[-1]}] does not name its two ends"
        advice = 'write between = ["site", "site"] or [node, node]'
        fail(page, (*steps, "between"), what, advice)
    sources, targets = (_nodes_at(page, steps, end, nodes) for end in ends)
    for key, matrix in (("latency", latency), ("bandwidth", bandwidth)):
        if link[key] is not None:
            _set_pairs(matrix, sources, targets, link[key], link["oneway"])


def _set_pairs(
    matrix: NodePairs,
    sources: list[int],
    targets: list[int],
    number: float,
    oneway: bool,
) -> None:
    for source in sources:
        for target in targets:
            if source == target:
                continue
            matrix[source][target] = number
            if not oneway:
                matrix[target][source] = number


def _nodes_at(page: Page, steps: Steps, end: Value, nodes: list[Node]) -> list[int]:
    """The nodes at one end of a link."""
    where = page.find_value((*steps, "between"))
    name = f"link[{steps[-1]}]"
    if isinstance(end, int) and not isinstance(end, bool):
        if not 0 <= end < len(nodes):
            last = len(nodes) - 1
            what = f"{name} names node {end}, but there are nodes 0..{last}"
            fail_at(page, where, what, "name one of these")
        return [end]
    sites = sorted({node.site for node in nodes if node.site})
    if not isinstance(end, str) or end not in sites:
        near = nearest_name(str(end), sites)
        hint = f"did you mean {near!r}? " if near else ""
        what = f"{name} names the site {end!r}, but no node is there"
        fail_at(page, where, what, f"{hint}sites: {', '.join(sites)}")
    return [number for number, node in enumerate(nodes) if node.site == end]
