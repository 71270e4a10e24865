"""Writes the parts of the documentation that the code knows best. `make docs` runs it.

FACTS, make, simulate ─────► docs/schedules.md: its table, and the facts of each schedule
svg ───────────────────────► docs/images/<schedule>.svg, docs/images/overview.svg
the settings of a config ──► docs/config.md
the command line ──────────► the output below each `$ penstock ...` in a `console` block of a hand-written page
docstrings of the files ───► docs/files.md   ┐ in the site only
the help of the commands ──► docs/options.md ┘ (docs/website.py writes them)

python docs/build.py            write all files
python docs/build.py --check    write nothing; exit with 1 if a file is out of date
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import re
import shlex
import sys
import tempfile
import traceback
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NoReturn

from click import Parameter

from penstock import REGISTRY, UnitCost, make, simulate
from penstock.cli.app import COMMANDS, load
from penstock.config import SECTIONS, Config, keys_by_section
from penstock.formats.config_toml import AUTO_RATE, TABLES
from penstock.formats.toml_text import table_text, value_text
from penstock.schedules import shape_of
from penstock.schedules.facts import FACTS
from penstock.shaped import write_shape
from penstock.view import svg

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PACKAGE = ROOT / "src" / "penstock"
SCHEDULES = DOCS / "schedules.md"
COLUMNS = 92  # width of the terminal in which commands are shown
CUT = "...\n"  # in an output that is shown: lines are left out here
NORM = {"ranks": 8, "microbatches": 16}  # the size at which all schedules are compared
COMPARED = {
    "chunks": 4,
    "waves": 2,
    "slices": 4,
}  # the shape in which they are compared: four stages per rank, or four slices
DRAWN: dict[str, dict[str, int]] = {
    "interleaved": {"ranks": 4, "microbatches": 8, "chunks": 2},
    "hanayo": {"ranks": 4, "microbatches": 4, "waves": 2},
    "interleaved-zb": {"ranks": 4, "microbatches": 8, "chunks": 2},
    "terapipe": {"ranks": 4, "microbatches": 2, "slices": 4},
    "seq1f1b": {"ranks": 4, "microbatches": 2, "slices": 4},
    "skip": {"ranks": 4, "microbatches": 6, "skips": 1},
}  # shapes of the pictures; all others have 4 ranks and 8 micro-batches

Shape = dict[str, int]


# ---------------------------------------------------------------- the pages
def pages() -> dict[Path, str]:
    """Every file with generated parts, with the text that it should have."""
    made = {
        DOCS / "images" / "overview.svg": overview(),
        DOCS / "config.md": settings(),
    }
    for name in REGISTRY:
        made[DOCS / "images" / f"{name}.svg"] = picture(name)
    for path in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted(DOCS.glob("*.md")),
    ):
        if path not in made:
            made[path] = with_output(path.read_text(encoding="utf-8"))
    made[SCHEDULES] = with_blocks(
        made[SCHEDULES],
        {"table": compared_table()} | {name: facts(name) for name in REGISTRY},
    )
    return made


def with_blocks(text: str, blocks: Mapping[str, str]) -> str:
    """The page with each block between the comments that name it."""
    for name, block in blocks.items():
        text, found = re.subn(
            rf"(?<=<!-- {name} -->\n).*?(?=<!-- /{name} -->)",
            lambda _, block=block: f"{block}\n",
            text,
            flags=re.S,
        )
        if found != 1:
            raise SystemExit(
                f"the page needs <!-- {name} --> and <!-- /{name} --> once"
            )
    return text


def settings() -> str:
    """The page of all settings."""
    parts = [SETTINGS.format(count=sum(map(len, keys_by_section().values())))]
    for name in SECTIONS:
        section = getattr(Config(), name)
        rows = [
            [f"`{item.name}`", f"`{shown(name, item.name)}`", item.metadata["about"]]
            for item in fields(section)
        ]
        sentence = (type(section).__doc__ or "").partition("\n")[0]
        parts += [f"## [{name}]", sentence, table(["key", "default", "meaning"], rows)]
    return "\n\n".join(parts) + "\n"


def shown(section: str, key: str) -> str:
    """The default of a setting, as a config has it."""
    if (section, key) == AUTO_RATE:
        return value_text("auto")
    value = getattr(getattr(Config(), section), key)
    is_table = (section, key) in TABLES
    return table_text(value) if is_table else value_text(value)


SETTINGS = """\
# Settings

