"""List scheduling: builds the lanes for any stages and paths, under a cost and a cap on each rank's memory.

Time runs; whenever a rank is idle it starts, of all that is ready there, what has the best priority. A forward takes
memory, and a rank must never give away what it will need: the banker's rule admits it only if afterwards, taking the
unfinished micro-batches in index order, what each has still to do on this rank fits into the memory that is free then:

    cap 3, two chunks a micro-batch, each holds 1          free   0 needs   1 needs   2 needs
    F1 F0 held: may a first F2 start?  free 1 after it:     0       1 > 0 -> no: 0 could never finish
    F0 F0 F1 held: it would leave 0 free:                   0       0, gives 2 back  -> 1 fits -> 2 fits: yes if cap 4

The oldest micro-batch can always go on, on every rank, so nothing stalls as long as the cap holds one micro-batch.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from penstock.cost.columns import Columns, columns, levels
from penstock.cost.cost import Cost
from penstock.errors import ShapeError
from penstock.ir.action import Action, Op
from penstock.ir.compiled import at_speed
from penstock.ir.needs import FORWARD, KIND, WEIGHTS
from penstock.ir.schedule import MicroBatch, Schedule, Stage, schedule_of
from penstock.ir.table import Floats, Ints

Priority = Callable[[Schedule, Action], tuple[int, ...]]
TOLERANCE = 1e-9  # times, and shares of bytes, closer than this are the same


class Gate(NamedTuple):
    """`op` may start on `stage` only while it is less than `limit` starts ahead of `behind` on stage `other`."""

    op: Op
    stage: int
    behind: Op
    other: int
    limit: int


def backward_first(schedule: Schedule, action: Action) -> tuple[int, ...]:
    """Backwards before forwards before weights; deep forwards and shallow backwards first; then the oldest."""
    kind = (1, 0, 2)[KIND[action.op]]
    depth = schedule.microbatches[action.microbatch].path.index(action.stage)
    return (
        kind,
        depth if kind == 0 else -depth,
        action.microbatch,
        action.slice if kind else -action.slice,
    )


def oldest_first(schedule: Schedule, action: Action) -> tuple[int, ...]:
    """The oldest micro-batch first, its weights last of all."""
    kind = (1, 0, 2)[KIND[action.op]]
    depth = schedule.microbatches[action.microbatch].path.index(action.stage)
    return (
        kind // 2,
        action.microbatch,
        kind,
        -depth,
        action.slice if kind else -action.slice,
    )


def list_schedule(
    stages: Sequence[Stage],
    microbatches: Sequence[MicroBatch],
    cost: Cost,
    cap: float | Sequence[float] | None = None,
    split: bool = False,
    priority: Priority = backward_first,
    gates: Sequence[Gate] = (),
) -> Schedule:
    """Lanes for these stages and micro-batches: no rank idles while it could act, none holds more than its cap.

    >>> from penstock import UnitCost, simulate
    >>> from penstock.schedules.orders import paths_through, wave_placement
    >>> stages = wave_placement(4, 1)
    >>> wave = list_schedule(stages, paths_through(stages, 8), UnitCost(), cap=3, split=True)
    >>> float(max(simulate(wave, UnitCost()).peak_activations))
    3.0
    """
    draft = in_turn(stages, microbatches, split)
    costs = columns(draft, cost)
    caps = _caps(draft, costs, cap)
    return _listed(
        draft,
        costs,
        caps,
        draft.table.needs,
        _ordinals(draft, priority),
        gates,
        banker=True,
    )


def defer_weights(
    schedule: Schedule, cost: Cost, cap: float | Sequence[float] | None = None
) -> Schedule:
    """Moves each W to where its rank would idle; the order of all else, and the memory held, stay (or grow to `cap`).

    before | I0 W0 .  I1 W1 .  I2 W2
    after  | I0 .  I1 W0 I2 W1 W2
    """
    table, costs = schedule.table, columns(schedule, cost)
    caps = _peaks(schedule, costs)
    caps = caps if cap is None else np.maximum(caps, cap)
    others = np.flatnonzero(table.kind != WEIGHTS)
    chain = np.full((len(table), 1), -1, dtype=table.needs.dtype)
    same = table.rank[others[1:]] == table.rank[others[:-1]]
    chain[others[1:][same], 0] = others[:-1][same]
    place = np.arange(len(table)) + np.where(table.kind == WEIGHTS, len(table), 0)
    return _listed(
        schedule, costs, caps, np.hstack([table.needs, chain]), place, (), banker=False
    )


def _listed(
    draft: Schedule,
    costs: Columns,
    caps: Floats,
    needs: Ints,
    place: Ints,
    gates: Sequence[Gate],
    banker: bool,
) -> Schedule:
    table, queues = draft.table, _queues(draft)
    home = np.full(3 * len(draft.stages), -1, dtype=np.int64)
    home[queues] = table.rank
    unit = (
        float(costs.gain.max(initial=0.0)) or 1.0
    )  # sums of bytes are rounded: shares are compared
    gain, loss, lent = costs.gain / unit, costs.loss / unit, _lent(draft, costs) / unit
    begun = at_speed(_list, len(table))(
        table.rank,
        table.microbatch,
        (needs >= 0).sum(axis=1),
        *_users(needs),
        costs.seconds,
        np.where(costs.link >= 0, costs.latency + costs.wire, 0.0),
        gain,
        loss,
        lent,
        caps / unit,
        _by_rank(draft, gain - lent),
        _most(draft, lent),
        _by_rank(draft, np.ones(len(table))),
        queues,
        home,
        place,
        *_gates(draft, gates),
        banker,
    )
    assert (begun >= 0).all(), "the list scheduler stalled"
    return _in_order(draft, begun)


def in_turn(
    stages: Sequence[Stage], microbatches: Sequence[MicroBatch], split: bool = False
) -> Schedule:
    """The plainest order there is: one micro-batch after the other, there and back."""
    lanes: list[list[Action]] = [
        [] for _ in range(1 + max(stage.rank for stage in stages))
    ]
    back = (Op.I, Op.W) if split else (Op.B,)
    for number, microbatch in enumerate(microbatches):
        pieces = range(microbatch.slices)
        for stage in microbatch.path:
            lanes[stages[stage].rank] += [
                Action(Op.F, stage, number, piece) for piece in pieces
            ]
        for stage in reversed(microbatch.path):
            lanes[stages[stage].rank] += [
                Action(op, stage, number, piece)
                for piece in reversed(pieces)
                for op in back
            ]
    return schedule_of(stages, microbatches, lanes)


def _in_order(draft: Schedule, begun: Ints) -> Schedule:
    """The lanes, each in the order in which its actions began."""
    first = draft.table.first.tolist()
    lanes = []
    for lane, begin, end in zip(draft.lanes, first[:-1], first[1:], strict=True):
        lanes.append([lane[i] for i in np.argsort(begun[begin:end]).tolist()])
    return schedule_of(draft.stages, draft.microbatches, lanes)


# ---------------------------------------------------------------- what the loop runs on
def _caps(
    draft: Schedule, costs: Columns, cap: float | Sequence[float] | None
) -> Floats:
    """A cap for each rank, which must hold one whole micro-batch."""
    given = np.asarray(np.inf if cap is None else cap, dtype=np.float64)
    if given.ndim and len(given) != draft.ranks:
        raise ShapeError(
            f"there are caps for {len(given)} ranks, but stages on {draft.ranks}"
        )
    caps = np.broadcast_to(given, (draft.ranks,)).copy()
    lent = _lent(draft, costs)
    least = _by_rank(draft, costs.gain - lent).max(axis=1) + _most(draft, lent)
    for rank in np.flatnonzero(caps < least * (1 - TOLERANCE)).tolist():
        raise ShapeError(
            f"a cap of {caps[rank]:g} on rank {rank} does not hold one micro-batch, which takes {least[rank]:g}; "
            f"the least cap that works there is {least[rank]:g}"
        )
    return caps


def _peaks(schedule: Schedule, costs: Columns) -> Floats:
    """The most each rank holds in the schedule as it is."""
    return _most(schedule, levels(schedule, costs))


def _users(needs: Ints) -> tuple[Ints, Ints]:
    """Who needs an action: entries `start[a]` to `start[a + 1]` of a list."""
    user, column = np.nonzero(needs >= 0)
    source = needs[user, column]
    start = np.concatenate([[0], np.cumsum(np.bincount(source, minlength=len(needs)))])
    return start.astype(np.int64), user[np.argsort(source, kind="stable")].astype(
        np.int64
    )


def _queues(draft: Schedule) -> Ints:
    """Actions of one kind on one stage wait in one queue."""
    queues: Ints = (
        draft.table.kind.astype(np.int64) * len(draft.stages) + draft.table.stage
    )
    return queues


def _ordinals(draft: Schedule, priority: Priority) -> Ints:
    """Every action's place in the order of priority."""
    actions = [action for lane in draft.lanes for action in lane]
    keys = [priority(draft, action) for action in actions]
    place = np.empty(len(keys), dtype=np.int64)
    place[sorted(range(len(keys)), key=keys.__getitem__)] = np.arange(len(keys))
    return place


