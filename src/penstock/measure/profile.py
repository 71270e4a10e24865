"""Measures a model where it will run: slices of a layer, of embedding and head, the optimizer, and the links.

    round 0   64  1024  16 ...  32         warm-up, not counted
    round 1   512  16  128 ...  64         always in another order: drift (heat, other users) affects all points alike
    round 2   32  256  1024 ... 16         each point gets its MEDIAN: what disturbs a slice here will disturb it in
    ...                                    training too, so the minimum would promise too much

All ranks measure at the same time, point by point, as they will train, because cores share
caches, memory and heat.
"""

from __future__ import annotations

import gc
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.cost.network import Network
from penstock.cost.profile import Block, Point, Profile, block, tile_of
from penstock.ir.plan import Facts
from penstock.measure.footprint import footprint
from penstock.measure.links import network_of
from penstock.measure.overhead import overhead_per_action
from penstock.measure.points import SlicePoint, measuring_points
from penstock.measure.probe import PassTimes, Probe, Subject
from penstock.runtime.comm.comm import Comm
from penstock.runtime.process.malloc import keep_freed_memory
from penstock.runtime.tape import Tape

PROFILE_ROUNDS = 6
# A point is measured for this long in each round, but with at most MAX_PASSES passes.
SECONDS_PER_POINT = 0.06
MAX_PASSES = 8
# Recording a slice takes longer than a pass, so it should serve several passes.
MIN_RECORDED_PASSES = 3
ProgressText = Callable[[str], None]
Middle = Callable[[Sequence[float]], float]


@dataclass(frozen=True, slots=True)
class Subjects:
    """The pieces of a model to be measured, and facts about the whole model."""

    embed: Subject
    layer: Subject  # one or several layers in a row
    head: Subject  # with its loss
    layers: int  # of the whole model
    model: Facts = ()
    device: Facts = ()


@dataclass(frozen=True, slots=True)
class Setup:
    """With which ranks, how often and where the subjects are measured."""

    comm: Comm | None
    rounds: int
    watch: ProgressText
    where: tuple[SlicePoint, ...]
    middle: Middle
    tape: Tape | None


def measure(
    subjects: Subjects,
    comm: Comm | None = None,
    links: bool = False,
    rounds: int = PROFILE_ROUNDS,
    watch: ProgressText = lambda text: None,
    where: Sequence[SlicePoint] = (),
    middle: Middle = statistics.median,
    tape: Tape | None = None,
) -> Profile:
    """Measure the profile of a model.

    With a `comm`, all ranks must call this, and all get the mean of what they measured.
    `links` asks for the link of every pair. `where` lists the slices to measure, if it is
    known which ones will run. `middle` combines all passes over a slice: the median is best
    to compare slices, the mean to add them up. With a `tape`, actions are recorded and
    replayed.
    """
    keep_freed_memory()
    setup = Setup(comm, rounds, watch, tuple(where), middle, tape)
    collects = gc.isenabled()
    gc.disable()
    try:
        embed, _ = _measure_block("embedding", subjects.embed, setup)
        layer, launch = _measure_block("layer", subjects.layer, setup)
        head, _ = _measure_block("head", subjects.head, setup)
    finally:
        if collects:
            gc.enable()
    watch("links")
    inputs = subjects.layer.inputs
    rows, tokens, width = inputs.shape
    network = Network()
    turn = 0.0
    if comm is not None:
        network = network_of(comm, links, inputs.device)
        if inputs.device.type == "cpu":
            turn = overhead_per_action(comm, rows, tokens, width)
    message = float(inputs[:, 0].nbytes)
    facts = (*subjects.device, ("recorded", tape is not None), ("launch", launch))
    tied = head.weights * shared_weights(subjects.embed.module, subjects.head.module)
    return Profile(
        subjects.layers,
        tokens,
        rows,
        message,
        embed,
        layer,
        head,
        network,
        subjects.model,
        facts,
        turn,
        tied,
    )


def shared_weights(embed: nn.Module, head: nn.Module) -> float:
    """The share of the head's weights that the embedding has too."""
    embedded = {id(parameter) for parameter in embed.parameters()}
    total = 0
    shared = 0
    for parameter in head.parameters():
        total += parameter.nbytes
        if id(parameter) in embedded:
            shared += parameter.nbytes
    return shared / max(total, 1)


def _measure_block(name: str, subject: Subject, setup: Setup) -> tuple[Block, float]:
    """Measure a subject, and how many times longer it takes because of kernel launches."""
    probe = Probe(subject, setup.tape)
    if setup.where:
        fitted = _distinct_points(subject, setup.where)
        held_out: list[SlicePoint] = []
    else:
        tile = tile_of(probe.device.type)
        fitted, held_out = measuring_points(subject.tokens, subject.prefixes, tile)
    where = [*fitted, *held_out]
    seconds = _measure_points(name, probe, where, setup) / subject.layers
    rows = _mean_over_ranks(seconds, setup.comm).tolist()
    launch = round(probe.seconds / probe.kernels, 2) if probe.kernels else 1.0
    points = []
    for number, (tokens, prefix) in enumerate(where):
        f, b, i, w = rows[number]
        is_held_out = number >= len(fitted)
        points.append(Point(tokens, prefix, f, b, i, w, is_held_out))
    memory = footprint(probe)
    layer_tokens = subject.layers * subject.tokens
    measured = block(
        points,
        memory.held / layer_tokens,
        memory.kept / layer_tokens,
        memory.weights / subject.layers,
        memory.update / subject.layers,
    )
    return measured, launch


def _distinct_points(subject: Subject, where: Sequence[SlicePoint]) -> list[SlicePoint]:
    """The slices that differ for a subject; without prefixes, only lengths matter."""
    points = set()
    for tokens, prefix in where:
        points.add((tokens, prefix if subject.prefixes else 0))
    return sorted(points)


def _measure_points(
    name: str, probe: Probe, points: Sequence[SlicePoint], setup: Setup
) -> Tensor:
    """The seconds of F, B, I and W at each point, in the shape (points, 4)."""
    measured: list[list[PassTimes]] = [[] for _ in points]
    min_passes = 1 if setup.tape is None else MIN_RECORDED_PASSES
    passes = [1] * len(points)
    numbers = range(len(points))
    ready = setup.comm.barrier if setup.comm is not None else lambda: None
    for turn in range(1 + setup.rounds):
        # The seed is the same on all ranks, and so is the order.
        for number in random.Random(turn).sample(numbers, len(numbers)):
            tokens, prefix = points[number]
            setup.watch(
                f"{name}: round {turn} of {setup.rounds}, {tokens} tokens after {prefix}"
            )
            times = probe.times(tokens, prefix, passes[number], ready)
            if turn:
                measured[number] += times
            else:
                fitting = int(SECONDS_PER_POINT / sum(times[0]) + 1)
                passes[number] = min(max(fitting, min_passes), MAX_PASSES)
    rows = []
    for times in measured:
        columns = zip(*times, strict=True)
        rows.append([setup.middle(column) for column in columns])
    return torch.tensor(rows, dtype=torch.float64)


def _mean_over_ranks(seconds: Tensor, comm: Comm | None) -> Tensor:
    if comm is None:
        return seconds
    comm.add(seconds, tuple(range(comm.ranks))).wait()
    return seconds / comm.ranks
