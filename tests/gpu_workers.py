"""Workers that share one GPU, for its tests."""

from __future__ import annotations

import torch

import branching_workers as branching
from nccl_workers import error_of
from penstock import Pipeline, lower, make
from penstock.models import Llama, LlamaConfig, split, token_loss
from penstock.runtime import Comm, Executor, batch_of, watching

CASES = (
    ("1f1b", {}),
    ("zb-v", {}),
    ("hanayo", {"waves": 1}),
    ("seq1f1b", {"slices": 4}),
    ("chimera", {}),
    ("interleaved-zb", {"chunks": 2}),
)


def trains_like_one_piece(comm: Comm, recorded: bool = False) -> dict[str, float]:
    """Return the worst relative error of a gradient for each schedule.

    If `recorded`, actions are CUDA graphs.
    """
    found = {}
    for name, shape in CASES:
        schedule = make(name, ranks=comm.ranks, microbatches=2 * comm.ranks, **shape)
        found[name] = error_of(comm, schedule, recorded)
    return found


def passes_several_tensors(comm: Comm, recorded: bool = True) -> dict[str, float]:
    """Return the largest error of a loss or gradient for each schedule of layers that pass several tensors.

    The layers return tuples and dicts, ask for tensors of the batch, and add losses. The second step has other
    numbers than the first one, in which actions are recorded.
    """
    given = branching.batch()
    loss, gradients, _ = branching.in_one_piece(2)
    worst: dict[str, float] = {}
    for name, recompute in (("1f1b", False), ("zb-v", False), ("hanayo", True)):
        schedule = make(name, ranks=comm.ranks, microbatches=2)
        pipeline = Pipeline(
            branching.layers(),
            schedule,
            branching.summed,
            comm=comm,
            device="cuda",
            graphs=recorded,
            recompute=recompute,
        )
        pipeline.step(**{key: torch.zeros_like(one) for key, one in given.items()})
        pipeline.zero_grad()
        found = [abs(pipeline.step(**given).loss - loss)]
        for key, parameter in pipeline.named_parameters():
            assert parameter.grad is not None
            found.append(float((parameter.grad.cpu() - gradients[key]).abs().max()))
        recordings = pipeline.executor.recordings
        assert (recordings is not None) == recorded
        worst[name] = max(found)
    return worst


def memory_of_steps(comm: Comm) -> list[int]:
    """Return the peak memory, in bytes, of each of some steps under a slow watchdog."""
    torch.manual_seed(0)
    whole = Llama(
        LlamaConfig(
            vocab=97, width=256, layers=comm.ranks, heads=4, kv_heads=4, inner=256
        )
    ).cuda()
    schedule = make("1f1b", ranks=comm.ranks, microbatches=8)
    mine = {comm.rank: split(whole, [1] * comm.ranks)[comm.rank]}
    executor = Executor(lower(schedule), mine, comm, token_loss)
    tokens = [torch.randint(0, 97, (2, 512), device="cuda") for _ in range(8)]
    found = []
    with watching(executor):
        for _ in range(12):
            torch.cuda.reset_peak_memory_stats()
            assert executor.step(batch_of(tokens, tokens)).loss > 0
            found.append(torch.cuda.max_memory_allocated())
    return found


def kind_of(comm: Comm) -> str:
    """Return the backend that was chosen."""
    return torch.distributed.get_backend()
