"""Explains why a run has its plan, from what the planner wrote into plan.json."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from penstock.config import AUTO
from penstock.ir import Plan
from penstock.ir.plan import Fact
from penstock.view.numbers import (
    MICROBATCHES,
    RANKS,
    count_of,
    write_size,
    write_time,
)

# Prefixes of facts about another candidate, whose name follows.
STEP = "step of "
PEAK = "peak of "
HEADS = ("plan", "predicted step", "compared with the chosen", "memory of the fullest")
SMALLEST_GAP = 5e-4  # less is not shown
# Facts that the sentences or the table tell.
TOLD = (
    "step",
    "makespan",
    "lower_bound",
    "order_bound",
    "noisy_makespan",  # of older plans
    "noisy_step",
    "bubble",
    "gap",
    "bound_holds_for",
    "cut_short",
    "peak",
    "candidates",
    "too_large",
    "memory",
    "memory_bytes",
    "order",
    "shape",
    "forward",
    "backward",
    "comm",
    "profile",
    "copies",
    "rows",
)
# Facts of `penstock lab paths`, which its own sentences tell.
TOLD_OF_PATHS = (
    "simulations",
    "skipped",
    "slices",
    "waves",
    "turn",
    "rules",
    "slots",
    "sums",
    "sum_messages",
    "passes",
    "full_makespan",
    "last_backward",
    "full_last_backward",
    "nodes",
)


@dataclass(frozen=True, slots=True)
class Reasons:
    """Sentences, and a table of the compared candidates with the chosen one first."""

    sentences: tuple[str, ...]
    heads: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()


def reasons_of(plan: Plan, named: str = "") -> Reasons:
    """Explain a plan; `named` is schedule.name of the config, or empty if it is not known."""
    facts = dict(plan.why)
    compared = "step" in facts and "rules" not in facts
    figures = _figures(facts) if compared else []
    if "rules" in facts:
        figures = _figures_of_paths(facts)
    sentences = (_origin(plan, named), *figures, *_others(facts))
    if not compared:
        return Reasons(sentences)
    return Reasons(sentences, HEADS, _rows(plan, facts))


def _origin(plan: Plan, named: str) -> str:
    """Where the plan comes from, and what it was compared with."""
    facts = dict(plan.why)
    schedule = plan.schedule
    ranks = count_of(schedule.ranks, *RANKS)
    size = f"{ranks} and {count_of(len(schedule.microbatches), *MICROBATCHES)}"
    if named == AUTO:
        return _comparison(facts, size)
    if Path(named).suffix in (".json", ".csv"):
        return f"The plan was read from a file, for {size}. Nothing was compared with it here."
    if named:
        return f"schedule.name = {named} names this schedule, for {size}, so no others were compared with it."
    return f"{plan.name}: {size}."


def _comparison(facts: dict[str, Fact], size: str) -> str:
    """What auto compared, and by which times."""
    count = facts.get("candidates") or 1
    times = "with the times in its profile"
    if facts.get("profile") == "measured":
        times = "with times measured on this machine"
    sentence = (
        f"schedule.name = auto compared {count} plans {times}, and took the one with "
        f"the shortest predicted step: {size}."
    )
    left = int(facts.get("too_large") or 0)
    if left:
        sentence += f" {left} more would not fit into the memory."
    if facts.get("cut_short"):
        sentence += " The search was stopped early."
    return sentence


def _figures(facts: dict[str, Fact]) -> list[str]:
    """The time of the plan, and how far it is from the lower bound."""
    lines = []
    if "profile" not in facts and "backward" in facts:
        lines.append(
            f"Times are in forward passes of one micro-batch through one rank. A backward pass counts "
            f"{_plain(facts['backward'])}, a message between ranks {_plain(facts.get('comm'))}."
        )
    bound = facts.get("lower_bound")
    gap = facts.get("gap")
    if isinstance(bound, int | float) and isinstance(gap, int | float):
        least = (
            "No plan that the search could have returned takes less than "
            f"{time_of(facts, bound)}"
        )
        if gap > SMALLEST_GAP:
            lines.append(f"{least}; this one is {gap:.1%} above that.")
        else:
            lines.append(f"{least}, which this one reaches: it is optimal.")
    noisy = facts.get("noisy_step")
    if isinstance(noisy, int | float):
        lines.append(
            f"If every time varies by a tenth at random, it takes {time_of(facts, noisy)} on average."
        )
    return lines


def _figures_of_paths(facts: dict[str, Fact]) -> list[str]:
    """The times of planned paths on their cluster, and the rules that they follow."""
    lines = []
    makespan = facts.get("makespan")
    bound = facts.get("lower_bound")
    gap = facts.get("gap")
    if isinstance(makespan, int | float):
        unit = "step" if facts.get("passes", 1) == 1 else "pass"
        line = f"penstock lab paths planned it for a cluster, where a {unit} takes {write_time(makespan)}"
        if isinstance(bound, int | float) and isinstance(gap, int | float):
            least = write_time(bound)
            line += f". No plan under the same rules takes less than {least}; this one is {gap:.1%} above that"
        lines.append(f"{line}.")
    skipped = facts.get("skipped")
    full = facts.get("full_makespan")
    line = f"Each micro-batch leaves out {skipped} part{'' if skipped == 1 else 's'}"
    if isinstance(full, int | float):
        line += f". A step that runs all parts takes {write_time(full)} there"
    lines.append(f"{line}.")
    if facts.get("waves"):
        lines.append("It visits every node twice, on its way down and on its way up.")
    if facts.get("slices", 1) != 1:
        lines.append(f"Each micro-batch is cut into {facts['slices']} token slices.")
    rules = str(facts["rules"])
    rules = re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.3g}", rules)
    lines.append(f"The rules of its paths: {rules}.")
    lines.append(
        f"The nodes may hold {facts.get('slots')} micro-batches with each part."
    )
    sums = f"Replicas sum their gradients: {facts.get('sums')}"
    if facts.get("sums") == "planned":
        sums += f", in {facts.get('sum_messages', 'float32')}"
    lines.append(f"{sums}.")
    if "nodes" in facts:
        lines.append(f"Its ranks are the nodes {facts['nodes']} of the cluster.")
    return lines


def _rows(plan: Plan, facts: dict[str, Fact]) -> tuple[tuple[str, ...], ...]:
    """The chosen candidate, then its rivals from the fastest to the slowest."""
    own = facts["step"]
    found = []
    for key, value in facts.items():
        if key.startswith(STEP) and isinstance(value, int | float):
            name = key.removeprefix(STEP)
            found.append((name, float(value), facts.get(PEAK + name)))
    if not isinstance(own, int | float):
        return ()
    rows = [
        (
            f"{plan.name} (chosen)",
            time_of(facts, own),
            "",
            size_of(facts, facts.get("peak")),
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
    told = (*TOLD, *TOLD_OF_PATHS) if "rules" in facts else TOLD
    return [
        f"{key.replace('_', ' ')}: {_plain(value)}"
        for key, value in facts.items()
        if key not in told and not key.startswith((STEP, PEAK)) and value is not None
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
