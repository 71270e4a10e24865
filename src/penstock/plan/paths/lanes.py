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
from collections.abc import Callable
from dataclasses import replace
from random import Random

import numpy as np

from penstock.ir.table import Floats
from penstock.plan.paths.problem import Problem
from penstock.plan.paths.rules import order_fault
from penstock.plan.paths.search import HOT, Budget, MoveSearch
from penstock.plan.paths.simulator import (
    EVERY_UNIT,
    NO_TURN,
    TIME_ROUNDING,
    PathTimes,
    Solution,
    ends_of_sums,
    rule_needs,
    simulate_solution,
    units_alone,
    visits_of,
)

# These two differ from those of the annealing of paths.
LANE_MEAN_WEIGHT = 0.1  # how much the mean end of the micro-batches counts besides
LANE_COLD = 0.0002  # last temperature, as a share of the makespan
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
    replicas: the nodes of each part.
    lanes: the tasks of each node, in order.
    """

    def __init__(
        self, problem: Problem, solution: Solution, units: list[int], random: Random
    ) -> None:
        state = units_alone(solution, units)
        super().__init__(problem, state, LANE_MEAN_WEIGHT, random)
        self.slices = problem.slices
        self._expand()
        self.length = int(self.nodes.shape[1])
        self.stride = 2 * self.length * self.slices
        self.needs = [self._needs_of(task) for task in range(self.stride)]
        self.replicas = self._replicas_in_use()
        self.lanes = self._lanes_of(simulate_solution(problem, self.state))
        # Fixed lanes need no care for slots: lanes that wait for each other are never kept.
        self.state = replace(self.state, avoid_deadlock=True)
        self.state.turns[:] = NO_TURN
        for node, lane in enumerate(self.lanes):
            self._set_lane(node, lane)
        self.begin()

    def _expand(self) -> None:
        """Write down the node and the part of every visit of the paths."""
        visits = visits_of(self.problem, self.state)
        self.nodes = visits.nodes
        self.parts = visits.parts

    def _needs_of(self, own: int) -> list[int]:
        """Return what a task needs from the same micro-batch."""
        needs = rule_needs(own, self.length, self.slices)
        return [self._leader(need) for need in needs]

    def _replicas_in_use(self) -> dict[int, list[int]]:
        """Return the nodes of each part that some path visits after its data node."""
        replicas: dict[int, list[int]] = {}
        visited = set(self.state.paths[:, 1:].ravel().tolist())
        for node in sorted(visited):
            part = int(self.state.part_of_node[node])
            replicas.setdefault(part, []).append(node)
        return replicas

    def _leader(self, own: int) -> int:
        """Return the task itself, or the forward of the head if its backward follows at once."""
        if self.slices == 1 and own == self.stride - 1:
            return own - 1
        return own

    def _lanes_of(self, times: PathTimes) -> list[list[int]]:
        """Return the tasks of each node in the order of their starts."""
        lanes: list[list[int]] = [[] for _ in range(self.problem.arrays.nodes)]
        starts = times.start.ravel()
        is_backward = np.arange(len(starts)) % 2
        for task in np.lexsort((is_backward, starts)).tolist():
            number, own = divmod(task, self.stride)
            if self._leader(own) == own:
                lanes[self._node_of(number, own)].append(task)
        return lanes

    def _position(self, own: int) -> int:
        """Return the place on the path at which a task runs."""
        return own // (2 * self.slices)

    def _node_of(self, number: int, own: int) -> int:
        """Return the node that runs a task."""
        return int(self.nodes[number, self._position(own)])

    def _set_lane(self, node: int, lane: list[int]) -> None:
        """Give a node another lane, and write down the places of its tasks."""
        self.lanes[node] = lane
        self.state.turns.ravel()[lane] = range(len(lane))

    def _note(self, times: PathTimes) -> None:
        self.times = times
        if math.isfinite(self.end):
            self._find_critical()

    def _snapshot(self) -> Callable[[], None]:
        state = units_alone(self.state, EVERY_UNIT)
        lanes = list(self.lanes)

        def take_back() -> None:
            self.state = state
            self.lanes = lanes
            self._expand()

        return take_back

    def run(self, budget: Budget, steps: int) -> bool:
        """Try `steps` moves and keep the best solution. Return False if the budget ends before."""
        if not math.isfinite(self.end):
            return True
        return self.anneal(budget, steps, self.end, HOT, LANE_COLD)

    def _accepts(self, value: float, heat: float) -> bool:
        """Whether a move is kept; never if its lanes wait for each other."""
        return math.isfinite(value) and super()._accepts(value, heat)

    # ------------------------------------------------------------ the critical path
    def _find_critical(self) -> None:
        """List the tasks of the critical path, each with the node that it is on."""
        self.starts: Floats = self.times.start.ravel()
        starts = self.starts.tolist()
        ends = self._ends()
        self.critical: list[tuple[int, int]] = []
        task: int | None = self._last_task()
        while task is not None:
            number, own = divmod(task, self.stride)
            self.critical.append((self._node_of(number, own), task))
            task = self._cause(task, starts[task], ends)

    def _ends(self) -> list[float]:
        """Return when each task ends; the forward of the head ends with its backward if that follows at once."""
        arrays = self.problem.arrays
        starts = self.times.start
        slow = arrays.slow[self.nodes][:, :, None]
        seconds = np.empty(starts.shape)
        seconds[..., 0] = arrays.forward[self.parts] * slow
        seconds[..., 1] = arrays.backward[self.parts] * slow
        ends: Floats = (starts + seconds).reshape(len(starts), -1)
        if self.slices == 1:
            ends[:, -2] = ends[:, -1]
        found: list[float] = ends.ravel().tolist()
        return found

    def _cause(self, task: int, start: float, ends: list[float]) -> int | None:
        """Return the task that keeps a task from starting earlier, or None if nothing does.

        It is the one before it in the lane, or one whose result it needs.
        """
        number, own = divmod(task, self.stride)
        place = int(self.state.turns[number, own])
        lane = self.lanes[self._node_of(number, own)]
        needed = [number * self.stride + need for need in self.needs[own]]
        if place:
            before = lane[place - 1]
            is_held_up = ends[before] >= start - self._pause(before)
            if is_held_up and not self._blames_a_need(needed, before, start, ends):
                return before
        if not needed:
            return None
        return max(needed, key=lambda need: self._arrival(need, own, ends))

    def _blames_a_need(
        self, needed: list[int], before: int, start: float, ends: list[float]
    ) -> bool:
        """Whether to follow a need, though the task before ends late, too: by chance if one of them ends as late."""
        others = [ends[need] for need in needed if need != before]
        is_late = any(end >= start - TIME_ROUNDING for end in others)
        return is_late and self.random.random() >= 0.5

    def _pause(self, task: int) -> float:
        """Return the seconds after a task in which its node rests."""
        arrays = self.problem.arrays
        own = task % self.stride
        pause = arrays.first_gap if own < 2 * self.slices else arrays.gap
        return max(pause, arrays.gap) + TIME_ROUNDING

    def _arrival(self, needed: int, own: int, ends: list[float]) -> float:
        """Return when the result of a task reaches the task that needs it."""
        arrays = self.problem.arrays
        number, before = divmod(needed, self.stride)
        position = self._position(before)
        target = self._position(own)
        a = self.nodes[number, position]
        b = self.nodes[number, target]
        if a == b:
            return ends[needed]
        part = self.parts[number, min(position, target)]
        size = arrays.message[part].max()
        seconds = arrays.latency[a, b] + arrays.byte[a, b] * size
        return ends[needed] + float(seconds)

    def _last_task(self) -> int:
        """Return the last backward of the step, or one whose sum of gradients ends last."""
        times = self.times
        summed: list[int] = []
        if self.problem.has_sums and times.makespan < self.end:
            summed = self._nodes_of_the_last_sum()
        if not summed:
            last = int(times.finish.argmax())
            return last * self.stride + 1  # its backward on the data node
        node = max(summed, key=lambda member: times.last[member])
        if self.random.random() < 0.5:
            node = self.random.choice(summed)
        return self.lanes[node][-1]

    def _nodes_of_the_last_sum(self) -> list[int]:
        """Return the nodes with tasks among those whose sum of gradients ends last."""
        problem = self.problem
        ends = ends_of_sums(
            problem.arrays,
            problem.planned_sums,
            self.state.part_of_node,
            self.times.last,
            self.times.last_up,
        )
        members = np.flatnonzero(self.state.part_of_node == int(ends.argmax()))
        return [node for node in members.tolist() if self.lanes[node]]

    # ------------------------------------------------------------ moves
    def _move(self) -> bool:
        """Change the lanes or a path at a random place of the critical path; return whether anything changed."""
        pick = self.random.random()
        place = self.random.randrange(len(self.critical))
        node, task = self.critical[place]
        if pick < EXCHANGES:
            return self._exchange(node, task)
        if pick < SHIFTS:
            return self._shift(node, task)
        number, own = divmod(task, self.stride)
        position = self._position(own)
        if self.problem.waves or not 0 < position < self.length - 1:
            return self._exchange(node, task)
        if pick < REDIRECTS:
            return self._redirect(number, position)
        return self._reorder(number, position)

    def _exchange(self, node: int, task: int) -> bool:
        """Let a task change places with the one before it."""
        lane = self.lanes[node]
        place = lane.index(task)
        if place == 0:
            return False
        before = lane[place - 1]
        same_microbatch = before // self.stride == task // self.stride
        if same_microbatch:
            return False
        self._set_lane(node, [*lane[: place - 1], task, before, *lane[place + 1 :]])
        return True

    def _shift(self, node: int, task: int) -> bool:
        """Move a task some places forward or back."""
        lane = self.lanes[node]
        place = lane.index(task)
        places = self.random.randint(1, MAX_SHIFT)
        direction = self.random.choice((-1, 1))
        last = len(lane) - 1
        target = min(max(place + places * direction, 0), last)
        if target == place:
            return False
        shifted = lane[:place] + lane[place + 1 :]
        shifted.insert(target, task)
        self._set_lane(node, shifted)
        return True

    def _tasks(self, number: int, position: int) -> list[int]:
        """Return the tasks of one visit: a forward and a backward of each slice."""
        count = 2 * self.slices
        first = number * self.stride + position * count
        return list(range(first, first + count))

    def _redirect(self, number: int, position: int) -> bool:
        """Send a micro-batch over another replica of the same part."""
        old = int(self.nodes[number, position])
        part = int(self.state.part_of_node[old])
        new = self.random.choice(self.replicas[part])
        if new == old:
            return False
        tasks = self._tasks(number, position)
        self._set_node(number, position, new)
        joined = self.lanes[new] + tasks
        self._set_lane(old, [task for task in self.lanes[old] if task not in tasks])
        self._set_lane(new, sorted(joined, key=lambda task: (self.starts[task], task)))
        return True

    def _set_node(self, number: int, position: int, node: int) -> None:
        """Let another node serve a visit."""
        self.state.paths[number, position] = node
        self._expand()

    def _reorder(self, number: int, position: int) -> bool:
        """Let two neighbors on a path change places, and keep their places in their lanes."""
        other = position + 1
        if other >= self.length - 1:
            return False
        parts = self.parts[number, :-1].tolist()
        parts[position], parts[other] = parts[other], parts[position]
        if order_fault(parts, self.problem.rules):
            return False
        a = int(self.nodes[number, position])
        b = int(self.nodes[number, other])
        self._set_node(number, position, b)
        self._set_node(number, other, a)
        here = self._tasks(number, position)
        there = self._tasks(number, other)
        renamed = dict(zip(here + there, there + here, strict=True))
        for node in (a, b):
            lane = [renamed.get(task, task) for task in self.lanes[node]]
            self._set_lane(node, lane)
        return True
