"""Builds the documentation as a static site that opens without a network: build/site/index.html.

README.md, CONTRIBUTING.md, docs/ ──┐
source files that pages link to ────┼──► build/pages, with the folders of the repository ──► mkdocs ──► build/site
pictures and data ──────────────────┘

The pages keep their places relative to each other, so the links that work in the repository work in the site. Links may
also lead to source files; each of these becomes a page that shows the file. mkdocs runs in strict mode, so a link or an
anchor that leads nowhere ends the build.

python docs/website.py
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import build

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "build" / "pages"
TOP_PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
OTHER_PAGES = ("benchmarks/README.md", "notes/log.md")
COPIED = (".md", ".svg", ".json")  # kinds of files in docs/ that belong to the site
EXTRAS = ("website.css", "iframe-worker.js")
LANGUAGES = {".py": "python", ".sbatch": "bash"}
LINK = re.compile(r"\]\(([^)\s#]+)((?:#[^)\s]*)?)\)")
FENCED = re.compile(r"^( *)```.*?^\1```$", re.S | re.M)


def lay_out() -> None:
    """Copy all pages to `build/pages` and write a page for every source file that they link to."""
    shutil.rmtree(PAGES, ignore_errors=True)
    for file in site_files():
        target = PAGES / file.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".md":
            text = file.read_text(encoding="utf-8")
            target.write_text(with_source_links(text, file), encoding="utf-8")
        else:
            shutil.copyfile(file, target)
    for name in EXTRAS:
        shutil.copyfile(ROOT / "docs" / name, PAGES / name)
    for name, text in (("files", build.file_tables()), ("options", build.options())):
        page = ROOT / "docs" / f"{name}.md"  # in the site only
        (PAGES / "docs" / page.name).write_text(
            with_source_links(text, page) + "\n", encoding="utf-8"
        )


def site_files() -> list[Path]:
    """Every file of the repository that goes into the site as it is."""
    pages = [ROOT / name for name in (*TOP_PAGES, *OTHER_PAGES)]
    found = sorted((ROOT / "docs").rglob("*"))
    return pages + [file for file in found if file.suffix in COPIED]


def with_source_links(text: str, page: Path) -> str:
    """The text of a page whose links to source files lead to pages that show them."""

    def redirect(link: re.Match[str]) -> str:
        target = link[1]
        file = (page.parent / target).resolve()
        if re.match(r"[a-z]+:", target) or not is_source(file):
            return link[0]
        write_source_page(file)
        return f"]({target}.md)"

    pieces = []
    position = 0
    for block in FENCED.finditer(text):
        pieces.append(LINK.sub(redirect, text[position : block.start()]))
        pieces.append(block[0])
        position = block.end()
    return "".join([*pieces, LINK.sub(redirect, text[position:])])


def is_source(file: Path) -> bool:
    """Whether this is a file of the repository that the site must turn into a page."""
    return file.is_file() and file.is_relative_to(ROOT) and file.suffix not in COPIED


def write_source_page(file: Path) -> None:
    """Write a page that shows a source file."""
    inside = file.relative_to(ROOT)
    target = PAGES / inside.parent / f"{inside.name}.md"
    target.parent.mkdir(parents=True, exist_ok=True)
    language = LANGUAGES.get(file.suffix, "text")
    code = file.read_text(encoding="utf-8")
    title = f"---\ntitle: {inside}\nsearch:\n  exclude: true\n---\n\n# `{inside}`\n"
    target.write_text(f"{title}\n~~~~{language}\n{code}~~~~\n", encoding="utf-8")


def main() -> int:
    """Lay out the pages and run mkdocs."""
    lay_out()
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet"]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # an advertisement
    done = subprocess.run(command, cwd=ROOT, env=quiet, check=False)
    if done.returncode == 0:
        sys.stdout.write("open build/site/index.html in a browser\n")
    return done.returncode


if __name__ == "__main__":
    raise SystemExit(main())
