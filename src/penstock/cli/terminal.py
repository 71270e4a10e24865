"""How commands take options and show results: records of options, tables, JSON, files, progress, and Ctrl-C.

A command takes dataclasses, and each of their fields is an option with its help and its range:

    @dataclass(frozen=True, slots=True)
    class Sizes:
        pp: int | None = option(None, "Ranks of the pipeline.", least=1)

    def draw(source: Source, sizes: Sizes) -> None:      penstock draw SOURCE --pp 2

`flattened` gives typer a function with a parameter for each field, and the command its records. Options that several
commands share are here, and so is what a shell completes of their values: a function gets the letters that are already
there and returns the words that fit. If it returns none, the shell completes names of files.
"""

from __future__ import annotations

import inspect
import json
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field, fields, is_dataclass
from importlib import import_module
from itertools import product
from pathlib import Path
from threading import Event
from types import MappingProxyType
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from penstock.config import broken_limits, keys_by_section, limits_of
from penstock.errors import ShapeError

Value = TypeVar("Value")
# In help texts. Importing the presets themselves would delay every command.
PRESET_NAMES = "tiny, llama-150m, llama-1b, gpt2 or bert-base"
MODEL_HELP = (
    "A config.toml, the folder of a run, the folder or the config.json of a Hugging Face model, or a preset: "
    f"{PRESET_NAMES}."
)
JSON_VERSION = 1  # of what --json prints; a change that breaks a reader raises it
LINE_SECONDS = 5.0  # between two lines of progress in a log
BAR_WIDTH = 10
# Spaces between two columns, and if the terminal is narrow; the two edges of a table take as much.
COLUMN_GAPS = (2, 1)
RESUME_AUTO = "--resume-auto"  # stands for --resume=auto, because an option has a value always or never
INTERRUPTED = 130  # exit code after Ctrl-C


# ---------------------------------------------------------------- records
def option(
    default: Value,
    about: str,
    *names: str,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    **shown: Any,
) -> Value:
    """Declare a field that is an option: its default, its meaning, its range, and how typer shows it."""
    facts = {
        "typer": typer.Option(*names, help=about or None, **shown),
        "flag": next((name for name in names if name.startswith("--")), ""),
        "limits": limits_of(least, above, most),
    }
    value: Value = field(default=default, metadata=MappingProxyType(facts))
    return value


def given(options: object) -> dict[str, Any]:
    """The options of a record that differ from their defaults, by their names on the command line."""
    found = {}
    for item in fields(options):  # type: ignore[arg-type]
        value = getattr(options, item.name)
        if value != item.default:
            found[_flag(item)] = value
    return found


def refuse(options: Iterable[str], text: str) -> None:
    """Refuse the first of these options, if there is one; the text names it wherever it has `{option}`."""
    for name in options:
        raise ShapeError(text.format(option=name))


