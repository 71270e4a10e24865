"""TOML in which every key can be found again, for errors with line and column.

`tomllib` says where a text breaks the rules of TOML, but not where the values of a valid
text stand. A scan over the statements of the text finds them:

[[nodes]]             statement 1: the table nodes[0]
site = "Tokyo"        statement 2: the key nodes[0].site
[links]               statement 3: the table links
latency = [           statement 4: the key links.latency; brackets and strings
  [0.0, 0.1],                      may go on over several lines
  [0.1, 0.0],
]
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import NamedTuple

from penstock.errors import FileError
from penstock.formats.text import Page, Steps, Stretch, Value, fail_at

_TOKEN = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}'
    r"|'''.*?'{3,5}"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'[^'\n]*'"
    r"|\#[^\n]*"
    r"|."
    r"|\n",
    re.DOTALL,
)
_KEY_PART = re.compile(r'\s*("(?:[^"\\]|\\.)*"|\'[^\']*\'|[A-Za-z0-9_-]+)\s*')
_PLACE = re.compile(r"\s*\(at line (\d+), column (\d+)\)$")
_END = re.compile(r"\s*\(at end of document\)$")


class TomlPage(Page):
    """A TOML text."""

    __slots__ = ()
    OPENING = 'penstock = "{kind}"'

    def find_value(self, steps: Steps) -> Stretch:
        """Where a value stands, or the statement that holds it."""
        return self._find(steps).value

    def find_key(self, steps: Steps) -> Stretch:
        """Where the key of a value stands, or the statement that holds it."""
        return self._find(steps).key

    def _find(self, steps: Steps) -> _Entry:
        """The entry with these steps; else the nearest one around it."""
        start = Stretch(0, 1)
        best = _Entry((), start, start)
        for entry in _entries(self.text):
            is_around = entry.steps == steps[: len(entry.steps)]
            if is_around and len(entry.steps) > len(best.steps):
                best = entry
        return best


class _Entry(NamedTuple):
    """A table header or a `key = value`."""

    steps: Steps
    key: Stretch
    value: Stretch


def _entries(text: str) -> Iterator[_Entry]:
    table: Steps = ()
    counts: dict[Steps, int] = {}  # tables so far in each list of tables
    for start, end in _statements(text):
        statement = text[start:end]
        stretch = Stretch(start, end)
        if statement.startswith("[["):
            path = _within_lists(_key_parts(statement[2:])[0], counts)
            number = counts.get(path, 0)
            counts[path] = number + 1
            table = (*path, number)
            yield _Entry(table, stretch, stretch)
        elif statement.startswith("["):
            table = _within_lists(_key_parts(statement[1:])[0], counts)
            yield _Entry(table, stretch, stretch)
        else:
            parts, equals = _key_parts(statement)
            key = Stretch(start, start + len(statement[:equals].rstrip()))
            after = statement[equals + 1 :]
            blanks = len(after) - len(after.lstrip())
            value = Stretch(start + equals + 1 + blanks, end)
            yield _Entry((*table, *parts), key, value)


def _statements(text: str) -> Iterator[Stretch]:
    """The statements of a valid text, without comments and blanks around them."""
    depth = 0
    start = -1
    end = -1
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token == "\n" and depth == 0:
            if start >= 0:
                yield Stretch(start, end)
            start = -1
        elif not token.isspace() and not token.startswith("#"):
            if start < 0:
                start = match.start()
            end = match.end()
            if token in "[{":
                depth += 1
            elif token in "]}":
                depth -= 1
    if start >= 0:
        yield Stretch(start, end)


def _key_parts(statement: str) -> tuple[Steps, int]:
    """The parts of a dotted key, and where the key ends."""
    parts: list[str] = []
    here = 0
    while match := _KEY_PART.match(statement, here):
        part = match[1]
        if part[0] in "\"'":
            part = next(iter(tomllib.loads(f"{part} = 0")))
        parts.append(part)
        here = match.end()
        if statement[here : here + 1] != ".":
            break
        here += 1
    return tuple(parts), here


def _within_lists(parts: Steps, counts: dict[Steps, int]) -> Steps:
    """The steps of a header: below a list of tables, it means the last one."""
    steps: Steps = ()
    for part in parts[:-1]:
        steps = (*steps, part)
        if steps in counts:
            steps = (*steps, counts[steps] - 1)
    return (*steps, *parts[-1:])


# ---------------------------------------------------------------- parsing
def parse_toml(page: TomlPage) -> dict[str, Value]:
    """The values of the text, or an error where it is not TOML."""
    try:
        return dict(tomllib.loads(page.text))
    except tomllib.TOMLDecodeError as error:
        what, start = _explain(page.text, str(error))
        stretch = Stretch(start, start + 1)
        fail_at(page, stretch, f"this is not TOML: {what}", _advise(page))
    except (ValueError, RecursionError) as error:  # too many digits or brackets
        raise FileError(f"{page.source}: this is not TOML: {error}") from None


def _advise(page: TomlPage) -> str:
    """What to do about text that is not TOML: perhaps it should not be."""
    if page.kind != "config" or page.source.endswith(".toml"):
        return "correct this line"
    if page.source.endswith(".json"):
        return f"a config is a .toml file; to train with a plan: --set schedule.name={page.source}"
    return (
        "a config is a .toml file; "
        f"to train on the text of this one: --set data.sources={page.source}"
    )


def _explain(text: str, message: str) -> tuple[str, int]:
    """The message of `tomllib` without the place, and the place."""
    place = _PLACE.search(message)
    if place is None:
        return _END.sub(" at the end of the file", message), len(text.rstrip())
    lines = text.split("\n")
    line = int(place[1]) - 1
    column = int(place[2]) - 1
    start = sum(len(above) + 1 for above in lines[:line]) + column
    return message[: place.start()], start


# ---------------------------------------------------------------- writing
def value_text(value: object) -> str:
    """A string, number, flag, list or record as TOML. A record has what is not None or false; zeros count."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if is_dataclass(value):
        given = [(item.name, getattr(value, item.name)) for item in fields(value)]
        return table_text(
            (key, one) for key, one in given if one is not None and one is not False
        )
    if isinstance(value, tuple):
        items = ", ".join(map(value_text, value))
        return f"[{items}]"
    if isinstance(value, str):
        return _string_text(value)
    return repr(value)


def table_text(values: Iterable[tuple[str, object]]) -> str:
    """Keys and values as a table in one line."""
    items = [f"{_key_text(key)} = {value_text(value)}" for key, value in values]
    return f"{{{', '.join(items)}}}"


def _key_text(key: str) -> str:
    return key if key.isidentifier() and key.isascii() else _string_text(key)


def _string_text(text: str) -> str:
    quoted = text.replace("\\", "\\\\").replace('"', '\\"')
    signs = [sign if sign.isprintable() else f"\\U{ord(sign):08x}" for sign in quoted]
    return f'"{"".join(signs)}"'
