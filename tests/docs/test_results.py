"""Every figure in docs/results comes with the script that measured it and with its conditions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_docs import ROOT, named

RESULTS = ROOT / "docs" / "results"
PAGES = [page for page in sorted(RESULTS.glob("*.md")) if page.name != "README.md"]
DATE = re.compile(r"\b20\d\d-\d\d-\d\d\b")


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_a_page_of_results_names_its_scripts_and_says_when_they_ran(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    scripts = set(re.findall(r"\bbenchmarks/[\w/]+\.py\b", text))
    assert scripts
    for script in scripts:
        assert (ROOT / script).is_file(), script
    assert DATE.search(text)


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_table_that_a_script_writes_stands_between_two_comments(
    page: Path,
) -> None:
    text = page.read_text(encoding="utf-8")
    comments = re.findall(r"^<!-- (.+) -->$", text, re.M)
    assert comments
    for opens, closes in zip(comments[::2], comments[1::2], strict=True):
        assert closes == f"/{opens}"


def test_every_result_of_the_index_leads_to_its_page_and_has_a_date() -> None:
    text = (RESULTS / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[.+$", text, re.M)
    assert {page.name for page in PAGES} <= set(re.findall(r"\]\((\w+\.md)", text))
    for row in rows:
        assert DATE.search(row), row
