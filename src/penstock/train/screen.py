"""What a run shows while it trains: one live line on a terminal, plain lines in a log.

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


NARROW = 100  # columns, with no room for a bar: the time that is left comes first


class Screen:
    """Shows steps as they come."""

    def __init__(self, steps: int, every: int, told: Console) -> None:
        self.steps, self.every, self.told = steps, every, told
        self.stop: Callable[[], None] = lambda: None
        self.update: Callable[[str, int], None] | None = (
            None  # of the live line, if there is one
        )
        self.bubble = ""

    def __enter__(self) -> Screen:
        if self.told.is_terminal:
            from rich.progress import (  # noqa: PLC0415
                BarColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
            )

            words, left = TextColumn("{task.description}"), TimeRemainingColumn()
            columns = (
                (left, words)
                if self.told.width < NARROW
                else (words, BarColumn(bar_width=20), left)
            )
            live = Progress(*columns, console=self.told, transient=True)
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
        """A step is done. An evaluation stays on the screen, whatever comes after it."""
        if row.bubble is not None:
            self.bubble = f"  bubble {row.bubble:.1%}"
        mfu = f"  MFU {row.mfu:.1%}" if row.mfu is not None else ""
        words = (
            f"step {row.step:>{len(str(self.steps))}}/{self.steps}  loss {row.loss:.4f}  norm {row.norm:.3f}  "
            f"{row.speed:,.0f} tokens/s  {write_size(row.memory)}{self.bubble}{mfu}"
        )
        if self.update is not None:
            self.update(words, row.step)
        due = self.update is None and (row.step % self.every == 0 or row.step == 1)
        if due or row.evaluation is not None:
            held = (
                f"  held out {row.evaluation:.4f}" if row.evaluation is not None else ""
            )
            self.told.print(words + held, highlight=False, soft_wrap=True)


def log_to(told: Console, everything: bool) -> None:
    """Shows what the rooms below say: everything, or only what is wrong."""

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.print(
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
