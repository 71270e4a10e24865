"""Compiles the stages of a rank before its first step.

Compiling takes from seconds to minutes, and not equally long on all ranks. Within a step, all other ranks would wait
for the slowest compiler at one message after the other. Here each rank runs its own stages alone, in every way that
the plan runs them, and the ranks meet once afterwards.
"""

from __future__ import annotations

import torch

from penstock.runtime.batch import Batch
from penstock.runtime.executor import Executor
from penstock.runtime.proof.prove import choose_microbatches, documents_of
from penstock.runtime.proof.traceless import restored_random
from penstock.runtime.proof.ways import SEED, Bench


def warm_up(executor: Executor, batch: Batch, evaluates: bool = True) -> None:
    """Run every stage of this rank once, in training and in evaluation if it `evaluates`, and leave no trace.

    All ranks must call this. It sends no message except to meet at the end.
    """
    chosen = choose_microbatches(executor.program.schedule)
    own = [stage for stage in sorted(executor.modules) if stage in chosen]
    devices = {x.device for x in batch.inputs}
    with restored_random(devices, executor.comm.barrier):
        for stage in own:
            number = chosen[stage]
            bench = Bench(executor, stage, number, batch)
            tokens = batch.inputs[number]
            x = tokens
            if not bench.first:
                dice = torch.Generator().manual_seed(SEED)
                shape = (*tokens.shape, executor.width)
                x = torch.randn(shape, generator=dice, dtype=executor.dtype)
                x = x.to(tokens.device)
            labels = batch.labels[number]
            bench.set_input(x, labels, documents_of(batch, number))
            bench.run_all(evaluates)
