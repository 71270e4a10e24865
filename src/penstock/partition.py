"""Layers dealt out to parts, (3, 3, 2) say: what a plan holds, a cost adds up, and a model is cut by."""

from __future__ import annotations

from penstock.errors import ShapeError


def even_partition(layers: int, parts: int) -> tuple[int, ...]:
    """As equal as it goes; the first parts take what is left over, for the last one has the head to do.

    >>> even_partition(8, 3)
    (3, 3, 2)
    """
    for word, count in (("layers", layers), ("parts", parts)):
        if count < 1:
            raise ShapeError(f"{word} must be at least 1, not {count}")
    if parts > layers:
        raise ShapeError(
            f"{layers} layers cannot fill {parts} parts: at most {layers}, so that none is empty"
        )
    return tuple(layers // parts + (part < layers % parts) for part in range(parts))
