"""What `penstock plan --for` prints and writes: the best plan for another framework, and what to tell it."""

from __future__ import annotations

from pathlib import Path

from penstock.cli.landscape import describe_range, note_unused
from penstock.cli.tables import console, print_json, print_plain, write
from penstock.formats import dump_plan
from penstock.integrations.advice import Counsel, Framework, advise
from penstock.plan.planner import chosen_plan
from penstock.plan.pricing import Question
from penstock.plan.search import Landscape
from penstock.view.numbers import name_size, name_time

DEFAULT_STEM = Path("plan")  # of the files that the advice would be in


def show_counsel(
    landscape: Landscape,
    question: Question,
    framework: Framework,
    output: Path | None,
    json: bool,
) -> None:
    """Print the advice for a framework; with an output, write it and its plan."""
    stem = DEFAULT_STEM if output is None else output.with_suffix("")
    counsel = advise(landscape, question, framework, stem)
    if output is not None:
        _write_counsel(counsel, landscape, question, framework, output, quiet=json)
    if json:
        print_json(counsel_facts(counsel, question, framework))
    else:
        print_counsel(counsel, question, framework, output is not None)


def _write_counsel(
    counsel: Counsel,
    landscape: Landscape,
    question: Question,
    framework: Framework,
    output: Path,
    quiet: bool,
) -> None:
    """Write the plan, and beside it the options and files of the advice."""
    write(output, dump_plan(chosen_plan(landscape, question.facts)), quiet)
    stem = output.with_suffix("")
    advice = counsel.advice
    write(stem.with_name(f"{stem.name}.{framework.ending}"), advice.text, quiet)
    for name, text in advice.files.items():
        write(stem.with_name(name), text, quiet)


def print_counsel(
    counsel: Counsel, question: Question, framework: Framework, written: bool
) -> None:
    """Print the plan, its expected time and memory, and what to tell the framework."""
    expected = counsel.row.candidate
    units = question.units
    sends = "wait for their messages" if counsel.waits else "send in the background"
    how = f" (simulated for ranks that {sends})" if counsel.pipeline.ranks > 1 else ""
    print_plain(f"planned {question.basis}")
    print_plain(
        f"for {framework.name}: {counsel.name}, {counsel.advice.schedule}\n"
        f"expected: a step of {name_time(expected.step, units)}, bubble "
        f"{expected.bubble:.1%}, {name_size(expected.peak, units)} on the fullest device{how}"
    )
    for line in describe_range(question, expected.step):
        print_plain(line)
    console().rule(framework.ending, style="dim")
    print_plain(counsel.advice.text.rstrip("\n"))
    console().rule(style="dim")
    for note in counsel.advice.notes:
        print_plain(note)
    for note in note_unused(question):
        print_plain(note)
    if not written:
        files = ["the plan", f"plan.{framework.ending}", *counsel.advice.files]
        listed = f"{', '.join(files[:-1])} and {files[-1]}"
        print_plain(f"-o plan.json also writes {listed}", stderr=True)


def counsel_facts(
    counsel: Counsel, question: Question, framework: Framework
) -> dict[str, object]:
    """Return the advice as JSON has it."""
    pipeline = counsel.pipeline
    candidate = counsel.row.candidate
    return {
        "for": framework.name,
        "basis": question.basis,
        "plan": counsel.name,
        "schedule": counsel.advice.schedule,
        "ranks": pipeline.ranks,
        "microbatches": pipeline.microbatches,
        "partition": list(pipeline.partition),
        "expected": {
            "step": candidate.step,
            "range": question.range_of(candidate.step),
            "makespan": candidate.makespan,
            "bubble": candidate.bubble,
            "peak": candidate.peak,
            "waits": counsel.waits,
        },
        "text": counsel.advice.text,
        "files": dict(counsel.advice.files),
        "notes": list(counsel.advice.notes),
    }
