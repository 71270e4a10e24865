"""A model, a plan and a loss become a pipeline: `step(x, y)` in a training loop of your own.

    model, or a list of layers ──► parts ──┐
    schedule, or a plan ───────────────────┼──► Pipeline ──► step, evaluate, predict, clip, parameters, state_dict
    loss ──────────────────────────────────┘

Every rank builds the same model and passes the same batch. A rank keeps only its own parts; ranks are threads
(`run_threads`), processes or machines under torchrun, with the same code.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ShapeError
from penstock.ir import Plan, Schedule, lower
from penstock.ir.sums import first_holders
from penstock.models import Part, layer_count, part_parameters, split, token_loss
from penstock.models.hf_trial import refuse_own_calls
from penstock.partition import even_partition
from penstock.runtime import (
    Batch,
    CudaTape,
    Executor,
    Proof,
    Result,
    compile_stage,
    cut_batch,
    init,
    prove,
)
from penstock.runtime.batch import joined
from penstock.runtime.comm.comm import Comm
from penstock.runtime.executor import COMPARED_STEPS, RunOptions
from penstock.runtime.gradients import scale_down, square_norm
from penstock.runtime.loss import Loss
from penstock.runtime.passed_values import LayerChain

_log = logging.getLogger(__name__)


class Pipeline:
    """One rank's share of a model, and the schedule that trains it.

    `model` is a model that `penstock.models.split` takes (ours, or a language model of transformers), or a list of
    layers: each takes what the one before returns, which is a tensor of any shape, a tuple of tensors, or a dict of
    tensors with names (`penstock.runtime.passed_values`). `plan` is a schedule or a plan, such as that of `penstock
    plan`. `loss` takes the output of the last layer and labels, and returns the sum of the labels' losses, or their
    mean if `reduction` is "mean".

    `partition` says how many layers each part has; by default the plan's, or as even as possible. `comm` connects the
    ranks; by default those that torchrun has started. With `graphs`, actions on a GPU are recorded in the first step
    and then played (CUDA graphs). In the first step and in every `compare`-th one, the ranks check that they were given
    the same batch. Before the first step they check, unless `prove` is False, that the plan computes what plain calls
    compute.
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
        graphs: bool = False,
        compare: int = COMPARED_STEPS,
        prove: bool = True,
    ) -> None:
        self.schedule = plan.schedule if isinstance(plan, Plan) else plan
        self.comm = init(device=device) if comm is None else comm
        partition = partition or (plan.partition if isinstance(plan, Plan) else ())
        parts = cut_into_parts(model, self.schedule.parts, partition)
        self.device = torch.device(device or "cpu")
        if graphs and self.device.type != "cuda":
            raise ShapeError(
                f"graphs=True records the launches of a GPU, but the device is {self.device}\n"
                '  say device="cuda", or leave graphs out'
            )
        self.graphs = graphs
        self.stages: dict[int, nn.Module] = {}
        mine: dict[int, Part | LayerChain] = {}
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
        self.compare = compare
        self.proves = prove  # before the next step
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

    # ------------------------------------------------------------ steps
    def step(
        self,
        x: Tensor,
        y: Tensor,
        timed: bool = False,
        outputs: bool = False,
        **named: Tensor,
    ) -> Result:
        """Run one step on a batch, and add to the gradients; all ranks pass the same batch.

        A rank that holds neither the first layer nor the last one reads no data. It may pass tensors that have only a
        shape, on the device "meta".

        `Result.loss` is the mean loss of all labels that count, on every rank. The `named` tensors, such as a mask,
        have a row for each row of x; a layer gets those that its forward has a parameter for. With `outputs`,
        `Result.outputs` has what the last layer returned for each micro-batch, on the rank that holds it.
        """
        batch = self.cut(x, y, named)
        if self.proves:
            self.proves = False
            proof = prove(self.executor, batch)
            if self.comm.rank == 0 and not proof.skipped:
                _log.info("%s", proof)
        return self.executor.step(batch, timed, outputs)

    def evaluate(self, x: Tensor, y: Tensor, **named: Tensor) -> float:
        """Return the mean loss of a batch, without gradients and with all modules in the mode of `eval()`."""
        with self._in_eval_mode():
            return self.executor.evaluate(self.cut(x, y, named))

    def predict(self, x: Tensor, **named: Tensor) -> Any:
        """Return what the last layer returns for a batch, without gradients: on the rank that holds it, else None.

        All modules are in the mode of `eval()` meanwhile. If several ranks hold the last layer, each has the rows of
        its own micro-batches. All ranks call this.
        """
        batch = self.cut_unlabelled(x, named)
        with self._in_eval_mode():
            found = [y for y in self.executor.predict(batch) if y is not None]
        return joined(found, dim=0) if found else None

    @contextmanager
    def _in_eval_mode(self) -> Iterator[None]:
        """Switch modules to the mode of `eval()`, in which nothing is dropped, and back to what each of them had.

        Ranks that are threads may share modules. So all of them look at the modes before one switches, and all are
        done before one switches back.
        """
        modes = []
        for part in self.parts.values():
            modes += [(module, module.training) for module in part.modules()]
        self.comm.barrier()
        try:
            for module, _ in modes:
                module.training = False
            yield
            self.comm.barrier()
        finally:
            for module, training in modes:
                module.training = training

    def prove(self, x: Tensor, y: Tensor, **named: Tensor) -> Proof:
        """Check that the plan computes what plain calls compute; see `penstock.runtime.proof`."""
        return prove(self.executor, self.cut(x, y, named))

    def edge_bytes(self, x: Tensor, **named: Tensor) -> tuple[int, ...]:
        """Return the bytes that go from each part to the next for the first micro-batch: of all its tensors.

        Divided by its tokens, they are what `PartCost.message` takes, for a simulation. All ranks call this.
        """
        batch = self.cut_unlabelled(x, named)
        return tuple(edge.sent_bytes for edge in self.executor.edges(batch)[0])

    def cut(self, x: Tensor, y: Tensor, named: Mapping[str, Tensor]) -> Batch:
        """Deal a batch out to the micro-batches."""
        _require_tensors({"x": x, "y": y, **named})
        moved = {name: tensor.to(self.device) for name, tensor in named.items()}
        paths = [microbatch.path for microbatch in self.schedule.microbatches]
        x = self._move("x", x, {path[0] for path in paths})
        y = self._move("y", y, {path[-1] for path in paths})
        return cut_batch(x, y, len(paths), named=moved)

    def _move(self, name: str, given: Tensor, readers: Collection[int]) -> Tensor:
        """A tensor on this rank's device; one that has only a shape becomes a number that is expanded to it."""
        if not given.is_meta:
            return given.to(self.device)
        reading = sorted(self.stages.keys() & readers)
        if reading:
            raise ShapeError(
                f"{name} has only a shape (device='meta'), but stage {reading[0]} on rank {self.comm.rank} reads it\n"
                "  pass the batch itself on this rank"
            )
        return torch.zeros((), dtype=given.dtype, device=self.device).expand(
            given.shape
        )

    def cut_unlabelled(self, x: Tensor, named: Mapping[str, Tensor]) -> Batch:
        """Deal a batch without labels out to the micro-batches."""
        _require_tensors({"x": x})
        rows = torch.zeros(len(x), 1, dtype=torch.long, device=self.device)
        return replace(self.cut(x, rows, named), labels=())

    def clip(self, most: float) -> float:
        """Scale the gradients of all ranks so that their norm is at most `most`; return the norm before.

        A parameter that several ranks hold counts once.
        """
        square = torch.zeros(1, dtype=torch.float64, device=self.device)
        for name, parameter in self.named_parameters():
            if name in self.owned and parameter.grad is not None:
                square += square_norm(parameter.grad)
        self.comm.add(square, tuple(range(self.comm.ranks))).wait()
        norm = float(square.sqrt())
        gradients = [one.grad for one in self.parameters() if one.grad is not None]
        scale_down(gradients, norm, most)
        return norm

    @cached_property
    def executor(self) -> Executor:
        """The executor, which is made when it is first used. All ranks make theirs at the same time."""
        return Executor(
            lower(self.schedule),
            self.stages,
            self.comm,
            self.loss,
            recompute=self.recompute,
            autocast=self.autocast,
            reduction=self.reduction,
            tape=CudaTape() if self.graphs else None,
            options=RunOptions(compare=self.compare),
        )

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
        """Return the weights and saved buffers of this rank, by their names in the whole model."""
        saved: dict[str, Tensor] = dict(self.named_parameters())
        for part in self.parts.values():
            held = part.state_dict(keep_vars=True)
            if isinstance(part, Part):
                held = {
                    k: x for k, x in held.items() if not isinstance(x, nn.Parameter)
                }
            # A list has all names of a layer that comes several times.
            saved |= held
        return {name: tensor.detach() for name, tensor in saved.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy the weights and buffers of this rank out of a state, which may be that of the whole model."""
        with torch.no_grad():
            for name, tensor in self.state_dict().items():
                if name not in state:
                    raise ShapeError(f"the state has no {name}, which this rank holds")
                tensor.copy_(state[name])

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for parameter in self.parameters():
            parameter.grad = None


def _require_tensors(given: Mapping[str, object]) -> None:
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise ShapeError(
                f"{name} is a {type(value).__name__}, but it must be a tensor with a row for each example of the batch"
            )


# ---------------------------------------------------------------- parts
def cut_into_parts(
    model: nn.Module | Sequence[nn.Module], parts: int, partition: Sequence[int] = ()
) -> list[Part] | list[LayerChain]:
    """Cut a model, or a list of layers, into parts."""
    listed = isinstance(model, nn.Sequential | nn.ModuleList | Sequence)
    layers = list(model) if listed else []  # type: ignore[arg-type]
    if isinstance(model, nn.Sequential):
        _refuse_own_sequence(model)
    for number, layer in enumerate(layers):
        if not isinstance(layer, nn.Module):
            raise ShapeError(
                f"layer {number} is a {type(layer).__name__}, but layers are modules of torch\n"
                "  write it as a class of nn.Module; torch has many, such as nn.ReLU for torch.relu"
            )
    count = len(layers) if listed else layer_count(model)  # type: ignore[arg-type]
    partition = tuple(partition) or even_partition(count, parts)
    if len(partition) != parts or sum(partition) != count:
        raise ShapeError(
            f"the partition {partition} has {len(partition)} parts and {sum(partition)} layers, "
            f"but the schedule has {parts} parts and the model {count} layers"
        )
    if not listed:
        return split(model, partition)  # type: ignore[arg-type]
    return chain_layers(layers, list(pairwise(accumulate(partition, initial=0))))


def _refuse_own_sequence(model: nn.Sequential) -> None:
    """Refuse an `nn.Sequential` that does more than to call its layers one after the other."""
    name = type(model).__name__
    if type(model).forward not in (nn.Sequential.forward, LayerChain.forward):
        raise ShapeError(
            f"{name} overrides the forward of nn.Sequential, and parts would not run that\n"
            "  give Pipeline the list of layers, with what the forward adds as a layer of its own"
        )
    refuse_own_calls(model, (layer for layer, _ in model.named_children()))


def chain_layers(
    layers: Sequence[nn.Module], bounds: Sequence[tuple[int, int]]
) -> list[LayerChain]:
    """Make a part of the layers between each two bounds. They know which parameters several parts hold."""
    first_names: dict[int, str] = {}
    owners: dict[str, dict[int, None]] = {}
    for part, (begin, end) in enumerate(bounds):
        for number in range(begin, end):
            for name, parameter in layers[number].named_parameters():
                first = first_names.setdefault(id(parameter), f"{number}.{name}")
                owners.setdefault(first, {})[part] = None
            for name, buffer in layers[number].named_buffers():
                first_names.setdefault(id(buffer), f"{number}.{name}")
    shared = {name: tuple(held) for name, held in owners.items() if len(held) > 1}
    parts = []
    for begin, end in bounds:
        numbered = [(str(number), layers[number]) for number in range(begin, end)]
        parts.append(LayerChain(OrderedDict(numbered), first_names, shared))
    return parts


def _named(part: Part | LayerChain) -> dict[str, nn.Parameter]:
    """The parameters of a part by their names in the whole model or list."""
    return part_parameters(part) if isinstance(part, Part) else part.whole_names()
