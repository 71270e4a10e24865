"""What a run does before its first step: it compiles its stages, and proves them.

Both use the data of the first step, and leave no trace in weights or loader.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import torch

from penstock.runtime import Batch, Comm, ProcessComm, prove
from penstock.runtime.proof import warm_up
from penstock.train.data.loader import Loader
from penstock.train.setup import StepExecutors

_log = logging.getLogger(__name__)


def next_batch(loader: Loader) -> Batch:
    """Return the first batch of the next step, which the loader will deal again."""
    seen = loader.seen
    batch = loader.step()[0]
    loader.seen = seen
    return batch


def compile_stages(
    executors: StepExecutors, loader: Loader, comm: Comm, patience: float, leads: bool
) -> None:
    """Compile the stages of this rank while no other rank waits for them.

    A rank that is done waits for the slowest compiler, so the usual patience begins afterwards.
    """
    began = time.perf_counter()
    if leads:
        _log.info("compiling the stages, which may take some minutes")
    batch = next_batch(loader)
    for executor in executors.covering:
        warm_up(executor, batch)
    if isinstance(comm, ProcessComm):
        comm.set_patience(patience)
    if leads:
        seconds = time.perf_counter() - began
        _log.info("compiled the stages in %.1f s", seconds)


def prove_stages(executors: StepExecutors, loader: Loader, leads: bool) -> None:
    """Check that every stage computes under the plan what a plain call computes."""
    batch = next_batch(loader)
    proofs = [prove(executor, batch) for executor in executors.covering]
    if loader.device.type == "cuda":
        # The report shows the peak of the steps, not of the proof.
        torch.cuda.reset_peak_memory_stats(loader.device)
    if leads and not proofs[0].skipped:
        seconds = sum(proof.seconds for proof in proofs)
        # The one with the most gaps; if there are none, the one with the most stages.
        told = max(proofs, key=lambda one: (one.visited - one.stages, one.stages))
        _log.info("%s", replace(told, seconds=seconds))
