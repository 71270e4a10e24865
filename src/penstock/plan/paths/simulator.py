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
from itertools import product
from typing import NamedTuple

import numpy as np

from penstock.cost.sums import choose_sums
from penstock.ir.action import BACKWARD, FORWARD
from penstock.ir.compiled import MIN_COMPILED_SIZE, compile_if_large
from penstock.ir.needs import RULES
from penstock.ir.table import Floats, Ints
from penstock.plan.paths.problem import (
    Problem,
    ProblemArrays,
)

FAR_FUTURE_SECONDS = 1e7  # later than any event of a step
NO_TASK = -1
NO_TURN = -1  # of a task whose node serves its queue freely
MAX_UNLOCKED_TASKS = 2  # tasks that wait directly for one task, in a reduced graph


class Visits(NamedTuple):
    """The nodes and the parts that micro-batches visit, and how nodes serve them.

    nodes, parts: of each position of the path of each micro-batch [micro-batch, position].
    holding: only positions before this one take a slot.
    order: the `QueueOrder` of each micro-batch.
    after: the micro-batch that must be back before this one starts, or -1.
    release: the earliest start of each micro-batch.
    delay: seconds by which a micro-batch stands further back in the queues of its tasks: forward and
        backward of its first position, then of the next [micro-batch, task].
    turns: the place of each task in the order of its node, or NO_TURN if the node serves its queue freely
        [micro-batch, task]. A node waits for the task whose turn it is, even if others are ready.
    slots: micro-batches that each node can hold with its part.
    """

    nodes: Ints
    parts: Ints
    holding: int
    order: Ints
    after: Ints
    release: Floats
    delay: Floats
    turns: Ints
    slots: Ints


class PathTimes(NamedTuple):
    """The start of every task, and the ends of nodes and micro-batches.

    start: [micro-batch, position, slice, forward or backward].
    makespan: the end of the last backward; infinite if micro-batches deadlock.
    last: the end of the last backward on each node.
    last_up: the end of the last backward of its head or, in a wave, of the way up.
    overdue: seconds by which tasks wait longer than they may, all together.
    finish: the end of each micro-batch.
    """

    start: Floats
    makespan: float
    last: Floats
    last_up: Floats
    overdue: float
    finish: Floats


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
        if rule.kind != (BACKWARD if kind else FORWARD) or rule.if_any:
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
def simulate_visits(
    arrays: ProblemArrays, visits: Visits, avoid_deadlock: bool
) -> PathTimes:
    """Return the times of micro-batches that visit these nodes with these parts.

    avoid_deadlock: a node never gives its last slot to a young micro-batch while an older one will need it.
    """
    count, length = visits.nodes.shape
    graph = task_graph(length, arrays.slices)
    run = compile_if_large(_run, MIN_COMPILED_SIZE)
    start = np.full((count, length, arrays.slices, 2), -1.0)
    last = np.zeros((2, arrays.nodes))
    finish = np.zeros(count)
    makespan, overdue = run(arrays, visits, graph, avoid_deadlock, start, last, finish)
    return PathTimes(start, makespan, last[0], last[1], overdue, finish)


def tasks_in_order(times: PathTimes) -> list[int]:
    """Return all tasks in order of their starts.

    If starts are equal, a forward that takes no time comes before its own backward.
    """
    starts = times.start.ravel()
    is_backward = np.arange(len(starts)) % 2
    tasks: list[int] = np.lexsort((is_backward, starts)).tolist()
    return tasks


