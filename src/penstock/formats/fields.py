"""The records of a file: each object is declared once, with its keys, and read by one function.

    POINT = {"tokens": Field(whole(1)), "held_out": Field(flag, False)}      a key without a default must be there

    read_keys(page, steps, value, POINT)        the values of the keys, or an error at the place of a fault
    record(Point, POINT)                        a reader for such objects, which makes a Point of each

A reader returns a value of the right type, or raises an error at the place of the value. Readers work for any `Page`:
JSON and TOML alike.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from math import inf, isfinite
from typing import Any, NamedTuple, NoReturn, TypeAlias, TypeVar

from penstock.errors import FileError, ShapeError
from penstock.formats.text import (
    FILE_NAMES,
    Page,
    Steps,
    Value,
    describe_value,
    fail,
    fail_at,
    suggest_name,
    value_name,
)
from penstock.ir.plan import Fact, Facts

MAX_WHOLE_NUMBER = 2**31 - 1  # the largest number in a schedule
MAX_NUMBER = 1e18  # of bytes, bytes per second, or seconds: sums of them stay finite
FACT_TYPES_TEXT = "facts are text, finite numbers, true, false and null"
REQUIRED = object()  # the default of a key that must be there

Item = TypeVar("Item")
Read: TypeAlias = Callable[[Page, Steps, Value], Item]


class Field(NamedTuple):
    """How the value of a key is read, and what it is if the key is left out."""

    read: Read[Any]
    default: object = REQUIRED


# ---------------------------------------------------------------- records
def record(
    make: Callable[..., Item], keys: Mapping[str, Field], advice: str = ""
) -> Read[Item]:
    """A reader of objects with these keys. If `make` refuses the values, the error ends with the advice."""

    def read(page: Page, steps: Steps, value: Value) -> Item:
        values = read_keys(page, steps, value, keys)
        return made(page, steps, advice, make, **values)

    return read


def read_keys(
    page: Page, steps: Steps, value: Value, keys: Mapping[str, Field]
) -> dict[str, Any]:
    """The values of an object that has all required keys, and no unknown ones."""
    entry = read_object(page, steps, value)
    required = [key for key, field in keys.items() if field.default is REQUIRED]
    known = sorted(keys, key=lambda key: key not in required)
    for key in entry:
        if key not in known:
            where = page.find_key((*steps, key))
            what = f"{value_name(page, steps)} has no key {key!r}"
            fail_at(page, where, what, suggest_name(key, known))
    for key in required:
        if key not in entry:
            what = f"{value_name(page, steps)} lacks the key {key!r}"
            fail(page, steps, what, f"it needs {', '.join(required)}")
    return {
        key: field.read(page, (*steps, key), entry[key])
        if key in entry
        else field.default
        for key, field in keys.items()
    }


def made(
    page: Page, steps: Steps, advice: str, make: Callable[..., Item], **values: Any
) -> Item:
    """What is made of these values, or an error at their place if they do not go together."""
    try:
        return make(**values)
    except ShapeError as error:
        fail(page, steps, str(error), advice)


def read_page(
    page: Page, top: Value, version: int, keys: Mapping[str, Field]
) -> dict[str, Any]:
    """The values of a whole file, if it is of the page's kind and of this version or an older one."""
    _check_kind(page, top, version)
    return read_keys(page, (), top, keys)


def _check_kind(page: Page, top: Value, version: int) -> None:
    kind = page.kind
    if not isinstance(top, dict) or "penstock" not in top:
        opening = page.OPENING.format(kind=kind, version=version)
        advice = f"a {kind} begins with {opening}"
        fail(page, (), f"this is not a Penstock {kind}", advice)
    if top["penstock"] != kind:
        actual = describe_value(top["penstock"])
        what = f'this is a Penstock file, but its kind is {actual}, not "{kind}"'
        fail(page, ("penstock",), what, f"give a {FILE_NAMES[kind]}")
    given = top.get("version", version)
    actual_version = whole(1)(page, ("version",), given)
    if actual_version > version:
        what = (
            f"this {kind} has version {actual_version}, "
            f"but this Penstock reads versions up to {version}"
        )
        fail(page, ("version",), what, "upgrade Penstock")


