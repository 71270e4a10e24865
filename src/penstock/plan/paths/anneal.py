"""Looks for better paths: simulated annealing, every step simulated.

A move changes one unit of a solution, or all that share its path:

    swap      two units exchange a node: of the same part, or of two parts that neither has twice
    redirect  another replica of the same part
    reorder   two neighbours on the path, if the order may
    trade     two nodes exchange their parts, and their places on all paths (if the arrangement is free)
    relabel   a node takes another part, and the paths over it go over another replica (if the sizes are free too)
    delay     a unit stands further back in all queues (if nodes keep to a planned order)

Every move keeps the parts' shares of the work.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

import numpy as np

from penstock.plan.paths.allreduce import sum_seconds_by_part
from penstock.plan.paths.budget import Budget
from penstock.plan.paths.path_simulator import simulate_paths
from penstock.plan.paths.problem import Problem, expand_paths, start_conditions
from penstock.plan.paths.rules import order_fault, part_orders
from penstock.plan.paths.solution import NodePath, Solution, step_end

MEAN = 0.5  # how much the mean of the micro-batches counts beside the last: it shows the way
GROUP = 24  # nodes that are improved together
RELABEL = 0.05  # of the moves
HOT, COLD = 0.004, 0.0001  # temperatures, as shares of the makespan


class Search:
    """One annealing, of a solution or of a group of its units. It has a life: its solution changes."""

    def __init__(
        self,
        problem: Problem,
        solution: Solution,
        units: list[int],
        free: bool,
        random: Random,
    ) -> None:
        self.problem, self.random, self.free = problem, random, free
        self.units = units
        self.resizable = not (problem.sized or problem.policy.reserved)
        self.labels = np.array(solution.labels, dtype=np.int64)
        self.paths: list[NodePath] = [solution.paths[unit] for unit in units]
        self.delays = np.array(
            [solution.delays[unit] for unit in units]
            if solution.delays
            else [0.0] * len(units)
        )
        self.queue_order, self.stagger, self.careful = (
            solution.queue_order,
            solution.stagger,
            solution.careful,
        )
        self.nodes = sorted(
            {node for path in self.paths for node in path} | self._idle(solution)
        )
        self.sums = sum_seconds_by_part(
            problem.traffic, self.labels, problem.body, problem.gradients
        )
        self.undo: list[Callable[[], None]] = []
        self.rows = np.array(self.paths, dtype=np.int64)
        self.end, self.finish = math.inf, [0.0] * len(units)
        self._sort()
        self.value, self.end, self.finish = self._simulated()

    def _idle(self, solution: Solution) -> set[int]:
        """Nodes nobody passes belong to every group."""
        passed = {node for path in solution.paths for node in path}
        idle = [
            node
            for node, part in enumerate(solution.labels)
            if part >= 0 and node not in passed
        ]
        return set(idle if len(idle) <= GROUP else self.random.sample(idle, GROUP))

    def _sort(self) -> None:
        """The nodes of each part, of those that may be taken."""
        self.part = self.labels.tolist()
        self.replicas: dict[int, list[int]] = {}
        for node in self.nodes:
            self.replicas.setdefault(self.part[node], []).append(node)

    def solution(self) -> Solution:
        """Of the group alone."""
        delays = tuple(self.delays.tolist()) if self.delays.any() else ()
        return Solution(
            tuple(self.part),
            tuple(self.paths),
            self.queue_order,
            self.stagger,
            delays,
            self.careful,
        )

    def _simulated(self) -> tuple[float, float, list[float]]:
        """What is made small, the end of the step, and when each unit is done."""
        problem, count = self.problem, len(self.paths)
        nodes, parts = expand_paths(problem, self.rows, self.labels)
        after, release = start_conditions(problem, self.rows, self.stagger)
        delay = np.tile(self.delays, problem.policy.rounds)
        found = simulate_paths(
            problem.traffic,
            nodes,
            parts,
            self.queue_order,
            after,
            release,
            delay,
            self.careful,
        )
        if found.makespan == np.inf and not self.careful:
            found = simulate_paths(
                problem.traffic,
                nodes,
                parts,
                self.queue_order,
                after,
                release,
                delay,
                True,
            )
        end = step_end(problem, found, self.labels, self.sums)
        ends = found.finish.tolist()
        return end + MEAN * sum(ends) / len(ends), end, ends[-count:]

    def anneal(self, budget: Budget, steps: int) -> bool:
        """Tries `steps` moves and keeps the best solution it meets. Returns False if the budget ends before.

        The temperature depends on `steps` only, so a larger budget continues where a smaller one stopped.
        """
        best, least = self.solution(), (self.end, self.value)
        scale = self.value if self.value < math.inf else 1.0
        done = 0
        while done < steps and not budget.spent:
            heat = scale * (COLD + (HOT - COLD) * (1.0 - done / steps) ** 2)
            done += 1
            budget.used += 1
            self.undo.clear()
            if not self._move():
                self._back()
                continue
            value, end, finish = self._simulated()
            if value <= self.value or self.random.random() < math.exp(
                -(value - self.value) / heat
            ):
                self.value, self.end, self.finish = value, end, finish
                if (end, value) < least:
                    best, least = self.solution(), (end, value)
            else:
                self._back()
        self._take(best)
        self.end, self.value = least
        return done == steps

    def _back(self) -> None:
        while self.undo:
            self.undo.pop()()

    def _take(self, solution: Solution) -> None:
        self.labels, self.paths = (
            np.array(solution.labels, dtype=np.int64),
            list(solution.paths),
        )
        self.rows = np.array(self.paths, dtype=np.int64)
        self.delays = np.array(solution.delays or [0.0] * len(self.paths))
        self.queue_order, self.stagger, self.careful = (
            solution.queue_order,
            solution.stagger,
            solution.careful,
        )
        self._sort()

    # ------------------------------------------------------------ moves: each says how it is undone
    def _move(self) -> bool:
        pick = self.random.random()
        if self.free and pick < 0.25:
            return (
                self._relabel() if pick < RELABEL and self.resizable else self._trade()
            )
        if pick < 0.5:
            return self._swap()
        if pick < 0.8 and not self.problem.policy.reserved:
            return self._redirect()
        if pick < 0.9:
            return self._reorder()
        return self._delay()

    def _late(self) -> int:
        """A unit, rather one that is late."""
        units, ends = len(self.paths), self.finish
        picked = int(self.random.random() * units)
        for _ in range(int(self.random.random() * 4)):
            other = int(self.random.random() * units)
            picked = other if ends[other] > ends[picked] else picked
        return picked

    def _class(self, late: bool = True) -> list[int]:
        """One unit, or all with its path."""
        unit = self._late() if late else int(self.random.random() * len(self.paths))
        if self.random.random() < 0.5:
            return [unit]
        mine = self.paths[unit]
        return [other for other, path in enumerate(self.paths) if path == mine]

    def _set(self, units: list[int], path: NodePath) -> None:
        for unit in units:
            self._put(unit, path)

    def _put(self, unit: int, path: NodePath) -> None:
        old = self.paths[unit]

        def back() -> None:
            self.paths[unit] = old
            self.rows[unit] = old

        self.undo.append(back)
        self.paths[unit] = path
        self.rows[unit] = path

    def _legal(self, path: list[int]) -> NodePath | None:
        """The path, in an order that its parts may have."""
        parts = tuple([self.part[node] for node in path])
        if len(set(parts)) < len(parts):
            return None
        allowed = part_orders(frozenset(parts[1:]), self.problem.rules)
        if parts[1:] in allowed:
            return tuple(path)
        if not allowed:
            return None
        where = {self.part[node]: node for node in path[1:]}
        return (path[0], *[where[part] for part in self.random.choice(allowed)])

    def _swap(self) -> bool:
        ours, theirs = self._class(), self._class(late=False)
        one, other = self.paths[ours[0]], self.paths[theirs[0]]
        if len(one) < 2 or one == other:
            return False
        i, j = self.random.randrange(1, len(one)), self.random.randrange(1, len(other))
        u, v = one[i], other[j]
        if u == v:
            return False
        size = min(
            len(ours), len(theirs)
        )  # as many here as there: keeps the parts' shares, and the nodes'
        mine = self._legal([*one[:i], v, *one[i + 1 :]])
        yours = self._legal([*other[:j], u, *other[j + 1 :]])
        if mine is None or yours is None:
            return False
        self._set(ours[:size], mine)
        self._set(theirs[:size], yours)
        return True

    def _redirect(self) -> bool:
        ours = self._class()
        path = self.paths[ours[0]]
        if len(path) < 2:
            return False
        i = self.random.randrange(1, len(path))
        node = self.random.choice(self.replicas[self.part[path[i]]])
        if node == path[i]:
            return False
        self._set(ours, (*path[:i], node, *path[i + 1 :]))
        return True

    def _reorder(self) -> bool:
        ours = self._class()
        path = list(self.paths[ours[0]])
        if len(path) < 3:
            return False
        i = self.random.randrange(1, len(path) - 1)
        path[i], path[i + 1] = path[i + 1], path[i]
        if order_fault([self.part[node] for node in path], self.problem.rules):
            return False
        self._set(ours, tuple(path))
        return True

    def _trade(self) -> bool:
        u, v = (
            self.random.choice(self.paths[self._late()]),
            self.random.choice(self.nodes),
        )
        if u == v:
            return False
        if self.problem.policy.reserved:
            slots = self.problem.traffic.slots
            used = [int((self.rows == node).sum()) for node in (u, v)]
            if used[0] > slots[v] or used[1] > slots[u]:
                return False
        sums = self.sums
        self._turn(u, v)

        def back() -> None:
            self._turn(u, v)
            self.sums = sums

        self.undo.append(back)
        if self.problem.gradients > 0 and self.part[u] != self.part[v]:
            self.sums = sum_seconds_by_part(
                self.problem.traffic,
                self.labels,
                self.problem.body,
                self.problem.gradients,
            )
        return True

    def _turn(self, u: int, v: int) -> None:
        """Two nodes exchange their parts, and their places on all paths."""
        turned = {u: v, v: u}
        for unit, path in enumerate(self.paths):
            if u in path or v in path:
                self.paths[unit] = tuple([turned.get(node, node) for node in path])
                self.rows[unit] = self.paths[unit]
        if self.part[u] != self.part[v]:
            self.labels[u], self.labels[v] = self.part[v], self.part[u]
            self._sort()

    def _relabel(self) -> bool:
        node = self.random.choice(self.nodes)
        part = self.part[node]
        others = [other for other in self.replicas[part] if other != node]
        wanted = self.random.randrange(1, self.problem.body)
        if not others or part in (0, wanted):
            return False
        for unit, path in enumerate(self.paths):
            if node in path:
                self._put(
                    unit,
                    tuple(
                        [self.random.choice(others) if n == node else n for n in path]
                    ),
                )
        sums = self.sums

        def back() -> None:
            self.labels[node] = part
            self._sort()
            self.sums = sums

        self.undo.append(back)
        self.labels[node] = wanted
        self._sort()
        if self.problem.gradients > 0:
            self.sums = sum_seconds_by_part(
                self.problem.traffic,
                self.labels,
                self.problem.body,
                self.problem.gradients,
            )
        return True

    def _delay(self) -> bool:
        policy = self.problem.policy
        turn, stagger = self.queue_order, self.stagger

        def settle_back() -> None:
            self.queue_order, self.stagger = turn, stagger

        if not policy.ordered:
            self.undo.append(settle_back)
            self.stagger = self.problem.stagger(self.random.choice(policy.staggers))
            return self.stagger != stagger
        if self.random.random() < 0.2:
            self.undo.append(settle_back)
            self.queue_order = self.random.choice(policy.queue_orders)
            return turn is not self.queue_order
        unit = self.random.randrange(len(self.paths))
        old = float(self.delays[unit])

        def back() -> None:
            self.delays[unit] = old

        self.undo.append(back)
        self.delays[unit] = self.random.choice(
            (0.0, self.random.uniform(-1.0, 1.0) * self.end * 0.1)
        )
        return True