def _gates(draft: Schedule, gates: Sequence[Gate]) -> tuple[Ints, Ints, Ints]:
    stages = len(draft.stages)
    mine = np.array([KIND[g.op] * stages + g.stage for g in gates], dtype=np.int64)
    other = np.array([KIND[g.behind] * stages + g.other for g in gates], dtype=np.int64)
    by_queue = np.full((3 * stages, 2), -1, dtype=np.int64)
    for number, queue in enumerate(mine.tolist()):
        by_queue[queue, 0 if by_queue[queue, 0] < 0 else 1] = number
    return by_queue, other, np.array([g.limit for g in gates], dtype=np.int64)


def _by_rank(draft: Schedule, values: Floats) -> Floats:
    """Sums of a column, by rank and micro-batch."""
    sums = np.zeros((draft.ranks, len(draft.microbatches)))
    np.add.at(sums, (draft.table.rank, draft.table.microbatch), values)
    return sums


def _lent(draft: Schedule, costs: Columns) -> Floats:
    """Bytes that a backward computes again: they are back after it, or after its W, which can always run at once."""
    lent: Floats = np.where(draft.table.kind == FORWARD, 0.0, costs.gain)
    return lent


def _most(draft: Schedule, values: Floats) -> Floats:
    """Of each rank the largest."""
    most = np.zeros(draft.ranks)
    np.maximum.at(most, draft.table.rank, values)
    return most


