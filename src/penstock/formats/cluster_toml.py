"""cluster.toml: nodes and links, for people and programs to read, edit and keep.

    penstock = "cluster"
    version = 1
    serial = false                        # a link carries one message at a time

    [[nodes]]
    site = "Tokyo"
    count = 4                             # so many like this; 1 unless given
    speed = 1.0
    slots = 3                             # micro-batches; or memory = 16e9, in bytes

    [links]                               # for all pairs: one number, or a matrix [from][to]
    latency = 0.05                        # seconds
    bandwidth = 100e6                     # bytes a second; inf for as many as you like
                                          # or instead: cities = true, if the sites are cities that Penstock knows

    [[link]]                              # the exceptions, later ones over earlier ones
    between = ["Tokyo", "Osaka"]          # two sites, twice the same one for the links within it
    latency = 0.004

    [[link]]
    between = [0, 5]                      # two nodes
    bandwidth = 250e6
    oneway = true                         # from the first to the second alone; both ways unless given

Unknown keys are refused with the nearest name, wrong sizes with both numbers.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Collection
from difflib import get_close_matches
from itertools import groupby
from pathlib import Path
from typing import TypeAlias

from penstock.cost.cluster import Cluster, Matrix, Node
from penstock.errors import FileError, PenstockError

CLUSTER_VERSION = 1
MAX_NODES = 100_000  # nodes
MAX_LINK_VALUE = {
    "latency": 1e12,
    "bandwidth": math.inf,
}  # a link that is not there has a small bandwidth
Toml: TypeAlias = "dict[str, Toml] | list[Toml] | str | int | float | bool | object"
TomlTable: TypeAlias = dict[str, Toml]
LinkMatrix: TypeAlias = list[list[float]]


# ---------------------------------------------------------------- writing
def dump_cluster(cluster: Cluster) -> str:
    """The text of a cluster; `load_cluster` makes an equal one of it."""
    lines = [
        'penstock = "cluster"',
        f"version = {CLUSTER_VERSION}",
        f"serial = {str(cluster.serial).lower()}",
        "",
    ]
    for node, run in groupby(cluster.nodes):
        lines += ["[[nodes]]", *_node_lines(node, len(list(run))), ""]
    lines += ["[links]"]
    for word, matrix in (
        ("latency", cluster.latency),
        ("bandwidth", cluster.bandwidth),
    ):
        lines += (
            [f"{word} = ["]
            + [f"  [{', '.join(map(_number, row))}]," for row in matrix]
            + ["]"]
        )
    return "\n".join(lines) + "\n"


def write_cluster(cluster: Cluster, path: str | Path) -> None:
    """Writes a cluster's text to a file."""
    try:
        Path(path).write_text(dump_cluster(cluster), encoding="utf-8", newline="\n")
    except (OSError, ValueError) as error:
        raise FileError(
            f"cannot write {path}: {error}\n  name a file in a folder that exists"
        ) from None


def _node_lines(node: Node, count: int) -> list[str]:
    lines = [f'site = "{_escaped(node.site)}"'] if node.site else []
    lines += [f"count = {count}"] if count > 1 else []
    lines += [f"speed = {_number(node.speed)}"]
    lines += [f"slots = {node.slots}"] if node.slots is not None else []
    return lines + (
        [f"memory = {_number(node.memory)}"] if node.memory is not None else []
    )


def _escaped(text: str) -> str:
    signs = text.replace("\\", "\\\\").replace('"', '\\"')
    return "".join(
        sign if sign.isprintable() else f"\\U{ord(sign):08x}" for sign in signs
    )


def _number(value: float) -> str:
    return repr(float(value))


# ---------------------------------------------------------------- reading
def read_cluster(path: str | Path) -> Cluster:
    """The cluster in a file."""
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileError(
            f"{path} is not text: byte {error.start} is no UTF-8\n  a cluster is a cluster.toml"
        ) from None
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise FileError(
            f"cannot read {path}: {reason}\n  name a cluster.toml that exists"
        ) from None
    return load_cluster(text, str(path))


