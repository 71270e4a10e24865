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

from penstock.cost.curve import CorrectedCurve, Curve, Seconds
from penstock.cost.fit import Fit
from penstock.cost.network import Network, PerPair
from penstock.cost.profile import Block, Point, Profile
from penstock.errors import ShapeError
from penstock.formats.fields import (
    fact_text,
    read_entry,
    read_facts_field,
    read_list,
    read_number,
    read_string,
    read_text,
    read_top,
    read_whole,
    write_text,
)
from penstock.formats.text import Json, Page, Steps, describe_value, fail, value_name
from penstock.ir.action import Op
from penstock.ir.plan import Facts

PROFILE_VERSION = 1
BLOCK_NAMES = ("embed", "layer", "head")
PROFILED_OPS = (Op.F, Op.B, Op.I, Op.W)
CURVE_TERMS = ("base", "token", "prefix", "pair")
BYTE_FIELDS = ("held", "kept", "weights", "update")
MIN_SECONDS = 1e-15  # seconds that are any time at all


# ---------------------------------------------------------------- writing
def dump_profile(profile: Profile) -> str:
    """A profile as text: one line a fit or point."""
    blocks = {name: _block_text(getattr(profile, name)) for name in BLOCK_NAMES}
    words: tuple[str, ...] = ("layers", "tokens", "rows", "message", "turn")
    words += ("tied",) if profile.tied else ()
    sizes = ", ".join(f'"{word}": {getattr(profile, word)!r}' for word in words)
    net = profile.network
    network = {
        "latency": net.latency,
        "bandwidth": _endless(net.bandwidth),
        "serial": net.serial,
    }
    lines = (
        '"penstock": "profile"',
        f'"version": {PROFILE_VERSION}',
        sizes,
        f'"model": {_facts_text(profile.model)}',
        f'"device": {_facts_text(profile.device)}',
        f'"blocks": {_object(blocks, 4)}',
        f'"network": {json.dumps(network)}',
    )
    return "{\n  " + ",\n  ".join(lines) + "\n}\n"


def write_profile(profile: Profile, path: str | Path) -> None:
    """Writes a profile's text to a file."""
    write_text(path, dump_profile(profile))


def _block_text(block: Block) -> str:
    fits = {op.value: json.dumps(_fit_entry(block.fit(op))) for op in PROFILED_OPS}
    points = ",\n        ".join(
        json.dumps(_point_entry(point)) for point in block.points
    )
    entries = {word: repr(float(getattr(block, word))) for word in BYTE_FIELDS}
    entries |= {"fits": _object(fits, 8), "points": f"[\n        {points}\n      ]"}
    return _object(entries, 6)


def _fit_entry(fit: Fit) -> dict[str, str | float]:
    formula = fit.curve.formula if isinstance(fit.curve, CorrectedCurve) else fit.curve
    assert isinstance(formula, Seconds)
    terms = {word: getattr(formula, word) for word in CURVE_TERMS}
    return {"form": fit.form, **terms, "worst": fit.worst, "median": fit.median}


def _point_entry(point: Point) -> dict[str, int | float | bool]:
    entry: dict[str, int | float | bool] = {
        "tokens": point.tokens,
        "prefix": point.prefix,
    }
    entry |= {op.value: point.of(op) for op in PROFILED_OPS}
    return entry | ({"held_out": True} if point.held_out else {})


def _facts_text(facts: Facts) -> str:
    return (
        "{"
        + ", ".join(f"{json.dumps(key)}: {fact_text(key, fact)}" for key, fact in facts)
        + "}"
    )


def _object(entries: dict[str, str], indent: int) -> str:
    lines = f",\n{' ' * indent}".join(
        f'"{key}": {text}' for key, text in entries.items()
    )
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
    top = read_top(page, PROFILE_VERSION)
    known = (
        "penstock",
        "version",
        "layers",
        "tokens",
        "rows",
        "message",
        "model",
        "device",
        "blocks",
        "network",
    )
    read_entry(page, (), top, known, ("turn", "tied"))
    layers, tokens, rows = (
        read_whole(page, (word,), top[word], least=1)
        for word in ("layers", "tokens", "rows")
    )
    blocks = read_entry(page, ("blocks",), top["blocks"], BLOCK_NAMES, ())
    embed, layer, head = (
        _block(page, ("blocks", name), blocks[name]) for name in BLOCK_NAMES
    )
    for op in (Op.F, Op.B):
        if layer.fit(op).curve.of(tokens, 0) < MIN_SECONDS:
            fail(
                page,
                ("blocks", "layer", "fits", op.value),
                f"{op.value} of a layer takes no time",
                "measure again",
            )
    return Profile(
        layers,
        tokens,
        rows,
        read_number(page, ("message",), top["message"]),
        embed,
        layer,
        head,
        network=_network(page, ("network",), top["network"]),
        model=read_facts_field(page, ("model",), top["model"]),
        device=read_facts_field(page, ("device",), top["device"]),
        turn=read_number(page, ("turn",), top.get("turn", 0.0)),
        tied=read_number(page, ("tied",), top.get("tied", 0.0)),
    )