A config has {count} settings in eight sections. `penstock init` writes the usual ones, `penstock init --all` all of
them; what a config leaves out comes from the preset that its first line names. `--set section.key=value` changes one
on the command line, where a value needs no quotes: `--set optimizer.lr=3e-4 --set
schedule.name=hanayo:waves=2,split`. A value with a shape is written as `name:key=value,...`. The defaults below are
those of the preset `tiny`."""


# ---------------------------------------------------------------- formulas and tables
def written(formula: str) -> str:
    """Arithmetic as people write it, without line breaks: 1.5*P - 2 becomes 1.5P - 2."""
    for code, sign in (
        ("==", "="),
        (">=", "≥"),
        ("%", "mod"),
        ("*", ""),
        ("-", "\u2212"),
        (" ", "\u00a0"),
    ):
        formula = formula.replace(code, sign)
    return f"`{formula}`"


def facts(name: str) -> str:
    """The picture of a schedule, and its paper, idle time and peak with their condition."""
    of = FACTS[name]
    most = "" if of.exact else "at most "
    holds = "any P and M" if of.when == "True" else written(of.when)
    idle = f"{most}{written(of.idle)}" if of.idle else "no formula"
    file = REGISTRY[name].__module__.replace(".", "/")
    source = f"[{file.rpartition('/')[2]}.py](../src/{file}.py)"
    shape = drawn(name)
    alt = f"{name}: {shape['ranks']} ranks, {shape['microbatches']} micro-batches"
    return (
        f"![{alt}](images/{name}.svg)\n\n"
        f"Idle {idle}, peak {most}{written(of.peak)}, for {holds} · {paper(name)} · {source}"
    )


def compared_table() -> str:
    """A table with one row per schedule, all at the same size."""
    heads = ["schedule", "idle", "peak", "bubble", "peak at 8, 16", "weights"]
    rows = []
    for name, of in FACTS.items():
        shape = compared(name)
        timeline = simulate(make(name, **NORM, **shape), UnitCost())
        most = "" if of.exact else "≤\u00a0"
        star = "" if of.when == "True" else "*"
        rows.append(
            [
                f"[{write_shape(name, shape)}](#{name})",
                f"{most}{written(of.idle)}{star}" if of.idle else "-",
                f"{most}{written(of.peak)}{star}",
                f"{timeline.bubble:.1%}",
                f"{float(timeline.peak_activations.max()):g}",
                str(of.weights),
            ]
        )
    return table(heads, rows)


def paper(name: str) -> str:
    """The authors, as a link to the paper."""
    return re.sub(
        r"(.+), arXiv (\d{4}\.\d{5})",
        r"[\1](https://arxiv.org/abs/\2)",
        FACTS[name].paper,
    )


def table(heads: list[str], rows: list[list[str]]) -> str:
    """A Markdown table. Columns of numbers are aligned to the right."""
    columns = list(zip(*rows, strict=True))
    right = [all(re.match(r"[\d≤-]", cell) for cell in column) for column in columns]
    rule = ["--:" if numbers else "---" for numbers in right]
    return "\n".join(
        f"| {' | '.join(cells)} |".replace("|  |", "| |")
        for cells in [heads, rule, *rows]
    )


def drawn(name: str) -> Shape:
    """The shape in which a schedule is drawn."""
    return DRAWN.get(name, {"ranks": 4, "microbatches": 8})


def compared(name: str) -> Shape:
    """The shape parameters with which a schedule enters the comparison, beside its size."""
    return {word: value for word, value in COMPARED.items() if word in shape_of(name)}


# ---------------------------------------------------------------- parts of hand-written pages
READING_ORDER = (
    "ir/schedule.py",
    "ir/needs.py",
    "schedules/one_f_one_b.py",
    "sim/simulate.py",
    "ir/program.py",
    "runtime/executor.py",
)


def file_tables() -> str:
    """The page of all source files: a heading and a table for each folder of the package."""
    folders: dict[Path, list[Path]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        folders.setdefault(file.parent, []).append(file)
    sections = []
    for folder, files in folders.items():
        name = folder.relative_to(PACKAGE.parent).as_posix()
        rows = [file_row(file) for file in files if file.name != "__init__.py"]
        heading = f"## {name}\n\n{first_sentence(folder / '__init__.py')}"
        sections.append(f"{heading}\n\n{table(['file', 'content'], rows)}")
    return "\n\n".join(["# All files", *sections])


def options() -> str:
    """The page of all commands, with the options of each."""
    commands = {name: load(name) for name in COMMANDS}
    sections = [
        f"## penstock {name}\n\n{command.help}\n\n"
        + table(["option", "meaning"], list(map(option_row, command.params)))
        for name, command in commands.items()
    ]
    return "\n\n".join(["# All options", *sections])


def option_row(one: Parameter) -> list[str]:
    """How an option is written, and its help."""
    names = ", ".join(f"`{word}`" for word in [*one.opts, *one.secondary_opts])
    return [names, " ".join((getattr(one, "help", "") or "").split())]


def file_row(file: Path) -> list[str]:
    """A link to a source file, with its number in the reading order, and its first sentence."""
    inside = file.relative_to(PACKAGE).as_posix()
    link = f"[`{file.name}`](../src/penstock/{inside})"
    if inside in READING_ORDER:
        link = f"**{READING_ORDER.index(inside) + 1}.** {link}"
    return [link, first_sentence(file)]


def first_sentence(file: Path) -> str:
    """The first sentence of a file's docstring, ready for a cell of a table."""
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    sentence = re.split(r"(?<=\.) (?=[A-Z`])", paragraph)[0]
    return sentence.rstrip(":").replace("|", "\\|")