def _list(  # noqa: PLR0912, PLR0915
    rank: Ints,
    microbatch: Ints,
    waiting: Ints,
    user_start: Ints,
    users: Ints,
    seconds: Floats,
    hop: Floats,
    gain: Floats,
    loss: Floats,
    lent: Floats,
    free: Floats,
    claim: Floats,
    spare: Floats,
    left: Floats,
    queue: Ints,
    queue_rank: Ints,
    place: Ints,
    gate: Ints,
    gate_other: Ints,
    gate_limit: Ints,
    banker: bool,
) -> Ints:
    """When, counted in starts, each action begins. Uses up `waiting`, `free`, `claim` and `left`.

    waiting: how many of its needs each action still lacks    free: bytes, by rank
    claim: bytes a micro-batch will still take on a rank      left: actions it still has there
    lent: bytes an action takes that come back by themselves  spare: the most of these, by rank
    """
    ranks, microbatches = claim.shape
    ready = [
        [(np.int64(0), np.int64(0)) for _ in range(0)] for _ in range(len(queue_rank))
    ]  # heaps of (place, action)
    events = [
        (0.0, np.int64(0), np.int64(0)) for _ in range(0)
    ]  # heap of (time, action, 1: it ended, 0: a need came)
    mine = [
        [np.int64(0) for _ in range(0)] for _ in range(ranks)
    ]  # the queues of each rank
    for q in np.arange(len(queue_rank)):
        if queue_rank[q] >= 0:
            mine[queue_rank[q]].append(q)
    for number in np.arange(len(rank)):
        if waiting[number] == 0:
            heapq.heappush(ready[queue[number]], (place[number], number))
    held = np.zeros_like(claim)
    oldest, newest = (
        np.zeros(ranks, np.int64),
        np.full(ranks, -1, np.int64),
    )  # micro-batches unfinished, and begun
    started = np.zeros(len(queue_rank), np.int64)
    busy, changed = np.zeros(ranks, np.bool_), np.ones(ranks, np.bool_)
    begun = np.full(len(rank), -1, np.int64)
    count, now = 0, 0.0

    def is_shut(q: np.int64) -> bool:
        for g in gate[q]:  # noqa: SIM110  # `any` does not compile
            if g >= 0 and started[q] - started[gate_other[g]] >= gate_limit[g]:
                return True
        return False

    def is_safe(here: int, action: np.int64) -> bool:
        cash, stays = free[here] - gain[action], gain[action] - lent[action]
        if not banker or cash < -TOLERANCE:
            return bool(cash >= -TOLERANCE)
        cash += lent[action]
        for m in range(oldest[here], max(newest[here], microbatch[action]) + 1):
            taken = stays if m == microbatch[action] else 0.0
            if claim[here, m] - taken + spare[here] > cash + TOLERANCE:
                return False
            cash += held[here, m] + taken
        return True

    def entry(here: int, q: np.int64) -> int:
        """Which of a queue may start: the first, or one of the oldest micro-batch, which is always safe; -1: none."""
        if len(ready[q]) == 0 or is_shut(q):
            return -1
        if gain[ready[q][0][1]] <= 0.0 or is_safe(here, ready[q][0][1]):
            return 0
        for k in range(1, len(ready[q])):
            if microbatch[ready[q][k][1]] == oldest[here] and is_safe(
                here, ready[q][k][1]
            ):
                return k
        return -1

    while True:
        for here in range(ranks):
            if not changed[here] or busy[here]:
                continue
            changed[here] = False
            best, best_place, best_entry = np.int64(-1), np.int64(0), 0
            for q in mine[here]:
                k = entry(here, q)
                if k >= 0 and (best < 0 or ready[q][k][0] < best_place):
                    best_place, best = ready[q][k]
                    best_entry = k
            if best >= 0:
                ready[queue[best]][best_entry] = ready[queue[best]][-1]
                ready[queue[best]].pop()
                heapq.heapify(ready[queue[best]])
                started[queue[best]] += 1
                begun[best] = count
                count += 1
                free[here] -= gain[best]
                held[here, microbatch[best]] += gain[best] - lent[best]
                claim[here, microbatch[best]] -= gain[best] - lent[best]
                newest[here] = max(newest[here], microbatch[best])
                busy[here] = True
                heapq.heappush(events, (now + seconds[best], best, np.int64(1)))
        if len(events) == 0:
            return begun
        now = events[0][0]
        while len(events) > 0 and events[0][0] <= now + TOLERANCE:
            _, number, ended = heapq.heappop(events)
            here, its = rank[number], microbatch[number]
            changed[here] = True
            if ended == 0:
                waiting[number] -= 1
                if waiting[number] == 0:
                    heapq.heappush(ready[queue[number]], (place[number], number))
                continue
            busy[here] = False
            free[here] += loss[number]
            held[here, its] -= loss[number] - lent[number]
            left[here, its] -= 1
            while oldest[here] < microbatches and left[here, oldest[here]] == 0:
                oldest[here] += 1
            for user in users[user_start[number] : user_start[number + 1]]:
                delay = hop[number] if rank[user] != here else 0.0
                heapq.heappush(events, (now + delay, user, np.int64(0)))
