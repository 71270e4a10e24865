"""Who runs when, if every node takes the next of what waits there: the search's own, quick simulation.

    path of a micro-batch    d ── a ── b ── c ── d         there: F F F F, and the head on the data node d
                             d ── a ── b ── c ── d         and back
    in waves                 d ── a ── b ── c ─┐           every node is passed twice, with half of its part each time:
                             d ── a ── b ── c ─┘           nothing has to be carried home

A node is free again a `gap` after a task has ended; the task's message leaves at once. A forward needs a slot on the
node, which its backward gives back. What waits is taken by a `Turn`. What comes out is an order on every node, and with
it a `Schedule`; `penstock.sim.simulate` gives the same times for it (a test compares the two). Times are compared as
they are: where two events fall together, rounding decides, as it does in the published simulator. (It matters there:
with ties within a nanosecond taken as such, its 33.31 s of instance A become 33.57 s.)

A loop of its own, because a search asks thousands of times, and because a list of lanes cannot say "first come, first
served". It is compiled at once, whatever the size.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from penstock.ir.compiled import COMPILE_FROM, at_speed
from penstock.ir.table import Floats, Ints

FAR = 1e7  # seconds: later than anything


class QueueOrder(IntEnum):
    """Which of the waiting tasks a node takes."""

    ARRIVAL = 0  # first come, first served; micro-batches that start here last
    BACKWARD = 1  # backwards first, else as they come
    OLDEST = 2  # the micro-batch with the lowest number
    TAIL = 3  # the micro-batch with the longest way left; backwards first
    URGENT = 4  # the longest way left, backward or not


@dataclass(frozen=True, slots=True, eq=False)
class Traffic:
    """What everything takes, as arrays: one row a node, a part (the head last), a slice."""

    latency: Floats  # seconds [node, node]
    byte: Floats  # seconds a byte [node, node]
    slow: Floats  # seconds of a second of work [node]
    slots: Ints  # micro-batches it can hold [node]
    forward: Floats  # seconds [part, slice]
    backward: Floats
    message: Floats  # bytes [part, slice]
    gap: float = 0.0  # seconds between two tasks on a node
    first_gap: float = 0.0  # the same, after a micro-batch's first task
    serial: bool = False  # a link carries one message at a time

    @property
    def nodes(self) -> int:
        """How many."""
        return len(self.slow)

    @property
    def slices(self) -> int:
        """Of a micro-batch."""
        return int(self.forward.shape[1])

    def hop(self, part: int) -> Floats:
        """Seconds from node to node for all of a part's message, one slice after the other where links are serial."""
        size = self.message[part].sum() if self.serial else self.message[part].max()
        whole: Floats = self.latency + self.byte * size
        return whole


@dataclass(frozen=True, slots=True, eq=False)
class Flow:
    """When everything started, [micro-batch, position, slice, forward or backward], and when nodes were done."""

    start: Floats
    makespan: float  # of the last backward; inf: micro-batches wait for each other in a circle
    last: Floats  # end of the last backward on each node
    finish: Floats  # of each micro-batch


def simulate_flow(
    traffic: Traffic,
    nodes: Ints,
    parts: Ints,
    turn: QueueOrder = QueueOrder.ARRIVAL,
    after: Ints | None = None,
    release: Floats | None = None,
    delay: Floats | None = None,
    careful: bool = False,
) -> Flow:
    """The times of micro-batches that pass these nodes, with these parts: one row a micro-batch.

    after: the micro-batch that must be back before this one starts (-1: none); release: not before this time; delay:
    how far back in the queue, in seconds. Careful: a node never gives its last slot to a young micro-batch while an
    older one will need it, so that no circle can arise.
    """
    count, length = nodes.shape
    turns = length // 2 if _doubles(nodes) else length - 1
    start = np.full((count, length, traffic.slices, 2), -1.0)
    last, finish = np.zeros(traffic.nodes), np.zeros(count)
    free = np.zeros((traffic.nodes, traffic.nodes) if traffic.serial else (1, 1))
    makespan = at_speed(_run, COMPILE_FROM)(
        nodes,
        parts,
        turns,
        np.full(count, -1, dtype=np.int64) if after is None else after,
        np.zeros(count) if release is None else release,
        np.zeros(count) if delay is None else delay,
        traffic.forward,
        traffic.backward,
        traffic.message,
        traffic.slow,
        traffic.slots,
        traffic.latency,
        traffic.byte,
        traffic.gap,
        traffic.first_gap,
        traffic.serial,
        free,
        int(turn),
        careful,
        start,
        last,
        finish,
    )
    return Flow(start, float(makespan), last, finish)


