"""The public face of the package as text: each name that `import penstock` offers, with its parameters or fields.

    python tests/public_api.py      write tests/public_api.txt anew, after a change that is meant

Rooms that guides import from (`penstock.runtime` and others) are listed by their names alone.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from enum import EnumType
from pathlib import Path

import penstock

SNAPSHOT = Path(__file__).with_suffix(".txt")
ROOMS = ("ir", "formats", "models", "runtime")


def lines() -> Iterator[str]:
    for name in penstock.__all__:
        yield f"penstock.{name}{parameters_of(getattr(penstock, name))}"
    for room in ROOMS:
        module = importlib.import_module(f"penstock.{room}")
        for name in module.__all__:
            assert hasattr(module, name), f"penstock.{room} has no {name}"
            yield f"penstock.{room}.{name}"


def parameters_of(thing: object) -> str:
    """The names of parameters, with a `=` after those that may be left out; nothing for what cannot be called."""
    if not callable(thing) or isinstance(thing, EnumType):
        return ""
    try:
        parameters = inspect.signature(thing).parameters.values()
    except ValueError:  # a type alias
        return ""
    return f"({', '.join(map(_shown, parameters))})"


def _shown(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
    optional = "=" if parameter.default is not parameter.empty else ""
    return f"{stars.get(parameter.kind, '')}{parameter.name}{optional}"


if __name__ == "__main__":
    SNAPSHOT.write_text("\n".join(lines()) + "\n", encoding="utf-8")
