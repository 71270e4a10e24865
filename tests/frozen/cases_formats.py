"""Files that are broken in every place with the text of their errors, round trips, and hashes of drawings."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from freeze import hashed, said

from penstock import UnitCost, make, simulate
from penstock.cost import Cluster
from penstock.errors import PenstockError
from penstock.formats import (
    dump_cluster,
    dump_plan,
    dump_profile,
    dump_row_profiles,
    dump_torch_csv,
    load_cluster,
    load_plan,
    load_profile,
    load_row_profiles,
    load_torch_csv,
)
from penstock.formats.config_toml import dump_config, load_config
from penstock.formats.torch_csv import torch_rows
from penstock.ir.plan import Plan
from penstock.ir.program import lower
from penstock.view import Series, chart, gantt, page, plain, report_page, svg, trace
from penstock.view.chart import Dot, Front, front_figure
from penstock.view.numbers import size_scale, time_scale

TOLERANCE = 0.0
SHOWN = 40  # messages of a format that are kept as text; the others by their hash
Loader = Callable[[str], object]

PLAN: dict[str, Any] = {
    "penstock": "plan",
    "version": 1,
    "name": "1f1b",
    "partition": [8, 7],
    "recompute": [0],
    "tensor": 2,
    "shard": 1,
    "why": {"makespan": 33.0, "exact": True},
    "stages": [{"rank": 0, "part": 0}, {"rank": 1, "part": 1}],
    "microbatches": [{"path": [0, 1], "tokens": 4, "cuts": [0, 4], "count": 2}],
    "lanes": ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"],
}
REPLICAS: dict[str, Any] = {
    "penstock": "plan",
    "version": 1,
    "stages": [{"rank": 0, "part": 0}, {"rank": 1, "part": 0}],
    "microbatches": [{"path": [0], "tokens": 1}, {"path": [1], "tokens": 1}],
    "lanes": ["0F0 0B0", "1F1 1B1"],
    "rotation": [
        {
            "microbatches": [{"path": [1], "tokens": 1}, {"path": [0], "tokens": 1}],
            "lanes": ["0F1 0B1", "1F0 1B0"],
        }
    ],
    "sums": [{"parts": [0], "kind": "direct", "ranks": [0, 1], "shares": [0.3, 0.7]}],
}
TERMS = {"base": 1e-4, "token": 1e-6, "prefix": 0.0, "pair": 1e-9}
FITS = {
    op: {"form": form, **TERMS, "worst": 0.1, "median": 0.01}
    for op, form in zip("FBIW", ("formula", "table", "formula", "formula"), strict=True)
}
BLOCK = {
    "held": 1.0,
    "kept": 2.0,
    "weights": 3.0,
    "update": 0.5,
    "fits": FITS,
    "points": [
        {"tokens": 16, "prefix": 0, "F": 1e-4, "B": 2e-4, "I": 1e-4, "W": 1e-4},
        {
            **{"tokens": 16, "prefix": 8, "F": 1e-4, "B": 2e-4, "I": 1e-4, "W": 1e-4},
            "held_out": True,
        },
    ],
}
PROFILE: dict[str, Any] = {
    "penstock": "profile",
    "version": 1,
    **{"layers": 4, "tokens": 16, "rows": 1, "message": 1024.0, "turn": 0.0},
    **{"switch": 0.1, "tied": 2.0},
    "model": {"family": "llama"},
    "device": {"device": "cpu"},
    "blocks": {"embed": BLOCK, "layer": BLOCK, "head": BLOCK},
    "network": {
        **{"latency": 1e-5, "bandwidth": [[None, 1e9], [1e9, None]], "serial": True},
        **{"channels": 1, "sum_bandwidth": 1e8},
        "buffers": [{"bytes": 1e6, "send": None, "receive": 2e-4}],
    },
    "larger": [
        {
            **{"rows": 2, "message": 2048.0, "turn": 0.0, "switch": 0.1},
            "blocks": {"embed": BLOCK, "layer": BLOCK, "head": BLOCK},
        }
    ],
}
CLUSTER = """\
penstock = "cluster"
version = 1
serial = false
[[nodes]]
site = "Tokyo"
count = 2
speed = 1.0
slots = 3
[[nodes]]
site = "Paris"
memory = 16e9
[links]
latency = [[0, 0.1, 0.2], [0.1, 0, 0.2], [0.2, 0.2, 0]]
bandwidth = 1e8
[[link]]
between = ["Tokyo", "Paris"]
latency = 0.2
[[link]]
between = [0, 2]
bandwidth = 2e8
oneway = true
"""
CONFIG = """\
preset = "tiny"
[model]
layers = 4
family = "llama"
[data]
validation = ["a.txt", "b.txt"]
document_mask = true
sources = [{files = ["web"], weight = 3, name = "web"}, {files = "b"}]
[schedule]
name = "skip:skips=1,keep=0+3"
partition = [1, 1, 1, 1]
[parallel]
pp = 4
tp = 1
[optimizer]
lr = 1e-3
options = {momentum = 0.9, betas = [0.9, 0.95]}
groups = [{match = "*.bias", weight_decay = 0.0}, {match = "embed*", frozen = true}]
[run]
compile = true
log_every = 1
"""
CSV = "0F0,0F1,,,0B0,,0B1\n,1F0,1B0,1F1,1B1\n"
CSV_TEXTS = [
    "",
    "\n\n",
    ",,\n",
    "0F0,0X1\n",
    "0F0,0B0\n2F0,2B0\n",
    "0F0,0B0\n0F1,0B1\n",
    "1F0,1B0\n",
    "0F0,0B0\n1F0\n",
    "0F0\n1F0,1B0\n",
    "0F0,0F0,0B0\n",
    '"0F0,0B0\n',
    '0F0,"0""B0"\n',
    "0F0,(0F1;0Q0)OVERLAP_F_B\n",
    "0F0,0B0,0I0\n",
    "0F0," + "x" * 90 + "\n",
    "0B0\n",
    "0F99999999999,0B0\n",
    "0F0,0SEND_F0,0WAIT_X0\n",
    "0F3,0B3\n",
    "0W0\n",
    "\x00",
]
# What Python's own parsers say, which differs between its versions.
NOT_PARSED = re.compile(r"(?<=this is not (?:JSON|TOML)): .*")
BAD_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 1.5, 7, 1e30, 2**40, "x", [], {}),
    *([-1], ["x"], {"x": 1}, [{"path": [0]}]),
)
BAD_TOML = (
    "true",
    "-1",
    "1.5",
    "7",
    "nan",
    '"x"',
    "[]",
    "{}",
    "[-1]",
    '["x"]',
    "{x=1}",
)


def cases() -> dict[str, Callable[[], object]]:
    """Each format broken in every place, written and read again, and drawn."""
    return {
        "plan.json": partial(refusals, load_plan, json_texts(PLAN)),
        "plan.json with replicas": partial(refusals, load_plan, json_texts(REPLICAS)),
        "profile.json": partial(refusals, load_row_profiles, json_texts(PROFILE)),
        "cluster.toml": partial(refusals, load_cluster, toml_texts(CLUSTER)),
        "config.toml": partial(refusals, load_config, toml_texts(CONFIG)),
        "config --set": set_refusals,
        "schedule.csv": partial(refusals, load_torch_csv, iter(CSV_TEXTS)),
        "round trips": round_trips,
        "drawings": drawings,
    }


# ---------------------------------------------------------------- broken files
def refusals(load: Loader, texts: Iterator[str]) -> list[str]:
    """What each text is refused with: the first ones in full."""
    errors = [NOT_PARSED.sub("", said(partial(load, text), "")) for text in texts]
    refused = sorted({one for one in errors if one}, key=hashed)
    step = max(1, len(refused) // SHOWN)
    shown = refused[::step][:SHOWN]
    counts = f"{len(errors)} texts, {len(refused)} errors"
    return [counts, *shown, hashed("|".join(errors))]


def json_texts(page: dict[str, Any]) -> Iterator[str]:
    """The page with each value replaced, removed, and given a key that is unknown."""
    text = json.dumps(page, indent=1)
    yield text
    for cut in range(0, len(text), 97):
        yield text[:cut]
    yield from (text.replace(":", ";", 1), text.replace(",", "", 3), "[1, 2", "{}")
    yield text.replace('"version": 1', '"version": 9')
    yield text.replace('"version": 1', '"version": 1, "version": 1')
    for steps in paths_of(page):
        for bad in BAD_VALUES:
            yield json.dumps(changed(page, steps, bad), indent=1)
        yield json.dumps(changed(page, steps, None, remove=True), indent=1)


def paths_of(value: Any, steps: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The steps to every value; of equal siblings only to the first."""
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    seen: list[Any] = []
    for key, inner in items:
        if steps:
            yield (*steps, key)
        else:
            yield (key,)
        if inner not in seen:
            seen.append(inner)
            yield from paths_of(inner, (*steps, key))


