"""Measures a model where it will run: slices of a layer, of embedding and head, the optimizer, and the links.

    round 0   64  1024  16 ...  32         warm-up, not counted
    round 1   512  16  128 ...  64         always in another order: drift (heat, other users) affects all points alike
    round 2   32  256  1024 ... 16         each point gets its MEDIAN: what disturbs a slice here will disturb it in
    ...                                    training too, so the minimum would promise too much

All ranks measure at the same time, point by point, as they will train, because cores share
caches, memory and heat. If there are fewer processors than ranks, each finds its caches as the others have left them.

How much the rounds differ says how far the next ones may be from their middle: that is the range of every forecast.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log, sqrt
from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock.cost.network import Network
from penstock.cost.profile import (
    FASTEST_ROUND,
    REST,
    SLOWEST_ROUND,
    Block,
    Point,
    Profile,
    RowProfiles,
    block,
    tile_of,
)
from penstock.errors import ShapeError
from penstock.ir.action import WHOLE_OPS
from penstock.ir.plan import Facts
from penstock.measure.links import measured_network
from penstock.measure.overhead import Overhead, measured_overhead
from penstock.measure.probe import (
    PassTimes,
    Probe,
    Subject,
    footprint,
    load_of,
    switch_share,
)
from penstock.runtime.comm.comm import Comm
from penstock.runtime.process.machine import keep_freed_memory
from penstock.runtime.recorder import collector_paused
from penstock.runtime.replay import Tape

PROFILE_ROUNDS = 6

# A point is measured for this long in each round, but with at most MAX_PASSES passes.
SECONDS_PER_POINT = 0.06

MAX_PASSES = 8

# A quick measurement of a small model takes about this long in all, in QUICK_ROUNDS rounds.
QUICK_ROUNDS = 3

QUICK_SECONDS = 2.0

# A model has many layers, so that their errors matter most.
QUICK_BLOCK_SHARES = {"embedding": 0.1, "layer": 0.6, "head": 0.3}

# Recording a slice takes longer than a pass, so it should serve several passes.
MIN_RECORDED_PASSES = 3

ProgressText = Callable[[str], None]

SlicePoint = tuple[int, int]  # the tokens of a slice, and of the prefix before it

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
    """With which ranks, how often and where the pieces of a model are measured.

    With a `comm`, all ranks must measure, and all get the mean of what they measured. With a `tape`, actions are
    recorded and replayed. A `quick` measurement takes few points, and together about QUICK_SECONDS unless single passes
    take longer.
    """

    comm: Comm | None = None
    links: bool = False  # whether the link of every pair is measured
    rounds: int = PROFILE_ROUNDS
    watch: ProgressText = lambda text: None
    where: tuple[SlicePoint, ...] = ()  # slices, if it is known which ones will run
    # Combines all passes over a slice: the median is best to compare slices, the mean to add them up.
    middle: Middle = statistics.median
    tape: Tape | None = None
    quick: bool = False
    crowd: float = 1.0  # ranks for each processor

    def ready(self) -> None:
        """Wait until all ranks are about to measure the same."""
        if self.comm is not None:
            self.comm.barrier()

    def mean(self, seconds: Tensor) -> Tensor:
        """The mean of what the ranks have measured."""
        if self.comm is None:
            return seconds
        self.comm.add(seconds, tuple(range(self.comm.ranks))).wait()
        return seconds / self.comm.ranks


def measure(subjects: Subjects, setup: Setup) -> Profile:
    """Measure the profile of a model."""
    return measure_rows([subjects], setup).measured[0]


def measure_rows(subjects: Sequence[Subjects], setup: Setup) -> RowProfiles:
    """Measure the profiles of a model with several numbers of rows in a micro-batch.

    `subjects` has the same modules for each number of rows, the fewest rows first. Each
    round measures all of them in random order, so that what disturbs the machine for a
    while does not favour one number of rows.
    """
    keep_freed_memory()
    with collector_paused():
        embeds = _measure_block("embedding", [each.embed for each in subjects], setup)
        layers = _measure_block("layer", [each.layer for each in subjects], setup)
        heads = _measure_block("head", [each.head for each in subjects], setup)
    setup.watch("links")
    comm = setup.comm
    first = subjects[0]
    device = first.layer.inputs.device
    network = Network()
    if comm is not None:
        network = measured_network(comm, setup.links, device)
    counts = ((embeds, 1), (layers, first.layers), (heads, 1))
    low, high = spread_of([(one[0], count) for one, count in counts])
    overheads = [Overhead(0.0, 0.0) for _ in subjects]
    if comm is not None and device.type == "cpu":
        shapes = [each.layer.inputs.shape for each in subjects]
        overheads = [measured_overhead(comm, *shape) for shape in shapes]
    facts = (
        *first.device,
        ("recorded", setup.tape is not None),
        ("launch", layers[0].launch),
        (FASTEST_ROUND, low),
        (SLOWEST_ROUND, high),
        (REST, overheads[0].step),
    )
    shared = shared_weights(first.embed.module, first.head.module)
    profiles = []
    for each, embed, layer, head, overhead in zip(
        subjects, embeds, layers, heads, overheads, strict=True
    ):
        inputs = each.layer.inputs
        rows, tokens, _ = inputs.shape
        profile = Profile(
            each.layers,
            tokens,
            rows,
            float(inputs[:, 0].nbytes),
            embed.block,
            layer.block,
            head.block,
            network,
            each.model,
            facts,
            overhead.action,
            head.block.weights * shared,
            layer.switch,
        )
        profiles.append(profile)
    return RowProfiles(tuple(profiles))


def shared_weights(embed: nn.Module, head: nn.Module) -> float:
    """The share of the head's weights that the embedding has too."""
    embedded = {id(parameter) for parameter in embed.parameters()}
    owned = list(head.parameters())
    shared = [parameter for parameter in owned if id(parameter) in embedded]
    return sum(one.nbytes for one in shared) / max(sum(one.nbytes for one in owned), 1)


