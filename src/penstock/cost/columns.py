"""A cost as columns of numbers, with one entry for each action of a schedule.

The simulator and the list scheduler work on these columns instead of asking the cost
about every single action.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np

from penstock.cost.cost import Cost
from penstock.ir.action import OP_CODES, Action, Op
from penstock.ir.needs import BACKWARD, FORWARD, WEIGHTS
from penstock.ir.schedule import Schedule
from penstock.ir.table import Floats, Ints, Table

KEPT_ANSWERS = 2
MAX_KEPT_ACTIONS = 100_000  # the answers about larger schedules are not kept
ABSENT = -2  # marks a stage that a path does not visit


@dataclass(frozen=True, slots=True)
class Columns:
    """Seconds and bytes of every action and of its message."""

    seconds: Floats
    gain: Floats  # bytes of activations that an action adds to its rank when it starts
    loss: Floats  # bytes that it frees there when it ends
    bytes: Floats  # size of its message; 0 if it sends none
    link: Ints  # number of the link that its message takes; -1 if it sends none
    latency: Floats
    wire: Floats  # seconds that its message occupies the link
    pause: Floats  # seconds that its rank rests afterwards
    switch: float  # share of its time that a forward takes longer after a backward


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
    codes = _codes(schedule)
    questions = _questions(schedule, codes)
    codes_by_path = _codes_by_path(schedule, codes)
    by_path = questions
    if codes_by_path is not codes:
        by_path = _questions(schedule, codes_by_path)
    target = table.target()
    message = _column(schedule, by_path, cost.message)
    size = np.where(target >= 0, message, 0.0)
    held = _column(schedule, questions, cost.held)
    kept = _column(schedule, questions, cost.kept)
    rebuilt = _column(schedule, questions, cost.rebuilt)
    loss = _losses(table, held, kept)
    extra = np.maximum(-loss, 0.0)  # an I may keep more for its W than its F left
    spike = np.maximum(rebuilt - extra, 0.0)  # held only while the action runs
    link, latency, wire = _links(schedule, cost, target, size)
    return Columns(
        seconds=_column(schedule, questions, cost.seconds),
        gain=np.where(table.kind == FORWARD, held, 0.0) + extra + spike,
        loss=np.maximum(loss, 0.0) + spike,
        bytes=size,
        link=link,
        latency=latency,
        wire=wire,
        pause=_column(schedule, questions, cost.pause),
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
    """Bytes of activations on the rank while each action runs.

    A rank does one thing at a time, so the order of its lane decides, not the clock.
    """
    first = schedule.table.first
    level = np.empty(len(costs.gain))
    for begin, end in zip(first[:-1].tolist(), first[1:].tolist(), strict=True):
        freed = np.cumsum(costs.loss[begin:end])
        level[begin:end] = np.cumsum(costs.gain[begin:end])
        level[begin + 1 : end] -= freed[:-1]
    return level


def _codes(schedule: Schedule) -> tuple[Ints, Ints]:
    """Number the combinations of op, stage and tokens that occur.

    Returns one example action for each combination, and each action's combination.
    """
    table = schedule.table
    stages = len(schedule.stages)
    first_range, ranges = _token_ranges(schedule)
    token_range = first_range[table.microbatch] + table.slice
    op_and_stage = table.op.astype(np.int64) * stages + table.stage
    code = op_and_stage * ranges + token_range
    codes = len(OP_CODES) * stages * ranges
    mostly_unused = codes > 4 * len(table) + 1024
    if mostly_unused:  # Sorting is faster than counting.
        return _renumber_by_sorting(code)
    example = np.full(codes, -1, dtype=np.int64)
    example[code] = np.arange(len(table))
    used = np.flatnonzero(example >= 0)
    new_number = np.zeros(codes, dtype=np.int64)
    new_number[used] = np.arange(len(used))
    return example[used], new_number[code]


def _token_ranges(schedule: Schedule) -> tuple[Ints, int]:
    """Number the token ranges of all slices; micro-batches with equal cuts have the same ones.

    Returns the number of each micro-batch's first range, and how many ranges there are.
    """
    known: dict[tuple[tuple[int, ...], int], int] = {}
    ranges = 0
    first_range = np.empty(len(schedule.microbatches), dtype=np.int64)
    for number, microbatch in enumerate(schedule.microbatches):
        key = (microbatch.cuts, microbatch.tokens)
        if key not in known:
            known[key] = ranges
            ranges += microbatch.slices
        first_range[number] = known[key]
    return first_range, ranges


def _renumber_by_sorting(code: Ints) -> tuple[Ints, Ints]:
    """Return an action with each code that occurs, and the number of each action's code among these."""
    _, examples, numbers = np.unique(code, return_index=True, return_inverse=True)
    return examples, numbers


