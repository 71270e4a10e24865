"""A JSON text in which every value can be found again, so that an error names its line and column and draws it.

plan.json:12:19: word 2 of lane 0, '0X1', is not an action

  12 |     "0F0 0F1 0X1 0B0",
                    ^^^
  an action is stage, op F B I or W, micro-batch: 2F0, or sliced 2F0.1
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

from penstock.errors import FileError

SHOWN_CHARACTERS = 40  # characters of a value that a message shows
DRAWN_CHARACTERS = 60  # characters of a line drawn on each side of a fault

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"
Steps: TypeAlias = tuple[
    str | int, ...
]  # the way to a value: ("lanes", 2) is the lane of rank 2


@dataclass(frozen=True, slots=True)
class Page:
    """A text, the name of the file it is from, and what it should be: a plan, a profile."""

    text: str
    source: str
    kind: str = "plan"


class _TwiceError(Exception):
    """A key that stands twice in one object."""


def parse_json(page: Page) -> Json:
    """The values of the text, or an error at the place where it is no JSON."""
    if not page.text.strip():
        raise FileError(
            f"{page.source} is empty\n  a {page.kind} is a JSON text; write it with `write_{page.kind}`"
        )
    try:
        value: Json = json.loads(page.text, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        fail_at(page, error.pos, *_why_no_json(page, error))
    except _TwiceError as error:
        key = str(error)
        at = max(page.text.rfind(json.dumps(key)), 0)  # 0: it is written in another way
        fail_at(page, at, f"the key {key!r} stands twice", "take one of them out")
    except (
        RecursionError,
        ValueError,
    ) as error:  # Python's own limits: of nesting, and of digits
        what = (
            "its lists are nested too deep"
            if isinstance(error, RecursionError)
            else "a number in it is too long"
        )
        raise FileError(
            f"{page.source} is no {page.kind}: {what}\n  write it again with `write_{page.kind}`"
        ) from None
    return value


def _once(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    entry = dict(pairs)
    if len(entry) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _TwiceError(next(key for key in keys if keys.count(key) > 1))
    return entry


def _why_no_json(page: Page, error: json.JSONDecodeError) -> tuple[str, str]:
    if error.msg.startswith("Unterminated") or _BEGUN.fullmatch(
        error.doc[error.pos :].strip()
    ):
        return (
            "the file ends too early",
            "it was cut off while it was written or copied: write or copy it again",
        )
    return (
        f"this is not JSON: {error.msg}",
        f"mend this line, or write the {page.kind} again",
    )


_BEGUN = re.compile(
    r"|[-+.eE]+|tr?u?|fa?l?s?|nu?l?|\\?u[0-9a-fA-F]{0,4}"
)  # what a cut leaves of one word


def fail(
    page: Page, steps: Steps, what: str, advice: str, word: int | None = None
) -> NoReturn:
    """Fails at a value, or at a word of a text."""
    start, end = _locate(page.text, steps)
    if word is not None:
        spots = list(_words(page.text, start + 1, end - 1))
        start, end = spots[word] if word < len(spots) else (start, end)
    fail_at(page, start, what, advice, end - start)


def fail_at(page: Page, at: int, what: str, advice: str, width: int = 1) -> NoReturn:
    """Fails at a place of the text, with a caret under so many characters."""
    line, begin = page.text.count("\n", 0, at) + 1, page.text.rfind("\n", 0, at) + 1
    column, whole = at - begin, page.text[begin:].split("\n", 1)[0].rstrip()
    left = max(column - DRAWN_CHARACTERS, 0)
    shown = "".join(
        sign if sign.isprintable() else " "
        for sign in whole[left : column + DRAWN_CHARACTERS]
    )
    head = f"  {line} | {'...' if left else ''}"
    caret = "^" * max(min(width, len(whole) - column, DRAWN_CHARACTERS), 1)
    drawn = f"{head}{shown}\n{' ' * (len(head) + column - left)}{caret}"
    raise FileError(f"{page.source}:{line}:{column + 1}: {what}\n\n{drawn}\n  {advice}")


_DECODER = json.JSONDecoder()


def _locate(text: str, steps: Steps) -> tuple[int, int]:
    """Where a value of a text that is JSON begins and ends."""
    at = _blank(text, 0)
    for step in steps:
        at = next(value for name, _, value in _children(text, at) if name == step)
    return at, _DECODER.raw_decode(text, at)[1]


def key_position(text: str, steps: Steps, key: str) -> int:
    """Where a key of an object stands."""
    return next(
        at for name, at, _ in _children(text, _locate(text, steps)[0]) if name == key
    )


def _children(text: str, at: int) -> Iterator[tuple[str | int, int, int]]:
    """The keys of the object, or the numbers of the list, that begins there; where each stands, and where its value."""
    inside, number = _blank(text, at + 1), 0
    while text[inside] not in "]}":
        name: str | int = number
        value = inside
        if text[at] == "{":
            name, colon = _DECODER.raw_decode(text, inside)
            value = _blank(text, _blank(text, colon) + 1)
        yield name, inside, value
        inside = _blank(text, _DECODER.raw_decode(text, value)[1])
        if text[inside] == ",":
            inside = _blank(text, inside + 1)
        number += 1


def _blank(text: str, at: int) -> int:
    """The first place from `at` on that is not blank."""
    while text[at] in " \t\r\n":
        at += 1
    return at


def _words(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Where each word of a stretch of the text begins and ends."""
    return (found.span() for found in re.compile(r"\S+").finditer(text, start, end))


def value_name(page: Page, steps: Steps) -> str:
    """How a message calls a value: `microbatches[2].path`."""
    return (
        "".join(f"[{s}]" if isinstance(s, int) else f".{s}" for s in steps).lstrip(".")
        or f"the {page.kind}"
    )


def describe_value(value: Json) -> str:
    """How a message calls what it finds instead of what it wants."""
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    shown = json.dumps(value)
    return shown if len(shown) <= SHOWN_CHARACTERS else f"{shown[:SHOWN_CHARACTERS]}..."