def flattened(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer wants it: with a parameter for each field of its records."""
    records: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    hints = get_type_hints(command, include_extras=True)
    for one in inspect.signature(command).parameters.values():
        kind = hints[one.name]
        if is_dataclass(kind):
            records[one.name] = kind
            parameters += _parameters_of(kind)
        else:
            keyword = one.replace(kind=one.KEYWORD_ONLY, annotation=kind)
            parameters.append(keyword)

    def call(**values: Any) -> None:
        made = {}
        for name, kind in records.items():
            own = {item.name: values.pop(item.name) for item in fields(kind)}
            made[name] = kind(**own)
            _refuse_out_of_range(made[name])
        command(**values, **made)

    shape: Any = call
    shape.__signature__ = inspect.Signature(parameters)
    shape.__annotations__ = {one.name: one.annotation for one in parameters}
    return call


def _parameters_of(record: Any) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(record)
    annotated: Any = Annotated
    for item in fields(record):
        kind = annotated[hints[item.name], item.metadata["typer"]]
        yield inspect.Parameter(
            item.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=item.default,
            annotation=kind,
        )


def _refuse_out_of_range(options: Any) -> None:
    """Refuse a number that is not in the range of its option."""
    for item in fields(options):
        value = getattr(options, item.name)
        limits = item.metadata["limits"]
        if value is not None and broken_limits(value, limits):
            wanted = " and ".join(f"{words} {one:g}" for words, one in limits.items())
            raise ShapeError(f"{_flag(item)} must be {wanted}, not {value:g}")


def _flag(item: Any) -> str:
    return item.metadata["flag"] or f"--{item.name.replace('_', '-')}"


# ---------------------------------------------------------------- what a shell completes
def beginning(place: str) -> Callable[[str], list[str]]:
    """A completion of the names that a module has as `module:names`. It is imported when somebody presses Tab."""

    def complete(begin: str) -> list[str]:
        module, _, names = place.partition(":")
        known = getattr(import_module(f"penstock.{module}"), names)
        return [name for name in known if name.startswith(begin)]

    return complete


def complete_change(begin: str) -> list[str]:
    """Keys of a config, as section.key=."""
    keys = [
        f"{section}.{key}="
        for section, keys in keys_by_section().items()
        for key in keys
    ]
    return [key for key in keys if key.startswith(begin)]


# ---------------------------------------------------------------- options that commands share
JsonFlag = Annotated[
    bool, typer.Option("--json", help="Print one JSON object to stdout.")
]
OutputFile = Annotated[
    Path | None, typer.Option("-o", "--output", help="The file to write.")
]
ConfigChanges = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Change a value of the config: section.key=value. May be repeated.",
        autocompletion=complete_change,
    ),
]


# ---------------------------------------------------------------- what is shown and written
def write(output: Path, text: str, quiet: bool = False) -> None:
    """Write a text to a file, and say so on stderr unless `quiet`."""
    # It loads numpy, which --help does not need.
    from penstock.formats.text import write_text

    write_text(output, text)
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
    """Show what is going on: in the last line of a terminal, in a log as a line every five seconds.

    Yields a function that says what goes on now.
    """
    screen = console(stderr=True)
    if screen.is_terminal:
        with screen.status(activity) as status:
            yield status.update
        return
    last_line = time.monotonic()

    def show(text: str) -> None:
        nonlocal last_line
        if time.monotonic() - last_line >= LINE_SECONDS:
            last_line = time.monotonic()
            screen.print(text, highlight=False, markup=False, soft_wrap=True)

    yield show


@contextmanager
def counting(activity: str) -> Iterator[Callable[[int, int], None]]:
    """Like `progress`, for work that reports how much of it is done."""
    with progress(activity) as show:
        yield lambda done, total: show(f"{activity}: {done / max(total, 1):.0%}")


def bar(share: float) -> str:
    """Draw a share of some work.

    >>> bar(0.4)
    '████······ 40%'
    """
    full = int(share * BAR_WIDTH)
    return f"{'█' * full}{'·' * (BAR_WIDTH - full)} {share:.0%}"


def print_json(value: Mapping[str, object]) -> None:
    """Print one JSON object to stdout, with the version of its format."""
    sys.stdout.write(json.dumps({"version": JSON_VERSION, **value}) + "\n")


def print_table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    note: str = "",
    spare: Sequence[str] = (),
) -> None:
    """Print a table, and a note under it. Nothing is ever cut off.

    If the terminal is too narrow, cells wrap between words, and columns move closer. If that is not enough, the
    columns named in `spare` are left out, the first one first, and the note says so. As
    a last resort each row becomes a list of lines.
    """
    screen = console()
    for count, gap in product(range(len(spare) + 1), COLUMN_GAPS):
        omitted = list(spare[:count])
        kept = [number for number, head in enumerate(heads) if head not in omitted]
        kept_heads = [heads[number] for number in kept]
        kept_rows = [[row[number] for number in kept] for row in rows]
        widths = fitting_widths(kept_heads, kept_rows, screen.width, gap)
        if widths is not None:
            _print_columns(screen, kept_heads, kept_rows, widths, gap)
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
    gap: int,
) -> None:
    # The box puts one space between columns.
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, gap - 1, 0, 0))
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
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    room: int,
    gap: int = COLUMN_GAPS[0],
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
    words = [" ".join(column).split() for column in columns]
    widths = [max(map(len, column)) for column in columns]
    min_widths = [max(map(len, column), default=0) for column in words]
    excess = sum(widths) + gap * len(widths) - room
    for _ in range(excess):
        shrinkable = [
            number for number, width in enumerate(widths) if width > min_widths[number]
        ]
        if not shrinkable:
            return None
        widest = max(shrinkable, key=lambda number: (widths[number], number))
        widths[widest] -= 1
    return widths


# ---------------------------------------------------------------- Ctrl-C
class ShownInterrupt(SystemExit):
    """The exit after Ctrl-C ended a command that has shown its results so far.

    It is an interrupt all the same, so `penstock train && penstock export` does not go on.
    """


@contextmanager
def interruptible() -> Iterator[Event]:
    """Let the first Ctrl-C end a search, whose command then shows the best plan so far, and a second one the command.

    A script in the background ignores SIGINT, and continues to.
    """
    interrupt = Event()
    before = signal.getsignal(signal.SIGINT)

    def stop(signum: int, frame: object) -> None:
        interrupt.set()
        signal.signal(signal.SIGINT, before)

    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, stop)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
