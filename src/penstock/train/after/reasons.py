"""Explains why a run has its plan, from what the planner wrote into plan.json."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.config import AUTO
from penstock.ir import Plan
from penstock.ir.plan import Fact
from penstock.view.numbers import write_size, write_time

# Prefixes of facts about another candidate, whose name follows.
MAKESPAN = "makespan of "
PEAK = "peak_activations of "
HEADS = ("schedule", "predicted time", "compared with the chosen", "peak activations")
SHARES = ("bubble", "gap")
TIMES = ("makespan", "lower_bound", "noisy_makespan")
TOLD = (*TIMES, *SHARES, "peak_activations", "candidates", "too_large", "memory", "memory_mib", "order", "shape",
        "forward", "backward", "comm", "profile")  # fmt: skip  # in the sentences or in the table


@dataclass(frozen=True, slots=True)
class Reasons:
    """Sentences, and a table of the compared candidates with the chosen one first."""

    sentences: tuple[str, ...]
    heads: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()


def reasons_of(plan: Plan, named: str = "") -> Reasons:
    """Explain a plan; `named` is schedule.name of the config, or empty if it is not known."""
    facts = dict(plan.why)
    if "makespan" not in facts:
        return Reasons((*_origin(plan, named), *_others(facts)))
    rows = _rows(plan, facts)
    sentences = [*_origin(plan, named), *_figures(facts), *_others(facts)]
    return Reasons(tuple(sentences), HEADS, rows)


def _origin(plan: Plan, named: str) -> list[str]:
    """Where the plan comes from, and what it was compared with."""
    facts, size = (
        dict(plan.why),
        f"{plan.schedule.ranks} ranks and {len(plan.schedule.microbatches)} micro-batches",
    )
    if named == AUTO and "candidates" in facts:
        left = int(facts.get("too_large") or 0)
        more = (
            f" {left} more would hold more than that and were left out." if left else ""
        )
        return [
            f"schedule.name = auto compared {facts['candidates']} schedules for {size}. It took the one with the "
            f"least predicted time among those whose ranks hold no more activations than 1f1b does.{more}"
        ]
    if named == AUTO:
        return [
            "schedule.name = auto had nothing to compare: a single rank runs one micro-batch after the other."
        ]
    if Path(named).suffix in (".json", ".csv"):
        return [
            f"The plan was read from a file, for {size}. Nothing was compared with it here."
        ]
    if named:
        return [
            f"schedule.name = {named} names this schedule, for {size}, so no others were compared with it."
        ]
    return [f"{plan.name}: {size}."]


def _figures(facts: dict[str, Fact]) -> list[str]:
    """The time of the plan, and how far it is from the lower bound."""
    lines = []
    if "profile" not in facts and "backward" in facts:
        lines.append(
            f"Times are in forward passes of one micro-batch through one rank. A backward pass counts "
            f"{_plain(facts['backward'])}, a message between ranks {_plain(facts.get('comm'))}."
        )
    bound, gap = facts.get("lower_bound"), facts.get("gap")
    if isinstance(bound, int | float) and isinstance(gap, int | float):
        least = f"With this placement of the stages and these cuts, no order takes less than {time_of(facts, bound)}"
        tail = "The bound says nothing about other placements or other cuts."
        lines.append(
            f"{least}; this one is {gap:.1%} above that. {tail}"
            if gap > 5e-4
            else f"{least}, which this one reaches. {tail}"
        )
    noisy = facts.get("noisy_makespan")
    if isinstance(noisy, int | float):
        lines.append(
            f"If every time varies by a tenth at random, it takes {time_of(facts, noisy)} on average."
        )
    return lines


def _rows(plan: Plan, facts: dict[str, Fact]) -> tuple[tuple[str, ...], ...]:
    """The chosen candidate, then its rivals from the fastest to the slowest."""
    own, found = facts["makespan"], []
    for key, value in facts.items():
        if key.startswith(MAKESPAN) and isinstance(value, int | float):
            name = key.removeprefix(MAKESPAN)
            found.append((name, float(value), facts.get(PEAK + name)))
    if not isinstance(own, int | float):
        return ()
    rows = [
        (
            f"{plan.name} (chosen)",
            time_of(facts, own),
            "",
            size_of(facts, facts.get("peak_activations")),
        )
    ]
    for name, time, peak in sorted(found, key=lambda row: row[1]):
        share = time / own - 1.0 if own else 0.0
        beside = (
            "as long"
            if abs(share) < 5e-4
            else f"{abs(share):.1%} {'longer' if share > 0 else 'shorter'}"
        )
        rows.append((name, time_of(facts, time), beside, size_of(facts, peak)))
    return tuple(rows)


def _others(facts: dict[str, Fact]) -> list[str]:
    """Facts of a planner that the sentences above do not mention."""
    return [
        f"{key.replace('_', ' ')}: {_plain(value)}"
        for key, value in facts.items()
        if key not in TOLD
        and not key.startswith((MAKESPAN, PEAK))
        and value is not None
    ]


# ---------------------------------------------------------------- numbers with their units
def time_of(facts: dict[str, Fact], value: float) -> str:
    """Format a time: seconds if the plan used measured times, else forward passes."""
    return f"{value:,.2f}" if "backward" in facts else write_time(value)


def size_of(facts: dict[str, Fact], value: Fact) -> str:
    """Format activations: bytes if the plan used measured sizes, else micro-batches."""
    if not isinstance(value, int | float):
        return ""
    if "profile" in facts:
        return write_size(value)
    return f"{value:.3g} micro-batch{'' if value == 1 else 'es'}"


def _plain(value: Fact) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
