"""profile.json: measured times and bytes, and the curves fitted to them.

    {
      "penstock": "profile",
      "version": 1,
      "layers": 8, "tokens": 1024, "rows": 1, "message": 1024.0, "turn": 0.0002, "switch": 0.1,
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
      "network": {                                         a number, or rows; null means unlimited
        "latency": 2e-05, "bandwidth": 1e9, "serial": true,
        "channels": 1,                                     1 or 2; only over NCCL
        "sum_bandwidth": 4e8,                              of sums while all ranks sum; not in old files
        "buffers": [                                       how long messages keep their ranks busy; only over NCCL
          {"bytes": 1e6, "send": 1e-4, "receive": 2e-4}    "send" is null if the sender waits for its receiver
        ]
      }
    }

If the embedding and the head share a weight, "tied" gives the bytes of that weight, its
gradient and its AdamW state. A table is not stored, since it follows from the formula and
the points that took part in the fit.

If micro-batches with several numbers of rows were measured, the file starts with the fewest
rows, and "larger" lists the others in ascending order. Only what depends on the rows is
repeated there:

      "larger": [{"rows": 2, "message": 2048.0, "turn": 0.0002, "switch": 0.1, "blocks": {...}}, ...]
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from penstock.cost.curve import CorrectedCurve, Curve, Fit, Seconds
from penstock.cost.network import BufferedMessage, Network, PerPair, check_buffers
from penstock.cost.profile import Block, Point, Profile, RowProfiles
from penstock.formats.fields import (
    HEADER,
    Field,
    Read,
    facts,
    flag,
    items,
    made,
    number,
    read_keys,
    read_page,
    record,
    storable,
    string,
    whole,
)
from penstock.formats.json_text import JsonPage, Lines, parse_json, value_text
from penstock.formats.text import (
    Page,
    Steps,
    Value,
    describe_value,
    fail,
    read_text,
    value_name,
    write_text,
)
from penstock.ir.action import COMPUTING_OPS, Op

PROFILE_VERSION = 1
ROW_FIELDS = ("rows", "message", "turn", "switch")  # besides the blocks
BLOCK_NAMES = ("embed", "layer", "head")
CURVE_TERMS = ("base", "token", "prefix", "pair")
BYTE_FIELDS = ("held", "kept", "weights", "update")
MIN_SECONDS = 1e-15  # a shorter time counts as no time at all


# ---------------------------------------------------------------- writing
def dump_profile(profile: Profile) -> str:
    """The text of a profile, with one line per fit and per point."""
    return dump_row_profiles(RowProfiles((profile,)))


def dump_row_profiles(profiles: RowProfiles) -> str:
    """The text of profiles for several numbers of rows."""
    first = profiles.measured[0]
    fields = ["layers", "tokens", *ROW_FIELDS]
    if first.tied:
        fields.append("tied")
    network = {}
    for key in NETWORK:
        value = getattr(first.network, key)
        if value not in (None, ()):
            network[key] = _as_json(value)
    lines = [
        '"penstock": "profile"',
        f'"version": {PROFILE_VERSION}',
        _sizes_text(first, fields),
        f'"model": {value_text(storable(first.model))}',
        f'"device": {value_text(storable(first.device))}',
        f'"blocks": {_blocks_text(first)}',
        f'"network": {json.dumps(network)}',
    ]
    if len(profiles.measured) > 1:
        larger = [_larger_text(profile) for profile in profiles.measured[1:]]
        lines.append(f'"larger": [{", ".join(larger)}]')
    return "{\n  " + ",\n  ".join(lines) + "\n}\n"


def write_profile(profile: Profile, path: str | Path) -> None:
    """Write a profile to a file."""
    write_text(path, dump_profile(profile))


def write_row_profiles(profiles: RowProfiles, path: str | Path) -> None:
    """Write profiles for several numbers of rows to a file."""
    write_text(path, dump_row_profiles(profiles))


def _larger_text(profile: Profile) -> str:
    sizes = _sizes_text(profile, ROW_FIELDS)
    return f'{{\n  {sizes},\n  "blocks": {_blocks_text(profile)}\n  }}'


def _sizes_text(profile: Profile, fields: Iterable[str]) -> str:
    return ", ".join(f'"{field}": {getattr(profile, field)!r}' for field in fields)


def _blocks_text(profile: Profile) -> str:
    blocks = {name: _block_entry(getattr(profile, name)) for name in BLOCK_NAMES}
    return value_text(Lines(blocks), 1)


def _block_entry(block: Block) -> Lines:
    sizes = {field: float(getattr(block, field)) for field in BYTE_FIELDS}
    fits = Lines({op.value: _fit_entry(block.fit(op)) for op in COMPUTING_OPS})
    points = Lines([*map(_point_entry, block.points)])
    return Lines({**sizes, "fits": fits, "points": points})


def _fit_entry(fit: Fit) -> dict[str, str | float]:
    formula: Any = getattr(fit.curve, "formula", fit.curve)  # that of a table
    terms = asdict(formula)
    return {"form": fit.form, **terms, "worst": fit.worst, "median": fit.median}


def _point_entry(point: Point) -> dict[str, int | float | bool]:
    entry = asdict(point)
    if not point.held_out:
        del entry["held_out"]
    return entry


def _as_json(value: Any) -> Any:
    """Numbers in JSON, which has no infinity but null."""
    if isinstance(value, BufferedMessage):
        return {key: _as_json(one) for key, one in asdict(value).items()}
    if isinstance(value, tuple):
        return [_as_json(one) for one in value]
    return None if math.isinf(value) else value


# ---------------------------------------------------------------- reading
def _form(page: Page, steps: Steps, value: Value) -> str:
    form = string(page, steps, value)
    if form not in ("formula", "table"):
        what = f"{value_name(page, steps)} is {describe_value(form)}"
        fail(page, steps, what, 'a fit is a "formula" or a "table"')
    return form


def _null_or_number(page: Page, steps: Steps, value: Value) -> float:
    """A number, or infinity, for which JSON has null."""
    return math.inf if value is None else number()(page, steps, value)


def _per_pair(read: Read[float]) -> Read[PerPair]:
    """One number for all pairs of ranks, or a matrix."""

    def read_pairs(page: Page, steps: Steps, value: Value) -> PerPair:
        if not isinstance(value, list):
            return read(page, steps, value)
        return items(items(read))(page, steps, value)

    return read_pairs


def _buffers(page: Page, steps: Steps, value: Value) -> tuple[BufferedMessage, ...]:
    found = items(record(BufferedMessage, BUFFER))(page, steps, value)
    advice = "measure again with `penstock profile`"
    made(page, steps, advice, partial(check_buffers, found))
    return found


def _check_layer(page: Page, steps: Steps, layer: Block, tokens: int) -> None:
    """Refuse a layer that takes no time on a whole sequence."""
    for op in map(Op, "FB"):
        if layer.fit(op).curve.of(tokens, 0) < MIN_SECONDS:
            op_steps = (*steps, "layer", "fits", op.value)
            what = f"{op.value} of a layer takes no time"
            fail(page, op_steps, what, "measure again")


def _block(page: Page, steps: Steps, value: Value) -> Block:
    values = read_keys(page, steps, value, BLOCK)
    points: tuple[Point, ...] = values["points"]
    if all(point.held_out for point in points):
        what = "no point took part in the fits"
        fail(page, (*steps, "points"), what, "measure again")
    fits = values.pop("fits")
    found: dict[str, Any] = {
        op.value: _fit(page, (*steps, "fits", op.value), fits[op.value], points, op)
        for op in COMPUTING_OPS
    }
    return Block(**values, **found)


def _fit(
    page: Page,
    steps: Steps,
    values: dict[str, Any],
    points: Iterable[Point],
    op: Op,
) -> Fit:
    """A fit; a table gets the points that took part in it."""
    formula = Seconds(*(values[term] for term in CURVE_TERMS))
    curve: Curve = formula
    if values["form"] == "table":
        fitted = [point for point in points if not point.held_out]
        for point in fitted:
            if formula.of(point.tokens, point.prefix) < MIN_SECONDS:
                what = "the formula is 0 at a point of its table"
                fail(page, steps, what, "measure again")
        entries = [(point.tokens, point.prefix, point.of(op)) for point in fitted]
        curve = CorrectedCurve(formula, tuple(entries))
    return Fit(curve, values["worst"], values["median"])


NUMBER = Field(number())
NO_NUMBER = Field(number(), 0.0)
OP_NUMBERS = dict.fromkeys([op.value for op in COMPUTING_OPS], NUMBER)
POINT = {
    "tokens": Field(whole(1)),
    "prefix": Field(whole()),
    **OP_NUMBERS,
    "held_out": Field(flag, False),
}
FIT = {
    "form": Field(_form),
    **dict.fromkeys((*CURVE_TERMS, "worst", "median"), NUMBER),
}
FITS = dict.fromkeys(OP_NUMBERS, Field(record(dict, FIT)))
BLOCK = {
    **dict.fromkeys(BYTE_FIELDS, NUMBER),
    "fits": Field(record(dict, FITS)),
    "points": Field(items(record(Point, POINT))),
}
BUFFER = {"bytes": NUMBER, "send": Field(_null_or_number), "receive": NUMBER}
NETWORK = {
    "latency": Field(_per_pair(number())),
    "bandwidth": Field(_per_pair(_null_or_number)),
    "serial": Field(flag),
    "channels": Field(whole(1, 2), None),
    "sum_bandwidth": Field(_per_pair(_null_or_number), None),
    "buffers": Field(_buffers, ()),
}
NETWORK_ADVICE = "give one number, or a row of numbers for each rank"
ROWS = {
    "rows": Field(whole(1)),
    "message": NUMBER,
    "blocks": Field(record(dict, dict.fromkeys(BLOCK_NAMES, Field(_block)))),
    "turn": NO_NUMBER,
    "switch": NO_NUMBER,
}
PROFILE = {
    **HEADER,
    "layers": Field(whole(1)),
    "tokens": Field(whole(1)),
    "rows": ROWS["rows"],
    "message": NUMBER,
    "model": Field(facts),
    "device": Field(facts),
    "blocks": ROWS["blocks"],
    "network": Field(record(Network, NETWORK, NETWORK_ADVICE)),
    "turn": NO_NUMBER,
    "switch": NO_NUMBER,
    "tied": NO_NUMBER,
    "larger": Field(items(record(dict, ROWS)), ()),
}


def read_profile(path: str | Path) -> Profile:
    """The profile in a file; if it has several, the one with the fewest rows."""
    return read_row_profiles(path).measured[0]


def load_profile(text: str, source: str = "profile.json") -> Profile:
    """The profile in a text, as `read_profile` has it; errors call the file `source`."""
    return load_row_profiles(text, source).measured[0]


def read_row_profiles(path: str | Path) -> RowProfiles:
    """The profiles in a file, for one number of rows or for several."""
    return load_row_profiles(read_text(path, "profile"), str(path))


def load_row_profiles(text: str, source: str = "profile.json") -> RowProfiles:
    """The profiles in a text; errors call the file `source`."""
    page = JsonPage(text, source, "profile")
    top = read_page(page, parse_json(page), PROFILE_VERSION, PROFILE)
    places: list[Steps] = [("blocks",)]
    places += [("larger", place, "blocks") for place in range(len(top["larger"]))]
    first: dict[str, Any] = {
        key: top[key] for key in PROFILE if key not in (*HEADER, "larger")
    }
    measured = []
    for place, rows in zip(places, (first, *top["larger"]), strict=True):
        values = first | rows
        blocks = values.pop("blocks")
        _check_layer(page, place, blocks["layer"], top["tokens"])
        measured.append(Profile(**values, **blocks))
    profiles = tuple(measured)
    return made(page, ("larger",), "measure again", partial(RowProfiles, profiles))