class MeasuredBlock(NamedTuple):
    """A block of a model, and what else its probe has found."""

    block: Block
    launch: float  # how many times longer it takes because of kernel launches
    switch: float  # how much longer a forward takes right after a backward
    rounds: Sequence[float]  # the time of each round, as a share of their middle


def _measure_block(
    name: str, subjects: Sequence[Subject], setup: Setup
) -> list[MeasuredBlock]:
    """Measure one block with each number of rows."""
    probes = [Probe(subject, setup.tape, setup.crowd) for subject in subjects]
    fitted, held_out = _points_of(probes[0], setup)
    where = [*fitted, *held_out]
    seconds, rounds = _measure_points(name, probes, where, setup)
    times = setup.mean(seconds / subjects[0].layers).tolist()
    shares = setup.mean(rounds).tolist()
    memory = None
    blocks = []
    for probe, rows in zip(probes, times, strict=True):
        points = []
        for number, (tokens, prefix) in enumerate(where):
            is_held_out = number >= len(fitted)
            f, b, i, w = rows[number]
            points.append(Point(tokens, prefix, f, b, i, w, is_held_out))
        memory = footprint(probe, memory)
        subject = probe.subject
        layer_tokens = subject.layers * subject.tokens
        measured = block(
            points,
            memory.held / layer_tokens,
            memory.kept / layer_tokens,
            memory.weights / subject.layers,
            memory.update / subject.layers,
        )
        launch = round(probe.seconds / probe.kernels, 2) if probe.kernels else 1.0
        switch = _switch_of(probe, measured, setup) if name == "layer" else 0.0
        blocks.append(MeasuredBlock(measured, launch, switch, shares))
    return blocks


def spread_of(
    blocks: Sequence[tuple[MeasuredBlock, float]],
) -> tuple[float, float]:
    """The fastest and the slowest round of a model with so many of each block, as shares of what was measured."""
    low = high = total = 0.0
    for each, count in blocks:
        seconds = sum(point.F + point.B for point in each.block.points) * count
        total += seconds
        low += min(each.rounds) * seconds
        high += max(each.rounds) * seconds
    return min(1.0, low / total), max(1.0, high / total)


def _switch_of(probe: Probe, measured: Block, setup: Setup) -> float:
    """How much longer a forward takes right after a backward, as a share of its time.

    Recorded actions run without the processor, so what its caches hold does not matter.
    """
    if setup.tape is not None or probe.device.type != "cpu":
        return 0.0
    setup.watch("layer: forwards after backwards")
    subject = probe.subject
    pair = sum(measured.fit(op).curve.of(subject.tokens, 0) for op in WHOLE_OPS)
    share = switch_share(probe, subject.layers * pair, setup.ready)
    return float(setup.mean(torch.tensor([share], dtype=torch.float64)))


