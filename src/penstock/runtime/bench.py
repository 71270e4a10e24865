"""Runs one stage without its pipeline, plainly or as the plan will run it, and leaves no trace.

    plain      y = module(x)   one call on the whole sequence, one ordinary backward, without torch.compile
    planned    a real `Executor` on a program of one rank, cut out of the plan's lane:

               feed ──x──► stage ──y──► sink          feed   supplies x, and catches its gradient dx
                    ◄─dx──       ◄─dy──               sink   catches y, and sends dy back; the last stage has its loss

Any of the plan's options can be switched off in the planned way. That is how `penstock.runtime.proof` finds the
option that causes a difference. Gradients, buffers, plain attributes of modules and torch's random number generators
are restored afterwards.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import RunError
from penstock.ir.action import BACKWARD, FORWARD, Action, Op
from penstock.ir.program import lower
from penstock.ir.schedule import MicroBatch, Schedule, Stage, schedule_of, stretch
from penstock.models.slice import Carry, Slice
from penstock.runtime.actions import call_stage, needs_gradients
from penstock.runtime.batch import Batch, counting
from penstock.runtime.comm.thread import Hub, ThreadComm
from penstock.runtime.executor import Executor, RunOptions
from penstock.runtime.loss import (
    Reduction,
    as_sum,
    collected_losses,
    plain_loss,
    take_sum,
)
from penstock.runtime.module_state import (
    ModuleMemory,
    has_compiled_layer,
    noisy,
    same,
    states,
    uncompiled,
    without_dropout,
)
from penstock.runtime.passed_values import (
    PIECE,
    Edge,
    Passed,
    TensorSpecs,
    Value,
    backward_roots,
    forward_parameters,
    has_gradient,
    leaves,
    named_arguments,
    take_gradients,
)
from penstock.torch_internals import (
    changes,
    local_share,
    original_module,
    original_name,
)


class Option(StrEnum):
    """What a plan can do with a stage that a plain call does not."""

    SLICES = "slices"
    SPLIT = "split"
    RECOMPUTE = "recompute"
    AUTOCAST = "autocast"
    RECORDED = "recorded"
    COMPILED = "compiled"
    INTERLEAVED = "interleaved"  # the stage holds several micro-batches at a time


Options = frozenset[Option]

# With these options a stage draws other random numbers than in a plain call.
REDRAWS = frozenset({Option.SLICES, Option.COMPILED, Option.RECORDED})


# ---------------------------------------------------------------- stage order
# The order in which a lane treats one stage, cut out of the plan for a micro-batch or two.
#
# lane of the rank      0F0 2F0 0F1 2F1 2B0 0B0 2F2 2B1 ...
# stage 2 alone             2F0     2F1 2B0     2F2 2B1
# micro-batches 0, 1        2F0     2F1 2B0         2B1      1 is the companion: held at the same time as 0


@dataclass(frozen=True, slots=True)
class StageOrder:
    """A micro-batch and its companion, if it has one, and the actions on them in order.

    Actions have stage 0, and micro-batches their number here.
    """

    microbatches: tuple[MicroBatch, ...]
    actions: tuple[Action, ...]

    @property
    def is_split(self) -> bool:
        """Whether weight gradients have operations of their own."""
        return any(action.op is Op.W for action in self.actions)

    def under(self, planned: Options, options: Options) -> list[Action]:
        """Return the actions with these of the planned options.

        That is the lane's own order, or the plainest one if an option that shaped it is off.
        """
        shaping = {Option.SLICES, Option.INTERLEAVED} & planned
        keeps_shape = shaping <= options
        order = list(self.actions) if keeps_shape else self.plainest(options)
        return order if Option.SPLIT in options else join_backwards(order)

    def plainest(self, options: Options) -> list[Action]:
        """Return all forwards of a micro-batch, then all its backwards, last slice first.

        With interleaving, the forwards of both micro-batches come first.
        """
        numbers = range(len(self.microbatches))
        together = [numbers]
        if Option.INTERLEAVED not in options:
            together = [range(number, number + 1) for number in numbers]
        ops = (Op.I, Op.W) if self.is_split else (Op.B,)
        order: list[Action] = []
        for group in together:
            for number in group:
                pieces = self._slices(number, options)
                order += [Action(Op.F, 0, number, piece) for piece in pieces]
            for number in group:
                for piece in reversed(self._slices(number, options)):
                    order += [Action(op, 0, number, piece) for op in ops]
        return order

    def _slices(self, number: int, options: Options) -> range:
        """The slices of a micro-batch under these options."""
        planned = self.microbatches[number].slices
        return range(planned if Option.SLICES in options else 1)


def join_backwards(order: Sequence[Action]) -> list[Action]:
    """Return the order with a whole backward, B, in the place of each I, and without W."""
    joined: list[Action] = []
    for action in order:
        if action.op is Op.I:
            joined.append(action._replace(op=Op.B))
        elif action.op is not Op.W:
            joined.append(action)
    return joined


def stage_order(
    executor: Executor, stage: int, microbatch: int, batch: Batch
) -> StageOrder:
    """Return what a rank's lane does with a stage, for a micro-batch and its companion."""
    schedule = executor.program.schedule
    full_lane = schedule.lanes[executor.comm.rank]
    lane = [action for action in full_lane if action.stage == stage]
    chosen = {microbatch}
    companion = _companion(schedule, lane, microbatch, batch)
    if companion is not None:
        chosen.add(companion)
    actions = [action for action in lane if action.microbatch in chosen]
    # The micro-batch that goes forward first comes first.
    numbers = list(dict.fromkeys(action.microbatch for action in actions))
    microbatches = tuple(schedule.microbatches[number] for number in numbers)
    own = [a._replace(stage=0, microbatch=numbers.index(a.microbatch)) for a in actions]
    return StageOrder(microbatches, tuple(own))


