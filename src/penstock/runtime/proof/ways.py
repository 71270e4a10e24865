"""Runs one stage on one micro-batch, the plain way or the way the plan will run it, and leaves no trace of it.

    plain      y = module(x)   whole sequence, one call; one ordinary autograd backward; compiled code left out
    planned    a real `Executor` on a program of one rank, cut out of the plan's lane:

               feed ──x──► stage ──y──► sink          feed   gives x, and catches the gradient that comes back for it
                    ◄─dx──       ◄─dy──               sink   catches y, and sends dy back; the last stage has its loss

The planned way can have any of the plan's options switched off, which is how `penstock.runtime.proof.prove` finds the one
that causes a difference. Gradients, buffers, plain attributes of modules and torch's random numbers are put back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn

from penstock.carry import Carry, Slice
from penstock.ir.action import Action, Op
from penstock.ir.program import lower
from penstock.ir.schedule import MicroBatch, Schedule, Stage, schedule_of, stretch
from penstock.runtime.batch import IGNORED_LABEL, Batch
from penstock.runtime.comm.thread import Hub, ThreadComm
from penstock.runtime.executor import Executor
from penstock.runtime.proof.traceless import (
    Memory,
    drawn,
    fired,
    is_compiled,
    noisy,
    silenced,
    uncompiled,
)
from penstock.runtime.torch_internals import original_name

SEED = 20_817  # of whatever is drawn while a stage runs, and of the gradients that inner stages get
OUTPUT, LOSS, INPUT_GRADIENT = "the output", "the loss", "the gradient of the input"
Found = dict[
    str, Tensor | None
]  # the output or the loss, the gradient of each parameter, that of the input
Order = list[
    tuple[Op, int, int]
]  # what is done, with which of the micro-batches, on which slice
_generator = (
    threading.Lock()
)  # ranks that are threads share torch's random numbers: one of them runs at a time


class Option(StrEnum):
    """What a plan can do with a stage that a plain call does not."""

    SLICES = "slices"
    SPLIT = "split"
    RECOMPUTE = "recompute"
    AUTOCAST = "autocast"
    RECORDED = "recorded"
    COMPILED = "compiled"
    INTERLEAVED = "interleaved"  # several micro-batches are in flight at the stage


Options = frozenset[Option]
REDRAWS = frozenset(
    {Option.SLICES, Option.COMPILED, Option.RECORDED}
)  # with them other random numbers are drawn


@dataclass(frozen=True, slots=True)
class Sample:
    """One micro-batch at the door of a stage."""

    x: Tensor
    target: Tensor  # on the last stage the labels, else the gradient of the output
    starts: Tensor | None = None

    def rolled(self) -> Sample:
        """Another one of the same kind: every token moves on by one."""
        return Sample(self.x.roll(1, 1), self.target.roll(1, 1), self.starts)


class Bench:
    """One stage of an executor, on which it can be run in any way."""

    def __init__(
        self, executor: Executor, stage: int, microbatch: int, batch: Batch
    ) -> None:
        self.executor, self.stage, self.module = (
            executor,
            stage,
            executor.modules[stage],
        )
        self.memory = Memory(self.module)
        self.microbatches, self.order = _flights(executor, stage, microbatch, batch)
        path = self.microbatches[0].path
        self.first, self.last = path[0] == stage, path[-1] == stage
        self.options = self._options()
        self.samples: list[Sample] = []
        self.device = next(
            (p.device for p in self.module.parameters()),
            batch.inputs[microbatch].device,
        )
        self.drew = False  # whether the last run drew random numbers
        self.deferred: set[str] = (
            set()
        )  # parameters whose gradients the last split run left to its W

    def _options(self) -> Options:
        e = self.executor
        ops = {op for op, _, _ in self.order}
        there = {
            Option.SLICES: self.microbatches[0].slices > 1,
            Option.SPLIT: Op.W in ops,
            Option.RECOMPUTE: self.stage in e.recompute,
            Option.AUTOCAST: e.autocast is not None,
            Option.RECORDED: e.tape is not None,
            Option.COMPILED: is_compiled(self.module),
            Option.INTERLEAVED: len(self.microbatches) > 1,
        }
        return frozenset(option for option, on in there.items() if on)

    def fill(self, x: Tensor, labels: Tensor, starts: Tensor | None) -> None:
        """What the stage gets. Inner stages get a gradient that is drawn: it reaches weights that a real one, through
        a head that still is zero, would not reach."""
        target = labels
        if not self.last:
            draw = torch.Generator().manual_seed(SEED + self.stage)
            shape = (*x.shape[:2], self.executor.width)
            target = torch.randn(shape, generator=draw, dtype=self.executor.dtype).to(
                x.device
            )
        self.samples = [Sample(x, target, starts)]
        if len(self.microbatches) > 1:
            self.samples.append(self.samples[0].rolled())

    @property
    def valid(self) -> int:
        """Labels that count, on the last stage."""
        return (
            max(sum(int((s.target != IGNORED_LABEL).sum()) for s in self.samples), 1)
            if self.last
            else 1
        )

    @property
    def names(self) -> list[str]:
        """Parameters that are trained."""
        return [name for name, _ in self._trained()]

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        named = self.module.named_parameters()
        return [(original_name(name), p) for name, p in named if p.requires_grad]

    # ------------------------------------------------------------ the plain way
    def whole(
        self,
        autocast: bool = False,
        quiet: bool = False,
        seed: int = SEED,
        noise: float = 0.0,
        noise_seed: int = 0,
    ) -> Found:
        """Plain calls of the module and ordinary backwards, one micro-batch after the other.

        `quiet` switches dropout off. `noise` changes the output of every layer by so much of itself: the differences
        that this makes are those that roundings can make.
        """
        with (
            self._traceless(quiet, seed),
            uncompiled(self.module) as plain,
            noisy(plain, noise, noise_seed),
        ):
            outputs, inputs, losses = [], [], []
            for sample in self.samples:
                x = sample.x.detach().clone()
                if not self.first:
                    x.requires_grad_()
                with self.cast(autocast):
                    y = call(plain, x, sample.starts)
                    loss = (
                        self.executor.loss(y, sample.target) / self.valid
                        if self.last
                        else None
                    )
                root = y if loss is None else loss
                gradient = (
                    sample.target.to(y.dtype) if loss is None else torch.ones_like(loss)
                )
                if root.requires_grad:
                    torch.autograd.backward(root, gradient)
                outputs.append(y.detach())
                inputs += [x.grad] if x.grad is not None else []
                losses += [] if loss is None else [loss.detach().double()]
                del y, root, loss
            found: Found = (
                {LOSS: torch.stack(losses).sum()}
                if self.last
                else {OUTPUT: torch.cat(outputs)}
            )
            return self._collected(found, inputs)

    def cast(self, autocast: bool) -> torch.autocast | nullcontext[None]:
        """In the executor's type, if it has one and it is asked for."""
        kind = self.executor.autocast
        return (
            torch.autocast(self.device.type, kind)
            if autocast and kind is not None
            else nullcontext()
        )

    # ------------------------------------------------------------ the planned way
    def planned(self, options: Options, quiet: bool = False) -> Found:
        """The same through an executor, with these of the plan's options."""
        with ExitStack() as stack:
            stack.enter_context(self._traceless(quiet, SEED))
            module = (
                self.module
                if Option.COMPILED in options
                else stack.enter_context(uncompiled(self.module))
            )
            added = stack.enter_context(fired(self._trained()))
            program, modules, ends = self._alone(module, options)
            e = self.executor
            solo = Executor(
                lower(program),
                modules,
                ThreadComm(Hub(1), 0),
                e.loss if self.last else _weighed,
                e.width,
                e.dtype,
                recompute=frozenset({0} if Option.RECOMPUTE in options else ()),
                autocast=e.autocast if Option.AUTOCAST in options else None,
                tape=e.tape if Option.RECORDED in options else None,
            )
            starts = tuple(s.starts for s in self.samples if s.starts is not None)
            batch = Batch(
                tuple(s.x for s in self.samples),
                tuple(s.target for s in self.samples),
                self.valid,
                starts,
            )
            result = solo.step(batch)
            if (
                solo.tape is not None
            ):  # recording has drawn numbers, and has run the stage on zeros
                for _, parameter in self._trained():
                    parameter.grad = None
                self.memory.restore()
                torch.manual_seed(SEED)
                with silenced(self.module) if quiet else nullcontext():
                    result = solo.step(batch)
            loss = torch.tensor(result.loss, dtype=torch.float64)
            self.deferred = {name for name, _ in self._trained() if name not in added}
            feeds, sinks = (
                [one for one in ends if isinstance(one, kind)] for kind in (Feed, Sink)
            )
            found: Found = (
                {LOSS: loss}
                if self.last
                else {OUTPUT: torch.cat([one.joined() for one in sinks])}
            )
            return self._collected(found, [one.joined() for one in feeds])

    def _alone(
        self, module: nn.Module, options: Options
    ) -> tuple[Schedule, dict[int, nn.Module], list[nn.Module]]:
        """A schedule of one rank that does with the stage what the plan does; its modules, the ends among them."""
        modules: dict[int, nn.Module] = {0: module}
        microbatches, feeds, sinks = [], {}, {}
        for number, (sample, planned) in enumerate(
            zip(self.samples, self.microbatches, strict=True)
        ):
            if not self.first:
                feeds[number] = len(modules)
                modules[len(modules)] = Feed()
            if not self.last:
                sinks[number] = len(modules)
                modules[len(modules)] = Sink()
            path = (*_one(feeds.get(number)), 0, *_one(sinks.get(number)))
            tokens = sample.x.shape[1]
            cuts = stretch(planned, tokens).cuts if Option.SLICES in options else ()
            microbatches.append(MicroBatch(path, tokens, cuts))
        lane: list[Action] = []
        for op, number, piece in self._order(options):
            before, after = (feeds, sinks) if op is Op.F else (sinks, feeds)
            around = Op.F if op is Op.F else Op.B
            ends = [] if op is Op.W else [(before, around), (None, op), (after, around)]
            for where, what in ends or [(None, op)]:
                stage = 0 if where is None else where.get(number)
                lane += [] if stage is None else [Action(what, stage, number, piece)]
        stages = [Stage(0, part) for part in range(len(modules))]
        return (
            schedule_of(stages, microbatches, [tuple(lane)]),
            modules,
            list(modules.values())[1:],
        )

    def _order(self, options: Options) -> Order:
        """The lane's own order; where an option that it has is off, the plainest there is."""
        without = {Option.SLICES, Option.INTERLEAVED} & (self.options - options)
        order = self._plainest(options) if without else self.order
        if Option.SPLIT in options:
            return order
        return [
            (Op.B if op is Op.I else op, number, piece)
            for op, number, piece in order
            if op is not Op.W
        ]

    def _plainest(self, options: Options) -> Order:
        """All forwards of a micro-batch, all its backwards; interleaved, the forwards of both come first."""
        ways: list[tuple[Order, Order]] = []
        for number, planned in enumerate(self.microbatches):
            pieces = range(planned.slices if Option.SLICES in options else 1)
            back = [
                (op, number, piece) for piece in reversed(pieces) for op in (Op.I, Op.W)
            ]
            if not any(op is Op.W for op, _, _ in self.order):
                back = [(Op.B, number, piece) for piece in reversed(pieces)]
            ways.append(([(Op.F, number, piece) for piece in pieces], back))
        if Option.INTERLEAVED in options:
            return [one for half in (0, 1) for way in ways for one in way[half]]
        return [one for way in ways for half in way for one in half]

    # ------------------------------------------------------------ no trace
    @contextmanager
    def _traceless(self, quiet: bool, seed: int) -> Iterator[None]:
        """The module as it was, no gradients yet, random numbers from the seed; afterwards all is as it was before."""
        trained = [p for _, p in self._trained()]
        before = [p.grad for p in trained]
        with _generator:
            try:
                for parameter in trained:
                    parameter.grad = None
                self.memory.restore()
                torch.manual_seed(seed)
                start = drawn(self.device)
                with (
                    torch.enable_grad(),
                    silenced(self.module) if quiet else nullcontext(),
                ):
                    yield
                self.drew = any(
                    not torch.equal(a, b)
                    for a, b in zip(start, drawn(self.device), strict=True)
                )
            finally:
                self.memory.restore()
                for parameter, gradient in zip(trained, before, strict=True):
                    parameter.grad = gradient

    def _collected(self, found: Found, inputs: Sequence[Tensor]) -> Found:
        found |= {name: parameter.grad for name, parameter in self._trained()}
        return found | (
            {}
            if self.first
            else {INPUT_GRADIENT: torch.cat(list(inputs)) if inputs else None}
        )


