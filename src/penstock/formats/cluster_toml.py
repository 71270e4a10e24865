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
from typing import TypeAlias

from penstock.cost.cluster import Cluster, Node
from penstock.cost.network import MIN_BANDWIDTH
from penstock.errors import PenstockError, ShapeError, nearest_name
from penstock.formats.fields import (
    check_kind,
    read_entry,
    read_flag,
    read_number,
    read_string,
    read_whole,
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
from penstock.formats.toml_text import TomlPage, parse_toml

CLUSTER_VERSION = 1
MAX_NODES = 100_000
MAX_SLOTS = 100_000
MAX_LATENCY = 1e12  # seconds; a missing link has a small bandwidth instead
NodePairs: TypeAlias = list[list[float]]  # [source][target]


# ---------------------------------------------------------------- writing
def dump_cluster(cluster: Cluster) -> str:
    """The text of a cluster, from which `load_cluster` builds an equal cluster."""
    lines = [
        'penstock = "cluster"',
        f"version = {CLUSTER_VERSION}",
        f"serial = {str(cluster.serial).lower()}",
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
    lines = []
    if node.site:
        lines.append(f'site = "{_escape(node.site)}"')
    if count > 1:
        lines.append(f"count = {count}")
    lines.append(f"speed = {_number_text(node.speed)}")
    if node.slots is not None:
        lines.append(f"slots = {node.slots}")
    if node.memory is not None:
        lines.append(f"memory = {_number_text(node.memory)}")
    return lines


def _matrix_lines(quantity: str, matrix: Sequence[Sequence[float]]) -> list[str]:
    lines = [f"{quantity} = ["]
    for row in matrix:
        numbers = ", ".join(map(_number_text, row))
        lines.append(f"  [{numbers}],")
    lines.append("]")
    return lines


def _escape(text: str) -> str:
    quoted = text.replace("\\", "\\\\").replace('"', '\\"')
    signs = [sign if sign.isprintable() else f"\\U{ord(sign):08x}" for sign in quoted]
    return "".join(signs)


def _number_text(value: float) -> str:
    return repr(float(value))


# ---------------------------------------------------------------- reading
def read_cluster(path: str | Path) -> Cluster:
    """The cluster in a file."""
    return load_cluster(read_text(path, "cluster"), str(path))


def load_cluster(text: str, source: str = "cluster.toml") -> Cluster:
    """The cluster in a text; errors call the file `source`."""
    page = TomlPage(text, source, "cluster")
    top = check_kind(page, parse_toml(page), CLUSTER_VERSION)
    optional = ("version", "serial", "nodes", "links", "link")
    read_entry(page, (), top, ("penstock",), optional)
    nodes: list[Node] = []
    for number, entry in enumerate(_tables(page, top, "nodes")):
        nodes += _nodes(page, ("nodes", number), entry)
    if not nodes:
        fail(page, (), "the cluster has no nodes", "give at least one [[nodes]]")
    latency, bandwidth = _links(page, top.get("links", {}), nodes)
    for number, entry in enumerate(_tables(page, top, "link")):
        _apply_link(page, ("link", number), entry, nodes, latency, bandwidth)
    serial = read_flag(page, ("serial",), top.get("serial", False))
    try:
        return Cluster(
            tuple(nodes),
            tuple(map(tuple, latency)),
            tuple(map(tuple, bandwidth)),
            serial,
        )
    except ShapeError as error:
        fail(page, ("links",), str(error), "correct the links")


def _tables(page: Page, top: dict[str, Value], key: str) -> list[Value]:
    """The tables of a list `[[key]]`."""
    tables = top.get(key, [])
    if isinstance(tables, dict):
        what = f"{key} is one table, but it should be a list of tables"
        fail(page, (key,), what, f"write [[{key}]] with two brackets")
    if not isinstance(tables, list):
        what = f"{key} is not a list of tables"
        fail(page, (key,), what, f"write [[{key}]] above each of them")
    return tables


def _nodes(page: Page, steps: Steps, value: Value) -> list[Node]:
    """The nodes of a `[[nodes]]`: equal ones, as many as its count says."""
    keys = ("site", "count", "speed", "slots", "memory")
    entry = read_entry(page, steps, value, (), keys)
    site = read_string(page, (*steps, "site"), entry.get("site", ""))
    slots = None
    if "slots" in entry:
        slots_steps = (*steps, "slots")
        slots = read_whole(page, slots_steps, entry["slots"], least=1, most=MAX_SLOTS)
    memory = None
    if "memory" in entry:
        memory = _any_number(page, (*steps, "memory"), entry["memory"])
    speed = _any_number(page, (*steps, "speed"), entry.get("speed", 1.0))
    count_steps = (*steps, "count")
    count = read_whole(
        page, count_steps, entry.get("count", 1), least=1, most=MAX_NODES
    )
    try:
        return [Node(site, speed, slots, memory)] * count
    except ShapeError as error:
        fail(page, steps, str(error), "correct this node")


def _any_number(page: Page, steps: Steps, value: Value) -> float:
    """A number whose range is checked elsewhere."""
    return read_number(page, steps, value, -math.inf, math.inf)


# ---------------------------------------------------------------- links
def _links(page: Page, value: Value, nodes: list[Node]) -> tuple[NodePairs, NodePairs]:
    """The latency and the bandwidth of every pair of nodes, from `[links]`."""
    if not isinstance(value, dict):
        advice = "write [links], with latency and bandwidth below it"
        fail(page, ("links",), "links is not a table", advice)
    links = read_entry(page, ("links",), value, (), ("latency", "bandwidth", "cities"))
    latency = _every_pair(len(nodes), 0.0, diagonal=0.0)
    bandwidth = _every_pair(len(nodes), math.inf, diagonal=math.inf)
    if read_flag(page, ("links", "cities"), links.get("cities", False)):
        between = _between_cities(page, nodes)
        latency = [list(row) for row in between.latency]
        bandwidth = [list(row) for row in between.bandwidth]
    if "latency" in links:
        steps = ("links", "latency")
        latency = _pairs(page, steps, links["latency"], len(nodes), 0.0, MAX_LATENCY)
    if "bandwidth" in links:
        steps = ("links", "bandwidth")
        bandwidth = _pairs(
            page, steps, links["bandwidth"], len(nodes), math.inf, math.inf
        )
    return latency, bandwidth


def _pairs(
    page: Page, steps: Steps, value: Value, nodes: int, diagonal: float, most: float
) -> NodePairs:
    """One number for all pairs, or a matrix [from][to].

    `Cluster` rejects numbers that are too small, but not on the diagonal, since no message
    goes from a node to itself.
    """
    if not isinstance(value, list):
        number = read_number(page, steps, value, -math.inf, most)
        return _every_pair(nodes, number, diagonal)
    quantity = steps[-1]
    if len(value) != nodes:
        what = (
            f"the {quantity} matrix has {len(value)} rows, but there are {nodes} nodes"
        )
        advice = "give one row per node, with one number per node"
        fail(page, steps, what, advice)
    matrix = []
    for i, row in enumerate(value):
        if not isinstance(row, list) or len(row) != nodes:
            size = len(row) if isinstance(row, list) else 1
            what = (
                f"row {i} of the {quantity} matrix has {size} numbers, "
                f"but there are {nodes} nodes"
            )
            fail(page, steps, what, "give one number per node")
        numbers = []
        for j, cell in enumerate(row):
            numbers.append(read_number(page, (*steps, i, j), cell, -math.inf, most))
        matrix.append(numbers)
    return matrix


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
    value: Value,
    nodes: list[Node],
    latency: NodePairs,
    bandwidth: NodePairs,
) -> None:
    """Write the numbers of a `[[link]]` into the matrices."""
    keys = ("between", "latency", "bandwidth", "oneway")
    entry = read_entry(page, steps, value, (), keys)
    ends = entry.get("between")
    if not isinstance(ends, list) or len(ends) != 2:
        what = f"link[{steps[-1]}] does not name its two ends"
        advice = 'write between = ["site", "site"] or [node, node]'
        fail(page, (*steps, "between"), what, advice)
    sources = _nodes_at(page, steps, ends[0], nodes)
    targets = _nodes_at(page, steps, ends[1], nodes)
    oneway = read_flag(page, (*steps, "oneway"), entry.get("oneway", False))
    if "latency" in entry:
        number_steps = (*steps, "latency")
        number = read_number(page, number_steps, entry["latency"], 0.0, MAX_LATENCY)
        _set_pairs(latency, sources, targets, number, oneway)
    if "bandwidth" in entry:
        number_steps = (*steps, "bandwidth")
        number = read_number(
            page, number_steps, entry["bandwidth"], MIN_BANDWIDTH, math.inf
        )
        _set_pairs(bandwidth, sources, targets, number, oneway)


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
