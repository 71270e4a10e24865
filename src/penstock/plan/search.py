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
from collections import Counter
from dataclasses import dataclass, replace
from random import Random

import numpy as np

from penstock.ir.table import Floats, Ints
from penstock.plan.problem import Problem, expand, starts
from penstock.plan.rules import order_fault, orders
from penstock.plan.sums import all_sums
from penstock.plan.traffic import Flow, Turn, flow

MEAN = 1e-3  # how much the mean of the micro-batches counts beside the last
GROUP = 24  # nodes that are improved together
HOT, COLD = 0.02, 0.0005  # temperatures, as shares of the makespan

Path = tuple[int, ...]


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
    used: int = 0

    def left(self) -> float:
        """The share that is left, from 1 to 0."""
        share = 1.0 - (time.perf_counter() - self.begin) / self.seconds if self.seconds > 0 else 0.0
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


def value(problem: Problem, flow: Flow, labels: Ints, sums: Floats) -> float:
    """What is made small: the end of the step, and a little of the mean."""
    return total(problem, flow, labels, sums) + MEAN * float(flow.finish.mean())


def total(problem: Problem, flow: Flow, labels: Ints, sums: Floats) -> float:
    """The end of the last backward, or of the last sum of gradients."""
    if problem.gradients <= 0 or flow.makespan == np.inf:
        return flow.makespan
    alive = labels >= 0
    return max(flow.makespan, float((flow.last[alive] + sums[labels[alive]])[flow.last[alive] > 0].max()))


