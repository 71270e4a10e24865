"""Runs one rank's lane of a program on real tensors. The same code for every schedule.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor, nn

from penstock.carry import Slice
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule
from penstock.ir.timeline import Timeline
from penstock.runtime.backward import Ledger, make_deferrable, record_in, walk_back
from penstock.runtime.batch import Batch
from penstock.runtime.comm.comm import Arriving, Comm, Pending
from penstock.runtime.memory import keep_freed_memory
from penstock.runtime.recorder import Clock, Moment, Recorder, Recording
from penstock.runtime.replay import Replays, Tape, refuse_shares
from penstock.runtime.replicas import Replicas, Tied, groups_of
from penstock.runtime.shards import Shards
from penstock.runtime.slices import Carries, refuse_whole, spans_of
from penstock.runtime.steps import Do, Step, turns_of
from penstock.runtime.visits import Mean, Visits

FLYING = 16  # sends that may be on their way at once
Loss = Callable[[Tensor, Tensor], Tensor]  # logits and labels to the SUM of the losses of the labels that count


class Result:
    """Of one step: the mean loss over all valid tokens and, if timed, when everything ran; alike on all ranks.

    Both are brought together over the ranks while the caller goes on, and waited for when they are read.
    """

    __slots__ = ("_loss", "_recording", "_sum")

    def __init__(self, loss: Tensor, summed: Pending, recording: Recording | None = None) -> None:
        self._loss, self._sum, self._recording = loss, summed, recording

    @property
    def loss(self) -> float:
        """The mean over all valid tokens of the step."""
        self._sum.wait()
        return float(self._loss)

    @property
    def timeline(self) -> Timeline | None:
        """When everything ran; None if the step was not timed."""
        return None if self._recording is None else self._recording.timeline()


@dataclass(slots=True)
class Kept:
    """What a forward keeps for its backward."""

    x: Tensor
    y: Tensor | None  # None: to be computed again
    ledger: Ledger | None
    borrowed: list[Tensor]  # buffers that x, and the gradient of y, were received into
    piece: Slice | None = None


class Executor:
    """One rank's lane, ready to run step after step. All ranks make theirs at the same time."""

    def __init__(
        self,
        program: Program,
        stages: Mapping[int, nn.Module],
        comm: Comm,
        loss: Loss,
        width: int,
        dtype: torch.dtype = torch.float32,
        recompute: frozenset[int] = frozenset(),
        autocast: torch.dtype | None = None,
        tied: Mapping[str, Tied] | None = None,
        mean: Mean = Mean.ALL,
        tape: Tape | None = None,
    ) -> None:
        self.program, self.comm, self.loss = program, comm, loss
        self.modules, self.width, self.dtype = dict(stages), width, dtype
        self.recompute, self.autocast, self.tape = recompute, autocast, tape
        self.replays: Replays | None = None  # of the first batch's shape
        refuse_whole(program.schedule, self.modules)
        if tape is not None:
            refuse_shares(self.modules)
        self.turns = turns_of(program, comm.rank)
        self.receives = [step for turn in self.turns for step in turn.messages if step.do is Do.RECEIVE]
        comm.prepare(groups_of(program.schedule, tied))
        self.replicas = Replicas(program.schedule, self.modules, comm, tied)
        self.shards = Shards(program.schedule, self.modules, comm.rank, tied)
        if not self.shards.parts:  # they save memory, which what is kept would cost again
            keep_freed_memory()
        self.visits = Visits(program.schedule, self.modules, mean, tied)
        self.world = tuple(range(comm.ranks))
        self.recorder, self.clock = Recorder(program.schedule, comm), Clock(self.modules.values())
        self.at = 0  # the turn that runs now
        self.room: Sequence[tuple[int, ...]] = ()  # shapes of messages that there is room for
        if any(turn.step is not None and turn.step.split for turn in self.turns):
            for module in self.modules.values():
                make_deferrable(module)

    @property
    def doing(self) -> str:
        """The action that runs now, or that waits for its input."""
        step = self.turns[self.at].step
        return str(step.instruction) if step is not None else "the start"

    def step(self, batch: Batch, timed: bool = False) -> Result:
        """Forward and backward of every micro-batch once; gradients are added to what is there."""
        run = Pass(self, batch, timed)
        if run.shapes != self.room:
            self.comm.reserve(self.program, run.shapes, self.dtype)
            self.room = run.shapes
        if self.tape is not None and not batch.starts:
            self.replays = self.replays or Replays(run, self.tape)
            if self.replays.fits(batch):
                run.replays = self.replays
        return run.run()

    def evaluate(self, batch: Batch) -> float:
        """The mean loss of a batch: the forwards of the same lanes alone."""
        return Pass(self, batch, timed=False, training=False).run().loss


