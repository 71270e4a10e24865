"""One step of one rank in the making: what is held, what is on its way, and what each action does.

    F   x (tokens, or what the stage before made)  ──module──►   y       keeps (x, y) for the backward
    B   gradient of y (or the loss itself)         ──autograd──►  x.grad  adds to the weights' gradients
    I   the same walk, but linear layers leave their weight gradients;    W does what was left

Receives are posted ahead, sends are not waited for unless many are on their way, and what an action left is dropped
where the program frees it. Of a sliced micro-batch every slice is such an x; what a stage carries from slice to slice,
and its gradient back, is in `penstock.carry`.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.carry import Slice
from penstock.errors import ShapeError
from penstock.ir.schedule import Schedule
from penstock.runtime.backward import Ledger, record_in, walk_back
from penstock.runtime.batch import Batch
from penstock.runtime.comm.comm import Arriving, Pending
from penstock.runtime.lane import Do, Step
from penstock.runtime.loss_reduction import Reduction, as_sum, refuse_other_loss
from penstock.runtime.randomness import TURN, Drawn, drawing_again, drawn_since, states
from penstock.runtime.recorder import Moment, Recording
from penstock.runtime.replay import Replays
from penstock.runtime.slices import Carries, spans_of
from penstock.runtime.stage_checks import detached, not_a_tensor, unfit_message
from penstock.runtime.step_result import Result

if TYPE_CHECKING:
    from penstock.runtime.executor import Executor

FLYING = 16  # sends that may be on their way at once


@dataclass(slots=True)
class Kept:
    """What a forward keeps for its backward."""

    x: Tensor
    y: Tensor | None  # None: to be computed again
    ledger: Ledger | None
    borrowed: list[Tensor]  # buffers that x, and the gradient of y, were received into
    piece: Slice | None = None
    drawn: Drawn | None = None  # random numbers to be drawn again


class Pass:
    """One step in the making: what is held here, what is on its way."""

    def __init__(
        self, executor: Executor, batch: Batch, timed: bool, training: bool = True
    ) -> None:
        self.e, self.batch, self.timed, self.training = executor, batch, timed, training
        self.held: dict[int, Tensor | Arriving] = {}
        self.kept: dict[int, Kept | None] = {}  # None: a recording keeps it
        self.out: deque[Pending] = deque()
        self.received = (
            False  # whether what the next action takes lies in a buffer of ours
        )
        self.posted = self.reached = 0  # receives
        self.drawn: dict[
            int, Drawn
        ] = {}  # random numbers that a recording draws again in the backward
        self.checks = False  # whether to look at what a user's modules and loss do: in the first step
        self.draws = True  # whether generators are set back here; not while recording, where a replay does it
        schedule = executor.program.schedule
        if len(batch.inputs) != len(schedule.microbatches):
            raise ShapeError(
                f"the batch has {len(batch.inputs)} micro-batches, but the schedule has {len(schedule.microbatches)}\n"
                f"  cut it into {len(schedule.microbatches)}: cut_batch(inputs, labels, {len(schedule.microbatches)})"
            )
        self.inputs, self.labels = batch.inputs, batch.labels
        self.shapes = [(*shape, executor.width) for shape in batch.shapes]
        self.carries: Carries | None = None  # None: whole sequences of one document
        if schedule.slices > 1 or batch.starts:
            self.cut(schedule, batch)
        self.ahead = _ahead(
            executor.comm.window, max(map(prod, self.shapes)) * executor.dtype.itemsize
        )
        self.losses: list[Tensor] = []
        self.start: list[Moment] = []
        self.end: list[Moment] = []
        self.level: list[int] = []  # forwards kept while an action runs
        self.replays: Replays | None = None  # actions are not done but played

    def like(self, batch: Batch) -> Pass:
        """Another one of the same kind, on another batch."""
        return Pass(self.e, batch, timed=False)

    @property
    def act(self) -> tuple[Callable[[Step], None], ...]:
        """F, B or I, and W. Not kept: a pass that holds its own methods holds all tensors until a collector comes."""
        made = self.replays
        if made is None:
            return self.forward, self.backward, self.weights
        return tuple(
            partial(play, self) for play in (made.forward, made.backward, made.weights)
        )

    def cut(self, schedule: Schedule, batch: Batch) -> None:
        """Tokens, labels and shapes of every slice."""
        spans = [
            spans_of(m, shape[1])
            for m, shape in zip(schedule.microbatches, batch.shapes, strict=True)
        ]
        self.inputs = tuple(
            x[:, a:b]
            for x, some in zip(batch.inputs, spans, strict=True)
            for a, b in some
        )
        self.labels = tuple(
            y[:, a:b]
            for y, some in zip(batch.labels, spans, strict=True)
            for a, b in some
        )
        self.shapes = [(x.shape[0], x.shape[1], self.e.width) for x in self.inputs]
        self.carries = Carries(batch, spans)

    def run(self) -> Result:
        """All steps of the lane, without a pause for the garbage collector."""
        collects = gc.isenabled()
        gc.disable()
        try:
            with torch.set_grad_enabled(self.training):
                self.walk()
        finally:
            record_in(None)
            if collects:
                gc.enable()
        loss = torch.zeros(
            (),
            dtype=torch.float64,
            device=self.losses[0].device if self.losses else None,
        )
        for one in self.losses:
            loss += one
        summed = self.e.comm.add(loss, self.e.world)
        if self.checks:
            self.e.watch.warn()
        return Result(loss, summed, self.recording() if self.timed else None)

    def recording(self) -> Recording:
        """Times of this rank, on their way to all."""
        clock = self.e.clock
        return self.e.recorder.gather(
            clock.seconds(self.start), clock.seconds(self.end), self.level
        )

    def walk(self) -> None:  # noqa: PLR0912  # the hot loop
        """Turn after turn: an action once its input is there, then the messages that are due, then what is dropped."""
        act, e, held, training, replicas = (
            self.act,
            self.e,
            self.held,
            self.training,
            self.e.replicas,
        )
        if self.timed:
            e.clock.begin()
        if training:
            self.begin()
        e.shards.begin()
        self.post(self.ahead)
        for number, turn in enumerate(e.turns):
            step = turn.step
            if step is not None and (training or step.do is Do.FORWARD):
                e.at = number
                value = held.get(step.source)
                if value is not None and not isinstance(value, Tensor):
                    held[step.source] = value.wait()
                    self.received = training
                if self.timed:
                    self.record(step, act[step.do])
                else:
                    act[step.do](step)
                if training and (e.shards.parts or replicas.order):
                    e.shards.after(step.value)
                    replicas.after(step.value)
            for message in turn.messages:
                if message.do is Do.RECEIVE:
                    self.reach()
                elif training or not message.goes_back:
                    self.send(message)
            for freed in turn.frees:
                held.pop(freed, None)
        while self.out:
            self.out.popleft().wait()
        if self.carries is not None:
            self.carries.check_empty()
        e.shards.finish()
        if training:
            replicas.finish()
            e.visits.finish(self.batch)

    def begin(self) -> None:
        """Gradients of this step begin; those of earlier ones are laid aside where they must be."""
        e = self.e
        if self.replays is not None:
            self.replays.rest.lift([*e.visits.owners, *e.replicas.parameters])
        e.visits.begin()
        e.replicas.begin()
        if self.replays is not None:
            self.replays.begin(self.batch.valid)

    def record(self, step: Step, act: Callable[[Step], None]) -> None:
        """Acts, and notes when, and how many forwards are kept meanwhile."""
        now = self.e.clock.now
        self.start.append(now())
        act(step)
        self.end.append(now())
        self.level.append(
            len(self.kept)
            + (step.do is not Do.FORWARD and step.forward not in self.kept)
        )

    # ------------------------------------------------------------ messages
    def reach(self) -> None:
        """A receive is due: posts it, and when the window has become half empty, fills it."""
        self.reached += 1
        if self.posted < self.reached + self.ahead // 2:
            self.post(self.reached + self.ahead)

    def post(self, most: int) -> None:
        """Posts receives until so many are posted."""
        receives = self.e.receives
        while self.posted < min(most, len(receives)):
            step = receives[self.posted]
            self.posted += 1
            if self.training or not step.goes_back:
                self.held[step.value] = self.e.comm.receive(
                    self.shapes[step.unit], self.e.dtype, step.peer
                )

    def send(self, step: Step) -> None:
        """Sends without waiting, unless many are on their way: then for the oldest, as a send that blocks would."""
        if len(self.out) >= FLYING:
            self.out.popleft().wait()
        x = self.tensor(step.value).detach()
        if x.dtype is not self.e.dtype or x.shape != self.shapes[step.unit]:
            fault = unfit_message(
                step,
                x,
                self.shapes[step.unit],
                self.e.dtype,
                self.e.autocast is not None,
            )
            if fault is not None:
                raise fault
            x = x.to(self.e.dtype)
        self.out.append(self.e.comm.send(x, step.peer))

    def tensor(self, value: int) -> Tensor:
        """A value that is here."""
        found = self.held[value]
        assert isinstance(found, Tensor)
        return found

    # ------------------------------------------------------------ actions
    def forward(self, step: Step) -> None:
        """Runs the stage; keeps what its backward needs."""
        e, x = self.e, self.inputs[step.unit]
        if step.source >= 0:
            x = self.tensor(step.source).detach()
            if self.training and step.value not in e.rests.closed:
                x.requires_grad_()
        piece = None if self.carries is None else self.carries.open(step)
        if not self.training:
            self.give(step, self.apply(step, x, piece))
            if (
                self.carries is not None
                and piece is not None
                and piece.end == piece.tokens
            ):
                self.carries.drop(step)
        elif step.value in e.rests.idle:
            with torch.no_grad():
                self.give(step, self.apply(step, x, piece))
            self.kept[step.value] = Kept(x, None, None, self.borrow(step), piece)
        elif step.stage in e.recompute:
            y, drawn = self.apply_once(step, x, piece)
            self.give(step, y)
            ledger = Ledger(e.common) if step.split else None
            self.kept[step.value] = Kept(
                x, None, ledger, self.borrow(step), piece, drawn
            )
        else:
            ledger = Ledger(e.common) if step.split else None
            record_in(ledger)
            y = self.apply(step, x, piece)
            self.kept[step.value] = Kept(x, y, ledger, self.borrow(step), piece)
            self.give(step, y)

    def apply_once(
        self, step: Step, x: Tensor, piece: Slice | None
    ) -> tuple[Tensor, Drawn | None]:
        """A forward that will be computed again: without a graph, and with the random numbers it drew."""
        with torch.no_grad():
            if not self.draws:
                return self.apply(step, x, piece), None
            with TURN:
                before = states(x.device)
                return self.apply(step, x, piece), drawn_since(before, x.device)

    def give(self, step: Step, y: Tensor) -> None:
        """What a forward made: for the next stage, or a share of the loss."""
        if step.last:
            self.losses.append(y.detach())
        else:
            self.held[step.value] = y

    def apply(self, step: Step, x: Tensor, piece: Slice | None) -> Tensor:
        """A stage's module; on the last stage the loss: the micro-batch's share of the mean over all valid tokens."""
        if self.e.takes_turns:
            with TURN:
                return self.cast(step, x, piece)
        return self.cast(step, x, piece)

    def cast(self, step: Step, x: Tensor, piece: Slice | None) -> Tensor:
        """The same, in autocast's type if that is asked for."""
        if self.e.autocast is None:
            return self.compute(step, x, piece)
        with torch.autocast(x.device.type, self.e.autocast):
            return self.compute(step, x, piece)

    def compute(self, step: Step, x: Tensor, piece: Slice | None) -> Tensor:
        """The same, in the type at hand."""
        e, module = self.e, self.e.modules[step.stage]
        y: Tensor = module(x) if piece is None else module(x, piece)
        if not isinstance(y, Tensor):
            raise not_a_tensor(step, module, y)
        if not step.last:
            return y
        labels = self.labels[step.unit]
        if self.checks and not e.knows_loss:
            sliced = self.carries is not None and len(self.carries.spans) > len(
                self.batch.inputs
            )
            e.knows_loss = refuse_other_loss(
                e.loss, y, labels, e.reduction, step.stage, sliced
            )
        loss = e.loss(y, labels)
        if e.reduction is Reduction.MEAN:
            loss = as_sum(loss, labels)
        return loss / self.batch.valid

    def backward(self, step: Step) -> None:
        """From the gradient of y to that of x, in one walk; a split one leaves the linear weights to W."""
        kept = self.kept[step.forward] if step.split else self.kept.pop(step.forward)
        assert kept is not None, "this one is played"
        if step.value in self.e.rests.idle:
            self.rest(step, kept)
            return
        if kept.y is None:
            self.apply_again(step, kept)
        assert kept.y is not None
        if kept.ledger is not None:
            kept.ledger.open = True
        if not kept.y.requires_grad:
            self.refuse_detached(step, kept)
            self.rest(step, kept)
            return
        watched = self.e.watch.begin(step.stage) if self.checks and step.split else None
        gradient = (
            torch.ones_like(kept.y)
            if step.last
            else self.tensor(step.source).to(kept.y.dtype)
        )
        record_in(
            kept.ledger
        )  # activation checkpointing inside a stage runs forwards during this walk
        if kept.piece is None:
            walk_back((kept.y,), (gradient,))
        else:
            self.slice_back(step, kept.piece, kept.y, gradient)
        if watched is not None:
            self.e.watch.end(step.stage, watched)
        kept.y = None  # the graph goes with it
        made, kept.x.grad = kept.x.grad, None
        kept.borrowed += self.borrow(step)
        if made is not None:
            self.held[step.value] = made
            kept.borrowed = [
                one for one in kept.borrowed if one.data_ptr() != made.data_ptr()
            ]  # it is sent on
        if not step.split:
            self.give_back(kept)

    def apply_again(self, step: Step, kept: Kept) -> None:
        """The forward once more, for its graph; with the random numbers of the first time."""
        record_in(kept.ledger)
        if kept.piece is not None:
            kept.piece.again = True
        with drawing_again(kept.drawn, kept.x.device, step.instruction):
            kept.y = self.apply(step, kept.x, kept.piece)

    def refuse_detached(self, step: Step, kept: Kept) -> None:
        """Raises if a stage that has something to train made a result that does not depend on it."""
        if kept.x.requires_grad or any(
            p.requires_grad for p in self.e.modules[step.stage].parameters()
        ):
            raise detached(step, self.e.modules[step.stage])

    def rest(self, step: Step, kept: Kept) -> None:
        """A backward with nothing to do."""
        kept.y = None
        kept.borrowed += self.borrow(step)
        if kept.piece is not None:
            kept.piece.carry.back(kept.piece)
            self.close(step, kept.piece)
        if not step.split:
            self.give_back(kept)

    def slice_back(self, step: Step, piece: Slice, y: Tensor, gradient: Tensor) -> None:
        """The same of a slice: also from the states it left, and keeping the gradient of those it took."""
        roots, gradients = piece.carry.back(piece)
        walk_back((y, *roots), (gradient, *gradients))
        self.close(step, piece)

    def close(self, step: Step, piece: Slice) -> None:
        """A slice came back: its gradients go to the slice before it; after the first, the micro-batch is done with."""
        piece.carry.close(piece)
        if piece.begin == 0:
            assert self.carries is not None
            self.carries.drop(step)

    def borrow(self, step: Step) -> list[Tensor]:
        """The buffer into which an action's input was received, if it was."""
        received, self.received = self.received, False
        return [self.tensor(step.source)] if received else []

    def give_back(self, kept: Kept) -> None:
        """Lets the buffers of a micro-batch that is done with take the next messages."""
        for buffer in kept.borrowed:
            self.e.comm.give_back(buffer)

    def weights(self, step: Step) -> None:
        """What the I has left."""
        kept = self.kept.pop(step.forward)
        assert kept is not None, "this one is played"
        if kept.ledger is not None:  # None: nothing trains here
            kept.ledger.settle()
        self.give_back(kept)


def _ahead(window: int, size: int) -> int:
    """How many receives may be posted before the program has them: as many as the window holds, if there is one."""
    return min(max(window // max(size, 1), 4), 256) if window else 0