def _companion(
    schedule: Schedule, lane: Sequence[Action], microbatch: int, batch: Batch
) -> int | None:
    """A micro-batch of the same kind that the stage holds at the same time."""
    positions: dict[int, list[int]] = {}  # in the lane, by micro-batch
    for position, action in enumerate(lane):
        positions.setdefault(action.microbatch, []).append(position)
    mine = positions[microbatch]
    my_kind = _kind(schedule, lane, mine, batch)
    for other, theirs in positions.items():
        if other == microbatch:
            continue
        overlap = theirs[0] < mine[-1] and mine[0] < theirs[-1]
        if overlap and _kind(schedule, lane, theirs, batch) == my_kind:
            return other
    return None


def _kind(
    schedule: Schedule, lane: Sequence[Action], positions: Sequence[int], batch: Batch
) -> Hashable:
    """What two micro-batches must have in common to be run together, for one with these positions in the lane."""
    actions = [lane[position] for position in positions]
    stage = actions[0].stage
    number = actions[0].microbatch
    path = schedule.microbatches[number].path
    ops = sorted((action.op, action.slice) for action in actions)
    shape = batch.shapes[number][1:]  # of its input, without the rows
    return tuple(ops), shape, path[0] == stage, path[-1] == stage


# ---------------------------------------------------------------- ends
# The ends of a stage that runs alone: a feed supplies its input, and a sink catches its output.
#
# feed ──x──► stage ──y──► sink
#      ◄─dx──       ◄─dy──


class End(nn.Module):
    """A feed or a sink, with the tensors it has caught by their number and the first token of the slice."""

    def __init__(self, edge: Edge | None) -> None:
        super().__init__()
        self.edge = edge
        self.caught: dict[int, dict[int, Tensor]] = {}

    def catch(self, piece: Slice | None, number: int, tensor: Tensor) -> None:
        """Keep a tensor; the last one counts, since a recorded stage runs more than once."""
        begin = 0 if piece is None else piece.begin
        self.caught.setdefault(number, {})[begin] = tensor.detach()

    def joined(self) -> Value:
        """The tensors of all slices, joined into one."""
        tensors = []
        for _, pieces in sorted(self.caught.items()):
            parts = [pieces[begin] for begin in sorted(pieces)]
            tensors.append(parts[0] if len(parts) == 1 else torch.cat(parts, dim=1))
        return tuple(tensors)


