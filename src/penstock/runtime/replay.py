"""Actions recorded once and replayed: on a GPU one launch instead of hundreds (CUDA graphs).

Before the first step all that a stage does with a micro-batch is recorded, in the order in which it does it, on tensors
that stay where they are. A replay then needs what the action takes to be copied there. A recording holds one
micro-batch at a time, so a stage has as many as it has micro-batches in flight:

    stage 1    F0  F1  F2  B0  F3  B1  F4  B2 ...
    take        a   b   c   a   a   b   b   c

A take is all that stays for one micro-batch: x and y of every slice, what the backward keeps, the gradients. Memory
that one of its actions has used for a while serves the next ones of the same take alone, since nothing is known of how
the actions of two takes follow each other. So recorded stages need more memory than others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from penstock.errors import RunError, ShapeError
from penstock.runtime.backward import record_in
from penstock.runtime.batch import Batch
from penstock.runtime.dtensor_share import local_share
from penstock.runtime.frozen_stages import Rests
from penstock.runtime.lane import Do, Step, Turn
from penstock.runtime.randomness import TURN, drawing_again, drawn_since, states

if TYPE_CHECKING:
    from penstock.runtime.walk import Pass

RecordedWork = Callable[[], Tensor | None]
StageVisit = tuple[int, int]  # a stage and a micro-batch
MicroBatchShape = tuple[int, ...]  # of a micro-batch: rows, tokens, where it is cut
TakeMoment = tuple[Do, int]  # an action of a take: what it does, and on which slice


class Tape(Protocol):
    """Records work. What was made while recording is there again, in the same memory, whenever it is played."""

    def begin(self) -> None:
        """A new take: what it records is played in the order of recording, and then from the start again."""
        ...

    def rehearse(self, work: RecordedWork) -> None:
        """Does work that is not recorded, where the recordings will be made."""
        ...

    def record(self, work: RecordedWork) -> tuple[Tensor | None, Callable[[], None]]:
        """What it makes, and what plays it. It is not said to be made before it is played."""
        ...


class CudaTape:
    """CUDA graphs: every take has memory of its own."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.pool = torch.cuda.graph_pool_handle()

    def begin(self) -> None:
        """A new take."""
        self.pool = torch.cuda.graph_pool_handle()

    def rehearse(self, work: RecordedWork) -> None:
        """Loads kernels, and lets libraries take their memory."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            work()
        torch.cuda.current_stream().wait_stream(self.stream)

    def record(self, work: RecordedWork) -> tuple[Tensor | None, Callable[[], None]]:
        """One graph. It is played at once, so that it lies on the GPU before any stream waits for another rank."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                made = work()
            except BaseException:
                with suppress(
                    RuntimeError
                ):  # it would only say that the recording was broken off
                    graph.capture_end()
                raise
            graph.capture_end()
        graph.replay()
        return made, graph.replay


def recording_bytes() -> int:
    """Bytes of the GPU that recordings of this process have for themselves and no tensor holds now."""
    segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    mine = (one for one in segments if tuple(one["segment_pool_id"]) != (0, 0))
    return sum(int(one["total_size"] - one["allocated_size"]) for one in mine)


@dataclass(slots=True)
class RecordedAction:
    """One action of a take."""

    into: tuple[Tensor, ...]  # where to copy what it takes
    made: Tensor | None  # and where what it makes is found
    play: Callable[[], None]

    def __call__(self, *given: Tensor) -> Tensor | None:
        """Acts on what is given."""
        for target, source in zip(self.into, given, strict=True):
            target.copy_(source)
        self.play()
        return self.made


Take = Mapping[TakeMoment, RecordedAction]


class Kind(NamedTuple):
    """Micro-batches of one kind can follow each other in a take of a stage."""

    stage: int
    shape: MicroBatchShape
    steps: tuple[
        tuple[Do, int, bool, bool], ...
    ]  # what is done, on which slice; split, last
    idle: bool = False  # nothing trains up to here: the forward keeps nothing, and there is no backward
    closed: bool = False  # nothing trains before it: its input gets no gradient


