"""AdamW over all ranks: one learning rate, one norm of all gradients, and each parameter counted once.

    rate     ╱‾‾╲            rises during the warm-up, then falls along half a cosine to its final share
           ╱      ╲___

    rank 0  ‖g‖² of its parameters ─┐                            Each square comes from the owner of its parameter.
    rank 1  ‖g‖² of its parameters ─┼─► one column ──► norm      They are added in one order, so the result has the
    rank 2  ...                     ─┘                           same bits however the model is split.

If several processes share a parameter, each measures and updates its own share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from penstock.config import OptimizerConfig
from penstock.runtime import Comm, local_share
from penstock.runtime.clipping import scale_down
from penstock.runtime.torch_internals import norms_of_all
from penstock.train.weights import Holding


def adamw(
    parameters: Mapping[str, nn.Parameter], settings: OptimizerConfig
) -> torch.optim.AdamW:
    """Return a fused AdamW in which matrices decay and vectors do not."""
    # One fused update takes only tensors of one mesh.
    groups: dict[tuple[bool, object], list[nn.Parameter]] = {}
    for parameter in parameters.values():
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        is_matrix = parameter.dim() > 1
        groups.setdefault((is_matrix, mesh), []).append(parameter)
    listed: list[dict[str, Any]] = []
    for (is_matrix, _), members in groups.items():
        decay = settings.decay if is_matrix else 0.0
        listed.append({"params": members, "weight_decay": decay})
    if not listed:
        # A rank may have nothing to train, but torch refuses an empty list of groups.
        listed.append({"params": []})
    return torch.optim.AdamW(
        listed,
        lr=settings.rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        fused=True,
    )


def rate_at(step: int, steps: int, settings: OptimizerConfig) -> float:
    """Return the learning rate of a step, counted from 0.

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
    """The gradients of a process, measured together with those of all others.

    One sum per step carries everything that the processes tell each other: the squares,
    some numbers of each (its memory, the seconds that it has worked), `counts` small numbers
    that everybody adds to (how many were asked to stop, how many have saved), and the loss.
    """

    def __init__(
        self, holding: Holding, comm: Comm, device: torch.device, counts: int
    ) -> None:
        self.holding = holding
        self.comm = comm
        self.device = device
        self.counts = counts
        self.owned = [name for name in holding.parameters if name in holding.owned]
        numbers = {name: number for number, name in enumerate(holding.names)}
        places = [numbers[name] for name in self.owned]
        self.places = torch.tensor(places, dtype=torch.long, device=device)

    def measure(
        self, loss: float, own: Sequence[float], counts: list[int]
    ) -> tuple[float, float, list[list[float]], list[int]]:
        """Add up what all processes measured; all of them must call it.

        Each gives its share of the loss, some numbers of its own, and its counts. Return the
        whole loss, the norm of all gradients, the numbers of every process, and the sums of
        the counts.
        """
        names = len(self.holding.names)
        ranks = self.comm.ranks
        width = len(own)
        length = names + ranks * width + self.counts + 1
        column = torch.zeros(length, dtype=torch.float64, device=self.device)
        squares = self._squares()
        if squares is not None:
            column[self.places] = squares
        place = names + self.comm.rank * width
        column[place : place + width] = torch.tensor(own, dtype=torch.float64)
        rest = torch.tensor([*counts, loss], dtype=torch.float64)
        column[names + ranks * width :] = rest
        self.comm.add(column, tuple(range(ranks))).wait()
        sums = column.cpu()
        norm = math.sqrt(float(sums[:names].sum()))
        owns = sums[names : names + ranks * width].view(ranks, width).tolist()
        totals = [int(value) for value in sums[names + ranks * width : -1].tolist()]
        return float(sums[-1]), norm, owns, totals

    def _squares(self) -> Tensor | None:
        """The squared norm of each parameter that this process owns; 0 without a gradient."""
        if not self.owned:
            return None
        gradients = [self.holding.parameters[name].grad for name in self.owned]
        present = [local_share(grad) for grad in gradients if grad is not None]
        norms = iter(norms_of_all(present)) if present else iter(())
        zero = torch.zeros((), device=self.device)
        column = [zero if grad is None else next(norms) for grad in gradients]
        return torch.stack(column).double().square()

    def clip(self, norm: float, most: float) -> None:
        """Scale all gradients so that their norm is at most `most`; 0 leaves them alone."""
        if not most:
            return
        gradients = [
            local_share(parameter.grad)
            for parameter in self.holding.parameters.values()
            if parameter.grad is not None
        ]
        scale_down(gradients, norm, most)
