"""Looks for better paths: simulated annealing, every step simulated.

A *draft* is the part of every node and the path of every unit (a micro-batch, or all rounds of one path). A move
changes one unit or all that share its path:

    swap      two units exchange a node: of the same part, or of two parts that neither has twice
    redirect  another replica of the same part
    reorder   two neighbours on the path, if the order may
    trade     two nodes exchange their parts, and their places on all paths (if the arrangement is free)
    delay     a unit stands further back in all queues (if nodes keep to a planned order)

Every move keeps the parts' shares of the work. In a large cluster most paths never meet: then the slowest paths and
some others, a *group* of about twenty nodes, are improved for themselves.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

import numpy as np

from penstock.ir.table import Floats, Ints
from penstock.plan.problem import Problem, expand, starts
from penstock.plan.rules import order_fault, orders
from penstock.plan.sums import all_sums
from penstock.plan.traffic import Flow, Turn, flow

MEAN = 0.5  # how much the mean of the micro-batches counts beside the last
GROUP = 24  # nodes that are improved together
HOT, COLD = 0.004, 0.0001  # temperatures, as shares of the makespan

Path = tuple[int, ...]
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Draft:
    """Parts of nodes, paths of units as nodes, and how waiting is settled."""

    labels: tuple[int, ...]
    paths: tuple[Path, ...]
    turn: Turn
    stagger: float = 0.0
    delays: tuple[float, ...] = ()
    careful: bool = False


@dataclass(slots=True)
class Budget:
    """When to stop: so many simulations, or so many seconds, whichever comes first."""

    iterations: int | None
    seconds: float
    begin: float
    clock: Clock = time.perf_counter
    used: int = 0

    def share(self, part: float) -> Budget:
        """A budget of its own, out of what is left of this one."""
        now = self.clock()
        count = None if self.iterations is None else int((self.iterations - self.used) * part)
        return Budget(count, (self.begin + self.seconds - now) * part, now, self.clock)

    def left(self) -> float:
        """The share that is left, from 1 to 0."""
        share = 1.0 - (self.clock() - self.begin) / self.seconds if self.seconds > 0 else 0.0
        if self.iterations is not None:
            by_count = 1.0 - self.used / self.iterations if self.iterations else 0.0
            return by_count if share > 0 else 0.0
        return share


def run(problem: Problem, draft: Draft) -> Flow:
    """The times of a draft."""
    paths = np.array(draft.paths, dtype=np.int64)
    nodes, parts = expand(problem, paths, np.array(draft.labels, dtype=np.int64))
    after, release = starts(problem, paths, draft.stagger)
    delay = np.tile(np.array(draft.delays), problem.policy.rounds) if draft.delays else None
    return flow(problem.traffic, nodes, parts, draft.turn, after, release, delay, draft.careful)


def total(problem: Problem, found: Flow, labels: Ints, sums: Floats) -> float:
    """The end of the last backward, or of the last sum of gradients."""
    if problem.gradients <= 0 or found.makespan == np.inf:
        return found.makespan
    busy = (labels >= 0) & (found.last > 0)
    return max(found.makespan, float((found.last[busy] + sums[labels[busy]]).max()))


def settle(problem: Problem, draft: Draft) -> Draft:
    """The draft with the turn, stagger and care that end first."""
    labels, best, least = np.array(draft.labels), draft, math.inf
    sums = all_sums(problem.traffic, labels, problem.body, problem.gradients)
    for turn in problem.policy.turns:
        for choice in problem.policy.staggers:
            for careful in (False, True):
                tried = replace(draft, turn=turn, stagger=problem.stagger(choice), careful=careful)
                found = total(problem, run(problem, tried), labels, sums)
                if found < least:
                    best, least = tried, found
                if found < math.inf:
                    break  # care is only for those that run into a circle
    return best


class Search:
    """One annealing, of a draft or of a group of its units. It has a life: its draft changes."""

    def __init__(self, problem: Problem, draft: Draft, units: list[int], free: bool, random: Random) -> None:
        self.problem, self.random, self.free = problem, random, free
        self.units = units
        self.labels = np.array(draft.labels, dtype=np.int64)
        self.paths: list[Path] = [draft.paths[unit] for unit in units]
        self.delays = np.array([draft.delays[unit] for unit in units] if draft.delays else [0.0] * len(units))
        self.turn, self.stagger, self.careful = draft.turn, draft.stagger, draft.careful
        self.nodes = sorted({node for path in self.paths for node in path} | self._idle(draft))
        self.sums = all_sums(problem.traffic, self.labels, problem.body, problem.gradients)
        self.undo: list[Callable[[], None]] = []
        self.rows = np.array(self.paths, dtype=np.int64)
        self.end, self.finish = math.inf, [0.0] * len(units)
        self._sort()
        self.value, self.end, self.finish = self._simulated()

    def _idle(self, draft: Draft) -> set[int]:
        """Nodes nobody passes belong to every group."""
        passed = {node for path in draft.paths for node in path}
        idle = [node for node, part in enumerate(draft.labels) if part >= 0 and node not in passed]
        return set(idle if len(idle) <= GROUP else self.random.sample(idle, GROUP))

    def _sort(self) -> None:
        """The nodes of each part, of those that may be taken."""
        self.part = self.labels.tolist()
        self.replicas: dict[int, list[int]] = {}
        for node in self.nodes:
            self.replicas.setdefault(self.part[node], []).append(node)

    def draft(self) -> Draft:
        """Of the group alone."""
        delays = tuple(self.delays.tolist()) if self.delays.any() else ()
        return Draft(tuple(self.part), tuple(self.paths), self.turn, self.stagger, delays, self.careful)

    def _simulated(self) -> tuple[float, float, list[float]]:
        """What is made small, the end of the step, and when each unit is done."""
        problem, count = self.problem, len(self.paths)
        nodes, parts = expand(problem, self.rows, self.labels)
        after, release = starts(problem, self.rows, self.stagger)
        delay = np.tile(self.delays, problem.policy.rounds)
        found = flow(problem.traffic, nodes, parts, self.turn, after, release, delay, self.careful)
        if found.makespan == np.inf and not self.careful:
            found = flow(problem.traffic, nodes, parts, self.turn, after, release, delay, True)
        end = total(problem, found, self.labels, self.sums)
        ends = found.finish.tolist()
        return end + MEAN * sum(ends) / len(ends), end, ends[-count:]

    def anneal(self, budget: Budget, steps: int | None = None) -> None:
        """Until the budget, or so many steps, are used up. The best that was met stays."""
        best, least, begun = self.draft(), (self.end, self.value), budget.used
        scale = self.value if self.value < math.inf else 1.0
        while (left := budget.left()) > 0 and (steps is None or budget.used - begun < steps):
            share = left if steps is None else 1.0 - (budget.used - begun) / steps
            heat = scale * (COLD + (HOT - COLD) * share**2)
            budget.used += 1
            self.undo.clear()
            if not self._move():
                self._back()
                continue
            value, end, finish = self._simulated()
            if value <= self.value or self.random.random() < math.exp(-(value - self.value) / heat):
                self.value, self.end, self.finish = value, end, finish
                if (end, value) < least:
                    best, least = self.draft(), (end, value)
            else:
                self._back()
        self._take(best)
        self.end, self.value = least

    def _back(self) -> None:
        while self.undo:
            self.undo.pop()()

    def _take(self, draft: Draft) -> None:
        self.labels, self.paths = np.array(draft.labels, dtype=np.int64), list(draft.paths)
        self.rows = np.array(self.paths, dtype=np.int64)
        self.delays = np.array(draft.delays or [0.0] * len(self.paths))
        self.turn, self.stagger, self.careful = draft.turn, draft.stagger, draft.careful
        self._sort()

    # ------------------------------------------------------------ moves: each says how it is undone
    def _move(self) -> bool:
        pick = self.random.random()
        if self.free and pick < 0.25:
            return self._trade()
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

    def _set(self, units: list[int], path: Path) -> None:
        for unit in units:
            self._put(unit, path)

    def _put(self, unit: int, path: Path) -> None:
        old = self.paths[unit]

        def back() -> None:
            self.paths[unit] = old
            self.rows[unit] = old

        self.undo.append(back)
        self.paths[unit] = path
        self.rows[unit] = path

    def _legal(self, path: list[int]) -> Path | None:
        """The path, in an order that its parts may have."""
        parts = tuple([self.part[node] for node in path])
        if len(set(parts)) < len(parts):
            return None
        allowed = orders(frozenset(parts[1:]), self.problem.rules)
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
        size = min(len(ours), len(theirs))  # as many here as there: keeps the parts' shares, and the nodes'
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
        u, v = self.random.choice(self.paths[self._late()]), self.random.choice(self.nodes)
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
            self.sums = all_sums(self.problem.traffic, self.labels, self.problem.body, self.problem.gradients)
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

    def _delay(self) -> bool:
        policy = self.problem.policy
        turn, stagger = self.turn, self.stagger

        def settle_back() -> None:
            self.turn, self.stagger = turn, stagger

        if not policy.ordered:
            self.undo.append(settle_back)
            self.stagger = self.problem.stagger(self.random.choice(policy.staggers))
            return self.stagger != stagger
        if self.random.random() < 0.2:
            self.undo.append(settle_back)
            self.turn = self.random.choice(policy.turns)
            return turn is not self.turn
        unit = self.random.randrange(len(self.paths))
        old = float(self.delays[unit])

        def back() -> None:
            self.delays[unit] = old

        self.undo.append(back)
        self.delays[unit] = self.random.choice((0.0, self.random.uniform(-1.0, 1.0) * self.end * 0.1))
        return True


# ---------------------------------------------------------------- a whole draft
def improved(problem: Problem, draft: Draft, budget: Budget, free: bool, seed: int) -> Draft:
    """The draft after a search: all at once if it is small, else group by group, the slowest first."""
    random = Random(seed)
    nodes = {node for path in draft.paths for node in path}
    if len(nodes) <= GROUP + 8:
        whole = Search(problem, draft, list(range(len(draft.paths))), free, random)
        whole.anneal(budget)
        return _checked(problem, draft, whole.draft())
    return _by_groups(problem, draft, budget, free, random)


def _checked(problem: Problem, old: Draft, new: Draft) -> Draft:
    """The better one, settled."""
    if not math.isfinite(run(problem, new).makespan):
        new = replace(new, careful=True)
    return min((settle_delayed(problem, tried) for tried in (old, new)), key=lambda draft: worth(problem, draft))


def settle_delayed(problem: Problem, draft: Draft) -> Draft:
    """As it is, or settled anew, whichever is better."""
    return min((draft, settle(problem, draft)), key=lambda tried: worth(problem, tried))


def worth(problem: Problem, draft: Draft) -> tuple[float, float]:
    """The end of a whole draft's step, and the mean of its micro-batches."""
    labels, found = np.array(draft.labels), run(problem, draft)
    sums = all_sums(problem.traffic, labels, problem.body, problem.gradients)
    return total(problem, found, labels, sums), float(found.finish.mean())


