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
        hint = (
            "make room"
            if error.errno == ENOSPC
            else "name a file in a folder that exists"
        )
        raise FileError(f"cannot write {output}: {error.strerror}\n  {hint}") from None
    if not quiet:
        console(stderr=True).print(
            f"wrote {output}", highlight=False, markup=False, soft_wrap=True
        )


def console(stderr: bool = False) -> Console:
    """Where things are shown."""
    from rich.console import Console

    return Console(stderr=stderr)


def tell(name: str, words: str) -> None:
    """A line to stderr: what it is about, and the words."""
    from rich.markup import escape

    console(stderr=True).print(
        f"[dim]{name:<9}[/] {escape(words)}", highlight=False, soft_wrap=True
    )


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


def print_table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    note: str = "",
    spare: Sequence[str] = (),
) -> None:
    """A table, and a note under it.

    Nothing is ever cut. Where there is too little room, texts wrap between words; if that is not enough, the columns
    named in `spare` are left out, the first one first, and the note says so; at last each row becomes a list of lines.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    screen = console()
    for count in range(len(spare) + 1):
        gone = list(spare[:count])
        kept = [number for number, head in enumerate(heads) if head not in gone]
        widths = fitting_widths(
            [heads[n] for n in kept],
            [[row[n] for n in kept] for row in rows],
            screen.width,
        )
        if widths is not None:
            break
    if widths is None:
        gone = []
        for row in rows:
            lines = [
                f"{head}: {cell}" if head else cell
                for head, cell in zip(heads, row, strict=True)
            ]
            screen.print("\n" + "\n".join(lines), markup=False)
    else:
        table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for number, width in zip(kept, widths, strict=True):
            table.add_column(heads[number], width=width)
        for row in rows:
            table.add_row(*(row[number] for number in kept))
        screen.print(table)
    if gone:
        note = f"no room for {', '.join(gone)}: widen the terminal, or use --json" + (
            f"\n{note}" if note else ""
        )
    if note:
        screen.print(note, style="dim", highlight=False)


def fitting_widths(
    heads: Sequence[str], rows: Sequence[Sequence[str]], room: int
) -> list[int] | None:
    """Widths of columns that fit into the room, with texts wrapped between words if they must; None: nothing fits.

    >>> fitting_widths(("name", "time"), [("a long name", "1.5")], 20)
    [11, 4]
    >>> fitting_widths(("name", "time"), [("a long name", "1.5")], 14)
    [6, 4]
    >>> fitting_widths(("name", "time"), [("a long name", "1.5")], 10)
    """
    columns = list(zip(heads, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    least = [
        max((len(word) for cell in column for word in cell.split()), default=0)
        for column in columns
    ]
    over = (
        sum(widths) + 2 * len(widths) - room
    )  # two edges, and two spaces between columns
    while over > 0:
        slack = [width - small for width, small in zip(widths, least, strict=True)]
        if not any(slack):
            return None
        widest = max(
            (width, number) for number, width in enumerate(widths) if slack[number]
        )[1]
        widths[widest] -= 1
        over -= 1
    return widths
