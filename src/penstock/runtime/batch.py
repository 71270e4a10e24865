"""The data of one step: its micro-batches, what goes between stages, its units, and whether all ranks have the same.

Inputs are tokens or anything else with a row for each example, such as images. `named` holds further tensors of each
micro-batch, such as masks or positions; a stage gets those that its forward asks for by name.

For packed documents, `starts` holds for each token the position at which its document starts. Attention does not cross
documents.

    tokens   a b c d e f        starts   0 0 0 3 3 3        two documents in a row of six tokens
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from penstock.errors import RunError, ShapeError
from penstock.ir.action import BACKWARD, FORWARD, Action
from penstock.ir.lane import LaneStep, Turn
from penstock.ir.schedule import MicroBatch, Schedule, stretch
from penstock.models.slice import Carry, Slice
from penstock.runtime.comm.comm import Comm, exchange
from penstock.runtime.passed_values import Edge, TensorSpecs, Value, takes_slices
from penstock.torch_internals import local_share, original_module

IGNORED_LABEL = -100  # the label of a token that does not count, among whole numbers
NamedShapes: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """Micro-batches of any number of rows and tokens.

    Labels are shifted already. `valid` is the number of labels that count in the whole step.
    """

    inputs: tuple[Tensor, ...]
    labels: tuple[Tensor, ...]
    valid: int
    starts: tuple[Tensor, ...] = ()  # empty: a row is one document
    # Where each micro-batch is cut, in tokens, with as many slices as the schedule has; empty: as the schedule says.
    cuts: tuple[tuple[int, ...], ...] = ()
    # How many labels of each micro-batch count, if this rank does not have the labels of all; empty: it does.
    counts: tuple[int, ...] = ()
    # Further tensors of each micro-batch, by name; empty: there are none.
    named: tuple[Mapping[str, Tensor], ...] = ()

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of each micro-batch's input: rows, tokens and whatever more it has."""
        return tuple(tuple(x.shape) for x in self.inputs)

    @property
    def named_shapes(self) -> tuple[NamedShapes, ...]:
        """The names and shapes of each micro-batch's further tensors; empty if there are none."""
        return tuple(
            tuple((name, tuple(x.shape)) for name, x in sorted(named.items()))
            for named in self.named
        )

    @property
    def longest(self) -> tuple[int, ...]:
        """The length of the longest sequence in each micro-batch; in packed rows, of the longest document."""
        if not self.starts:
            return tuple(shape[1] for shape in self.shapes)
        lengths = []
        for starts in self.starts:
            place = torch.arange(starts.shape[1], device=starts.device)
            lengths.append(int((place - starts).max()) + 1)
        return tuple(lengths)


def may_ignore(labels: Tensor) -> bool:
    """Whether some labels may not count. The targets of a regression all do: only whole numbers can be ignored."""
    kind = labels.dtype
    return kind.is_signed and not kind.is_floating_point and not kind.is_complex


def counting(labels: Tensor) -> Tensor:
    """Which labels count, as a mask.

    >>> counting(torch.tensor([3, -100])).tolist(), counting(torch.tensor([3.0, -100.0])).tolist()
    ([True, False], [True, True])
    """
    if may_ignore(labels):
        return labels != IGNORED_LABEL
    return torch.ones_like(labels, dtype=torch.bool)


def batch_of(
    inputs: Sequence[Tensor],
    labels: Sequence[Tensor],
    valid: int | None = None,
    starts: Sequence[Tensor] = (),
    named: Sequence[Mapping[str, Tensor]] = (),
) -> Batch:
    """A batch of these micro-batches. Without `valid`, the labels that count are counted here."""
    _refuse_unequal("labels", inputs, labels, 1)
    if starts:
        _refuse_unequal("starts", inputs, starts, 2)
    if named:
        for name in named[0]:
            _refuse_unequal(name, inputs, [each[name] for each in named], 1)
    if valid is None:
        valid = sum(int(counting(y).sum()) for y in labels)
    return Batch(
        tuple(inputs),
        tuple(labels),
        max(valid, 1),
        tuple(starts),
        named=tuple(named),
    )