def call(module: nn.Module, x: Tensor, starts: Tensor | None) -> Tensor:
    """A plain call on a whole sequence; packed documents come with a slice that is all of it."""
    y: Tensor = (
        module(x)
        if starts is None
        else module(x, Carry(x.shape[1], starts).open(0, x.shape[1]))
    )
    return y


# ---------------------------------------------------------------- what the lane does with a stage
def _flights(
    executor: Executor, stage: int, microbatch: int, batch: Batch
) -> tuple[list[MicroBatch], Order]:
    """The micro-batch, and one that the stage holds at the same time if there is one; what is done with them."""
    schedule = executor.program.schedule
    lane = [a for a in schedule.lanes[executor.comm.rank] if a.stage == stage]
    chosen = [microbatch, *_one(_companion(schedule, lane, microbatch, batch))]
    mine = [a for a in lane if a.microbatch in chosen]
    chosen = list(
        dict.fromkeys(a.microbatch for a in mine)
    )  # the first to go forward comes first
    order = [(a.op, chosen.index(a.microbatch), a.slice) for a in mine]
    return [schedule.microbatches[number] for number in chosen], order


def _companion(
    schedule: Schedule, lane: Sequence[Action], microbatch: int, batch: Batch
) -> int | None:
    """A micro-batch of the same kind that is in flight together with this one."""
    held: dict[int, list[int]] = {}
    for place, action in enumerate(lane):
        held.setdefault(action.microbatch, []).append(place)
    mine = held[microbatch]
    for other, places in held.items():
        alike = _kind(schedule, lane, mine, batch) == _kind(
            schedule, lane, places, batch
        )
        if (
            other != microbatch
            and alike
            and places[0] < mine[-1]
            and mine[0] < places[-1]
        ):
            return other
    return None