# ---------------------------------------------------------------- facts
def storable(facts: Facts) -> dict[str, Fact]:
    """Facts as an object, if JSON can hold them."""
    for key, fact in facts:
        try:
            json.dumps(fact, allow_nan=False)
            held = isinstance(fact, str | float | int | bool | None)
        except (ValueError, TypeError):  # infinite, NaN, too many digits, or no JSON
            held = False
        if not held:
            raise FileError(
                f"a file cannot hold the fact {key!r}, a {type(fact).__name__}\n"
                f"  {FACT_TYPES_TEXT}"
            )
    return dict(facts)


def facts(page: Page, steps: Steps, value: Value) -> Facts:
    """An object of facts."""
    found = []
    for key, fact in read_object(page, steps, value).items():
        is_infinite = isinstance(fact, float) and not isfinite(fact)
        if isinstance(fact, dict | list) or is_infinite:
            what = f"the fact {key!r} is {describe_value(fact)}"
            fail(page, (*steps, key), what, FACT_TYPES_TEXT)
        found.append((key, fact))
    return tuple(found)


# ---------------------------------------------------------------- lists and objects
def items(read: Read[Item]) -> Read[tuple[Item, ...]]:
    """A list, each item read in turn."""

    def read_items(page: Page, steps: Steps, value: Value) -> tuple[Item, ...]:
        if not isinstance(value, list):
            _wrong_type(page, steps, value, "a list", "write it in [ and ]")
        return tuple(
            read(page, (*steps, number), item) for number, item in enumerate(value)
        )

    return read_items


def read_object(page: Page, steps: Steps, value: Value) -> dict[str, Value]:
    """An object."""
    if not isinstance(value, dict):
        _wrong_type(page, steps, value, "an object", "write it in { and }")
    return value


def anything(page: Page, steps: Steps, value: Value) -> Value:
    """A value that is read later."""
    return value


# ---------------------------------------------------------------- single values
def whole(least: int = 0, most: int = MAX_WHOLE_NUMBER) -> Read[int]:
    """A whole number."""
    advice = f"write a number from {least} to {most}"

    def read(page: Page, steps: Steps, value: Value) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            _wrong_type(page, steps, value, "a whole number", advice)
        if not least <= value <= most:
            _out_of_range(page, steps, advice)
        return value

    return read


def number(least: float = 0.0, most: float = MAX_NUMBER) -> Read[float]:
    """A number; NaN is never in range."""
    advice = f"write a number from {least:g} to {most:g}"

    def read(page: Page, steps: Steps, value: Value) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            _wrong_type(page, steps, value, "a number", advice)
        if not least <= value <= most:
            _out_of_range(page, steps, advice)
        if value > sys.float_info.max:
            return inf
        return float(value)

    return read


def string(page: Page, steps: Steps, value: Value) -> str:
    """A string."""
    if not isinstance(value, str):
        _wrong_type(page, steps, value, "a string", 'write it in " and "')
    return value


def flag(page: Page, steps: Steps, value: Value) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        _wrong_type(page, steps, value, "true or false", "write true or false")
    return value


def _wrong_type(
    page: Page, steps: Steps, value: Value, right: str, advice: str
) -> NoReturn:
    what = f"{value_name(page, steps)} is {describe_value(value)}, not {right}"
    fail(page, steps, what, advice)


def _out_of_range(page: Page, steps: Steps, advice: str) -> NoReturn:
    fail(page, steps, f"{value_name(page, steps)} is out of range", advice)


# The first keys of every file.
HEADER = {"penstock": Field(anything), "version": Field(anything)}
