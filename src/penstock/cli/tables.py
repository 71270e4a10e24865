"""What the command line shows and writes: tables, JSON, files and progress; and what Ctrl-C does during a search."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from errno import ENOSPC
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from penstock.errors import FileError

COLUMN_GAP = 2  # spaces between two columns; the two edges of a table take as much
INTERRUPTED = 130  # exit code after Ctrl-C


def write(output: Path, text: str, quiet: bool = False) -> None:
    """Write a text to a file, and say so on stderr unless `quiet`."""
    try:
        output.write_text(text, encoding="utf-8", newline="")
    except OSError as error:
        hint = "name a file in a folder that exists"
        if error.errno == ENOSPC:
            hint = "free some space there"
        raise FileError(f"cannot write {output}: {error.strerror}\n  {hint}") from None
    if not quiet:
        print_plain(f"wrote {output}", stderr=True)


def console(stderr: bool = False) -> Console:
    """Return a console on stdout or stderr."""
    return Console(stderr=stderr)


def print_plain(text: str, stderr: bool = False) -> None:
    """Print a text as it is: no markup, no highlights, no wrapping."""
    console(stderr).print(text, highlight=False, markup=False, soft_wrap=True)


def tell(topic: str, text: str) -> None:
    """Print a line to stderr: its topic, then the text."""
    line = f"[dim]{topic:<9}[/] {escape(text)}"
    console(stderr=True).print(line, highlight=False, soft_wrap=True)


@contextmanager
def progress(activity: str) -> Iterator[Callable[[str], None]]:
    """Show what is going on, in a terminal only. Yields a function that says what goes on now."""
    screen = console(stderr=True)
    if not screen.is_terminal:
        yield lambda text: None
        return
    with screen.status(activity) as status:
        yield status.update


@contextmanager
def counting(
    activity: str, seconds: float = 10.0
) -> Iterator[Callable[[int, int], None]]:
    """Like `progress`, for work that reports how much of it is done.

    In a log it prints a line every few `seconds`.
    """
    screen = console(stderr=True)
    last_line = time.monotonic()
    with progress(activity) as show_text:

        def show(done: int, total: int) -> None:
            nonlocal last_line
            text = f"{activity}: {done / max(total, 1):.0%}"
            show_text(text)
            if not screen.is_terminal and time.monotonic() - last_line >= seconds:
                last_line = time.monotonic()
                screen.print(text, highlight=False)

        yield show


def print_json(value: Mapping[str, object]) -> None:
    """Print one JSON object to stdout."""
    sys.stdout.write(json.dumps(value) + "\n")


def print_table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    note: str = "",
    spare: Sequence[str] = (),
) -> None:
    """Print a table, and a note under it. Nothing is ever cut off.

    If the terminal is too narrow, cells wrap between words. If that is not enough, the
    columns named in `spare` are left out, the first one first, and the note says so. As
    a last resort each row becomes a list of lines.
    """
    screen = console()
    for count in range(len(spare) + 1):
        omitted = list(spare[:count])
        kept = [number for number, head in enumerate(heads) if head not in omitted]
        kept_heads = [heads[number] for number in kept]
        kept_rows = [[row[number] for number in kept] for row in rows]
        widths = fitting_widths(kept_heads, kept_rows, screen.width)
        if widths is not None:
            _print_columns(screen, kept_heads, kept_rows, widths)
            break
    else:
        omitted = []
        _print_lists(screen, heads, rows)
    notes = [note] if note else []
    if omitted:
        columns = ", ".join(omitted)
        notes.insert(0, f"no room for {columns}: widen the terminal, or use --json")
    if notes:
        screen.print("\n".join(notes), style="dim", highlight=False)


def _print_columns(
    screen: Console,
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    widths: Sequence[int],
) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for head, width in zip(heads, widths, strict=True):
        table.add_column(head, width=width)
    for row in rows:
        table.add_row(*row)
    screen.print(table)


def _print_lists(
    screen: Console, heads: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    """Print each row as a list of lines, one line for each cell."""
    for row in rows:
        screen.print()
        for head, cell in zip(heads, row, strict=True):
            screen.print(f"{head}: {cell}" if head else cell, markup=False)


def fitting_widths(
    heads: Sequence[str], rows: Sequence[Sequence[str]], room: int
) -> list[int] | None:
    """Return column widths that fit into `room`, or None if nothing fits.

    Cells may wrap, but only between words.

    >>> fitting_widths(("name", "time"), [("a long name", "1.5")], 20)
    [11, 4]
    >>> fitting_widths(("name", "time"), [("a long name", "1.5")], 14)
    [6, 4]
    >>> fitting_widths(("name", "time"), [("a long name", "1.5")], 10)
    """
    columns = list(zip(heads, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    min_widths = [_longest_word(column) for column in columns]
    excess = sum(widths) + COLUMN_GAP * len(widths) - room
    for _ in range(excess):
        shrinkable = [
            number for number, width in enumerate(widths) if width > min_widths[number]
        ]
        if not shrinkable:
            return None
        widest = max(shrinkable, key=lambda number: (widths[number], number))
        widths[widest] -= 1
    return widths


def _longest_word(column: Sequence[str]) -> int:
    words = " ".join(column).split()
    return max(map(len, words), default=0)


# ---------------------------------------------------------------- Ctrl-C
class ShownInterrupt(SystemExit):
    """The exit after Ctrl-C ended a command that has shown its results so far.

    It is an interrupt all the same, so `penstock train && penstock export` does not go on.
    """


@dataclass(slots=True)
class Interrupt:
    """Tells a search to stop once Ctrl-C was pressed."""

    stopped: bool = False

    def __call__(self) -> bool:
        """Whether the search must stop."""
        return self.stopped


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Let the first Ctrl-C end a search, whose command then shows the best plan so far, and a second one the command.

    A script in the background ignores SIGINT, and continues to.
    """
    interrupt = Interrupt()
    before = signal.getsignal(signal.SIGINT)

    def stop(signum: int, frame: object) -> None:
        interrupt.stopped = True
        signal.signal(signal.SIGINT, before)

    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, stop)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