def load_cluster(text: str, source: str = "cluster.toml") -> Cluster:
    """The cluster that a text holds; `source` is the name of the file in errors."""
    page = _Page(text, source)
    try:
        top: TomlTable = dict(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise FileError(
            f"{source}: this is not TOML: {error}\n  mend that line"
        ) from None
    if top.get("penstock") != "cluster":
        raise page.error(
            "this is not a cluster of Penstock's",
            'a cluster begins with penstock = "cluster"',
        )
    page.keys(
        top, "the cluster", ("penstock", "version", "serial", "nodes", "links", "link")
    )
    version = page.number(top.get("version", CLUSTER_VERSION), "version", 1)
    if version > CLUSTER_VERSION:
        what = f"this cluster is of version {version:g}, and this Penstock reads versions up to {CLUSTER_VERSION}"
        raise page.error(what, "upgrade Penstock")
    nodes = [
        node
        for n, entry in enumerate(page.tables(top, "nodes"))
        for node in _nodes(page, entry, f"nodes[{n}]")
    ]
    if not nodes:
        raise page.error("it has no nodes", "give at least one [[nodes]]")
    links = top.get("links", {})
    if not isinstance(links, dict):
        raise page.error(
            "links is not a table", "write [links], with latency and bandwidth below it"
        )
    page.keys(links, "links", ("latency", "bandwidth", "cities"))
    if page.truth(links.get("cities", False), "cities"):
        links = _between_cities(page, links, nodes)
    latency = _grid(page, links.get("latency", 0.0), "latency", len(nodes), 0.0)
    bandwidth = _grid(
        page, links.get("bandwidth", math.inf), "bandwidth", len(nodes), math.inf
    )
    for n, entry in enumerate(page.tables(top, "link")):
        _link(page, entry, f"link[{n}]", nodes, latency, bandwidth)
    serial = page.truth(top.get("serial", False), "serial")
    try:
        return Cluster(tuple(nodes), _frozen(latency), _frozen(bandwidth), serial)
    except PenstockError as error:
        raise FileError(f"{source}: {error}") from None


class _Page:
    """A text, to say where in it something is wrong."""

    def __init__(self, text: str, source: str) -> None:
        self.text, self.source = text, source

    def error(self, what: str, advice: str, key: str = "") -> FileError:
        found = (
            re.search(rf"^\s*{re.escape(key)}\s*=", self.text, re.M) if key else None
        )
        line = f":{self.text.count(chr(10), 0, found.end()) + 1}" if found else ""
        return FileError(f"{self.source}{line}: {what}\n  {advice}")

    def keys(self, entry: TomlTable, where: str, known: Collection[str]) -> None:
        for key in entry:
            if key not in known:
                near = get_close_matches(key, known, n=1, cutoff=0.4)
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise self.error(
                    f"{where} has no key {key!r}",
                    f"{hint}known: {', '.join(known)}",
                    key,
                )

    def tables(self, top: TomlTable, key: str) -> list[TomlTable]:
        found = top.get(key, [])
        if isinstance(found, dict):
            raise self.error(
                f"{key} is one table, not a list of them",
                f"write [[{key}]] with two brackets",
            )
        if not isinstance(found, list) or not all(
            isinstance(entry, dict) for entry in found
        ):
            raise self.error(
                f"{key} is not a list of tables", f"write [[{key}]] above each", key
            )
        return [entry for entry in found if isinstance(entry, dict)]

    def number(
        self, value: Toml, where: str, least: float = -math.inf, most: float = math.inf
    ) -> float:
        key = re.split(r"[.\[]", where)[-1] if "." in where else where
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or math.isnan(value)
        ):
            raise self.error(
                f"{where} is {value!r}, not a number", "write a number", key
            )
        if value < least:
            raise self.error(
                f"{where} is {value:g}; the least is {least:g}",
                f"write a number from {least:g} on",
                key,
            )
        if value > most:
            raise self.error(
                f"{where} is too large; the most is {most:g}",
                f"write a number up to {most:g}",
                key,
            )
        return float(value)

    def whole(self, value: Toml, where: str, least: int = 0) -> int:
        number = self.number(value, where, least)
        if not isinstance(value, int) or number > MAX_NODES:
            key = where.rpartition(".")[2]
            raise self.error(
                f"{where} is {value}, not a whole number up to {MAX_NODES}",
                "write a whole number",
                key,
            )
        return int(number)

    def truth(self, value: Toml, where: str) -> bool:
        if not isinstance(value, bool):
            raise self.error(f"{where} is {value!r}", "write true or false", where)
        return value


