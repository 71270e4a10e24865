"""Chooses the fastest plan that another framework can run, and says what it must be told.

search, within what the framework knows ─► rows, the fastest first
    │
    ├─ cannot run: waves=2, other orders ...           named, with the reason
    └─ can run: simulated once more as its runtime sends messages ─► the fastest ─► options and files
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from penstock.advice.automodel import Automodel
from penstock.advice.deepspeed import Deepspeed
from penstock.advice.megatron import Megatron
from penstock.advice.pipeline import Advice, Framework, PipelineTerms, pipeline_terms
from penstock.advice.torchtitan import Torchtitan
from penstock.cost.waiting import WaitingCost
from penstock.errors import ShapeError, UnknownNameError
from penstock.plan.question import Question
from penstock.plan.search import Landscape, Row, row_title

FRAMEWORKS: dict[str, Framework] = {
    "torchtitan": Torchtitan(),
    "megatron": Megatron(),
    "deepspeed": Deepspeed(),
    "automodel": Automodel(),
}
MAX_TIMED_ROWS = 24  # plans that are simulated as the framework would run them
MAX_REFUSALS = 4  # plans that are named because the framework cannot run them


@dataclass(frozen=True, slots=True)
class Refusal:
    """A plan that the framework cannot run: its name, the time of its step in our runtime, and the reason."""

    name: str
    step: float
    reason: str


@dataclass(frozen=True, slots=True)
class Expectation:
    """What the simulator expects of the framework's runtime."""

    step: float
    makespan: float
    bubble: float
    peak: float
    waits: bool  # whether ranks wait for their messages


@dataclass(frozen=True, slots=True)
class Counsel:
    """The plan for a framework, what it must be told, and faster plans that it cannot run."""

    row: Row
    name: str
    pipeline: PipelineTerms
    expected: Expectation
    advice: Advice
    refused: tuple[Refusal, ...]


def framework_of(name: str) -> Framework:
    """The framework with this name."""
    if name not in FRAMEWORKS:
        raise UnknownNameError("framework", name, FRAMEWORKS)
    return FRAMEWORKS[name]


def advise(
    landscape: Landscape, question: Question, framework: Framework, stem: Path
) -> Counsel:
    """Choose the fastest plan that a framework can run, and say what to tell it."""
    runnable: list[tuple[Expectation, Row, PipelineTerms]] = []
    refusals: list[Refusal] = []
    for row in landscape.rows:
        pipeline = framework.adapt(pipeline_terms(row, question.workload))
        reason = framework.refuse(pipeline)
        if reason:
            name = row_title(row, landscape)
            refusals.append(Refusal(name, row.candidate.step, reason))
        elif len(runnable) < MAX_TIMED_ROWS:
            expected = _expect(row, pipeline, question, framework)
            runnable.append((expected, row, pipeline))
    if not runnable:
        raise ShapeError(
            f"{framework.name} can run none of the {len(landscape.rows)} plans that fit; the "
            f"fastest, {refusals[0].name}: {refusals[0].reason}\n"
            "  give more memory, micro-batches or devices, or use Penstock's own runtime"
        )
    expected, row, pipeline = min(runnable, key=lambda one: one[0].step)
    faster = [one for one in refusals if one.step < expected.step]
    return Counsel(
        row,
        row_title(row, landscape),
        pipeline,
        expected,
        framework.advise(pipeline, stem),
        _distinct(faster),
    )


def _expect(
    row: Row, pipeline: PipelineTerms, question: Question, framework: Framework
) -> Expectation:
    """Simulate a plan as the framework's runtime would run it."""
    candidate = row.candidate
    waits = framework.waits(pipeline)
    judge = question.pricing.judge(row.cell)
    if not waits and pipeline.schedule is candidate.schedule:
        step, makespan, bubble = candidate.step, candidate.makespan, candidate.bubble
        return Expectation(step, makespan, bubble, candidate.peak, waits)
    if waits:
        judge = replace(judge, cost=WaitingCost(judge.cost))
    judge = replace(judge, passes=pipeline.passes)
    timeline = judge.timeline(pipeline.schedule)
    return Expectation(
        judge.step(pipeline.schedule, timeline.makespan),
        timeline.makespan,
        timeline.bubble,
        candidate.peak,
        waits,
    )


def _distinct(refusals: list[Refusal]) -> tuple[Refusal, ...]:
    """The fastest plan for each reason."""
    found: dict[str, Refusal] = {}
    for one in refusals:
        best = found.setdefault(one.reason, one)
        if one.step < best.step:
            found[one.reason] = one
    fastest = sorted(found.values(), key=lambda one: one.step)
    return tuple(fastest[:MAX_REFUSALS])
