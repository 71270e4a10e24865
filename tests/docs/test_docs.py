"""The docs are what the code draws and prints, and what they show works."""

from __future__ import annotations

import doctest
import pkgutil
import re
import sys
from importlib import import_module
from pathlib import Path

import pytest

from commands import called, environment
from forked import Command
from penstock import REGISTRY
from penstock.cli.app import COMMANDS
from test_imports import LIBRARIES, ROOMS

ROOT = Path(__file__).resolve().parents[2]
# Their commands are run by test_guides.py.
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
PAGES = sorted(
    page
    for folder in (ROOT, ROOT / "benchmarks", ROOT / "notes")
    for page in folder.glob("*.md")
)
PAGES += sorted((ROOT / "docs").rglob("*.md"))
MOST_PAGES, MOST_WORDS = 45, 45_000  # of the README and docs/
# What a page sets itself wins.
SHORT = "--set data.seq_len=32"
FEW_PLANS = (
    "--set model.layers=4 --set data.global_batch=4"  # for a run that is planned
)
GIVEN_PLAN = "--set run.checks=gradients,memory"
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.S | re.M)


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, *languages: str) -> list[str]:
    return [
        text
        for _, language, text in BLOCK.findall(page.read_text(encoding="utf-8"))
        if language in languages
    ]


def without_code(page: Path, inline: bool = True) -> str:
    """The text of a page without its code blocks and, if `inline`, without code inside of lines."""
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    return re.sub(r"`[^`\n]+`", "`code`", text) if inline else text


def commands(page: Path) -> list[str]:
    """The lines of a page's scripts that call penstock; docs/build.py runs those that are shown with their output."""
    lines = [line for block in blocks(page, "sh") for line in block.splitlines()]
    return [
        line
        for line in (line.strip() for line in lines)
        if line.startswith("penstock ")
    ]


def arguments(line: str) -> str:
    """The arguments of a shown command, with less to do for a new run."""
    return shortened(line.replace("\\\n", " ")).removeprefix("penstock ")


def shortened(line: str) -> str:
    """A shown command with short sequences for a new run, and with few plans to compare.

    What is measured is measured once. A run with a given plan goes without a forecast.
    """
    if "--resume" in line:
        return line
    less = f"{SHORT} {GIVEN_PLAN if 'schedule.name=' in line else FEW_PLANS}"
    return line.replace("penstock train ", f"penstock train {less} ", 1)


# ---------------------------------------------------------------- what the code draws and prints
def test_docs_are_what_the_code_draws() -> None:
    script = ROOT / "docs" / "build.py"
    done = Command(ROOT, ["--check"], environment(), script=script)
    out, err = done.communicate()
    assert done.returncode == 0, (
        f"run `make docs` and look at what changed:\n{out}{err}"
    )


@pytest.mark.parametrize(
    "page", [page for page in PAGES if commands(page) and page not in GUIDES], ids=named
)
def test_every_command_that_is_shown_runs(
    page: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in {
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "100",
    }.items():
        monkeypatch.setenv(name, value)
    for line in commands(page):
        code, out, err = called(monkeypatch, capsys, arguments(line))
        assert code == 0, f"{line}\n{out}{err}"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "pycon")], ids=named
)
def test_python_that_is_shown_prints_what_is_shown(page: Path) -> None:
    """As doctest has it, except that output may contain empty lines: a block ends where its fence does."""
    examples = []
    for block in blocks(page, "pycon"):
        for source, want in re.findall(
            r"^>>> (.*\n(?:\.\.\.(?: .*)?\n)*)((?:(?!>>> ).*\n)*)", block, re.M
        ):
            error = want.partition("\n")[2] if want.startswith("Traceback") else None
            code = re.sub(r"^\.\.\. ?", "", source, flags=re.M)
            examples.append(doctest.Example(code, want, exc_msg=error))
    assert examples
    runner = doctest.DocTestRunner(verbose=False)
    printed: list[str] = []
    runner.run(
        doctest.DocTest(examples, {}, named(page), str(page), 0, ""), out=printed.append
    )
    assert not runner.failures, "".join(printed)


# ---------------------------------------------------------------- what they name
def test_the_documentation_stays_short() -> None:
    pages = [page for page in PAGES if page.is_relative_to(ROOT / "docs")]
    words = sum(len(page.read_text(encoding="utf-8").split()) for page in pages)
    assert len(pages) <= MOST_PAGES
    assert words <= MOST_WORDS


def test_the_readme_is_short_and_in_order() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 900
    assert "make demo" in text
    assert "make test" in text
    assert re.findall(r"^## (.+)$", text, re.M) == [
        "Status",
        "Install",
        "When you do not need a pipeline",
        "Three results",
        "Your own schedule",
        "Penstock and your framework",
        "Read on",
        "License",
    ]