def with_output(text: str) -> str:
    """The page with fresh output below each `$ penstock ...` of its console blocks.

    All commands of a page run in one folder, which has the examples. A line `...` in what is shown stands for
    lines that are left out: as many lines as now stay above and below it.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "examples").symlink_to(ROOT / "examples")
        return re.sub(
            r"(?<=^```console\n).*?(?=^```$)",
            lambda block: _ran(block[0], Path(folder)),
            text,
            flags=re.S | re.M,
        )


def _ran(block: str, folder: Path) -> str:
    parts = re.split(r"^\$ (.+)\n", block, flags=re.M)
    shown = parts[0]
    for line, output in zip(parts[1::2], parts[2::2], strict=True):
        printed = output
        if line.startswith("penstock "):
            printed = shortened(output, run(line, folder))
        shown += f"$ {line}\n{printed}"
    return shown


def shortened(shown: str, printed: str) -> str:
    """What a command printed, with as many lines around a line `...` as are shown.

    >>> shortened("a\\n...\\n", "1\\n2\\n3\\n4\\n")
    '1\\n...\\n'
    """
    lines = shown.splitlines(keepends=True)
    if CUT not in lines:
        return printed
    above = lines.index(CUT)
    below = len(lines) - above - 1
    fresh = printed.splitlines(keepends=True)
    return "".join([*fresh[:above], CUT, *fresh[len(fresh) - below :]])


def run(line: str, folder: Path) -> str:
    """What a command prints to stdout, without trailing spaces and without empty lines around it.

    The command runs in a fork of this process, which has most of penstock loaded.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            words = shlex.split(line, comments=True)[1:]
            become(words, folder, output.fileno(), errors.fileno())
        _, status = os.waitpid(pid, 0)
        for file in (output, errors):
            file.seek(0)
        printed, told = (file.read().decode("utf-8") for file in (output, errors))
    if status != 0:
        raise SystemExit(f"{line}\n{printed}{told}")
    lines = [text.rstrip() for text in printed.splitlines()]
    while lines and not lines[0]:
        del lines[0]
    while lines and not lines[-1]:
        del lines[-1]
    return "".join(f"{text}\n" for text in lines)


def become(words: list[str], folder: Path, output: int, errors: int) -> NoReturn:
    """Run a command line, given without `penstock`, in this process, and end the process."""
    code = 1
    try:
        os.chdir(folder)
        os.environ.update({"COLUMNS": str(COLUMNS), "NO_COLOR": "1", "TERM": "dumb"})
        for number, stream in ((1, sys.stdout), (2, sys.stderr)):
            os.dup2((output, errors)[number - 1], number)
            stream.reconfigure(encoding="utf-8")
        sys.argv = ["penstock", *words]
        cli = importlib.import_module("penstock.cli.app")  # it reads the environment
        cli.main()
        code = 0
    except SystemExit as stopped:
        code = (
            stopped.code if isinstance(stopped.code, int) else int(bool(stopped.code))
        )
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


# ---------------------------------------------------------------- pictures
SVG = "{http://www.w3.org/2000/svg}"
SCALE = 40.0  # pixels per unit of time in the overview


def picture(name: str) -> str:
    """A schedule as `penstock draw` draws it."""
    shape = drawn(name)
    own = {word: value for word, value in shape.items() if word not in NORM}
    return svg(simulate(make(name, **shape), UnitCost()), write_shape(name, own))


@dataclass(frozen=True, slots=True)
class Strip:
    """A figure whose time axis has `SCALE` pixels per unit."""

    figure: ET.Element
    width: float
    height: float


