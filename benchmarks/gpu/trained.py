"""Trains with `penstock train` as a user does, and reads the figures from the folder of the run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from bench import quartiles

from penstock.train.after.report import Summary, summarize_run

COLD = 4  # steps that are not counted


class Training(NamedTuple):
    """A run that has ended."""

    summary: Summary
    said: str  # on its standard error

    @property
    def figures(self) -> dict[str, Any]:
        """What a table shows of it."""
        kind = self.summary.main
        rows = self.summary.rows
        middle, low, high = quartiles([row.seconds for row in rows[COLD:]])
        return {
            "schedule": self.summary.plan.name,
            "steps": len(rows),
            "seconds": middle,
            "spread": [low, high],
            "tokens": rows[-1].tokens,
            "memory": rows[-1].memory,
            "memory_early": rows[COLD].memory,
            "loss": rows[-1].loss,
            "predicted": kind.forecast.seconds if kind.forecast else None,
            "bubble": kind.measured.bubble if kind.measured else None,
            "predicted_bubble": kind.timelines[0][0].bubble if kind.timelines else None,
        }


def penstock(words: str, workers: int = 0) -> list[str]:
    """A command of Penstock, in a testbed if there are workers."""
    command = [sys.executable, "-m", "penstock"]
    if workers:
        command += ["testbed", "--workers", str(workers), "--", *command]
    return [*command, *words.split()]


def trained(folder: Path, settings: str, workers: int = 0) -> Training:
    """Train with these settings; side by side in a testbed if there are workers."""
    words = f"train {settings} --set run.folder={folder}"
    done = subprocess.run(
        penstock(words, workers), capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(done.stderr)
    return Training(summarize_run(folder), done.stderr)