def changed(
    page: dict[str, Any], steps: tuple[Any, ...], value: Any, remove: bool = False
) -> Any:
    """A copy of the page with another value, or with none."""
    other = copy.deepcopy(page)
    holder: Any = other
    for step in steps[:-1]:
        holder = holder[step]
    if remove:
        del holder[steps[-1]]
    else:
        holder[steps[-1]] = value
    return other


def toml_texts(text: str) -> Iterator[str]:
    """The text with each line replaced, removed, doubled, and given another key."""
    lines = text.splitlines()
    yield text
    for number, line in enumerate(lines):
        key, equals, _ = line.partition(" = ")
        others = [[], [line, line], [line.replace("e", "o", 1)], ["unknown = 1", line]]
        if equals:
            others += [[f"{key} = {bad}"] for bad in BAD_TOML]
            others += [[f"{key} = "], [f"{key} 1"]]
        else:
            others += [[line.strip("[]")], [f"[{line}]"], [line.replace("]", "")]]
        for other in others:
            yield "\n".join([*lines[:number], *other, *lines[number + 1 :]]) + "\n"


def set_refusals() -> list[str]:
    """Changes of a config on the command line, with what they are refused or what they make."""
    changes = [
        f"{name}={value}"
        for name in (
            *(
                "model.layers",
                "model.tie_embeddings",
                "model.rope_theta",
                "model.path",
                "modle.layers",
            ),
            *("data.sources", "data.format", "schedule.partition", "schedule.rank"),
            *("paths.keep", "optimizer.options", "optimizer.options.momentum", "lr"),
            *("optimizer.groups", "run.compile", "run.compile.x", "steps", "train.lr"),
        )
        for value in ("", "1", "-1", "1.5", "true", "x", "[1, 2]", "[a, b]", "{a=1}")
    ]
    changes += ["model.layers", "layers", "=", "model.=1", ".layers=1"]
    changes += ["optimizer.groups=[{match=1}]", "optimizer.groups=[{rate=1}]"]
    changes += ["data.sources=[{files=1}]", "data.sources=[{weight='x'}]"]
    changes += ["data.sources=[{name=1}]", "optimizer.options={a=[true]}"]
    found = []
    for change in changes:
        try:
            found.append(hashed(dump_config(load_config("", changes=[change]))))
        except PenstockError as error:
            found.append(str(error))
    return [*found[::4], hashed("|".join(found))]


