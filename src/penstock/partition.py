"""Partitions: the number of layers of each part, such as (3, 3, 2).

Plans store them, costs add them up, and models are cut by them.
"""

from __future__ import annotations

from collections.abc import Sequence

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
            f"{layers} layers cannot fill {parts} parts; give at most {layers} parts"
        )
    share, left_over = divmod(layers, parts)
    return (share + 1,) * left_over + (share,) * (parts - left_over)


def balanced_partition(
    layers: int,
    ranks: Sequence[int],
    embed: float,
    layer: float,
    head: float,
    speeds: Sequence[float] = (),
) -> tuple[int, ...]:
    """Divide layers so that the busiest rank has as little work as possible.

    Part number i lies on rank `ranks[i]`. The first part also does the work of the
    embedding, the last that of the head. Layers are dealt out one by one, always to the
    rank that is then least busy, and there to the part that is then shortest. Equal layers
    can be dealt out in no better way. The first and the last part may get none at all if
    embedding or head are work enough. A rank with twice the speed does its work in half
    the time.

    >>> balanced_partition(8, (0, 1, 2, 3), embed=0.0, layer=1.0, head=2.0)
    (3, 2, 2, 1)
    >>> balanced_partition(8, (0, 1, 1, 0), embed=0.0, layer=1.0, head=4.0)
    (2, 3, 3, 0)
    >>> balanced_partition(9, (0, 1), embed=0.0, layer=1.0, head=0.0, speeds=(2.0, 1.0))
    (6, 3)
    """
    parts = len(ranks)
    even_partition(layers, parts)  # Refuses sizes that make no sense.
    rank_speeds = list(speeds) or [1.0] * (1 + max(ranks))
    part_work = [0.0] * parts
    part_work[0] += embed / rank_speeds[ranks[0]]
    part_work[-1] += head / rank_speeds[ranks[-1]]
    rank_work = [0.0] * (1 + max(ranks))
    for part, rank in enumerate(ranks):
        rank_work[rank] += part_work[part]
    counts = [0] * parts

    def give_layer(part: int) -> None:
        seconds = layer / rank_speeds[ranks[part]]
        counts[part] += 1
        part_work[part] += seconds
        rank_work[ranks[part]] += seconds

    for part in range(1, parts - 1):
        give_layer(part)
    for _ in range(layers - sum(counts)):
        give_layer(
            min(
                range(parts),
                key=lambda part: (
                    rank_work[ranks[part]] + layer / rank_speeds[ranks[part]],
                    part_work[part],
                    counts[part],
                    part,
                ),
            )
        )
    return tuple(counts)
