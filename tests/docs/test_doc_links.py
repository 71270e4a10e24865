"""Every link, anchor and picture of the documentation leads somewhere, on GitHub and in the static site alike."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
from test_docs import PAGES, ROOT, named, without_code

INLINE = re.compile(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
REFERENCE = re.compile(r"^\[[^\]]+\]:\s*(\S+)", re.M)
USED_REFERENCE = re.compile(r"\[[^\]]+\]\[([^\]]+)\]")
HTML = re.compile(r"""<(?:a|img)\b[^>]*?\b(?:href|src)=["']([^"']+)["']""")
HEADING = re.compile(r"^(#{1,6})\s+(.+?)\s*#*$", re.M)
LIST_ITEM = re.compile(r"^ *(?:[-*+]|\d+\.) ")
INDEX = ROOT / "docs" / "index.md"


def links(page: Path) -> list[str]:
    """All link targets of a page, those of pictures too, without the ones in code."""
    text = without_code(page)
    return INLINE.findall(text) + REFERENCE.findall(text) + HTML.findall(text)


def local_links(page: Path) -> list[str]:
    return [link for link in links(page) if not re.match(r"[a-z]+:", link)]


def target_of(page: Path, link: str) -> Path:
    path = link.partition("#")[0]
    return (page.parent / path).resolve() if path else page


def heading_texts(page: Path) -> list[str]:
    """The headings as they are read: without code marks, emphasis and link targets."""
    found = []
    for _, heading in HEADING.findall(without_code(page, inline=False)):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        found.append(re.sub(r"[`*]", "", text))
    return found


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub and the site agree on.

    Both write small letters, drop punctuation and turn each space into a hyphen. Of headings that occur twice GitHub
    numbers the later ones with -1, the site with _1, so no page may link to these.
    """
    slugs = [
        re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        for text in heading_texts(page)
    ]
    return {slug for slug, count in Counter(slugs).items() if count == 1}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_link_and_picture_leads_to_a_file_of_the_repository(page: Path) -> None:
    for link in local_links(page):
        target = target_of(page, link)
        assert target.exists(), link
        assert target.is_relative_to(ROOT), link


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_anchor_is_a_heading_that_occurs_once(page: Path) -> None:
    for link in local_links(page):
        anchor = link.partition("#")[2]
        if anchor:
            assert anchor in anchors(target_of(page, link)), link


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_reference_is_defined(page: Path) -> None:
    text = without_code(page)
    defined = {name.lower() for name in re.findall(r"^\[([^\]]+)\]:", text, re.M)}
    assert {name.lower() for name in USED_REFERENCE.findall(text)} <= defined


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_list_starts_after_an_empty_line(page: Path) -> None:
    """GitHub does not need the empty line; the site shows one paragraph without it."""
    before = ""
    for line in without_code(page).splitlines():
        if LIST_ITEM.match(line):
            inside = LIST_ITEM.match(before) or before.startswith("  ")
            assert not before.strip() or inside, line
        before = line


@pytest.mark.parametrize("start", [INDEX, ROOT / "README.md"], ids=named)
def test_every_page_can_be_reached_by_links(start: Path) -> None:
    reached: set[Path] = set()
    waiting = [start]
    while waiting:
        page = waiting.pop()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        waiting += [target_of(page, link) for link in local_links(page)]
    assert {named(page) for page in set(PAGES) - reached} == set()


def test_the_site_has_every_page_in_its_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    listed = re.findall(r"[\w/.-]+\.md", menu)
    # docs/website.py writes the last two
    published = [*map(named, PAGES), "docs/files.md", "docs/options.md"]
    assert sorted(listed) == sorted(published)


def test_the_site_loads_nothing_from_the_network() -> None:
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "font: false" in settings
    assert "use_directory_urls: false" in settings
    assert re.search(r"^  - offline\b", settings, re.M)
    assert "http" not in settings
    # the offline plugin adds a script from the network unless one of this name is there
    assert "- iframe-worker.js" in settings


def test_the_pages_of_the_site_link_to_files_of_the_site(tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    monkeypatch.delitem(sys.modules, "build", raising=False)
    place = importlib.util.spec_from_file_location(
        "website", ROOT / "docs" / "website.py"
    )
    assert place is not None
    assert place.loader is not None
    website = importlib.util.module_from_spec(place)
    place.loader.exec_module(website)
    monkeypatch.setattr(website, "PAGES", tmp_path)
    website.lay_out()
    pages = sorted(tmp_path.rglob("*.md"))
    assert {page.relative_to(tmp_path).as_posix() for page in pages} >= {
        "README.md",
        "LICENSE.md",
        "docs/index.md",
        "docs/options.md",
        "src/penstock/ir/needs.py.md",
    }
    for page in pages:
        shows_source = not (ROOT / page.relative_to(tmp_path)).exists()
        for link in [] if shows_source else local_links(page):
            assert target_of(page, link).exists(), (page, link)
