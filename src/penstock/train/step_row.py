"""The row that a step adds to the history of a run, made from the figures of the step."""

from __future__ import annotations

from collections.abc import Callable

import torch

from penstock.models.family import flops_per_token, peak_flops, share_of_flops
from penstock.runtime.process.machine import count_neighbours
from penstock.train.data.loader import Loader
from penstock.train.history import StepRow
from penstock.train.job import Job
from penstock.train.rates import rate_at
from penstock.train.step_figures import StepFigures
from penstock.train.step_paths import StepPaths, mean_layers
from penstock.train.weights import Sizes


class RowMaker:
    """Makes the row of a step; it knows how much work the steps of a run have."""

    def __init__(
        self, job: Job, paths: StepPaths, ranks: int, device: torch.device
    ) -> None:
        self.job = job
        self.paths = paths
        # Layers that a micro-batch passes through in a step with each schedule.
        self.layers = [mean_layers(one, job.partition) for one in paths.schedules]
        tokens = job.config.data.tokens
        self.utilization = flops_utilization(job.sizes, tokens, ranks, device)

    def row(
        self,
        step: int,
        figures: StepFigures,
        loader: Loader,
        evaluation: float | None,
    ) -> StepRow:
        """Return the row of a step that is done, counted from 1."""
        config = self.job.config
        sizes = self.job.sizes
        tokens = loader.deal.sequences * loader.corpus.length
        layers = self.layers[self.paths.at(step - 1)]
        work = share_of_flops(sizes, self.job.corpus.length, layers)
        leaves_out = min(self.layers) < sizes.layers
        mirrored = figures.mirror_bytes > 0
        return StepRow(
            step,
            figures.loss,
            figures.norm,
            rate_at(step - 1, config.run.steps, config.optimizer),
            figures.seconds,
            tokens,
            figures.memory,
            loader.epoch,
            figures.bubble,
            evaluation,
            self.utilization(tokens / figures.seconds * work),
            layers if leaves_out else None,
            figures.mirror_bytes if mirrored else None,
            figures.mirror_seconds if mirrored else None,
        )


def flops_utilization(
    sizes: Sizes, tokens: int, ranks: int, device: torch.device
) -> Callable[[float], float | None]:
    """Return a function from tokens per second to model FLOPs utilization (MFU).

    MFU is the share of the peak of all devices. The function returns None if the peak of
    the device is not known.
    """
    peak = None
    if device.type == "cuda":
        peak = peak_flops(torch.cuda.get_device_name(device))
    if peak is None:
        return lambda speed: None
    gpus_per_rank = torch.cuda.device_count() / count_neighbours(ranks)
    devices = ranks * min(1.0, gpus_per_rank)  # Ranks may share a GPU.
    share = flops_per_token(sizes, tokens) / (devices * peak)
    return lambda speed: speed * share
