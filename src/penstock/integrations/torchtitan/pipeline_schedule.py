"""The schedule that torchtitan's trainer calls: `step` and `eval`, on the executor of a plan.

    trainer             arg_mbs (ranks with the first stage)   kwarg_mbs (all ranks)   target_mbs (ranks with the last)
    PipelineSchedule    tokens ──────────────────────────────► part(x, **kwargs) ────► loss, appended to `losses`
                                                 ▲
                        the executor passes x between stages and says which micro-batch runs

A part stays torchtitan's own module, so that FSDP, checkpoints and the optimizer see it as ever. Only its `forward` is
replaced: it takes (x, piece), as the executor calls it, and adds the keyword arguments of the micro-batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.errors import RunError, ShapeError
from penstock.ir import Schedule, lower
from penstock.models.slice import Slice
from penstock.runtime import Executor, ProcessComm, Proof, make_deferrable, prove
from penstock.runtime.batch import Batch, spans_of
from penstock.torch_internals import ignore_fsdp_view_warning

_log = logging.getLogger(__name__)
PIPELINING = "torchtitan.distributed.pipeline_parallel"
TitanLoss = Callable[..., tuple[Tensor, Any]]  # the loss, and metrics of it
Keywords = Mapping[str, Any]  # of one micro-batch


def cut_parts(
    model: nn.Module,
    schedule: Schedule,
    rank: int,
    modules: Sequence[Sequence[str]],
    parallelize: Callable[[Any], Any],
) -> dict[int, nn.Module]:
    """Cut the parts of this rank out of torchtitan's whole model, and return them by their number.

    `modules` has the names of each part's modules. `parallelize` applies what torchtitan does besides the pipeline:
    FSDP, activation checkpointing, compiling.
    """
    split_module = getattr(import_module(PIPELINING), "_split_module", None)
    if split_module is None:
        raise RunError(
            f"this torchtitan cannot cut a model into parts: {PIPELINING} has no _split_module\n"
            "  pip install 'torchtitan==0.3.0'"
        )
    parts = {}
    for number in sorted(s.part for s in schedule.stages if s.rank == rank):
        part = split_module(model, list(modules[number]))
        if schedule.is_split:
            # torchtitan wraps the forwards of layers, so ours must be in place before.
            make_deferrable(part)
        parts[number] = parallelize(part)
    return parts


class PipelineSchedule:
    """One rank's pipeline, with the calls that torchtitan's trainer and validator make.

    `parts` maps parts of the schedule to the modules of this rank. `shape` is that of a micro-batch: (rows, tokens), or
    (tokens,) if torchtitan packs all of them into one row.
    The hidden state between stages has `width` features of type `dtype`. All ranks of `group` build theirs.
    """

    def __init__(
        self,
        schedule: Schedule,
        parts: Mapping[int, Any],
        group: dist.ProcessGroup,
        loss: TitanLoss,
        shape: tuple[int, ...],
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        proves: bool = False,
    ) -> None:
        self.schedule = schedule
        self.parts = parts
        self.group = group
        self.inputs = MicrobatchInputs()
        self.loss = StepLoss(loss, self.inputs)
        self.shape = shape
        self.device = device
        self.proves = proves
        self.rank = group.rank()
        self.stages: dict[int, nn.Module] = {}
        for number, stage in enumerate(schedule.stages):
            if stage.rank == self.rank:
                self.stages[number] = parts[stage.part]
        self.separates = schedule.slices > 1 and slice_parts(parts.values())
        for part in parts.values():
            part.forward = PartForward(part, self.inputs)
            # What it returns to the executor, which then does not try it without the trainer's arguments.
            # FSDP's parameters have another type.
            vars(part).update(hidden_width=width, hidden_dtype=dtype)
        ignore_fsdp_view_warning()
        self._refuse_uneven_loss(loss)
        self._executor: Executor | None = None
        self.proof: Proof | None = None  # once the first step has begun

    def with_parts(self) -> Pipelined:
        """Return what torchtitan's trainer asks a pipelining for."""
        last = self.schedule.parts - 1
        return self, list(self.parts.values()), 0 in self.parts, last in self.parts

    # ------------------------------------------------------------ what the trainer calls
    def step(
        self,
        *,
        arg_mbs: Sequence[tuple[Tensor, ...]] | None = None,
        kwarg_mbs: Sequence[Keywords] | None = None,
        target_mbs: Sequence[Tensor] | None = None,
        losses: list[Tensor] | None = None,
        loss_kwargs: Keywords | None = None,
        return_outputs: bool = False,
        finalize_gradients: bool = True,
    ) -> None:
        """Run the forwards and backwards of all micro-batches, and add to the gradients.

        FSDP sums the gradients of every step, so that they are final whether the trainer asks for that or not.
        """
        if return_outputs:
            raise ShapeError(
                "Penstock's pipeline returns no outputs: call step with return_outputs=False"
            )
        batch = self._batch(arg_mbs, kwarg_mbs, target_mbs)
        executor = self._ready_executor()
        if self.proves:
            self.proves = False
            self._prove(executor, batch)
        with self.loss.collecting(losses, loss_kwargs or {}):
            executor.step(batch).wait()

    def eval(
        self,
        *,
        arg_mbs: Sequence[tuple[Tensor, ...]] | None = None,
        kwarg_mbs: Sequence[Keywords] | None = None,
        target_mbs: Sequence[Tensor] | None = None,
        losses: list[Tensor] | None = None,
    ) -> None:
        """Run the forwards of all micro-batches, without gradients."""
        batch = self._batch(arg_mbs, kwarg_mbs, target_mbs)
        executor = self._ready_executor()
        with self.loss.collecting(losses, {}):
            executor.evaluate(batch)

    # ------------------------------------------------------------ data
    def _batch(
        self,
        arg_mbs: Sequence[tuple[Tensor, ...]] | None,
        kwarg_mbs: Sequence[Keywords] | None,
        target_mbs: Sequence[Tensor] | None,
    ) -> Batch:
        """The micro-batches of a step. Ranks that get no tokens or labels only know their shape."""
        count = len(self.schedule.microbatches)
        keywords = list(kwarg_mbs or [{}] * count)
        for name, given in (
            ("arg_mbs", arg_mbs),
            ("kwarg_mbs", keywords),
            ("target_mbs", target_mbs),
        ):
            if given is not None and len(given) != count:
                raise ShapeError(
                    f"{name} has {len(given)} micro-batches, but the schedule has {count}"
                )
        unknown = torch.zeros((), dtype=torch.int64, device=self.device)
        unknown = unknown.expand(self.shape)
        tokens = [unknown] * count if arg_mbs is None else [one[0] for one in arg_mbs]
        labels = [unknown] * count if target_mbs is None else list(target_mbs)
        self.inputs.keywords = keywords
        # The loss divides by the labels of the step itself, so there is nothing to divide here.
        return Batch(tuple(tokens), tuple(labels), 1, self._starts(keywords))

    def _starts(self, keywords: Sequence[Keywords]) -> tuple[Tensor, ...]:
        """Where the document of each token starts, if sequences are cut and attention stays within documents."""
        if not self.separates:
            return ()
        starts = []
        for one in keywords:
            positions = one.get("positions")
            if positions is None:
                return ()
            place = torch.arange(positions.shape[1], device=positions.device)
            starts.append(place - positions)
        return tuple(starts)

    # ------------------------------------------------------------ the executor
    def _ready_executor(self) -> Executor:
        """The executor, which is made in the first step: only then the parts have their weights."""
        if self._executor is None:
            comm = ProcessComm(device=self.device, group=self.group, name="pp")
            self._executor = Executor(
                lower(self.schedule),
                self.stages,
                comm,
                self.loss,
            )
            self.inputs.executor = self._executor
        return self._executor

    def _prove(self, executor: Executor, batch: Batch) -> None:
        """Compare every stage with a plain call, on the first micro-batch."""
        with self.inputs.fixed(), self.loss.collecting(None, {}):
            proof = prove(executor, batch)
        self.proof = proof
        if self.rank == 0 and not proof.skipped:
            _log.info("%s", proof)

    def _refuse_uneven_loss(self, loss: TitanLoss) -> None:
        """Raise an error if the loss takes only slices of other lengths."""
        if self.schedule.slices == 1:
            return
        from penstock.integrations.torchtitan.attention import why_uncut_loss  # noqa: PLC0415

        lengths = set()
        for microbatch in set(self.schedule.microbatches):
            for begin, end in spans_of(microbatch, self.shape[1]):
                lengths.add(end - begin)
        reason = why_uncut_loss(loss, lengths)
        if reason:
            raise ShapeError(reason)


