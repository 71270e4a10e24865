"""The version of Penstock, and the extra of `pip install 'penstock[...]'` that brings each optional package."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires, version

from penstock.errors import RunError


def read_version() -> str:
    """The version as pip knows it."""
    try:
        return version("penstock")
    except PackageNotFoundError:
        return "0+unknown"  # a checkout on the path that is not installed


def missing_package(error: ModuleNotFoundError) -> RunError | None:
    """The error that says how to install what an import did not find; None if no extra brings the package."""
    package = (error.name or "").partition(".")[0]
    extra = extra_of(package)
    if not extra or package == "penstock":  # An extra may include another one.
        return None
    return RunError(
        f"this command needs {package}, which is not installed: pip install 'penstock[{extra}]'"
    )


def extra_of(package: str) -> str:
    """The first extra that lists a package; empty if none does."""
    for line in listed_packages():
        wanted, _, condition = line.partition(";")
        name = re.match(r"[\w.-]+", wanted)
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", condition)
        if name and extra and name[0].replace("-", "_") == package:
            return extra[1]
    return ""


def listed_packages() -> list[str]:
    """The packages that Penstock lists, as pip writes them: `torch<2.16,>=2.11; extra == "torch"`."""
    try:
        return requires("penstock") or []
    except PackageNotFoundError:
        return []  # The code runs from a checkout that is not installed.