def _cut(x: Tensor, piece: Slice | None) -> Tensor:
    """The tokens of a slice."""
    return x if piece is None else x[:, piece.begin : piece.end]


class Feed(End):
    """Supplies the stage's input, and catches its gradient. It has the input itself, and not from the batch."""

    def __init__(self, value: Value, edge: Edge | None) -> None:
        super().__init__(edge)
        self.value = value

    def forward(self, x: Tensor, piece: Slice | None = None) -> Any:
        """Return the input as it is."""
        assert self.edge is not None
        tensors = []
        number = 0  # of those that have gradients
        for tensor in self.value:
            given = _cut(tensor, piece).detach().clone()
            if has_gradient(given.dtype):
                given.requires_grad_()
                given.register_hook(partial(self.catch, piece, number))  # type: ignore[no-untyped-call]
                number += 1
            tensors.append(given)
        return Passed(*self.edge.arguments(tuple(tensors)))


class OutputSink(End):
    """Catches the stage's output, and makes of it the loss whose gradients are the given ones."""

    def __init__(self, gradients: Value, edge: Edge | None) -> None:
        super().__init__(edge)
        self.gradients = gradients

    @property
    def asked_names(self) -> tuple[str, ...]:
        """The names of all tensors."""
        return self.edge.names if self.edge is not None else ()

    def forward(
        self, *values: Any, piece: Slice | None = None, **named: Tensor
    ) -> Tensor:
        """Return a number whose gradients are the given ones."""
        tensors: list[Tensor] = [*values, *(named[name] for name in self.asked_names)]
        for number, x in enumerate(tensors):
            self.catch(piece, number, x)
        total = torch.zeros((), dtype=torch.float64, device=tensors[0].device)
        differentiable = [x for x in tensors if has_gradient(x.dtype)]
        for x, gradient in zip(differentiable, self.gradients, strict=True):
            given = _cut(gradient, piece)
            product = x.to(given.dtype) * given.conj()
            total = total + (product.real if product.is_complex() else product).sum()
        return total


# ---------------------------------------------------------------- a stage on its own

# For all random numbers: those that a stage draws, and the gradients of inner stages.
PROOF_SEED = 20_817

OUTPUT = "the output"

LOSS = "the loss"

INPUT_GRADIENT = "the gradient of the input"

# The output or the loss, the gradients of the parameters and of the input, and what was added to buffers, by name.
Results = dict[str, Tensor | None]

# Ranks that are threads share torch's random number generators, and perhaps the module: one looks at it or runs it at a
# time, and leaves it as it was.
ONE_AT_A_TIME = threading.Lock()


@dataclass(frozen=True, slots=True)
class Sample:
    """What a stage gets for one micro-batch."""

    x: Value
    target: Value  # the labels on the last stage, else the gradients of y
    tokens: Tensor  # the input of the micro-batch
    starts: Tensor | None = None
    named: Mapping[str, Tensor] = field(default_factory=dict)  # the batch's

    def rolled(self) -> Sample:
        """Another sample of the same kind, with every token moved by one."""
        return replace(self, x=_rolled(self.x), target=_rolled(self.target))


def sample_of(batch: Batch, number: int, x: Value, target: Value = ()) -> Sample:
    """What a stage gets for a micro-batch of a batch."""
    named = batch.named[number] if batch.named else {}
    starts = batch.starts[number] if batch.starts else None
    return Sample(x, target, batch.inputs[number], starts, named)


def _rolled(value: Value) -> Value:
    return tuple(x.roll(1, min(1, x.dim() - 1)) if x.dim() else x for x in value)


