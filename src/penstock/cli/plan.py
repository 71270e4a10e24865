"""`penstock plan`: ranks every schedule that fits, and says whether to slice sequences."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from penstock.cli.cost import check_memory_option, price_of
from penstock.cli.options import (
    AcceptError,
    BackwardOption,
    CommOption,
    ForwardOption,
    JsonFlag,
    OutputFile,
    ProfileFile,
    TokensOption,
)
from penstock.cli.tables import print_json, print_table, progress, write

if TYPE_CHECKING:
    from penstock.plan import Candidate, Portfolio
    from penstock.plan.choice import Choice, Limits
    from penstock.plan.price import Price
    from penstock.plan.slices import SlicedCandidate, SlicedPlans

MAX_LENGTHS_SHOWN = 4  # a row shows the lengths of at most this many slices


def plan_command(
    ranks: Annotated[int, typer.Option(help="Workers in the pipeline.")],
    microbatches: Annotated[int, typer.Option(help="Micro-batches in a step.")],
    memory: Annotated[
        Optional[float],
        typer.Option(
            help="Activations that a rank may hold: in micro-batches, or with --profile "
            "in MiB."
        ),
    ] = None,
    forward: ForwardOption = None,
    backward: BackwardOption = None,
    comm: CommOption = None,
    profile: ProfileFile = None,
    tokens: TokensOption = None,
    accept_error: AcceptError = False,
    stages: Annotated[
        int,
        typer.Option(
            help="The most stages on a rank. A model cannot have more than its layers."
        ),
    ] = 16,
    slices: Annotated[
        int,
        typer.Option(
            help="The most token slices of a sequence; 1 for models that cannot be sliced."
        ),
    ] = 8,
    granularity: Annotated[
        Optional[int],
        typer.Option(
            help="With --profile: cuts are multiples of this number of tokens. "
            "Default: 16, or 128 for a profile of a GPU."
        ),
    ] = None,
    weights: Annotated[
        int, typer.Option(help="The most copies of the weights; 2 admits chimera.")
    ] = 1,
    top: Annotated[int, typer.Option(help="The number of rows to show.")] = 15,
    output: OutputFile = None,
    json: JsonFlag = False,
) -> None:
    """Build, simulate and rank every schedule that fits; with -o, write the best as a plan.json.

    The bound and the gap of a row hold for its own placement and cuts: another order of the same stages could be faster
    by the gap at most. They say nothing about other placements or cuts.

    With a profile it also says whether and where to cut sequences into slices, and what that gains.

    Example: penstock plan --ranks 8 --microbatches 16 --comm 0.05 --memory 8 -o plan.json

    Example: penstock plan --ranks 4 --microbatches 2 --profile profile.json --tokens 8192
    """
    from penstock.formats import dump_plan
    from penstock.plan import candidate_plan
    from penstock.plan.choice import Limits

    price = price_of(forward, backward, comm, profile, tokens, accept_error)
    check_memory_option(memory)
    limits = Limits(memory, stages, slices, weights, granularity)
    choice = _choose(ranks, microbatches, price, limits)
    if output is not None:
        best = choice.best
        facts = price.facts(str(profile), memory)
        plan = candidate_plan(best, facts, price.partition(best.schedule))
        write(output, dump_plan(plan), quiet=json)
    if json:
        sizes = {"ranks": ranks, "microbatches": microbatches, "memory": memory}
        print_json({**sizes, **_choice_facts(choice)})
        return
    _print_portfolio(choice.portfolio, price, limits, top)
    if choice.sliced is not None:
        _print_slices(choice.sliced, price, top)


def _choose(ranks: int, microbatches: int, price: Price, limits: Limits) -> Choice:
    """Rank all candidates while a line in the terminal shows the current one."""
    from penstock.plan.choice import choose_plan
    from penstock.view.numbers import write_size

    with progress("planning") as status:

        def show_name(name: str) -> None:
            if status is not None:
                status.update(f"planning: {name}")

        def show_size(size: float) -> str:
            return write_size(size, price.cost.units, digits=4)

        return choose_plan(ranks, microbatches, price, limits, show_name, show_size)


# ---------------------------------------------------------------- JSON
def _choice_facts(choice: Choice) -> dict[str, object]:
    portfolio = choice.portfolio
    facts: dict[str, object] = {
        "schedules": [_candidate_facts(one) for one in portfolio.candidates]
    }
    if choice.sliced is not None:
        facts["sliced"] = [_slice_facts(row) for row in choice.sliced.rows]
        facts["verdict"] = choice.sliced.verdict
    facts["too_large"] = [
        {"name": name, "peak": peak} for name, peak in portfolio.too_large
    ]
    return facts


def _candidate_facts(candidate: Candidate) -> dict[str, object]:
    return {
        "name": candidate.name,
        "shape": dict(candidate.shape),
        "order": candidate.sort,
        "makespan": candidate.makespan,
        "bubble": candidate.bubble,
        "peak": candidate.peak,
        "weights": candidate.weights,
        "lower_bound": candidate.bound,
        "gap": candidate.gap,
        "noisy_makespan": candidate.noisy,
    }


def _slice_facts(row: SlicedCandidate) -> dict[str, object]:
    candidate = row.candidate
    return {
        "name": candidate.name,
        "shape": dict(candidate.shape),
        "order": candidate.sort,
        "cuts": list(row.cuts),
        "makespan": candidate.makespan,
        "bubble": candidate.bubble,
        "peak": candidate.peak,
        "lower_bound": candidate.bound,
        "speedup": row.speedup,
    }


# ---------------------------------------------------------------- tables
def _print_portfolio(
    portfolio: Portfolio, price: Price, limits: Limits, top: int
) -> None:
    from penstock.plan import title
    from penstock.view.numbers import size_scale, time_scale

    shown = portfolio.candidates[:top]
    times = time_scale(portfolio.best.makespan, price.cost.units)
    sizes = size_scale(portfolio.best.peak, price.cost.units)
    heads = (
        "",
        "schedule",
        "order",
        "makespan",
        "bubble",
        "peak",
        "bound",
        "gap",
        "±10%",
    )
    rows = [
        (
            str(place),
            title(candidate.name, candidate.shape),
            candidate.sort,
            times.number(candidate.makespan),
            f"{candidate.bubble:.1%}",
            sizes.number(candidate.peak, 3),
            times.number(candidate.bound),
            f"{candidate.gap:.1%}",
            times.number(candidate.noisy),
        )
        for place, candidate in enumerate(shown, start=1)
    ]
    measured = ""
    if price.profile is not None:
        measured = f"{sizes.unit}; times are in {times.unit}"
    notes = _notes(portfolio, price, limits, top, measured or "micro-batches")
    print_table(heads, rows, notes, spare=("bound", "order", "±10%"))


def _notes(
    portfolio: Portfolio, price: Price, limits: Limits, top: int, units: str
) -> str:
    """Return the explanations under the table of candidates."""
    from penstock.view.numbers import write_size

    notes = [
        "order: fixed is the same for any cost; split and listed are adapted to this cost",
        "±10%: mean makespan under random noise that no candidate was adapted to",
        "bound: no order of this placement and these cuts is faster, but other placements may be; gap: distance to it",
        f"peak: the activations of the fullest rank, in {units}",
    ]
    hidden = len(portfolio.candidates) - top
    if hidden > 0:
        notes.append(f"{hidden} more candidates fit; --top shows more rows")
    if portfolio.too_large:
        name, peak = portfolio.too_large[0]
        limit = price.memory_limit(limits.memory) or 0.0
        units_of_cost = price.cost.units
        notes.append(
            f"{len(portfolio.too_large)} candidates exceed the memory limit of "
            f"{write_size(limit, units_of_cost, 4)}; the smallest of them is {name} "
            f"({write_size(peak, units_of_cost, 4)})"
        )
    untried = ["skip (it leaves out work)"]
    if limits.weights < 2:
        untried.append("chimera (it needs two copies of the weights: --weights 2)")
    notes.append(f"not tried: {', '.join(untried)}")
    return "\n".join(notes)


def _print_slices(plans: SlicedPlans, price: Price, top: int) -> None:
    """Print the ways to slice sequences, and whether slicing pays."""
    from penstock.plan import title
    from penstock.view.numbers import size_scale, time_scale

    times = time_scale(plans.best.candidate.makespan, price.cost.units)
    sizes = size_scale(plans.best.candidate.peak, price.cost.units)
    heads = (
        "schedule",
        "slices",
        "tokens of each",
        "latency",
        "bubble",
        "peak",
        "speed-up",
    )
    rows = []
    for row in plans.rows[:top]:
        candidate = row.candidate
        shape = tuple(pair for pair in candidate.shape if pair[0] != "slices")
        speedup = "-" if row.speedup is None else f"{row.speedup:.3f}"
        rows.append(
            (
                title(candidate.name, shape),
                str(row.slices),
                slice_lengths(row.cuts),
                times.number(candidate.makespan),
                f"{candidate.bubble:.1%}",
                sizes.number(candidate.peak, 3),
                speedup,
            )
        )
    print_table(heads, rows, plans.verdict, spare=("tokens of each", "peak"))


def slice_lengths(cuts: tuple[int, ...]) -> str:
    """Write the tokens of each slice; of many slices, only the first and the last.

    >>> slice_lengths((0, 384, 512)), slice_lengths(tuple(range(0, 90, 10)))
    ('384 128', '10 ... 10')
    """
    lengths = [str(end - begin) for begin, end in pairwise(cuts)]
    if len(lengths) > MAX_LENGTHS_SHOWN:
        lengths = [lengths[0], "...", lengths[-1]]
    return " ".join(lengths)
