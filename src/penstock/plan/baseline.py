"""Times the layout that somebody runs today, to compare the best plan with it."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import ShapeError
from penstock.ir.schedule import Schedule
from penstock.layout import RECOMPUTE, Layout
from penstock.plan.candidates import Candidate, Evaluator, evaluate_schedule
from penstock.plan.pricing import Question
from penstock.plan.space import split_and_defer
from penstock.plan.workload import Division, Workload, divisors
from penstock.schedules import make, read_name, shape_of
from penstock.schedules.transforms import recut, slice_tokens


@dataclass(frozen=True, slots=True)
class StepParts:
    """What the seconds of a step go to, on the mean device."""

    computing: float
    idle: float  # waiting for other ranks, for messages and for all-reduces
    gathering: float  # of sharded weights
    optimizer: float  # with the reduce-scatter of sharded gradients before it

    def largest_saving(self, other: StepParts) -> tuple[str, float, float]:
        """The part that takes the most less here than in the other: its name, and both times."""
        names = {
            "computing": "computing",
            "idle": "idle time",
            "gathering": "weight all-gathers",
            "optimizer": "the gradient reduce-scatter with the optimizer",
        }
        pairs = {
            text: (getattr(other, name), getattr(self, name))
            for name, text in names.items()
        }
        best = max(pairs, key=lambda text: pairs[text][0] - pairs[text][1])
        return best, *pairs[best]


def step_parts(candidate: Candidate, question: Question) -> StepParts:
    """Divide the seconds of a candidate's step."""
    evaluator = question.pricing.evaluator(candidate.division)
    seconds = evaluator.passes * candidate.makespan
    idle = candidate.bubble * seconds
    update = evaluator.update(candidate.schedule)
    return StepParts(seconds - idle, idle, evaluator.gather, update)


def layout_candidate(question: Question, layout: Layout) -> Candidate:
    """Time and weigh a layout: with the fastest number of micro-batches that fits, if it leaves that open."""
    workload = question.workload
    if layout.devices > workload.devices:
        raise ShapeError(
            f"the layout takes {layout.devices} devices, but there are {workload.devices}"
        )
    share = _share(workload, layout)
    counts = [layout.microbatches] if layout.microbatches else divisors(share)
    found: list[tuple[bool, float, Candidate]] = []
    refusal: ShapeError | None = None
    for count in counts:
        if share % count:
            raise ShapeError(
                f"{share} sequences of each data-parallel rank are not divisible by {count} micro-batches"
            )
        division = Division(
            layout.dp_replicate,
            layout.pp,
            layout.tp,
            layout.dp_shard,
            count,
            share // count,
            RECOMPUTE[layout.recompute],
        )
        try:
            candidate = _candidate(question, division, layout.schedule)
        except ShapeError as error:
            refusal = refusal or error
            continue
        evaluator = question.pricing.evaluator(division)
        too_large = not evaluator.fits(candidate.peak)
        found.append((too_large, candidate.step, candidate))
    if not found:
        assert refusal is not None
        raise refusal
    return min(found, key=lambda one: one[:2])[2]


def _share(workload: Workload, layout: Layout) -> int:
    """The sequences of a pass for each data-parallel rank."""
    groups = layout.dp_replicate * layout.dp_shard * workload.passes
    share, left = divmod(workload.batch, groups)
    if left or not share:
        raise ShapeError(
            f"a global batch of {workload.batch} sequences is not divisible by {groups} "
            f"(dp_replicate={layout.dp_replicate} x dp_shard={layout.dp_shard} x {workload.passes} "
            "accumulation steps)"
        )
    return share


def _candidate(question: Question, division: Division, name: str) -> Candidate:
    name, shape = read_name(name)
    split = bool(shape.pop("split", False))
    evaluator = question.pricing.evaluator(division)
    schedule = _schedule(division, name, shape, question.workload.tokens)
    if split:
        schedule = _split(schedule, evaluator)
    return evaluate_schedule(
        division,
        f"{name}+split" if split else name,
        tuple(shape.items()),
        "split" if split else "fixed",
        schedule,
        evaluator,
    )


def _schedule(
    division: Division, name: str, shape: dict[str, int], tokens: int
) -> Schedule:
    """Make a schedule whose slices are cut at equal numbers of tokens."""
    sizes = {"ranks": division.ranks, "microbatches": division.microbatches}
    slices = shape.get("slices", 1)
    cuts = tuple(tokens * number // slices for number in range(slices + 1))
    if "slices" in shape_of(name):
        return recut(make(name, **sizes, **shape), cuts)
    whole = {key: value for key, value in shape.items() if key != "slices"}
    return slice_tokens(make(name, **sizes, **whole), cuts)


def _split(schedule: Schedule, evaluator: Evaluator) -> Schedule:
    return split_and_defer(
        schedule, evaluator.cost, lambda one: evaluator.fits(evaluator.peak(one))
    )
