"""What all benchmarks share: their options, machines that take turns, ratios, tables, and the pages that show them.

    python benchmarks/NAME.py              measures everything, prints the tables, and puts them into the page
    python benchmarks/NAME.py --quick      tries everything once with tiny sizes; writes nothing
    python benchmarks/NAME.py --out FILE   also keeps what was measured, as JSON
    python benchmarks/NAME.py --kept       measures nothing: the tables are those of the committed measurements
    python benchmarks/NAME.py --kept DIR   the same, of measurements in another folder
    python benchmarks/NAME.py --json       prints what was measured as JSON, instead of tables

A script has two functions: `measure(given)` returns what it found as JSON, and `tables(found)` returns Markdown by
the name of a marker. A page of docs/results has prose, and a pair of markers where each table belongs:

    <!-- churn -->
    | between kills | ...
    <!-- /churn -->
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
IMAGES = ROOT / "docs" / "images"
Row = dict[str, Any]
Found = dict[str, Any]
Column = str | Callable[[Row], str]
SCALES = {"m": 1e3, "u": 1e6, "k": 1e-3, "M": 1e-6, "G": 1e-9}


# ---------------------------------------------------------------- numbers
class Spread(NamedTuple):
    """A median, with the quartiles or the range beside it."""

    middle: float
    low: float
    high: float

    def __format__(self, digits: str) -> str:
        middle, low, high = (format(one, digits) for one in self)
        return f"{middle} ({low}-{high})"


def quartiles(values: Sequence[float]) -> Spread:
    """Median and quartiles; with fewer than four values, the range."""
    if len(values) < 4:
        return extremes(values)
    low, middle, high = statistics.quantiles(values, n=4)
    return Spread(middle, low, high)


def extremes(values: Sequence[float]) -> Spread:
    """Median and range."""
    return Spread(statistics.median(values), min(values), max(values))


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """The ratio of each round, so that noise which affects both cancels."""
    return [one / other for one, other in zip(ours, theirs, strict=True)]


def alternate(
    machines: Mapping[str, Callable[[], float]],
    rounds: int,
    cold: int = 1,
    dice: random.Random | None = None,
) -> dict[str, list[float]]:
    """Let machines take turns, and return the seconds that each one says it took; cold rounds do not count.

    With dice, which must be the same on all ranks, every round has another order.
    """
    times: dict[str, list[float]] = {who: [] for who in machines}
    names = list(machines)
    for turn in range(cold + rounds):
        for who in dice.sample(names, len(names)) if dice else names:
            seconds = machines[who]()
            if turn >= cold:
                times[who].append(seconds)
    return times


# ---------------------------------------------------------------- tables
class Cells(Formatter):
    """Formats a row's values as cells.

    `!m` and `!u` show thousandths and millionths, `!k`, `!M` and `!G` thousands, millions and billions, and `!x` takes
    the largest of a list. A list of three numbers is a spread, and None is an empty cell.
    """

    def convert_field(self, value: Any, conversion: str | None) -> Any:
        if conversion == "x":
            return value if value is None else max(value)
        if conversion not in SCALES:
            return super().convert_field(value, conversion)  # type: ignore[arg-type]
        scale = SCALES[conversion]
        if isinstance(value, list | tuple):
            return [scale * one for one in value]
        return value if value is None else scale * value

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None:
            return ""
        if isinstance(value, bool):
            return "yes" if value else "no"
        if isinstance(value, list | tuple) and format_spec:
            value = Spread(*value)
        elif isinstance(value, list | tuple):
            return " ".join(map(str, value))
        return format(value, format_spec)


def table(rows: Iterable[Row], columns: Mapping[str, Column]) -> str:
    """A Markdown table, whose columns are format strings or functions of a row: {"step, ms": "{seconds!m:.1f}"}."""
    cells = Cells()
    lines = [
        [
            column(row) if callable(column) else cells.vformat(column, (), row)
            for column in columns.values()
        ]
        for row in rows
    ]
    rule = ["--:" if _are_numbers(some) else "---" for some in zip(*lines, strict=True)]
    first, *others = [f"| {' | '.join(line)} |" for line in [list(columns), *lines]]
    return "\n".join([first, f"|{'|'.join(rule)}|", *others])


def _are_numbers(cells: Sequence[str]) -> bool:
    """Whether at least half of the cells that say something are numbers."""
    said = [cell for cell in cells if cell not in ("", "-")]
    number = re.compile(r"[-+]?[\d.,]+%?( \(.*)?(, .*)?")
    numbers = [cell for cell in said if number.fullmatch(cell)]
    return 2 * len(numbers) >= len(said)


# ---------------------------------------------------------------- pages
def replaced(page: str, name: str, text: str) -> str | None:
    """The page with this text between the markers of this name; None if it has no such markers."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        return None
    return f"{before}{begin}\n{text}\n{end}{after}"