# ---------------------------------------------------------------- round trips and drawings
def round_trips() -> dict[str, str]:
    """What is written after a text has been read."""
    cluster = Cluster.geo(["Tokyo", "Tokyo", "Paris"])
    schedule = make("1f1b", ranks=3, microbatches=4)
    rows = load_row_profiles(json.dumps(PROFILE))
    return {
        "plan": dump_plan(load_plan(json.dumps(PLAN))),
        "replicas": hashed(dump_plan(load_plan(json.dumps(REPLICAS)))),
        "profiles": hashed(dump_row_profiles(rows)),
        "profile": hashed(dump_profile(load_profile(json.dumps(PROFILE)))),
        "cluster": hashed(dump_cluster(load_cluster(CLUSTER))),
        "cities": hashed(dump_cluster(cluster)),
        "config": hashed(dump_config(load_config(CONFIG.replace("b.txt", "c.txt")))),
        "csv": hashed(dump_torch_csv(schedule)),
        "csv again": hashed(dump_torch_csv(load_torch_csv(CSV))),
        "comms": hashed(
            str([torch_rows(lower(schedule), one) for one in (True, False)])
        ),
        "hanayo": hashed(
            dump_plan(Plan(make("hanayo", ranks=2, microbatches=3, waves=2), "hanayo"))
        ),
    }


def drawings() -> dict[str, str]:
    """A few schedules as text, SVG and HTML, and two charts."""
    found = {}
    shapes: dict[str, dict[str, Any]] = {
        "1f1b": {"ranks": 4, "microbatches": 8},
        "hanayo": {"ranks": 2, "microbatches": 4, "waves": 2, "slices": 2},
        "zb-h1": {"ranks": 3, "microbatches": 5},
        "gpipe": {"ranks": 20, "microbatches": 300},
        "interleaved": {"ranks": 8, "microbatches": 80, "chunks": 2},
    }
    for name, shape in shapes.items():
        timeline = simulate(make(name, **shape), UnitCost())
        found[f"{name} plain"] = hashed(plain(timeline, 0.125))
        found[f"{name} gantt"] = hashed(gantt(timeline).markup)
        found[f"{name} svg"] = hashed(svg(timeline, f"<{name}>"))
        found[f"{name} trace"] = hashed(trace(timeline))
        if timeline.schedule.ranks < 8:
            found[f"{name} page"] = hashed(page([("one", timeline)]))
    lines = [
        Series("train", (0, 1, 2), (3.0, 2.0, 1.5), (2.5, 1.5, 1.0), (3.5, 2.5, 2.0)),
        Series("<other>", (0, 2), (2.0, 9.0), dashed=True),
        Series("third", (1,), (2.0,), colour="#123456"),
    ]
    found["chart"] = hashed(chart(lines, "A & B", "steps", "loss", top=4.0))
    two = chart(lines[:2], "A", "x", "y", marks=True, moments=[(1, "saved")])
    found["chart of two"] = hashed(two)
    timeline = simulate(make("1f1b", ranks=2, microbatches=2), UnitCost())
    report = report_page(
        *("A run", [("steps", "3")], [("loss", lines)], [("one", timeline)]),
        **{"sample": "<text>", "lists": [("memory", ["a", "b"])]},
        **{"why": (["It is fast."], ["name"], [["1f1b"]]), "moments": [(1, "left")]},
    )
    found["report"] = hashed(report)
    dots = [
        Dot(1e9, 2.0, "a tip", 0, place=1, label="auto", chosen=True),
        Dot(2e9, 1.0, "b", 1, place=2),
        Dot(2.1e9, 1.4, "c <d>", 1, label="1f1b"),
        Dot(3e9, 9.0, "d", 0),
    ]
    scales = (size_scale(3e9), time_scale(2.0))
    front = Front(tuple(dots), ("one", "two"), *scales, "memory", "step", 2.5e9)
    found["front"] = hashed(front_figure(front, dots[:3]))
    return found
