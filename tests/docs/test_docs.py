"""The docs are what the code draws and prints, and what they show works."""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
from pathlib import Path

import pytest

from commands import called
from penstock import REGISTRY
from test_imports import LIBRARIES, ROOMS

ROOT = Path(__file__).resolve().parents[2]
GUIDES = sorted(
    (ROOT / "docs" / "guides").glob("*.md")
)  # their commands are run by test_guides.py
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.S | re.M)


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, *languages: str) -> list[str]:
    return [
        text
        for _, language, text in BLOCK.findall(page.read_text(encoding="utf-8"))
        if language in languages
    ]


def commands(page: Path) -> list[str]:
    """The lines of a page's scripts that call penstock; docs/build.py runs those that are shown with their output."""
    lines = [line for block in blocks(page, "sh") for line in block.splitlines()]
    return [
        line
        for line in (line.strip() for line in lines)
        if line.startswith("penstock ")
    ]


# ---------------------------------------------------------------- what the code draws and prints
def test_docs_are_what_the_code_draws() -> None:
    check = [sys.executable, str(ROOT / "docs" / "build.py"), "--check"]
    done = subprocess.run(
        check, capture_output=True, text=True, encoding="utf-8", check=False
    )
    assert done.returncode == 0, (
        f"run `make docs` and look at what changed:\n{done.stdout}{done.stderr}"
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
        accept = (
            " --accept-error" if " --profile " in line else ""
        )  # what was measured here may be far off
        code, out, err = called(
            monkeypatch, capsys, line.removeprefix("penstock ") + accept
        )
        assert code == 0, f"{line}\n{out}{err}"
    for drawn in tmp_path.glob("*.svg"):
        if page.parent.name == "schedules":
            assert (
                drawn.read_text() == (ROOT / "docs" / "images" / drawn.name).read_text()
            )


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "pycon")], ids=named
)
def test_python_that_is_shown_prints_what_is_shown(page: Path) -> None:
    """As doctest has it, except that output may contain empty lines: a block ends where its fence does."""
    examples = []
    for block in blocks(page, "pycon"):
        for source, want in re.findall(
            r"^>>> (.*\n(?:\.\.\. .*\n)*)((?:(?!>>> ).*\n)*)", block, re.M
        ):
            error = want.partition("\n")[2] if want.startswith("Traceback") else None
            examples.append(
                doctest.Example(source.replace("\n... ", "\n"), want, exc_msg=error)
            )
    assert examples
    runner = doctest.DocTestRunner(verbose=False)
    printed: list[str] = []
    runner.run(
        doctest.DocTest(examples, {}, named(page), str(page), 0, ""), out=printed.append
    )
    assert not runner.failures, "".join(printed)


# ---------------------------------------------------------------- what they name
@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_link_leads_somewhere(page: Path) -> None:
    home = (
        ROOT / "docs" / "schedules" if page.parent.name == "prose" else page.parent
    )  # where prose is put
    for target in re.findall(
        r"\]\(([^)\s]+)\)", BLOCK.sub("", page.read_text(encoding="utf-8"))
    ):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (home / path).resolve() if path else page
        assert there.exists(), target
        assert there.is_relative_to(ROOT), target
        assert not anchor or anchor in anchors(there), target


def anchors(page: Path) -> set[str]:
    """Headings, as GitHub makes them into links."""
    heads = re.findall(
        r"^#+ (.+)$", BLOCK.sub("", page.read_text(encoding="utf-8")), re.M
    )
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_the_file_tree_names_only_what_is_there() -> None:
    tree = next(block for block in blocks(ROOT / "README.md", "") if "├──" in block)
    above: list[str] = []
    named_paths = []
    for line in tree.splitlines()[1:]:
        found = re.fullmatch(r"((?:│   |    )*)[├└]── ([\w./-]+)(?: +# .+)?", line)
        assert found, line
        above[len(found[1]) // 4 :] = [found[2]]
        named_paths.append("/".join(above))
    assert len(named_paths) > 30
    assert [path for path in named_paths if not (ROOT / path).exists()] == []


def test_every_schedule_is_in_the_readme_and_has_its_words() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in REGISTRY:
        assert f"(docs/schedules/{name}.md)" in readme
        assert (ROOT / "docs" / "prose" / f"{name}.md").exists()


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