def settle(problem: Problem, draft: Draft) -> Draft:
    """The draft with the best turn, stagger and care."""
    labels, best, least = np.array(draft.labels), draft, math.inf
    sums = all_sums(problem.traffic, labels, problem.body, problem.gradients)
    for turn in problem.policy.turns:
        for choice in problem.policy.staggers:
            for careful in (False, True):
                tried = replace(draft, turn=turn, stagger=problem.stagger(choice), careful=careful)
                found = value(problem, run(problem, tried), labels, sums)
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
        self.labels = list(draft.labels)
        self.paths: list[Path] = [draft.paths[unit] for unit in units]
        self.delays = [draft.delays[unit] for unit in units] if draft.delays else [0.0] * len(units)
        self.turn, self.stagger, self.careful = draft.turn, draft.stagger, draft.careful
        self.nodes = sorted({node for path in self.paths for node in path} | self._idle(draft))
        self.replicas: dict[int, list[int]] = {}
        self._sort()
        self.sums = all_sums(problem.traffic, np.array(self.labels), problem.body, problem.gradients)
        self.used = Counter(node for path in self.paths for node in path)
        self.value = self._value()

    def _idle(self, draft: Draft) -> set[int]:
        """Nodes nobody passes belong to every group."""
        passed = {node for path in draft.paths for node in path}
        idle = [node for node, part in enumerate(self.labels) if part >= 0 and node not in passed]
        return set(idle if len(idle) <= GROUP else self.random.sample(idle, GROUP))

    def _sort(self) -> None:
        self.replicas = {}
        for node in self.nodes:
            self.replicas.setdefault(self.labels[node], []).append(node)

    def draft(self) -> Draft:
        """Of the group alone."""
        return Draft(
            tuple(self.labels), tuple(self.paths), self.turn, self.stagger,
            tuple(self.delays) if any(self.delays) else (), self.careful,
        )  # fmt: skip

    def _value(self) -> float:
        found = run(self.problem, self.draft())
        if found.makespan == np.inf and not self.careful:
            found = run(self.problem, replace(self.draft(), careful=True))
        return value(self.problem, found, np.array(self.labels), self.sums)

    def anneal(self, budget: Budget, steps: int | None = None) -> None:
        """Until the budget, or so many steps, are used up. The best that was met stays."""
        best, least, begun = self._keep(), self.value, budget.used
        scale = self.value if self.value < math.inf else 1.0
        while (left := budget.left()) > 0 and (steps is None or budget.used - begun < steps):
            share = left if steps is None else 1.0 - (budget.used - begun) / steps
            heat = scale * (COLD + (HOT - COLD) * share**2)
            budget.used += 1
            before = self._keep()
            if not self._move():
                continue
            new = self._value()
            if new <= self.value or self.random.random() < math.exp(-(new - self.value) / heat):
                self.value = new
                if new < least - 1e-12:
                    best, least = self._keep(), new
            else:
                self._restore(before, self.value)
        self._restore(best, least)

    def _keep(self) -> tuple[list[int], list[Path], list[float], Turn, float, Floats, Counter[int]]:
        return (
            self.labels.copy(), self.paths.copy(), self.delays.copy(), self.turn, self.stagger, self.sums,
            self.used.copy(),
        )  # fmt: skip

    def _restore(
        self, kept: tuple[list[int], list[Path], list[float], Turn, float, Floats, Counter[int]], found: float
    ) -> None:
        changed = self.labels != kept[0]
        self.labels, self.paths, self.delays, self.turn, self.stagger, self.sums, self.used = (
            kept[0].copy(), kept[1].copy(), kept[2].copy(), kept[3], kept[4], kept[5], kept[6].copy()
        )  # fmt: skip
        self.value = found
        if changed:
            self._sort()

    # ------------------------------------------------------------ moves
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

    def _class(self) -> list[int]:
        """One unit, or all with its path."""
        unit = self.random.randrange(len(self.paths))
        if self.random.random() < 0.5:
            return [unit]
        return [other for other, path in enumerate(self.paths) if path == self.paths[unit]]

    def _set(self, units: list[int], path: Path) -> None:
        for unit in units:
            self.used.subtract(self.paths[unit])
            self.used.update(path)
            self.paths[unit] = path

    def _legal(self, path: list[int]) -> Path | None:
        """The path, in an order that its parts may have."""
        labels = self.labels
        parts = tuple(labels[node] for node in path)
        if len(set(parts)) < len(parts):
            return None
        if not order_fault(parts, self.problem.rules):
            return tuple(path)
        allowed = orders(frozenset(parts[1:]), self.problem.rules)
        if not allowed:
            return None
        where = {labels[node]: node for node in path[1:]}
        return (path[0], *(where[part] for part in self.random.choice(allowed)))

    def _swap(self) -> bool:
        ours, theirs = self._class(), self._class()
        one, other = self.paths[ours[0]], self.paths[theirs[0]]
        if len(one) < 2 or one == other:
            return False
        i, j = self.random.randrange(1, len(one)), self.random.randrange(1, len(other))
        u, v = one[i], other[j]
        if u == v:
            return False
        if len(ours) != len(theirs):  # keeps the parts' shares, and the nodes'
            size = min(len(ours), len(theirs))
            ours, theirs = ours[:size], theirs[:size]
        mine = self._legal([*one[:i], v, *one[i + 1 :]])
        yours = self._legal([*other[:j], u, *other[j + 1 :]])
        if mine is None or yours is None:
            return False
        self._set(ours, mine)
        self._set(theirs, yours)
        return True

    def _redirect(self) -> bool:
        ours = self._class()
        path = self.paths[ours[0]]
        if len(path) < 2:
            return False
        i = self.random.randrange(1, len(path))
        node = self.random.choice(self.replicas[self.labels[path[i]]])
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
        if order_fault([self.labels[node] for node in path], self.problem.rules):
            return False
        self._set(ours, tuple(path))
        return True

    def _trade(self) -> bool:
        u, v = self.random.sample(self.nodes, 2) if len(self.nodes) > 1 else (0, 0)
        if self.labels[u] == self.labels[v] and not self.used[u] and not self.used[v]:
            return False
        slots = self.problem.traffic.slots
        if self.problem.policy.reserved and (self.used[u] > slots[v] or self.used[v] > slots[u]):
            return False
        self.labels[u], self.labels[v] = self.labels[v], self.labels[u]
        turned = {u: v, v: u}
        self.paths = [
            tuple(turned.get(node, node) for node in path) if u in path or v in path else path for path in self.paths
        ]
        self.used[u], self.used[v] = self.used[v], self.used[u]
        if self.labels[u] != self.labels[v]:
            self._sort()
            if self.problem.gradients > 0:
                self.sums = all_sums(
                    self.problem.traffic, np.array(self.labels), self.problem.body, self.problem.gradients
                )
        return True

    def _delay(self) -> bool:
        policy = self.problem.policy
        if not policy.ordered:
            choice = self.random.choice(policy.staggers)
            changed = self.problem.stagger(choice) != self.stagger
            self.stagger = self.problem.stagger(choice)
            return changed
        if self.random.random() < 0.2:
            turn, self.turn = self.turn, self.random.choice(policy.turns)
            return turn is not self.turn
        unit = self.random.randrange(len(self.paths))
        self.delays[unit] = self.random.choice((0.0, self.random.uniform(-1.0, 1.0) * self.value * 0.1))
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


def worth(problem: Problem, draft: Draft) -> float:
    """The value of a whole draft."""
    labels = np.array(draft.labels)
    return value(
        problem, run(problem, draft), labels, all_sums(problem.traffic, labels, problem.body, problem.gradients)
    )


def _by_groups(problem: Problem, draft: Draft, budget: Budget, free: bool, random: Random) -> Draft:
    draft = replace(draft, delays=draft.delays or (0.0,) * len(draft.paths))
    current = worth(problem, draft)
    idle = 0
    while budget.left() > 0 and idle < 200:
        group = _group(problem, draft, random, idle)
        search = Search(problem, draft, group, free and (problem.gradients <= 0 or idle % 2 == 0), random)
        before = search.value
        search.anneal(budget, steps=max(60, 12 * len(group)))
        if search.value >= before - 1e-9:
            idle += 1
            continue
        tried = _merged(draft, search)
        found = worth(problem, tried)
        if found < current - 1e-12:
            draft, current, idle = tried, found, 0
        else:
            idle += 1
    return settle_delayed(problem, draft)


def _merged(draft: Draft, search: Search) -> Draft:
    paths, delays = list(draft.paths), list(draft.delays)
    for unit, path, delay in zip(search.units, search.paths, search.delays, strict=True):
        paths[unit], delays[unit] = path, delay
    return replace(
        draft, labels=tuple(search.labels), paths=tuple(paths), delays=tuple(delays),
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