def _doubles(nodes: Ints) -> bool:
    """Whether the paths are waves: they turn round on their last node."""
    length = nodes.shape[1]
    return (
        length % 2 == 0
        and length > 2
        and bool((nodes[:, length // 2 - 1] == nodes[:, length // 2]).all())
    )


def _run(  # noqa: PLR0912, PLR0915
    nodes: Ints,
    parts: Ints,
    held: int,
    after: Ints,
    release: Floats,
    delay: Floats,
    forward: Floats,
    backward: Floats,
    message: Floats,
    slow: Floats,
    slots: Ints,
    latency: Floats,
    byte: Floats,
    gap: float,
    first_gap: float,
    serial: bool,
    link: Floats,
    turn: int,
    careful: bool,
    start: Floats,
    last: Floats,
    finish: Floats,
) -> float:
    """Positions below `held` take a slot. An action is a number: micro-batch, position, slice, 0 there or 1 back."""
    count, length = nodes.shape
    slices = forward.shape[1]
    stride = length * slices * 2
    waiting = np.zeros(count * stride, np.int64)
    key = np.zeros(count * stride)
    behind = np.full(count * stride, -1, np.int64)  # the next in the same queue
    queue = np.full(len(slow), -1, np.int64)
    used, busy = np.zeros(len(slow), np.int64), np.zeros(len(slow), np.bool_)
    changed = np.zeros(len(slow), np.int64)  # nodes to look at
    marked = np.zeros(len(slow), np.bool_)
    events = [
        (0.0, np.int64(0)) for _ in range(0)
    ]  # (time, action that lacks one need less, or ~node that is free)
    follower = np.full(count, -1, np.int64)
    tail = np.zeros(
        (count, length, 2)
    )  # seconds from a task's start to the micro-batch's end, if nobody is in its way
    for m in range(count):
        if after[m] >= 0:
            follower[after[m]] = m
        else:
            heapq.heappush(events, (release[m], np.int64(m * stride)))
        for p in range(length):
            for s in range(slices):
                at = m * stride + (p * slices + s) * 2
                waiting[at] = (1 if p > 0 or s == 0 else 0) + (1 if s > 0 else 0)
                waiting[at + 1] = 1 + (1 if s < slices - 1 else 0)
        way = 0.0
        for p in range(length):
            way += backward[parts[m, p]].sum() * slow[nodes[m, p]]
            tail[m, p, 1] = way
            if p < length - 1 and nodes[m, p] != nodes[m, p + 1]:
                way += latency[nodes[m, p + 1], nodes[m, p]]
                way += byte[nodes[m, p + 1], nodes[m, p]] * message[parts[m, p]].sum()
        for p in range(length - 1, -1, -1):
            way += forward[parts[m, p]].sum() * slow[nodes[m, p]]
            tail[m, p, 0] = way
            if p > 0 and nodes[m, p] != nodes[m, p - 1]:
                way += latency[nodes[m, p - 1], nodes[m, p]]
                way += (
                    byte[nodes[m, p - 1], nodes[m, p]] * message[parts[m, p - 1]].sum()
                )
    # who will pass each node, the oldest first; `low`: the first of them that has not begun there
    first = np.zeros(len(slow) + 1, np.int64)
    low = np.zeros(len(slow), np.int64)
    guests = np.zeros(count * held if careful else 1, np.int64)
    if careful:
        for m in range(count):
            for p in range(held):
                first[nodes[m, p] + 1] += 1
        for n in range(len(slow)):
            first[n + 1] += first[n]
            low[n] = first[n]
        fill = first[:-1].copy()
        for m in range(count):
            for p in range(held):
                guests[fill[nodes[m, p]]] = m * length + p
                fill[nodes[m, p]] += 1
    done, makespan, looks = 0, 0.0, 0

    while len(events) > 0:
        now = events[0][0]
        while len(events) > 0 and events[0][0] <= now:
            _, at = heapq.heappop(events)
            if at < 0:
                here = ~at
                busy[here] = False
            else:
                waiting[at] -= 1
                m = at // stride
                p = at % stride // (2 * slices)
                here = nodes[m, p]
                if waiting[at] == 0:
                    back = at & 1
                    if turn == 0:
                        key[at] = now if back == 1 or p > 0 else FAR + m
                    elif turn == 1:
                        key[at] = (
                            now if back == 1 else (FAR + now if p > 0 else 2 * FAR + m)
                        )
                    elif turn == 2:
                        key[at] = m
                    elif turn == 3:
                        key[at] = (0.0 if back == 1 else FAR) - tail[m, p, back]
                    else:
                        key[at] = -tail[m, p, back]
                    key[at] += delay[m]
                    behind[at] = queue[here]
                    queue[here] = at
            if not marked[here]:
                marked[here] = True
                changed[looks] = here
                looks += 1
        for look in range(looks):
            here = changed[look]
            marked[here] = False
            if busy[here]:
                continue
            best, before_best, before = np.int64(-1), np.int64(-1), np.int64(-1)
            at = queue[here]
            while at >= 0:
                fits = (
                    best < 0
                    or key[at] < key[best]
                    or (key[at] == key[best] and at < best)
                )
                p = at % stride // (2 * slices)
                if fits and at & 1 == 0 and p < held and at % (2 * slices) == 0:
                    m = at // stride
                    spare = slots[here] - used[here] - 1
                    if spare < 0:
                        fits = False
                    elif careful:
                        while low[here] < first[here + 1]:
                            its = guests[low[here]]
                            if start[its // length, its % length, 0, 0] < 0.0:
                                break
                            low[here] += 1
                        if (
                            low[here] < first[here + 1]
                            and guests[low[here]] // length < m
                        ):
                            for place in range(first[here], low[here]):
                                its = guests[place]
                                if start[its // length, its % length, 0, 1] < 0.0:
                                    spare += 1
                            fits = spare >= 1
                if fits:
                    best, before_best = at, before
                before = at
                at = behind[at]
            if best < 0:
                continue
            if before_best < 0:
                queue[here] = behind[best]
            else:
                behind[before_best] = behind[best]
            m = best // stride
            p = best % stride // (2 * slices)
            s = best % (2 * slices) // 2
            back = best & 1
            part = parts[m, p]
            end = (
                now
                + (forward[part, s] if back == 0 else backward[part, s]) * slow[here]
            )
            start[m, p, s, back] = now
            busy[here] = True
            pause = first_gap if back == 0 and p == 0 else gap
            if back == 0:
                if p < held and s == 0:
                    used[here] += 1
                if p == length - 1 and slices == 1:  # the head goes back at once
                    start[m, p, s, 1] = end
                    end += backward[part, s] * slow[here]
                    back = np.int64(1)
                elif p == length - 1:
                    heapq.heappush(events, (end, best + 1))
                    pause = 0.0
                if s < slices - 1:
                    heapq.heappush(events, (end, best + 2))
            if back == 1:
                if p < held and s == 0:
                    used[here] -= 1
                if s > 0:
                    heapq.heappush(
                        events, (end, m * stride + (p * slices + s - 1) * 2 + 1)
                    )
                last[here] = max(last[here], end)
                if p == 0 and s == 0:
                    done += 1
                    finish[m] = end
                    makespan = max(makespan, end)
                    if follower[m] >= 0:
                        heapq.heappush(
                            events,
                            (
                                max(end, release[follower[m]]),
                                np.int64(follower[m] * stride),
                            ),
                        )
            step = p + 1 if back == 0 else p - 1
            if 0 <= step < length:
                there = nodes[m, step]
                arrives = end
                if there != here:
                    wire = (
                        byte[here, there]
                        * message[part if back == 0 else parts[m, step], s]
                    )
                    if serial:
                        leave = max(end, link[here, there])
                        link[here, there] = leave + wire
                        arrives = leave + wire + latency[here, there]
                    else:
                        arrives = end + wire + latency[here, there]
                heapq.heappush(
                    events,
                    (arrives, np.int64(m * stride + (step * slices + s) * 2 + back)),
                )
            heapq.heappush(events, (end + pause, np.int64(~here)))
        looks = 0
    return makespan if done == count else np.inf