def overview() -> str:
    """Two schedules, one above the other, on the same time axis."""
    ET.register_namespace("", SVG[1:-1])
    size = {"ranks": 4, "microbatches": 4}
    strips = [
        strip("1F1B", "1f1b", size),
        strip("Hanayo, two waves", "hanayo", {**size, "waves": 2}),
    ]
    legend = strips[0].figure.find(f"{SVG}g[@class='legend']")
    assert legend is not None
    strips[0].figure.remove(legend)
    facts = strips[0].figure.findall(f"{SVG}text")[-1]
    facts.set("y", f"{float(facts.get('y', 0)) - 24:g}")
    first = strips[0].height - 18
    width, height = max(one.width for one in strips), first + strips[1].height
    size_of = {
        "viewBox": f"0 0 {width:g} {height:g}",
        "width": f"{width:g}",
        "height": f"{height:g}",
    }
    whole = ET.Element(f"{SVG}svg", {**size_of, "role": "img"})
    ET.SubElement(
        whole, f"{SVG}title"
    ).text = "1F1B above Hanayo with two waves, on one time axis"
    ET.SubElement(
        whole, f"{SVG}rect", {"width": "100%", "height": "100%", "fill": "#ffffff"}
    )
    for one, top in zip(strips, (0.0, first), strict=True):
        one.figure.set("y", f"{top:g}")
        whole.append(one.figure)
    return ET.tostring(whole, encoding="unicode") + "\n"


def strip(title: str, name: str, shape: Shape) -> Strip:
    """A figure stretched along its time axis. The letters keep their width."""
    timeline = simulate(make(name, **shape), UnitCost())
    figure = ET.fromstring(svg(timeline, title))
    row = figure.findall(f"{SVG}rect")[1]  # the first is the background
    left, wide = float(row.get("x", 0)), float(row.get("width", 0))
    factor = SCALE * timeline.makespan / wide

    def moved(x: float) -> str:
        return f"{round(left + (x - left) * factor, 2):g}"

    boxes = [
        *figure.findall(f"{SVG}rect")[1:],
        *figure.findall(f"{SVG}g[@class='spans']/{SVG}rect"),
    ]
    labels = [
        word
        for group in ("numbers", "time")
        for word in figure.findall(f"{SVG}g[@class='{group}']/{SVG}text")
    ]
    for element in [*boxes, *labels]:
        element.set("x", moved(float(element.get("x", 0))))
    for element in boxes:
        element.set("width", f"{round(float(element.get('width', 0)) * factor, 2):g}")
    for axis in figure.findall(f"{SVG}path"):
        line = re.sub(
            r"M([\d.]+)", lambda x: "M" + moved(float(x[1])), axis.get("d", "")
        )
        axis.set(
            "d",
            re.sub(
                r"h([\d.]+)", lambda x: f"h{round(float(x[1]) * factor, 2):g}", line
            ),
        )
    width = float(figure.get("width", 0)) + wide * (factor - 1)
    figure.set("width", f"{width:g}")
    figure.attrib.pop("viewBox")
    return Strip(figure, width, float(figure.get("height", 0)))


# ---------------------------------------------------------------- writing
def strays(made: dict[Path, str]) -> list[Path]:
    """Pictures that neither this script writes nor a page of results shows."""
    results = [
        page.read_text(encoding="utf-8") for page in (DOCS / "results").glob("*.md")
    ]
    linked = {
        DOCS / "images" / name
        for text in results
        for name in re.findall(r"\]\(\.\./images/([^)]+)\)", text)
    }
    return sorted({*(DOCS / "images").glob("*")} - {*made} - linked)


def words(text: str) -> str:
    """The words of a text, without spacing and without the rules of tables."""
    return " ".join(text.replace("─", " ").split())


def main() -> int:
    """Write the files, or only compare them."""
    parser = argparse.ArgumentParser(description="Write the generated documentation.")
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; exit with 1 if a file is out of date",
    )
    check = parser.parse_args().check
    made = pages()
    old = {
        path: path.read_text(encoding="utf-8") if path.exists() else "" for path in made
    }
    # another version of rich may use other spaces in a table
    same = words if check else str
    stale = [path for path, text in made.items() if same(old[path]) != same(text)]
    for path in stale:
        sys.stdout.write(f"{'stale' if check else 'wrote'} {path.relative_to(ROOT)}\n")
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(made[path], encoding="utf-8", newline="\n")
    extra = strays(made)
    for path in extra:
        sys.stdout.write(f"stray {path.relative_to(ROOT)}: no page shows it\n")
    return int(bool(extra or (check and stale)))


if __name__ == "__main__":
    raise SystemExit(main())
