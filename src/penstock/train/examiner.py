"""Evaluates the whole model in the pipeline while it trains.

held-out text, or the user's own validation set ─► all parts ─► mean loss
"""

from __future__ import annotations

from dataclasses import replace

import torch

from penstock.schedules.coverage import through_all_parts
from penstock.train.data.loader import Loader
from penstock.train.rank_setup import RankSetup
from penstock.train.step_executors import StepExecutors


class Examiner:
    """Evaluates the whole model, whatever paths are trained.

    If the schedule skips parts, the evaluation has the lanes of full steps or, if there are
    none, lanes of its own, with links that training may not use.
    """

    def __init__(
        self, setup: RankSetup, executors: StepExecutors, loader: Loader
    ) -> None:
        job = setup.job
        schedules = executors.paths.schedules
        trained = schedules[-1]  # the full one, if there is one
        schedule = through_all_parts(trained)
        self.setup = setup
        self.executor = executors.executors[-1]
        self.loader = loader
        self.needs_links = len(schedules) > 1
        if schedule is not trained:
            self.needs_links = True
            self.executor = setup.executor(schedule)
            deal = replace(loader.deal, wanted=setup.wanted([schedule]))
            self.loader = Loader(job.corpus, deal, job.config.run.seed, setup.device)
        if job.validation is not None:
            self.loader = Loader(
                job.validation,
                self.loader.deal,
                job.config.run.seed,
                setup.device,
                self.loader.cutter,
            )

    def losses(self, batches: int) -> list[float]:
        """Return the loss of each pass; their sum is the mean loss over all sequences."""
        passes = self.loader.evaluation(batches)
        if self.needs_links and passes:
            self.executor.prepare_messages(passes[0])
            self.needs_links = False
        return [self.executor.evaluate(batch) for batch in passes]

    def mean_loss(self) -> float | None:
        """Return the mean loss on held-out text, the same on all ranks; None without any."""
        losses = self.losses(self.setup.job.config.run.evaluations)
        place = self.setup.place
        share = sum(losses) if place.speaks else 0.0
        total = torch.tensor([share], dtype=torch.float64, device=self.setup.device)
        place.world.add(total, tuple(range(place.world.ranks))).wait()
        return float(total) if losses else None
