"""The quick simulator of the path search: every node serves its own queue.

    path of a micro-batch    d ── a ── b ── c ── d       forwards on d a b c, then the head on the data node d,
                             d ── a ── b ── c ── d       then the backwards on the same nodes in reverse
    in waves                 d ── a ── b ── c ─┐         visits every node twice, with half of its part each time,
                             d ── a ── b ── c ─┘         so that the last forward is on the data node already

A node is free again a `gap` after a task has ended, but the task's message leaves at once. A forward needs a slot on
its node, and the backward returns the slot. A `QueueOrder` says which waiting task a node takes next. The result is an
order of the tasks on every node and thus a `Schedule`, for which `penstock.sim.simulate` gives the same times (a test
compares the two).

Which task waits for which comes from the table `penstock.ir.needs.RULES`: `task_graph` turns it into arrays, once for
each shape of a path, and the loop below only walks these arrays.

The search needs its own simulator because it asks thousands of times, and because the lanes of a schedule cannot
express "first come, first served". The loop is always compiled, whatever the size of the problem.

Times are compared exactly: if two events coincide, rounding decides, as in the simulator of the paper. This matters:
if events within a nanosecond counted as simultaneous, the published 33.31 s of instance A would become 33.57 s.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np

from penstock.cost.allreduce import choose_sums
from penstock.ir.compiled import MIN_COMPILED_SIZE, compile_if_large
from penstock.ir.needs import BACKWARD, FORWARD, RULES
from penstock.ir.table import Floats, Ints
from penstock.plan.paths.problem import (
    Problem,
    QueueOrder,
    Traffic,
    expand_paths,
    start_conditions,
)

FAR_FUTURE_SECONDS = 1e7  # later than any event of a step
NO_TASK = -1
NO_TURN = -1  # of a task whose node serves its queue freely
NO_TURNS = np.zeros(0, dtype=np.int64)
MAX_UNLOCKED_TASKS = 2  # tasks that wait directly for one task, in a reduced graph


@dataclass(frozen=True, slots=True, eq=False)
class PathTimes:
    """The start of every task, and the ends of nodes and micro-batches."""

    start: Floats  # [micro-batch, position, slice, forward or backward]
    makespan: float  # end of the last backward; infinite if micro-batches deadlock
    last: Floats  # end of the last backward on each node
    last_up: Floats  # of its head or, in a wave, of the way up
    overdue: float  # seconds by which tasks wait longer than they may, all together
    finish: Floats  # end of each micro-batch


# ---------------------------------------------------------------- who waits for whom
class TaskGraph(NamedTuple):
    """The dependencies among the tasks of one micro-batch.

    A task is a number: (position x slices + slice) x 2, plus 1 for a backward.

    needed: how many tasks each task waits for.
    unlocked: the tasks that wait for each task; unused columns hold -1.
    """

    needed: Ints
    unlocked: Ints


@lru_cache(maxsize=256)
def task_graph(length: int, slices: int) -> TaskGraph:
    """Derive the dependencies along a path of `length` positions from the rules of `penstock.ir.needs`.

    A dependency that follows from others is left out, to save events: a backward need not wait for its own
    forward if it waits for the backward on the next position, which comes later anyway.
    """
    size = length * slices * 2
    needed = np.zeros(size, dtype=np.int64)
    unlocked = np.full((size, MAX_UNLOCKED_TASKS), NO_TASK, dtype=np.int64)
    columns = np.zeros(size, dtype=np.int64)
    for task in range(size):
        for earlier in _direct_needs(task, length, slices):
            unlocked[earlier, columns[earlier]] = task
            columns[earlier] += 1
            needed[task] += 1
    return TaskGraph(needed, unlocked)


def rule_needs(task: int, length: int, slices: int) -> list[int]:
    """Return the tasks of the same micro-batch that a task needs, by the rules of `penstock.ir.needs`."""
    place, kind = divmod(task, 2)
    position, piece = divmod(place, slices)
    needs = []
    for rule in RULES:
        if rule.kind != (BACKWARD if kind else FORWARD):
            continue
        needed_position = position + rule.path
        needed_slice = piece + rule.slice
        if 0 <= needed_position < length and 0 <= needed_slice < slices:
            needed_place = needed_position * slices + needed_slice
            needs.append(2 * needed_place + int(rule.needed == BACKWARD))
    return needs


def _direct_needs(task: int, length: int, slices: int) -> list[int]:
    """Return the needs of a task that do not follow from its other needs.

    The rules are local, so a need that follows from another one does so within two steps.
    """
    needs = rule_needs(task, length, slices)
    implied = set()
    for other in needs:
        for before in rule_needs(other, length, slices):
            implied.add(before)
            implied.update(rule_needs(before, length, slices))
    return [need for need in needs if need not in implied]


# ---------------------------------------------------------------- the simulation
def simulate_paths(
    traffic: Traffic,
    nodes: Ints,
    parts: Ints,
    queue_order: QueueOrder | Ints = QueueOrder.ARRIVAL,
    after: Ints | None = None,
    release: Floats | None = None,
    delay: Floats | None = None,
    careful: bool = False,
    slots: Ints | None = None,
    turns: Ints | None = None,
) -> PathTimes:
    """Return the times of micro-batches that visit these `nodes` with these `parts`, one row per micro-batch.

    queue_order: of all micro-batches, or of each.
    slots: micro-batches that each node can hold with its part; by default the most that it can hold.
    after: the micro-batch that must be back before this one starts, or -1.
    release: the earliest start of each micro-batch.
    delay: seconds by which a micro-batch stands further back in the queues of its tasks: forward and
        backward of its first position, then of the next [micro-batch, task].
    careful: a node never gives its last slot to a young micro-batch while an older one will need it. This
        prevents deadlocks.
    turns: the place of each task in the order of its node, or NO_TURN if the node serves its queue freely
        [micro-batch, task]. A node waits for the task whose turn it is, even if others are ready.
    """
    count, length = nodes.shape
    holding = length // 2 if _are_waves(nodes) else length - 1
    graph = task_graph(length, traffic.slices)
    start = np.full((count, length, traffic.slices, 2), -1.0)
    last = np.zeros(traffic.nodes)
    last_up = np.zeros(traffic.nodes)
    finish = np.zeros(count)
    overdue = np.zeros(1)
    links = (traffic.nodes, traffic.nodes) if traffic.serial else (1, 1)
    link_free = np.zeros(links)
    makespan = compile_if_large(_run, MIN_COMPILED_SIZE)(
        nodes,
        parts,
        holding,
        graph.needed,
        graph.unlocked,
        np.full(count, -1, dtype=np.int64) if after is None else after,
        np.zeros(count) if release is None else release,
        np.zeros((count, 2 * length)) if delay is None else delay,
        traffic.forward,
        traffic.backward,
        traffic.message,
        traffic.slow,
        traffic.slots if slots is None else slots,
        traffic.latency,
        traffic.byte,
        traffic.gap,
        traffic.first_gap,
        traffic.serial,
        link_free,
        np.full(count, queue_order) if isinstance(queue_order, int) else queue_order,
        careful,
        start,
        last,
        last_up,
        traffic.wait,
        overdue,
        finish,
        NO_TURNS if turns is None else turns.ravel(),
    )
    return PathTimes(start, float(makespan), last, last_up, float(overdue[0]), finish)


def _are_waves(nodes: Ints) -> bool:
    """Whether the paths are waves, which turn around on the node in their middle."""
    length = nodes.shape[1]
    if length % 2 or length <= 2:
        return False
    middle = length // 2
    return bool((nodes[:, middle - 1] == nodes[:, middle]).all())


def _run(  # noqa: PLR0912, PLR0915
    nodes: Ints,
    parts: Ints,
    holding: int,
    needed: Ints,
    unlocked: Ints,
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
    link_free: Floats,
    queue_orders: Ints,
    careful: bool,
    start: Floats,
    last: Floats,
    last_up: Floats,
    wait: float,
    overdue: Floats,
    finish: Floats,
    turns: Ints,
) -> float:
    """Process the events in order of time. Only positions below `holding` take a slot.

    An action is the number of a task in `TaskGraph`, plus `stride` times its micro-batch. The
    functions inside become part of this loop when it is compiled; each is called in one place.

        events ──► arrive: an action lacks one need less, and may enter the queue of its node
          ▲        choose: a free node takes the action with the least key that may start
          └─────── begin:  its end and its messages are new events
    """
    count, length = nodes.shape
    slices = forward.shape[1]
    stride = length * slices * 2
    waiting = np.zeros(count * stride, np.int64)
    key = np.zeros(count * stride)
    ready = np.zeros(count * stride)
    behind = np.full(count * stride, -1, np.int64)  # the next in the same queue
    queue = np.full(len(slow), -1, np.int64)
    used = np.zeros(len(slow), np.int64)
    busy = np.zeros(len(slow), np.bool_)
    has_turns = len(turns) > 0
    served = np.zeros(len(slow), np.int64)  # tasks that have begun on each node
    changed = np.zeros(len(slow), np.int64)  # nodes to look at
    marked = np.zeros(len(slow), np.bool_)
    # An event is (time, action that has one need less) or (time, ~node that becomes free).
    events = [(0.0, np.int64(0)) for _ in range(0)]
    follower = np.full(count, -1, np.int64)
    # seconds from a task's start to the end of its micro-batch, if nothing is in its way
    tail = np.zeros((count, length, 2))
    # guests: who will visit each node, the oldest first; node n has those from first[n] to first[n + 1].
    # low: the first of them that has not begun there.
    first = np.zeros(len(slow) + 1, np.int64)
    low = np.zeros(len(slow), np.int64)
    guests = np.zeros(count * holding if careful else 1, np.int64)

    def fill_tail(m: int) -> None:
        """Add up the way of a micro-batch from its end: the backwards, then the forwards."""
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
                size = message[parts[m, p - 1]].sum()
                way += byte[nodes[m, p - 1], nodes[m, p]] * size

    def list_guests() -> None:
        """List who will visit each node."""
        for m in range(count):
            for p in range(holding):
                first[nodes[m, p] + 1] += 1
        for n in range(len(slow)):
            first[n + 1] += first[n]
            low[n] = first[n]
        fill = first[:-1].copy()
        for m in range(count):
            for p in range(holding):
                guests[fill[nodes[m, p]]] = m * length + p
                fill[nodes[m, p]] += 1

    def key_of(m: np.int64, p: np.int64, back: np.int64, now: float) -> float:  # noqa: PLR0911
        """The rank of a task in the queue of its node: the least goes first."""
        queue_order = queue_orders[m]
        if queue_order == 0:
            return now if back == 1 or p > 0 else FAR_FUTURE_SECONDS + m
        if queue_order == 1:
            if back == 1:
                return now
            if p > 0:
                return FAR_FUTURE_SECONDS + now
            return 2 * FAR_FUTURE_SECONDS + m
        if queue_order == 2:
            return float(m)
        if queue_order == 3:
            begin = 0.0 if back == 1 else FAR_FUTURE_SECONDS
            return float(begin - tail[m, p, back])
        return float(-tail[m, p, back])

    def leaves_room(here: np.int64, m: np.int64, spare: int) -> bool:
        """Whether a node with `spare` free slots can let a guest in before an older one."""
        while low[here] < first[here + 1]:
            guest = guests[low[here]]
            if start[guest // length, guest % length, 0, 0] < 0.0:
                break
            low[here] += 1
        some_left = low[here] < first[here + 1]
        if not some_left or guests[low[here]] // length >= m:
            return True
        for place in range(first[here], low[here]):
            guest = guests[place]
            if start[guest // length, guest % length, 0, 1] < 0.0:
                spare += 1
        return spare >= 1

    def may_start(here: np.int64, at: np.int64) -> bool:
        """Whether it is the turn of an action, and its node has a slot if it needs one."""
        has_turn = has_turns and turns[at] >= 0
        if has_turn and turns[at] != served[here]:
            return False
        p = at % stride // (2 * slices)
        takes_slot = at & 1 == 0 and p < holding and at % (2 * slices) == 0
        if not takes_slot:
            return True
        spare = slots[here] - used[here] - 1
        if spare < 0:
            return False
        return not careful or has_turn or leaves_room(here, at // stride, spare)

    def choose(here: np.int64) -> np.int64:
        """Take the best action out of the queue of a free node; -1 if none may start."""
        best = np.int64(-1)
        before_best = np.int64(-1)
        before = np.int64(-1)
        at = queue[here]
        while at >= 0:
            comes_first = best < 0 or key[at] < key[best]
            if not comes_first and key[at] == key[best]:
                comes_first = at < best
            if comes_first and may_start(here, at):
                best = at
                before_best = before
            before = at
            at = behind[at]
        if best >= 0:
            if before_best < 0:
                queue[here] = behind[best]
            else:
                behind[before_best] = behind[best]
            served[here] += 1
        return best

    def arrival(here: np.int64, there: np.int64, size: float, end: float) -> float:
        """When a message arrives that leaves a node at this end, or as soon as its link is free."""
        wire = byte[here, there] * size
        leave = end
        if serial:
            leave = max(end, link_free[here, there])
            link_free[here, there] = leave + wire
        return float(leave + wire + latency[here, there])

    for m in range(count):
        for task in range(stride):
            waiting[m * stride + task] = needed[task]
        waiting[m * stride] += 1  # the first forward also waits for its release
        if after[m] >= 0:
            follower[after[m]] = m
        else:
            heapq.heappush(events, (release[m], np.int64(m * stride)))
        fill_tail(m)
    if careful:
        list_guests()
    done = 0
    makespan = 0.0
    looks = 0

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
                    ready[at] = now
                    key[at] = key_of(m, p, back, now) + delay[m, 2 * p + back]
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
            best = choose(here)
            if best < 0:
                continue
            m = best // stride
            task = best % stride
            p = task // (2 * slices)
            s = task % (2 * slices) // 2
            back = task & 1
            part = parts[m, p]
            seconds = forward[part, s] if back == 0 else backward[part, s]
            end = now + seconds * slow[here]
            start[m, p, s, back] = now
            if p > 0 or back == 1 or s > 0:
                overdue[0] += max(now - ready[best] - wait, 0.0)
            busy[here] = True
            pause = first_gap if back == 0 and p == 0 else gap
            if back == 0:
                if p < holding and s == 0:
                    used[here] += 1
                if p == length - 1:
                    if slices == 1:  # the backward of the head follows at once
                        task += 1
                        back = np.int64(1)
                        start[m, p, s, 1] = end
                        end += backward[part, s] * slow[here]
                    else:
                        pause = 0.0
            if back == 1:
                if p < holding and s == 0:
                    used[here] -= 1
                last[here] = max(last[here], end)
                if p >= holding:
                    last_up[here] = max(last_up[here], end)
                if p == 0 and s == 0:
                    done += 1
                    finish[m] = end
                    makespan = max(makespan, end)
                    if follower[m] >= 0:
                        begin = max(end, release[follower[m]])
                        heapq.heappush(events, (begin, np.int64(follower[m] * stride)))
            for column in range(unlocked.shape[1]):
                then = unlocked[task, column]
                if then < 0:
                    break
                p_then = then // (2 * slices)
                there = nodes[m, p_then]
                arrives = end
                if there != here:
                    size = message[parts[m, min(p, p_then)], s]
                    arrives = arrival(here, there, size, end)
                heapq.heappush(events, (arrives, np.int64(m * stride + then)))
            heapq.heappush(events, (end + pause, np.int64(~here)))
        looks = 0
    return makespan if done == count else np.inf


# ---------------------------------------------------------------- sums of gradients


def ends_of_sums(
    traffic: Traffic, planned: bool, labels: Ints, last: Floats, last_up: Floats
) -> Floats:
    """Return when each part's gradients are summed, or 0 if it has none to sum.

    last: the end of the last backward of each node.
    last_up: the end of the last backward of its head, or of its way up in a wave.
    """
    times = np.stack([last_up, last, last])
    links = (traffic.latency, traffic.byte)
    return choose_sums(*links, labels, times, traffic.sums, planned).ends


def seconds_of_sums(problem: Problem, labels: Ints) -> Floats:
    """Return how long each part's sums take if all its replicas are done at once."""
    at_once = np.zeros(len(labels))
    return ends_of_sums(problem.traffic, problem.planned_sums, labels, at_once, at_once)