def _refuse_unequal(
    name: str, inputs: Sequence[Tensor], others: Sequence[Tensor], dimensions: int
) -> None:
    """Raise an error unless each micro-batch has one tensor of its own rows and, with 2 dimensions, tokens."""
    if len(inputs) != len(others):
        raise ShapeError(
            f"{len(inputs)} micro-batches have {len(others)} {name}: give each its own"
        )
    for number, (x, other) in enumerate(zip(inputs, others, strict=True)):
        if x.shape[:dimensions] != other.shape[:dimensions]:
            raise ShapeError(
                f"micro-batch {number} has an input of shape {tuple(x.shape)} and {name} of shape {tuple(other.shape)}"
            )


def cut_batch(
    inputs: Tensor,
    labels: Tensor,
    microbatches: int,
    starts: Tensor | None = None,
    named: Mapping[str, Tensor] | None = None,
) -> Batch:
    """Deal rows out to micro-batches; if they do not divide evenly, the first ones get one row more."""
    if microbatches > len(inputs):
        raise ShapeError(
            f"{len(inputs)} rows cannot make {microbatches} micro-batches; give at most {len(inputs)}"
        )
    for name, tensor in (named or {}).items():
        if tensor.dim() == 0 or len(tensor) != len(inputs):
            raise ShapeError(
                f"{name} has the shape {tuple(tensor.shape)}, but the batch has {len(inputs)} rows: "
                "give it one entry for each row (expand)"
            )
    cut_inputs = torch.tensor_split(inputs, microbatches)
    cut_labels = torch.tensor_split(labels, microbatches)
    cut_starts = () if starts is None else torch.tensor_split(starts, microbatches)
    cut_named: list[dict[str, Tensor]] = []
    if named:
        pieces = {name: x.tensor_split(microbatches) for name, x in named.items()}
        cut_named = [
            {name: cut[number] for name, cut in pieces.items()}
            for number in range(microbatches)
        ]
    return batch_of(cut_inputs, cut_labels, starts=cut_starts, named=cut_named)


# ---------------------------------------------------------------- by unit and value
UnitTokens: TypeAlias = tuple[int, int]  # tokens of the whole sequence, and of the unit

Specs: TypeAlias = dict[int, TensorSpecs]  # by value


@dataclass(frozen=True, slots=True)
class BatchEdges:
    """The edges of a batch: by micro-batch and position on its path, and what each value of a lane consists of."""

    edges: Sequence[tuple[Edge, ...]]
    specs: Specs
    incoming: Mapping[int, Edge]  # by forward
    outgoing: Mapping[int, Edge]  # by forward
    unit_bytes: tuple[int, ...]  # of the largest message of each unit, between ranks


NO_EDGES = BatchEdges((), {}, {}, {}, ())


def edges_of_lane(
    schedule: Schedule,
    turns: Iterable[Turn],
    edges: Sequence[tuple[Edge, ...]],
    tokens: Sequence[UnitTokens] | None,
) -> BatchEdges:
    """The tensors of every value that a lane makes, needs or receives.

    `tokens` has an entry for each unit, if any micro-batch is cut.
    """
    specs: Specs = {}
    incoming: dict[int, Edge] = {}
    outgoing: dict[int, Edge] = {}

    def edge_at(action: Action, unit: int, shift: int) -> Edge | None:
        path = schedule.microbatches[action.microbatch].path
        position = path.index(action.stage) + shift
        if not 0 <= position < len(path) - 1:
            return None
        edge = edges[action.microbatch][position]
        return edge if tokens is None else edge.sliced(path[position], *tokens[unit])

    for turn in turns:
        for step in (turn.step, *turn.messages):
            if step is None:
                continue
            action = step.instruction.action
            if action.op.kind not in (FORWARD, BACKWARD):  # others stay on their stage
                continue
            before = edge_at(action, step.unit, -1)
            after = edge_at(action, step.unit, 0)
            if action.op.kind == FORWARD:
                if after is not None:
                    specs[step.value] = after.tensors
                    outgoing[step.value] = after
                if step.source >= 0 and before is not None:
                    specs[step.source] = before.tensors
                    incoming[step.value] = before
            else:
                if before is not None:
                    specs[step.value] = before.gradients
                if step.source >= 0 and after is not None:
                    specs[step.source] = after.gradients
    unit_bytes = _unit_bytes(schedule, edges, tokens)
    return BatchEdges(edges, specs, incoming, outgoing, unit_bytes)


