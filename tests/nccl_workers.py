"""Workers that share one GPU and talk over NCCL, for its tests."""

from __future__ import annotations

import copy
import os
import signal

import torch
from torch import Tensor, nn

from penstock import REGISTRY, Schedule, lower, make
from penstock.models import (
    GPT,
    GPTConfig,
    Llama,
    LlamaConfig,
    part_parameters,
    split,
    token_loss,
)
from penstock.models.split import shared_names
from penstock.runtime import Comm, CudaTape, Executor, batch_of, watching
from penstock.runtime.executor import RunOptions
from penstock.runtime.replicas import Tied
from penstock.schedules.transforms import slice_tokens
from pipelines import own_stages
from process_workers import Trick, Tricky, blunder, sleep

WORDS, WIDTH, TOKENS = 97, 64, 64


def cases(ranks: int) -> dict[str, Schedule]:
    """Every schedule family, copies, and slices of waves."""
    found = {}
    for name in REGISTRY:
        shape = {"slices": 4} if name in ("terapipe", "seq1f1b") else {}
        found[name] = make(name, ranks=ranks, microbatches=2 * ranks, **shape)
    half = {"ranks": ranks // 2, "microbatches": ranks, "copies": 2}
    found["1f1b, 2 copies"] = make("1f1b", **half)
    found["interleaved-zb, 2 copies"] = make("interleaved-zb", **half)
    found["hanayo, 4 slices"] = slice_tokens(found["hanayo"], (0, 8, 32, 48, 64))
    return found


def trains_every_schedule(
    comm: Comm,
    recorded: bool,
    names: tuple[str, ...] = (),
    messages: torch.dtype | None = None,
    tied: bool = False,
) -> dict[str, float]:
    """Return the worst relative error of a gradient for each schedule."""
    worst = {}
    for name, schedule in cases(comm.ranks).items():
        if not names or name in names:
            worst[name] = error_of(comm, schedule, recorded, messages, tied)
    return worst


def error_of(
    comm: Comm,
    schedule: Schedule,
    recorded: bool,
    messages: torch.dtype | None = None,
    tied: bool = False,
) -> float:
    """The worst relative error of a gradient of this rank, after three steps."""
    torch.manual_seed(0)
    layers = schedule.parts
    whole: nn.Module
    if tied:
        whole = GPT(GPTConfig(WORDS, WIDTH, layers, 4, 96, TOKENS, tied=True))
    else:
        sizes = LlamaConfig(
            vocab=WORDS, width=WIDTH, layers=layers, heads=4, kv_heads=2, inner=96
        )
        whole = Llama(sizes)
    whole = whole.cuda()
    tokens = [
        torch.randint(0, WORDS, (2, TOKENS), device="cuda")
        for _ in schedule.microbatches
    ]
    batch = batch_of(tokens, tokens)
    expected = copy.deepcopy(whole)
    own_parts = split(expected, [1] * layers)
    for number, x in enumerate(tokens):
        y = x
        for stage in schedule.microbatches[number].path:
            y = own_parts[schedule.stages[stage].part](y)
        (token_loss(y, x) / batch.valid).backward()
    mine = copy.deepcopy(whole)
    parts = split(mine, [1] * layers)
    named = dict(mine.named_parameters())
    ties = {
        name: Tied(where, named[name]) for name, where in shared_names(parts).items()
    }
    stages = own_stages(schedule, parts, comm.rank)
    executor = Executor(
        lower(schedule),
        stages,
        comm,
        token_loss,
        tape=CudaTape() if recorded else None,
        options=RunOptions(tied=ties, messages=messages),
    )
    with watching(executor):
        for _ in range(3):
            mine.zero_grad()
            result = executor.step(batch, timed=True)
            assert result.loss > 0
    assert result.timeline is not None
    worst = 0.0
    for part in stages.values():
        for key, parameter in part_parameters(part).items():
            other = expected.get_parameter(key).grad
            if other is None:
                continue
            assert parameter.grad is not None
            error = float((parameter.grad - other).norm() / other.norm())
            worst = max(worst, error)
    return worst


# ---------------------------------------------------------------- ranks that go wrong
def die(_: Tensor) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


TRICKS: dict[str, Trick] = {"sleep": sleep, "raise": blunder, "kill": die}


def goes_wrong(comm: Comm, how: str) -> None:
    """Let rank 1 go wrong in the middle of its second step."""
    torch.manual_seed(0)
    schedule = make("1f1b", ranks=comm.ranks, microbatches=4)
    sizes = LlamaConfig(
        vocab=WORDS, width=WIDTH, layers=comm.ranks, heads=4, kv_heads=4, inner=96
    )
    part: nn.Module = split(Llama(sizes).cuda(), [1] * comm.ranks)[comm.rank]
    if comm.rank == 1:
        part = Tricky(part, TRICKS[how], call=5)
        part.hidden_width = WIDTH  # as it said itself
    executor = Executor(lower(schedule), {comm.rank: part}, comm, token_loss)
    tokens = [torch.randint(0, WORDS, (2, TOKENS), device="cuda") for _ in range(4)]
    with watching(executor, silence=4.0):
        for _ in range(3):
            assert executor.step(batch_of(tokens, tokens)).loss > 0
