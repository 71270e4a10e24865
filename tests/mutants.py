"""Puts known faults into a copy of the package, one at a time, and runs the tests that should find them.

    mutants.toml   a place in the source, what to put there, what would go wrong, and tests of that room
    copy           the package with one fault, in a temporary folder; the checkout itself never changes
    tests          those of the checkout, which import the copy

    python tests/mutants.py                  all faults
    python tests/mutants.py --only verify    the faults whose name or file has this word in it
    python tests/mutants.py --list           the faults, without running anything

A fault is caught if one of its tests fails, or hangs. A fault that survives shows what no test asks for: the exit code
is then 1. It is 2 if the tests fail without a fault, or if they cannot run, because then they prove nothing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

ROOT = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_suffix(".toml")
# The tests of a fault take some seconds. A busy machine may take many times as long, but not this long.
LIMIT_SECONDS = 600.0
SHOWN_CHARACTERS = 3_000  # of the output of tests that say nothing about a fault


@dataclass(frozen=True)
class Mutant:
    """A fault: the text that a file has once, and what takes its place."""

    name: str
    file: str  # in the package
    find: str
    put: str
    breaks: str  # what would go wrong
    tests: tuple[str, ...]  # in this folder, the quick ones first


class Outcome(StrEnum):
    """How the tests ended."""

    CAUGHT = "caught"
    HANGS = "caught, hangs"
    SURVIVES = "SURVIVES"
    PROVES_NOTHING = "proves nothing"


def listed_mutants() -> list[Mutant]:
    """Read the list of faults."""
    entries = tomllib.loads(LIST.read_text(encoding="utf-8"))["mutant"]
    return [Mutant(**entry | {"tests": tuple(entry["tests"])}) for entry in entries]


def source_of(mutant: Mutant, package: Path = ROOT / "src/penstock") -> str:
    """Return the text of the file that a fault goes into."""
    return (package / mutant.file).read_text(encoding="utf-8")


def damaged(mutant: Mutant, text: str) -> str:
    """Return the text with the fault; the place must be unmistakable."""
    count = text.count(mutant.find)
    assert count == 1, f"{mutant.name}: {mutant.file} has its text {count} times"
    return text.replace(mutant.find, mutant.put)


def run_mutant(mutant: Mutant) -> tuple[Outcome, str]:
    """Run the tests of a fault with the package that has it; return how they ended, and what they printed."""
    with TemporaryDirectory(prefix="mutant-") as folder:
        package = copy_package(Path(folder))
        text = damaged(mutant, source_of(mutant, package))
        (package / mutant.file).write_text(text, encoding="utf-8")
        return run_tests(package, mutant.tests)


def run_without_fault(mutants: Iterable[Mutant]) -> tuple[Outcome, str]:
    """Run all tests of these faults with an undamaged copy: they must pass."""
    targets = dict.fromkeys(test for mutant in mutants for test in mutant.tests)
    # A test of a file that runs anyway.
    chosen = [one for one in targets if one.partition("::")[0] not in targets]
    whole = [one for one in targets if "::" not in one]
    with TemporaryDirectory(prefix="mutant-") as folder:
        return run_tests(copy_package(Path(folder)), [*whole, *chosen])


def copy_package(folder: Path) -> Path:
    """Copy the package, with its compiled code, which stays valid for all files but the damaged one."""
    package = folder / "penstock"
    shutil.copytree(ROOT / "src/penstock", package)
    return package


def run_tests(package: Path, tests: Sequence[str]) -> tuple[Outcome, str]:
    """Run tests of the checkout that import this package, up to the first failure."""
    targets = [f"tests/{test}" for test in tests]
    quick = ["-x", "-rfE", "-p", "no:cacheprovider"]
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *quick, *targets],
        cwd=ROOT,
        env=environment(package.parent),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        return Outcome.HANGS, ""
    finally:
        end_session(process)
    if process.returncode == 0:
        return Outcome.SURVIVES, output
    # 1: a test failed, 2: a file could not be imported, negative: a crash. All others mean that the tests did not run.
    caught = process.returncode in (1, 2) or process.returncode < 0
    return Outcome.CAUGHT if caught else Outcome.PROVES_NOTHING, output


def environment(folder: Path) -> dict[str, str]:
    """Return the variables of a test run: Python finds the package in this folder, and every run draws the same."""
    return os.environ | {
        "PYTHONPATH": str(folder),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "CI": "1",  # hypothesis then follows a fixed seed and remembers nothing
    }


def end_session(process: subprocess.Popen[str]) -> None:
    """End a test run with all processes that it has left."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def show(mutant: Mutant) -> None:
    print(f"{mutant.name:<34} {mutant.file:<34} {mutant.breaks}")


def main() -> int:
    """Run the chosen faults, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="a word in the name or the file")
    parser.add_argument("--list", action="store_true", help="show the faults and end")
    chosen = parser.parse_args()
    mutants = [
        mutant
        for mutant in listed_mutants()
        if chosen.only in mutant.name or chosen.only in mutant.file
    ]
    if chosen.list:
        for mutant in mutants:
            show(mutant)
        return 0
    if not mutants:
        print(f"no fault has {chosen.only!r} in its name or file")
        return 2
    print("without a fault ...", end=" ", flush=True)
    outcome, output = run_without_fault(mutants)
    if outcome is not Outcome.SURVIVES:
        print(f"the tests fail too\n{output[-SHOWN_CHARACTERS:]}")
        return 2
    print("the tests pass")
    found: dict[Outcome, list[Mutant]] = {}
    for mutant in mutants:
        begun = monotonic()
        outcome, output = run_mutant(mutant)
        seconds = monotonic() - begun
        print(f"{outcome:<14} {seconds:6.1f} s  {mutant.name}", flush=True)
        found.setdefault(outcome, []).append(mutant)
        if outcome is Outcome.PROVES_NOTHING:
            print(output[-SHOWN_CHARACTERS:])
    survivors = found.get(Outcome.SURVIVES, [])
    print(f"{len(mutants)} faults, {len(survivors)} survive")
    for mutant in survivors:
        show(mutant)
    if Outcome.PROVES_NOTHING in found:
        return 2
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