class Replays:
    """The takes of one rank for batches of one shape."""

    def __init__(self, run: Pass, tape: Tape) -> None:
        self.shapes = run.batch.shapes
        places = stage_visits(run.e.turns)
        self.rest = Rest(
            run.e.modules[stage] for stage in {stage for stage, _ in places}
        )
        self.valid = torch.ones((), device=run.batch.inputs[0].device)
        self.takes: dict[StageVisit, Take] = {}
        self.drawing: set[StageVisit] = (
            set()
        )  # whose recorded backward must draw the random numbers of its forward again
        made: dict[tuple[Kind, int], Take] = {}
        cuts = [microbatch.cuts for microbatch in run.e.program.schedule.microbatches]
        alike = [(*shape, *cut) for shape, cut in zip(self.shapes, cuts, strict=True)]
        device, drawing = run.batch.inputs[0].device, set[Kind]()
        for place, (kind, number) in assign_takes(places, alike, run.e.rests).items():
            if (kind, number) not in made:
                steps = places[place]
                if number == 0:
                    before, other = states(device), self.stand_in(run, steps)
                    other.checks = run.checks
                    tape.rehearse(partial(_walk, other, steps))
                    drawing |= (
                        {kind} if drawn_since(before, device) is not None else set()
                    )
                made[kind, number] = self.take(run, steps, tape)
            self.takes[place] = made[kind, number]
            if kind in drawing and kind.stage in run.e.recompute:
                self.drawing.add(place)
        self.rest.clear()

    @cached_property
    def aside(self) -> int:
        """Bytes that all recordings have for themselves. Asked for once: a look at all of the GPU's memory is long."""
        return recording_bytes() if self.valid.is_cuda else 0

    def begin(self, valid: int) -> None:
        """A new step, over so many valid tokens."""
        self.valid.fill_(valid)
        self.rest.begin()

    def fits(self, batch: Batch) -> bool:
        """Whether a batch looks like the recorded one."""
        return batch.shapes == self.shapes and not batch.starts

    def stand_in(self, run: Pass, steps: Sequence[Step]) -> Pass:
        """A step of its own for one micro-batch, on tensors that stay."""
        valid: int = self.valid  # type: ignore[assignment]  # a number that changes from step to step
        other = run.like(replace(run.batch, valid=valid))
        other.draws = False
        mine = {step.unit for step in steps}
        other.inputs = tuple(
            x.clone() if unit in mine else x for unit, x in enumerate(run.inputs)
        )
        other.labels = tuple(
            y.clone() if unit in mine else y for unit, y in enumerate(run.labels)
        )
        for step in steps:
            if step.source >= 0:
                shape, device = run.shapes[step.unit], run.inputs[step.unit].device
                other.held[step.source] = torch.zeros(
                    shape, dtype=run.e.dtype, device=device
                )
        return other

    def take(self, run: Pass, steps: Sequence[Step], tape: Tape) -> Take:
        """Records all that is done with one micro-batch."""
        tape.begin()
        other = self.stand_in(run, steps)
        found: dict[TakeMoment, RecordedAction] = {}
        for step in steps:
            if _does_nothing(other, step):
                _act(
                    other, step
                )  # an empty graph cannot be recorded, but slices must have come back
                found[take_moment(step)] = RecordedAction((), None, _nothing)
                continue
            try:
                made, play = tape.record(partial(_act, other, step))
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                why = str(error).strip().partition("\n")[0]
                hint = "without recordings it may run: run.graphs = false, or no tape"
                raise RunError(
                    f"{step.instruction} cannot be recorded: {why}\n  {hint}"
                ) from error
            found[take_moment(step)] = RecordedAction(_into(other, step), made, play)
        _forget(other)
        return found

    # ------------------------------------------------------------ actions
    def forward(self, run: Pass, step: Step) -> None:
        """Plays a forward. The loss is copied: the next micro-batch of the take overwrites it."""
        x = run.tensor(step.source) if step.source >= 0 else run.inputs[step.unit]
        given = (x, *([run.labels[step.unit]] if step.last else []))
        draws = (step.stage, step.microbatch) in self.drawing
        y = self.draw(run, step, given) if draws else self.part(step)(*given)
        assert y is not None
        run.kept[step.value] = None
        run.give(step, y.clone() if step.last else y)
        self.give_back(run, step)

    def draw(self, run: Pass, step: Step, given: tuple[Tensor, ...]) -> Tensor | None:
        """Plays a forward that draws random numbers, which its backward will draw again.

        A CUDA graph takes them from where the generator stands when it is played, so setting that back is enough.
        """
        device = given[0].device
        with TURN:
            before = states(device)
            y = self.part(step)(*given)
            drawn = drawn_since(before, device)
        if drawn is not None:
            run.drawn[step.value] = drawn
        return y

    def backward(self, run: Pass, step: Step) -> None:
        """Plays a backward. What it makes is copied: it may still be on its way when the take is played again."""
        if step.value not in run.e.rests.idle:
            drawn = run.drawn.pop(step.forward, None)
            with (
                drawing_again(drawn, self.valid.device, step.instruction)
                if drawn is not None
                else nullcontext()
            ):
                made = self.part(step)(
                    *([] if step.last else [run.tensor(step.source)])
                )
            if made is not None:
                run.held[step.value] = made.clone()
        if not step.split:
            del run.kept[step.forward]
        self.give_back(run, step)

    def weights(self, run: Pass, step: Step) -> None:
        """Plays what the I has left."""
        self.part(step)()
        del run.kept[step.forward]

    def part(self, step: Step) -> RecordedAction:
        """The recording of an action."""
        return self.takes[step.stage, step.microbatch][take_moment(step)]

    def give_back(self, run: Pass, step: Step) -> None:
        """What was received has been copied."""
        for buffer in run.borrow(step):
            run.e.comm.give_back(buffer)


