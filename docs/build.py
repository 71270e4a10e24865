"""Writes the parts of the documentation that the code knows best. `make docs` runs it.

docs/prose/<name>.md ──┐
FACTS, make, simulate ─┼──► docs/schedules/<name>.md  docs/schedules/README.md
svg ───────────────────┘    docs/images/<name>.svg    docs/images/overview.svg
docstrings of the files ──► docs/files.md, in the site only (docs/website.py writes it)
the command line ─────────► the output below each `$ penstock ...` in a `console` block of a hand-written page

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
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NoReturn

from penstock import REGISTRY, Timeline, UnitCost, lower_bound, make, simulate
from penstock.config import SECTIONS, Config, keys_by_section
from penstock.formats.config_toml import AUTO_RATE, TABLES
from penstock.formats.toml_text import table_text, value_text
from penstock.schedules import shape_of
from penstock.schedules.facts import FACTS
from penstock.view import svg

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PACKAGE = ROOT / "src" / "penstock"
COLUMNS = 92  # width of the terminal in which commands are shown
SIZES = ((4, 4), (4, 8), (8, 8), (8, 16))  # ranks, micro-batches
COMMS = (0.0, 0.05, 0.1)
TABLED = {
    "chunks": (2, 4),
    "waves": (1, 2, 4),
    "slices": (2, 4),
    "skips": (),
}  # shapes in the table of a single schedule
NORM = {"ranks": 8, "microbatches": 16}  # the size at which all schedules are compared
COMPARED = {
    "chunks": 4,
    "waves": 2,
    "slices": 4,
}  # the shape in which they are compared: four stages per rank, or four slices
LETTERS = {
    "ranks": "P",
    "microbatches": "M",
    "chunks": "v",
    "waves": "W",
    "slices": "s",
}  # the letters in the formulas
DRAWN: dict[str, dict[str, int]] = {
    "interleaved": {"ranks": 4, "microbatches": 8, "chunks": 2},
    "hanayo": {"ranks": 4, "microbatches": 4, "waves": 2},
    "interleaved-zb": {"ranks": 4, "microbatches": 8, "chunks": 2},
    "terapipe": {"ranks": 4, "microbatches": 2, "slices": 4},
    "seq1f1b": {"ranks": 4, "microbatches": 2, "slices": 4},
    "skip": {"ranks": 4, "microbatches": 6, "skips": 1},
}  # shapes of the pictures; all others have 4 ranks and 8 micro-batches

MEASURED = """\
Each cell shows the makespan with the bubble in brackets, for three latencies of a hop (`comm`, in units of F).
*Formula* is the makespan that the formula above gives at comm 0. *Bound* is a makespan that no order of the lanes
can beat for these stages, paths and backwards at comm 0. *Peak* is the activation memory of the fullest rank,
counted in micro-batches."""
COMPARES = """\
P is the number of ranks, M of micro-batches, v of chunks, W of waves, s of slices. *Idle time* is what each rank
waits in a step, in units of one forward of a micro-batch on a rank. *Peak* is the activation memory of the fullest
rank, counted in micro-batches. Both formulas assume that B takes twice as long as F and that messages are free. A
star means that the formula holds for some P and M only; the page of the schedule says for which. The two columns
for P = {ranks} and M = {microbatches} come from `penstock simulate` with the shape of the row. *Weights* counts the
copies of the weights. `skip` leaves out work, so its row cannot be compared with the others."""

SETTINGS = """\
# Settings

