"""What the command line shows and writes when a run has ended."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.tables import console, write
from penstock.train.screen import in_seconds

if TYPE_CHECKING:
    from penstock.train.after.report import Summary
    from penstock.train.worker import Verdict

SAMPLE = "sample.txt"  # in the folder of a run


def show_ending(folder: Path, verdict: Verdict, sample: int) -> None:
    """Report, figures, where things are, and a sample."""
    from penstock.train.after.generate import generate_text as go_on
    from penstock.train.after.generate import open_trained
    from penstock.train.after.report import render_report, summarize_run

    if verdict.stopped and not verdict.step:
        _print_no_checkpoint(folder)
        return
    found = summarize_run(folder)
    text = go_on(open_trained(folder), "def ", sample) if sample else ""
    if text:
        write(folder / SAMPLE, text, quiet=True)
    else:
        (folder / SAMPLE).unlink(missing_ok=True)
    write(
        folder / "report.html",
        render_report(found, folder.resolve().name, text),
        quiet=True,
    )
    _print_ending(folder, verdict, found)
    if text:
        console().rule("a sample", style="dim")
        sys.stdout.write(text + "\n")


def _print_no_checkpoint(folder: Path) -> None:
    from penstock.train.history import read_rows
    from penstock.train.launcher import way_on

    steps = len(read_rows(folder))
    when = (
        f"after {steps} steps, none of which was saved"
        if steps
        else "before the first step"
    )
    console().print(
        f"stopped {when}\n{way_on(folder)}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _print_ending(folder: Path, verdict: Verdict, found: Summary) -> None:
    rows = found.rows
    held = f", held out {found.evaluation:.4f}" if found.evaluation is not None else ""
    how = "stopped after" if verdict.stopped else "trained"
    lines = [
        f"{how} {verdict.step} steps in {sum(row.seconds for row in rows):,.0f} s: "
        f"loss {rows[0].loss:.4f} -> {rows[-1].loss:.4f}{held}, {found.speed:,.0f} tokens/s"
    ]
    if found.forecast is not None:
        lines.append(
            f"a step took {in_seconds(found.seconds)}, predicted {in_seconds(found.forecast.seconds)}"
        )
    if found.predicted is not None and found.measured is not None:
        how = "predicted" if found.forecast is not None else "by its actions' own times"
        bubbles = found.measured.bubble, found.predicted.bubble
        lines.append(
            f"step {found.step} had a bubble of {bubbles[0]:.1%}, {how} {bubbles[1]:.1%}"
        )
    lines.append(f"report      {folder / 'report.html'}")
    lines.append(f"checkpoint  {folder / 'checkpoints' / f'step-{verdict.step:08d}'}")
    if verdict.stopped:
        lines.append(f"go on with  penstock train {folder} --resume")
    console().print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
