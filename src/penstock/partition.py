"""Partitions: the number of layers of each part, such as (3, 3, 2).

Plans store them, costs add them up, and models are cut by them.
"""

from __future__ import annotations

from penstock.errors import ShapeError


def even_partition(layers: int, parts: int) -> tuple[int, ...]:
    """Divide layers as evenly as possible.

    The first parts take one layer more, because the last part also has the head.

    >>> even_partition(8, 3)
    (3, 3, 2)
    """
    for name, count in (("layers", layers), ("parts", parts)):
        if count < 1:
            raise ShapeError(f"{name} must be at least 1, not {count}")
    if parts > layers:
        raise ShapeError(
            f"{layers} layers cannot fill {parts} parts: at most {layers}, so that none is empty"
        )
    share, left_over = divmod(layers, parts)
    return (share + 1,) * left_over + (share,) * (parts - left_over)