A config has {count} settings in eight sections. `penstock init` writes the usual ones, `penstock init --all` all of
them; what a config leaves out comes from the preset that its first line names. `--set section.key=value` changes one on
the command line, where a value needs no quotes: `--set optimizer.lr=3e-4 --set schedule.name=hanayo:waves=2,split`. A
value with a shape is written as `name:key=value,...`. The defaults below are those of the preset `tiny`."""

Shape = dict[str, int]


# ---------------------------------------------------------------- the pages
def pages() -> dict[Path, str]:
    """Every generated file with the text that it should have."""
    made = {
        DOCS / "images" / "overview.svg": overview(),
        DOCS / "schedules" / "README.md": index(),
    }
    for name in REGISTRY:
        made[DOCS / "images" / f"{name}.svg"] = picture(name)
        made[DOCS / "schedules" / f"{name}.md"] = page(name)
    for path in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted(DOCS.glob("*.md")),
    ):
        text = path.read_text(encoding="utf-8")
        made[path] = with_output(text)
    made[DOCS / "config.md"] = settings()
    return made


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


def page(name: str) -> str:
    """The page of one schedule."""
    title, works, when = prose(name)
    shape = drawn(name)
    source = f"src/{REGISTRY[name].__module__.replace('.', '/')}.py"
    alt = f"{name}: {shape['ranks']} ranks, {shape['microbatches']} micro-batches"
    return "\n\n".join(
        [
            f"<!-- written by docs/build.py; edit docs/prose/{name}.md -->",
            f"# {title}",
            f"`{name}` · [{source.rpartition('/')[2]}](../../{source}) · {paper(name)} · [all schedules](README.md)",
            f"![{alt}](../images/{name}.svg)",
            f"## How it works\n\n{works}",
            f"## Idle time and memory\n\n{formulas(name)}",
            f"## Simulated\n\n{measured(name)}",
            f"## When to use it, and when not\n\n{when}",
            f"## Reproduce\n\n```sh\n{command('draw', name, shape)} -o {name}.svg\n"
            f"{command('simulate', name, {**NORM, **compared(name)})} --comm 0.05\n```\n",
        ]
    )


def prose(name: str) -> tuple[str, str, str]:
    """The three hand-written pieces of a page: title, how it works, when to use it."""
    text = (DOCS / "prose" / f"{name}.md").read_text(encoding="utf-8")
    found = re.fullmatch(
        r"# (.+?)\n+## How it works\n+(.+?)\n+## When to use it, and when not\n+(.+?)\n*",
        text,
        re.S,
    )
    if found is None:
        raise SystemExit(
            f"docs/prose/{name}.md must have a title, '## How it works' and "
            "'## When to use it, and when not', in this order"
        )
    return found[1], found[2], found[3]


def index() -> str:
    """The page with the table of all schedules."""
    return (
        "<!-- written by docs/build.py -->\n\n# Schedules\n\n"
        "Penstock makes these schedules for any number of ranks and micro-batches (Chimera needs an even number of\n"
        "ranks). Each of them can also be cut into token slices, get split backwards, and be copied.\n\n"
        f"{compared_table()}\n\n"
        "The page of a schedule has a picture, the formulas with their conditions, simulated tables, advice and the\n"
        "paper. All times are simulated with F = 1 and B = 2 for a micro-batch on a rank, and with I = W = 1\n"
        "where B is split.\n"
    )


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


def formulas(name: str) -> str:
    """Idle time, peak and weights, with the condition under which the formulas hold."""
    facts = FACTS[name]
    most = "" if facts.exact else "at most "
    holds = "any P and M" if facts.when == "True" else written(facts.when)
    idle = (
        f"{most}{written(facts.idle)}"
        if facts.idle
        else "no formula, since the paths differ"
    )
    lines = [
        f"- Idle time of a rank: {idle}{' forwards' if facts.idle else ''}",
        f"- Peak activations of the fullest rank: {most}{written(facts.peak)} micro-batches",
        f"- Copies of the weights: {facts.weights}",
        f"- The formulas hold for: {holds}",
    ]
    letters = [
        f"{letter} = {word}"
        for word, letter in LETTERS.items()
        if word in shape_of(name)
    ]
    legend = ", ".join(letters).replace("microbatches", "micro-batches")
    bubble = " The bubble is idle / (3M + idle)." if facts.idle else ""
    return (
        "\n".join(lines)
        + f"\n\nHere {legend}; B takes twice as long as F, and messages are free.{bubble}\n"
        "The tests check these formulas."
    )


def by_formula(name: str, shape: Shape) -> str:
    """The makespan by the formula, or a dash where the formula does not hold."""
    facts = FACTS[name]
    known = {letter: shape.get(word) for word, letter in LETTERS.items()} | {"min": min}
    if not facts.idle or not eval(facts.when, {}, known):
        return "-"
    return f"{'' if facts.exact else '≤ '}{3 * shape['microbatches'] + eval(facts.idle, {}, known):g}"


def measured(name: str) -> str:
    """A table of simulated makespans, bubbles and peaks at small sizes."""
    word = own_word(name)
    heads = [
        "P",
        "M",
        *([word] if word else []),
        *(f"comm {comm:g}" for comm in COMMS),
        "formula",
        "bound",
        "peak",
    ]
    rows = []
    for ranks, microbatches in SIZES:
        for value in TABLED.get(word, ()) or (None,):
            shape = {
                "ranks": ranks,
                "microbatches": microbatches,
                **({} if value is None else {word: value}),
            }
            schedule = make(name, **shape)
            timelines = [simulate(schedule, UnitCost(comm=comm)) for comm in COMMS]
            mine = (
                [str(default_of(name, ranks) if value is None else value)]
                if word
                else []
            )
            times = [
                f"{timeline.makespan:.5g} ({timeline.bubble:.1%})"
                for timeline in timelines
            ]
            bound = f"{lower_bound(schedule, UnitCost()):.5g}"
            found = [*times, by_formula(name, shape), bound, peak_of(timelines[0])]
            rows.append([str(ranks), str(microbatches), *mine, *found])
    return f"{table(heads, rows)}\n\n{MEASURED}"


def compared_table() -> str:
    """A table with one row per schedule, all at the same size."""
    heads = [
        "schedule",
        "shape",
        "idle time",
        "peak",
        f"bubble at P={NORM['ranks']}, M={NORM['microbatches']}",
        f"peak at P={NORM['ranks']}, M={NORM['microbatches']}",
        "weights",
        "paper",
    ]
    rows = []
    for name, facts in FACTS.items():
        shape, timeline = (
            compared(name),
            simulate(make(name, **NORM, **compared(name)), UnitCost()),
        )
        most, star = (
            "" if facts.exact else "≤\u00a0",
            "" if facts.when == "True" else "*",
        )
        rows.append(
            [
                f"[{name}]({name}.md)",
                " ".join(f"{word}={value}" for word, value in shape.items()),
                f"{most}{written(facts.idle)}{star}" if facts.idle else "-",
                f"{most}{written(facts.peak)}{star}",
                f"{timeline.bubble:.1%}",
                peak_of(timeline),
                str(facts.weights),
                paper(name, short=True),
            ]
        )
    return f"{table(heads, rows)}\n\n{COMPARES.format(**NORM)}"


def paper(name: str, short: bool = False) -> str:
    """The authors with a link to the paper. If `short`, the names are the link."""
    form = (
        r"[\1](https://arxiv.org/abs/\2)"
        if short
        else r"\1, [arXiv \2](https://arxiv.org/abs/\2)"
    )
    return re.sub(r"(.+), arXiv (\d{4}\.\d{5})", form, FACTS[name].paper)


def table(heads: list[str], rows: list[list[str]]) -> str:
    """A Markdown table. Columns of numbers are aligned to the right."""
    columns = list(zip(*rows, strict=True))
    right = [all(re.match(r"[\d≤-]", cell) for cell in column) for column in columns]
    rule = ["--:" if numbers else "---" for numbers in right]
    return "\n".join(
        f"| {' | '.join(cells)} |".replace("|  |", "| |")
        for cells in [heads, rule, *rows]
    )


def peak_of(timeline: Timeline) -> str:
    """The activations of the fullest rank."""
    return f"{float(timeline.peak_activations.max()):g}"


# ---------------------------------------------------------------- shapes and commands
def own_word(name: str) -> str:
    """The name of a schedule's third shape parameter, or '' if it has only two."""
    return next(iter(shape_of(name)[2:]), "")


