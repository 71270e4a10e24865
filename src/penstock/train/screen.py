"""Shows the steps of a run: one live line on a terminal, plain lines in a log.

step  40/200  loss 3.0137  norm 0.527  3,135 tokens/s  343 MiB  bubble 39.7%  ━━━━╸━━━━━ 0:00:41
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.view.numbers import write_size

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.train.history import StepRow


# A terminal with fewer columns has no room for a bar; the remaining time comes first.
MIN_BAR_COLUMNS = 100
SayLine = Callable[[str], None]  # shows the user a line


class Screen:
    """Shows steps as they are done."""

    def __init__(self, steps: int, every: int, console: Console) -> None:
        self.steps = steps
        self.every = every
        self.console = console
        self.stop: Callable[[], None] = lambda: None
        # Changes the live line, if there is one.
        self.update: Callable[[str, int], None] | None = None
        self.bubble = ""

    def __enter__(self) -> Screen:
        if self.console.is_terminal:
            from rich.progress import (  # noqa: PLC0415
                BarColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
            )

            words = TextColumn("{task.description}")
            left = TimeRemainingColumn()
            columns = (
                (left, words)
                if self.console.width < MIN_BAR_COLUMNS
                else (words, BarColumn(bar_width=20), left)
            )
            live = Progress(*columns, console=self.console, transient=True)
            task = live.add_task("starting", total=self.steps)
            self.update = lambda words, step: live.update(
                task, description=words, completed=step
            )
            self.stop = live.stop
            live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def put(self, row: StepRow) -> None:
        """Show a step. A line with an evaluation stays on the screen."""
        if row.bubble is not None:
            self.bubble = f"  bubble {row.bubble:.1%}"
        mfu = f"  MFU {row.mfu:.1%}" if row.mfu is not None else ""
        digits = len(str(self.steps))
        words = (
            f"step {row.step:>{digits}}/{self.steps}  loss {row.loss:.4f}  "
            f"norm {row.norm:.3f}  {row.speed:,.0f} tokens/s  "
            f"{write_size(row.memory)}{self.bubble}{mfu}"
        )
        if self.update is not None:
            self.update(words, row.step)
        due = self.update is None and (row.step % self.every == 0 or row.step == 1)
        if due or row.evaluation is not None:
            held = (
                f"  held out {row.evaluation:.4f}" if row.evaluation is not None else ""
            )
            self.console.print(words + held, highlight=False, soft_wrap=True)


def log_to(console: Console, everything: bool) -> None:
    """Show the log of the package: everything, or only warnings and errors."""

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            console.print(
                record.getMessage(),
                style="dim",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )

    logger = logging.getLogger("penstock")
    logger.handlers[:] = [Lines()]
    logger.setLevel(logging.INFO if everything else logging.WARNING)
    logger.propagate = False