def slice_parts(parts: Iterable[Any]) -> bool:
    """Let the attention of all parts take slices of tokens; return whether it keeps packed documents apart."""
    # Only slices need to know what the attention of this torchtitan looks like.
    from penstock.integrations.torchtitan.attention import (  # noqa: PLC0415
        separates_documents,
        slice_attention,
    )

    parts = list(parts)
    separates = any(map(separates_documents, parts))
    for part in parts:
        slice_attention(part)
    return separates


# The schedule, the parts of this rank, and whether it has the first and the last stage.
Pipelined: TypeAlias = tuple[PipelineSchedule, list[nn.Module], bool, bool]


class MicrobatchInputs:
    """The keyword arguments of each micro-batch, and which micro-batch runs now."""

    def __init__(self) -> None:
        self.keywords: Sequence[Keywords] = ()
        self.executor: Executor | None = None
        self.is_fixed = False

    @property
    def microbatch(self) -> int:
        """The micro-batch of the action that runs now."""
        if self.is_fixed:
            return 0
        assert self.executor is not None
        step = self.executor.turns[self.executor.lane.position].step
        assert step is not None
        return step.microbatch

    @contextmanager
    def fixed(self) -> Iterator[None]:
        """Serve the first micro-batch to whoever asks: a proof runs stages without the executor."""
        self.is_fixed = True
        try:
            yield
        finally:
            self.is_fixed = False

    def of(self, part: Any, rows: int) -> dict[str, Any]:
        """The keyword arguments for the first rows of the micro-batch that runs now."""
        keywords = dict(self.keywords[self.microbatch])
        positions = keywords.get("positions")
        if positions is None or len(positions) == rows:
            return keywords
        for name, value in keywords.items():
            if isinstance(value, Tensor):
                keywords[name] = value[:rows]
        if keywords.get("attention_masks") is not None:
            masks = part.get_attention_masks(positions=keywords["positions"])
            keywords["attention_masks"] = masks
        return keywords


