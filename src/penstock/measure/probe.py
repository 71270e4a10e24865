"""Times F, B, I and W of a module on slices of a sequence, just as the executor runs them.

    sequence   |---- prefix ----|-- tokens --|      |     keys and values of the prefix are there, and so is the buffer
                                  ^ the slice             to which the gradients of later slices were added

One sequence serves all slices: it runs once, and each slice then writes the same rows again. On
a CPU several passes are in flight, like the micro-batches of a step, so that the inputs of an
action have left the caches by the time it runs. With a tape, every action is recorded and its
replays are timed, as in a step with recorded actions.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from operator import sub
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.models.slice import Carry, Slice
from penstock.runtime.backward import (
    DeferredWork,
    Ledger,
    cast_weights,
    make_deferrable,
    record_in,
)
from penstock.runtime.loss import ChunkedLoss, Loss, tensors_held
from penstock.runtime.passed_values import has_gradient
from penstock.runtime.recorder import Clock, Moment
from penstock.runtime.replay import Tape
from penstock.torch_internals import (
    multiply_all,
    norms_of_all,
    original_module,
    sleep_on_gpu,
    walk_back,
)

# The first launch of a kernel loads it, which takes far longer than any sleep should.
MAX_SLEEP_SECONDS = 0.1

WARM_UP_SECONDS = 0.15  # of work before recorded actions are timed

LAUNCHES_KEPT = 4

CLOCK_TRIALS = 5

CLOCK_TRIAL_SECONDS = 2e-5

LAUNCH_MARGIN = 1.5

TimedAction = Callable[[], None]

MakeOptimizers = Callable[[nn.Module], Sequence[torch.optim.Optimizer]]

MEASURED_RATE = 1e-9  # learning rate of measured updates, which must not change weights


def plain_adamw(module: nn.Module) -> list[torch.optim.Optimizer]:
    """Return an AdamW over all parameters of a module."""
    return [torch.optim.AdamW(module.parameters(), lr=MEASURED_RATE)]


@dataclass(frozen=True, slots=True)
class Subject:
    """A module to be timed, and its input: a whole sequence, from which slices are taken."""

    module: nn.Module
    inputs: Tensor
    layers: int = 1  # how many of the model's layers it has; 1 for embedding and head
    prefixes: bool = False  # whether a slice takes longer after a longer prefix
    loss: Loss | None = None  # for the head
    labels: Tensor | None = None
    autocast: torch.dtype | None = None
    # For packed documents, the first token of each token's document.
    starts: Tensor | None = None
    # Makes the optimizers that update the module, over the parameters that train.
    optimizers: MakeOptimizers = plain_adamw

    @property
    def tokens(self) -> int:
        """The length of the sequence."""
        return self.inputs.shape[1]


class PassTimes(NamedTuple):
    """The seconds of each action of one pass."""

    F: float
    B: float
    I: float  # noqa: E741
    W: float


class Probe:
    """A subject that is ready to be timed; with a tape, as recorded actions.

    `crowd` processes for each processor time theirs at the same time, so that an action waits for the others.
    """

    def __init__(
        self, subject: Subject, tape: Tape | None = None, crowd: float = 1.0
    ) -> None:
        self.subject = subject
        self.crowd = crowd
        self.device = subject.inputs.device
        self.tape = tape
        self.carry = Carry(subject.tokens, subject.starts)
        self.outputs: dict[Slice, Tensor] = {}  # of slices that did not go back yet
        self.ledgers: dict[Slice, Ledger | None] = {}  # of their forwards
        # How long the host took to launch the last actions, with a margin.
        self.launches = deque([0.0], maxlen=LAUNCHES_KEPT)
        # All that was timed on a GPU, without and with waiting for launches.
        self.kernels = 0.0
        self.seconds = 0.0
        # On a CPU with one thread: all processor time, and the time until it was done.
        self.by_thread = self.device.type == "cpu" and has_thread_clock()
        self.processor_seconds = 0.0
        self.elapsed_seconds = 0.0
        make_deferrable(subject.module)
        self.casts = cast_weights([subject.module], subject.autocast)
        if self.casts is not None:
            self.casts.refresh()
        # The gradients exist already, as they do from the second slice of a step on.
        for parameter in subject.module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        module: Any = original_module(subject.module)
        self.unsliceable = bool(getattr(module, "unsliceable", ""))
        if subject.prefixes:
            self.fill()

    def fill(self) -> None:
        """Run the sequence once, in two slices, so that every row has been written."""
        tokens = self.subject.tokens
        half = tokens // 2
        with torch.no_grad(), self.autocast():
            for begin, end in ((0, half), (half, tokens)):
                x = self.subject.inputs[:, begin:end]
                self.subject.module(x, self.open(end - begin, begin))

    def autocast(self) -> torch.autocast:
        """A context with the subject's autocast type, which the rows of keys need too."""
        dtype = self.subject.autocast
        return torch.autocast(self.device.type, dtype, enabled=dtype is not None)

    def times(
        self,
        tokens: int,
        prefix: int,
        passes: int = 1,
        ready: Callable[[], None] = lambda: None,
    ) -> list[PassTimes]:
        """Time passes over a slice, each with a whole backward and then with a split one.

        `ready` is called before the first one.
        """
        if self.tape is not None:
            return self.times_of_replays(self.tape, tokens, prefix, passes, ready)
        ready()
        if self.device.type == "cpu":
            return self.times_of_flight(tokens, prefix, passes)
        self.times_of_flight(tokens, prefix, 1)  # says how long launches take
        return self.times_in_a_row(tokens, prefix, passes)

    def times_in_a_row(self, tokens: int, prefix: int, count: int) -> list[PassTimes]:
        """Time passes as a GPU runs them in a step: one action after the other, without a rest.

        A GPU that rests between actions is faster than it can stay. It has worked for a while before the first
        pass, and the host reads no time before the last pass is launched. So the GPU waits for the host only where
        launches take longer than kernels, as in a step.
        """
        clock = Clock([self.subject.module])
        clock.begin()
        end = time.perf_counter() + WARM_UP_SECONDS
        while time.perf_counter() < end:
            for _, action in self.actions(tokens, prefix):
                action()
        names: list[str] = []
        moments: list[Moment] = []  # the begin and the end of each action
        for _ in range(count):
            for name, action in self.actions(tokens, prefix):
                names.append(name)
                moments.append(clock.now())
                action()
                moments.append(clock.now())
        seconds = clock.seconds(moments)
        spans = list(map(sub, seconds[1::2], seconds[::2]))
        each = len(names) // count  # actions of a pass
        return [
            _pass_times(zip(names[at : at + each], spans[at : at + each], strict=True))
            for at in range(0, len(names), each)
        ]

    def times_of_replays(
        self,
        tape: Tape,
        tokens: int,
        prefix: int,
        passes: int,
        ready: Callable[[], None],
    ) -> list[PassTimes]:
        """Record the actions of a slice, and time their replays."""
        for _, action in self.actions(tokens, prefix):
            tape.rehearse(action)
        tape.begin()
        replays: list[tuple[str, TimedAction]] = []
        in_use = []  # a recording's tensors must stay at their addresses
        for name, action in self.actions(tokens, prefix):
            in_use.append((action, tuple(self.carry.gradients.values())))
            replays.append((name, tape.record(action)[1]))
        ready()
        self.warm_up([replay for _, replay in replays])
        times = []
        for _ in range(passes):
            seconds = [(name, self.clock(replay)) for name, replay in replays]
            times.append(_pass_times(seconds))
        del replays, in_use
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # nothing else can use the recordings' memory
        return times

    def times_of_flight(self, tokens: int, prefix: int, count: int) -> list[PassTimes]:
        """Time passes side by side: all their forwards, then all their backwards."""
        passes = [self.actions(tokens, prefix) for _ in range(count)]
        seconds: list[list[tuple[str, float]]] = [[] for _ in passes]
        for same_actions in zip(*passes, strict=True):
            for number, (name, action) in enumerate(same_actions):
                seconds[number].append((name, self.clock(action)))
        return [_pass_times(named) for named in seconds]

    def times_of_turns(self, count: int, lead: int) -> tuple[list[float], list[float]]:
        """Time the forwards and the backwards of `count` whole sequences.

        `lead` sequences have gone forward before the first one goes back. From then on,
        backwards and forwards take turns.
        """
        passes = [self.actions(self.subject.tokens, 0) for _ in range(count)]
        forwards: list[float] = []
        backwards: list[float] = []
        for number in range(count + lead):
            if number >= lead:
                _, backward = next(passes[number - lead])
                backwards.append(self.clock(backward))
            if number < count:
                _, forward = next(passes[number])
                forwards.append(self.clock(forward))
        return forwards, backwards

    def warm_up(self, replays: Sequence[TimedAction]) -> None:
        """Make a GPU work for a while: after a pause it is faster than it can stay."""
        end = time.perf_counter() + WARM_UP_SECONDS
        while self.device.type == "cuda" and time.perf_counter() < end:
            for replay in replays:
                replay()
            torch.cuda.synchronize()

    def actions(self, tokens: int, prefix: int) -> Iterator[tuple[str, TimedAction]]:
        """The actions of a pass; each must have run before the next one is taken."""
        piece = self.open(tokens, prefix)
        whole = None if self.casts is None else self.ledger(splits=False)
        yield "F", partial(self.forward, piece, whole)
        if whole is not None:
            whole.begin_backward()
        yield "B", partial(self.backward, piece, self.gradient(piece))
        piece = self.open(tokens, prefix)
        ledger = self.ledger(splits=True)
        yield "again", partial(self.forward, piece, ledger)
        ledger.begin_backward()
        yield "I", partial(self.backward, piece, self.gradient(piece))
        if ledger.due:
            yield "W", ledger.settle

    def ledger(self, splits: bool) -> Ledger:
        """A ledger for one forward."""
        return Ledger(splits=splits, copies=self.casts)

    def forward(self, piece: Slice, ledger: Ledger | None = None) -> None:
        """Run the forward of a slice."""
        x = self.subject.inputs[:, piece.begin : piece.end].detach()
        if has_gradient(x.dtype):
            x.requires_grad_()
        record_in(ledger)
        with self.autocast():
            self.outputs[piece] = self.run(x, piece)
        record_in(None)
        self.ledgers[piece] = ledger

    def run(self, x: Tensor, piece: Slice) -> Tensor:
        """Call the module, and its loss if it has one.

        A whole sequence of one document gets no piece, as in a schedule without slices. A module that
        cannot be sliced takes the slice for a shorter sequence.
        """
        subject = self.subject
        length = piece.end - piece.begin
        if self.unsliceable and subject.starts is not None:
            piece = Carry(length, subject.starts[:, :length]).open(0, length)
        whole = length == subject.tokens or self.unsliceable
        whole = whole and subject.starts is None
        labels = None
        if subject.loss is not None and subject.labels is not None:
            labels = subject.labels[:, piece.begin : piece.end]
            if isinstance(subject.loss, ChunkedLoss):
                own_piece = None if whole else piece
                share = subject.loss.share(
                    subject.module, x, own_piece, labels, subject.tokens
                )
                if share is not None:
                    return share
        y: Tensor = subject.module(x) if whole else subject.module(x, piece)
        if subject.loss is None or labels is None:
            return y
        return subject.loss(y, labels) / subject.tokens

    def gradient(self, piece: Slice) -> Tensor:
        """A gradient for a slice's output: one for a loss, else random numbers."""
        y = self.outputs[piece]
        return torch.ones_like(y) if self.subject.loss else torch.randn_like(y)

    def backward(self, piece: Slice, gradient: Tensor) -> None:
        """Run the backward of a slice, as if all later slices had gone back already."""
        self.carry.left = piece.end
        roots, gradients = self.carry.back(piece)
        output = self.outputs.pop(piece)
        # Activation checkpointing inside a module runs forwards during this walk.
        record_in(self.ledgers.pop(piece, None))
        walk_back((output, *roots), (gradient, *gradients))
        record_in(None)
        self.carry.close(piece)

    def open(self, tokens: int, prefix: int) -> Slice:
        """A slice, as if all earlier slices had gone forward already.

        It gets a buffer for the gradients of later slices, if there can be any.
        """
        carry = self.carry
        carry.reached = prefix
        piece = carry.open(prefix, prefix + tokens)
        carry.reached = carry.tokens
        carry.gradients.clear()
        if piece.end < carry.tokens:
            for key, rows in carry.rows.items():
                dtype = torch.promote_types(rows.dtype, torch.float32)
                carry.gradients[key] = torch.zeros_like(rows, dtype=dtype)
        return piece

    @property
    def load(self) -> float:
        """How many times longer actions took than their share of the processors allows: 1 on a quiet machine."""
        return load_of([self])

    def clock(self, action: TimedAction) -> float:
        """The seconds that an action takes.

        On a CPU with one thread these are seconds of the processor, so that a point does
        not look slow because another program ran just then. `load` says by how much all
        actions together took longer. On a GPU these are the seconds of its kernels, by the GPU's own clock, or of their
        launch if that takes longer. The GPU sleeps until the host has launched everything,
        because in a step the host runs ahead, too.
        """
        begin = time.perf_counter()
        if self.by_thread:
            return self.processor_time(action)
        if self.device.type != "cuda":
            action()
            return time.perf_counter() - begin
        sleep_on_gpu(max(self.launches))
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        action()
        end.record()
        launch = time.perf_counter() - begin
        self.launches.append(min(LAUNCH_MARGIN * launch, MAX_SLEEP_SECONDS))
        end.synchronize()
        kernels = float(start.elapsed_time(end)) / 1e3
        seconds = max(kernels, launch)
        self.kernels += kernels
        self.seconds += seconds
        return seconds

    def processor_time(self, action: TimedAction) -> float:
        """The processor time of an action that runs in this thread."""
        begin = time.perf_counter()
        processor_begin = time.thread_time()
        action()
        seconds = time.thread_time() - processor_begin
        self.elapsed_seconds += time.perf_counter() - begin
        self.processor_seconds += seconds
        return seconds


