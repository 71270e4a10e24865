"""Searches for the best order of the tasks on each node.

The annealing of paths lets every node serve its queue by a rule. Such a node never waits for a task
that is not there yet, although waiting can pay: a forward that is due in a moment may be urgent,
while the backward that is ready now has time. Here each node has a lane, an explicit order of its
tasks, and the search changes the lanes where it matters, on the critical path:

    node 0 | 0F0 0F1 ... 0B0 ──────────┐
    node 1 |     1F0 1F1 [1B1 1B0] ────┘     1B0 ends late because 1B1 comes first: exchange the two

    exchange   Two tasks that follow each other on the critical path change places in their lane.
    shift      A task on the critical path moves some places forward or back in its lane.
    redirect   A visit on the critical path goes to another replica of its part.
    reorder    Two neighbors on a path change places, if the rules allow the new order.

Moves that make the step longer are accepted by chance, as in the annealing of paths.
"""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import numpy as np

from penstock.plan.paths.problem import Problem
from penstock.plan.paths.rules import order_fault
from penstock.plan.paths.search import HOT, Budget, MoveSearch
from penstock.plan.paths.simulator import (
    NO_TURN,
    TIME_ROUNDING,
    PathTimes,
    Solution,
    ends_of_sums,
    rule_needs,
    simulate_solution,
    tasks_in_order,
    units_alone,
    visits_of,
)

EXCHANGES = 0.5  # share of the moves that exchange two tasks
SHIFTS = 0.7  # share of the moves that exchange or shift tasks
REDIRECTS = 0.92  # share of the moves that exchange, shift or redirect
MAX_SHIFT = 5  # places that a task moves in its lane


def can_search_lanes(problem: Problem) -> bool:
    """Whether nodes keep to a planned order, and every unit is one micro-batch."""
    policy = problem.policy
    return policy.ordered and policy.rounds == 1 and not policy.reserved


