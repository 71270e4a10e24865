"""A training loop of your own over a pipeline: optimizer, clipping, rates, evaluation and checkpoints.

torchrun --nproc-per-node 2 examples/own_loop.py
"""

from __future__ import annotations

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from penstock import Pipeline, make
from penstock.models import shift_labels, token_loss

VOCAB, WIDTH, STEPS = 64, 32, 20


def layers() -> list[nn.Module]:
    """Return layers; each takes what the one before returns. Every rank draws the same weights."""
    torch.manual_seed(0)
    middle = [
        nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
        for _ in range(6)
    ]
    return [nn.Embedding(VOCAB, WIDTH), *middle, nn.Linear(WIDTH, VOCAB)]


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows in which every token follows from the one before, and the next tokens as labels."""
    first = torch.randint(
        0, VOCAB, (8, 1), generator=torch.Generator().manual_seed(step)
    )
    x = (first + 3 * torch.arange(16)) % VOCAB
    return x, shift_labels(x)


schedule = make("zb-h1", ranks=2, microbatches=4)
pipeline = Pipeline(layers(), schedule, token_loss)
optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-2)
rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

for step in range(STEPS):
    loss = pipeline.step(*batch(step)).loss
    norm = pipeline.clip(1.0)
    optimizer.step()
    optimizer.zero_grad()
    rates.step()
    if pipeline.comm.rank == 0 and step % 5 == 4:
        print(f"step {step + 1}  loss {loss:.3f}  norm {norm:.3f}")

held_out = pipeline.evaluate(*batch(1000))
dcp.save(
    pipeline.state_dict(), checkpoint_id="own-loop"
)  # each rank writes its own parts
dcp.load(
    pipeline.state_dict(), checkpoint_id="own-loop"
)  # another schedule could read them too
again = pipeline.evaluate(*batch(1000))
if pipeline.comm.rank == 0:
    print(f"held out {held_out:.3f}, the same after loading: {held_out == again}")