# ---------------------------------------------------------------- solutions
# A solution of a path problem, as the search changes it, and what it is worth.
#
# A *unit* is whatever has a path of its own: one micro-batch, or all micro-batches that use the same
# path in successive rounds. Once its times have been simulated, a solution becomes a schedule.

# A plan counts as this many seconds longer for each second of forbidden waiting.
WAIT_FINE = 10.0
TIME_ROUNDING = 1e-9  # seconds by which equal times may differ
NodePath = tuple[int, ...]
Delays = tuple[float, ...]
Turns = tuple[int, ...]
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Solution:
    """The part of each node, the path of each unit, and the order in which nodes serve their queues.

    labels: the part of each node, or -1 for a node that holds none.
    paths: the nodes that each unit visits; the first is its data node.
    queue_order: which of the waiting tasks a node takes next.
    own_orders: the queue order of each unit, if units that never meet have different ones.
    stagger: seconds between the first starts on a data node.
    delays: seconds by which each unit stands further back in the queues of its tasks, forward and
        backward at each position of its path; empty if no unit does.
    careful: keep slots free for older micro-batches, so that no deadlock can arise.
    turns: the place of each task of each unit in the order of its node, or -1 if that node serves
        its queue; empty if all nodes do.
    """

    labels: tuple[int, ...]
    paths: tuple[NodePath, ...]
    queue_order: QueueOrder
    stagger: float = 0.0
    delays: tuple[Delays, ...] = ()
    careful: bool = False
    own_orders: tuple[QueueOrder, ...] = ()
    turns: tuple[Turns, ...] = ()


