"""The fields of a file, read one by one.

Each reader returns a value of the right type, or raises an error at the place of the value.
They work for any `Page`: JSON and TOML alike.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection
from math import inf, isfinite
from typing import NoReturn, TypeVar

from penstock.errors import FileError
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

Item = TypeVar("Item")


def check_kind(page: Page, top: Value, version: int) -> dict[str, Value]:
    """The top of a file, if it is of the page's kind and of this version or an older one."""
    kind = page.kind
    if not isinstance(top, dict) or "penstock" not in top:
        advice = f"a {kind} begins with {page.opening(version)}"
        fail(page, (), f"this is not a Penstock {kind}", advice)
    if top["penstock"] != kind:
        actual = describe_value(top["penstock"])
        what = f'this is a Penstock file, but its kind is {actual}, not "{kind}"'
        fail(page, ("penstock",), what, f"give a {FILE_NAMES[kind]}")
    actual_version = version
    if "version" in top:
        actual_version = read_whole(page, ("version",), top["version"], least=1)
    if actual_version > version:
        what = (
            f"this {kind} has version {actual_version}, "
            f"but this Penstock reads versions up to {version}"
        )
        fail(page, ("version",), what, "upgrade Penstock")
    return top


# ---------------------------------------------------------------- facts
def fact_text(key: str, fact: Fact) -> str:
    """A fact as JSON."""
    try:
        if isinstance(fact, str | float | int | bool | None):
            return json.dumps(fact, allow_nan=False)
    except ValueError:  # infinite, NaN, or too many digits
        pass
    raise FileError(
        f"a file cannot hold the fact {key!r}, a {type(fact).__name__}\n"
        f"  {FACT_TYPES_TEXT}"
    )


def read_facts_field(page: Page, steps: Steps, value: Value) -> Facts:
    """An object of facts."""
    facts = []
    for key, fact in read_object(page, steps, value).items():
        is_infinite = isinstance(fact, float) and not isfinite(fact)
        if isinstance(fact, dict | list) or is_infinite:
            what = f"the fact {key!r} is {describe_value(fact)}"
            fail(page, (*steps, key), what, FACT_TYPES_TEXT)
        facts.append((key, fact))
    return tuple(facts)


# ---------------------------------------------------------------- lists and objects
def read_list(
    page: Page, steps: Steps, value: Value, read: Callable[[Page, Steps, Value], Item]
) -> tuple[Item, ...]:
    """A list, each item read in turn."""
    if not isinstance(value, list):
        _wrong_type(page, steps, value, "a list", "write it in [ and ]")
    items = []
    for number, item in enumerate(value):
        items.append(read(page, (*steps, number), item))
    return tuple(items)


def read_object(page: Page, steps: Steps, value: Value) -> dict[str, Value]:
    """An object."""
    if not isinstance(value, dict):
        _wrong_type(page, steps, value, "an object", "write it in { and }")
    return value


def read_entry(
    page: Page,
    steps: Steps,
    value: Value,
    required: Collection[str],
    optional: Collection[str],
) -> dict[str, Value]:
    """An object that has all required keys, and otherwise only optional ones."""
    entry = read_object(page, steps, value)
    known = (*required, *optional)
    for key in entry:
        if key not in known:
            where = page.find_key((*steps, key))
            what = f"{value_name(page, steps)} has no key {key!r}"
            fail_at(page, where, what, suggest_name(key, known))
    for key in required:
        if key not in entry:
            what = f"{value_name(page, steps)} lacks the key {key!r}"
            fail(page, steps, what, f"it needs {', '.join(required)}")
    return entry


# ---------------------------------------------------------------- single values
def read_whole(
    page: Page,
    steps: Steps,
    value: Value,
    least: int = 0,
    most: int = MAX_WHOLE_NUMBER,
) -> int:
    """A whole number."""
    advice = f"write a number from {least} to {most}"
    if isinstance(value, bool) or not isinstance(value, int):
        _wrong_type(page, steps, value, "a whole number", advice)
    if not least <= value <= most:
        _out_of_range(page, steps, advice)
    return value


def read_number(
    page: Page,
    steps: Steps,
    value: Value,
    least: float = 0.0,
    most: float = MAX_NUMBER,
) -> float:
    """A number; NaN is never in range."""
    advice = f"write a number from {least:g} to {most:g}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        _wrong_type(page, steps, value, "a number", advice)
    if not least <= value <= most:
        _out_of_range(page, steps, advice)
    if value > sys.float_info.max:
        return inf
    return float(value)


def read_string(page: Page, steps: Steps, value: Value) -> str:
    """A string."""
    if not isinstance(value, str):
        _wrong_type(page, steps, value, "a string", 'write it in " and "')
    return value


def read_flag(page: Page, steps: Steps, value: Value) -> bool:
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
