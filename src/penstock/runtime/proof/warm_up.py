"""Compiles the stages of a rank before its first step.

Compiling takes from seconds to minutes, and not equally long on all ranks. Within a step, all other ranks would wait
for the slowest compiler at one message after the other. Here each rank runs its own stages alone, in every way that
the plan runs them, and the ranks meet once afterwards.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.runtime.batch import Batch
from penstock.runtime.bundle import Bundle
from penstock.runtime.edges import Edge
from penstock.runtime.executor import Executor
from penstock.runtime.passed_values import has_gradient
from penstock.runtime.proof.prove import choose_microbatches
from penstock.runtime.proof.traceless import restored_random
from penstock.runtime.proof.ways import PROOF_SEED, Bench


def warm_up(executor: Executor, batch: Batch, evaluates: bool = True) -> None:
    """Run every stage of this rank once, in training and in evaluation if it `evaluates`, and leave no trace.

    All ranks must call this. It sends no message except to find the shapes between stages, and to meet at the end.
    """
    chosen = choose_microbatches(executor.program.schedule)
    executor.edges(batch)  # together with the other ranks
    own = [stage for stage in sorted(executor.modules) if stage in chosen]
    devices = {x.device for x in batch.inputs}
    with restored_random(devices, executor.comm.barrier):
        for stage in own:
            number = chosen[stage]
            bench = Bench(executor, stage, number, batch)
            x: Tensor | Bundle = batch.inputs[number]
            if bench.incoming is not None:
                x = _random_input(bench, bench.incoming, x.device)
            bench.set_input(x, batch, number)
            bench.run_all(evaluates)


def _random_input(bench: Bench, edge: Edge, device: torch.device) -> Tensor | Bundle:
    """Random numbers like those that another stage passes on; whole numbers are zero."""
    dice = torch.Generator().manual_seed(PROOF_SEED)
    tensors = []
    for shape, dtype, _ in edge.tensors:
        x = torch.zeros(shape, dtype=dtype)
        if has_gradient(dtype):
            x = torch.randn(shape, generator=dice, dtype=dtype)
        tensors.append(x.to(device))
    return Bundle(tensors, edge.values, edge.names) if bench.many else tensors[0]
