"""Measures a model where it will run: about forty slices of one layer, embedding and head, the optimizer, the links.

    round 0   64  1024  16 ...  32         warm-up, thrown away
    round 1   512  16  128 ...  64         always in another order: what drifts (heat, a neighbour) hits all alike
    round 2   32  256  1024 ... 16         of each point the MEDIAN: what disturbs a slice here will disturb it in
    ...                                    training too, so the minimum would promise too much

All ranks measure at the same time, point by point, as they will train: cores share caches, memory and heat.
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
from penstock.cost.profile import Block, Point, Profile, block
from penstock.ir.plan import Facts
from penstock.measure.footprint import footprint
from penstock.measure.links import network_of
from penstock.measure.overhead import overhead_per_action
from penstock.measure.points import Where, measuring_points, tile_of
from penstock.measure.probe import PassTimes, Probe, Subject
from penstock.runtime.comm.comm import Comm
from penstock.runtime.process.malloc import keep_freed_memory
from penstock.runtime.tape import Tape

PROFILE_ROUNDS = 6
SECONDS_PER_POINT = (
    0.06  # seconds for which a point is at least measured in each round, but
)
MAX_PASSES = 8  # passes at most
MIN_RECORDED_PASSES = (
    3  # passes at least of what was recorded, which takes longer than a pass
)
ProgressText = Callable[[str], None]
Middle = Callable[[Sequence[float]], float]


@dataclass(frozen=True, slots=True)
class Subjects:
    """The pieces of a model: embedding, some layers in a row, head with its loss; and what the whole has."""

    embed: Subject
    layer: Subject
    head: Subject
    layers: int  # of the whole model
    model: Facts = ()
    device: Facts = ()


@dataclass(frozen=True, slots=True)
class How:
    """With whom, how often and where a subject is measured."""

    comm: Comm | None
    rounds: int
    watch: ProgressText
    where: tuple[Where, ...]
    middle: Middle
    tape: Tape | None


def measure(
    subjects: Subjects,
    comm: Comm | None = None,
    links: bool = False,
    rounds: int = PROFILE_ROUNDS,
    watch: ProgressText = lambda text: None,
    where: Sequence[Where] = (),
    middle: Middle = statistics.median,
    tape: Tape | None = None,
) -> Profile:
    """The profile of a model. With a `comm` all ranks call it, and get the mean of what they measured.

    `where`: the only slices to measure, if it is known which ones will run. `middle`: of all passes over a slice; the
    median to compare slices, the mean to add them up. `tape`: of actions that are recorded and replayed.
    """
    keep_freed_memory()
    how = How(comm, rounds, watch, tuple(where), middle, tape)
    collects = gc.isenabled()
    gc.disable()
    try:
        (embed, _), (layer, launch), (head, _) = (
            _block(name, one, how)
            for name, one in (
                ("embedding", subjects.embed),
                ("layer", subjects.layer),
                ("head", subjects.head),
            )
        )
    finally:
        if collects:
            gc.enable()
    watch("links")
    device, (rows, tokens, width) = (
        subjects.layer.inputs.device,
        subjects.layer.inputs.shape,
    )
    network = Network() if comm is None else network_of(comm, links, device)
    turn = (
        overhead_per_action(comm, rows, tokens, width)
        if comm is not None and device.type == "cpu"
        else 0.0
    )
    message = float(subjects.layer.inputs[:, 0].nbytes)
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
    """The share of a head's weights that are also the embedding's."""
    there = {id(parameter) for parameter in embed.parameters()}
    sizes = {id(parameter): parameter.nbytes for parameter in head.parameters()}
    return sum(size for one, size in sizes.items() if one in there) / max(
        sum(sizes.values()), 1
    )


def _block(name: str, subject: Subject, how: How) -> tuple[Block, float]:
    """What was measured, and how many times longer it took because kernels had to be launched."""
    probe = Probe(subject, how.tape)
    fitted, held_out = measuring_points(
        subject.tokens, subject.prefixes, tile_of(probe.device.type)
    )
    if how.where:
        fitted, held_out = _own(subject, how.where), []
    where = [*fitted, *held_out]
    seconds = _mean(_times(name, probe, where, how) / subject.layers, how.comm)
    launch = round(probe.seconds / probe.kernels, 2) if probe.kernels else 1.0
    prints, share = footprint(probe), subject.layers * subject.tokens
    points = [
        Point(i, j, f, b, back, w, held_out=number >= len(fitted))
        for number, ((i, j), (f, b, back, w)) in enumerate(
            zip(where, seconds.tolist(), strict=True)
        )
    ]
    weights, update = prints.weights / subject.layers, prints.update / subject.layers
    return block(
        points, prints.held / share, prints.kept / share, weights, update
    ), launch


def _own(subject: Subject, given: Sequence[Where]) -> list[Where]:
    """Of slices that will run, those that differ for a subject."""
    return sorted(
        {(tokens, prefix if subject.prefixes else 0) for tokens, prefix in given}
    )


def _times(name: str, probe: Probe, points: Sequence[Where], how: How) -> Tensor:
    """Seconds of F, B, I and W at each point, (points, 4)."""
    found: list[list[PassTimes]] = [[] for _ in points]
    passes, least = [1] * len(points), 1 if how.tape is None else MIN_RECORDED_PASSES
    ready = how.comm.barrier if how.comm is not None else lambda: None
    for turn in range(1 + how.rounds):
        for number in random.Random(turn).sample(
            range(len(points)), len(points)
        ):  # alike on all ranks
            how.watch(
                f"{name}: round {turn} of {how.rounds}, {points[number][0]} tokens after {points[number][1]}"
            )
            times = probe.times(*points[number], passes[number], ready)
            if turn:
                found[number] += times
            else:
                passes[number] = min(
                    max(int(SECONDS_PER_POINT / sum(times[0]) + 1), least), MAX_PASSES
                )
    each = [
        [how.middle(column) for column in zip(*some, strict=True)] for some in found
    ]
    return torch.tensor(each, dtype=torch.float64)


def _mean(seconds: Tensor, comm: Comm | None) -> Tensor:
    """Over all ranks."""
    if comm is None:
        return seconds
    comm.add(seconds, tuple(range(comm.ranks))).wait()
    return seconds / comm.ranks
