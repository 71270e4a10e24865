"""The table of sizes on the design page counts what it says."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script docs/measure.py as a module."""
    place = importlib.util.spec_from_file_location(
        "measure", ROOT / "docs" / "measure.py"
    )
    assert place is not None
    assert place.loader is not None
    module = importlib.util.module_from_spec(place)
    monkeypatch.setitem(sys.modules, "measure", module)
    place.loader.exec_module(module)
    return module


def test_sizes_count_files_lines_functions_nodes_and_names(measure, tmp_path) -> None:
    (tmp_path / "one.py").write_text("LIMIT = 1\n\n\ndef run():\n    return LIMIT\n")
    (tmp_path / "two.py").write_text(
        "LIMIT = 2\n_hidden = 3\n\n\nclass Run:\n    pass\n"
    )
    (tmp_path / "three.py").write_text("_hidden = 4\n")
    sizes = measure.sizes_of(tmp_path)
    assert (sizes.files, sizes.lines, sizes.median_function) == (3, 12, 2)
    assert sizes.names_twice == 1  # LIMIT; names with an underscore do not count
    # Module, Assign, Name, Store, Constant, FunctionDef, arguments, Return, Name, Load
    nodes = {"one": 10, "two": 11, "three": 5}
    assert sizes.nodes_per_line == pytest.approx(sum(nodes.values()) / 12)


def test_the_design_page_has_the_table_of_all_four_codebases(measure) -> None:
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    table = page.partition("<!-- sizes -->\n")[2].partition("\n<!-- /sizes -->")[0]
    heads, _, *rows = table.splitlines()
    assert heads == f"| {' | '.join(measure.HEADS)} |"
    names = [row.split(" | ")[0].removeprefix("| ") for row in rows]
    expected = [row[0] for row in measure.all_rows()]
    # the version of the installed torch may differ from the one that was measured
    assert [name.rpartition(" ")[0] for name in names] == [
        name.rpartition(" ")[0] for name in expected
    ]