class Bench:
    """One stage of an executor, which can be run here in any way."""

    def __init__(
        self, executor: Executor, stage: int, microbatch: int, batch: Batch
    ) -> None:
        self.executor = executor
        self.stage = stage
        self.instruction = Action(Op.F, stage, microbatch)
        self.module = executor.modules[stage]
        with ONE_AT_A_TIME:
            self.memory = ModuleMemory(self.module)
        self.order = stage_order(executor, stage, microbatch, batch)
        self.microbatches = self.order.microbatches
        path = self.microbatches[0].path
        self.first = path[0] == stage
        self.last = path[-1] == stage
        # What goes into the stage and out of it. All ranks have found it before.
        edges = executor.edges(batch)[microbatch]
        position = executor.program.schedule.microbatches[microbatch].path.index(stage)
        self.incoming = None if self.first else edges[position - 1]
        self.outgoing = None if self.last else edges[position]
        self.options = self._options()
        self.samples: list[Sample] = []
        self.device = batch.inputs[microbatch].device
        for parameter in self.module.parameters():
            self.device = parameter.device
            break
        self.weights = dict(self.module.named_parameters())
        self.versions = {name: changes(p) for name, p in self.weights.items()}
        # How much rounding can change the buffers that a run has changed.
        self.buffer_rounding: dict[str, float] = {}
        self.drew_random = False  # whether the last run drew random numbers
        # Whether the last split backward left nothing to its W.
        self.splits_in_vain = False

    @property
    def title(self) -> str:
        """The stage in words."""
        name = type(original_module(self.module)).__name__
        return f"stage {self.stage} ({name}) on rank {self.executor.comm.rank}"

    @property
    def changed_weights(self) -> list[str]:
        """The names of weights that were changed in place since the bench was made."""
        now = self.weights.items()
        return [name for name, p in now if changes(p) != self.versions[name]]

    def _options(self) -> Options:
        """The options of the plan that apply to this stage."""
        executor = self.executor
        applies = {
            Option.SLICES: self.microbatches[0].slices > 1,
            Option.SPLIT: self.order.is_split,
            Option.RECOMPUTE: self.stage in executor.stages.recompute,
            Option.AUTOCAST: executor.stages.autocast is not None,
            Option.RECORDED: executor.tape is not None,
            Option.COMPILED: has_compiled_layer(self.module),
            Option.INTERLEAVED: len(self.microbatches) > 1,
        }
        return frozenset(option for option, on in applies.items() if on)

    def receive(self, source: int, edge: Edge, device: torch.device) -> Value:
        """What the stage before has sent from another rank."""
        comm = self.executor.comm
        arriving = [comm.receive(s.shape, s.dtype, source) for s in edge.tensors]
        return tuple(one.wait().to(device) for one in arriving)

    def send(self, x: Value, target: int, edge: Edge) -> None:
        """Send what the stage has made to another rank."""
        for tensor, spec in zip(x, edge.tensors, strict=True):
            self.executor.comm.send(tensor.to(spec.dtype), target).wait()

    def forward(self, x: Value, batch: Batch, number: int, edge: Edge) -> Value:
        """Run a plain forward of any micro-batch that leaves nothing behind."""
        sample = sample_of(batch, number, x)
        with ONE_AT_A_TIME:
            try:
                with (
                    uncompiled(self.module) as plain,
                    self.autocast(enabled=True),
                ):
                    return self.call_without_graph(plain, sample, edge)
            finally:
                self.executor.gradients.shards.finish()
                self.memory.restore()

    def call_without_graph(
        self, module: nn.Module, sample: Sample, edge: Edge
    ) -> Value:
        """Call a module, without gradients if it can run so. A forward that hooks a tensor cannot."""
        try:
            with torch.no_grad():
                return self.call(module, sample.x, sample, edge)  # type: ignore[no-any-return]
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, RunError) as error:
            if not needs_gradients(error):
                raise
        self.memory.restore()
        with torch.enable_grad():
            y: Value = self.call(module, self._plain_input(sample), sample, edge)
        return tuple(x.detach() for x in y)

    def set_input(self, x: Value, batch: Batch, number: int) -> None:
        """Set what the stage gets.

        Inner stages get random gradients: real ones, through a head that starts at zero,
        would not reach all weights.
        """
        target: Value = (batch.labels[number],)
        if self.outgoing is not None:
            generator = torch.Generator().manual_seed(PROOF_SEED + self.stage)
            gradients = []
            for shape, dtype, _ in self.outgoing.gradients:
                gradient = torch.randn(shape, generator=generator, dtype=dtype)
                gradients.append(gradient.to(x[0].device))
            target = tuple(gradients)
        sample = sample_of(batch, number, x, target)
        self.samples = [sample]
        if len(self.microbatches) > 1:
            self.samples.append(sample.rolled())

    @property
    def label_count(self) -> int:
        """The number of labels that count; one except on the last stage."""
        if not self.last:
            return 1
        counts = [int(counting(sample.target[0]).sum()) for sample in self.samples]
        return max(sum(counts), 1)

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that are trained, by the name they have without torch.compile."""
        named = self.module.named_parameters()
        return [(original_name(name), p) for name, p in named if p.requires_grad]

    # ------------------------------------------------------------ the plain way
    def run_plain(
        self,
        autocast: bool = False,
        quiet: bool = False,
        seed: int = PROOF_SEED,
        noise: float = 0.0,
        noise_seed: int = 0,
    ) -> Results:
        """Call the module and run an ordinary backward, one micro-batch after the other.

        `quiet` switches dropout off. `noise` changes the output of every layer by that share
        of itself; the resulting differences are those that rounding can make.
        """
        with (
            self._traceless(quiet, seed),
            uncompiled(self.module) as plain,
            noisy(plain, noise, noise_seed),
        ):
            outputs: list[Value] = []
            losses: list[Tensor] = []
            input_gradients: list[Value] = []
            for sample in self.samples:
                x = self._plain_input(sample)
                with self.autocast(autocast), collected_losses() as added:
                    y = self.call(plain, x, sample, self.outgoing)
                    if self.last:
                        loss = self._loss(y, sample.target[0])
                    share = take_sum(added) / len(self.samples) if added else None
                if self.last:
                    _backward([loss], [torch.ones_like(loss)], share)
                    losses.append(loss.detach().double())
                    del loss
                else:
                    _backward(*backward_roots(y, sample.target), share)
                    outputs.append(tuple(one.detach() for one in y))
                if share is not None and self.last:
                    losses.append(share.detach().double())
                del share
                input_gradients.append(take_gradients(x))
                del y
            total = torch.stack(losses).sum() if losses else torch.zeros(())
            return self._results(total, outputs, input_gradients)

    def _plain_input(self, sample: Sample) -> Value:
        """A copy of the input of a plain call, which gathers gradients unless it is the first stage's."""
        copies = tuple(x.detach().clone() for x in sample.x)
        return leaves(copies, trains=not self.first)

    def call(
        self,
        module: nn.Module,
        x: Value,
        sample: Sample,
        outgoing: Edge | None,
    ) -> Any:
        """Call a module on a whole sequence, and return what it passes on.

        Packed documents need a slice, which then covers the whole sequence.
        """
        doing = str(self.instruction)
        sliced: dict[str, Any] = {}
        if sample.starts is not None:
            tokens = sample.tokens.shape[1]
            sliced[PIECE] = Carry(tokens, sample.starts).open(0, tokens)
        values = x
        travelling: dict[str, Tensor] = {}
        if self.incoming is not None:
            values, travelling = self.incoming.arguments(x)
        parameters = forward_parameters(module)
        named = named_arguments(parameters, len(values), travelling, sample.named)
        y = call_stage(module, values, {**named, **sliced}, self.stage, doing)
        return y if outgoing is None else outgoing.value_of(y, travelling)

    def autocast(self, enabled: bool) -> AbstractContextManager[object]:
        """A context with the executor's autocast type, if it has one and it is enabled."""
        dtype = self.executor.stages.autocast
        if not enabled or dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype)

    # ------------------------------------------------------------ the planned way
    def run_planned(self, options: Options, quiet: bool = False) -> Results:
        """Run the stage through an executor, with these of the plan's options."""
        with ExitStack() as stack:
            stack.enter_context(self._traceless(quiet, PROOF_SEED))
            module = self.module
            if Option.COMPILED not in options:
                module = stack.enter_context(uncompiled(module))
            schedule, modules = self._solo_schedule(module, options)
            solo = self._solo_executor(schedule, modules, options)
            batch = self._batch()
            result = solo.step(batch)
            if solo.tape is not None:
                # Recording drew random numbers and ran the stage on zeros: start over.
                for _, parameter in self._trained():
                    parameter.grad = None
                self.memory.restore()
                torch.manual_seed(PROOF_SEED)
                with without_dropout(self.module) if quiet else nullcontext():
                    result = solo.step(batch)
            if Option.SPLIT in options:
                self.splits_in_vain = 0 in solo.stages_without_weight_work
            feeds = [end for end in modules.values() if isinstance(end, Feed)]
            sinks = [end for end in modules.values() if isinstance(end, OutputSink)]
            gradients = [feed.joined() for feed in feeds]
            outputs = [sink.joined() for sink in sinks]
            total = torch.tensor(result.loss, dtype=torch.float64)
            return self._results(total, outputs, gradients)

    def run_all(self, evaluates: bool) -> None:
        """Run the stage once as the plan will train it, but unrecorded, and perhaps once as it will be evaluated."""
        options = self.options - {Option.RECORDED}
        self.run_planned(options)
        if not evaluates:
            return
        with self._traceless(quiet=False, seed=PROOF_SEED):
            schedule, modules = self._solo_schedule(self.module, options)
            self._solo_executor(schedule, modules, options).evaluate(self._batch())

    def _loss(self, y: Any, labels: Tensor) -> Tensor:
        """The share of a micro-batch in the mean loss of all labels."""
        if isinstance(y, Passed):
            y = y.returned
        loss = plain_loss(self.executor.stages.loss)(y, labels)
        if self.executor.stages.reduction is Reduction.MEAN:
            loss = as_sum(loss, labels)
        return loss.reshape(()) / self.label_count

    def _batch(self) -> Batch:
        """The samples as a batch of an executor. What goes between stages is with the feeds and sinks."""
        inputs: list[Tensor] = []
        targets: list[Tensor] = []
        for sample in self.samples:
            inputs.append(sample.x[0] if self.first else sample.tokens)
            targets.append(
                sample.target[0] if self.last else torch.zeros_like(sample.tokens)
            )
        all_starts = [sample.starts for sample in self.samples]
        starts = tuple(start for start in all_starts if start is not None)
        named = tuple(sample.named for sample in self.samples if sample.named)
        return Batch(
            tuple(inputs), tuple(targets), self.label_count, starts, named=named
        )

    def _solo_executor(
        self, schedule: Schedule, modules: dict[int, nn.Module], options: Options
    ) -> Executor:
        """An executor of one rank, with these of the plan's options."""
        executor = self.executor
        recompute = {0} if Option.RECOMPUTE in options else set()
        solo = Executor(
            lower(schedule),
            modules,
            ThreadComm(Hub(1), 0),
            # A sink has made the loss already.
            executor.stages.loss if self.last else lambda total, _: total,
            recompute=frozenset(recompute),
            autocast=executor.stages.autocast if Option.AUTOCAST in options else None,
            tape=executor.tape if Option.RECORDED in options else None,
            reduction=executor.stages.reduction if self.last else Reduction.SUM,
            # The other holders of a tied weight are not part of this run.
            options=RunOptions(tied={}),
        )
        # The proof warns about a W without work itself, with the stage's real number.
        solo.warns_of_deferrals = False
        batch = self._batch()
        edges = [edge for edge in (self.incoming, self.outgoing) if edge is not None]
        for number in range(len(self.samples)):
            solo.finder.known[solo.finder.kind(batch, number)] = tuple(edges)
        return solo

    def _solo_schedule(
        self, module: nn.Module, options: Options
    ) -> tuple[Schedule, dict[int, nn.Module]]:
        """A schedule of one rank that treats the stage as the plan does, and its modules.

        Stage 0 is the module; the others are the feeds and sinks of the micro-batches.
        """
        modules: dict[int, nn.Module] = {0: module}
        microbatches: list[MicroBatch] = []
        for number, sample in enumerate(self.samples):
            path = [0]
            if not self.first:
                path.insert(0, len(modules))
                modules[len(modules)] = Feed(sample.x, self.incoming)
            if not self.last:
                path.append(len(modules))
                modules[len(modules)] = OutputSink(sample.target, self.outgoing)
            tokens = 1
            cuts: tuple[int, ...] = ()
            if Option.SLICES in options:
                tokens = sample.tokens.shape[1]
                cuts = stretch(self.microbatches[number], tokens).cuts
            microbatches.append(MicroBatch(tuple(path), tokens, cuts))
        lane: list[Action] = []
        for action in self.order.under(self.options, options):
            visited = microbatches[action.microbatch].path
            if action.op.kind not in (FORWARD, BACKWARD):
                visited = (0,)  # the other kinds are about the stage alone
            elif action.op.kind == BACKWARD:
                visited = visited[::-1]
            end = action._replace(op=Op.F if action.op is Op.F else Op.B)
            lane += [end._replace(stage=n) if n else action for n in visited]
        stages = [Stage(0, part) for part in range(len(modules))]
        return schedule_of(stages, microbatches, [tuple(lane)]), modules

    # ------------------------------------------------------------ leaving no trace
    @contextmanager
    def _traceless(self, quiet: bool, seed: int) -> Iterator[None]:
        """Start from the saved module, no gradients and a seed; restore all afterwards."""
        trained = [parameter for _, parameter in self._trained()]
        with ONE_AT_A_TIME:
            gradients = [parameter.grad for parameter in trained]
            try:
                for parameter in trained:
                    parameter.grad = None
                self.memory.restore()
                torch.manual_seed(seed)
                before = states(self.device)
                with (
                    torch.enable_grad(),
                    without_dropout(self.module) if quiet else nullcontext(),
                ):
                    yield
                self.drew_random = not same(before, states(self.device))
            finally:
                self.memory.restore()
                for parameter, gradient in zip(trained, gradients, strict=True):
                    parameter.grad = gradient

    def _results(
        self,
        loss: Tensor,
        outputs: Sequence[Value],
        input_gradients: Sequence[Value],
    ) -> Results:
        """The outputs or the loss, the gradients that the parameters have now, and what was added to buffers."""
        results: Results = {}
        if self.outgoing is None:
            results[LOSS] = loss
        else:
            results |= _joined(OUTPUT, outputs, self.outgoing.tensors)
        for parameter_name, parameter in self._trained():
            gradient = parameter.grad
            results[parameter_name] = (
                None if gradient is None else local_share(gradient)
            )
        if self.incoming is not None:
            gradients = self.incoming.gradients
            results |= _joined(INPUT_GRADIENT, input_gradients, gradients)
        for path, before, now in self.memory.changed_buffers():
            name = f"the buffer {original_name(path)}"
            results[name] = _added(before, now)
            if now is not None and has_gradient(now.dtype):
                norm = float(torch.linalg.vector_norm(now.detach()))
                self.buffer_rounding[name] = torch.finfo(now.dtype).eps * norm
        return results


