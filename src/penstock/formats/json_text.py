"""JSON in which every value can be found again, for errors with line and column; and JSON with an entry a line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from penstock.errors import FileError
from penstock.formats.text import Page, Steps, Stretch, Value, fail_at

_DECODER = json.JSONDecoder()
# What is left of a number, true, false, null or escape when the file is cut off.
_TRUNCATED_WORD = re.compile(r"|[-+.eE]+|tr?u?|fa?l?s?|nu?l?|\\?u[0-9a-fA-F]{0,4}")


class JsonPage(Page):
    """A JSON text."""

    __slots__ = ()
    OPENING = '{{"penstock": "{kind}", "version": {version}'

    def find_value(self, steps: Steps) -> Stretch:
        """Where a value stands."""
        start = _skip_blanks(self.text, 0)
        for step in steps:
            start = _child(self.text, start, step).value
        end = _DECODER.raw_decode(self.text, start)[1]
        return Stretch(start, end)

    def find_key(self, steps: Steps) -> Stretch:
        """Where the key of a value stands."""
        parent = self.find_value(steps[:-1])
        start = _child(self.text, parent.start, steps[-1]).key
        end = _DECODER.raw_decode(self.text, start)[1]
        return Stretch(start, end)


class _Child(NamedTuple):
    """An entry of an object or a list, and where its key and its value begin."""

    name: str | int
    key: int
    value: int


def _child(text: str, start: int, name: str | int) -> _Child:
    return next(child for child in _children(text, start) if child.name == name)


def _children(text: str, start: int) -> Iterator[_Child]:
    """The entries of the object or the list that begins at `start`."""
    is_object = text[start] == "{"
    here = _skip_blanks(text, start + 1)
    number = 0
    while text[here] not in "]}":
        name: str | int = number
        value = here
        if is_object:
            name, colon = _DECODER.raw_decode(text, here)
            value = _skip_blanks(text, _skip_blanks(text, colon) + 1)
        yield _Child(name, here, value)
        here = _skip_blanks(text, _DECODER.raw_decode(text, value)[1])
        if text[here] == ",":
            here = _skip_blanks(text, here + 1)
        number += 1


def _skip_blanks(text: str, start: int) -> int:
    """The first position from `start` on that is not blank."""
    while text[start] in " \t\r\n":
        start += 1
    return start


# ---------------------------------------------------------------- parsing
class _RepeatedKeyError(Exception):
    """A key that occurs twice in one object."""


def parse_json(page: JsonPage) -> Value:
    """The values of the text, or an error where it is not JSON."""
    if not page.text.strip():
        raise FileError(f"{page.source} is empty\n  write the {page.kind} again")
    try:
        value: Value = json.loads(page.text, object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        what, advice = _explain(page, error)
        fail_at(page, Stretch(error.pos, error.pos + 1), what, advice)
    except _RepeatedKeyError as error:
        key = str(error)
        # The key is not found if the file writes it with other escapes.
        start = max(page.text.rfind(json.dumps(key)), 0)
        what = f"the key {key!r} occurs twice"
        fail_at(page, Stretch(start, start + 1), what, "remove one of them")
    except RecursionError:
        raise _limit_error(page, "its lists are nested too deep") from None
    except ValueError:  # Python limits the digits of a number
        raise _limit_error(page, "a number in it is too long") from None
    return value


def _limit_error(page: Page, what: str) -> FileError:
    return FileError(
        f"{page.source} is not a {page.kind}: {what}\n  write the {page.kind} again"
    )


def _unique_keys(pairs: list[tuple[str, Value]]) -> dict[str, Value]:
    entry: dict[str, Value] = {}
    for key, value in pairs:
        if key in entry:
            raise _RepeatedKeyError(key)
        entry[key] = value
    return entry


def _explain(page: Page, error: json.JSONDecodeError) -> tuple[str, str]:
    """What is wrong with the text, and what to do about it."""
    rest = error.doc[error.pos :].strip()
    if error.msg.startswith("Unterminated") or _TRUNCATED_WORD.fullmatch(rest):
        return (
            "the file ends too early",
            "it was cut off while it was written or copied: write or copy it again",
        )
    return (
        f"this is not JSON: {error.msg}",
        f"correct this line, or write the {page.kind} again",
    )


# ---------------------------------------------------------------- writing
class Lines(NamedTuple):
    """An object or a list that is written with an entry a line."""

    entries: Mapping[str, object] | Sequence[object]


def value_text(value: object, depth: int = 0) -> str:
    """A value as JSON, in one line but for `Lines`; `depth` objects and lists of lines are around it."""
    if not isinstance(value, Lines):
        return json.dumps(value)
    margin = "  " * depth
    if isinstance(value.entries, Mapping):
        begin, end = "{}"
        lines = [
            f"{json.dumps(key)}: {value_text(one, depth + 1)}"
            for key, one in value.entries.items()
        ]
    else:
        begin, end = "[]"
        lines = [value_text(one, depth + 1) for one in value.entries]
    text = f",\n{margin}  ".join(lines)
    return f"{begin}\n{margin}  {text}\n{margin}{end}"
