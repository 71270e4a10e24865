"""A model whose layers pass several tensors, named ones and added losses, and the same model written out by hand."""

from __future__ import annotations

from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drawing import drawn_from
from penstock import Pipeline, make
from penstock.runtime import add_loss
from penstock.runtime.comm.comm import Comm

WORDS, WIDTH, TOKENS, CLASSES = 13, 6, 5, 4


class Enter(nn.Module):
    """Tokens become a hidden state, a skip for the head, and the positions of a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.side = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, tokens: Tensor, kinds: Tensor) -> dict[str, Tensor]:
        x = self.embed(tokens) * kinds[..., None]
        return {"x": x, "skip": self.side(x).tanh(), "odd": tokens % 2}


class Weigh(nn.Module):
    """Uses a mask that travels and one of the batch, and adds a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, odd: Tensor, mask: Tensor) -> Tensor:
        y = x + self.linear(x).tanh() * mask[..., None]
        y = y.masked_fill(odd[..., None] == 1, 0.5)
        add_loss(0.3 * y.square().mean())
        return y


class Fork(nn.Module):
    """One tensor becomes two, of different shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.tanh(), self.narrow(x).mean(1)


class Join(nn.Module):
    """Takes both, and the skip, which travels on to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.mix = nn.Linear(2, WIDTH), nn.Linear(WIDTH + 3, WIDTH)

    def forward(self, x: Tensor, pooled: Tensor, skip: Tensor) -> Tensor:
        return self.mix(torch.cat([x + self.wide(pooled)[:, None], skip], -1))


class Plain(nn.Module):
    """Knows nothing of what travels past it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).sin()


class Head(nn.Module):
    """Classes of a row, from its mean and that of the skip."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH + 3, CLASSES)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        y = self.linear(torch.cat([x.mean(1), skip.mean(1)], -1))
        add_loss(0.1 * y.square().mean())
        return y


KINDS = (Enter, Weigh, Plain, Fork, Join, Plain, Plain, Head)


@drawn_from(0)
def layers() -> list[nn.Module]:
    """Return the layers; every rank draws the same weights."""
    return [kind().double() for kind in KINDS]


def by_hand(
    model: list[nn.Module], tokens: Tensor, kinds: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the classes and the added losses, written out without the rules of a pipeline."""
    enter, weigh, plain, fork, join, second, third, head = model
    x = enter.embed(tokens) * kinds[..., None]
    skip = enter.side(x).tanh()
    x = x + weigh.linear(x).tanh() * mask[..., None]
    x = x.masked_fill(tokens[..., None] % 2 == 1, 0.5)
    added = 0.3 * x.square().mean()
    x = x + plain.linear(x).sin()
    x, pooled = x.tanh(), fork.narrow(x).mean(1)
    x = join.mix(torch.cat([x + join.wide(pooled)[:, None], skip], -1))
    x = x + second.linear(x).sin()
    x = x + third.linear(x).sin()
    y = head.linear(torch.cat([x.mean(1), skip.mean(1)], -1))
    return y, added + 0.1 * y.square().mean()


def batch(rows: int = 6) -> dict[str, Tensor]:
    """Return tokens, classes of the rows, and two named tensors."""
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, WORDS, (rows, TOKENS), generator=draw)
    return {
        "x": tokens,
        "y": torch.randint(0, CLASSES, (rows,), generator=draw),
        "kinds": torch.rand(rows, TOKENS, generator=draw, dtype=torch.float64),
        "mask": torch.randint(0, 2, (rows, TOKENS), generator=draw).bool(),
    }


def summed(logits: Tensor, classes: Tensor) -> Tensor:
    """Return the sum of the losses of all rows."""
    return F.cross_entropy(logits, classes, reduction="sum")


def in_one_piece(microbatches: int) -> tuple[float, dict[str, Tensor], Tensor]:
    """Return the loss, the gradients by name and the outputs, one micro-batch after the other."""
    model = layers()
    cut = {name: x.tensor_split(microbatches) for name, x in batch().items()}
    total, outputs = 0.0, []
    for x, y, kinds, mask in zip(*cut.values(), strict=True):
        logits, added = by_hand(model, x, kinds, mask)
        share = len(x) / len(batch()["x"])
        loss = summed(logits, y) / len(batch()["x"]) + share * added
        loss.backward()
        total += float(loss.detach())
        outputs.append(logits.detach())
    gradients = {
        f"{number}.{name}": parameter.grad
        for number, layer in enumerate(model)
        for name, parameter in layer.named_parameters()
    }
    return total, gradients, torch.cat(outputs)


def train(
    comm: Comm,
    name: str = "1f1b",
    options: MappingProxyType[str, object] | dict[str, object] = MappingProxyType({}),
    proves: bool = False,
) -> tuple[float, dict[str, Tensor], list[object], Tensor | None, float]:
    """Return the loss, this rank's gradients, the outputs of the step, the predictions and the evaluated loss."""
    schedule = make(name, ranks=2, microbatches=2)
    pipeline = Pipeline(layers(), schedule, summed, comm=comm, **options)
    given = batch()
    if proves:
        assert pipeline.prove(**given).stages == len(schedule.stages)
    result = pipeline.step(**given, outputs=True)
    gradients = {key: one.grad for key, one in pipeline.named_parameters()}
    evaluated = pipeline.evaluate(**given)
    given.pop("y")
    predicted = pipeline.predict(**given)
    return result.loss, gradients, list(result.outputs), predicted, evaluated
