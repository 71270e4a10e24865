"""One syntax for a name with its shape: `name:key=value,...`.

    hanayo:waves=2,slices=4,split      a schedule; it is the first to be written so
    bpe:16000                          the same for anything else that has a shape

A key without a value is a switch. A value without a key, as in `bpe:16000`, belongs to the first key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from penstock.errors import ShapeError, nearest_name

Shape: TypeAlias = "dict[str, Any]"  # each value is of the kind of its key
# What a key takes: bool is a switch, the others are written after "=".
Kinds: TypeAlias = "Mapping[str, type[int] | type[float] | type[bool] | type[str]]"
NAMES = {int: "a whole number", float: "a number", str: "a word"}
SWITCHES = {"": True, "true": True, "false": False}


def split_name(text: str) -> tuple[str, str]:
    """Split a text into its name and its shape, which may be empty.

    >>> split_name("hanayo:waves=2,split"), split_name("1f1b")
    (('hanayo', 'waves=2,split'), ('1f1b', ''))
    """
    name, _, shape = text.partition(":")
    return name.strip(), shape.strip()


def read_shape(name: str, text: str, kinds: Kinds) -> Shape:
    """Read the shape of a name, whose keys and their kinds are given.

    >>> read_shape("hanayo", "waves=2,split", {"waves": int, "split": bool})
    {'waves': 2, 'split': True}
    >>> read_shape("bpe", "16000", {"size": int})
    {'size': 16000}
    """
    shape: Shape = {}
    for item in text.split(",") if text else []:
        key, _, value = (word.strip() for word in item.partition("="))
        if key not in kinds and not value and not shape and key[:1].isdigit():
            key, value = next(iter(kinds), ""), key
        if key not in kinds:
            raise ShapeError(_unknown_key(name, text, key, kinds))
        if key in shape:
            raise ShapeError(f"{name}:{text} gives {key} twice")
        shape[key] = _read_value(name, key, value, kinds[key])
    return shape


def write_shape(name: str, shape: Mapping[str, object]) -> str:
    """Write a name with its shape, as `read_shape` reads it.

    >>> write_shape("hanayo", {"waves": 2, "split": True, "offload": False})
    'hanayo:waves=2,split'
    """
    items = [
        key if value is True else f"{key}={value}"
        for key, value in shape.items()
        if value is not False
    ]
    return f"{name}:{','.join(items)}" if items else name


def _read_value(name: str, key: str, value: str, kind: type) -> object:
    """Read the value of a key."""
    if kind is bool:
        if value in SWITCHES:
            return SWITCHES[value]
        raise ShapeError(f"{name}: {key} is a switch and takes no value, not {value!r}")
    try:
        read: object = kind(value)
    except ValueError:
        read = ""
    if read == "":
        raise ShapeError(
            f"{name}: {key} takes {NAMES[kind]}, not {value!r}, as in {name}:{key}=2"
        )
    return read


def _unknown_key(name: str, text: str, key: str, kinds: Kinds) -> str:
    """Say that a name has no such key, and which keys it has."""
    near = nearest_name(key, kinds)
    hint = f"; did you mean {near!r}?" if near else ""
    known = f"it takes {', '.join(kinds)}" if kinds else "it takes none"
    return f"{name} has no {key!r} (in {name}:{text}){hint}\n{known}"
