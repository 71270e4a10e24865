"""What the command line shows and writes: tables, JSON, files, a line of progress. Rich is imported when needed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from errno import ENOSPC
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import FileError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status


def write(output: Path, text: str, quiet: bool = False) -> None:
    """A text to a file, and a word of it to stderr."""
    try:
        output.write_text(text, encoding="utf-8", newline="")
    except OSError as error:
        hint = "make room" if error.errno == ENOSPC else "name a file in a folder that exists"
        raise FileError(f"cannot write {output}: {error.strerror}\n  {hint}") from None
    if not quiet:
        console(stderr=True).print(f"wrote {output}", highlight=False, markup=False, soft_wrap=True)


def console(stderr: bool = False) -> Console:
    """Where things are shown."""
    from rich.console import Console

    return Console(stderr=stderr)


def tell(name: str, words: str) -> None:
    """A line to stderr: what it is about, and the words."""
    from rich.markup import escape

    console(stderr=True).print(f"[dim]{name:<9}[/] {escape(words)}", highlight=False, soft_wrap=True)


def progress(what: str) -> AbstractContextManager[Status | None]:
    """A line that says what is going on, on a terminal only."""
    screen = console(stderr=True)
    return screen.status(what) if screen.is_terminal else nullcontext()


@contextmanager
def counting(what: str, every: float = 10.0) -> Iterator[Callable[[int, int], None]]:
    """Like `progress`, for work that says how much of it is done; in a log a line every so many seconds."""
    screen = console(stderr=True)
    said = time.monotonic()
    with progress(what) as status:

        def tell(done: int, total: int) -> None:
            nonlocal said
            words = f"{what}: {done / max(total, 1):.0%}"
            if status is not None:
                status.update(words)
            elif time.monotonic() - said >= every:
                said = time.monotonic()
                screen.print(words, highlight=False)

        yield tell


def print_json(value: dict[str, object]) -> None:
    """One JSON object to stdout."""
    import json

    sys.stdout.write(json.dumps(value) + "\n")


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> None:
    """A table, and a note under it."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for head, width in zip(heads, widths, strict=True):  # where there is no room, the widest column gives way
        table.add_column(head, no_wrap=True, min_width=None if width == max(widths) else width)
    for row in rows:
        table.add_row(*row)
    console().print(table)
    if note:
        console().print(note, style="dim", highlight=False)
