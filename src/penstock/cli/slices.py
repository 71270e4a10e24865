"""`penstock plan --tokens`: whether to cut sequences into slices, where, and what it brings."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING

from penstock.cli.tables import print_table

if TYPE_CHECKING:
    from penstock.cli.cost import Price
    from penstock.plan.slices import SlicedCandidate, SlicedPlans

MAX_LENGTHS_SHOWN = (
    4  # slices of which a row shows the lengths; of more only the first and the last
)


def slice_candidates(
    ranks: int,
    microbatches: int,
    price: Price,
    granularity: int | None,
    memory: float | None,
    slices: int,
    watch: Callable[[str], None],
) -> SlicedPlans | None:
    """Ways to slice and not to, ranked; none if the cost knows no tokens or slices are not wanted."""
    from penstock.plan.slices import sliced_plans

    if price.profile is None or slices < 2:
        return None
    counts = [count for count in (2, 4, 8, 16, 32) if count <= slices]
    return sliced_plans(
        ranks,
        microbatches,
        price.tokens,
        price.cost,
        price.grain(granularity),
        price.memory(memory),
        slices=counts,
        regrouped=lambda parts: price.cost,
        watch=watch,
    )


def slice_facts(row: SlicedCandidate) -> dict[str, object]:
    """A row for JSON."""
    c = row.candidate
    return {
        "name": c.name,
        "shape": dict(c.shape),
        "order": c.sort,
        "cuts": list(row.cuts),
        "makespan": c.makespan,
        "bubble": c.bubble,
        "peak": c.peak,
        "lower_bound": c.bound,
        "speedup": row.speedup,
    }


def show_slices(found: SlicedPlans, price: Price, top: int) -> None:
    """The table of slices, and the verdict."""
    from penstock.plan import title

    heads = (
        "schedule",
        "slices",
        "tokens of each",
        "latency",
        "bubble",
        "peak",
        "speed-up",
    )
    table = [
        (
            title(c.name, tuple(pair for pair in c.shape if pair[0] != "slices")),
            str(row.slices),
            lengths(row.cuts),
            price.time(c.makespan, 4),
            f"{c.bubble:.1%}",
            price.size(c.peak, 3),
            "-" if row.speedup is None else f"{row.speedup:.3f}",
        )
        for row in found.rows[:top]
        for c in (row.candidate,)
    ]
    print_table(heads, table, found.verdict, spare=("tokens of each", "peak"))


def lengths(cuts: tuple[int, ...]) -> str:
    """Tokens of each slice.

    >>> lengths((0, 384, 512)), lengths(tuple(range(0, 90, 10)))
    ('384 128', '10 ... 10')
    """
    each = [str(end - begin) for begin, end in pairwise(cuts)]
    return " ".join(
        each if len(each) <= MAX_LENGTHS_SHOWN else [each[0], "...", each[-1]]
    )
