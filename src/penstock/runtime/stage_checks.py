"""Checks of a user's own stages, with errors that say which stage is wrong, what is expected and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from penstock.errors import RunError, ShapeError
from penstock.ir.schedule import Schedule
from penstock.runtime.comm.comm import Comm
from penstock.runtime.lane import LaneStep
from penstock.runtime.loss_reduction import described
from penstock.runtime.passed_values import has_gradient
from penstock.runtime.torch_internals import changes

MAX_NAMES_SHOWN = 3


def stages_of_rank(
    schedule: Schedule, stages: Mapping[int, nn.Module], comm: Comm
) -> dict[int, nn.Module]:
    """The modules of this rank's stages. Raises an error if one is missing or is not a module."""
    if comm.ranks != schedule.ranks:
        raise ShapeError(
            f"the schedule is for {schedule.ranks} ranks, but there are {comm.ranks}\n"
            f"  start {schedule.ranks} processes (torchrun --nproc-per-node {schedule.ranks}), or make the schedule "
            f"with ranks={comm.ranks}"
        )
    due = [
        number
        for number, stage in enumerate(schedule.stages)
        if stage.rank == comm.rank
    ]
    unknown = [number for number in stages if number not in range(len(schedule.stages))]
    missing = [number for number in due if number not in stages]
    if unknown or missing:
        given = ", ".join(map(str, sorted(stages))) or "none"
        what = f"has no stage {unknown[0]}" if unknown else ""
        what = what or f"puts stage {missing[0]} on rank {comm.rank}"
        raise ShapeError(
            f"the schedule {what}, but the stages given to the Executor are: {given}\n"
            f"  rank {comm.rank} needs a module for each of: {', '.join(map(str, due)) or 'none'}; "
            "{n: parts[s.part] for n, s in enumerate(schedule.stages) if s.rank == comm.rank} has them"
        )
    for number in due:
        if not isinstance(stages[number], nn.Module):
            raise ShapeError(
                f"stage {number} is {described(stages[number])}, but a stage must be an nn.Module"
            )
    found = {number: stages[number] for number in due}
    refuse_unfit_weights(found)
    return found


def not_tensors_error(step: LaneStep, module: nn.Module, y: object) -> ShapeError:
    """The error for a stage that did not return tensors, or other ones than when it was tried."""
    want = (
        "tensors, for the loss" if step.last else "what it returned when it was tried"
    )
    return ShapeError(
        f"stage {step.stage} ({type(module).__name__}) returned {described(y)} in {step.instruction}, but it must "
        f"return {want}\n  a stage returns a tensor, a tuple of tensors, or a dict of tensors with names, and the "
        "same ones in every call"
    )


def unfit_message(
    step: LaneStep,
    x: Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    autocast: bool,
) -> ShapeError | None:
    """The error for a result that the next rank does not expect; None if a cast without loss is enough."""
    action = step.instruction.action
    what = "gave the gradient" if step.goes_back else "returned"
    found = f"stage {action.stage} {what} {described(x)} in {action}"
    tried = (
        "\n  that is what it returned when it was tried before the first step; shapes and types must follow from those "
        "of the input, and not from its numbers"
    )
    if tuple(x.shape) != tuple(shape):
        expected = f"rank {step.peer} expects the shape {tuple(shape)}"
        return ShapeError(f"{found}, but {expected}{tried}")
    promoted = torch.promote_types(x.dtype, dtype)
    casts = has_gradient(x.dtype) and has_gradient(dtype)
    casts = casts and (dtype.is_complex or not x.is_complex())
    if not casts or (not autocast and promoted is not dtype):
        name = str(dtype).removeprefix("torch.")
        return ShapeError(f"{found}, but rank {step.peer} expects {name}{tried}")
    return None