class LaneSearch(MoveSearch):
    """Improves the lanes of some units, which share no node with the other units.

    A task is one number, `number * stride + own`: the number of its micro-batch, and its place
    among the tasks of that micro-batch, as in `TaskGraph`:

        own    0   1    2   3    4   5    6   7       two slices: position 0 of the path, then 1, ...
               F0  B0   F0  B0   F1  B1   F1  B1
               slice 0  slice 1  slice 0  slice 1

    state: the solution of these units; the turns are the place of each task in its lane.
    needs: what each task needs from the same micro-batch.
    replicas: the nodes of each part that some path visits after its data node.
    nodes, parts: those of each position of each path.
    node, part: those of each task.
    lanes: the tasks of each node, in order.
    """

    mean_weight = 0.1
    cold = 0.0002

    def __init__(
        self, problem: Problem, solution: Solution, units: list[int], random: Random
    ) -> None:
        super().__init__(problem, units_alone(solution, units), random)
        self.slices = problem.slices
        self.length: int = self.state.delays.shape[1] // 2
        self.stride = 2 * self.length * self.slices
        self.needs = [self._needs_of(own) for own in range(self.stride)]
        self.replicas: dict[int, list[int]] = {}
        for node in np.unique(self.state.paths[:, 1:]).tolist():
            part = int(self.state.part_of_node[node])
            self.replicas.setdefault(part, []).append(node)
        times = simulate_solution(problem, self.state)
        # Fixed lanes need no care for slots: lanes that wait for each other are never kept.
        self.state = replace(self.state, avoid_deadlock=True)
        self.state.turns[:] = NO_TURN
        self._index()
        for task in tasks_in_order(times):
            own = task % self.stride
            if self._leader(own) == own:
                self.lanes[self.node[task]].append(task)
        for lane in self.lanes:
            self._set_lane(lane)
        self.begin()

    def _needs_of(self, own: int) -> list[int]:
        """Return what a task needs from the same micro-batch."""
        needs = rule_needs(own, self.length, self.slices)
        return [self._leader(need) for need in needs]

    def _leader(self, own: int) -> int:
        """Return the task itself, or the forward of the head if its backward follows at once."""
        if self.slices == 1 and own == self.stride - 1:
            return own - 1
        return own

    def _index(self) -> None:
        visits = visits_of(self.problem, self.state)
        self.nodes = visits.nodes
        self.parts = visits.parts
        tasks = 2 * self.slices  # of each position
        self.node: list[int] = np.repeat(self.nodes, tasks).tolist()
        self.part: list[int] = np.repeat(self.parts, tasks).tolist()
        self.lanes: list[list[int]] = [[] for _ in range(self.problem.arrays.nodes)]
        turns = self.state.turns.ravel()
        for task in np.argsort(turns, kind="stable").tolist():
            if turns[task] != NO_TURN:
                self.lanes[self.node[task]].append(task)

    def _set_lane(self, lane: list[int]) -> None:
        """Let the tasks of a node take turns in this order."""
        self.state.turns.ravel()[lane] = range(len(lane))

    def _note(self, times: PathTimes) -> None:
        self.times = times
        self._index()
        if math.isfinite(self.end):
            self._find_critical()

    def run(self, budget: Budget, steps: int) -> bool:
        """Try `steps` moves and keep the best solution. Return False if the budget ends before."""
        if not math.isfinite(self.end):
            return True
        return self.anneal(budget, steps, self.end, HOT)

    def _accepts(self, value: float, heat: float) -> bool:
        """Whether a move is kept; never if its lanes wait for each other."""
        return math.isfinite(value) and super()._accepts(value, heat)

    # ------------------------------------------------------------ the critical path
    def _find_critical(self) -> None:
        """List the tasks of the critical path."""
        self.starts = self.times.start.ravel().tolist()
        self.ends = self._ends()
        self.critical: list[int] = []
        task: int | None = self._last_task()
        while task is not None:
            self.critical.append(task)
            task = self._cause(task)

    def _ends(self) -> list[float]:
        """Return when each task ends; the forward of the head ends with its backward if that follows at once."""
        arrays = self.problem.arrays
        work = np.stack([arrays.forward[self.parts], arrays.backward[self.parts]], -1)
        ends = self.times.start + work * arrays.slow[self.nodes][:, :, None, None]
        if self.slices == 1:
            ends[:, -1, 0, 0] = ends[:, -1, 0, 1]
        found: list[float] = ends.ravel().tolist()
        return found

    def _cause(self, task: int) -> int | None:
        """Return the task that keeps a task from starting earlier, or None if nothing does.

        It is the one before it in the lane, or one whose result it needs. If both end late, chance decides.
        """
        arrays = self.problem.arrays
        number, own = divmod(task, self.stride)
        start = self.starts[task]
        needed = [number * self.stride + need for need in self.needs[own]]
        place = int(self.state.turns[number, own])
        if place:
            before = self.lanes[self.node[task]][place - 1]
            pause = arrays.gap
            if before % self.stride < 2 * self.slices:
                pause = max(pause, arrays.first_gap)
            if self.ends[before] >= start - (pause + TIME_ROUNDING):
                others = [self.ends[need] for need in needed if need != before]
                is_late = any(end >= start - TIME_ROUNDING for end in others)
                if not is_late or self.random.random() < 0.5:
                    return before
        return max(needed, key=lambda need: self._arrival(need, task), default=None)

    def _arrival(self, needed: int, task: int) -> float:
        """Return when the result of a task reaches the task that needs it."""
        arrays = self.problem.arrays
        a = self.node[needed]
        b = self.node[task]
        if a == b:
            return self.ends[needed]
        size = arrays.message[self.part[min(needed, task)]].max()
        seconds = arrays.latency[a, b] + arrays.byte[a, b] * size
        return self.ends[needed] + float(seconds)

    def _last_task(self) -> int:
        """Return the last backward of the step, or one whose sum of gradients ends last."""
        problem = self.problem
        times = self.times
        if problem.has_sums and times.makespan < self.end:
            part_of_node = self.state.part_of_node
            lasts = (times.last, times.last_up)
            ends = ends_of_sums(
                problem.arrays, problem.planned_sums, part_of_node, *lasts
            )
            members = np.flatnonzero(part_of_node == int(ends.argmax()))
            summed: list[int] = [node for node in members.tolist() if self.lanes[node]]
            if summed:
                node = max(summed, key=lambda member: times.last[member])
                if self.random.random() < 0.5:
                    node = self.random.choice(summed)
                return self.lanes[node][-1]
        last: int = int(times.finish.argmax()) * self.stride
        return last + 1  # its backward on the data node

    # ------------------------------------------------------------ moves
    def _move(self) -> bool:
        """Change the lanes or a path at a random place of the critical path; return whether anything changed."""
        pick = self.random.random()
        task = self.critical[self.random.randrange(len(self.critical))]
        number, own = divmod(task, self.stride)
        position = own // (2 * self.slices)
        is_hop = not self.problem.waves and 0 < position < self.length - 1
        if EXCHANGES <= pick < SHIFTS:
            return self._shift(task)
        if pick < EXCHANGES or not is_hop:
            return self._exchange(task)
        if pick < REDIRECTS:
            return self._redirect(number, position)
        return self._reorder(number, position)

    def _exchange(self, task: int) -> bool:
        """Let a task change places with the one before it."""
        lane = self.lanes[self.node[task]]
        place = lane.index(task)
        if place == 0:
            return False
        before = lane[place - 1]
        if before // self.stride == task // self.stride:
            return False
        self._set_lane([*lane[: place - 1], task, before, *lane[place + 1 :]])
        return True

    def _shift(self, task: int) -> bool:
        """Move a task some places forward or back."""
        lane = self.lanes[self.node[task]]
        place = lane.index(task)
        places = self.random.randint(1, MAX_SHIFT)
        direction = self.random.choice((-1, 1))
        target = min(max(place + places * direction, 0), len(lane) - 1)
        if target == place:
            return False
        shifted = lane[:place] + lane[place + 1 :]
        shifted.insert(target, task)
        self._set_lane(shifted)
        return True

    def _tasks(self, number: int, position: int) -> list[int]:
        """Return the tasks of one visit: a forward and a backward of each slice."""
        count = 2 * self.slices
        first = number * self.stride + position * count
        return list(range(first, first + count))

    def _redirect(self, number: int, position: int) -> bool:
        """Send a micro-batch over another replica of the same part."""
        old = int(self.nodes[number, position])
        new = self.random.choice(self.replicas[self.state.part_of_node[old]])
        if new == old:
            return False
        tasks = self._tasks(number, position)
        self.state.paths[number, position] = new
        joined = self.lanes[new] + tasks
        self._set_lane([task for task in self.lanes[old] if task not in tasks])
        self._set_lane(sorted(joined, key=lambda task: (self.starts[task], task)))
        return True

    def _reorder(self, number: int, position: int) -> bool:
        """Let two neighbors on a path change places, and keep their places in their lanes."""
        other = position + 1
        if other >= self.length - 1:
            return False
        parts = self.parts[number, :-1].tolist()
        parts[position], parts[other] = parts[other], parts[position]
        if order_fault(parts, self.problem.rules):
            return False
        nodes: list[int] = self.nodes[number, position : other + 1].tolist()
        self.state.paths[number, position : other + 1] = nodes[::-1]
        here = self._tasks(number, position)
        there = self._tasks(number, other)
        renamed = dict(zip(here + there, there + here, strict=True))
        for node in nodes:
            self._set_lane([renamed.get(task, task) for task in self.lanes[node]])
        return True
