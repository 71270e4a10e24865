"""Times F, B, I and W of a module on slices of a sequence, just as the executor runs them.

    sequence   |---- prefix ----|-- tokens --|      |     keys and values of the prefix are there, as is the buffer to
                                  ^ the slice             which the gradients of later slices were added

One sequence serves all slices: it is run once, and a slice then writes the same rows again. On a CPU several passes are
in flight, as micro-batches are in a step: what an action reads has left the caches by then. With a tape every action is
recorded and its replays are timed, as in a step with recorded actions.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock.carry import Carry, Slice
from penstock.runtime.backward import Ledger, make_deferrable, record_in
from penstock.runtime.executor import Loss
from penstock.runtime.tape import Tape
from penstock.runtime.torch_internals import sleep_on_gpu, walk_back

GPU_CYCLES_PER_SECOND = 2e9  # of a GPU in a second, at most
MAX_SLEEP_SECONDS = 0.1  # seconds for which it sleeps at most: the first launch of a kernel loads it, and takes far longer
WARM_UP_SECONDS = 0.15  # seconds of work before it is timed
Act = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Subject:
    """A module to be timed, and what goes into it: a whole sequence, of which slices are taken."""

    module: nn.Module
    inputs: Tensor
    layers: int = 1  # how many of the model's it holds; 1 for embedding and head
    prefixes: bool = False  # whether a slice takes longer the more tokens are before it
    loss: Loss | None = None  # of the head
    labels: Tensor | None = None
    autocast: torch.dtype | None = None
    starts: Tensor | None = (
        None  # of packed documents: of each token the first one of its document
    )

    @property
    def tokens(self) -> int:
        """Of the sequence."""
        return self.inputs.shape[1]


class PassTimes(NamedTuple):
    """Seconds of one pass."""

    F: float
    B: float
    I: float  # noqa: E741
    W: float


class Probe:
    """A subject, ready to be timed; with a tape as recorded actions."""

    def __init__(self, subject: Subject, tape: Tape | None = None) -> None:
        self.subject, self.device, self.tape = subject, subject.inputs.device, tape
        self.carry = Carry(subject.tokens, subject.starts)
        self.made: dict[
            Slice, Tensor
        ] = {}  # what slices became that have not come back yet
        self.launches = deque(
            [0.0], maxlen=4
        )  # seconds that the host took to launch the last passes, and a half
        self.kernels = self.seconds = (
            0.0  # of a GPU, all that was timed: without and with the wait for launches
        )
        make_deferrable(subject.module)
        for parameter in subject.module.parameters():
            parameter.grad = torch.zeros_like(
                parameter
            )  # there already, as from the second slice of a step on
        if subject.prefixes:
            self.fill()

    def fill(self) -> None:
        """Runs the sequence once, in two slices, so that every row is there."""
        with torch.no_grad(), self.cast():
            for begin, end in (
                (0, self.subject.tokens // 2),
                (self.subject.tokens // 2, self.subject.tokens),
            ):
                self.subject.module(
                    self.subject.inputs[:, begin:end], self.open(end - begin, begin)
                )

    def cast(self) -> torch.autocast:
        """In the type that is asked for: the rows of the keys must have it too."""
        return torch.autocast(
            self.device.type,
            self.subject.autocast,
            enabled=self.subject.autocast is not None,
        )

    def times(
        self,
        tokens: int,
        prefix: int,
        passes: int = 1,
        ready: Callable[[], None] = lambda: None,
    ) -> list[PassTimes]:
        """So many passes, each with a whole backward and then with a split one; `ready` is called before the first."""
        if self.tape is None:
            ready()
            flights = [passes] if self.device.type == "cpu" else [1] * passes
            return [
                one for count in flights for one in self.flight(tokens, prefix, count)
            ]
        for _, act in self.acts(tokens, prefix):
            self.tape.rehearse(act)
        self.tape.begin()
        recorded = []
        for name, act in self.acts(tokens, prefix):
            used = (
                act,
                tuple(self.carry.gradients.values()),
            )  # they must stay where they are
            recorded.append((name, self.tape.record(act)[1], used))
        ready()
        self.settle([play for _, play, _ in recorded])
        found = [
            _times((name, self.clock(play)) for name, play, _ in recorded)
            for _ in range(passes)
        ]
        del recorded
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # the recordings' memory is theirs alone
        return found

    def flight(self, tokens: int, prefix: int, count: int) -> list[PassTimes]:
        """So many passes side by side: all their forwards, then all their backwards."""
        lanes = [self.acts(tokens, prefix) for _ in range(count)]
        rounds = zip(*lanes, strict=True)
        found = [[(name, self.clock(act)) for name, act in acts] for acts in rounds]
        return [_times(iter(one)) for one in zip(*found, strict=True)]

    def settle(self, plays: Sequence[Act]) -> None:
        """A GPU is faster after a pause, until its power is spent: it works for a while before it is timed."""
        until = time.perf_counter() + WARM_UP_SECONDS
        while self.device.type == "cuda" and time.perf_counter() < until:
            for play in plays:
                play()
            torch.cuda.synchronize()

    def acts(self, tokens: int, prefix: int) -> Iterator[tuple[str, Act]]:
        """What is timed, in its order; each is done before the next one is asked for."""
        piece = self.open(tokens, prefix)
        yield "F", partial(self.forward, piece)
        yield "B", partial(self.backward, piece, self.gradient(piece))
        piece, ledger = self.open(tokens, prefix), Ledger()
        yield "again", partial(self.forward, piece, ledger)
        ledger.open = True
        yield "I", partial(self.backward, piece, self.gradient(piece))
        if ledger.due:
            yield "W", ledger.settle

    def forward(self, piece: Slice, ledger: Ledger | None = None) -> None:
        """Runs a slice."""
        x = self.subject.inputs[:, piece.begin : piece.end].detach()
        if x.is_floating_point():
            x.requires_grad_()
        record_in(ledger)
        with self.cast():
            self.made[piece] = self.run(x, piece)
        record_in(None)

    def run(self, x: Tensor, piece: Slice) -> Tensor:
        """A whole sequence of one document goes without a piece, as it does through a schedule without slices."""
        given = self.subject
        whole = piece.end - piece.begin == given.tokens and given.starts is None
        y: Tensor = given.module(x) if whole else given.module(x, piece)
        if given.loss is None or given.labels is None:
            return y
        return given.loss(y, given.labels[:, piece.begin : piece.end]) / given.tokens

    def gradient(self, piece: Slice) -> Tensor:
        """Of a slice's y: one for a loss, else anything."""
        y = self.made[piece]
        return torch.ones_like(y) if self.subject.loss else torch.randn_like(y)

    def backward(self, piece: Slice, gradient: Tensor) -> None:
        """Back over a slice that ran, as if all after it had come back."""
        self.carry.left = piece.end
        roots, gradients = self.carry.back(piece)
        walk_back((self.made.pop(piece), *roots), (gradient, *gradients))
        self.carry.close(piece)

    def open(self, tokens: int, prefix: int) -> Slice:
        """A slice as if all before it had gone forward; with a buffer for gradients of those after it."""
        carry = self.carry
        carry.reached = prefix
        piece = carry.open(prefix, prefix + tokens)
        carry.reached = carry.tokens
        carry.gradients.clear()
        if piece.end < carry.tokens:
            for key, rows in carry.rows.items():
                carry.gradients[key] = torch.zeros_like(
                    rows, dtype=torch.promote_types(rows.dtype, torch.float32)
                )
        return piece

    def clock(self, act: Act) -> float:
        """Seconds that it takes. On a GPU those of its kernels, by the GPU's own clock, or of their launch if that is
        longer. It is kept asleep until the host has launched everything, as it is in a step, where the host runs ahead.
        """
        begin = time.perf_counter()
        if self.device.type != "cuda":
            act()
            return time.perf_counter() - begin
        sleep_on_gpu(int(GPU_CYCLES_PER_SECOND * max(self.launches)))
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        act()
        end.record()
        launched = time.perf_counter() - begin
        self.launches.append(min(1.5 * launched, MAX_SLEEP_SECONDS))
        end.synchronize()
        kernels = float(start.elapsed_time(end)) / 1e3
        self.kernels, self.seconds = (
            self.kernels + kernels,
            self.seconds + max(kernels, launched),
        )
        return max(kernels, launched)


def _times(found: Iterator[tuple[str, float]]) -> PassTimes:
    """The actions by name; an embedding has no W."""
    seconds = dict(found)
    return PassTimes(seconds["F"], seconds["B"], seconds["I"], seconds.get("W", 0.0))
