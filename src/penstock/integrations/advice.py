"""Says what another framework must be told to run the best plan of a search for it.

limits of the framework ─► search, which times plans as its runtime sends messages ─► the best one ─► options and files
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.errors import UnknownNameError
from penstock.integrations.megatron import Megatron
from penstock.integrations.terms import Advice, Framework, PipelineTerms, pipeline_terms
from penstock.integrations.torchtitan.advice import Torchtitan
from penstock.plan.pricing import Question
from penstock.plan.search import Landscape, Row, row_title

FRAMEWORKS: dict[str, Framework] = {
    "torchtitan": Torchtitan(),
    "megatron": Megatron(),
}


@dataclass(frozen=True, slots=True)
class Counsel:
    """The plan for a framework, and what it must be told."""

    row: Row
    name: str
    pipeline: PipelineTerms
    waits: bool  # whether ranks wait for their messages
    advice: Advice


def framework_of(name: str) -> Framework:
    """The framework with this name."""
    if name not in FRAMEWORKS:
        raise UnknownNameError("framework", name, FRAMEWORKS)
    return FRAMEWORKS[name]


def advise(
    landscape: Landscape, question: Question, framework: Framework, stem: Path
) -> Counsel:
    """Say what to tell a framework, for which the plan was searched."""
    row = landscape.best
    pipeline = pipeline_terms(row, question.workload)
    return Counsel(
        row,
        row_title(row, landscape),
        pipeline,
        framework.waits(row.candidate.schedule),
        framework.advise(pipeline, stem),
    )
