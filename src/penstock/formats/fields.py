"""Fields of a JSON file, read one by one: each is what it should be, or an error at its place says what it is."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from difflib import get_close_matches
from math import isfinite
from pathlib import Path
from typing import TypeVar

from penstock.errors import FileError
from penstock.formats.text import (
    Json,
    Page,
    Steps,
    describe_value,
    fail,
    fail_at,
    key_position,
    parse_json,
    value_name,
)
from penstock.ir.plan import Fact, Facts

MAX_WHOLE_NUMBER = 2**31 - 1  # of the numbers of a schedule
MAX_NUMBER = 1e18  # bytes, bytes a second, or seconds
FACT_TYPES_TEXT = "facts are text, finite numbers, true, false and null"

Item = TypeVar("Item")


# ---------------------------------------------------------------- the whole file
def read_text(path: str | Path, kind: str = "plan") -> str:
    """The text of a file, or a `FileError` that says why there is none."""
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileError(
            f"{path} is not text: byte {error.start} is no UTF-8\n"
            f"  is it the right file? a {kind} is a text, {kind}.json"
        ) from None
    except (OSError, ValueError) as error:
        raise FileError(
            f"cannot read {path}: {_reason(error)}\n  name a {kind}.json that exists"
        ) from None


def write_text(path: str | Path, text: str) -> None:
    """Writes a text to a file, or raises a `FileError` that says why not."""
    try:
        Path(path).write_text(text, encoding="utf-8", newline="\n")
    except (OSError, ValueError) as error:
        raise FileError(
            f"cannot write {path}: {_reason(error)}\n  name a file in a folder that exists"
        ) from None


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def read_top(page: Page, version: int) -> dict[str, Json]:
    """The object that a file of the page's kind is, if it is of this version or an older one."""
    top, kind = parse_json(page), page.kind
    if not isinstance(top, dict) or "penstock" not in top:
        begins = f'a {kind} begins with {{"penstock": "{kind}", "version": {version}'
        fail(page, (), f"this is not a {kind} of Penstock's", begins)
    if top["penstock"] != kind:
        what = f'this is a file of Penstock\'s, but its kind is {describe_value(top["penstock"])}, not "{kind}"'
        fail(page, ("penstock",), what, f"give a {kind}.json")
    found = (
        read_whole(page, ("version",), top["version"], least=1)
        if "version" in top
        else version
    )
    if found > version:
        what = f"this {kind} is of version {found}, and this Penstock reads versions up to {version}"
        fail(page, ("version",), what, "upgrade Penstock")
    return top


# ---------------------------------------------------------------- one value each
def fact_text(key: str, fact: Fact) -> str:
    """A fact as JSON."""
    try:
        if isinstance(fact, str | float | int | bool | None):
            return json.dumps(fact, allow_nan=False)
    except ValueError:  # not finite, or of too many digits
        pass
    raise FileError(
        f"a file cannot hold the fact {key!r}, a {type(fact).__name__}\n  {FACT_TYPES_TEXT}"
    )


def read_facts_field(page: Page, steps: Steps, value: Json) -> Facts:
    """An object of facts."""
    facts = []
    for key, fact in read_object(page, steps, value).items():
        if isinstance(fact, (dict, list)) or (
            isinstance(fact, float) and not isfinite(fact)
        ):
            what = f"the fact {key!r} is {describe_value(fact)}"
            fail(page, (*steps, key), what, FACT_TYPES_TEXT)
        facts.append((key, fact))
    return tuple(facts)


def read_list(
    page: Page, steps: Steps, value: Json, read: Callable[[Page, Steps, Json], Item]
) -> tuple[Item, ...]:
    """A list, each item read in turn."""
    if not isinstance(value, list):
        fail(
            page,
            steps,
            f"{value_name(page, steps)} is {describe_value(value)}, not a list",
            "write it in [ and ]",
        )
    return tuple(
        read(page, (*steps, number), item) for number, item in enumerate(value)
    )


def read_object(page: Page, steps: Steps, value: Json) -> dict[str, Json]:
    """An object."""
    if not isinstance(value, dict):
        fail(
            page,
            steps,
            f"{value_name(page, steps)} is {describe_value(value)}, not an object",
            "write it in { and }",
        )
    return value


def read_entry(
    page: Page,
    steps: Steps,
    value: Json,
    required: Collection[str],
    optional: Collection[str],
) -> dict[str, Json]:
    """An object with these keys: all that are required, and no others than the optional ones."""
    entry = read_object(page, steps, value)
    known = (*required, *optional)
    for key in entry:
        if key not in known:
            near = get_close_matches(key, known, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}? " if near else ""
            at, what = (
                key_position(page.text, steps, key),
                f"{value_name(page, steps)} has no key {key!r}",
            )
            fail_at(
                page, at, what, f"{hint}known: {', '.join(known)}", len(json.dumps(key))
            )
    for key in required:
        if key not in entry:
            fail(
                page,
                steps,
                f"{value_name(page, steps)} lacks the key {key!r}",
                f"it needs {', '.join(required)}",
            )
    return entry


def read_whole(page: Page, steps: Steps, value: Json, least: int = 0) -> int:
    """A whole number."""
    if isinstance(value, bool) or not isinstance(value, int):
        what = (
            f"{value_name(page, steps)} is {describe_value(value)}, not a whole number"
        )
        fail(page, steps, what, f"write a number from {least} on")
    if not least <= value <= MAX_WHOLE_NUMBER:
        fail(
            page,
            steps,
            f"{value_name(page, steps)} is out of range",
            f"write a number from {least} to {MAX_WHOLE_NUMBER}",
        )
    return value


def read_string(page: Page, steps: Steps, value: Json) -> str:
    """A text."""
    if not isinstance(value, str):
        fail(
            page,
            steps,
            f"{value_name(page, steps)} is {describe_value(value)}, not a text",
            'write it in " and "',
        )
    return value


def read_number(page: Page, steps: Steps, value: Json) -> float:
    """A number, 0 or more, and not so large that sums of it are none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        fail(
            page,
            steps,
            f"{value_name(page, steps)} is {describe_value(value)}, not a number",
            "write a number from 0 on",
        )
    if not 0 <= value <= MAX_NUMBER:
        fail(
            page,
            steps,
            f"{value_name(page, steps)} is out of range",
            f"write a number from 0 to {MAX_NUMBER:g}",
        )
    return float(value)