def _kind(
    schedule: Schedule, lane: Sequence[Action], places: Sequence[int], batch: Batch
) -> tuple[object, ...]:
    number = lane[places[0]].microbatch
    path, stage = schedule.microbatches[number].path, lane[places[0]].stage
    ops = sorted((lane[place].op, lane[place].slice) for place in places)
    return ops, batch.shapes[number][1], path[0] == stage, path[-1] == stage


def _one(value: int | None) -> tuple[int, ...]:
    return () if value is None else (value,)


# ---------------------------------------------------------------- the ends of a stage that runs alone
class _Catch(torch.autograd.Function):
    """Passes a value on, and hands its gradient over."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, hand_over: Callable[[Tensor], None]
    ) -> Tensor:
        ctx.hand_over = hand_over
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.hand_over(gradient)
        return None, None, None


class End(nn.Module):
    """An end: what it has caught, by the first token of the slice."""

    def __init__(self) -> None:
        super().__init__()
        self.caught: dict[int, Tensor] = {}

    def catch(self, piece: Slice | None, tensor: Tensor) -> None:
        """Keeps what was seen last: when a recording is made, a stage runs more than once."""
        self.caught[0 if piece is None else piece.begin] = tensor.detach()

    def joined(self) -> Tensor:
        """All slices, one after the other."""
        return torch.cat([self.caught[begin] for begin in sorted(self.caught)], dim=1)


class Feed(End):
    """Gives the stage its input, and catches the gradient that it makes for it."""

    def __init__(self) -> None:
        super().__init__()
        self.anchor = nn.Parameter(torch.zeros(()))  # so that autograd comes by

    def forward(self, x: Tensor, piece: Slice | None = None) -> Tensor:
        """The input as it is."""
        y: Tensor = _Catch.apply(
            x, self.anchor, lambda gradient: self.catch(piece, gradient)
        )  # type: ignore[no-untyped-call]
        return y


class Sink(End):
    """Catches what the stage makes."""

    def forward(self, x: Tensor, piece: Slice | None = None) -> Tensor:
        """The same again."""
        self.catch(piece, x)
        return x


def _weighed(y: Tensor, gradient: Tensor) -> Tensor:
    """A loss whose gradient is the one that is given."""
    return (y.to(gradient.dtype) * gradient).sum()