def detached_error(step: LaneStep, module: nn.Module) -> RunError:
    """The error for a stage whose output depends on nothing that trains, although it should."""
    return RunError(
        f"{step.instruction} has no gradient to compute: what stage {step.stage} ({type(module).__name__}) returned "
        "does not depend on its input or its parameters\n"
        "  look for detach(), no_grad() or argmax() in its forward or in the loss; to freeze a stage on purpose, call "
        "requires_grad_(False) on its parameters"
    )


def refuse_unfit_weights(stages: Mapping[int, nn.Module]) -> None:
    """Raise an error if weights have no shape yet, or will have gradients of another form than their own."""
    for stage, module in stages.items():
        for path, layer in module.named_modules():
            where = f"stage {stage} ({type(module).__name__})"
            layer_name = f"{path or 'itself'} ({type(layer).__name__})"
            own = (*layer.parameters(recurse=False), *layer.buffers(recurse=False))
            if any(map(is_lazy, own)):
                raise ShapeError(
                    f"{where} has weights without a shape, in {layer_name}\n"
                    "  call the whole model once on a small batch, before it is cut into stages"
                )
            if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse:
                raise ShapeError(
                    f"{where} makes sparse gradients, in {layer_name}, which cannot be summed over ranks\n"
                    "  leave out sparse=True"
                )


def call_stage(
    module: nn.Module,
    values: Sequence[Tensor],
    arguments: Mapping[str, Any],
    stage: int,
    doing: str,
) -> Any:
    """Call a module, and refuse one that changes its input in place, which a backward needs as it was."""
    named = [value for value in arguments.values() if isinstance(value, Tensor)]
    given = [*values, *named]
    before = _versions(given)
    try:
        y = module(*values, **arguments)
    except RuntimeError as error:
        changes_a_leaf = "leaf Variable that requires grad" in str(error)
        if changes_a_leaf and any(x.requires_grad for x in given):
            raise _changed_input_error(stage, module, doing) from error
        if not torch.is_grad_enabled() and needs_gradients(error):
            raise without_gradients_error(stage, module, doing, error) from error
        raise
    if _versions(given) != before:
        raise _changed_input_error(stage, module, doing)
    return y


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    """Numbers that grow when somebody changes a tensor."""
    return [0 if one.is_inference() else changes(one) for one in tensors]


def needs_gradients(error: Exception) -> bool:
    """Whether torch says that something needs a tensor with a gradient, such as a hook on it or `autograd.grad`."""
    text = str(error)
    return "require grad" in text or "requires_grad" in text


def without_gradients_error(
    stage: int, module: nn.Module, doing: str, error: RuntimeError
) -> RunError:
    """The error for a forward that needs gradients where it runs without them."""
    reason = str(error).strip().partition("\n")[0]
    return RunError(
        f"stage {stage} ({type(module).__name__}) cannot run {doing} without gradients: {reason}\n"
        "  a recomputed stage computes its first forward without them, and so do evaluation and frozen stages: write "
        "`if y.requires_grad:` before y.register_hook() or y.retain_grad(), or train without `recompute`"
    )


def _changed_input_error(stage: int, module: nn.Module, doing: str) -> ShapeError:
    return ShapeError(
        f"stage {stage} ({type(module).__name__}) changes its input in place in {doing}, but the "
        "backward needs the input as it was\n"
        "  let its first layer make a new tensor: nn.ReLU(inplace=False), x * 2 instead of x.mul_(2), or x.clone()"
    )


def changed_error(names: list[str]) -> ShapeError:
    """The error for parameters that were frozen or unfrozen after the ranks agreed on what trains."""
    listed = ", ".join(names[:MAX_NAMES_SHOWN])
    if len(names) > MAX_NAMES_SHOWN:
        listed += f" and {len(names) - MAX_NAMES_SHOWN} more"
    return ShapeError(
        f"requires_grad of {listed} has changed since the Executor was made, and the other ranks do not know\n"
        "  make a new Executor on every rank after freezing or unfreezing parameters"
    )