def _added(before: Tensor | None, now: Tensor | None) -> Tensor:
    """What was added to a buffer. A new one counts as a whole, and so does one of another kind, or that is gone."""
    whole = before if now is None else now
    assert whole is not None
    if before is None or now is None or before.shape != now.shape:
        return whole.detach().clone()
    if now.dtype == torch.bool:
        return now ^ before
    return now.detach() - before


def _joined(name: str, samples: Sequence[Value], specs: TensorSpecs) -> Results:
    """The tensors of all samples by name, joined along their rows."""
    results: Results = {}
    for number in range(len(specs)):
        tensors = [value[number] for value in samples]
        joined = torch.cat([x if x.dim() else x.reshape(1) for x in tensors])
        results[name if len(specs) == 1 else f"{name}, tensor {number}"] = joined
    return results


def _backward(
    roots: Sequence[Tensor], gradients: Sequence[Tensor], added: Tensor | None
) -> None:
    """Run an ordinary backward, also of an added loss, unless nothing needs a gradient."""
    pairs = list(zip(roots, gradients, strict=True))
    if added is not None:
        pairs.append((added, torch.ones_like(added)))
    pairs = [(root, gradient) for root, gradient in pairs if root.requires_grad]
    if pairs:
        torch.autograd.backward(
            [root for root, _ in pairs], [gradient for _, gradient in pairs]
        )
