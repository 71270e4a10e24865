"""profile.json: what was measured, and the curves fitted to it.

    {
      "penstock": "profile",
      "version": 1,
      "layers": 8, "tokens": 1024, "rows": 1, "message": 1024.0, "turn": 0.0002,
      "model": {...}, "device": {...},                                   facts
      "blocks": {
        "layer": {
          "held": 22120.0, "kept": 16256.0, "weights": 12460068.0, "update": 0.0024,
          "fits": {
            "F": {"form": "formula", "base": ..., "token": ..., "prefix": ..., "pair": ..., "worst": ..., "median": ...}
          },
          "points": [
            {"tokens": 16, "prefix": 96, "F": ..., "B": ..., "I": ..., "W": ...},
            {"tokens": 24, "prefix": 0, "F": ..., ..., "held_out": true}
          ]
        }, ...
      },
      "network": {"latency": 2e-05, "bandwidth": 1e9, "serial": true}   a number, or rows; null: endless
    }

Where embedding and head share a weight there is "tied" too: the bytes of that weight, its gradient and AdamW's state.
A table is not stored: it is the formula and the points that took part in the fit. Errors name line and column.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path

from penstock.cost.curve import Curve, Seconds, Table
from penstock.cost.fit import Fit
from penstock.cost.network import Network, PerPair
from penstock.cost.profile import Block, Point, Profile
from penstock.errors import ShapeError
from penstock.ir.action import Op
from penstock.ir.fields import (
    Facts,
    entry_of,
    fact_text,
    facts_of,
    list_of,
    number_of,
    read_text,
    text_of,
    top_of,
    whole_of,
    write_text,
)
from penstock.ir.page import Json, Page, Steps, fail, kind_of, name_of

VERSION = 1
BLOCKS = ("embed", "layer", "head")
OPS = (Op.F, Op.B, Op.I, Op.W)
TERMS = ("base", "token", "prefix", "pair")
BYTES = ("held", "kept", "weights", "update")
LEAST = 1e-15  # seconds that are any time at all


# ---------------------------------------------------------------- writing
def dump_profile(profile: Profile) -> str:
    """A profile as text: one line a fit or point."""
    blocks = {name: _block_text(getattr(profile, name)) for name in BLOCKS}
    words: tuple[str, ...] = ("layers", "tokens", "rows", "message", "turn")
    words += ("tied",) if profile.tied else ()
    sizes = ", ".join(f'"{word}": {getattr(profile, word)!r}' for word in words)
    net = profile.network
    network = {"latency": net.latency, "bandwidth": _endless(net.bandwidth), "serial": net.serial}
    lines = (
        '"penstock": "profile"', f'"version": {VERSION}', sizes, f'"model": {_facts_text(profile.model)}',
        f'"device": {_facts_text(profile.device)}', f'"blocks": {_object(blocks, 4)}',
        f'"network": {json.dumps(network)}',
    )  # fmt: skip
    return "{\n  " + ",\n  ".join(lines) + "\n}\n"


def write_profile(profile: Profile, path: str | Path) -> None:
    """Writes a profile's text to a file."""
    write_text(path, dump_profile(profile))


def _block_text(block: Block) -> str:
    fits = {op.value: json.dumps(_fit_entry(block.fit(op))) for op in OPS}
    points = ",\n        ".join(json.dumps(_point_entry(point)) for point in block.points)
    entries = {word: repr(float(getattr(block, word))) for word in BYTES}
    entries |= {"fits": _object(fits, 8), "points": f"[\n        {points}\n      ]"}
    return _object(entries, 6)


def _fit_entry(fit: Fit) -> dict[str, str | float]:
    formula = fit.curve.formula if isinstance(fit.curve, Table) else fit.curve
    assert isinstance(formula, Seconds)
    terms = {word: getattr(formula, word) for word in TERMS}
    return {"form": fit.form, **terms, "worst": fit.worst, "median": fit.median}


def _point_entry(point: Point) -> dict[str, int | float | bool]:
    entry: dict[str, int | float | bool] = {"tokens": point.tokens, "prefix": point.prefix}
    entry |= {op.value: point.of(op) for op in OPS}
    return entry | ({"held_out": True} if point.held_out else {})


def _facts_text(facts: Facts) -> str:
    return "{" + ", ".join(f"{json.dumps(key)}: {fact_text(key, fact)}" for key, fact in facts) + "}"


def _object(entries: dict[str, str], indent: int) -> str:
    lines = f",\n{' ' * indent}".join(f'"{key}": {text}' for key, text in entries.items())
    return f"{{\n{' ' * indent}{lines}\n{' ' * (indent - 2)}}}"


def _endless(value: PerPair) -> Json:
    """Numbers that JSON has: infinity is null."""
    if isinstance(value, tuple):
        return [[None if math.isinf(one) else one for one in row] for row in value]
    return None if math.isinf(value) else value


# ---------------------------------------------------------------- reading
def read_profile(path: str | Path) -> Profile:
    """The profile in a file."""
    return load_profile(read_text(path, "profile"), str(path))