def default_of(name: str, ranks: int) -> int:
    """The number of parts that `skip` leaves out by default."""
    schedule = make(name, ranks=ranks, microbatches=1)
    return schedule.parts - len(schedule.microbatches[0].path)


def drawn(name: str) -> Shape:
    """The shape in which a schedule is drawn."""
    return DRAWN.get(name, {"ranks": 4, "microbatches": 8})


def compared(name: str) -> Shape:
    """The shape parameters with which a schedule enters the comparison, beside its size."""
    return {word: value for word, value in COMPARED.items() if word in shape_of(name)}


def command(verb: str, name: str, shape: Shape) -> str:
    """A command line that the reader can type."""
    return " ".join(
        [
            f"penstock {verb} {name}",
            *(f"--{word} {value}" for word, value in shape.items()),
        ]
    )


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

    All commands of a page run in one folder, which is empty at first.
    """
    with tempfile.TemporaryDirectory() as folder:
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
        printed = run(line, folder) if line.startswith("penstock ") else output
        shown += f"$ {line}\n{printed}"
    return shown


def run(line: str, folder: Path) -> str:
    """The output of a command, without trailing spaces and without empty lines around it.

    The command runs in a fork of this process, which has most of penstock loaded.
    """
    with tempfile.TemporaryFile() as output:
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            become(shlex.split(line, comments=True)[1:], folder, output.fileno())
        _, status = os.waitpid(pid, 0)
        output.seek(0)
        printed = output.read().decode("utf-8")
    if status != 0:
        raise SystemExit(f"{line}\n{printed}")
    lines = [text.rstrip() for text in printed.splitlines()]
    while lines and not lines[0]:
        del lines[0]
    while lines and not lines[-1]:
        del lines[-1]
    return "".join(f"{text}\n" for text in lines)


def become(words: list[str], folder: Path, output: int) -> NoReturn:
    """Run a command line, given without `penstock`, in this process, and end the process."""
    code = 1
    try:
        os.chdir(folder)
        os.environ.update({"COLUMNS": str(COLUMNS), "NO_COLOR": "1", "TERM": "dumb"})
        for number, stream in ((1, sys.stdout), (2, sys.stderr)):
            os.dup2(output, number)
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
    extra = [f"{word}={value}" for word, value in shape.items() if word not in NORM]
    return svg(simulate(make(name, **shape), UnitCost()), " ".join([name, *extra]))


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
    """Pages and pictures that neither this script nor a benchmark writes any more."""
    present = [
        *(DOCS / "schedules").glob("*"),
        *(DOCS / "images").glob("*"),
        *(DOCS / "prose").glob("*"),
    ]
    results = [
        page.read_text(encoding="utf-8") for page in (DOCS / "results").glob("*.md")
    ]
    linked = {
        DOCS / "images" / name
        for text in results
        for name in re.findall(r"\]\(\.\./images/([^)]+)\)", text)
    }
    known = {*made, *linked, *(DOCS / "prose" / f"{name}.md" for name in REGISTRY)}
    return sorted(path for path in present if path not in known)


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
        sys.stdout.write(f"stray {path.relative_to(ROOT)}: no schedule of that name\n")
    return int(bool(extra or (check and stale)))


if __name__ == "__main__":
    raise SystemExit(main())
