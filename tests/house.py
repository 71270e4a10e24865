"""Counts how large the house is: files, statements, parameters, cycles, and files that name an op.

    python tests/house.py            print the figures
    python tests/house.py --json     the same as JSON
    python tests/house.py --lower    write the budgets of tests/house.json down to what is there now

Statements are those of Python's `ast`, without docstrings. A budget only falls: to raise one, edit tests/house.json and
say why in `raised`.
"""

from __future__ import annotations

import ast
import json
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parent
PACKAGE = TESTS.parent / "src" / "penstock"
BUDGETS = TESTS / "house.json"
SMALL = 40  # a file with fewer statements needs a reason
MANY = 9  # a function with more parameters needs a record
Functions = ast.FunctionDef | ast.AsyncFunctionDef
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class House:
    """All that is counted. `rooms` has the statements of each top folder, and `top` those of the files beside them."""

    statements: int
    files: int
    small_files: int
    largest_folder: tuple[str, int]
    cycles: tuple[tuple[str, ...], ...]
    wide_functions: tuple[str, ...]
    op_files: tuple[str, ...]
    test_lines: int
    nodes_per_statement: tuple[float, float]
    rooms: dict[str, int]


def measure(package: Path = PACKAGE, tests: Path = TESTS) -> House:
    """Count everything once."""
    trees = {
        file.relative_to(package): ast.parse(file.read_text(encoding="utf-8"))
        for file in sorted(package.rglob("*.py"))
    }
    sizes = {file: len(list(statements_of(tree))) for file, tree in trees.items()}
    rooms: Counter[str] = Counter()
    folders: Counter[str] = Counter()
    for file, size in sizes.items():
        rooms[file.parts[0] if len(file.parts) > 1 else "top"] += size
        folders[file.parent.as_posix()] += 1
    small = [
        file
        for file, size in sizes.items()
        if size < SMALL and file.stem != "__init__" and file.parts[0] != "schedules"
    ]
    return House(
        statements=sum(sizes.values()),
        files=len(sizes),
        small_files=len(small),
        largest_folder=max(folders.items(), key=lambda item: item[1]),
        cycles=tuple(cycles_of(folder_imports(trees))),
        wide_functions=tuple(
            f"{file}:{node.name} {parameters_of(node)}"
            for file, tree in trees.items()
            for node in ast.walk(tree)
            if isinstance(node, Functions) and parameters_of(node) > MANY
        ),
        op_files=tuple(str(file) for file, tree in trees.items() if names_an_op(tree)),
        test_lines=sum(
            file.read_text(encoding="utf-8").count("\n") for file in tests.rglob("*.py")
        ),
        nodes_per_statement=density_of(trees),
        rooms=dict(sorted(rooms.items())),
    )


def statements_of(tree: ast.AST) -> Iterator[ast.stmt]:
    """All statements of a file except docstrings."""
    docstrings = {
        id(node.body[0])
        for node in ast.walk(tree)
        if isinstance(node, Documented) and ast.get_docstring(node, clean=False)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and id(node) not in docstrings:
            yield node


def density_of(trees: dict[Path, ast.Module]) -> tuple[float, float]:
    """Syntax nodes a statement that holds no other: the mean and the 95th percentile."""
    counts = [
        sum(1 for _ in ast.walk(statement))
        for tree in trees.values()
        for statement in statements_of(tree)
        if not any(
            isinstance(child, ast.stmt) for child in ast.iter_child_nodes(statement)
        )
    ]
    return round(statistics.mean(counts), 2), statistics.quantiles(counts, n=20)[-1]


def parameters_of(node: Functions) -> int:
    """The parameters of a function, without `self` and `cls`."""
    found = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return sum(1 for one in found if one.arg not in {"self", "cls"})


def names_an_op(tree: ast.Module) -> bool:
    """Whether a file writes `Op.F` or another op by its name."""
    return any(
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "Op"
        and node.attr.isupper()
        for node in ast.walk(tree)
    )


def folder_imports(trees: dict[Path, ast.Module]) -> dict[str, set[str]]:
    """Which folder imports which, lazy and type-only imports included."""
    modules = {
        ".".join(("penstock", *file.with_suffix("").parts)): file for file in trees
    }
    modules |= {
        name.removesuffix(".__init__"): file for name, file in list(modules.items())
    }
    edges: dict[str, set[str]] = defaultdict(set)
    for file, tree in trees.items():
        if len(file.parts) == 1:  # the public face imports all rooms
            continue
        for name in imports_of(tree):
            target = modules.get(name)
            if target is not None and len(target.parts) > 1:
                edges[file.parent.as_posix()].add(target.parent.as_posix())
    return {folder: targets - {folder} for folder, targets in edges.items()}


def imports_of(tree: ast.Module) -> Iterator[str]:
    """All modules that a file imports, also `from folder import module`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def cycles_of(edges: dict[str, set[str]]) -> Iterator[tuple[str, ...]]:
    """Groups of folders that import each other in a circle."""
    reached = {folder: _reachable(folder, edges) for folder in edges}
    groups = {
        tuple(
            sorted(
                other for other in reached[folder] if folder in reached.get(other, ())
            )
        )
        for folder in edges
        if folder in reached[folder]
    }
    yield from sorted(groups)


def _reachable(folder: str, edges: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = list(edges.get(folder, ()))
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting.extend(edges.get(one, ()))
    return found


def budgets() -> dict[str, int]:
    """The most that each figure may be, as committed."""
    return json.loads(BUDGETS.read_text(encoding="utf-8"))["budgets"]


def figures(house: House) -> dict[str, int]:
    """The figures that have a budget."""
    return {
        **{f"statements in {room}": size for room, size in house.rooms.items()},
        "statements": house.statements,
        "files": house.files,
        "files below 40 statements": house.small_files,
        "files in the largest folder": house.largest_folder[1],
        "cycles between folders": len(house.cycles),
        "functions with more than 9 parameters": len(house.wide_functions),
        "files that name an op": len(house.op_files),
        "lines of tests": house.test_lines,
    }


def lower() -> None:
    """Write every budget down to what is there now; one that is exceeded stays as it is."""
    page = json.loads(BUDGETS.read_text(encoding="utf-8"))
    now = figures(measure())
    page["budgets"] = {
        name: min(size, page["budgets"].get(name, size)) for name, size in now.items()
    }
    BUDGETS.write_text(json.dumps(page, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Print what is counted, or lower the budgets."""
    if "--lower" in sys.argv:
        lower()
        return
    house = measure()
    if "--json" in sys.argv:
        sys.stdout.write(json.dumps(asdict(house), indent=1) + "\n")
        return
    for name, size in figures(house).items():
        sys.stdout.write(f"{size:8,}  {name}\n")
    mean, high = house.nodes_per_statement
    sys.stdout.write(
        f"{mean:8}  syntax nodes a simple statement, 95th percentile {high:g}\n"
    )
    for cycle in house.cycles:
        sys.stdout.write(f"cycle: {' '.join(cycle)}\n")


if __name__ == "__main__":
    main()
