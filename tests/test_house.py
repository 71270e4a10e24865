"""The house has a budget, which only falls: `python tests/house.py --lower` after a change that made it smaller."""

from __future__ import annotations

import ast
from pathlib import Path

import house


def test_no_figure_of_the_house_is_above_its_budget() -> None:
    most = house.budgets()
    above = {
        name: (size, most.get(name, 0))
        for name, size in house.figures(house.measure()).items()
        if size > most.get(name, 0)
    }
    assert not above, f"(now, budget): {above}; what can go to make room?"


def test_statements_are_counted_without_docstrings() -> None:
    tree = ast.parse('"""Says."""\nx = 1\n\ndef f():\n    """Says."""\n    return x\n')
    assert len(list(house.statements_of(tree))) == 3


def test_a_circle_of_folders_is_found_also_through_a_third_one() -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}
    assert list(house.cycles_of(edges)) == [("a", "b", "c")]


def test_lazy_and_type_only_imports_count(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "one" / "lazy.py").write_text(
        "def f():\n    from penstock.two import late\n    return late\n"
    )
    (tmp_path / "two" / "late.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import penstock.one.lazy\n"
    )
    found = house.measure(tmp_path, tmp_path)
    assert found.cycles == (("one", "two"),)
    assert found.files == 4