class PartForward:
    """The forward of a part as the executor calls it, with a slice of tokens or without."""

    def __init__(self, part: nn.Module, inputs: MicrobatchInputs) -> None:
        self.part = part
        self.inputs = inputs
        self.own_forward: Callable[..., Tensor] = part.forward

    def __call__(self, x: Tensor, piece: Slice | None = None) -> Tensor:
        """Run the part on a micro-batch, or on a slice of it."""
        keywords = self.inputs.of(self.part, len(x))
        if piece is None or not piece.partial:
            return self.own_forward(x, **keywords)
        positions = keywords.get("positions")
        if positions is None:
            positions = torch.arange(piece.tokens, device=x.device).expand(len(x), -1)
        keywords["positions"] = positions[:, piece.begin : piece.end]
        keywords["attention_masks"] = piece
        return self.own_forward(x, **keywords)


class StepLoss:
    """torchtitan's loss as the executor calls it, which keeps the loss of each micro-batch."""

    # torchtitan's losses are sums over labels. Trying that out would call FSDP's collectives on this rank alone.
    is_known_sum = True

    def __init__(self, loss: TitanLoss, inputs: MicrobatchInputs) -> None:
        self.loss = loss
        self.inputs = inputs
        self.keywords: Keywords = {}
        self.sums: dict[int, Tensor] | None = None  # by micro-batch

    @contextmanager
    def collecting(
        self, losses: list[Tensor] | None, keywords: Keywords
    ) -> Iterator[None]:
        """Call the loss with these keyword arguments, and append the loss of each micro-batch to `losses`."""
        self.keywords = keywords
        self.sums = {}
        yield
        if losses is not None:
            losses += [self.sums[number] for number in sorted(self.sums)]
        self.sums = None

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of one micro-batch, or of a slice of it."""
        loss, _ = self.loss(logits, labels, **self.keywords)
        if self.sums is not None:
            number = self.inputs.microbatch
            share = loss.detach()
            before = self.sums.get(number)
            self.sums[number] = share if before is None else before + share
        return loss
