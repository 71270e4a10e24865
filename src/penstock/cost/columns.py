"""A cost as columns of numbers, with one entry for each action of a schedule.

The simulator and the list scheduler work on these columns instead of asking the cost
about every single action. Actions with the same op, stage and tokens are a *cost class*: they
cost the same. So the cost is asked about one example of each class:

    action      0F0  1F0  0F1  1F1 ...
    class        0    1    0    1               of every action
    example     0F0  1F0                        one action of each class
    seconds      2    3    2    3               the answers about the examples, for every action
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.cost.cost import ActionBytes, Cost
from penstock.cost.network import busy_seconds
from penstock.ir.action import (
    BACKWARD,
    FORWARD,
    OFFLOAD,
    OPS,
    RELOAD,
    WEIGHTS,
    Action,
)
from penstock.ir.schedule import Schedule
from penstock.ir.table import Floats, Ints, Table

KEPT_ANSWERS = 2
MAX_KEPT_ACTIONS = 100_000  # the answers about larger schedules are not kept


@dataclass(frozen=True, slots=True)
class Columns:
    """Seconds and bytes of every action and of its message."""

    seconds: Floats
    gain: Floats  # bytes of activations that an action adds to its rank when it starts
    loss: Floats  # bytes that it frees there when it ends
    working: Floats  # bytes that exist only while it runs
    carried: Floats  # bytes of the keys and values of its tokens
    bytes: Floats  # size of its message; 0 if it sends none
    target: Ints  # the rank that receives its message; -1 if it sends none
    link: Ints  # number of the link that its message takes; -1 if it sends none
    latency: Floats
    wire: Floats  # seconds that its message occupies the link
    # If messages share channels, the seconds that its message keeps its sender, infinite if
    # until it has arrived, and a receiver that comes late.
    send: Floats
    receive: Floats
    pause: Floats  # seconds that its rank rests afterwards
    switch: float  # how much longer a forward takes after a backward, as a share of its time


_recent: ContextVar[tuple[tuple[Schedule, Cost, Columns], ...]] = ContextVar(
    "_recent", default=()
)


def columns(schedule: Schedule, cost: Cost) -> Columns:
    """Ask a cost about everything in a schedule.

    The last answers are kept, because a planner simulates, weighs and bounds one schedule
    after the other.
    """
    for known_schedule, known_cost, known in _recent.get():
        if known_schedule is schedule and known_cost is cost:
            return known
    answer = _ask_columns(schedule, cost)
    if schedule.actions <= MAX_KEPT_ACTIONS:
        _recent.set(((schedule, cost, answer), *_recent.get()[: KEPT_ANSWERS - 1]))
    return answer


def _ask_columns(schedule: Schedule, cost: Cost) -> Columns:
    table = schedule.table
    classes = _classes(schedule)
    held, kept, rebuilt, working, carried = _ask(schedule, classes, cost.bytes)
    loss = _losses(table, held, kept)
    extra = np.maximum(-loss, 0.0)  # an I may keep more for its W than its F left
    spike = np.maximum(rebuilt - extra, 0.0)  # held only while the action runs
    target = table.target()
    message = _ask(schedule, classes, cost.message)
    size = np.where(target >= 0, message, 0.0)
    link, latency, wire = _links(schedule, cost, target, size)
    send, receive = busy_seconds(cost.network.buffers, size, latency + wire)
    pause = _ask(schedule, classes, cost.pause)
    if cost.waits:
        pause = pause + latency + wire
    return Columns(
        seconds=_ask(schedule, classes, cost.seconds),
        gain=np.where(np.isin(table.kind, (FORWARD, RELOAD)), held, 0.0)
        + extra
        + spike,
        loss=np.maximum(loss, 0.0) + spike,
        working=working,
        carried=carried,
        bytes=size,
        target=target,
        link=link,
        latency=latency,
        wire=wire,
        send=send,
        receive=receive,
        pause=pause,
        switch=cost.switch,
    )


def seconds_in_lanes(schedule: Schedule, costs: Columns) -> Floats:
    """Seconds of every action in its lane: forwards take longer right after a backward."""
    if not costs.switch:
        return costs.seconds
    table = schedule.table
    is_forward = table.kind == FORWARD
    is_switch = np.zeros(len(table), dtype=np.bool_)
    is_switch[1:] = is_forward[1:] & ~is_forward[:-1]
    lane_starts = table.first[:-1]
    is_switch[lane_starts[lane_starts < len(table)]] = False
    return costs.seconds + np.where(is_switch, costs.switch * costs.seconds, 0.0)


def levels(schedule: Schedule, costs: Columns) -> Floats:
    """Bytes of activations on the rank while each action runs."""
    return schedule.table.levels(costs.gain, costs.loss)


# ---------------------------------------------------------------- classes of actions
class CostClasses(NamedTuple):
    """The classes of actions that occur, numbered from 0."""

    examples: list[Action]  # one action of each class
    of_action: Ints  # the class of each action


def _ask(
    schedule: Schedule,
    classes: CostClasses,
    ask: Callable[[Schedule, Action], float | ActionBytes],
) -> Floats:
    """One quantity for every action, or several in rows, asked once for each class."""
    answers = [ask(schedule, example) for example in classes.examples]
    rows: Floats = np.array(answers, dtype=np.float64).T[..., classes.of_action]
    return rows


def _classes(schedule: Schedule) -> CostClasses:
    """Number the combinations of op, stage, stage before and token range that occur.

    The stage before counts because a gradient is as large as the activation that came from there.
    """
    table = schedule.table
    known: dict[tuple[tuple[int, ...], int], int] = {}
    keys = [(one.cuts, one.tokens) for one in schedule.microbatches]
    cuts = np.array([known.setdefault(key, len(known)) for key in keys])
    later = np.flatnonzero(table.position > 0)
    microbatch, position = table.microbatch[later], table.position[later]
    slot = table.slot(FORWARD, microbatch, position - 1, table.slice[later])
    before = np.zeros(len(table), dtype=np.int64)
    before[later] = 1 + table.stage[table.at[slot]]
    stages = len(schedule.stages)
    places = (table.op, table.stage, before, cuts[table.microbatch], table.slice)
    sizes = (len(OPS), stages, 1 + stages, len(known), schedule.slices)
    code, codes = np.ravel_multi_index(places, sizes), math.prod(sizes)
    mostly_unused = codes > 4 * len(table) + 1024
    if mostly_unused:
        used, code = np.unique(code, return_inverse=True)
        codes = len(used)
    example = np.full(codes, -1, dtype=np.int64)
    example[code] = np.arange(len(code))
    classes = np.flatnonzero(example >= 0)
    class_of_code = np.zeros(codes, dtype=np.int64)
    class_of_code[classes] = np.arange(len(classes))
    return CostClasses(table.actions(example[classes]), class_of_code[code])


# ---------------------------------------------------------------- messages and memory
def _links(
    schedule: Schedule, cost: Cost, target: Ints, size: Floats
) -> tuple[Ints, Floats, Floats]:
    """The link of every action's message: its number, its latency, and the seconds that the message occupies it.

    Each pair of ranks that sends has a link. An action that sends nothing has link -1.
    """
    senders = np.flatnonzero(target >= 0)
    pair = schedule.table.rank[senders] * schedule.ranks + target[senders]
    pairs, own_link = np.unique(pair, return_inverse=True)
    ends = [divmod(one, schedule.ranks) for one in pairs.tolist()]
    latencies = np.array([cost.latency(*one) for one in ends])
    bandwidths = np.array([cost.bandwidth(*one) for one in ends])
    link = np.full(len(target), -1, dtype=np.int64)
    latency = np.zeros(len(target))
    wire = np.zeros(len(target))
    link[senders] = own_link
    latency[senders] = latencies[own_link]
    wire[senders] = size[senders] / bandwidths[own_link]
    return link, latency, wire


def _losses(table: Table, held: Floats, kept: Floats) -> Floats:
    """Bytes that each action frees.

    A B frees what its F left, an I all of that but what its W needs, and a W the rest. An O frees what it moves away.
    """
    loss = np.where(table.kind == OFFLOAD, held, 0.0)
    backward = np.flatnonzero(table.kind == BACKWARD)
    own_forward = table.at[table.slots[backward] - 1]
    loss[backward] = held[own_forward]
    is_split = table.then[backward] == WEIGHTS
    split = backward[is_split]
    loss[split] -= kept[split]
    weights = np.flatnonzero(table.kind == WEIGHTS)
    own_backward = table.at[table.slots[weights] - 1]
    loss[weights] = kept[own_backward]
    return loss
