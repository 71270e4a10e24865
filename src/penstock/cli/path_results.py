"""What `penstock paths` shows of the plans that it has found: a table, or JSON."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.plan.paths import PathPlan, Rotation, StepPair
from penstock.plan.paths.planner import planned_sums_of
from penstock.view.numbers import write_time


@dataclass(frozen=True, slots=True)
class PathResults:
    """What the searches have found; None stands for a search that was not made."""

    plan: PathPlan
    full: PathPlan | None  # with an arrangement of its own, to compare with
    full_step: PathPlan | None  # on the arrangement of the plan
    rotation: Rotation | None


def json_facts(found: PathResults) -> dict[str, object]:
    """Return the results as JSON has them."""
    plan, full, full_step = found.plan, found.full, found.full_step
    rotation = found.rotation
    return {
        "makespan": plan.makespan,
        "lower_bound": plan.bound,
        "gap": plan.gap,
        "search_seconds": plan.seconds,
        "simulations": plan.simulations,
        "cut_short": plan.cut_short,
        "full_pipeline": None if full is None else full.makespan,
        "full_pipeline_cut_short": None if full is None else full.cut_short,
        "full_step": None if full_step is None else full_step.makespan,
        "mean_step": None if full_step is None else StepPair(plan, full_step).mean,
        "full_step_cut_short": None if full_step is None else full_step.cut_short,
        "rotation": [] if rotation is None else [p.makespan for p in rotation.plans],
        "nodes": [list(nodes) for nodes in plan.partitions],
    }


def table_rows(found: PathResults) -> list[tuple[str, str]]:
    """Return the results as the table shows them."""
    plan, full, full_step = found.plan, found.full, found.full_step
    rows = [
        (_step_name(plan), write_time(plan.makespan)),
        ("no plan takes less than", write_time(plan.bound)),
        ("gap", f"{plan.gap:.1%}"),
        ("search", _describe_search(plan)),
    ]
    if full is not None:
        saved = 1 - plan.makespan / full.makespan
        comparison = f"{write_time(full.makespan)}: planned paths take {saved:.1%} less"
        rows.append(("a step that skips nothing", comparison))
        rows.append(("search for it", _describe_search(full)))
    period = plan.problem.rules.full
    if full_step is not None:
        mean = StepPair(plan, full_step).mean
        step = f"{write_time(full_step.makespan)} with these nodes for the parts"
        if full_step.cut_short:
            step += ", cut short"
        rows.append(("a step with all parts", step))
        name = f"with all parts every {period} steps"
        rows.append((name, f"{write_time(mean)} per step on average"))
    if found.rotation is not None:
        rows.append(("paths in turn", _describe_rotation(found.rotation)))
    if plan.problem.has_sums:
        rows.append(("sums of gradients", _describe_sums(plan)))
    for part, nodes in enumerate(plan.partitions):
        held = "nodes " + " ".join(map(str, nodes)) if nodes else "on no node: skipped"
        rows.append((f"part {part}", held))
    return rows


def _step_name(plan: PathPlan) -> str:
    """Name what the times are of: a step, or one of its passes."""
    passes = plan.problem.passes
    return "a step" if passes == 1 else f"a pass, of {passes} in a step"


def _describe_sums(plan: PathPlan) -> str:
    """Describe how gradients are summed, and how long a step waits for that."""
    timeline = plan.timeline
    waited = timeline.makespan - float(timeline.end.max())
    kinds = [sum_.kind.value for sum_ in planned_sums_of(plan)]
    how = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))
    return f"{how or 'rings'}; they end {write_time(waited)} after the last backward"


def _describe_rotation(rotation: Rotation) -> str:
    """Describe how many sets of paths there are, and what they leave out."""
    count = len(rotation.plans)
    text = f"{count} sets, the slowest {write_time(rotation.makespan)}"
    if count == 1:
        text = "a single set, so nothing changes from step to step"
        if not rotation.left_out:
            text += ": it meets all sets of parts"
        elif not rotation.cut_short:
            text += ": no further set is as fast (--slack allows slower ones)"
    if rotation.left_out:
        text += f"; {len(rotation.left_out)} sets of parts are on no path"
    return f"{text}, cut short" if rotation.cut_short else text


def _describe_search(plan: PathPlan) -> str:
    """Describe the work of a search, and whether it was cut short."""
    work = f"{plan.simulations:,} moves in {write_time(plan.seconds, digits=2)}"
    return f"{work}, cut short" if plan.cut_short else work