def test_the_schedule_of_the_readme_is_that_of_the_example() -> None:
    (lines,) = blocks(ROOT / "README.md", "python")
    assert lines in (ROOT / "examples" / "own_schedule.py").read_text(encoding="utf-8")


def test_every_command_is_on_the_page_of_commands() -> None:
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert [name for name in COMMANDS if f"`penstock {name}" not in page] == []


def test_every_result_of_the_readme_names_its_script_and_its_page() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme.partition("## Three results")[2].partition("\n## ")[0]
    items = re.split(r"^- ", section, flags=re.M)[1:]
    assert len(items) == 3
    for item in items:
        assert re.search(r"\]\(docs/results/\w+\.md#", item)
        assert re.search(r"\[script\]\(benchmarks/[\w/]+\.py\)", item)


def test_a_shortened_output_keeps_its_first_and_last_lines(monkeypatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    monkeypatch.delitem(sys.modules, "build", raising=False)
    shortened = import_module("build").shortened
    printed = "1\n2\n3\n4\n"
    assert shortened("old\n", printed) == printed
    assert shortened("a\n...\n", printed) == "1\n...\n"
    assert shortened("a\nb\n...\nc\n", printed) == "1\n2\n...\n4\n"


def test_the_six_files_to_read_are_the_same_everywhere() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    script = (ROOT / "docs" / "build.py").read_text(encoding="utf-8")
    steps = re.findall(r"^\d\. \[[^]]+\]\(src/penstock/([^)]+)\)", page, re.M)
    marked = script.partition("READING_ORDER = (")[2].partition("\n)")[0]
    assert steps == re.findall(r'"([^"]+)"', marked)
    assert len(steps) == 6


def test_the_walks_for_newcomers_end_where_they_say() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = page.partition("## Five walks")[2].partition("\n## ")[0]
    rows = re.findall(
        r"^\| \([a-e]\) .+?\| (.+?) \| `(\w+)` \| (.+?) \|$", section, re.M
    )
    assert len(rows) == 5
    for walk, name, _ in rows:
        first = re.findall(r"\]\((src/[^)]+)\)", walk)[0]
        code = (ROOT / first).read_text(encoding="utf-8")
        assert re.search(rf"^ *(?:def |class |){name}\b", code, re.M), (first, name)


FOLDERS = ("src", "tests", "docs", "benchmarks", "examples")
FILES = {path.as_posix() for name in FOLDERS for path in (ROOT / name).rglob("*.py")}
# Named, but not as files of this project.
EXAMPLE_FILES = {
    "utils.py",
    "benchmarks/gpu/SCRIPT.py",
    "file.py",
    "mine.py",
    "recipe.py",
    "code/rates.py",
}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for file in set(re.findall(r"(?<![\w/.>-])((?:[\w-]+/)*[\w-]+\.py)\b", text)):
        exists = any(path.endswith(f"/{file}") for path in FILES)
        assert exists or file in EXAMPLE_FILES, file


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_module_and_function_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    # With dashes before it, it is an option.
    for name in set(re.findall(r"(?<!-)\bpenstock(?:\.\w+)+", text)):
        if name.startswith(WITH_OTHER_PACKAGES):
            assert is_in_source(name), name
        else:
            # raises an error if no module or attribute has this name
            pkgutil.resolve_name(name)


# They import packages that not everybody has.
WITH_OTHER_PACKAGES = ("penstock.integrations.ray", "penstock.integrations.torchtitan")


def is_in_source(name: str) -> bool:
    """Whether a module has this name, or defines it, judged by its source."""
    words = name.split(".")
    for count in (len(words), len(words) - 1):
        path = ROOT / "src" / Path(*words[:count])
        if count == len(words) and path.is_dir():
            return True
        file = path.with_suffix(".py")
        if file.is_file():
            text = file.read_text(encoding="utf-8")
            defined = rf"^(?:def|class) {words[-1]}\b"
            return count == len(words) or bool(re.search(defined, text, re.M))
    return False


def test_every_schedule_has_its_section() -> None:
    page = (ROOT / "docs" / "schedules.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.+)$", page, re.M) == list(REGISTRY)


def test_the_rooms_of_the_design_page_are_those_that_are_walked() -> None:
    text = (
        (ROOT / "docs" / "design.md")
        .read_text(encoding="utf-8")
        .partition("| room | may import |")[2]
    )
    rows = re.findall(
        r"^\| (\w+) \|([\w ]*)\|([\w ]*)\|$", text.partition("\n\n")[0], re.M
    )
    assert {room: set(others.split()) for room, others, _ in rows} == ROOMS
    assert {room: set(libraries.split()) for room, _, libraries in rows} == LIBRARIES


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_no_page_names_a_place_of_one_machine(page: Path) -> None:
    assert not re.search(
        r"(?<![\w.])/(work|tmp|home|root)/", page.read_text(encoding="utf-8")
    )