def path_in_order(
    data_node: int, node_of_part: dict[int, int], order: Sequence[int]
) -> NodePath:
    """Return the path from a data node over the nodes of these parts."""
    return (data_node, *[node_of_part[part] for part in order])


def simulate_solution(problem: Problem, solution: Solution) -> PathTimes:
    """Return the times of all tasks of a solution."""
    paths = np.array(solution.paths, dtype=np.int64)
    labels = np.array(solution.labels, dtype=np.int64)
    nodes, parts = expand_paths(problem, paths, labels)
    after, release = start_conditions(problem, paths, solution.stagger)
    delay = None
    if solution.delays:
        delay = np.tile(np.array(solution.delays), (problem.policy.rounds, 1))
    return simulate_paths(
        problem.traffic,
        nodes,
        parts,
        _queue_orders(problem, solution),
        after,
        release,
        delay,
        solution.careful,
        problem.traffic.slots_with(labels),
        np.array(solution.turns, dtype=np.int64) if solution.turns else None,
    )


def _queue_orders(problem: Problem, solution: Solution) -> QueueOrder | Ints:
    """Return the queue order of all micro-batches, or of each."""
    if not solution.own_orders:
        return solution.queue_order
    return np.tile(np.array(solution.own_orders), problem.policy.rounds)