class Rest:
    """Gradients that stay where they are, since recordings add to them there."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        parameters = {
            id(p): p
            for module in modules
            for p in module.parameters()
            if p.requires_grad
        }
        self.parameters = list(parameters.values())
        self.before = [p.grad for p in self.parameters]
        self.places = [torch.zeros_like(p) for p in self.parameters]
        self.put()

    def put(self) -> None:
        """Every parameter's gradient is the one that stays."""
        for parameter, place in zip(self.parameters, self.places, strict=True):
            parameter.grad = place

    def clear(self) -> None:
        """Recording is over: gradients are what they were before it."""
        for parameter, before in zip(self.parameters, self.before, strict=True):
            parameter.grad = before
        self.before.clear()

    def lift(self, laid: Iterable[nn.Parameter]) -> None:
        """Gradients of earlier steps that others will lay aside must not lie where this step's will be."""
        mine = {
            id(p): place for p, place in zip(self.parameters, self.places, strict=True)
        }
        for parameter in laid:
            if parameter.grad is not None and parameter.grad is mine.get(id(parameter)):
                parameter.grad = parameter.grad.clone()

    def begin(self) -> None:
        """A new step adds to what is there."""
        empty = []
        for parameter, place in zip(self.parameters, self.places, strict=True):
            if parameter.grad is None:
                empty.append(place)
            elif parameter.grad is not place:
                place.copy_(parameter.grad)
        if empty:
            torch._foreach_zero_(empty)
        self.put()


# ---------------------------------------------------------------- which take a micro-batch has
def refuse_shares(modules: Mapping[int, nn.Module]) -> None:
    """Raises if a stage cannot be recorded: its weights are shared out over processes, which talk within an action."""
    for stage, module in modules.items():
        for name, parameter in module.named_parameters():
            if local_share(parameter) is not parameter:
                raise ShapeError(
                    f"stage {stage} cannot be recorded: {name} is shared out over processes; "
                    "use no mesh, or no tape"
                )


def stage_visits(turns: Sequence[Turn]) -> dict[StageVisit, list[Step]]:
    """All that each stage of a lane does with each micro-batch, in its order; places in the order of their first."""
    found: dict[StageVisit, list[Step]] = {}
    for turn in turns:
        if turn.step is not None:
            found.setdefault((turn.step.stage, turn.step.microbatch), []).append(
                turn.step
            )
    return found


def assign_takes(
    places: Mapping[StageVisit, Sequence[Step]],
    shapes: Sequence[MicroBatchShape],
    rests: Rests | None = None,
) -> dict[StageVisit, tuple[Kind, int]]:
    """For every place its kind, and which take of that kind: the first that is free."""
    found: dict[StageVisit, tuple[Kind, int]] = {}
    until: dict[
        Kind, list[int]
    ] = {}  # of each take, the last action of the place that has it now
    for place, steps in places.items():
        kind = recording_kind(steps, shapes[place[1]])
        if rests is not None and (rests.idle or rests.closed):
            first = steps[0].value
            kind = kind._replace(idle=first in rests.idle, closed=first in rests.closed)
        takes = until.setdefault(kind, [])
        number = next(
            (n for n, last in enumerate(takes) if last < steps[0].value), len(takes)
        )
        takes[number : number + 1] = [steps[-1].value]
        found[place] = kind, number
    return found


def recording_kind(steps: Sequence[Step], shape: MicroBatchShape) -> Kind:
    """What must be alike for one recording to serve."""
    done = tuple((*take_moment(step), step.split, step.last) for step in steps)
    return Kind(steps[0].stage, shape, done)


def take_moment(step: Step) -> TakeMoment:
    """Where in its take a step is."""
    return step.do, step.instruction.action.slice


# ---------------------------------------------------------------- the executor's own actions, on tensors that stay
def _walk(run: Pass, steps: Sequence[Step]) -> None:
    """All of them, once."""
    for step in steps:
        _act(run, step)
    _forget(run)


def _does_nothing(run: Pass, step: Step) -> bool:
    """Whether nothing trains up to this backward, or its I has left nothing for this W."""
    if step.do is Do.FORWARD:
        return False
    kept = run.kept.get(step.forward)
    empty = kept is None or kept.ledger is None or not kept.ledger.due
    return step.value in run.e.rests.idle or (step.do is Do.WEIGHTS and empty)


def _nothing() -> None:
    """Plays what does nothing."""


def _forget(run: Pass) -> None:
    """Where results came from: it would keep autograd's nodes alive, which belong to the stream of the recording."""
    run.held.update(
        {key: x.detach() for key, x in run.held.items() if isinstance(x, Tensor)}
    )


def _act(run: Pass, step: Step) -> Tensor | None:
    """One action, and what it makes."""
    with torch.enable_grad():
        run.act[step.do](step)
    record_in(None)
    if step.last and step.do is Do.FORWARD:
        return run.losses.pop()
    if step.do is Do.WEIGHTS:
        return None
    made = run.held.get(step.value)
    return made.detach() if isinstance(made, Tensor) else None


def _into(run: Pass, step: Step) -> tuple[Tensor, ...]:
    """Where what an action takes is copied to."""
    if step.do is Do.WEIGHTS:
        return ()
    taken = [run.tensor(step.source)] if step.source >= 0 else []
    if step.do is Do.FORWARD:
        taken = taken or [run.inputs[step.unit]]
        taken += [run.labels[step.unit]] if step.last else []
    return tuple(taken)