def _unit_bytes(
    schedule: Schedule,
    edges: Sequence[tuple[Edge, ...]],
    tokens: Sequence[UnitTokens] | None,
) -> tuple[int, ...]:
    """The bytes of the largest message of each unit."""
    largest: list[int] = []
    for number, microbatch in enumerate(schedule.microbatches):
        whole = max((edge.sent_bytes for edge in edges[number]), default=0)
        for _ in range(microbatch.slices):
            total, piece = (1, 1) if tokens is None else tokens[len(largest)]
            largest.append(whole * piece // max(total, 1))
    return tuple(largest)


# ---------------------------------------------------------------- units
# Cuts the micro-batches of a batch into slices of tokens, as the schedule says, and holds what slices carry on.
#
# schedule   tokens 8, cuts 0 4 6 8              as planned
# batch      tokens 8: 0:4 4:6 6:8               the same
#            tokens 1024: 0:512 512:768 768:1024 another length in the same proportions
#
# A batch may bring cuts of its own, with as many slices as the schedule has, because documents differ from step to
# step. A unit is one slice of a micro-batch, or all of it if it is not cut. Units are numbered one micro-batch after
# the other.


TokenSpan = tuple[int, int]  # the first token, and the one after the last


@dataclass(slots=True)
class StepData:
    """What one rank holds during a step: the batch, by unit, and what its actions make.

    Values are hidden states and gradients between stages. Each has the number of the action that makes it.
    """

    batch: Batch
    inputs: tuple[Tensor, ...]  # by unit
    labels: tuple[Tensor, ...]  # by unit
    carries: Carries | None  # None: every unit is one document in one piece
    # The tokens of each unit's sequence, and of the unit itself; None if no micro-batch is cut.
    tokens: list[UnitTokens] | None = None
    edges: BatchEdges = NO_EDGES  # what goes between stages, once it is known
    training: bool = True
    # What the last stages of the paths return, by unit and without its graph; None: it is not kept.
    outputs: dict[int, object] | None = None
    held: dict[int, Value] = field(default_factory=dict)
    losses: list[Tensor] = field(default_factory=list)
    added: list[Tensor] = field(default_factory=list)  # by layers, in this forward

    def named(self, step: LaneStep) -> Mapping[str, Tensor]:
        """The named tensors of an action's micro-batch; of the whole sequence, if that is cut."""
        return self.batch.named[step.microbatch] if self.batch.named else {}

    def share(self, unit: int) -> float:
        """The share of a unit in all labels of the step, whether they count or not."""
        total = sum(labels.shape[:2].numel() for labels in self.batch.labels)
        labels = self.labels[unit] if self.labels else None
        return 0.0 if labels is None else labels.shape[:2].numel() / total

    @property
    def sliced(self) -> bool:
        """Whether any micro-batch is cut."""
        return len(self.inputs) > len(self.batch.inputs)

    def publish(self, step: LaneStep, y: Value) -> None:
        """Keep the output of a forward for the next stage, or as a share of the loss."""
        if step.last:
            self.losses.append(y[0].detach())
        else:
            self.held[step.value] = y

    def total_loss(self) -> Tensor:
        """The sum of the losses that were computed on this rank."""
        device = self.losses[0].device if self.losses else None
        total = torch.zeros((), dtype=torch.float64, device=device)
        for loss in self.losses:
            total += loss
        return total


def cut_units(schedule: Schedule, batch: Batch) -> StepData:
    """Cut a batch as the schedule says."""
    due = len(schedule.microbatches)
    if len(batch.inputs) != due:
        raise ShapeError(
            f"the batch has {len(batch.inputs)} micro-batches, but the schedule has {due}\n"
            f"  cut it into {due}: cut_batch(inputs, labels, {due})"
        )
    if schedule.slices == 1 and not batch.starts:
        return StepData(batch, batch.inputs, batch.labels, None)
    spans = []
    inputs = []
    labels = []
    unit_tokens = []
    for number, microbatch in enumerate(schedule.microbatches):
        _refuse_other_labels(batch, number)
        tokens = batch.inputs[number].shape[1]
        for begin, end in _spans_in(batch, number, microbatch, tokens):
            spans.append((begin, end))
            inputs.append(batch.inputs[number][:, begin:end])
            labels.append(batch.labels[number][:, begin:end])
            unit_tokens.append((tokens, end - begin))
    cut_tokens = unit_tokens if schedule.slices > 1 else None
    carries = Carries(batch, spans)
    return StepData(batch, tuple(inputs), tuple(labels), carries, cut_tokens)


def _refuse_other_labels(batch: Batch, number: int) -> None:
    """Raise an error unless a micro-batch that is cut has a label for each token."""
    x = tuple(batch.inputs[number].shape)
    y = tuple(batch.labels[number].shape)
    if len(x) < 2 or x[:2] != y[:2]:
        raise ShapeError(
            f"micro-batch {number} has an input of shape {x} and labels of shape {y}, but token slices need a label "
            "for each token: (rows, tokens)\n  make the schedule with slices=1"
        )


def _spans_in(
    batch: Batch, number: int, microbatch: MicroBatch, tokens: int
) -> list[TokenSpan]:
    """The token spans of a micro-batch's slices: the batch's own ones, or those of the schedule."""
    if not batch.cuts:
        return spans_of(microbatch, tokens)
    cuts = batch.cuts[number]
    spans = list(pairwise(cuts))
    is_whole = cuts[:1] == (0,) and cuts[-1:] == (tokens,)
    if not is_whole or any(begin >= end for begin, end in spans):
        raise ShapeError(
            f"the batch cuts micro-batch {number} at {list(cuts)}, but it has {tokens} tokens\n"
            f"  give ascending cuts from 0 to {tokens}"
        )
    if len(spans) != microbatch.slices:
        raise ShapeError(
            f"the batch cuts micro-batch {number} into {len(spans)} slices, "
            f"but the schedule has {microbatch.slices}"
        )
    return spans


def spans_of(microbatch: MicroBatch, tokens: int) -> list[TokenSpan]:
    """The token spans of a micro-batch's slices, for a sequence of this many tokens.

    >>> spans_of(MicroBatch((0,), tokens=8, cuts=(0, 4, 6, 8)), 1024)
    [(0, 512), (512, 768), (768, 1024)]
    """
    return list(pairwise(stretch(microbatch, tokens).cuts))


def refuse_whole(schedule: Schedule, modules: Mapping[int, nn.Module]) -> None:
    """Raise an error if the schedule is sliced and a module cannot run slice by slice."""
    if schedule.slices == 1:
        return
    for stage, module in modules.items():
        reason = _why_unsliceable(original_module(module))
        if reason:
            raise ShapeError(
                f"stage {stage} cannot be sliced: {reason}\n  or make the schedule with slices=1"
            )


def _why_unsliceable(module: nn.Module) -> str:
    """Why a module cannot run slice by slice; empty if it can."""
    reason = str(getattr(module, "unsliceable", ""))
    if reason or takes_slices(module):
        return reason
    name = type(module).__name__
    return f"the forward of {name} has no parameter `piece` (penstock.models.slice)"


@dataclass(eq=False, slots=True)
class Carries:
    """What the stages of a rank carry from slice to slice in one step, by stage and micro-batch."""

    batch: Batch
    spans: Sequence[TokenSpan]  # by unit
    held: dict[tuple[int, int], Carry] = field(default_factory=dict, init=False)

    def open(self, step: LaneStep) -> Slice:
        """The slice that a forward runs on."""
        visit = step.stage, step.microbatch
        begin, end = self.spans[step.unit]
        if begin == 0:
            starts = self.batch.starts
            tokens = self.batch.inputs[step.microbatch].shape[1]
            self.held[visit] = Carry(
                tokens, starts[step.microbatch] if starts else None
            )
        if visit not in self.held:
            raise RunError(
                f"{step.instruction} comes before the first slice of its micro-batch"
            )
        return self.held[visit].open(begin, end)

    def drop(self, step: LaneStep) -> None:
        """Forget a micro-batch that is finished on a stage.

        In training its first slice has come back; in evaluation its last slice has gone forward.
        """
        del self.held[step.stage, step.microbatch]

    def check_empty(self) -> None:
        """Raise an error if anything is left: then a backward is missing, and so is a gradient."""
        for (stage, microbatch), carry in self.held.items():
            raise RunError(
                f"the step left state behind: on stage {stage}, micro-batch {microbatch} went forward to token "
                f"{carry.reached} of {carry.tokens}, but came back only to token {carry.left}"
            )


# ---------------------------------------------------------------- outputs
def detached(output: object) -> object:
    """What a stage returned, without its graph."""
    if isinstance(output, Tensor):
        return output.detach()
    if isinstance(output, Mapping):
        return {name: detached(value) for name, value in output.items()}
    if isinstance(output, tuple | list):
        return tuple(detached(value) for value in output)
    return output


def joined(pieces: Sequence[Any], dim: int = 1) -> Any:
    """The outputs of the slices of a micro-batch as one, joined along the tokens; None if they are not here.

    Those of several micro-batches are joined along their rows: `dim` is 0.
    """
    first = pieces[0]
    if len(pieces) == 1 or first is None:
        return first
    if isinstance(first, Mapping):
        return {name: joined([piece[name] for piece in pieces], dim) for name in first}
    if isinstance(first, tuple):
        return tuple(joined(parts, dim) for parts in zip(*pieces, strict=True))
    return torch.cat(list(pieces), dim)


# ---------------------------------------------------------------- batch agreement
# Compares the batches that the ranks of a pipeline were given, because each rank reads only a share of its own.
#
#     rank 0   x, y  ──►  the first layer reads x      Other rows on rank 1 would train on the inputs of one batch
#     rank 1   x, y  ──►  the loss reads y             and the labels of another. Other shapes would never arrive.
#
# A comparison costs one message around and, on a GPU, a wait. So the ranks compare in the first step and in every k-th.
# A tensor without numbers of its own (one number, expanded to a shape) says that a rank was given none; it is left out.

WAY_OUT = (
    "give all ranks of a pipeline the same batch: shuffle with the same seed on each of them, and do not deal rows out "
    "to them (DistributedSampler)"
)


def refuse_other_batches(
    comm: Comm, schedule: Schedule, batch: Batch, every: int = 0
) -> None:
    """Raise an error on all ranks if they were given different batches. All ranks call it at the same time.

    `every` is the number of steps between two comparisons.
    """
    if comm.ranks == 1:
        return
    own = {
        "every": every,
        "said": _said(batch),
        "sums": _sums(schedule, comm.rank, batch),
    }
    told = exchange(comm, own)
    _refuse_other_intervals([facts["every"] for facts in told])
    for kind in ("said", "sums"):
        for name in dict.fromkeys(name for facts in told for name in facts[kind]):
            found = {n: of[kind][name] for n, of in enumerate(told) if name in of[kind]}
            odd, usual = _odd_one(found)
            if odd != usual:
                what = f"other numbers in {name}"
                if kind == "said":
                    what = f"{name}: {found[odd]} instead of {found[usual]}"
                raise ShapeError(
                    f"rank {odd} was given another batch than rank {usual}: {what}\n  {WAY_OUT}\n"
                    "  a rank that reads no data may pass tensors without numbers (device='meta') of the same shapes"
                )


def _said(batch: Batch) -> dict[str, str | int]:
    """What the ranks must know alike of a batch, even those that have none of its numbers."""
    names = sorted({name for named in batch.named for name in named})
    said: dict[str, str | int] = {"the shapes of the inputs": _shapes(batch.inputs)}
    said["the names of further tensors"] = ", ".join(names) or "none"
    for name in names:
        tensors = [named[name] for named in batch.named if name in named]
        said[f"the shapes of {name}"] = _shapes(tensors)
    if batch.labels:
        said["the shapes of the labels"] = _shapes(batch.labels)
    if any(not is_blank(labels) for labels in batch.labels):
        said["the number of labels that count"] = batch.valid
    return said


def _sums(schedule: Schedule, rank: int, batch: Batch) -> dict[str, int]:
    """The checksums of what a rank was given for the micro-batches that visit it."""
    sums: dict[str, int] = {}
    if batch.cuts:
        sums["the cuts"] = zlib.crc32(repr(batch.cuts).encode())
    known = zip(schedule.microbatches, batch.inputs, strict=False)
    for number, (microbatch, inputs) in enumerate(known):
        if all(schedule.stages[stage].rank != rank for stage in microbatch.path):
            continue
        given = {"the inputs": inputs}
        if batch.labels:
            given["the labels"] = batch.labels[number]
        if batch.starts:
            given["the starts"] = batch.starts[number]
        if batch.named:
            given |= batch.named[number]
        ends = [microbatch.path[0], microbatch.path[-1]]
        reads = [schedule.stages[stage].rank == rank for stage in ends]
        needed = dict(zip(("the inputs", "the labels"), reads, strict=True))
        for name, tensor in given.items():
            if needed.get(name) or not is_blank(tensor):
                sums[f"{name} of micro-batch {number}"] = checksum([tensor])
    return sums


def is_blank(tensor: Tensor) -> bool:
    """Whether a tensor has a shape but no numbers of its own: one number, expanded."""
    return tensor.dim() > 0 and not any(tensor.stride())


def _shapes(tensors: Sequence[Tensor]) -> str:
    """The shapes of some tensors, such as `2 x (3, 8), 1 x (2, 8)`."""
    runs = groupby(tuple(tensor.shape) for tensor in tensors)
    return ", ".join(f"{len(list(run))} x {shape}" for shape, run in runs)


def _odd_one(found: Mapping[int, object]) -> tuple[int, int]:
    """A rank with another value than most, and one that has what most have; twice the same rank if all agree."""
    most = Counter(found.values()).most_common(1)[0][0]
    usual = next(rank for rank, value in found.items() if value == most)
    odd = next((rank for rank, value in found.items() if value != most), usual)
    return odd, usual


def _refuse_other_intervals(intervals: Sequence[int]) -> None:
    odd, usual = _odd_one(dict(enumerate(intervals)))
    if odd != usual:
        raise ShapeError(
            f"rank {odd} compares batches every {intervals[odd]} steps, but rank {usual} every {intervals[usual]}\n"
            "  give all ranks the same number (compare)"
        )


# ---------------------------------------------------------------- checksum
# A number that tells tensors apart: the same for equal numbers in the same places, on any machine.

_MASK = (1 << 62) - 1

_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, with bits all over; as a signed number

_CHUNK = 1 << 20  # numbers at a time, so that a checksum needs little memory


def checksum(tensors: Sequence[Tensor]) -> int:
    """The checksum of some tensors, in this order. The order of additions does not matter, as they are exact."""
    sums = [_sum_of_places(_bits(local_share(tensor).detach())) for tensor in tensors]
    total = 0
    if sums:
        # Only one wait for a GPU.
        device = sums[0].device
        for number in torch.stack([one.to(device) for one in sums]).tolist():
            total = total * _FACTOR + number
    return total & _MASK


def _sum_of_places(bits: Tensor) -> Tensor:
    """The sum of whole numbers, each times a factor of its own; it wraps around."""
    places = torch.arange(min(len(bits), _CHUNK), device=bits.device) + 1
    factors = places * _FACTOR
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for piece in torch.split(bits, _CHUNK):
        total = total * _FACTOR + (piece * factors[: len(piece)]).sum()
    return total


def _bits(x: Tensor) -> Tensor:
    """The bits of a tensor as whole numbers."""
    whole = {1: torch.int8, 2: torch.int16}.get(x.element_size(), torch.int32)
    return x.contiguous().reshape(-1).view(whole)