def step_end(problem: Problem, times: PathTimes, labels: Ints) -> float:
    """Return the end of the last backward or sum of gradients; with several passes, the mean time of one.

    Seconds that tasks wait for longer than the rules allow are added many times. The end is
    infinite if micro-batches deadlock, or if a part does not fit on one of its nodes.
    """
    if times.makespan == np.inf or problem.traffic.slots_with(labels).min() < 1:
        return math.inf
    fine = WAIT_FINE * times.overdue
    if not problem.has_sums:
        return times.makespan + fine
    sums = ends_of_sums(
        problem.traffic, problem.planned_sums, labels, times.last, times.last_up
    )
    end = max(times.makespan, float(sums.max()))
    return problem.mean_pass(times.makespan, end) + fine


def mean_end_of_sums(problem: Problem, times: PathTimes, labels: Ints) -> float:
    """Return the mean end of the parts' sums, planned ones even if rings are used.

    A ring is as slow as its slowest link, so most moves of a search would change nothing.
    """
    sums = ends_of_sums(problem.traffic, True, labels, times.last, times.last_up)
    return float(sums.mean())


def choose_queueing(problem: Problem, solution: Solution) -> Solution:
    """Return the solution with the queue order, stagger and care that end the step first."""
    labels = np.array(solution.labels)
    best = solution
    least = math.inf
    for queue_order in problem.policy.queue_orders:
        for choice in problem.policy.staggers:
            stagger = problem.stagger(choice)
            for careful in (False, True):
                trial = replace(
                    solution,
                    queue_order=queue_order,
                    stagger=stagger,
                    careful=careful,
                    own_orders=(),
                    turns=(),
                )
                times = simulate_solution(problem, trial)
                end = step_end(problem, times, labels)
                if end < least:
                    best = trial
                    least = end
                if end < math.inf:
                    break  # only solutions that deadlock need care
    return best


def better_queueing(problem: Problem, solution: Solution) -> Solution:
    """Return the solution as it is or with another choice of queueing, whichever is better."""
    chosen = choose_queueing(problem, solution)
    return min((solution, chosen), key=lambda trial: solution_value(problem, trial))


def solution_value(problem: Problem, solution: Solution) -> tuple[float, float]:
    """Return the end of the step and the mean end of the micro-batches. Less is better."""
    labels = np.array(solution.labels)
    times = simulate_solution(problem, solution)
    return step_end(problem, times, labels), float(times.finish.mean())


def units_alone(solution: Solution, units: Sequence[int]) -> Solution:
    """Return the solution of some units alone."""

    def own(values: Sequence[Value]) -> tuple[Value, ...]:
        return tuple(values[unit] for unit in units) if values else ()

    return replace(
        solution,
        paths=own(solution.paths),
        delays=own(solution.delays),
        own_orders=own(solution.own_orders),
        turns=own(solution.turns),
    )
