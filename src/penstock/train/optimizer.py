"""AdamW over all ranks as one: one rate, one norm of all gradients, each parameter counted once.

    rate     ╱‾‾╲            rises over the warm-up, falls along half a cosine to its last share
           ╱      ╲___

    rank 0  ‖g‖² of its parameters ─┐                    the squares travel by parameter, each from its owner,
    rank 1  ‖g‖² of its parameters ─┼─► one column ──► norm      and are added in one order: the same bits whatever
    rank 2  ...                     ─┘                    the split

Of a parameter that several processes share each has its own share measured, and its own share updated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from penstock.config import OptimizerConfig
from penstock.runtime import Comm, local_share
from penstock.runtime.torch_internals import multiply_all, norms_of_all
from penstock.train.weights import Holding

NORM_EPSILON = 1e-6  # added to a norm before dividing by it, as torch does


def adamw(
    parameters: Mapping[str, nn.Parameter], settings: OptimizerConfig
) -> torch.optim.AdamW:
    """Matrices decay, vectors do not. Fused: one pass over the memory instead of several."""
    groups: dict[
        tuple[bool, object], list[nn.Parameter]
    ] = {}  # one update takes tensors of one mesh
    for parameter in parameters.values():
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault((parameter.dim() > 1, mesh), []).append(parameter)
    decays = {True: settings.decay, False: 0.0}
    listed: list[dict[str, Any]] = [
        {"params": some, "weight_decay": decays[matrices]}
        for (matrices, _), some in groups.items()
    ]
    return torch.optim.AdamW(
        listed
        or [
            {"params": []}
        ],  # a rank may have nothing to train; torch refuses an empty list of groups
        lr=settings.rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        fused=True,
    )


def rate_at(step: int, steps: int, settings: OptimizerConfig) -> float:
    """The learning rate of a step, counted from 0.

    >>> from penstock.config import OptimizerConfig
    >>> [round(rate_at(step, 10, OptimizerConfig(rate=1.0, warmup=2, final=0.1)), 3) for step in (0, 1, 2, 6, 9)]
    [0.5, 1.0, 1.0, 0.55, 0.134]
    """
    if step < settings.warmup:
        return settings.rate * (step + 1) / settings.warmup
    done = (step - settings.warmup) / max(steps - settings.warmup, 1)
    wave = 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    return settings.rate * (settings.final + (1 - settings.final) * wave)


class Gradients:
    """A process's gradients, measured together with those of all others.

    One sum a step carries everything that they tell each other: squares, a column of memory, `words`, small counts that
    everybody adds to (who wants to stop, who has saved), and the loss.
    """

    def __init__(
        self, holding: Holding, comm: Comm, device: torch.device, words: int
    ) -> None:
        self.holding, self.comm, self.device, self.words = holding, comm, device, words
        place = {name: number for number, name in enumerate(holding.names)}
        self.counted = [name for name in holding.parameters if name in holding.owned]
        self.places = torch.tensor(
            [place[name] for name in self.counted], dtype=torch.long, device=device
        )

    def measure(
        self, loss: float, memory: int, words: list[int]
    ) -> tuple[float, float, list[int], list[int]]:
        """The loss, of which each gives its share; the norm of all gradients; of every process its bytes; the sums of
        the words. All call it."""
        names, ranks = len(self.holding.names), self.comm.ranks
        column = torch.zeros(
            names + ranks + self.words + 1, dtype=torch.float64, device=self.device
        )
        squares = self._squares()
        if squares is not None:
            column[self.places] = squares
        column[names + self.comm.rank] = float(memory)
        column[names + ranks :] = torch.tensor([*words, loss], dtype=torch.float64)
        self.comm.add(column, tuple(range(ranks))).wait()
        found = column.cpu()
        norm = math.sqrt(float(found[:names].sum()))
        told = [int(value) for value in found[names:-1].tolist()]
        return float(found[-1]), norm, told[:ranks], told[ranks:]

    def _squares(self) -> Tensor | None:
        """Of each parameter that this rank counts; one without a gradient has none."""
        if not self.counted:
            return None
        found = [self.holding.parameters[name].grad for name in self.counted]
        zero = torch.zeros((), device=self.device)
        present = [local_share(grad) for grad in found if grad is not None]
        norms = iter(norms_of_all(present)) if present else iter(())
        return (
            torch.stack([zero if grad is None else next(norms) for grad in found])
            .double()
            .square()
        )

    def clip(self, norm: float, most: float) -> None:
        """Scales all gradients so that their norm is at most so much; 0: any."""
        if most and norm > most:
            found = [
                local_share(one.grad)
                for one in self.holding.parameters.values()
                if one.grad is not None
            ]
            if found:  # a rank may have nothing to train
                multiply_all(found, most / (norm + NORM_EPSILON))
