"""List scheduling: builds the lanes for any stages and paths, under a cost and a cap on each rank's memory.

The scheduler plays through time. Whenever a rank is idle, it starts the action with the best priority among those that
are ready there. Forwards take memory, and a rank must never give away memory that it will need. So the banker's rule
admits a forward only if all unfinished micro-batches could still finish afterwards: taken in index order, what each one
has still to do on this rank must fit into the memory that is free by then.

    cap 3, two chunks per micro-batch, each holds 1        free   0 needs   1 needs   2 needs
    F1 F0 held: may a first F2 start?  free 1 after it:     0       1 > 0 -> no: 0 could never finish
    F0 F0 F1 held: it would leave 0 free:                   0       0, gives 2 back  -> 1 fits -> 2 fits: yes if cap 4

The oldest micro-batch can always continue on every rank, so nothing stalls as long as the cap holds one micro-batch.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from penstock.cost.columns import Columns, columns, levels
from penstock.cost.cost import Cost
from penstock.errors import ShapeError
from penstock.ir.action import (
    FORWARD,
    KINDS,
    WEIGHTS,
    Action,
    backward,
    forward,
    halves,
)
from penstock.ir.compiled import compile_if_large
from penstock.ir.schedule import MicroBatch, Schedule, Stage, schedule_of
from penstock.ir.table import Floats, Ints

Priority = Callable[[Schedule, Action], tuple[int, ...]]

# Times, and shares of bytes, that are closer than this count as equal.
EQUAL_TIME_TOLERANCE = 1e-9
# The rank of each kind of action in a priority: forward, backward, weights.
KIND_ORDER = (1, 0, 2)


class StartLimit(NamedTuple):
    """A kind may start on `stage` only while it is less than `limit` starts ahead of kind `behind` on stage `other`."""

    kind: int
    stage: int
    behind: int
    other: int
    limit: int


def backward_first(schedule: Schedule, action: Action) -> tuple[int, ...]:
    """Prefer backwards to forwards to weights.

    Among forwards the deepest stage comes first, and among backwards the shallowest.
    Then comes the oldest micro-batch.
    """
    kind = KIND_ORDER[action.op.kind]
    depth = schedule.microbatches[action.microbatch].path.index(action.stage)
    if kind == 0:
        return kind, depth, action.microbatch, -action.slice
    return kind, -depth, action.microbatch, action.slice


def oldest_first(schedule: Schedule, action: Action) -> tuple[int, ...]:
    """Prefer the oldest micro-batch; weights come last of all."""
    kind = KIND_ORDER[action.op.kind]
    depth = schedule.microbatches[action.microbatch].path.index(action.stage)
    piece = action.slice if kind else -action.slice
    return kind // 2, action.microbatch, kind, -depth, piece


def list_schedule(
    stages: Sequence[Stage],
    microbatches: Sequence[MicroBatch],
    cost: Cost,
    cap: float | Sequence[float] | None = None,
    split: bool = False,
    priority: Priority = backward_first,
    gates: Sequence[StartLimit] = (),
) -> Schedule:
    """Build lanes in which no rank idles while it could act, and none holds more than its cap.

    >>> from penstock import UnitCost, simulate
    >>> from penstock.schedules.orders import paths_through, wave_placement
    >>> stages = wave_placement(4, 1)
    >>> paths = paths_through(stages, 8)
    >>> wave = list_schedule(stages, paths, UnitCost(), cap=3, split=True)
    >>> float(max(simulate(wave, UnitCost()).peak_activations))
    3.0
    """
    draft = sequential_schedule(stages, microbatches, split)
    costs = columns(draft, cost)
    caps = caps_of_ranks(draft, costs, cap)
    lister = Lister(draft, costs, gates=gates)
    return schedule_with_lanes(draft, lister.lanes(_ordinals(draft, priority), caps))


def defer_weights(
    schedule: Schedule, cost: Cost, cap: float | Sequence[float] | None = None
) -> Schedule:
    """Move each W to where its rank would idle.

    The order of all other actions stays the same. So does the memory that each rank
    holds, unless `cap` allows more.

    before | I0 W0 .  I1 W1 .  I2 W2
    after  | I0 .  I1 W0 I2 W1 W2
    """
    table = schedule.table
    costs = columns(schedule, cost)
    caps = table.peaks(levels(schedule, costs))
    if cap is not None:
        caps = np.maximum(caps, cap)

    # Every action but a W also needs the one before it on its rank: that fixes the order.
    is_weight = table.kind == WEIGHTS
    others = np.flatnonzero(~is_weight)
    same_rank = table.rank[others[1:]] == table.rank[others[:-1]]
    chain = np.full((len(table), 1), -1, dtype=table.needs.dtype)
    chain[others[1:][same_rank], 0] = others[:-1][same_rank]
    needs = np.hstack([table.needs, chain])

    ordinals = np.arange(len(table)) + np.where(is_weight, len(table), 0)
    lister = Lister(schedule, costs, needs=needs, banker=False)
    return schedule_with_lanes(schedule, lister.lanes(ordinals, caps))


def sequential_schedule(
    stages: Sequence[Stage], microbatches: Sequence[MicroBatch], split: bool = False
) -> Schedule:
    """The plainest order: one micro-batch after the other, each there and back."""
    ranks = 1 + max(stage.rank for stage in stages)
    lanes: list[list[Action]] = [[] for _ in range(ranks)]
    for number, microbatch in enumerate(microbatches):
        pieces = range(microbatch.slices)
        for stage in microbatch.path:
            lane = lanes[stages[stage].rank]
            lane += [forward(stage, number, piece) for piece in pieces]
        for stage in reversed(microbatch.path):
            lane = lanes[stages[stage].rank]
            for piece in reversed(pieces):
                whole = backward(stage, number, piece)
                lane += halves(whole) if split else [whole]
    return schedule_of(stages, microbatches, lanes)


def schedule_with_lanes(schedule: Schedule, lanes: Ints) -> Schedule:
    """Return a schedule with its actions in another order, given by their numbers lane by lane."""
    first = schedule.table.first.tolist()
    new = []
    for old, begin, end in zip(schedule.lanes, first[:-1], first[1:], strict=True):
        new.append([old[number - begin] for number in lanes[begin:end].tolist()])
    return schedule_of(schedule.stages, schedule.microbatches, new)


class ListedActions(NamedTuple):
    """The columns of the actions that the list scheduler works with. Bytes are shares of the largest gain."""

    rank: Ints
    microbatch: Ints
    queue: Ints  # one for each kind of action on each stage
    seconds: Floats
    hop: Floats  # seconds until the result is on another rank
    gain: Floats
    loss: Floats
    lent: Floats  # bytes that an action takes and that come back by themselves
    user_start: Ints
    users: Ints


class Memory(NamedTuple):
    """The memory of each rank, in shares of the largest gain."""

    caps: Floats  # by rank
    claim: Floats  # bytes that a micro-batch takes on a rank in all [rank, micro-batch]
    spare: Floats  # the most that an action lends, by rank
    banker: bool  # whether the banker's rule admits forwards


class Gates(NamedTuple):
    """Up to two gates of each queue; for each gate the queue that it watches, and its limit."""

    of_queue: Ints
    other: Ints
    limit: Ints


class Lister:
    """Lists the actions of one draft, with any priorities, caps and release times.

    many: how often it will be called; the loop is worth compiling for many calls.
    gates: limits on how far a queue may be ahead of another.
    needs: what each action needs, if not just what the rules say.
    banker: whether forwards obey the banker's rule.
    """

    def __init__(
        self,
        draft: Schedule,
        costs: Columns,
        many: int = 1,
        gates: Sequence[StartLimit] = (),
        needs: Ints | None = None,
        banker: bool = True,
    ) -> None:
        table = draft.table
        needs = table.needs if needs is None else needs
        # Sums of bytes are rounded, so the scheduler compares shares of the largest gain.
        self.unit = float(costs.gain.max(initial=0.0)) or 1.0
        gain = costs.gain / self.unit
        lent = _lent(draft, costs) / self.unit
        self.run = compile_if_large(_run_list, len(table) * many)
        self.lacks = (needs >= 0).sum(axis=1)
        self.actions = ListedActions(
            table.rank,
            table.microbatch,
            table.kind.astype(np.int64) * len(draft.stages) + table.stage,
            costs.seconds,
            np.where(costs.link >= 0, costs.latency + costs.wire, 0.0),
            gain,
            costs.loss / self.unit,
            lent,
            *users_of(needs),
        )
        no_caps = np.full(draft.ranks, np.inf)
        claim = _sum_by_microbatch(draft, gain - lent)
        self.memory = Memory(no_caps, claim, table.peaks(lent), banker)
        self.gates = _gate_columns(draft, gates)

    def lanes(
        self, ordinals: Ints, caps: Floats, release: Floats | None = None
    ) -> Ints:
        """Return the numbers of the actions, lane by lane, in the order in which they start.

        ordinals: the position of each action in the order of priority.
        release: the earliest start of each action.
        """
        if release is None:
            release = np.zeros(len(ordinals))
        memory = self.memory._replace(caps=caps / self.unit)
        started = self.run(
            self.actions, memory, self.gates, self.lacks, ordinals, release
        )
        assert (started >= 0).all(), "the list scheduler stalled"
        # The actions of a rank are numbered together, so this sorts each lane by itself.
        lanes: Ints = np.lexsort((started, self.actions.rank))
        return lanes


# ---------------------------------------------------------------- inputs of the loop
def caps_of_ranks(
    draft: Schedule, costs: Columns, cap: float | Sequence[float] | None
) -> Floats:
    """Return a cap for each rank; each must hold at least one whole micro-batch."""
    caps = caps_by_rank(draft, cap)
    least = least_caps(draft, costs)
    for rank in np.flatnonzero(caps < least * (1 - EQUAL_TIME_TOLERANCE)).tolist():
        raise ShapeError(
            f"a cap of {caps[rank]:g} on rank {rank} does not hold one micro-batch, "
            f"which takes {least[rank]:g}; "
            f"the least cap that works there is {least[rank]:g}"
        )
    return caps


def caps_by_rank(schedule: Schedule, cap: float | Sequence[float] | None) -> Floats:
    """Return a cap for each rank: the given ones, or the same for all; infinite if there is none."""
    given = np.asarray(np.inf if cap is None else cap, dtype=np.float64)
    if given.ndim and len(given) != schedule.ranks:
        raise ShapeError(
            f"there are caps for {len(given)} ranks, but stages on {schedule.ranks}"
        )
    return np.broadcast_to(given, (schedule.ranks,)).copy()


def least_caps(draft: Schedule, costs: Columns) -> Floats:
    """Return the least cap of each rank that holds one whole micro-batch."""
    lent = draft.table.peaks(_lent(draft, costs))
    least: Floats = held_by_one(draft, costs) + lent
    return least


def held_by_one(draft: Schedule, costs: Columns) -> Floats:
    """Return the bytes of each rank that one whole micro-batch holds between its forwards and backwards."""
    stays = costs.gain - _lent(draft, costs)
    held: Floats = _sum_by_microbatch(draft, stays).max(axis=1)
    return held


def users_of(needs: Ints) -> tuple[Ints, Ints]:
    """Return a list of users, where entries `start[a]` to `start[a + 1]` are the actions that need action a."""
    user, column = np.nonzero(needs >= 0)
    source = needs[user, column]
    counts = np.bincount(source, minlength=len(needs))
    start = np.concatenate([[0], np.cumsum(counts)])
    by_source = np.argsort(source, kind="stable")
    return start.astype(np.int64), user[by_source].astype(np.int64)


def _ordinals(draft: Schedule, priority: Priority) -> Ints:
    """Return the position of each action in the order of priority."""
    keys = [priority(draft, action) for lane in draft.lanes for action in lane]
    ordinals = np.empty(len(keys), dtype=np.int64)
    ordinals[sorted(range(len(keys)), key=keys.__getitem__)] = np.arange(len(keys))
    return ordinals


def _gate_columns(draft: Schedule, gates: Sequence[StartLimit]) -> Gates:
    stages = len(draft.stages)
    of_queue = np.full((KINDS * stages, 2), -1, dtype=np.int64)
    for number, gate in enumerate(gates):
        own = of_queue[gate.kind * stages + gate.stage]
        own[0 if own[0] < 0 else 1] = number
    others = [gate.behind * stages + gate.other for gate in gates]
    limits = [gate.limit for gate in gates]
    return Gates(
        of_queue, np.array(others, dtype=np.int64), np.array(limits, dtype=np.int64)
    )


def _sum_by_microbatch(draft: Schedule, values: Floats) -> Floats:
    """Sum a column for each rank and micro-batch."""
    sums = np.zeros((draft.ranks, len(draft.microbatches)))
    np.add.at(sums, (draft.table.rank, draft.table.microbatch), values)
    return sums


def _lent(draft: Schedule, costs: Columns) -> Floats:
    """Return the bytes that a backward takes to compute activations again.

    They are free again after it, or after its W, which can always run at once.
    """
    lent: Floats = np.where(draft.table.kind == FORWARD, 0.0, costs.gain)
    return lent


# ---------------------------------------------------------------- the loop
def _run_list(  # noqa: PLR0912, PLR0915
    actions: ListedActions,
    memory: Memory,
    gates: Gates,
    lacks: Ints,
    place: Ints,
    release: Floats,
) -> Ints:
    """Return the position of each action in the order in which all actions start.

    `lacks` has the number of needs of each action, and `place` its position in the order of priority.
    """
    rank, microbatch, queue, seconds, hop, gain, loss, lent, user_start, users = actions
    caps, whole_claim, spare, banker = memory
    gate, gate_other, gate_limit = gates
    queues = len(gate)
    ranks, microbatches = whole_claim.shape
    waiting = lacks.copy()  # needs that each action still lacks
    free = caps.copy()  # bytes, by rank
    claim = whole_claim.copy()  # bytes a micro-batch will still take on a rank
    left = np.zeros((ranks, microbatches), np.int64)  # actions it still has there
    queue_rank = np.full(queues, -1, np.int64)
    for number in np.arange(len(rank)):
        left[rank[number], microbatch[number]] += 1
        queue_rank[queue[number]] = rank[number]
    # The lists below are empty; `range(0)` tells the compiler the type of their entries.
    # Heaps of (place, action), one for each queue:
    ready = [[(np.int64(0), np.int64(0)) for _ in range(0)] for _ in range(queues)]
    # A heap of (time, action, 1 if the action ended or 0 if one of its needs arrived):
    events = [(0.0, np.int64(0), np.int64(0)) for _ in range(0)]
    # The queues of each rank:
    rank_queues = [[np.int64(0) for _ in range(0)] for _ in range(ranks)]
    for q in np.arange(queues):
        if queue_rank[q] >= 0:
            rank_queues[queue_rank[q]].append(q)
    for number in np.arange(len(rank)):
        if release[number] > 0.0:
            waiting[number] += 1
            heapq.heappush(events, (release[number], number, np.int64(0)))
        elif waiting[number] == 0:
            heapq.heappush(ready[queue[number]], (place[number], number))
    held = np.zeros_like(claim)
    oldest = np.zeros(ranks, np.int64)  # the oldest unfinished micro-batch of a rank
    newest = np.full(ranks, -1, np.int64)  # the newest micro-batch that a rank began
    queue_starts = np.zeros(queues, np.int64)
    busy = np.zeros(ranks, np.bool_)
    changed = np.ones(ranks, np.bool_)
    start_order = np.full(len(rank), -1, np.int64)
    count = 0
    now = 0.0

    def is_shut(q: np.int64) -> bool:
        """Whether a gate keeps the queue from starting."""
        for g in gate[q]:
            if g >= 0:
                ahead = queue_starts[q] - queue_starts[gate_other[g]]
                if ahead >= gate_limit[g]:
                    return True
        return False

    def is_safe(here: int, action: np.int64) -> bool:
        """Whether the rank could still finish all micro-batches if the action started now."""
        cash = free[here] - gain[action]
        stays = gain[action] - lent[action]
        if not banker or cash < -EQUAL_TIME_TOLERANCE:
            return bool(cash >= -EQUAL_TIME_TOLERANCE)
        cash += lent[action]
        for m in range(oldest[here], max(newest[here], microbatch[action]) + 1):
            taken = stays if m == microbatch[action] else 0.0
            if claim[here, m] - taken + spare[here] > cash + EQUAL_TIME_TOLERANCE:
                return False
            cash += held[here, m] + taken
        return True

    def entry(here: int, q: np.int64) -> int:
        """The entry of a queue that may start, or -1.

        It is the first, or else one of the oldest micro-batch, which can always continue.
        """
        if len(ready[q]) == 0 or is_shut(q):
            return -1
        first = ready[q][0][1]
        if gain[first] <= 0.0 or is_safe(here, first):
            return 0
        for k in range(1, len(ready[q])):
            action = ready[q][k][1]
            if microbatch[action] == oldest[here] and is_safe(here, action):
                return k
        return -1

    while True:
        for here in range(ranks):
            if not changed[here] or busy[here]:
                continue
            changed[here] = False
            best = np.int64(-1)
            best_place = np.int64(0)
            best_entry = 0
            for q in rank_queues[here]:
                k = entry(here, q)
                if k >= 0 and (best < 0 or ready[q][k][0] < best_place):
                    best_place, best = ready[q][k]
                    best_entry = k
            if best >= 0:
                heap = ready[queue[best]]
                if best_entry == 0:
                    heapq.heappop(heap)
                else:
                    heap[best_entry] = heap[-1]
                    heap.pop()
                    heapq.heapify(heap)
                queue_starts[queue[best]] += 1
                start_order[best] = count
                count += 1
                its = microbatch[best]
                free[here] -= gain[best]
                held[here, its] += gain[best] - lent[best]
                claim[here, its] -= gain[best] - lent[best]
                newest[here] = max(newest[here], its)
                busy[here] = True
                heapq.heappush(events, (now + seconds[best], best, np.int64(1)))
        if len(events) == 0:
            return start_order
        now = events[0][0]
        while len(events) > 0 and events[0][0] <= now + EQUAL_TIME_TOLERANCE:
            _, number, ended = heapq.heappop(events)
            here = rank[number]
            its = microbatch[number]
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
