"""One reader and one writer for every text file, and one form for the errors in them.

An error names the file, the line and the column, draws the line with a caret under the
fault, and says what to do:

plan.json:12:19: word 2 of lane 0, '0X1', is not an action

  12 |     "0F0 0F1 0X1 0B0",
                    ^^^
  an action is stage, op F B I or W, micro-batch: 2F0, or sliced 2F0.1

`JsonPage`, `TomlPage` and `CsvPage` know where the values of their text stand.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from errno import ENOSPC
from pathlib import Path
from typing import ClassVar, NamedTuple, NoReturn, TypeAlias

from penstock.errors import FileError, nearest_name

SHOWN_CHARACTERS = 40  # characters of a value that a message shows
DRAWN_CHARACTERS = 60  # characters of a line drawn on each side of a fault

FILE_NAMES = {
    "plan": "plan.json",
    "profile": "profile.json",
    "cluster": "cluster.toml",
    "config": "config.toml",
    "schedule": "schedule.csv",
}

READ_HINTS: dict[type[Exception], str] = {
    IsADirectoryError: "name a file, not a folder",
    PermissionError: "check the permissions of the file",
}

Value: TypeAlias = "dict[str, Value] | list[Value] | str | int | float | bool | None"
Steps: TypeAlias = tuple[str | int, ...]  # ("lanes", 2) leads to the lane of rank 2


class Stretch(NamedTuple):
    """A piece of a text, from character `start` up to, but not including, `end`."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Page(ABC):
    """The text of a file, the file's name, and what it should hold: a key of FILE_NAMES."""

    OPENING: ClassVar[str]  # the first words of a file, with its kind and version
    text: str
    source: str
    kind: str

    @abstractmethod
    def find_value(self, steps: Steps) -> Stretch:
        """Where a value stands."""

    def find_key(self, steps: Steps) -> Stretch:
        """Where the key of a value stands; the value itself if it has no key."""
        return self.find_value(steps)


# ---------------------------------------------------------------- whole files
def read_text(path: str | Path, kind: str = "plan", advice: str = "") -> str:
    """The text of a file in UTF-8, with or without a byte order mark.

    If the file does not exist, the error ends with `advice`.
    """
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileError(
            f"{path} is not text: byte {error.start} is not valid UTF-8\n"
            f"  is it the right file? a {kind} is a text file, {FILE_NAMES[kind]}"
        ) from None
    except (OSError, ValueError) as error:
        missing = advice or f"name a {FILE_NAMES[kind]} that exists"
        hint = READ_HINTS.get(type(error), missing)
        raise FileError(f"cannot read {path}: {_reason(error)}\n  {hint}") from None


def write_text(path: str | Path, text: str) -> None:
    """Write a text to a file, in UTF-8 and with Unix line ends."""
    try:
        Path(path).write_text(text, encoding="utf-8", newline="\n")
    except (OSError, ValueError) as error:
        hint = "name a file in a folder that exists"
        if isinstance(error, OSError) and error.errno == ENOSPC:
            hint = "free some space there"
        raise FileError(f"cannot write {path}: {_reason(error)}\n  {hint}") from None


def put_in_place(file: Path, text: str) -> None:
    """Write a text under another name, and rename it when it is complete; raises OSError.

    A process that is killed meanwhile leaves the old file as it was, and so does a full disk.
    """
    part = file.with_name(f"{file.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(file)
    except OSError:
        with suppress(OSError):
            part.unlink()
        raise


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error)


# ---------------------------------------------------------------- errors in a text
def fail(
    page: Page, steps: Steps, what: str, advice: str, word: int | None = None
) -> NoReturn:
    """Raise the error for a value, or for one word of it."""
    stretch = page.find_value(steps)
    if word is not None:
        stretch = _word(page.text, stretch, word)
    fail_at(page, stretch, what, advice)


def fail_at(page: Page, stretch: Stretch, what: str, advice: str) -> NoReturn:
    """Raise the error for a piece of the text."""
    raise FileError(draw_fault(page, stretch, what, advice))


def draw_fault(page: Page, stretch: Stretch, what: str, advice: str = "") -> str:
    """The message for a piece of the text, with its line drawn."""
    start, end = stretch
    number = page.text.count("\n", 0, start) + 1
    line_start = page.text.rfind("\n", 0, start) + 1
    line = page.text[line_start:].split("\n", 1)[0].rstrip()
    column = start - line_start
    left = max(column - DRAWN_CHARACTERS, 0)
    shown = _printable(line[left : column + DRAWN_CHARACTERS])
    head = f"  {number} | {'...' if left else ''}"
    width = min(end - start, len(line) - column, DRAWN_CHARACTERS)
    margin = " " * (len(head) + column - left)
    carets = "^" * max(width, 1)
    ending = f"\n  {advice}" if advice else ""
    return (
        f"{page.source}:{number}:{column + 1}: {what}\n\n"
        f"{head}{shown}\n"
        f"{margin}{carets}{ending}"
    )


def _printable(text: str) -> str:
    return "".join(sign if sign.isprintable() else " " for sign in text)


def _word(text: str, stretch: Stretch, number: int) -> Stretch:
    """Where a word of a string stands; the whole string if it has too few words."""
    words = re.compile(r"\S+").finditer(text, stretch.start + 1, stretch.end - 1)
    for index, match in enumerate(words):
        if index == number:
            return Stretch(*match.span())
    return stretch


# ---------------------------------------------------------------- words for messages
def value_name(page: Page, steps: Steps) -> str:
    """The name of a value in messages: `microbatches[2].path`."""
    name = ""
    for step in steps:
        name += f"[{step}]" if isinstance(step, int) else f".{step}"
    return name.lstrip(".") or f"the {page.kind}"


def describe_value(value: Value) -> str:
    """A short description of the value that a file has in place of the right one."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    shown = json.dumps(value, default=str)  # TOML has dates, too
    if len(shown) > SHOWN_CHARACTERS:
        shown = f"{shown[:SHOWN_CHARACTERS]}..."
    return shown


def suggest_name(name: str, known: Collection[str]) -> str:
    """Advice for an unknown name: the one that was probably meant, and all of them."""
    near = nearest_name(name, known)
    return suggest([near] if near else [], known)


def suggest(meant: Collection[str], known: Collection[str]) -> str:
    """Advice for an unknown name: those that may have been meant, and all known ones."""
    hint = f"did you mean {' or '.join(map(repr, meant))}? " if meant else ""
    return f"{hint}known: {', '.join(known)}"


def hide_secrets(text: str) -> str:
    """Return a text in which no URL shows a password, or a query, which may have a key in it.

    >>> hide_secrets("cannot read sftp://me:secret@host/run: no such file")
    'cannot read sftp://me:***@host/run: no such file'
    """
    text = re.sub(r"""(://[^/\s:@"']*):[^/\s"']*@""", r"\1:***@", text)
    return re.sub(r"""(://[^\s?"']*\?)[^\s"']+""", r"\1***", text)
