"""The version of Penstock, which the metadata of the installed package knows."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def read_version() -> str:
    """The version as pip knows it."""
    try:
        return version("penstock")
    except PackageNotFoundError:
        return "0+unknown"  # a checkout on the path that is not installed
