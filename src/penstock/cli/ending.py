"""What the command line shows and writes when a run has ended."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.tables import console, print_plain, write
from penstock.train.after.report import (
    Summary,
    list_comparisons,
    list_events,
    render_report,
    summarize_run,
)
from penstock.train.data.corpus import describe_use, read_prompt
from penstock.train.history import read_rows
from penstock.view.numbers import write_time

if TYPE_CHECKING:
    from penstock.train.job import Verdict

REPORT = "report.html"  # in the folder of a run
SAMPLE = "sample.txt"  # in the folder of a run


def show_ending(folder: Path, verdict: Verdict, sample: int) -> None:
    """Write the report and a sample of `sample` tokens, and print how the run ended."""
    from penstock.train.after.generate import (  # loads torch
        continues_texts,
        generate_text,
        open_trained,
    )

    if verdict.stopped and not verdict.step:
        _print_no_checkpoint(folder)
        return
    summary = summarize_run(folder)
    text = ""
    if sample:
        trained = open_trained(folder)
        if continues_texts(trained.sizes):
            text = generate_text(trained, read_prompt(folder), sample)
    if text:
        write(folder / SAMPLE, text, quiet=True)
    else:
        (folder / SAMPLE).unlink(missing_ok=True)
    report = render_report(summary, folder.resolve().name, text)
    write(folder / REPORT, report, quiet=True)
    print_plain("\n".join(_ending_lines(folder, verdict, summary)))
    if text:
        console().rule("a sample", style="dim")
        sys.stdout.write(text + "\n")


def _print_no_checkpoint(folder: Path) -> None:
    """Say that a run was stopped before it saved anything, and how to continue."""
    from penstock.train.launch import way_on

    steps = len(read_rows(folder))
    moment = "before the first step"
    if steps:
        moment = f"after {steps} steps, before the first checkpoint"
    print_plain(f"stopped {moment}\n{way_on(folder)}")


def _ending_lines(folder: Path, verdict: Verdict, summary: Summary) -> list[str]:
    """Return the results of a run, and where its files are."""
    from penstock.train.checkpoints.checkpoint import (  # loads torch
        CHECKPOINTS_FOLDER,
        step_name,
    )

    first = summary.rows[0]
    last = summary.rows[-1]
    ending = "stopped after" if verdict.stopped else "trained"
    seconds = sum(row.seconds for row in summary.rows)
    loss = f"loss {first.loss:.4f} -> {last.loss:.4f}"
    if summary.evaluation is not None:
        loss += f", held-out loss {summary.evaluation:.4f}"
    lines = [
        f"{ending} {verdict.step} steps in {write_time(seconds, digits=3)}: {loss}, "
        f"{summary.speed:,.0f} tokens/s"
    ]
    lines += list_comparisons(summary)
    for kind in summary.kinds:
        predicted = kind.predicted
        if predicted is None or kind.measured is None:
            continue
        source = "predicted"
        if kind.forecast is None:
            source = "simulated from the times of its actions"
        step = f"step {kind.step}"
        if len(summary.kinds) > 1:
            step = f"{step}, a {kind.name},"
        lines.append(
            f"{step} had a bubble of {kind.measured.bubble:.1%}, "
            f"{source} {predicted.bubble:.1%}"
        )
    lines += list_events(summary)
    lines += [f"read from   {line}" for line in describe_use(summary.sources)]
    checkpoint = folder / CHECKPOINTS_FOLDER / step_name(verdict.step)
    lines.append(f"report      {folder / REPORT}")
    lines.append(f"checkpoint  {checkpoint}")
    if verdict.stopped:
        lines.append(f"continue    penstock train {folder} --resume")
    return lines