def _by_groups(problem: Problem, draft: Draft, budget: Budget, free: bool, random: Random) -> Draft:
    draft = replace(draft, delays=draft.delays or (0.0,) * len(draft.paths))
    current = worth(problem, draft)
    idle = 0
    while budget.left() > 0 and idle < 200:
        group = _group(problem, draft, random, idle)
        search = Search(problem, draft, group, free and (problem.gradients <= 0 or idle % 2 == 0), random)
        before = search.end, search.value
        search.anneal(budget, steps=max(60, 12 * len(group)))
        if (search.end, search.value) >= before:
            idle += 1
            continue
        tried = _merged(draft, search)
        found = worth(problem, tried)
        if found < current:
            draft, current, idle = tried, found, 0
        else:
            idle += 1
    return settle_delayed(problem, draft)


def _merged(draft: Draft, search: Search) -> Draft:
    paths, delays = list(draft.paths), list(draft.delays)
    for unit, path, delay in zip(search.units, search.paths, search.delays.tolist(), strict=True):
        paths[unit], delays[unit] = path, delay
    return replace(
        draft, labels=tuple(search.part), paths=tuple(paths), delays=tuple(delays),
    )  # fmt: skip


def _group(problem: Problem, draft: Draft, random: Random, idle: int) -> list[int]:
    """The units that meet the slowest one, and others that do not, until there are nodes enough."""
    together = _companies(draft)
    found = run(problem, draft)
    count = len(draft.paths)
    ends = found.finish.reshape(-1, count).max(axis=0)
    late = {root: max(ends[unit] for unit in units) for root, units in together.items()}
    ranked = sorted(together, key=lambda root: -late[root])
    first = ranked[min(int(random.expovariate(1.0) * (1 + idle / 10)), len(ranked) - 1)]
    chosen = list(together[first])
    nodes = {node for unit in chosen for node in draft.paths[unit]}
    near = _nearness(problem, draft, nodes, together)
    for root in sorted(near, key=lambda root: near[root] * random.uniform(0.2, 1.8)):
        more = {node for unit in together[root] for node in draft.paths[unit]}
        if root == first or len(nodes | more) > GROUP:
            continue
        nodes |= more
        chosen += together[root]
    return sorted(chosen)


def _nearness(problem: Problem, draft: Draft, nodes: set[int], together: dict[int, list[int]]) -> dict[int, float]:
    here = sorted(nodes)
    least = problem.traffic.hop(1)[here].min(axis=0)
    return {
        root: float(np.mean([least[node] for unit in units[:1] for node in draft.paths[unit]]))
        for root, units in together.items()
    }


def _companies(draft: Draft) -> dict[int, list[int]]:
    """Units that share a node, or meet one that does: their times do not depend on others."""
    parent = {node: node for path in draft.paths for node in path}

    def root(node: int) -> int:
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    for path in draft.paths:
        for node in path[1:]:
            parent[root(node)] = root(path[0])
    found: dict[int, list[int]] = {}
    for unit, path in enumerate(draft.paths):
        found.setdefault(root(path[0]), []).append(unit)
    return found
