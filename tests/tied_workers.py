"""The loop of docs/guides/hugging_face.md as one rank runs it: it builds the whole model and keeps its own parts."""

from __future__ import annotations

import copy

import torch
import transformers

from hugging_face import gpt2_sizes
from penstock import Schedule, lower
from penstock.models import (
    even_partition,
    layer_count,
    shift_labels,
    split,
    token_loss,
)
from penstock.runtime import Batch, Comm, Executor, cut_batch
from pipelines import own_stages

STEPS = 3


def gpt2() -> torch.nn.Module:
    """Return a small model whose head is tied to its embedding."""
    torch.manual_seed(0)
    sizes = gpt2_sizes(37, layers=2, heads=2, positions=16, tie_word_embeddings=True)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).double()


def batches(microbatches: int) -> list[Batch]:
    draw = torch.Generator().manual_seed(1)
    tokens = [
        torch.randint(0, 37, (2 * microbatches, 9), generator=draw)
        for _ in range(STEPS)
    ]
    return [cut_batch(one, shift_labels(one), microbatches) for one in tokens]


def in_one_piece(microbatches: int) -> tuple[list[float], torch.nn.Module]:
    """Train the unsplit model for the same steps, and return it."""
    model, losses = gpt2(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for batch in batches(microbatches):
        optimizer.zero_grad()
        total = 0.0
        for x, y in zip(batch.inputs, batch.labels, strict=True):
            loss = token_loss(model(x).logits, y) / batch.valid
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
        optimizer.step()
    return losses, model


def train(
    comm: Comm, schedule: Schedule, model: torch.nn.Module | None = None
) -> tuple[list[float], dict[str, list[float]]]:
    """Train a few steps; return their losses and the weights of this rank.

    Weights have their names in the whole model.
    """
    model = gpt2() if model is None else copy.deepcopy(model)
    parts = split(model, even_partition(layer_count(model), schedule.parts))
    mine = own_stages(schedule, parts, comm.rank)
    executor = Executor(lower(schedule), mine, comm, token_loss)
    trained = dict.fromkeys(p for part in mine.values() for p in part.parameters())
    optimizer = torch.optim.SGD(list(trained), lr=0.5)
    losses = []
    for batch in batches(len(schedule.microbatches)):
        optimizer.zero_grad()
        losses.append(executor.step(batch).loss)
        optimizer.step()
    held = [pair for part in mine.values() for pair in part.whole_names().items()]
    return losses, {name: p.detach().flatten().tolist() for name, p in held}
