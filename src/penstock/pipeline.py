"""A model, a plan and a loss become a pipeline: `step(x, y)` in a training loop of your own.

    model, or a list of layers ──► parts ──┐
    schedule, or a plan ───────────────────┼──► Pipeline ──► step, evaluate, clip, parameters, state_dict
    loss ──────────────────────────────────┘

Every rank builds the same model and passes the same batch. A rank keeps only its own parts; ranks are threads
(`run_threads`), processes or machines under torchrun, with the same code.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from penstock.errors import ShapeError
from penstock.ir import Plan, Schedule, lower
from penstock.ir.sums import first_holders
from penstock.models import Part, layer_count, part_parameters, split, token_loss
from penstock.partition import even_partition
from penstock.runtime import (
    Executor,
    Proof,
    Result,
    compile_stage,
    cut_batch,
    init,
    prove,
)
from penstock.runtime.clipping import scale_down
from penstock.runtime.comm.comm import Comm
from penstock.runtime.loss_reduction import Loss


class Pipeline:
    """One rank's share of a model, and the schedule that trains it.

    `model` is a model that `penstock.models.split` takes (ours, or a decoder of transformers), or a list of layers:
    each takes what the one before returns, and between them goes a hidden state of shape (rows, tokens, width). `plan`
    is a schedule or a plan, such as that of `penstock plan`. `loss` takes the output of the last layer and labels, and
    returns the sum of the labels' losses, or their mean if `reduction` is "mean".

    `partition` says how many layers each part has; by default the plan's, or as even as possible. `comm` connects the
    ranks; by default those that torchrun has started.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        plan: Plan | Schedule,
        loss: Loss = token_loss,
        *,
        comm: Comm | None = None,
        partition: Sequence[int] = (),
        device: torch.device | str | None = None,
        reduction: str = "sum",
        recompute: bool = False,
        autocast: torch.dtype | None = None,
        compile: bool = False,  # as torch names it
    ) -> None:
        self.schedule = plan.schedule if isinstance(plan, Plan) else plan
        self.comm = init(device=device) if comm is None else comm
        partition = partition or (plan.partition if isinstance(plan, Plan) else ())
        parts = parts_of(model, self.schedule.parts, partition)
        self.shapes = _without_memory(parts[0])
        self.device = torch.device(device or "cpu")
        self.stages: dict[int, nn.Module] = {}
        mine: dict[int, nn.Module] = {}
        for number, stage in enumerate(self.schedule.stages):
            if stage.rank == self.comm.rank:
                if stage.part not in mine:
                    mine[stage.part] = parts[stage.part].to(self.device)
                self.stages[number] = mine[stage.part]
        if compile:
            for part in mine.values():
                compile_stage(part)
        self.parts = mine
        self.loss = loss
        self.reduction = reduction
        self.autocast = autocast
        again = set(plan.recompute) if isinstance(plan, Plan) else set()
        self.recompute = frozenset(
            number
            for number in self.stages
            if recompute or self.schedule.stages[number].part in again
        )
        holders = first_holders(self.schedule, [_named(part) for part in parts])
        # A parameter that several ranks hold counts on the first of them.
        self.owned = {name for name, rank in holders.items() if rank == self.comm.rank}
        self._executor: Executor | None = None

    # ------------------------------------------------------------ steps
    def step(self, x: Tensor, y: Tensor, timed: bool = False) -> Result:
        """Run one step on a batch, and add to the gradients; all ranks pass the same batch.

        `Result.loss` is the mean loss of all labels that count, on every rank.
        """
        batch = cut_batch(x.to(self.device), y.to(self.device), self.microbatches)
        return self.executor(x).step(batch, timed)

    @torch.no_grad()
    def evaluate(self, x: Tensor, y: Tensor) -> float:
        """Return the mean loss of a batch, without gradients."""
        batch = cut_batch(x.to(self.device), y.to(self.device), self.microbatches)
        return self.executor(x).evaluate(batch)

    def prove(self, x: Tensor, y: Tensor) -> Proof:
        """Check that the plan computes what plain calls compute; see `penstock.runtime.prove`."""
        batch = cut_batch(x.to(self.device), y.to(self.device), self.microbatches)
        return prove(self.executor(x), batch)

    def clip(self, most: float) -> float:
        """Scale the gradients of all ranks so that their norm is at most `most`; return the norm before.

        A parameter that several ranks hold counts once.
        """
        square = torch.zeros(1, dtype=torch.float64, device=self.device)
        for name, parameter in self.named_parameters():
            if name in self.owned and parameter.grad is not None:
                square += parameter.grad.double().square().sum()
        self.comm.add(square, tuple(range(self.comm.ranks))).wait()
        norm = float(square.sqrt())
        gradients = [one.grad for one in self.parameters() if one.grad is not None]
        scale_down(gradients, norm, most)
        return norm

    @property
    def microbatches(self) -> int:
        """The micro-batches that a batch is dealt out to."""
        return len(self.schedule.microbatches)

    def executor(self, x: Tensor) -> Executor:
        """The executor, which is made when the shape of a batch is known for the first time."""
        if self._executor is None:
            hidden = hidden_state(self.shapes, x)
            self._executor = Executor(
                lower(self.schedule),
                self.stages,
                self.comm,
                self.loss,
                hidden.shape[2],
                hidden.dtype,
                recompute=self.recompute,
                autocast=self.autocast,
                reduction=self.reduction,
            )
        return self._executor

    # ------------------------------------------------------------ parameters
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of this rank, by their names in the whole model."""
        found: dict[str, nn.Parameter] = {}
        for part in self.parts.values():
            found |= _named(part)
        yield from found.items()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of this rank, for an optimizer."""
        for _, parameter in self.named_parameters():
            yield parameter

    def state_dict(self) -> dict[str, Tensor]:
        """Return the weights of this rank, by their names in the whole model."""
        return {name: one.detach() for name, one in self.named_parameters()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy the weights of this rank out of a state, which may be that of the whole model."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name not in state:
                    raise ShapeError(f"the state has no {name}, which this rank holds")
                parameter.copy_(state[name])

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for parameter in self.parameters():
            parameter.grad = None


# ---------------------------------------------------------------- parts
def parts_of(
    model: nn.Module | Sequence[nn.Module], parts: int, partition: Sequence[int] = ()
) -> list[Part] | list[nn.Sequential]:
    """Cut a model, or a list of layers, into parts."""
    listed = isinstance(model, nn.Sequential | nn.ModuleList | Sequence)
    layers = list(model) if listed else []  # type: ignore[arg-type]
    count = len(layers) if listed else layer_count(model)  # type: ignore[arg-type]
    partition = tuple(partition) or even_partition(count, parts)
    if len(partition) != parts or sum(partition) != count:
        raise ShapeError(
            f"the partition {partition} has {len(partition)} parts and {sum(partition)} layers, "
            f"but the schedule has {parts} parts and the model {count} layers"
        )
    if not listed:
        return split(model, partition)  # type: ignore[arg-type]
    bounds = pairwise(accumulate(partition, initial=0))
    numbered = [(str(number), layer) for number, layer in enumerate(layers)]
    return [nn.Sequential(OrderedDict(numbered[a:b])) for a, b in bounds]


def _named(part: nn.Module) -> dict[str, nn.Parameter]:
    if isinstance(part, Part):
        return part_parameters(part)
    return dict(part.named_parameters())


def _without_memory(part: nn.Module) -> nn.Module:
    """A copy of a part on the meta device, which knows shapes and has no numbers."""
    memo: dict[int, object] = {}
    for parameter in (*part.parameters(), *part.buffers()):
        empty = parameter.detach().to("meta")
        memo[id(parameter)] = (
            nn.Parameter(empty, parameter.requires_grad)
            if isinstance(parameter, nn.Parameter)
            else empty
        )
    return copy.deepcopy(part, memo)


def hidden_state(part: nn.Module, x: Tensor) -> Tensor:
    """The hidden state that the first part makes of an input: its shape and type, without numbers."""
    with torch.no_grad():
        hidden = part(torch.empty_like(x[:1], device="meta"))
    if (
        not isinstance(hidden, Tensor)
        or hidden.dim() != 3
        or hidden.shape[1] != x.shape[1]
    ):
        found = (
            tuple(hidden.shape) if isinstance(hidden, Tensor) else type(hidden).__name__
        )
        raise ShapeError(
            f"the first part makes {found} of an input of shape {tuple(x[:1].shape)}, but a hidden state has the "
            f"shape (rows, tokens, width), here (1, {x.shape[1]}, width)"
        )
    return hidden