def stale(pages: Path, tables: Mapping[str, str]) -> list[str]:
    """The names of tables for which a page in this folder shows something else."""
    texts = [page.read_text(encoding="utf-8") for page in pages.glob("*.md")]
    return [
        name
        for name, table in tables.items()
        for text in texts
        if replaced(text, name, table) not in (None, text)
    ]


def put(pages: Path, tables: Mapping[str, str]) -> None:
    """Put all tables between their markers, on whichever page of this folder has them."""
    places = dict.fromkeys(tables, 0)
    for page in pages.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        for name, table in tables.items():
            changed = replaced(text, name, table)
            if changed is not None:
                text = changed
                places[name] += 1
        page.write_text(text, encoding="utf-8")
    for name in [name for name, count in places.items() if not count]:
        say(f"no page has a place for this table: <!-- {name} --> <!-- /{name} -->")


# ---------------------------------------------------------------- files
def kept(folder: Path, *names: str) -> list[Row]:
    """The rows of measurements, of several files one after the other."""
    return [row for name in names for row in read(folder / name)["rows"]]


def read(file: Path) -> Found:
    found: Found = json.loads(file.read_text(encoding="utf-8"))
    return found


def write(out: Path | None, found: Found) -> None:
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(found), encoding="utf-8")


def say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def priority() -> str:
    """The scheduling priority of this process, in words."""
    is_real = os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR)
    return "real-time priority" if is_real else "ordinary priority"


# ---------------------------------------------------------------- the command
def words(text: str) -> tuple[str, ...]:
    """Comma-separated words, as the type of an option."""
    return tuple(filter(None, text.split(",")))


def numbers(text: str) -> tuple[int, ...]:
    """Comma-separated numbers, as the type of an option."""
    return tuple(map(int, words(text)))


@dataclass(frozen=True)
class Script:
    """A benchmark: how it measures, and how it shows what it found.

    `keep` reads measurements from a folder. A run with other options than the usual ones writes no page, nor
    does one on a GPU: its measurements are first brought to where the page is.
    """

    about: str | None
    measure: Callable[[argparse.Namespace], Found]
    tables: Callable[[Found], dict[str, str]]
    keep: Callable[[Path], Found] | None = None
    on_gpu: bool = False
    options: Callable[[argparse.ArgumentParser], object] | None = None
    pictures: Callable[[Found], dict[str, str]] | None = None  # by path below docs
    folder: Path = RESULTS / "h200"  # of kept measurements

    def main(self, words: Sequence[str] | None = None) -> None:
        parser = argparse.ArgumentParser(
            description=self.about,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        flag = parser.add_argument
        flag("--quick", action="store_true", help="tiny sizes, once; writes nothing")
        flag("--json", action="store_true", help="print JSON instead of tables")
        flag("--out", type=Path, help="keep what was measured in this file, as JSON")
        if self.keep is not None:
            about = "only tables, of committed measurements or those in a folder"
            folder = self.folder
            flag(
                "--kept", type=Path, nargs="?", const=folder, metavar="DIR", help=about
            )
        shared = set(vars(parser.parse_args([])))
        if self.options is not None:
            self.options(parser)
        given = parser.parse_args(words)
        usual = vars(parser.parse_args([]))
        narrowed = [
            key for key in usual.keys() - shared if vars(given)[key] != usual[key]
        ]
        given.out = given.out and given.out.absolute()
        is_kept = self.keep is not None and given.kept is not None
        if self.keep is not None and is_kept:
            found = self.keep(given.kept)
        else:
            found = self.measure(given)
            write(given.out, found)
        tables = self.tables(found)
        text = json.dumps(found) if given.json else "\n\n".join(tables.values())
        sys.stdout.write(text + "\n")
        if given.quick or narrowed or (self.on_gpu and not is_kept):
            return
        put(RESULTS, tables)
        for name, drawn in (self.pictures(found) if self.pictures else {}).items():
            (ROOT / "docs" / name).write_text(drawn, encoding="utf-8")