def _block(page: Page, steps: Steps, value: Json) -> Block:
    entry = read_entry(page, steps, value, (*BYTE_FIELDS, "fits", "points"), ())
    points = read_list(page, (*steps, "points"), entry["points"], _point)
    if not any(not point.held_out for point in points):
        fail(
            page,
            (*steps, "points"),
            "there is no point that took part in the fits",
            "measure again",
        )
    fits = read_entry(
        page, (*steps, "fits"), entry["fits"], [op.value for op in PROFILED_OPS], ()
    )
    f, b, i, w = (
        _fit(page, (*steps, "fits", op.value), fits[op.value], points, op)
        for op in PROFILED_OPS
    )
    return Block(
        points,
        f,
        b,
        i,
        w,
        *(read_number(page, (*steps, word), entry[word]) for word in BYTE_FIELDS),
    )


def _point(page: Page, steps: Steps, value: Json) -> Point:
    entry = read_entry(
        page,
        steps,
        value,
        ("tokens", "prefix", *(op.value for op in PROFILED_OPS)),
        ("held_out",),
    )
    tokens = read_whole(page, (*steps, "tokens"), entry["tokens"], least=1)
    prefix = read_whole(page, (*steps, "prefix"), entry["prefix"])
    f, b, i, w = (
        read_number(page, (*steps, op.value), entry[op.value]) for op in PROFILED_OPS
    )
    return Point(
        tokens,
        prefix,
        f,
        b,
        i,
        w,
        _truth(page, (*steps, "held_out"), entry.get("held_out", False)),
    )


def _fit(page: Page, steps: Steps, value: Json, points: Iterable[Point], op: Op) -> Fit:
    entry = read_entry(
        page, steps, value, ("form", *CURVE_TERMS, "worst", "median"), ()
    )
    formula = Seconds(
        *(read_number(page, (*steps, word), entry[word]) for word in CURVE_TERMS)
    )
    form = read_string(page, (*steps, "form"), entry["form"])
    if form not in ("formula", "table"):
        what = f"{value_name(page, (*steps, 'form'))} is {describe_value(form)}"
        fail(page, (*steps, "form"), what, 'a fit is a "formula" or a "table"')
    curve: Curve = formula
    if form == "table":
        part = tuple((p.tokens, p.prefix, p.of(op)) for p in points if not p.held_out)
        if any(formula.of(tokens, prefix) < MIN_SECONDS for tokens, prefix, _ in part):
            fail(
                page, steps, "the formula is 0 at a point of its table", "measure again"
            )
        curve = CorrectedCurve(formula, part)
    return Fit(
        curve,
        *(
            read_number(page, (*steps, word), entry[word])
            for word in ("worst", "median")
        ),
    )


def _network(page: Page, steps: Steps, value: Json) -> Network:
    entry = read_entry(page, steps, value, ("latency", "bandwidth", "serial"), ())
    latency = _per_pair(page, (*steps, "latency"), entry["latency"], read_number)
    bandwidth = _per_pair(page, (*steps, "bandwidth"), entry["bandwidth"], _or_endless)
    try:
        return Network(
            latency, bandwidth, _truth(page, (*steps, "serial"), entry["serial"])
        )
    except ShapeError as error:
        fail(
            page,
            steps,
            str(error),
            "give one number, or a row of numbers for each rank",
        )


def _per_pair(
    page: Page, steps: Steps, value: Json, number: Callable[[Page, Steps, Json], float]
) -> PerPair:
    if isinstance(value, list):
        return read_list(
            page,
            steps,
            value,
            lambda page, steps, row: read_list(page, steps, row, number),
        )
    return number(page, steps, value)


def _or_endless(page: Page, steps: Steps, value: Json) -> float:
    return math.inf if value is None else read_number(page, steps, value)


def _truth(page: Page, steps: Steps, value: Json) -> bool:
    if not isinstance(value, bool):
        fail(
            page,
            steps,
            f"{value_name(page, steps)} is {describe_value(value)}",
            "write true or false",
        )
    return value