def _codes_by_path(schedule: Schedule, codes: tuple[Ints, Ints]) -> tuple[Ints, Ints]:
    """The same for what also depends on the stage before.

    A gradient is as large as the activation that came from there.
    """
    stages = len(schedule.stages)
    paths, path_of = _distinct_paths(schedule)
    before = np.full((len(paths), stages), ABSENT, dtype=np.int64)
    for path, row in paths.items():
        before[row, list(path)] = (-1, *path[:-1])
    largest = before.max(axis=0)
    least = np.where(before == ABSENT, stages, before).min(axis=0)
    same_on_all_paths = (largest <= least).all()
    if same_on_all_paths:
        return codes
    table = schedule.table
    _, numbers = codes
    own_path = path_of[table.microbatch]
    previous = before[own_path, table.stage]
    return _renumber_by_sorting(numbers * (stages + 1) + 1 + previous)


def _distinct_paths(schedule: Schedule) -> tuple[dict[tuple[int, ...], int], Ints]:
    """Every path with its number, and the number of each micro-batch's path."""
    paths: dict[tuple[int, ...], int] = {}
    by_identity: dict[int, int] = {}  # most micro-batches share one path object
    path_of = np.empty(len(schedule.microbatches), dtype=np.int64)
    for number, microbatch in enumerate(schedule.microbatches):
        path = microbatch.path
        row = by_identity.get(id(path))
        if row is None:
            row = paths.setdefault(path, len(paths))
            by_identity[id(path)] = row
        path_of[number] = row
    return paths, path_of


def _questions(
    schedule: Schedule, codes: tuple[Ints, Ints]
) -> tuple[list[Action], Ints]:
    """One example action of each combination, and each action's combination."""
    examples, numbers = codes
    return schedule.table.actions(examples), numbers


def _column(
    schedule: Schedule,
    questions: tuple[list[Action], Ints],
    ask: Callable[[Schedule, Action], float],
) -> Floats:
    """One quantity for every action, asked once for each combination."""
    examples, numbers = questions
    answers = np.array([ask(schedule, one) for one in examples], dtype=np.float64)
    column: Floats = answers[numbers]
    return column


def example_column(
    schedule: Schedule, ask: Callable[[Schedule, Action], float]
) -> Floats:
    """One quantity of a cost for every action, asked once for each op, stage and token range."""
    questions = _questions(schedule, _codes(schedule))
    return _column(schedule, questions, ask)


def _links(
    schedule: Schedule, cost: Cost, target: Ints, size: Floats
) -> tuple[Ints, Floats, Floats]:
    """The link, the latency and the wire time of every message."""
    actions = len(target)
    senders = np.flatnonzero(target >= 0)
    source_rank = schedule.table.rank[senders]
    pair = source_rank * schedule.ranks + target[senders]
    pairs, own_link = np.unique(pair, return_inverse=True)
    latencies = np.empty(len(pairs))
    bandwidths = np.empty(len(pairs))
    for number, one in enumerate(pairs.tolist()):
        source, destination = divmod(one, schedule.ranks)
        latencies[number] = cost.latency(source, destination)
        bandwidths[number] = cost.bandwidth(source, destination)
    link = np.full(actions, -1, dtype=np.int64)
    link[senders] = own_link
    latency = np.zeros(actions)
    latency[senders] = latencies[own_link]
    wire = np.zeros(actions)
    wire[senders] = size[senders] / bandwidths[own_link]
    return link, latency, wire


def _losses(table: Table, held: Floats, kept: Floats) -> Floats:
    """Bytes that each action frees.

    A B frees what its F left, an I all of that but what its W needs, and a W the rest.
    """
    loss = np.zeros(len(table))
    backward = np.flatnonzero(table.kind == BACKWARD)
    own_forward = table.at[table.slots[backward] - 1]
    loss[backward] = held[own_forward]
    is_split = table.op[backward] == OP_CODES[Op.I]
    split = backward[is_split]
    loss[split] -= kept[split]
    weights = np.flatnonzero(table.kind == WEIGHTS)
    own_backward = table.at[table.slots[weights] - 1]
    loss[weights] = kept[own_backward]
    return loss