def load_profile(text: str, source: str = "profile.json") -> Profile:
    """The profile that a text holds; `source` is the name of the file in errors."""
    page = Page(text, source, "profile")
    top = top_of(page, VERSION)
    known = ("penstock", "version", "layers", "tokens", "rows", "message", "model", "device", "blocks", "network")
    entry_of(page, (), top, known, ("turn", "tied"))
    layers, tokens, rows = (whole_of(page, (word,), top[word], least=1) for word in ("layers", "tokens", "rows"))
    blocks = entry_of(page, ("blocks",), top["blocks"], BLOCKS, ())
    embed, layer, head = (_block(page, ("blocks", name), blocks[name]) for name in BLOCKS)
    for op in (Op.F, Op.B):
        if layer.fit(op).curve.of(tokens, 0) < LEAST:
            fail(page, ("blocks", "layer", "fits", op.value), f"{op.value} of a layer takes no time", "measure again")
    return Profile(
        layers, tokens, rows, number_of(page, ("message",), top["message"]), embed, layer, head,
        network=_network(page, ("network",), top["network"]),
        model=facts_of(page, ("model",), top["model"]), device=facts_of(page, ("device",), top["device"]),
        turn=number_of(page, ("turn",), top.get("turn", 0.0)), tied=number_of(page, ("tied",), top.get("tied", 0.0)),
    )  # fmt: skip


def _block(page: Page, steps: Steps, value: Json) -> Block:
    entry = entry_of(page, steps, value, (*BYTES, "fits", "points"), ())
    points = list_of(page, (*steps, "points"), entry["points"], _point)
    if not any(not point.held_out for point in points):
        fail(page, (*steps, "points"), "there is no point that took part in the fits", "measure again")
    fits = entry_of(page, (*steps, "fits"), entry["fits"], [op.value for op in OPS], ())
    f, b, i, w = (_fit(page, (*steps, "fits", op.value), fits[op.value], points, op) for op in OPS)
    return Block(points, f, b, i, w, *(number_of(page, (*steps, word), entry[word]) for word in BYTES))


def _point(page: Page, steps: Steps, value: Json) -> Point:
    entry = entry_of(page, steps, value, ("tokens", "prefix", *(op.value for op in OPS)), ("held_out",))
    tokens = whole_of(page, (*steps, "tokens"), entry["tokens"], least=1)
    prefix = whole_of(page, (*steps, "prefix"), entry["prefix"])
    f, b, i, w = (number_of(page, (*steps, op.value), entry[op.value]) for op in OPS)
    return Point(tokens, prefix, f, b, i, w, _truth(page, (*steps, "held_out"), entry.get("held_out", False)))


def _fit(page: Page, steps: Steps, value: Json, points: Iterable[Point], op: Op) -> Fit:
    entry = entry_of(page, steps, value, ("form", *TERMS, "worst", "median"), ())
    formula = Seconds(*(number_of(page, (*steps, word), entry[word]) for word in TERMS))
    form = text_of(page, (*steps, "form"), entry["form"])
    if form not in ("formula", "table"):
        what = f"{name_of(page, (*steps, 'form'))} is {kind_of(form)}"
        fail(page, (*steps, "form"), what, 'a fit is a "formula" or a "table"')
    curve: Curve = formula
    if form == "table":
        part = tuple((p.tokens, p.prefix, p.of(op)) for p in points if not p.held_out)
        if any(formula.of(tokens, prefix) < LEAST for tokens, prefix, _ in part):
            fail(page, steps, "the formula is 0 at a point of its table", "measure again")
        curve = Table(formula, part)
    return Fit(curve, *(number_of(page, (*steps, word), entry[word]) for word in ("worst", "median")))


def _network(page: Page, steps: Steps, value: Json) -> Network:
    entry = entry_of(page, steps, value, ("latency", "bandwidth", "serial"), ())
    latency = _per_pair(page, (*steps, "latency"), entry["latency"], number_of)
    bandwidth = _per_pair(page, (*steps, "bandwidth"), entry["bandwidth"], _or_endless)
    try:
        return Network(latency, bandwidth, _truth(page, (*steps, "serial"), entry["serial"]))
    except ShapeError as error:
        fail(page, steps, str(error), "give one number, or a row of numbers for each rank")


def _per_pair(page: Page, steps: Steps, value: Json, number: Callable[[Page, Steps, Json], float]) -> PerPair:
    if isinstance(value, list):
        return list_of(page, steps, value, lambda page, steps, row: list_of(page, steps, row, number))
    return number(page, steps, value)


def _or_endless(page: Page, steps: Steps, value: Json) -> float:
    return math.inf if value is None else number_of(page, steps, value)


def _truth(page: Page, steps: Steps, value: Json) -> bool:
    if not isinstance(value, bool):
        fail(page, steps, f"{name_of(page, steps)} is {kind_of(value)}", "write true or false")
    return value