class Pass:
    """One step in the making: what is held here, what is on its way."""

    def __init__(self, executor: Executor, batch: Batch, timed: bool, training: bool = True) -> None:
        self.e, self.batch, self.timed, self.training = executor, batch, timed, training
        self.held: dict[int, Tensor | Arriving] = {}
        self.kept: dict[int, Kept | None] = {}  # None: a recording keeps it
        self.out: deque[Pending] = deque()
        self.received = False  # whether what the next action takes lies in a buffer of ours
        self.posted = self.reached = 0  # receives
        schedule = executor.program.schedule
        self.inputs, self.labels = batch.inputs, batch.labels
        self.shapes = [(*shape, executor.width) for shape in batch.shapes]
        self.carries: Carries | None = None  # None: whole sequences of one document
        if schedule.slices > 1 or batch.starts:
            self.cut(schedule, batch)
        self.ahead = _ahead(executor.comm.window, max(map(prod, self.shapes)) * executor.dtype.itemsize)
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
        return tuple(partial(play, self) for play in (made.forward, made.backward, made.weights))

    def cut(self, schedule: Schedule, batch: Batch) -> None:
        """Tokens, labels and shapes of every slice."""
        spans = [spans_of(m, shape[1]) for m, shape in zip(schedule.microbatches, batch.shapes, strict=True)]
        self.inputs = tuple(x[:, a:b] for x, some in zip(batch.inputs, spans, strict=True) for a, b in some)
        self.labels = tuple(y[:, a:b] for y, some in zip(batch.labels, spans, strict=True) for a, b in some)
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
        loss = torch.zeros((), dtype=torch.float64, device=self.losses[0].device if self.losses else None)
        for one in self.losses:
            loss += one
        summed = self.e.comm.add(loss, self.e.world)
        return Result(loss, summed, self.recording() if self.timed else None)

    def recording(self) -> Recording:
        """Times of this rank, on their way to all."""
        clock = self.e.clock
        return self.e.recorder.gather(clock.seconds(self.start), clock.seconds(self.end), self.level)

    def walk(self) -> None:  # noqa: PLR0912  # the hot loop
        """Turn after turn: an action once its input is there, then the messages that are due, then what is dropped."""
        act, e, held, training, replicas = self.act, self.e, self.held, self.training, self.e.replicas
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
        self.level.append(len(self.kept) + (step.do is not Do.FORWARD and step.forward not in self.kept))

    # ------------------------------------------------------------ messages
    def reach(self) -> None:
        """A receive is due: posts it, and when the window has become half empty, fills it."""
        self.reached += 1
        if self.posted < self.reached + self.ahead // 2:
            self.post(self.reached + self.ahead)

    def post(self, most: int) -> None:
        """Posts receives until so many are posted."""
        while self.posted < min(most, len(self.e.receives)):
            step = self.e.receives[self.posted]
            self.posted += 1
            if self.training or not step.goes_back:
                self.held[step.value] = self.e.comm.receive(self.shapes[step.unit], self.e.dtype, step.peer)

    def send(self, step: Step) -> None:
        """Sends without waiting, unless many are on their way: then for the oldest, as a send that blocks would."""
        if len(self.out) >= FLYING:
            self.out.popleft().wait()
        self.out.append(self.e.comm.send(self.tensor(step.value).detach().to(self.e.dtype), step.peer))

    def tensor(self, value: int) -> Tensor:
        """A value that is here."""
        found = self.held[value]
        assert isinstance(found, Tensor)
        return found

    # ------------------------------------------------------------ actions
    def forward(self, step: Step) -> None:
        """Runs the stage; keeps what its backward needs."""
        x = self.inputs[step.unit]
        if step.source >= 0:
            x = self.tensor(step.source).detach()
            if self.training:
                x.requires_grad_()
        piece = None if self.carries is None else self.carries.open(step)
        if not self.training:
            self.give(step, self.apply(step, x, piece))
            if self.carries is not None and piece is not None and piece.end == piece.tokens:
                self.carries.drop(step)
        elif step.stage in self.e.recompute:
            with torch.no_grad():
                self.give(step, self.apply(step, x, piece))
            self.kept[step.value] = Kept(x, None, Ledger() if step.split else None, self.borrow(step), piece)
        else:
            ledger = Ledger() if step.split else None
            record_in(ledger)
            y = self.apply(step, x, piece)
            self.kept[step.value] = Kept(x, y, ledger, self.borrow(step), piece)
            self.give(step, y)

    def give(self, step: Step, y: Tensor) -> None:
        """What a forward made: for the next stage, or a share of the loss."""
        if step.last:
            self.losses.append(y.detach())
        else:
            self.held[step.value] = y

    def apply(self, step: Step, x: Tensor, piece: Slice | None) -> Tensor:
        """A stage's module; on the last stage the loss: the micro-batch's share of the mean over all valid tokens."""
        if self.e.autocast is None:
            return self.compute(step, x, piece)
        with torch.autocast(x.device.type, self.e.autocast):
            return self.compute(step, x, piece)

    def compute(self, step: Step, x: Tensor, piece: Slice | None) -> Tensor:
        """The same, in the type at hand."""
        module = self.e.modules[step.stage]
        y: Tensor = module(x) if piece is None else module(x, piece)
        if step.last:
            return self.e.loss(y, self.labels[step.unit]) / self.batch.valid
        return y

    def backward(self, step: Step) -> None:
        """From the gradient of y to that of x, in one walk; a split one leaves the linear weights to W."""
        kept = self.kept[step.forward] if step.split else self.kept.pop(step.forward)
        assert kept is not None, "this one is played"
        if kept.y is None:
            record_in(kept.ledger)
            if kept.piece is not None:
                kept.piece.again = True
            kept.y = self.apply(step, kept.x, kept.piece)
        if kept.ledger is not None:
            kept.ledger.open = True
        gradient = torch.ones_like(kept.y) if step.last else self.tensor(step.source).to(kept.y.dtype)
        if kept.piece is None:
            walk_back((kept.y,), (gradient,))
        else:
            self.slice_back(step, kept.piece, kept.y, gradient)
        kept.y = None  # the graph goes with it
        made, kept.x.grad = kept.x.grad, None
        kept.borrowed += self.borrow(step)
        if made is not None:
            self.held[step.value] = made
            kept.borrowed = [one for one in kept.borrowed if one.data_ptr() != made.data_ptr()]  # it is sent on
        if not step.split:
            self.give_back(kept)

    def slice_back(self, step: Step, piece: Slice, y: Tensor, gradient: Tensor) -> None:
        """The same of a slice: also from the states it left, and keeping the gradient of those it took."""
        carry = piece.carry
        roots, gradients = carry.back(piece)
        walk_back((y, *roots), (gradient, *gradients))
        carry.close(piece)
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
        assert kept is not None and kept.ledger is not None  # noqa: PT018
        kept.ledger.settle()
        self.give_back(kept)


def _ahead(window: int, size: int) -> int:
    """How many receives may be posted before the program has them: as many as the window holds, if there is one."""
    return min(max(window // max(size, 1), 4), 256) if window else 0


def execute(
    program: Program, stages: Mapping[int, nn.Module], batch: Batch, comm: Comm, loss: Loss, width: int,
    dtype: torch.dtype = torch.float32,
) -> Result:  # fmt: skip
    """One timed step of one rank, without keeping the executor."""
    return Executor(program, stages, comm, loss, width, dtype).step(batch, timed=True)
