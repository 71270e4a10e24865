"""Links between ranks: one number for all, or one for each pair."""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.errors import ShapeError

PerPair = float | tuple[tuple[float, ...], ...]  # the same for all, or [source][target]


@dataclass(frozen=True, slots=True)
class Network:
    """Seconds of latency and bytes a second; `serial`: a link carries one message at a time."""

    latency: PerPair = 0.0
    bandwidth: PerPair = math.inf
    serial: bool = False

    def __post_init__(self) -> None:
        for word, least, value in (
            ("latency", 0.0, self.latency),
            ("bandwidth", 1e-30, self.bandwidth),
        ):
            rows = value if isinstance(value, tuple) else ((value,),)
            if any(len(row) != len(rows) for row in rows):
                raise ShapeError(
                    f"the {word} matrix has {len(rows)} rows, one of them of another length"
                )
            pairs = [
                (s, t)
                for s in range(len(rows))
                for t in range(len(rows))
                if s != t or len(rows) == 1
            ]
            bad = [
                (s, t) for s, t in pairs if math.isnan(rows[s][t]) or rows[s][t] < least
            ]
            if bad:
                raise ShapeError(
                    f"a {word} of {rows[bad[0][0]][bad[0][1]]:g} from rank {bad[0][0]} to {bad[0][1]}"
                )


def of_pair(value: PerPair, source: int, target: int, word: str) -> float:
    """The number for a pair of ranks."""
    if not isinstance(value, tuple):
        return value
    if max(source, target) >= len(value):
        raise ShapeError(
            f"the {word} matrix is for {len(value)} ranks; a message goes from rank {source} to {target}"
        )
    return value[source][target]
