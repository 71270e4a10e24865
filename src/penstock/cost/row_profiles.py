"""Profiles of one model with several numbers of rows in a micro-batch.

    rows       1       2       3       4       8
    measured   o-------o---------------o               between two measurements every time and size is linear in
                               ^               ^       the rows; beyond them, the nearest one is scaled
                         interpolated        scaled

A planner that chooses how many rows go through together needs a profile for each choice, and
the times of a layer do not grow in proportion: two rows often take less than twice as long as
one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from penstock.cost.curve import sum_curves
from penstock.cost.fit import Fit
from penstock.cost.network import Network
from penstock.cost.profile import Block, Point, Profile
from penstock.errors import ShapeError
from penstock.ir.action import Op

Weighted = Sequence[tuple[float, Block]]


@dataclass(frozen=True, slots=True)
class RowProfiles:
    """Profiles of one model, measured with different numbers of rows, in ascending order."""

    measured: tuple[Profile, ...]

    def __post_init__(self) -> None:
        rows = self.rows
        if not rows or list(rows) != sorted(set(rows)):
            raise ShapeError(
                f"profiles for {list(rows)} rows make no set; "
                "it takes at least one profile, each with more rows than the one before"
            )
        first = self.measured[0]
        for other in self.measured[1:]:
            if (other.layers, other.tokens) != (first.layers, first.tokens):
                raise ShapeError(
                    f"the profile for {first.rows} rows has {first.layers} layers and "
                    f"{first.tokens} tokens, but the one for {other.rows} rows has "
                    f"{other.layers} layers and {other.tokens} tokens; "
                    "all must be of one model and one length"
                )

    @property
    def rows(self) -> tuple[int, ...]:
        """The numbers of rows that were measured."""
        return tuple(profile.rows for profile in self.measured)

    @property
    def layers(self) -> int:
        """The layers of the model."""
        return self.measured[0].layers

    @property
    def tokens(self) -> int:
        """The tokens of a sequence."""
        return self.measured[0].tokens

    @property
    def network(self) -> Network:
        """The links between ranks, which do not depend on the rows."""
        return self.measured[0].network

    @property
    def worst_error(self) -> float:
        """The worst error of all measured profiles on held-out points."""
        return max(profile.worst_error for profile in self.measured)

    def at(self, rows: int) -> Profile:
        """Return the profile for a number of rows.

        Where it was measured, it is the measured one. Between two measurements all times
        and sizes are linear in the rows. Beyond them, those of the nearest measurement
        grow in proportion to the rows.
        """
        if rows < 1:
            raise ShapeError(f"a micro-batch must have at least 1 row, not {rows}")
        after = bisect_left(self.rows, rows)
        if after < len(self.measured) and self.rows[after] == rows:
            return self.measured[after]
        if after in (0, len(self.measured)):
            nearest = self.measured[max(after - 1, 0)]
            return _mix(rows, [(rows / nearest.rows, nearest)])
        fewer = self.measured[after - 1]
        more = self.measured[after]
        share = (rows - fewer.rows) / (more.rows - fewer.rows)
        return _mix(rows, [(1 - share, fewer), (share, more)])


def _mix(rows: int, terms: Sequence[tuple[float, Profile]]) -> Profile:
    """Return a weighted sum of profiles; what does not grow with the rows is their mean."""
    total = sum(weight for weight, _ in terms)
    first = terms[0][1]
    return replace(
        first,
        rows=rows,
        message=sum(weight * profile.message for weight, profile in terms),
        embed=_mix_blocks([(weight, profile.embed) for weight, profile in terms]),
        layer=_mix_blocks([(weight, profile.layer) for weight, profile in terms]),
        head=_mix_blocks([(weight, profile.head) for weight, profile in terms]),
        turn=sum(weight * profile.turn for weight, profile in terms) / total,
        switch=sum(weight * profile.switch for weight, profile in terms) / total,
    )


def _mix_blocks(terms: Weighted) -> Block:
    total = sum(weight for weight, _ in terms)
    return Block(
        _mix_points(terms),
        F=_mix_fits(terms, Op.F),
        B=_mix_fits(terms, Op.B),
        I=_mix_fits(terms, Op.I),
        W=_mix_fits(terms, Op.W),
        held=sum(weight * block.held for weight, block in terms),
        kept=sum(weight * block.kept for weight, block in terms),
        weights=terms[0][1].weights,
        update=sum(weight * block.update for weight, block in terms) / total,
    )


def _mix_fits(terms: Weighted, op: Op) -> Fit:
    """The weighted sum of curves; its errors are the largest ones among them."""
    fits = [block.fit(op) for _, block in terms]
    curve = sum_curves((weight, block.fit(op).curve) for weight, block in terms)
    return Fit(curve, max(fit.worst for fit in fits), max(fit.median for fit in fits))


def _mix_points(terms: Weighted) -> tuple[Point, ...]:
    """The weighted sums of the times at the slices that all blocks have."""
    by_slice = [_by_slice(block.points) for _, block in terms]
    mixed = []
    for point in terms[0][1].points:
        key = (point.tokens, point.prefix, point.held_out)
        if not all(key in points for points in by_slice):
            continue
        pairs = [
            (weight, points[key])
            for (weight, _), points in zip(terms, by_slice, strict=True)
        ]
        mixed.append(
            replace(
                point,
                F=sum(weight * each.F for weight, each in pairs),
                B=sum(weight * each.B for weight, each in pairs),
                I=sum(weight * each.I for weight, each in pairs),
                W=sum(weight * each.W for weight, each in pairs),
            )
        )
    return tuple(mixed)


def _by_slice(points: Iterable[Point]) -> dict[tuple[int, int, bool], Point]:
    return {(point.tokens, point.prefix, point.held_out): point for point in points}
