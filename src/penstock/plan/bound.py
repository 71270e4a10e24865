"""Times that no schedule can beat.

`lower_bound` holds for every order of the lanes with given stages, paths, cuts and split backwards. `space_bound`
(in `penstock.plan.space_bound`) holds for every placement, partition and cuts as well.

**Heads and tails.** Follow the needs of an action back to the start of the step, with the seconds of all actions and
hops on the way. The longest such chain is the action's *head*: it cannot start earlier. In the same way, the longest
chain after it is its *tail*. Take any actions of one rank: the rank begins them at the earliest at the least of their
heads, then works through all of them, and after the last of them at least the least of their tails must follow:

    rank 2 | ....least head.... | work work work work work | ....least tail....

The largest such sum over all sets of actions of a rank is found by one pass through time, in which a rank always works
on the ready action with the longest tail, and drops it when one with a longer tail becomes ready (Jackson 1955;
Carlier 1982). All actions of a rank, or all its backwards, are such sets. So for waves the bound is at least
3 M + 3(P-1)/(2W) + 2(P-1)c with whole backwards, 3 M + (P-1)/(2W) + (P-1)c with split ones.

**Equal micro-batches.** If micro-batches have the same path and cuts, we may number them as they start any one action.
So one of them starts it at the earliest after as many of its fellows as it has before it.

**Memory.** Take an action F on a rank and later one of the same micro-batch, G, or F itself. From the start of its F to
the end of its backward of G, a micro-batch holds all that it had stored on the rank up to F, say f bytes. The first of
several micro-batches that gets to the end of that way held g bytes when it had stored G, and all the others were on
their way, too. So at most 1 + (cap - g) / f micro-batches, rounded down, are on that way at the same time; say n. Then
the (n+1)-th micro-batch starts its F only after some micro-batch has got to the end of that way, the (n+2)-th after
another one, and so on: each start comes at least the time of that way after the n-th start before it.

**Messages that wait for each other.** If the messages of a rank share channels, as over NCCL, a channel carries one
message after the other. So it is bounded in the same way as a rank: the head of a message ends with the action that
sends it, and its tail begins with the actions that need it. Where buffers hold messages, one takes less of its sender's
channel, and travels on afterwards, and less of its receiver's, where it cannot be before it has travelled:

    sender     head ├─ send ─┤ the rest of its way, and tail
    receiver   head, and its way but for the last part of it ├─ receive ─┤ tail

The bound ignores that ranks wait for each other beyond a single chain of needs, what two ranks do to each other when
both are short of memory, and that a message waits for the actions before it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.cost.columns import Columns, columns
from penstock.cost.cost import Cost
from penstock.ir.action import BACKWARD, FORWARD, WEIGHTS
from penstock.ir.compiled import compile_if_large
from penstock.ir.schedule import Schedule
from penstock.ir.table import Floats, Ints
from penstock.schedules.list_scheduling import users_of

# Bytes that differ by less than this share count as equal.
BYTES_ROUNDING = 1e-9
PASSES = 5  # over all actions, in the least case


def lower_bound(
    schedule: Schedule, cost: Cost, cap: float | Sequence[float] | None = None
) -> float:
    """Return a time that no lanes with these stages, paths, cuts and split backwards can beat.

    cap: the most bytes of activations on a rank; None, one number, or one for each rank.
    """
    chains = _Chains(schedule, cost)
    bound = chains.bound(chains.heads)
    if len(set(schedule.microbatches)) > 1 or len(schedule.microbatches) < 2:
        return bound
    if len(set(chains.split_by_microbatch())) > 1:
        return bound
    caps = np.broadcast_to(
        np.asarray(np.inf if cap is None else cap, dtype=np.float64), (schedule.ranks,)
    )
    for anchor in _anchors(schedule, chains, caps):
        raised = chains.raise_heads(anchor)
        bound = max(bound, chains.bound(raised))
    return bound


class _Chains:
    """The longest chains of needs of a schedule."""

    def __init__(self, schedule: Schedule, cost: Cost) -> None:
        self.schedule = schedule
        self.costs: Columns = columns(schedule, cost)
        costs = self.costs
        table = schedule.table
        self.hops = np.where(costs.link >= 0, costs.latency + costs.wire, 0.0)
        self.user_start, self.users = users_of(table.needs)
        self.heads = self.longest(np.zeros(len(table)))
        from_start = longest_tails(schedule, costs)
        self.tails = from_start - costs.seconds
        self.channels = _channels(
            schedule, cost.network.channels, self.costs, from_start
        )

    def longest(self, earliest: Floats) -> Floats:
        """Return when each action can start if it cannot start before `earliest` and its needs have arrived."""
        table = self.schedule.table
        run = compile_if_large(_run_heads, len(table) * PASSES)
        return run(
            table.order,
            table.rank,
            self.user_start,
            self.users,
            self.costs.seconds,
            self.hops,
            earliest,
        )

    def bound(self, heads: Floats) -> float:
        """Return the largest head, work and tail of any set of actions of a rank, or of messages on a channel."""
        table = self.schedule.table
        run = compile_if_large(_run_preemptive, len(table) * PASSES)
        bound = 0.0
        order = np.lexsort((heads, table.rank))
        for begin, end in zip(
            table.first[:-1].tolist(), table.first[1:].tolist(), strict=True
        ):
            mine = order[begin:end]
            pause = self.costs.pause[mine]
            busy = self.costs.seconds[mine] + pause
            bound = max(bound, run(heads[mine], busy, self.tails[mine] - pause))
        for channel in self.channels:
            sender = channel.sender
            ready = heads[sender] + self.costs.seconds[sender] + channel.wait
            order = np.argsort(ready, kind="stable")
            channel_busy = channel.busy[order]
            bound = max(bound, run(ready[order], channel_busy, channel.tail[order]))
        return float(bound)

    def split_by_microbatch(self) -> list[bytes]:
        """Return for each micro-batch which of its backwards are split."""
        table = self.schedule.table
        is_split = table.then == WEIGHTS
        filled = table.at >= 0
        marks = np.zeros(len(table.at), dtype=np.bool_)
        marks[filled] = is_split[table.at[filled]]
        return [
            marks[begin:end].tobytes()
            for begin, end in zip(table.base[:-1], table.base[1:], strict=True)
        ]

    def raise_heads(self, anchor: _Anchor) -> Floats:
        """Return the heads if micro-batches start the anchor in the order of their numbers."""
        table = self.schedule.table
        numbers = [
            int(table.at[table.slot(FORWARD, m, anchor.position, anchor.piece)])
            for m in range(len(self.schedule.microbatches))
        ]
        starts = [float(self.heads[numbers[0]])]
        seconds = float(self.costs.seconds[numbers[0]])
        for number in range(1, len(numbers)):
            start = starts[-1] + seconds
            for count, way in anchor.ways:
                if number >= count:
                    start = max(start, starts[number - count] + way)
            starts.append(start)
        earliest = np.zeros(len(table))
        earliest[numbers] = starts
        return self.longest(earliest)


@dataclass(frozen=True, slots=True)
class _ChannelLoad:
    """The messages on one channel of one rank, which sends some of them and receives the others."""

    sender: Ints  # the action whose result a message is
    wait: (
        Floats  # from the end of that action to when the message can occupy the channel
    )
    busy: Floats  # how long it occupies the channel
    tail: Floats  # from then to the end of the step


def _channels(
    schedule: Schedule, channels: int | None, costs: Columns, from_start: Floats
) -> list[_ChannelLoad]:
    """Return the messages on each channel of each rank. `from_start` has the longest chain that each action begins."""
    if channels is None:
        return []
    table = schedule.table
    target = costs.target
    tails = np.zeros(len(table))
    for needed in table.needs.T:
        user = np.flatnonzero(needed >= 0)
        user = user[table.rank[needed[user]] != table.rank[user]]
        np.maximum.at(tails, needed[user], from_start[user])
    channel = np.where(table.rank < target, 1 % channels, 0)
    hop = costs.latency + costs.wire
    sending = np.minimum(costs.send, hop)
    loads = []
    for rank in range(schedule.ranks):
        is_here = (target >= 0) & ((table.rank == rank) | (target == rank))
        for number in range(channels):
            sender = np.flatnonzero(is_here & (channel == number))
            if not len(sender):
                continue
            is_sent = table.rank[sender] == rank
            on_its_way = hop[sender]
            busy = np.where(is_sent, sending[sender], costs.receive[sender])
            wait = np.where(is_sent, 0.0, on_its_way - busy)
            tail = tails[sender] + np.where(is_sent, on_its_way - busy, 0.0)
            loads.append(_ChannelLoad(sender, wait, busy, tail))
    return loads


def longest_tails(schedule: Schedule, costs: Columns) -> Floats:
    """Return the time from the start of each action to the end of the longest chain of actions that it begins."""
    table = schedule.table
    hops = np.where(costs.link >= 0, costs.latency + costs.wire, 0.0)
    user_start, users = users_of(table.needs)
    run = compile_if_large(_run_tails, len(table))
    return run(table.order, table.rank, user_start, users, costs.seconds, hops)


# ---------------------------------------------------------------- memory
@dataclass(frozen=True, slots=True)
class _Anchor:
    """A forward, by its position on the path and its slice, and how many micro-batches are on the way from there.

    ways: pairs of a count n and the seconds by which a start comes after the n-th start before it.
    """

    position: int
    piece: int
    ways: tuple[tuple[int, float], ...]


def _anchors(schedule: Schedule, chains: _Chains, caps: Floats) -> Iterator[_Anchor]:
    """Yield the forwards by which micro-batches may be numbered, with what memory says about them."""
    microbatch = schedule.microbatches[0]
    pieces = microbatch.slices
    if not np.isfinite(caps).any():
        yield _Anchor(0, 0, ())
        return
    for position, stage in enumerate(microbatch.path):
        cap = float(caps[schedule.stages[stage].rank])
        for piece in sorted({0, pieces - 1}):
            ways: tuple[tuple[int, float], ...] = ()
            if np.isfinite(cap):
                ways = tuple(_ways(schedule, chains, position, piece, cap))
            if position == piece == 0 or any(
                n < len(schedule.microbatches) for n, _ in ways
            ):
                yield _Anchor(position, piece, ways)


def _ways(
    schedule: Schedule, chains: _Chains, position: int, piece: int, cap: float
) -> Iterator[tuple[int, float]]:
    """Yield the ways from a forward to backwards of its micro-batch on the same rank, as an anchor has them."""
    table = schedule.table
    microbatch = schedule.microbatches[0]
    rank = schedule.stages[microbatch.path[position]].rank
    last = microbatch.slices - 1
    on_rank = [
        at
        for at, stage in enumerate(microbatch.path)
        if schedule.stages[stage].rank == rank
    ]

    def number(kind: int, at: int, slice_: int) -> int:
        return int(table.at[table.slot(kind, 0, at, slice_)])

    def stored(at: int, slice_: int) -> list[tuple[int, int]]:
        """Positions and slices of the forwards on this rank that have started once this one starts."""
        return [
            (other, k) for other in on_rank if other <= at for k in range(slice_ + 1)
        ]

    def stored_bytes(at: int, slice_: int) -> float:
        forwards = [number(FORWARD, *one) for one in stored(at, slice_)]
        return float(chains.costs.gain[forwards].sum())

    held = stored_bytes(position, piece)
    if held <= 0.0:
        return
    earliest = np.full(len(table), -np.inf)
    earliest[number(FORWARD, position, piece)] = 0.0
    since = chains.longest(earliest)
    for turn in on_rank:
        reserve = stored_bytes(turn, last)
        if turn < position or reserve > cap * (1 + BYTES_ROUNDING):
            continue
        count = 1 + int((cap - reserve) / held + BYTES_ROUNDING)
        # All other backwards of what is stored come after this one.
        backward = number(BACKWARD, turn, last)
        way = float(since[backward] + chains.costs.seconds[backward])
        if table.then[backward] == WEIGHTS and chains.costs.loss[backward] == 0.0:
            # An I that frees nothing leaves all of it until its own W, or the next I, has ended.
            rest = [number(WEIGHTS, turn, last)]
            for at, k in stored(position, piece):
                if (at, k) != (turn, last):
                    rest.append(number(BACKWARD, at, k))
            way += float(chains.costs.seconds[rest].min())
        yield count, way


# ---------------------------------------------------------------- loops
def _run_heads(
    order: Ints,
    rank: Ints,
    user_start: Ints,
    users: Ints,
    seconds: Floats,
    hops: Floats,
    earliest: Floats,
) -> Floats:
    head = earliest.copy()
    for number in order:
        end = head[number] + seconds[number]
        for user in users[user_start[number] : user_start[number + 1]]:
            hop = hops[number] if rank[user] != rank[number] else 0.0
            head[user] = max(head[user], end + hop)
    return head


def _run_tails(
    order: Ints,
    rank: Ints,
    user_start: Ints,
    users: Ints,
    seconds: Floats,
    hops: Floats,
) -> Floats:
    tail = np.zeros(len(order))
    for index in range(len(order) - 1, -1, -1):
        number = order[index]
        longest = 0.0
        for user in users[user_start[number] : user_start[number + 1]]:
            hop = hops[number] if rank[user] != rank[number] else 0.0
            longest = max(longest, tail[user] + hop)
        tail[number] = longest + seconds[number]
    return tail


def _run_preemptive(head: Floats, seconds: Floats, tail: Floats) -> float:
    """Return the least time of one rank that may interrupt its actions; they come in the order of their heads."""
    # A heap of (negative tail, seconds left); `range(0)` tells the compiler the type of its entries.
    ready = [(0.0, 0.0) for _ in range(0)]
    now = 0.0
    bound = 0.0
    index = 0
    while index < len(head) or len(ready) > 0:
        if len(ready) == 0:
            now = max(now, head[index])
        while index < len(head) and head[index] <= now:
            heapq.heappush(ready, (-tail[index], seconds[index]))
            index += 1
        longest, left = heapq.heappop(ready)
        if index < len(head) and head[index] < now + left:
            heapq.heappush(ready, (longest, left - (head[index] - now)))
            now = head[index]
        else:
            now += left
            bound = max(bound, now - longest)
    return bound
