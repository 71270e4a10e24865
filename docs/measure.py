"""Measures how code is written: files, lines, functions, density, repeated names.

python docs/measure.py            print the table of docs/design.md
python docs/measure.py --write    put it into docs/design.md; `make docs` does this
python docs/measure.py FOLDER     print the same figures for any folder

Density is the number of syntax nodes per line: every node of Python's `ast` counts, and every line of a file. A name is
defined twice if two files of a package define it at their top level, as a function, as a class, or by an assignment.
Names with a leading underscore do not count.
"""

from __future__ import annotations

import ast
import importlib.util
import statistics
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parent
PACKAGE = DOCS.parent / "src" / "penstock"
PAGE = DOCS / "design.md"
HEADS = (
    "code",
    "files",
    "lines",
    "median function, lines",
    "nodes per line",
    "names defined twice",
)
# torchgpipe 0.0.7 is not installed here; its figures are those of its repository in September 2020
TORCHGPIPE = ["torchgpipe 0.0.7", "20", "3,050", "8", "about 4", "-"]
BEFORE = ["Penstock before its rooms were rebuilt", "177", "24,089", "6", "8.46", "94"]


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured of a package."""

    files: int
    lines: int
    median_function: float
    nodes_per_line: float
    names_twice: int

    def row(self, name: str) -> list[str]:
        """The figures as cells of a table."""
        return [
            name,
            str(self.files),
            f"{self.lines:,}",
            f"{self.median_function:g}",
            f"{self.nodes_per_line:.2f}",
            str(self.names_twice),
        ]


def sizes_of(folder: Path) -> Sizes:
    """Measures all Python files below a folder."""
    lines = 0
    nodes = 0
    functions: list[int] = []
    names: Counter[str] = Counter()
    files = sorted(folder.rglob("*.py"))
    for file in files:
        text = file.read_text(encoding="utf-8")
        tree = ast.parse(text)
        lines += text.count("\n")
        names.update(public_names(tree))
        for node in ast.walk(tree):
            nodes += 1
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions.append((node.end_lineno or node.lineno) - node.lineno + 1)
    twice = sum(1 for count in names.values() if count > 1)
    return Sizes(len(files), lines, statistics.median(functions), nodes / lines, twice)


def public_names(tree: ast.Module) -> set[str]:
    """The names without an underscore that a file defines at its top level."""
    names = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {
                target.id for target in node.targets if isinstance(target, ast.Name)
            }
    return {name for name in names if not name.startswith("_")}


def torch_pipelining() -> Path:
    """The folder of torch's own pipelining, found without importing torch."""
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    return Path(torch.origin).parent / "distributed" / "pipelining"


def torch_version() -> str:
    """The version of the installed torch, without its build."""
    from importlib.metadata import version  # noqa: PLC0415

    return version("torch").partition("+")[0]


def all_rows() -> list[list[str]]:
    """The rows of the table: torchgpipe, torch, and Penstock before and now."""
    peer = sizes_of(torch_pipelining())
    return [
        TORCHGPIPE,
        peer.row(f"torch.distributed.pipelining {torch_version()}"),
        BEFORE,
        sizes_of(PACKAGE).row("Penstock now"),
    ]


def table(rows: list[list[str]]) -> str:
    """The rows as a Markdown table."""
    rule = ["---", *["--:"] * (len(HEADS) - 1)]
    lines = [f"| {' | '.join(cells)} |" for cells in [list(HEADS), rule, *rows]]
    return "\n".join(lines)


def write() -> None:
    """Replace the table between the markers of docs/design.md."""
    begin, end = "<!-- sizes -->", "<!-- /sizes -->"
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(begin)
    after = rest.partition(end)[2]
    text = f"{before}{begin}\n{table(all_rows())}\n{end}{after}"
    PAGE.write_text(text, encoding="utf-8", newline="\n")


def main() -> None:
    """Print the table or the figures of one folder, or write the table."""
    argument = sys.argv[1] if len(sys.argv) > 1 else ""
    if argument == "--write":
        write()
    elif argument:
        sys.stdout.write(table([sizes_of(Path(argument)).row(argument)]) + "\n")
    else:
        sys.stdout.write(table(all_rows()) + "\n")


if __name__ == "__main__":
    main()