def _points_of(
    probe: Probe, setup: Setup
) -> tuple[Sequence[SlicePoint], Sequence[SlicePoint]]:
    """The slices to fit curves to, and those to hold out."""
    subject = probe.subject
    if setup.where:  # without prefixes, only lengths matter
        sliced = subject.prefixes
        where = {(tokens, prefix if sliced else 0) for tokens, prefix in setup.where}
        return sorted(where), []
    choose = quick_points if setup.quick else measuring_points
    return choose(subject.tokens, subject.prefixes, tile_of(probe.device.type))


def _measure_points(
    name: str, probes: Sequence[Probe], points: Sequence[SlicePoint], setup: Setup
) -> tuple[Tensor, Tensor]:
    """The seconds of F, B, I and W of each probe at each point, in the shape (probes, points, 4).

    Then the time of each round, as a share of what all of them say.
    """
    visits = [(probe, point) for probe in probes for point in points]
    measured: list[list[PassTimes]] = [[] for _ in visits]
    by_round: list[float] = []  # the seconds of all visits
    min_passes = 1 if setup.tape is None else MIN_RECORDED_PASSES
    seconds_per_point = SECONDS_PER_POINT
    if setup.quick:
        share = QUICK_BLOCK_SHARES[name] * QUICK_SECONDS
        seconds_per_point = share / (len(visits) * setup.rounds)
    passes = [1] * len(visits)
    numbers = range(len(visits))
    for turn in range(1 + setup.rounds):
        begun = [(probe.processor_seconds, probe.elapsed_seconds) for probe in probes]
        seconds_of_round = 0.0
        # The seed is the same on all ranks, and so is the order.
        for number in random.Random(turn).sample(numbers, len(numbers)):
            probe, (tokens, prefix) = visits[number]
            setup.watch(
                f"{name}: round {turn} of {setup.rounds}, {tokens} tokens after {prefix}"
            )
            times = probe.times(tokens, prefix, passes[number], setup.ready)
            seconds_of_round += statistics.fmean(map(sum, times))
            if turn:
                measured[number] += times
            else:
                fitting = int(seconds_per_point / sum(times[0]) + 1)
                passes[number] = min(max(fitting, min_passes), MAX_PASSES)
        if turn:
            by_round.append(seconds_of_round * load_of(probes, begun))
    rows = []
    for times in measured:
        columns = zip(*times, strict=True)
        rows.append([setup.middle(column) for column in columns])
    seconds = torch.tensor(rows, dtype=torch.float64) * load_of(probes)
    shares = torch.tensor(by_round, dtype=torch.float64) / seconds.sum()
    shape = (len(probes), len(points), len(PassTimes._fields))
    return seconds.reshape(shape), shares


# ---------------------------------------------------------------- points
# Chooses which slices to measure: about forty, by length and prefix, that tell most about all possible slices.
#
#     prefix
#     L |h
#       |o  .            o  fitted: logarithmically spaced lengths, with no, a small, a medium and the longest prefix
#       |o  h  o         h  held out: lengths and prefixes in between
#       |o  o  h  o      .  impossible: slice and prefix together are longer than the sequence
#       +o--o--o--o--o   tokens
#
# The lengths come from halving the sequence again and again, because even cuts fall there. They
# are rounded to tiles, because kernels work in tiles, and good cuts follow them. The lengths
# that are held out lie between two of these, and are multiples of 8. On a GPU all lengths and
# prefixes are multiples of its kernels' tile, as cuts should be: there a slice of 448 tokens
# takes as long as one of 512, or longer.

MIN_TOKENS = 16

HALVINGS = 6

LENGTH_STEP_TOKENS = 64  # tokens to which lengths are rounded

GRID_STEPS = 128  # prefixes are multiples of this fraction of the sequence

# Prefixes as shares of the longest one: of fitted lengths, and of held-out ones by turns.
MEASURED_PREFIX_SHARES = (0.0, 0.1, 0.5, 1.0)

HELD_OUT_SHARES = ((0.0, 0.25), (0.25, 0.75))

# The parts of a sequence that a quick measurement fits, and those that it holds out.
QUICK_PARTS = (1, 2, 4, 16)

QUICK_HELD_OUT_PARTS = (6, 3)