def _nodes(page: _Page, entry: TomlTable, where: str) -> list[Node]:
    page.keys(entry, where, ("site", "count", "speed", "slots", "memory"))
    site = entry.get("site", "")
    if not isinstance(site, str):
        raise page.error(
            f"{where}.site is {site!r}, not a text", 'write it in " and "', "site"
        )
    slots = (
        page.whole(entry["slots"], f"{where}.slots", 1) if "slots" in entry else None
    )
    memory = (
        page.number(entry["memory"], f"{where}.memory") if "memory" in entry else None
    )
    count = page.whole(entry.get("count", 1), f"{where}.count", 1)
    try:
        return [
            Node(
                site,
                page.number(entry.get("speed", 1.0), f"{where}.speed"),
                slots,
                memory,
            )
        ] * count
    except FileError:
        raise
    except PenstockError as error:
        raise page.error(f"{where}: {error}", "mend this node") from None


def _grid(page: _Page, value: Toml, word: str, nodes: int, own: float) -> LinkMatrix:
    """One number for all pairs, or [from][to]; nothing is sent from a node to itself."""
    if not isinstance(value, list):
        number = page.number(value, f"links.{word}", most=MAX_LINK_VALUE[word])
        return [[own if i == j else number for j in range(nodes)] for i in range(nodes)]
    if len(value) != nodes:
        what = f"the {word} matrix has {len(value)} rows, but there are {nodes} nodes"
        raise page.error(what, "give one row a node, and in it one number a node", word)
    for number, row in enumerate(value):
        if not isinstance(row, list) or len(row) != nodes:
            size = len(row) if isinstance(row, list) else 1
            what = f"row {number} of the {word} matrix has {size} numbers, but there are {nodes} nodes"
            raise page.error(what, "give one number a node", word)
    rows = [row for row in value if isinstance(row, list)]
    return [
        [
            page.number(cell, f"links.{word}[{i}][{j}]", most=MAX_LINK_VALUE[word])
            for j, cell in enumerate(row)
        ]
        for i, row in enumerate(rows)
    ]


def _between_cities(page: _Page, links: TomlTable, nodes: list[Node]) -> TomlTable:
    """Latency from distance and bandwidth from latency, where they are not given."""
    try:
        found = Cluster.geo([node.site for node in nodes])
    except PenstockError as error:
        raise page.error(
            f"links.cities, but {error}",
            "write its latency and bandwidth instead",
            "cities",
        ) from None
    made: TomlTable = {
        word: [list(row) for row in getattr(found, word)]
        for word in ("latency", "bandwidth")
    }
    return made | {word: value for word, value in links.items() if word != "cities"}


def _link(
    page: _Page,
    entry: TomlTable,
    where: str,
    nodes: list[Node],
    latency: LinkMatrix,
    bandwidth: LinkMatrix,
) -> None:
    page.keys(entry, where, ("between", "latency", "bandwidth", "oneway"))
    ends = entry.get("between")
    if not isinstance(ends, list) or len(ends) != 2:
        raise page.error(
            f"{where} does not say between what",
            'write between = ["site", "site"] or [node, node]',
        )
    sources, targets = (_end(page, end, where, nodes) for end in ends)
    oneway = page.truth(entry.get("oneway", False), "oneway")
    for word, grid, least in (
        ("latency", latency, 0.0),
        ("bandwidth", bandwidth, 1e-30),
    ):
        if word in entry:
            number = page.number(
                entry[word], f"{where}.{word}", least, MAX_LINK_VALUE[word]
            )
            for i in sources:
                for j in targets:
                    if i != j:
                        grid[i][j] = number
                        grid[j][i] = grid[j][i] if oneway else number


def _end(page: _Page, end: Toml, where: str, nodes: list[Node]) -> list[int]:
    """The nodes at one end of a link."""
    if isinstance(end, int) and not isinstance(end, bool):
        if not 0 <= end < len(nodes):
            raise page.error(
                f"{where} names node {end}, but there are nodes 0..{len(nodes) - 1}",
                "name one of these",
            )
        return [end]
    sites = sorted({node.site for node in nodes if node.site})
    if not isinstance(end, str) or end not in sites:
        near = get_close_matches(str(end), sites, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise page.error(
            f"{where} names the site {end!r}, where no node is",
            f"{hint}sites: {', '.join(sites)}",
        )
    return [number for number, node in enumerate(nodes) if node.site == end]


def _frozen(grid: LinkMatrix) -> Matrix:
    return tuple(map(tuple, grid))