def load_of(
    probes: Sequence[Probe], since: Sequence[tuple[float, float]] = ()
) -> float:
    """How many times longer all actions of some probes took than their share of the processors allows.

    `since` has the processor time and the elapsed time of each probe that do not count any more.
    Processes that time their own actions meanwhile are no load: they will be there in a step, too,
    and whoever predicts the step makes them wait for each other.
    """
    processor = sum(probe.crowd * probe.processor_seconds for probe in probes)
    elapsed = sum(probe.elapsed_seconds for probe in probes)
    for probe, (processor_before, elapsed_before) in zip(probes, since, strict=False):
        processor -= probe.crowd * processor_before
        elapsed -= elapsed_before
    return max(1.0, elapsed / processor) if processor else 1.0


def has_thread_clock() -> bool:
    """Whether actions run in one thread, and the clock of a thread's time is fine enough."""
    return torch.get_num_threads() == 1 and _is_thread_clock_fine()


@cache
def _is_thread_clock_fine() -> bool:
    """Whether the clock of a thread's processor time moves within a short time.

    Some systems count it in ticks of several milliseconds, whatever they announce.
    """
    for _ in range(CLOCK_TRIALS):
        processor_begin = time.thread_time()
        end = time.perf_counter() + CLOCK_TRIAL_SECONDS
        while time.perf_counter() < end:
            pass
        if time.thread_time() <= processor_begin:
            return False
    return True