def measuring_points(
    tokens: int, sliceable: bool = True, tile: int = 1
) -> tuple[list[SlicePoint], list[SlicePoint]]:
    """Choose slices of a sequence to fit a curve to, and others to hold out of the fit.

    If the module cannot be sliced, all prefixes are empty. All lengths are multiples of
    `tile`, except for the whole sequence if that is not one.

    >>> fitted, held_out = measuring_points(1024)
    >>> len(fitted), len(held_out), fitted[:3], held_out[:2]
    (29, 14, [(16, 0), (16, 96), (16, 504)], [(24, 0), (24, 248)])
    """
    if tokens < MIN_TOKENS:
        raise ShapeError(
            f"{tokens} tokens are too few to measure slices of; use at least {MIN_TOKENS}"
        )
    lengths = _fitted_lengths(tokens, tile)
    between = _held_out_lengths(lengths, tile)
    fitted: set[SlicePoint] = set()
    for length in lengths:
        fitted |= _with_prefixes(length, MEASURED_PREFIX_SHARES, tokens, tile)
    held_out: set[SlicePoint] = set()
    for number, length in enumerate(between):
        held_out |= _with_prefixes(length, HELD_OUT_SHARES[number % 2], tokens, tile)
    if not sliceable:
        fitted = {(length, prefix) for length, prefix in fitted if prefix == 0}
        held_out = {(length, 0) for length in between}
    return sorted(fitted), sorted(held_out - fitted)


def quick_points(
    tokens: int, sliceable: bool = True, tile: int = 1
) -> tuple[list[SlicePoint], list[SlicePoint]]:
    """Choose about ten slices, for a measurement that must not take long.

    They are a subset of those of `measuring_points`: the whole sequence, a half, a quarter
    and a sixteenth of it with no prefix and with the longest one, and two slices between
    them that are held out.

    >>> quick_points(128)
    ([(8, 0), (8, 120), (32, 0), (32, 96), (64, 0), (64, 64), (128, 0)], [(24, 26), (48, 20)])
    """
    fitted, held_out = measuring_points(tokens, sliceable, tile)
    lengths = sorted({length for length, _ in fitted})
    chosen = {_nearest(lengths, tokens / part) for part in QUICK_PARTS}
    few = {(length, 0) for length in chosen}
    if sliceable:
        few |= {(length, tokens - length) for length in chosen}
    between = sorted({length for length, _ in held_out})
    judges = set()
    for number, part in enumerate(QUICK_HELD_OUT_PARTS if between else ()):
        length = _nearest(between, tokens / part)
        choices = sorted(prefix for size, prefix in held_out if size == length)
        judges.add((length, choices[-1] if number else choices[0]))
    return sorted(few), sorted(judges - few)


def _nearest(lengths: Sequence[int], target: float) -> int:
    """The length whose logarithm is nearest to that of a target."""
    return min(lengths, key=lambda length: abs(log(length / target)))


def _fitted_lengths(tokens: int, tile: int) -> list[int]:
    """Halves of halves of the sequence, three quarters of it, and all of it."""
    targets = [0.75 * tokens]
    targets += [tokens / 2**n for n in range(1, HALVINGS + 1) if tokens >= 2**n]
    lengths = {tokens}
    for target in targets:
        length = _round_to_tile(target, max(LENGTH_STEP_TOKENS, tile))
        if tile <= length < tokens:
            lengths.add(length)
    return sorted(lengths)


def _held_out_lengths(lengths: Sequence[int], tile: int) -> list[int]:
    """Lengths between each two neighbors, in the middle of their logarithms."""
    between = set()
    for shorter, longer in pairwise(lengths):
        multiple = 8 if shorter >= 16 else 1
        between.add(_round_to_tile(sqrt(shorter * longer), max(multiple, tile)))
    return sorted(between - set(lengths))


def _with_prefixes(
    length: int, shares: Sequence[float], tokens: int, tile: int
) -> set[SlicePoint]:
    """A length with prefixes that are shares of the longest possible one.

    The longest prefix is exact; the others are rounded down to a grid.
    """
    longest = tokens - length
    grid = max(tokens // GRID_STEPS, tile)
    points = set()
    for share in shares:
        prefix = int(share * longest) // grid * grid
        points.add((length, longest if share == 1.0 else prefix))
    return points


def _round_to_tile(length: float, tile: int) -> int:
    """The nearest multiple of a tile, which is halved until it is not longer than `length`."""
    while tile > max(length, 1):
        tile //= 2
    return int(length / tile + 0.5) * tile
