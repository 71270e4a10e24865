"""Three plans that few people would choose by hand, with what they gain in simulation over the usual choice.

    python benchmarks/surprises.py            writes docs/results/surprises.md and its figures (about two minutes)
    python benchmarks/surprises.py --quick    the first workload only; writes nothing
    python benchmarks/surprises.py --json     one JSON object to stdout

The times and sizes come from analytic profiles of known GPUs (`penstock plan --gpu`), so nothing here was measured. The
usual choice is what people set up by hand: the fastest of 1F1B and interleaved 1F1B with whole sequences and equal
parts that fits into the memory, with no more recomputed parts than it must have.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from textwrap import fill

from tables import table

from penstock.config import Config, ModelConfig
from penstock.cost.gpus import gpu_of
from penstock.partition import even_partition
from penstock.plan.candidates import Candidate, evaluate_schedule, title
from penstock.plan.pricing import gpu_question
from penstock.plan.search import (
    Landscape,
    row_title,
    search,
)
from penstock.plan.space import Limits
from penstock.plan.workload import (
    RECOMPUTED_SHARES,
    Hardware,
    Workload,
    divisions_of,
    workload_of,
)
from penstock.schedules import make
from penstock.view import svg

GIB = 2.0**30
RESULT = Path(__file__).parent.parent / "docs" / "results" / "surprises.md"
USUAL = (
    ("1f1b", ()),
    ("interleaved", (("chunks", 2),)),
    ("interleaved", (("chunks", 4),)),
)
WIDTH = 118  # columns of the page
TITLE = "# Plans that nobody would have chosen by hand"
INTRODUCTION = (
    "`python benchmarks/surprises.py`: three workloads for which the search found a plan that "
    "differs from what people usually set up, in simulation with analytic profiles of known GPUs; "
    "nothing on this page was measured. The usual choice is the fastest of 1F1B and interleaved "
    "1F1B with whole sequences and equal parts that fits into the memory; it recomputes no more "
    "parts than it must. Both plans of a workload have the same ranks and micro-batches."
)
LLAMA_7B = ModelConfig(
    layers=32,
    hidden_size=4096,
    heads=32,
    kv_heads=32,
    intermediate_size=11_008,
    vocab_size=32_000,
)
LLAMA_1B = ModelConfig(
    layers=16,
    hidden_size=2048,
    heads=32,
    kv_heads=8,
    intermediate_size=8192,
    vocab_size=128_256,
)


@dataclass(frozen=True, slots=True)
class Case:
    """A workload, and how its plan is explained."""

    name: str
    title: str
    model: ModelConfig
    tokens: int
    batch: int
    ranks: int
    microbatches: int
    gpu: str
    memory: float  # GiB of a device
    explain: Callable[[Candidate, Candidate], str]


def explain_long(best: Candidate, usual: Candidate) -> str:
    cuts = best.schedule.microbatches[0].cuts
    lengths = [end - begin for begin, end in pairwise(cuts)]
    return (
        "With two sequences for eight GPUs, a pipeline of whole sequences idles "
        f"{usual.bubble:.0%} of the time, so most people would not use one. The plan "
        f"cuts each sequence into {len(lengths)} slices of {min(lengths):,} to {max(lengths):,} "
        "tokens, shorter where attention sees more tokens, and sends the slices through the "
        f"pipeline one after the other; it idles {best.bubble:.0%}."
    )


def explain_tight(best: Candidate, usual: Candidate) -> str:
    return (
        "When activations do not fit, the usual answer is to compute them again: the usual plan "
        f"does so for {_recomputed(usual)}. The plan that was found does so for "
        f"{_recomputed(best)}. With {best.slices} slices of a sequence, ranks begin "
        "sooner and hold parts of sequences instead of whole ones: it idles "
        f"{best.bubble:.0%} of the time instead of {usual.bubble:.0%}."
    )


def _recomputed(row: Candidate) -> str:
    count = len(row.recompute)
    return f"{count} of its {row.schedule.parts} parts" if count else "none"


def explain_vocabulary(best: Candidate, usual: Candidate) -> str:
    schedule = best.schedule
    partition = best.partition
    rank = schedule.stages[-1].rank
    own = sum(partition[stage.part] for stage in schedule.stages if stage.rank == rank)
    idle = usual.bubble
    return (
        "With a vocabulary of 128,256 words the head takes as long as several layers, so with "
        f"equal parts all ranks wait for the last one and idle {idle:.0%} of the time. The plan "
        f"gives the rank with the head only {own} of the {sum(partition)} layers (its parts have "
        f"{' '.join(map(str, partition))}), and fills what is left of the waiting with weight "
        "gradients."
    )


CASES = (
    Case(
        "long",
        "Two long sequences on eight GPUs",
        LLAMA_7B,
        tokens=32_768,
        batch=2,
        ranks=8,
        microbatches=2,
        gpu="h100",
        memory=72,
        explain=explain_long,
    ),
    Case(
        "tight",
        "Activations that do not fit",
        LLAMA_7B,
        tokens=16_384,
        batch=8,
        ranks=8,
        microbatches=8,
        gpu="h100",
        memory=72,
        explain=explain_tight,
    ),
    Case(
        "vocabulary",
        "A large vocabulary",
        LLAMA_1B,
        tokens=4_096,
        batch=8,
        ranks=4,
        microbatches=8,
        gpu="h100",
        memory=72,
        explain=explain_vocabulary,
    ),
)


def workload_for(case: Case) -> Workload:
    config = Config()
    config = replace(
        config,
        model=case.model,
        data=replace(config.data, seq_len=case.tokens, global_batch=case.batch),
        schedule=replace(config.schedule, microbatches=case.microbatches),
        parallel=replace(config.parallel, pp=case.ranks, dp_replicate=1),
        run=replace(config.run, precision="bfloat16", device="cuda"),
    )
    return workload_of(
        config,
        case.model.layers,
        hardware=Hardware(case.ranks, case.memory * GIB),
        granularity=128,
        model=case.model,
    )


def plan_case(case: Case) -> tuple[Landscape, Candidate, Candidate]:
    """Search a workload; return the landscape, the chosen plan, and the usual choice."""
    workload = workload_for(case)
    limits = Limits(stages=4, slices=16)
    question = gpu_question(workload, case.model, gpu_of(case.gpu), limits)
    landscape = search(workload, question.pricing, question.limits)
    return landscape, landscape.best, usual_plan(case, workload)


def usual_plan(case: Case, workload: Workload) -> Candidate:
    """Return the fastest plan with a usual schedule, equal parts and whole sequences that fits."""
    rows = []
    sizes = {"ranks": case.ranks, "microbatches": case.microbatches}
    for (name, shape), share in product(USUAL, RECOMPUTED_SHARES):
        schedule = make(name, **sizes, **dict(shape))
        if schedule.parts > case.model.layers:
            continue
        equal = even_partition(case.model.layers, schedule.parts)
        fixed = replace(workload.fixed, partition=equal)
        question = gpu_question(
            replace(workload, fixed=fixed), case.model, gpu_of(case.gpu), Limits()
        )
        cell = next(one for one in divisions_of(workload) if one.recomputed == share)
        evaluator = question.pricing.evaluator(cell)
        found = evaluate_schedule(cell, name, shape, "fixed", schedule, evaluator)
        if evaluator.fits(found.peak):
            rows.append(found)
    return min(rows, key=lambda row: row.step)


def facts_of(
    case: Case, landscape: Landscape, best: Candidate, usual: Candidate
) -> dict[str, object]:
    return {
        "case": case.name,
        "plan": row_title(best, landscape),
        "usual": row_title(usual, landscape),
        "step": best.step,
        "usual_step": usual.step,
        "speedup": usual.step / best.step,
        "bubble": best.bubble,
        "usual_bubble": usual.bubble,
        "peak": best.peak,
        "usual_peak": usual.peak,
        "gap": landscape.gap,
        "partition": best.partition,
        "cuts": best.schedule.microbatches[0].cuts,
    }


def section(case: Case, landscape: Landscape, best: Candidate, usual: Candidate) -> str:
    rows = []
    for words, row in (("usual", usual), ("planned", best)):
        one = row
        rows.append(
            [
                words,
                row_title(row, landscape),
                f"{one.step * 1e3:,.0f}",
                f"{one.bubble:.1%}",
                f"{one.peak / GIB:.1f}",
            ]
        )
    heads = "choice | plan | step, ms | idle | fullest device, GiB"
    speedup = usual.step / best.step
    story = f"**{speedup:.2f} times as fast.** {case.explain(best, usual)}"
    sizes = (
        f"{case.model.layers} layers of width {case.model.hidden_size:,}, {case.batch} sequences of "
        f"{case.tokens:,} tokens, {case.ranks} {gpu_of(case.gpu).name} with {case.memory:g} GiB "
        f"for a plan, {case.microbatches} micro-batches. A bound says that no plan of this space "
        f"takes less than {landscape.bound * 1e3:,.0f} ms."
    )
    return (
        f"## {case.title}\n\n"
        f"{fill(sizes, WIDTH)}\n\n"
        f"{table(heads, rows, ('choice', 'plan'))}\n\n"
        f"{fill(story, WIDTH)}\n\n"
        f"![The usual plan](surprises/{case.name}-usual.svg)\n\n"
        f"![The plan that was found](surprises/{case.name}-planned.svg)\n"
    )


def draw(case: Case, best: Candidate, usual: Candidate) -> None:
    """Write the timelines of both plans."""
    workload = workload_for(case)
    folder = RESULT.parent / "surprises"
    folder.mkdir(exist_ok=True)
    for words, row in (("usual", usual), ("planned", best)):
        one = row
        fixed = replace(workload.fixed, partition=one.partition)
        question = gpu_question(
            replace(workload, fixed=fixed), case.model, gpu_of(case.gpu), Limits()
        )
        timeline = question.pricing.evaluator(row.division).timeline(one.schedule)
        heading = (
            f"{words}: {title(one.name, one.shape)}, {one.step * 1e3:,.0f} ms per step"
        )
        (folder / f"{case.name}-{words}.svg").write_text(svg(timeline, heading))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one case; writes nothing")
    parser.add_argument("--json", action="store_true", help="one JSON object to stdout")
    given = parser.parse_args()
    facts = []
    sections = []
    for case in CASES[: 1 if given.quick else None]:
        landscape, best, usual = plan_case(case)
        facts.append(facts_of(case, landscape, best, usual))
        sections.append(section(case, landscape, best, usual))
        if not given.quick:
            draw(case, best, usual)
    text = "\n".join([f"{TITLE}\n\n{fill(INTRODUCTION, WIDTH)}\n", *sections])
    if not given.quick:
        RESULT.write_text(text)
    sys.stdout.write(json.dumps({"cases": facts}) + "\n" if given.json else text)


if __name__ == "__main__":
    main()
