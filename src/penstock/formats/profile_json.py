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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from penstock.cost.buffers import BufferedMessage, check_buffers
from penstock.cost.curve import CorrectedCurve, Curve, Seconds
from penstock.cost.fit import Fit
from penstock.cost.network import Network, PerPair
from penstock.cost.profile import Block, Point, Profile
from penstock.cost.row_profiles import RowProfiles
from penstock.errors import ShapeError
from penstock.formats.fields import (
    check_kind,
    fact_text,
    read_entry,
    read_facts_field,
    read_flag,
    read_list,
    read_number,
    read_string,
    read_whole,
)
from penstock.formats.json_text import JsonPage, parse_json
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
from penstock.ir.action import Op
from penstock.ir.plan import Facts

PROFILE_VERSION = 1
ROW_FIELDS = ("rows", "message", "turn", "switch")  # besides the blocks
BLOCK_NAMES = ("embed", "layer", "head")
PROFILED_OPS = (Op.F, Op.B, Op.I, Op.W)
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
    network = {
        "latency": first.network.latency,
        "bandwidth": _infinity_as_null(first.network.bandwidth),
        "serial": first.network.serial,
    }
    if first.network.channels is not None:
        network["channels"] = first.network.channels
    if first.network.sum_bandwidth is not None:
        network["sum_bandwidth"] = _infinity_as_null(first.network.sum_bandwidth)
    if first.network.buffers:
        network["buffers"] = [
            {
                "bytes": one.bytes,
                "send": _infinity_as_null(one.send),
                "receive": one.receive,
            }
            for one in first.network.buffers
        ]
    lines = [
        '"penstock": "profile"',
        f'"version": {PROFILE_VERSION}',
        _sizes_text(first, fields),
        f'"model": {_facts_text(first.model)}',
        f'"device": {_facts_text(first.device)}',
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
    blocks = {name: _block_text(getattr(profile, name)) for name in BLOCK_NAMES}
    return _object_text(blocks, 4)


def _block_text(block: Block) -> str:
    entries = {field: repr(float(getattr(block, field))) for field in BYTE_FIELDS}
    fits = {op.value: json.dumps(_fit_entry(block.fit(op))) for op in PROFILED_OPS}
    entries["fits"] = _object_text(fits, 8)
    points = [json.dumps(_point_entry(point)) for point in block.points]
    point_lines = ",\n        ".join(points)
    entries["points"] = f"[\n        {point_lines}\n      ]"
    return _object_text(entries, 6)


def _fit_entry(fit: Fit) -> dict[str, str | float]:
    formula = fit.curve
    if isinstance(formula, CorrectedCurve):
        formula = formula.formula
    assert isinstance(formula, Seconds)
    terms = {term: getattr(formula, term) for term in CURVE_TERMS}
    return {"form": fit.form, **terms, "worst": fit.worst, "median": fit.median}


def _point_entry(point: Point) -> dict[str, int | float | bool]:
    entry: dict[str, int | float | bool] = {
        "tokens": point.tokens,
        "prefix": point.prefix,
    }
    for op in PROFILED_OPS:
        entry[op.value] = point.of(op)
    if point.held_out:
        entry["held_out"] = True
    return entry


def _facts_text(facts: Facts) -> str:
    entries = [f"{json.dumps(key)}: {fact_text(key, fact)}" for key, fact in facts]
    return "{" + ", ".join(entries) + "}"


def _object_text(entries: dict[str, str], indent: int) -> str:
    margin = " " * indent
    outer_margin = " " * (indent - 2)
    lines = [f'{margin}"{key}": {text}' for key, text in entries.items()]
    return "{\n" + ",\n".join(lines) + f"\n{outer_margin}}}"


def _infinity_as_null(value: PerPair) -> Value:
    """Numbers in JSON, which has no infinity."""
    if isinstance(value, tuple):
        return [[_infinity_as_null(number) for number in row] for row in value]
    return None if math.isinf(value) else value


# ---------------------------------------------------------------- reading
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
    top = check_kind(page, parse_json(page), PROFILE_VERSION)
    required = (
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
    read_entry(page, (), top, required, ("turn", "switch", "tied", "larger"))
    layers = read_whole(page, ("layers",), top["layers"], least=1)
    tokens = read_whole(page, ("tokens",), top["tokens"], least=1)
    first = Profile(
        layers,
        tokens,
        *_row_sizes(page, (), top),
        *_row_blocks(page, (), top, tokens),
        network=_network(page, ("network",), top["network"]),
        model=read_facts_field(page, ("model",), top["model"]),
        device=read_facts_field(page, ("device",), top["device"]),
        turn=read_number(page, ("turn",), top.get("turn", 0.0)),
        switch=read_number(page, ("switch",), top.get("switch", 0.0)),
        tied=read_number(page, ("tied",), top.get("tied", 0.0)),
    )

    def larger(page: Page, steps: Steps, value: Value) -> Profile:
        required = ("rows", "message", "blocks")
        entry = read_entry(page, steps, value, required, ("turn", "switch"))
        rows, message = _row_sizes(page, steps, entry)
        embed, layer, head = _row_blocks(page, steps, entry, tokens)
        turn = read_number(page, (*steps, "turn"), entry.get("turn", 0.0))
        switch = read_number(page, (*steps, "switch"), entry.get("switch", 0.0))
        return replace(
            first,
            rows=rows,
            message=message,
            embed=embed,
            layer=layer,
            head=head,
            turn=turn,
            switch=switch,
        )

    others: tuple[Profile, ...] = ()
    if "larger" in top:
        others = read_list(page, ("larger",), top["larger"], larger)
    try:
        return RowProfiles((first, *others))
    except ShapeError as error:
        fail(page, ("larger",), str(error), "measure again")


def _row_sizes(
    page: Page, steps: Steps, entry: Mapping[str, Value]
) -> tuple[int, float]:
    rows = read_whole(page, (*steps, "rows"), entry["rows"], least=1)
    return rows, read_number(page, (*steps, "message"), entry["message"])


def _row_blocks(
    page: Page, steps: Steps, entry: Mapping[str, Value], tokens: int
) -> tuple[Block, Block, Block]:
    """The blocks that were measured with one number of rows."""
    steps = (*steps, "blocks")
    blocks = read_entry(page, steps, entry["blocks"], BLOCK_NAMES, ())
    embed, layer, head = (
        _block(page, (*steps, name), blocks[name]) for name in BLOCK_NAMES
    )
    for op in (Op.F, Op.B):
        if layer.fit(op).curve.of(tokens, 0) < MIN_SECONDS:
            op_steps = (*steps, "layer", "fits", op.value)
            what = f"{op.value} of a layer takes no time"
            fail(page, op_steps, what, "measure again")
    return embed, layer, head


def _block(page: Page, steps: Steps, value: Value) -> Block:
    entry = read_entry(page, steps, value, (*BYTE_FIELDS, "fits", "points"), ())
    points = read_list(page, (*steps, "points"), entry["points"], _point)
    if all(point.held_out for point in points):
        what = "no point took part in the fits"
        fail(page, (*steps, "points"), what, "measure again")
    ops = [op.value for op in PROFILED_OPS]
    fit_entries = read_entry(page, (*steps, "fits"), entry["fits"], ops, ())
    fits = []
    for op in PROFILED_OPS:
        op_steps = (*steps, "fits", op.value)
        fits.append(_fit(page, op_steps, fit_entries[op.value], points, op))
    sizes = [read_number(page, (*steps, field), entry[field]) for field in BYTE_FIELDS]
    return Block(
        points,
        F=fits[0],
        B=fits[1],
        I=fits[2],
        W=fits[3],
        **dict(zip(BYTE_FIELDS, sizes, strict=True)),
    )


def _point(page: Page, steps: Steps, value: Value) -> Point:
    ops = [op.value for op in PROFILED_OPS]
    entry = read_entry(page, steps, value, ("tokens", "prefix", *ops), ("held_out",))
    tokens = read_whole(page, (*steps, "tokens"), entry["tokens"], least=1)
    prefix = read_whole(page, (*steps, "prefix"), entry["prefix"])
    f, b, i, w = (read_number(page, (*steps, op), entry[op]) for op in ops)
    held_out = read_flag(page, (*steps, "held_out"), entry.get("held_out", False))
    return Point(tokens, prefix, f, b, i, w, held_out)


def _fit(
    page: Page, steps: Steps, value: Value, points: Iterable[Point], op: Op
) -> Fit:
    keys = ("form", *CURVE_TERMS, "worst", "median")
    entry = read_entry(page, steps, value, keys, ())
    terms = [read_number(page, (*steps, term), entry[term]) for term in CURVE_TERMS]
    formula = Seconds(*terms)
    form_steps = (*steps, "form")
    form = read_string(page, form_steps, entry["form"])
    curve: Curve = formula
    if form == "table":
        curve = _table(page, steps, formula, points, op)
    elif form != "formula":
        what = f"{value_name(page, form_steps)} is {describe_value(form)}"
        fail(page, form_steps, what, 'a fit is a "formula" or a "table"')
    worst = read_number(page, (*steps, "worst"), entry["worst"])
    median = read_number(page, (*steps, "median"), entry["median"])
    return Fit(curve, worst, median)


def _table(
    page: Page, steps: Steps, formula: Seconds, points: Iterable[Point], op: Op
) -> CorrectedCurve:
    fitted = [point for point in points if not point.held_out]
    for point in fitted:
        if formula.of(point.tokens, point.prefix) < MIN_SECONDS:
            what = "the formula is 0 at a point of its table"
            fail(page, steps, what, "measure again")
    entries = [(point.tokens, point.prefix, point.of(op)) for point in fitted]
    return CorrectedCurve(formula, tuple(entries))


def _network(page: Page, steps: Steps, value: Value) -> Network:
    needed = ("latency", "bandwidth", "serial")
    known = ("channels", "sum_bandwidth", "buffers")
    entry = read_entry(page, steps, value, needed, known)
    latency = _per_pair(page, (*steps, "latency"), entry["latency"], read_number)
    bandwidth = _per_pair(
        page, (*steps, "bandwidth"), entry["bandwidth"], _null_or_number
    )
    serial = read_flag(page, (*steps, "serial"), entry["serial"])
    channels = None
    if "channels" in entry:
        place = (*steps, "channels")
        channels = read_whole(page, place, entry["channels"], least=1, most=2)
    sums = None
    if "sum_bandwidth" in entry:
        place = (*steps, "sum_bandwidth")
        sums = _per_pair(page, place, entry["sum_bandwidth"], _null_or_number)
    buffers: tuple[BufferedMessage, ...] = ()
    if "buffers" in entry:
        place = (*steps, "buffers")
        buffers = read_list(page, place, entry["buffers"], _buffered_message)
        try:
            check_buffers(buffers)
        except ShapeError as error:
            fail(page, place, str(error), "measure again with `penstock profile`")
    try:
        return Network(latency, bandwidth, serial, channels, sums, buffers)
    except ShapeError as error:
        advice = "give one number, or a row of numbers for each rank"
        fail(page, steps, str(error), advice)


def _per_pair(
    page: Page, steps: Steps, value: Value, read: Callable[[Page, Steps, Value], float]
) -> PerPair:
    """One number for all pairs of ranks, or a matrix."""
    if not isinstance(value, list):
        return read(page, steps, value)
    rows = []
    for number, row in enumerate(value):
        rows.append(read_list(page, (*steps, number), row, read))
    return tuple(rows)


def _null_or_number(page: Page, steps: Steps, value: Value) -> float:
    """A number, or infinity, for which JSON has null."""
    return math.inf if value is None else read_number(page, steps, value)


def _buffered_message(page: Page, steps: Steps, value: Value) -> BufferedMessage:
    entry = read_entry(page, steps, value, ("bytes", "send", "receive"), ())
    return BufferedMessage(
        read_number(page, (*steps, "bytes"), entry["bytes"]),
        _null_or_number(page, (*steps, "send"), entry["send"]),
        read_number(page, (*steps, "receive"), entry["receive"]),
    )
