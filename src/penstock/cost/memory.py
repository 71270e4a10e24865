"""All bytes that a device holds at its fullest moment, and what is left of a memory for activations.

    weights       weights, gradients and optimizer state, always; under autocast also copies of the matrices in its type
    activations   what forwards leave for their backwards, and what an I leaves for its W
    carried       keys and values of sliced sequences: one buffer of all tokens from the first slice's forward on, and
                  one of their gradients from the last slice's backward on, both until the first slice's backward
    working       what exists only while an action runs: logits and their gradients, inner gradients of a layer
    messages      one message on its way in, and a few on their way out
    sums          copies of the gradients that are summed over ranks, from the end of the last backwards on

Recorded actions (CUDA graphs) of a lane share one memory, in which later actions use what earlier ones have freed, as
others do. Only in very long lanes (`MAX_RECORDED_ACTIONS`) every stage has as many sets of buffers as it has
micro-batches in flight, and a set never serves another stage.

On eight workers of an H200 (`docs/results/h200/schedules-8.json`), torch allocated 3 to 20% more on the ranks
without embedding and head, 8% in the median: leave a tenth of a memory free.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from penstock.cost.columns import Columns, columns, levels
from penstock.cost.cost import Cost
from penstock.ir.action import BACKWARD, FORWARD
from penstock.ir.program import MAX_RECORDED_ACTIONS
from penstock.ir.schedule import Schedule
from penstock.ir.sums import SharedGradients, shared_gradients
from penstock.ir.table import Floats, Ints

# Messages that a rank holds besides its activations: the runtime waits for the oldest send before
# it starts more than this, and on GPUs it receives one at a time.
MAX_SENDS_IN_FLIGHT = 16
RECEIVES_IN_FLIGHT = 1
# A set of recordings has its own copy of each result that it sends (the output, and the gradient of
# the input) and of that result's counterpart, which it receives.
COPIES_PER_MESSAGE = 2


@dataclass(frozen=True, slots=True, eq=False)
class DeviceMemory:
    """The bytes of each rank by use, at its fullest moment."""

    weights: Floats
    activations: Floats  # of `Timeline.peak_activations`
    more: Floats  # carried, working and recorded beside them, at the fullest moment
    messages: Floats
    sums: Floats

    @property
    def beside(self) -> Floats:
        """All bytes of each rank but its activations and sums."""
        beside: Floats = self.weights + self.messages + self.more
        return beside

    @property
    def total(self) -> Floats:
        """All bytes of each rank. The copies for sums come when most activations are gone."""
        busy = self.activations + self.more + self.messages
        total: Floats = self.weights + np.maximum(busy, self.sums)
        return total


def device_bytes(schedule: Schedule, cost: Cost, recorded: bool = False) -> Floats:
    """The bytes that each rank needs at its fullest moment, everything included."""
    return device_memory(schedule, cost, recorded).total


def activation_caps(
    schedule: Schedule, cost: Cost, memory: float, recorded: bool = False
) -> Floats:
    """The bytes of activations that each rank has room for in `memory` bytes; negative if not even the rest fits.

    They compare with `Timeline.peak_activations`. The rest is what this schedule needs beside its
    activations; other orders of the same stages and cuts need about as much.
    """
    use = device_memory(schedule, cost, recorded)
    caps: Floats = memory - use.beside
    # The copies for sums must fit too, however few activations there are.
    return np.where(use.weights + use.sums > memory, np.minimum(caps, -1.0), caps)


def device_memory(
    schedule: Schedule, cost: Cost, recorded: bool = False
) -> DeviceMemory:
    """The bytes of each rank, by use."""
    costs = columns(schedule, cost)
    held = levels(schedule, costs)
    activations = schedule.table.peaks(held)
    beside = carried_bytes(schedule, costs.carried) + costs.working
    everything = schedule.table.peaks(held + beside)
    if recorded:
        long = np.diff(schedule.table.first) > MAX_RECORDED_ACTIONS
        if long.any():
            takes = _recorded_bytes(schedule, costs, beside)
            everything = np.where(long, takes, everything)
    return DeviceMemory(
        weights=weights_of(schedule, cost),
        activations=activations,
        more=everything - activations,
        messages=_message_bytes(schedule, costs),
        sums=_sum_bytes(schedule, cost),
    )


def weights_of(schedule: Schedule, cost: Cost) -> Floats:
    """The bytes of weights on each rank.

    Stages of one part on a rank share their weights, and so do the first and the last part
    their tied weights.
    """
    stage_of = {
        (stage.rank, stage.part): number for number, stage in enumerate(schedule.stages)
    }
    weights = np.zeros(schedule.ranks)
    for (rank, _), number in stage_of.items():
        weights[rank] += cost.weights(schedule, number).weights
    last = schedule.parts - 1
    if last == 0:
        return weights
    tied = cost.tied(schedule).weights
    for rank in range(schedule.ranks):
        if (rank, 0) in stage_of and (rank, last) in stage_of:
            weights[rank] -= tied
    return weights


# ---------------------------------------------------------------- what slices carry
def carried_bytes(schedule: Schedule, carried: Floats) -> Floats:
    """The bytes that sliced sequences carry from slice to slice, on each action's rank while it runs.

    `held` counts the keys and values of the slices so far. Their buffer has all tokens of the
    sequence, so this counts the tokens that are still to come, or already gone, and the gradients.
    """
    table = schedule.table
    sliced = table.slices[table.microbatch] > 1
    if not sliced.any():
        return np.zeros(len(table))
    own = np.where(sliced, carried, 0.0)
    whole = _of_visit(schedule, np.where(table.kind == FORWARD, own, 0.0))
    is_forward = table.kind == FORWARD
    is_backward = table.kind == BACKWARD
    is_first = table.slice == 0
    gain = np.where(is_forward, np.where(is_first, whole, 0.0) - own, 0.0)
    loss = np.where(is_backward, np.where(is_first, whole, 0.0) - own, 0.0)
    return schedule.table.levels(gain, loss) + gathered_gradients(schedule, whole)


def gathered_gradients(schedule: Schedule, whole: Floats) -> Floats:
    """The bytes of the gradients of keys and values on each action's rank while it runs.

    A sequence gathers them from the backward of its last slice, which computes them for all
    tokens before it, to the backward of its first slice. `whole` has the bytes of a whole
    sequence on the stage of each action.
    """
    table = schedule.table
    slices = table.slices[table.microbatch]
    size = np.where((slices > 1) & (table.kind == BACKWARD), whole, 0.0)
    begins = np.where(table.slice == slices - 1, size, 0.0)
    ends = np.where(table.slice == 0, size, 0.0)
    return schedule.table.levels(begins, ends)


def _of_visit(schedule: Schedule, own: Floats) -> Floats:
    """For each action, the sum of a quantity over all actions of its micro-batch on its stage."""
    table = schedule.table
    place = table.microbatch.astype(np.int64) * len(schedule.stages) + table.stage
    sums = np.bincount(place, weights=own)
    total: Floats = sums[place]
    return total


# ---------------------------------------------------------------- messages, sums, recordings
def _message_bytes(schedule: Schedule, costs: Columns) -> Floats:
    """The largest messages on their way to and from each rank."""
    table = schedule.table
    incoming = np.zeros(schedule.ranks)
    senders = np.flatnonzero(costs.target >= 0)
    np.maximum.at(incoming, costs.target[senders], costs.bytes[senders])
    sends = np.bincount(table.rank[senders], minlength=schedule.ranks)
    in_flight = np.minimum(sends, MAX_SENDS_IN_FLIGHT)
    size: Floats = in_flight * table.peaks(costs.bytes) + RECEIVES_IN_FLIGHT * incoming
    return size


def gradient_sums(
    schedule: Schedule, cost: Cost
) -> Iterator[tuple[SharedGradients, float]]:
    """The sums of gradients of a step, in the order in which they begin, with the bytes of each."""
    tied = cost.tied(schedule).gradients
    stage_of_part = {stage.part: number for number, stage in enumerate(schedule.stages)}
    for shared in shared_gradients(schedule, tied > 0):
        size = tied
        if len(shared.parts) == 1:
            stage = stage_of_part[shared.parts[0]]
            size = cost.weights(schedule, stage).gradients
        yield shared, size


def _sum_bytes(schedule: Schedule, cost: Cost) -> Floats:
    """Copies of the gradients that each rank sums with others; all wait for the end of the step."""
    copies = np.zeros(schedule.ranks)
    for shared, size in gradient_sums(schedule, cost):
        copies[list(shared.ranks)] += size
    return copies


def recordings_of(schedule: Schedule) -> Ints:
    """How many sets of recordings each stage needs: its micro-batches in flight at the fullest moment."""
    table = schedule.table
    visit = table.stage.astype(np.int64) * len(schedule.microbatches) + table.microbatch
    _, first = np.unique(visit, return_index=True)
    _, from_end = np.unique(visit[::-1], return_index=True)
    begins = np.zeros(len(table), dtype=np.int64)
    ends = np.zeros(len(table), dtype=np.int64)
    begins[first] = 1
    ends[len(table) - 1 - from_end] = 1
    # On each stage as many begin as end, so one sum serves all stages, one after the other.
    order = np.argsort(table.stage, kind="stable")
    in_flight = np.cumsum(begins[order]) - np.cumsum(ends[order]) + ends[order]
    most = np.zeros(len(schedule.stages), dtype=np.int64)
    np.maximum.at(most, table.stage[order], in_flight)
    return most


def _recorded_bytes(schedule: Schedule, costs: Columns, beside: Floats) -> Floats:
    """The bytes of all recordings of each rank: for each set, all of one micro-batch.

    Forwards leave their activations there, and backwards of recomputed parts build them again.
    """
    table = schedule.table
    whole = _of_visit(schedule, costs.gain)
    messages = COPIES_PER_MESSAGE * _of_visit(schedule, costs.bytes)
    of_stage = np.zeros(len(schedule.stages))
    np.maximum.at(of_stage, table.stage, whole + messages + beside)
    total = np.zeros(schedule.ranks)
    for stage, sets in enumerate(recordings_of(schedule).tolist()):
        total[schedule.stages[stage].rank] += sets * of_stage[stage]
    return total
