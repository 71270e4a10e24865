"""Workers that share one GPU, for its tests."""

from __future__ import annotations

import copy

import torch

from penstock import lower, make
from penstock.models import Llama, LlamaConfig, part_parameters, split, token_loss
from penstock.runtime import Comm, CudaTape, Executor, batch_of, watching

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
    torch.manual_seed(0)
    layers = 4 * comm.ranks
    whole = Llama(
        LlamaConfig(vocab=97, width=64, layers=layers, heads=4, kv_heads=2, inner=96)
    ).cuda()
    tokens = [
        torch.randint(0, 97, (2, 64), device="cuda") for _ in range(2 * comm.ranks)
    ]
    batch = batch_of(tokens, tokens)
    expected = copy.deepcopy(whole)
    for x in tokens:
        (token_loss(expected(x), x) / batch.valid).backward()
    worst: dict[str, float] = {}
    for name, shape in CASES:
        schedule = make(name, ranks=comm.ranks, microbatches=len(tokens), **shape)
        parts = split(copy.deepcopy(whole), [layers // schedule.parts] * schedule.parts)
        mine = {
            n: parts[s.part]
            for n, s in enumerate(schedule.stages)
            if s.rank == comm.rank
        }
        executor = Executor(
            lower(schedule),
            mine,
            comm,
            token_loss,
            tape=CudaTape() if recorded else None,
        )
        for _ in range(3):
            for part in mine.values():
                part.zero_grad()
            result = executor.step(batch, timed=True)
            assert result.loss > 0
        assert result.timeline is not None
        worst[name] = 0.0
        for part in mine.values():
            for key, parameter in part_parameters(part).items():
                other = expected.get_parameter(key).grad
                assert parameter.grad is not None
                assert other is not None
                worst[name] = max(
                    worst[name], float((parameter.grad - other).norm() / other.norm())
                )
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