def _pass_times(named: Iterable[tuple[str, float]]) -> PassTimes:
    """The times of a pass from those of its actions; an embedding has no W.

    A forward takes longer if it notes for a W what each layer needs. That belongs to the
    price of a split backward, so it counts as a part of I.
    """
    seconds = dict(named)
    noting = max(0.0, seconds["again"] - seconds["F"])
    input_gradient = seconds["I"] + noting
    return PassTimes(seconds["F"], seconds["B"], input_gradient, seconds.get("W", 0.0))


# ---------------------------------------------------------------- footprint
# Measures the memory of a module: activations from F to B, gradients kept from I to W, and weights.
#
# Tensors that share memory count once. Weights do not count as activations.

TIMED_UPDATES = 5  # steps of the optimizer

CACHE_SCRUB_BYTES = 64 << 20  # written to empty the caches


@dataclass(frozen=True, slots=True)
class Footprint:
    """The bytes of a module on a whole sequence, and the seconds of its optimizer's step."""

    held: float  # from F to the end of the backward
    kept: float  # from I to the end of W
    message: float  # the module's output
    weights: float  # with gradients and optimizer state of those that train
    update: float  # seconds


def footprint(probe: Probe, same_weights: Footprint | None = None) -> Footprint:
    """Run a probe's whole sequence once, and measure what it stores.

    If the same weights were measured before, they are not measured again.
    """
    saved: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    piece = probe.open(probe.subject.tokens, 0)
    ledger = probe.ledger(splits=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        probe.forward(piece, ledger)
    weights = _storages(probe.subject.module.parameters())
    if probe.casts is not None:
        weights |= _storages(probe.casts.copies.values())
    saved += tensors_held(probe.outputs[piece])
    held = _activation_bytes(saved, weights)
    message = probe.outputs[piece].nbytes
    saved.clear()
    ledger.begin_backward()
    probe.backward(piece, probe.gradient(piece))
    deferred: list[Tensor] = []
    for work in ledger.due:
        deferred += _held_tensors(work)
    kept = _activation_bytes(deferred, weights)
    deferred.clear()
    ledger.settle()
    if same_weights is not None:
        return replace(same_weights, held=held, kept=kept, message=message)
    return Footprint(held, kept, message, *_measure_update(probe))


def _held_tensors(work: DeferredWork) -> Iterator[Tensor]:
    """The tensors that a deferred piece of work keeps alive."""
    for cell in getattr(work, "__closure__", None) or ():
        content = cell.cell_contents
        several = content if isinstance(content, list | tuple) else (content,)
        yield from (one for one in several if isinstance(one, Tensor))


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """The bytes of the tensors' memory, by address."""
    sizes = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
    return sizes


def _activation_bytes(tensors: Iterable[Tensor], weights: dict[int, int]) -> float:
    """The memory of tensors, without that of weights."""
    sizes = _storages(tensors)
    return float(sum(sizes[address] for address in sizes if address not in weights))


def _measure_update(probe: Probe) -> tuple[float, float]:
    """The bytes of weights, gradients and optimizer state, and the seconds of an update.

    An update begins with the norm of the gradients and their clipping. The next step casts the
    weights again, which counts as part of the update. The seconds are a median without the first
    step, which creates the state. The caches are emptied before each step, because in training a
    whole step lies between two updates.
    """
    module: nn.Module = probe.subject.module
    optimizers = probe.subject.optimizers(module)

    def update() -> None:
        gradients = [one.grad for one in module.parameters() if one.grad is not None]
        norms_of_all(gradients)
        multiply_all(gradients, 1.0)
        for optimizer in optimizers:
            optimizer.step()
        if probe.casts is not None:
            probe.casts.refresh()

    seconds = []
    for _ in range(1 + TIMED_UPDATES):
        torch.zeros(CACHE_SCRUB_BYTES, dtype=torch.uint8, device=probe.device)
        seconds.append(probe.clock(update) * probe.load)
    tensors: list[Tensor] = list(module.parameters())
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            gradients = [parameter.grad for parameter in group["params"]]
            tensors += [grad for grad in gradients if grad is not None]
        for state in optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
    total = sum(_storages(tensors).values())
    return float(total), statistics.median(seconds[1:])


# ---------------------------------------------------------------- switching
# Measures how much longer a forward takes right after a backward than after another forward.
#
#     in a row    F0 F1 F2 F3 F4 B0 B1 B2 B3 B4     each action follows one of its own kind
#     by turns    F0 F1 B0 F2 B1 F3 B2 F4 B3 B4     most actions follow one of the other kind
#
# The likely reason is that an action finds in the caches what the one before it has left there.
#
# Other measurements run actions of one kind in a row. So the difference is what a schedule pays besides if its ranks
# often change between forwards and backwards, as in 1F1B. With small actions it decides between 1F1B and GPipe.
# The speed of a machine changes from second to second, so both are compared within each round.

SEQUENCES = 5  # in flight

LEAD = 2  # sequences that have gone forward before backwards and forwards take turns

MAX_SWITCH_ROUNDS = 16

SWITCH_SECONDS = 0.6  # for all rounds, unless one round takes longer


def switch_share(probe: Probe, seconds: float, ready: Callable[[], None]) -> float:
    """Return how much longer a forward takes after a backward, as a share of its time.

    `seconds` is about how long a forward and its backward take; all ranks must pass the
    same number. `ready` is called before each flight.
    """
    rounds = int(SWITCH_SECONDS / max(2 * SEQUENCES * seconds, 1e-9))
    rounds = min(max(rounds, 1), MAX_SWITCH_ROUNDS)
    shares = []
    for _ in range(rounds):
        forward, pair = _pair_seconds(probe, SEQUENCES, ready)
        _, by_turns = _pair_seconds(probe, LEAD, ready)
        shares.append((by_turns - pair) / forward)
    return max(0.0, statistics.median(shares))


def _pair_seconds(
    probe: Probe, lead: int, ready: Callable[[], None]
) -> tuple[float, float]:
    """The median time of a forward, and that of a forward and a backward, of those that take turns with this lead.

    Those at the ends of a flight, which are the same in all flights, do not count.
    """
    ready()
    forwards, backwards = probe.times_of_turns(SEQUENCES, lead)
    forward = statistics.median(forwards[LEAD:])
    return forward, forward + statistics.median(backwards[1 : SEQUENCES - LEAD + 1])