def _run(  # noqa: PLR0912, PLR0915
    arrays: ProblemArrays,
    visits: Visits,
    graph: TaskGraph,
    avoid_deadlock: bool,
    start: Floats,
    last: Floats,
    finish: Floats,
) -> tuple[float, float]:
    """Process the events in order of time, and return the makespan and the seconds of forbidden waiting.

    Fills `start`, `finish`, and the ends of the last backwards [of all or of the head or the way up, node].

    An action is the number of a task in `TaskGraph`, plus `stride` times its micro-batch. The
    functions inside become part of this loop when it is compiled; each is called in one place.

        events ──► arrive: an action lacks one need less, and may enter the queue of its node
          ▲        choose: a free node takes the action with the least key that may start
          └─────── begin:  its end and its messages are new events
    """
    nodes = visits.nodes
    parts = visits.parts
    holding = visits.holding
    turns = visits.turns
    forward = arrays.forward
    backward = arrays.backward
    slow = arrays.slow
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
    served = np.zeros(len(slow), np.int64)  # tasks that have begun on each node
    changed = np.zeros(len(slow), np.int64)  # nodes to look at
    marked = np.zeros(len(slow), np.bool_)
    # An event is (time, action that has one need less) or (time, ~node that becomes free).
    events = [(0.0, np.int64(0)) for _ in range(0)]
    links = len(slow) if arrays.serial else 1
    link_free = np.zeros((links, links))
    follower = np.full(count, -1, np.int64)
    # seconds from a task's start to the end of its micro-batch, if nothing is in its way
    tail = np.zeros((count, length, 2))

    def fill_tail(m: int) -> None:
        """Add up the way of a micro-batch from its end: the backwards, then the forwards."""
        way = 0.0
        for p in range(length):
            way += backward[parts[m, p]].sum() * slow[nodes[m, p]]
            tail[m, p, 1] = way
            if p < length - 1 and nodes[m, p] != nodes[m, p + 1]:
                way += arrays.latency[nodes[m, p + 1], nodes[m, p]]
                way += (
                    arrays.byte[nodes[m, p + 1], nodes[m, p]]
                    * arrays.message[parts[m, p]].sum()
                )
        for p in range(length - 1, -1, -1):
            way += forward[parts[m, p]].sum() * slow[nodes[m, p]]
            tail[m, p, 0] = way
            if p > 0 and nodes[m, p] != nodes[m, p - 1]:
                way += arrays.latency[nodes[m, p - 1], nodes[m, p]]
                size = arrays.message[parts[m, p - 1]].sum()
                way += arrays.byte[nodes[m, p - 1], nodes[m, p]] * size

    def key_of(m: np.int64, p: np.int64, back: np.int64, now: float) -> float:  # noqa: PLR0911
        """The rank of a task in the queue of its node: the least goes first."""
        order = visits.order[m]
        if order == 0:
            return now if back == 1 or p > 0 else FAR_FUTURE_SECONDS + m
        if order == 1:
            if back == 1:
                return now
            if p > 0:
                return FAR_FUTURE_SECONDS + now
            return 2 * FAR_FUTURE_SECONDS + m
        if order == 2:
            return float(m)
        if order == 3:
            begin = 0.0 if back == 1 else FAR_FUTURE_SECONDS
            return float(begin - tail[m, p, back])
        return float(-tail[m, p, back])

    def leaves_room(here: np.int64, m: np.int64, spare: int) -> bool:
        """Whether a node with `spare` free slots can let a micro-batch in before an older one."""
        for older in range(m):
            for p in range(holding):
                if nodes[older, p] != here:
                    continue
                if start[older, p, 0, 0] < 0.0:
                    return spare >= 1
                if start[older, p, 0, 1] < 0.0:
                    spare += 1
        return True

    def may_start(here: np.int64, at: np.int64) -> bool:
        """Whether it is the turn of an action, and its node has a slot if it needs one."""
        turn = turns[at // stride, at % stride]
        if turn >= 0 and turn != served[here]:
            return False
        p = at % stride // (2 * slices)
        takes_slot = at & 1 == 0 and p < holding and at % (2 * slices) == 0
        if not takes_slot:
            return True
        spare = visits.slots[here] - used[here] - 1
        if spare < 0:
            return False
        return not avoid_deadlock or turn >= 0 or leaves_room(here, at // stride, spare)

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
        wire = arrays.byte[here, there] * size
        leave = end
        if arrays.serial:
            leave = max(end, link_free[here, there])
            link_free[here, there] = leave + wire
        return float(leave + wire + arrays.latency[here, there])

    for m in range(count):
        for task in range(stride):
            waiting[m * stride + task] = graph.needed[task]
        waiting[m * stride] += 1  # the first forward also waits for its release
        if visits.after[m] >= 0:
            follower[visits.after[m]] = m
        else:
            heapq.heappush(events, (visits.release[m], np.int64(m * stride)))
        fill_tail(m)
    done = 0
    makespan = 0.0
    overdue = 0.0
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
                    key[at] = key_of(m, p, back, now) + visits.delay[m, 2 * p + back]
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
                overdue += max(now - ready[best] - arrays.wait, 0.0)
            busy[here] = True
            pause = arrays.first_gap if back == 0 and p == 0 else arrays.gap
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
                last[0, here] = max(last[0, here], end)
                if p >= holding:
                    last[1, here] = max(last[1, here], end)
                if p == 0 and s == 0:
                    done += 1
                    finish[m] = end
                    makespan = max(makespan, end)
                    if follower[m] >= 0:
                        begin = max(end, visits.release[follower[m]])
                        heapq.heappush(events, (begin, np.int64(follower[m] * stride)))
            for column in range(graph.unlocked.shape[1]):
                then = graph.unlocked[task, column]
                if then < 0:
                    break
                p_then = then // (2 * slices)
                there = nodes[m, p_then]
                arrives = end
                if there != here:
                    size = arrays.message[parts[m, min(p, p_then)], s]
                    arrives = arrival(here, there, size, end)
                heapq.heappush(events, (arrives, np.int64(m * stride + then)))
            heapq.heappush(events, (end + pause, np.int64(~here)))
        looks = 0
    return makespan if done == count else np.inf, overdue


# ---------------------------------------------------------------- sums of gradients


def ends_of_sums(
    arrays: ProblemArrays,
    planned: bool,
    part_of_node: Ints,
    last: Floats,
    last_up: Floats,
) -> Floats:
    """Return when each part's gradients are summed, or 0 if it has none to sum.

    last: the end of the last backward of each node.
    last_up: the end of the last backward of its head, or of its way up in a wave.
    """
    times = np.stack([last_up, last, last])
    links = (arrays.latency, arrays.byte)
    return choose_sums(*links, part_of_node, times, arrays.sums, planned).ends


def seconds_of_sums(problem: Problem, part_of_node: Ints) -> Floats:
    """Return how long each part's sums take if all its replicas are done at once."""
    at_once = np.zeros(len(part_of_node))
    return ends_of_sums(
        problem.arrays, problem.planned_sums, part_of_node, at_once, at_once
    )


# ---------------------------------------------------------------- solutions
# A solution of a path problem, as the search changes it, and what it is worth.
#
# A *unit* is whatever has a path of its own: one micro-batch, or all micro-batches that use the same
# path in successive rounds. Once its times have been simulated, a solution becomes a schedule.

# A plan counts as this many seconds longer for each second of forbidden waiting.
WAIT_FINE = 10.0
TIME_ROUNDING = 1e-9  # seconds by which equal times may differ
NEXT_ROUND_SECONDS = 2.5  # earliest start of each further round, as published
NodePath = tuple[int, ...]
EVERY_UNIT = slice(None)


@dataclass(frozen=True, slots=True, eq=False)
class Solution:
    """The part of each node, the path of each unit, and the order in which nodes serve their queues.

    part_of_node: the part of each node, or -1 for a node that holds none.
    paths: the nodes that each unit visits; the first is its data node [unit, place].
    orders: the queue order of each unit; units that never meet may have different ones.
    delays: seconds by which each unit stands further back in the queues of its tasks, forward and
        backward at each position of its path [unit, task].
    turns: the place of each task of each unit in the order of its node, or NO_TURN if that node serves
        its queue [unit, task].
    stagger: seconds between the first starts on a data node.
    avoid_deadlock: keep slots free for older micro-batches, so that no deadlock can arise.
    """

    part_of_node: Ints
    paths: Ints
    orders: Ints
    delays: Floats
    turns: Ints
    stagger: float = 0.0
    avoid_deadlock: bool = False


def solution_of(
    problem: Problem, part_of_node: Sequence[int] | Ints, paths: Sequence[NodePath]
) -> Solution:
    """Return the solution with these paths in which all nodes serve their queues in the first order of the policy."""
    rows = np.array(paths, dtype=np.int64)
    units, length = rows.shape
    positions = 2 * length if problem.waves else length + 1
    return Solution(
        np.array(part_of_node, dtype=np.int64),
        rows,
        np.full(units, problem.policy.queue_orders[0]),
        np.zeros((units, 2 * positions)),
        np.full((units, 2 * positions * problem.slices), NO_TURN),
        problem.stagger(problem.policy.staggers[0]),
    )


def units_alone(solution: Solution, units: Sequence[int] | slice) -> Solution:
    """Return the solution of some units alone, in arrays of its own."""
    return replace(
        solution,
        part_of_node=solution.part_of_node.copy(),
        paths=np.array(solution.paths[units]),
        orders=np.array(solution.orders[units]),
        delays=np.array(solution.delays[units]),
        turns=np.array(solution.turns[units]),
    )


def with_units(solution: Solution, units: Sequence[int], own: Solution) -> Solution:
    """Return the solution with these units, and the parts of all nodes, as another one has them."""
    new = units_alone(solution, EVERY_UNIT)
    new.part_of_node[:] = own.part_of_node
    new.paths[units] = own.paths
    new.orders[units] = own.orders
    new.delays[units] = own.delays
    new.turns[units] = own.turns
    return new


def path_in_order(
    data_node: int, node_of_part: dict[int, int], order: Sequence[int]
) -> NodePath:
    """Return the path from a data node over the nodes of these parts."""
    return (data_node, *[node_of_part[part] for part in order])


def simulate_solution(problem: Problem, solution: Solution) -> PathTimes:
    """Return the times of all tasks of a solution."""
    visits = visits_of(problem, solution)
    return simulate_visits(problem.arrays, visits, solution.avoid_deadlock)


def visits_of(problem: Problem, solution: Solution) -> Visits:
    """Return the visits of all micro-batches: those of each unit, once for each round.

    In waves a path comes back the way it went; otherwise the head follows on the data node.
    """
    rounds = problem.policy.rounds
    rows = np.tile(solution.paths, (rounds, 1))
    parts = solution.part_of_node[rows]
    if problem.waves:
        back = rows[:, ::-1]
        back_parts = 2 * problem.body - 1 - parts[:, ::-1]
    else:
        back = rows[:, :1]
        back_parts = np.full((len(rows), 1), problem.body)
    count = len(solution.paths)
    after = np.arange(-count, count * (rounds - 1), dtype=np.int64)
    after[:count] = -1
    return Visits(
        np.hstack([rows, back]),
        np.hstack([parts, back_parts]),
        rows.shape[1],
        np.tile(solution.orders, rounds),
        after,
        _releases(problem, solution),
        np.tile(solution.delays, (rounds, 1)),
        np.tile(solution.turns, (rounds, 1)),
        problem.arrays.slots_with(solution.part_of_node),
    )


def _releases(problem: Problem, solution: Solution) -> Floats:
    """Return the earliest start of each micro-batch."""
    place = np.zeros(len(solution.paths))  # of each unit, among those of its data node
    rounds = np.arange(problem.policy.rounds)
    if not solution.stagger:
        return np.tile(place, len(rounds))
    started: dict[int, int] = {}
    for unit, data_node in enumerate(solution.paths[:, 0].tolist()):
        place[unit] = started.get(data_node, 0)
        started[data_node] = started.get(data_node, 0) + 1
    releases: Floats = NEXT_ROUND_SECONDS * rounds[:, None] + place * solution.stagger
    return releases.ravel()


def step_end(problem: Problem, times: PathTimes, part_of_node: Ints) -> float:
    """Return the end of the last backward or sum of gradients; with several passes, the mean time of one.

    Seconds that tasks wait for longer than the rules allow are added many times. The end is
    infinite if micro-batches deadlock, or if a part does not fit on one of its nodes.
    """
    if times.makespan == np.inf or problem.arrays.slots_with(part_of_node).min() < 1:
        return math.inf
    fine = WAIT_FINE * times.overdue
    if not problem.has_sums:
        return times.makespan + fine
    sums = ends_of_sums(
        problem.arrays, problem.planned_sums, part_of_node, times.last, times.last_up
    )
    end = max(times.makespan, float(sums.max()))
    return problem.mean_pass(times.makespan, end) + fine


def mean_end_of_sums(problem: Problem, times: PathTimes, part_of_node: Ints) -> float:
    """Return the mean end of the parts' sums, planned ones even if rings are used.

    A ring is as slow as its slowest link, so most moves of a search would change nothing.
    """
    sums = ends_of_sums(problem.arrays, True, part_of_node, times.last, times.last_up)
    return float(sums.mean())


def choose_queueing(problem: Problem, solution: Solution) -> Solution:
    """Return the solution with the queue order, stagger and care that end the step first."""
    policy = problem.policy
    best = solution
    least = math.inf
    for order, choice in product(policy.queue_orders, policy.staggers):
        for avoid_deadlock in (False, True):
            trial = replace(
                solution,
                orders=np.full_like(solution.orders, order),
                turns=np.full_like(solution.turns, NO_TURN),
                stagger=problem.stagger(choice),
                avoid_deadlock=avoid_deadlock,
            )
            end = solution_value(problem, trial)[0]
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
    times = simulate_solution(problem, solution)
    end = step_end(problem, times, solution.part_of_node)
    return end, float(times.finish.mean())
