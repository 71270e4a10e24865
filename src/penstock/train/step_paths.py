"""Which schedule each step of a run takes, if micro-batches leave out parts.

    warmup = 2, full = 5, three sets of paths a b c        * all parts

    step     1  2  3  4  5  6  7  8  9  10  11 ...
    paths    *  *  a  b  *  c  a  b  c  *   a  ...

The answer depends only on the number of the step, so a run that resumes takes the same paths
as one that never stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.config import PathsConfig, RunConfig
from penstock.ir import Plan, Schedule
from penstock.schedules.coverage import full_schedule, visits_all_parts

# Earlier steps are not worth timing, because caches are still cold.
FIRST_TIMED_STEP = 3
TIMED_EVERY = 50  # steps


@dataclass(frozen=True, slots=True)
class StepPaths:
    """The schedules of a run, and the rule by which steps take them.

    `partial` are the sets of paths that steps take in turn. If some steps run all parts, they
    take the schedule `full`: the first `warmup` steps, and every `period`-th one if it is not 0.
    Steps are counted from 0.
    """

    partial: tuple[Schedule, ...]
    full: Schedule | None = None
    warmup: int = 0
    period: int = 0

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        """All schedules that some step takes."""
        return self.partial if self.full is None else (*self.partial, self.full)

    def is_full(self, step: int) -> bool:
        """Whether a step runs all parts although others leave out some."""
        if self.full is None:
            return False
        due = self.period > 0 and (step + 1) % self.period == 0
        return step < self.warmup or due

    def at(self, step: int) -> int:
        """Return the number of the schedule that a step takes, in `schedules`."""
        if self.is_full(step):
            return len(self.partial)
        before = step
        if self.full is not None:
            before -= min(self.warmup, step)
            if self.period:
                before -= max(step // self.period - self.warmup // self.period, 0)
        return before % len(self.partial)

    def previous(self, step: int) -> int:
        """Return the last step before this one that is full if this one is, else partial; -1 if there is none."""
        kind = self.is_full(step)
        before = step - 1
        while before >= 0 and self.is_full(before) is not kind:
            before -= 1
        return before


def step_paths(plan: Plan, paths: PathsConfig) -> StepPaths:
    """Return the schedules that the steps of a run take."""
    partial = (plan.schedule, *plan.rotation)
    if paths.rotate > 0:
        partial = partial[: paths.rotate]
    period = max(paths.full, 0)
    skipping = not all(map(visits_all_parts, partial))
    if not skipping or not (paths.warmup or period):
        return StepPaths(partial)
    full = plan.full or full_schedule(plan.schedule)
    return StepPaths(partial, full, paths.warmup, period)


def sum_messages_of(plan: Plan) -> str:
    """Return the type in which planned sums of gradients travel."""
    return str(plan.facts.get("sum_messages", "float32"))


def mean_layers(schedule: Schedule, partition: Sequence[int]) -> float:
    """Return how many layers a micro-batch passes through on average."""
    total = 0
    for microbatch in schedule.microbatches:
        total += sum(partition[schedule.stages[s].part] for s in microbatch.path)
    return total / len(schedule.microbatches)


def describe_paths(plan: Plan, paths: PathsConfig) -> str:
    """Describe which parts the steps of a run visit; empty if every step runs all of them in order."""
    steps = step_paths(plan, paths)
    if all(map(visits_all_parts, steps.schedules)):
        return ""
    layers = [mean_layers(schedule, plan.partition) for schedule in steps.partial]
    sets = len(steps.partial)
    words = [
        f"{sum(layers) / sets:.3g} of {sum(plan.partition)} layers per micro-batch",
        f"{sets} sets of paths in turn" if sets > 1 else "the same paths in every step",
    ]
    if steps.warmup:
        words.append(f"all parts in the first {steps.warmup} steps")
    if steps.period:
        words.append(f"all parts every {steps.period} steps")
    if plan.sums:
        messages = sum_messages_of(plan)
        words.append(f"gradients are summed as planned, in {messages}")
    return ", ".join(words)


def is_timed(step: int, settings: RunConfig, paths: StepPaths) -> bool:
    """Whether to record the timeline of a step, counted from 1.

    An early step and the last are included, so that short and stopped runs have one too. If
    some steps are full and others are not, the next one of the other kind is timed as well.
    """
    first_candidate = paths.previous(step - 1) + 2
    return any(
        is_due(one, TIMED_EVERY) or one in (FIRST_TIMED_STEP, settings.steps)
        for one in range(first_candidate, step + 1)
    )


def is_due(step: int, every: int) -> bool:
    """Whether something that happens every few steps happens after this one; 0 is never."""
    return every > 0 and step % every == 0
