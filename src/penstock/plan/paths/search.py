"""Searches for better paths by simulated annealing, within a budget of moves.

    move ──► simulate ──► no worse: keep it
      ▲                   worse: keep it by chance, less likely the worse it is and the later it comes
      └── undo ◄───────── otherwise

`MoveSearch` is the annealing. Its subclasses know what a move changes and how long the step then takes: `Annealing`
below changes paths, and `LaneSearch` in the module `lanes` changes the order of the tasks on each node.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from random import Random

import numpy as np

from penstock.errors import ShapeError
from penstock.ir.table import Floats
from penstock.plan.paths.problem import (
    NO_PART_HELD,
    Problem,
    circuit_terms,
)
from penstock.plan.paths.rules import order_fault, part_orders
from penstock.plan.paths.simulator import (
    EVERY_UNIT,
    NO_TURN,
    NodePath,
    PathTimes,
    Solution,
    mean_end_of_sums,
    path_in_order,
    simulate_solution,
    step_end,
    units_alone,
)
from penstock.plan.paths.starts import cheapest_path

# ---------------------------------------------------------------- how long a search may go on
# A budget counts moves, not seconds, so that a seed gives the same plan on every machine.
TimeSource = Callable[[], float]
# Moves of a search by default: four whole stages, about two seconds for twenty nodes.
DEFAULT_SEARCH_MOVES = 25_500


def never_stop() -> bool:
    """The default of `stop`: nobody asks the search to end."""
    return False


@dataclass(slots=True)
class Budget:
    """Ends a search after `iterations` moves.

    The search ends earlier if `seconds` pass on the `clock`, or once `stop` returns True.
    `cut_short` then becomes True.
    """

    iterations: int = DEFAULT_SEARCH_MOVES
    seconds: float | None = None
    clock: TimeSource = time.perf_counter
    stop: Callable[[], bool] = never_stop
    used: int = 0
    cut_short: bool = False
    begin: float = field(init=False)

    def __post_init__(self) -> None:
        if self.iterations < 0:
            raise ShapeError(
                f"a search cannot try {self.iterations} moves; give 0 or more"
            )
        self.begin = self.clock()

    @property
    def elapsed(self) -> float:
        """Seconds since the search began."""
        return self.clock() - self.begin

    @property
    def spent(self) -> bool:
        """Whether the search has to end."""
        if self.used >= self.iterations or self.cut_short:
            return True
        if self.stop():
            self.cut_short = True
        elif self.seconds is not None:
            self.cut_short = self.elapsed >= self.seconds
        return self.cut_short

    def part(self, iterations: int) -> Budget:
        """Return a budget for a part of the search, of at most `iterations` moves."""
        left = max(self.iterations - self.used, 0)
        seconds = None
        if self.seconds is not None:
            seconds = max(self.seconds - self.elapsed, 0.0)
        return Budget(min(iterations, left), seconds, self.clock, self.stop)

    def count(self, part: Budget) -> None:
        """Count what a part of the search has used."""
        self.used += part.used
        self.cut_short = self.cut_short or part.cut_short


# ---------------------------------------------------------------- simulated annealing
HOT = 0.004  # first temperature, as a share of the makespan
WARM = 0.002  # first temperature of a search that starts from a good solution
SUM_WEIGHT = 0.25  # how much the mean end of the parts' sums counts besides


class MoveSearch(ABC):
    """A state that random moves change.

    state: the current solution, in arrays that the moves change.
    value, end: what is minimized, and the end of the step.
    best: the best solution that moves have led to; `least` has its end and its value.
    """

    mean_weight: float  # how much the mean end of the micro-batches counts besides the end of the step
    cold: float  # last temperature, as a share of the makespan

    def __init__(self, problem: Problem, state: Solution, random: Random) -> None:
        self.problem = problem
        self.state = state
        self.random = random

    @abstractmethod
    def _move(self) -> bool:
        """Make a random move. Return False, and change nothing, if it turned out to be impossible or without effect."""

    @abstractmethod
    def _index(self) -> None:
        """Write down again what moves read about the state."""

    @abstractmethod
    def _note(self, times: PathTimes) -> None:
        """Remember what the next moves need to know about the times of the current state."""

    def begin(self) -> None:
        """Take the current state as the best one."""
        self._keep(*self._simulate())
        self.best = units_alone(self.state, EVERY_UNIT)
        self.least = (self.end, self.value)

    def _simulate(self) -> tuple[float, float, PathTimes]:
        """Return the value of the current state, the end of its step, and its times."""
        problem = self.problem
        times = simulate_solution(problem, self.state)
        if times.makespan == np.inf and not self.state.avoid_deadlock:
            times = simulate_solution(problem, replace(self.state, avoid_deadlock=True))
        part_of_node = self.state.part_of_node
        end = step_end(problem, times, part_of_node)
        ends = times.finish.tolist()
        value = end + self.mean_weight * sum(ends) / len(ends)
        if problem.has_sums and end < math.inf:
            value += SUM_WEIGHT * mean_end_of_sums(problem, times, part_of_node)
        return value, end, times

    def _keep(self, value: float, end: float, times: PathTimes) -> None:
        """Take the simulated state as the current one."""
        self.value = value
        self.end = end
        self._note(times)

    def anneal(self, budget: Budget, steps: int, scale: float, hot: float) -> bool:
        """Try `steps` moves while the temperature falls from `hot` to `cold`, as shares of `scale`.

        The temperature depends on `steps` only, so a larger budget continues where a smaller one
        stopped. Return False if the budget ends before.
        """
        done = 0
        while done < steps and not budget.spent:
            share = self.cold + (hot - self.cold) * (1.0 - done / steps) ** 2
            done += 1
            budget.used += 1
            before = units_alone(self.state, EVERY_UNIT)
            if not self._move():
                continue
            value, end, times = self._simulate()
            if not self._accepts(value, scale * share):
                self.state = before
                self._index()
                continue
            self._keep(value, end, times)
            if (end, value) < self.least:
                self.best = units_alone(self.state, EVERY_UNIT)
                self.least = (end, value)
        return done == steps

    def _accepts(self, value: float, heat: float) -> bool:
        """Whether a move is kept: always if it is no worse, otherwise by chance."""
        if value <= self.value:
            return True
        return self.random.random() < math.exp(-(value - self.value) / heat)


# ---------------------------------------------------------------- the moves that change paths
# Searches for better paths by simulated annealing; every step is simulated.
#
# A move changes one unit of a solution, or all units that share its path:
#
#     swap      Two units exchange a node: two replicas of the same part, or nodes of two parts that neither has twice.
#     redirect  A unit visits another replica of the same part.
#     reorder   Two neighbors on a path change places, if the rules allow the new order.
#     trade     Two nodes exchange their parts and their places on all paths (if the arrangement is free).
#     relabel   A node takes another part, and the paths over it visit another replica (if the sizes are free too).
#     drop      A node that no path visits gives up its part, and takes no part in its sum (if gradients count).
#     delay     A unit stands further back in all queues (if nodes follow a planned order).
#     reroute   The units of a path take the cheapest replicas of their parts, where busy nodes are dearer.
#     move      A data node and a node with another part exchange their parts. The units that begin there get new
#               routes, and those that passed the other node visit another replica (if the arrangement is free).
#
# Every move leaves each part its share of the work.

MAX_GROUP_NODES = 24  # nodes that are improved together
DROPS = (
    0.5  # share of the relabels in which a node gives up its part, if gradients count
)
# How often each kind of move is drawn, if the arrangement, the sizes and the routes allow it.
# Short searches of clusters with 7 to 20 nodes ended best with about these.
MOVE_WEIGHTS = {
    "trade": 20,
    "relabel": 3,
    "move": 1,
    "swap": 10,
    "redirect": 20,
    "reorder": 16,
    "queueing": 16,
    "reroute": 14,
}
# The same if slots are reserved: most changes of one path alone would then break the reservation.
RESERVED_MOVE_WEIGHTS = {"trade": 25, "swap": 25, "reorder": 40, "queueing": 10}
# Seconds of travel that one second of work already given to a node counts for.
DRAWN_BUSY_PRICES = (0.0, 0.1, 0.3, 1.0)
QUEUE_ORDER_CHANGES = 0.2  # share of the changes of queues that change their order
MAX_DELAY = 0.1  # largest delay in the queues, as a share of the makespan


class Annealing(MoveSearch):
    """Anneals a solution, or a group of its units. The units find their slots as they come, without turns.

    state: the units and the parts of all nodes, in arrays that the moves change.
    part, paths: the same as plain numbers, which moves read quickly.
    replicas: for each part those of its nodes that paths may visit.
    """

    mean_weight = 0.5  # guides the search where the end of the step does not change
    cold = 0.0001

    def __init__(
        self,
        problem: Problem,
        solution: Solution,
        units: list[int],
        free: bool,
        random: Random,
    ) -> None:
        super().__init__(problem, units_alone(solution, units), random)
        self.free = free
        self.resizable = problem.sizes is None and not problem.policy.reserved
        self.state.turns[:] = NO_TURN
        visited = set(self.state.paths.ravel().tolist())
        self.nodes = sorted(visited | self._idle_nodes(solution))
        allowed = self._allowed_moves()
        self.moves = list(allowed)
        self.cumulative_weights = list(accumulate(allowed.values()))
        self.terms = circuit_terms(problem)
        self._index()
        self.begin()

    def _idle_nodes(self, solution: Solution) -> set[int]:
        """Return the nodes that no path visits, or a sample of them. They belong to every group."""
        visited = set(solution.paths.ravel().tolist())
        idle = []
        for node, part in enumerate(solution.part_of_node.tolist()):
            if (part >= 0 or self.free) and node not in visited:
                idle.append(node)
        if len(idle) > MAX_GROUP_NODES:
            idle = self.random.sample(idle, MAX_GROUP_NODES)
        return set(idle)

    def _index(self) -> None:
        self.paths: list[NodePath] = list(map(tuple, self.state.paths.tolist()))
        self.part = self.state.part_of_node.tolist()
        self.replicas: dict[int, list[int]] = {}
        for node in self.nodes:
            self.replicas.setdefault(self.part[node], []).append(node)

    def _note(self, times: PathTimes) -> None:
        self.finish = times.finish[-len(self.paths) :].tolist()

    def run(self, budget: Budget, steps: int, hot: float = HOT) -> bool:
        """Try `steps` moves and keep the best solution. Return False if the budget ends before."""
        scale = self.value if self.value < math.inf else 1.0
        return self.anneal(budget, steps, scale, hot)

    # ------------------------------------------------------------ moves
    def _allowed_moves(self) -> dict[Callable[[], bool], int]:
        """Return the kinds of moves that the problem allows, and how often each is drawn."""
        reserved = self.problem.policy.reserved
        weights = RESERVED_MOVE_WEIGHTS if reserved else MOVE_WEIGHTS
        moves = {
            "swap": self._swap,
            "redirect": self._redirect,
            "reorder": self._reorder,
            "queueing": self._change_queueing,
            "reroute": self._reroute,
        }
        if self.free:
            moves |= {"trade": self._trade, "move": self._move_data_node}
            if self.resizable:
                moves["relabel"] = self._relabel
        return {move: weights[name] for name, move in moves.items() if name in weights}

    def _move(self) -> bool:
        """Make a random move. Return False if it turned out to be impossible or without effect."""
        [move] = self.random.choices(self.moves, cum_weights=self.cumulative_weights)
        return move()

    def _pick_unit(self) -> int:
        return int(self.random.random() * len(self.paths))

    def _pick_late_unit(self) -> int:
        """Return a random unit, preferably one that ends late."""
        picked = self._pick_unit()
        for _ in range(int(self.random.random() * 4)):
            other = self._pick_unit()
            if self.finish[other] > self.finish[picked]:
                picked = other
        return picked

    def _pick_units(self, late: bool = True) -> list[int]:
        """Return one unit, or all units with the same path."""
        unit = self._pick_late_unit() if late else self._pick_unit()
        if self.random.random() < 0.5:
            return [unit]
        shared = self.paths[unit]
        return [other for other, path in enumerate(self.paths) if path == shared]

    def _set_paths(self, units: list[int], path: NodePath) -> None:
        for unit in units:
            self.paths[unit] = path
            self.state.paths[unit] = path

    def _visit_instead(self, unit: int, node: int, others: list[int]) -> None:
        """Let a unit that visits a node visit one of the others instead."""
        path = self.paths[unit]
        other = self.random.choice(others)
        self._set_paths([unit], _replace_node(path, path.index(node), other))

    def _in_legal_order(self, path: NodePath) -> NodePath | None:
        """Return the path with its nodes in an order that the rules allow, or None."""
        parts = tuple([self.part[node] for node in path])
        if len(set(parts)) < len(parts):
            return None
        allowed = part_orders(frozenset(parts[1:]), self.problem.rules)
        if parts[1:] in allowed:
            return path
        if not allowed:
            return None
        node_of_part = {self.part[node]: node for node in path[1:]}
        order = self.random.choice(allowed)
        return path_in_order(path[0], node_of_part, order)

    def _swap(self) -> bool:
        """Let two units, or two classes of units with equal paths, exchange a node."""
        units = self._pick_units()
        others = self._pick_units(late=False)
        path = self.paths[units[0]]
        other_path = self.paths[others[0]]
        if len(path) < 2 or path == other_path:
            return False
        place = self.random.randrange(1, len(path))
        other_place = self.random.randrange(1, len(other_path))
        node = path[place]
        other_node = other_path[other_place]
        if node == other_node:
            return False
        new = self._in_legal_order(_replace_node(path, place, other_node))
        other_new = self._in_legal_order(_replace_node(other_path, other_place, node))
        if new is None or other_new is None:
            return False
        # Change equally many on both sides, to keep the shares of the parts and nodes.
        size = min(len(units), len(others))
        self._set_paths(units[:size], new)
        self._set_paths(others[:size], other_new)
        return True

    def _redirect(self) -> bool:
        """Send units over another replica of the same part."""
        units = self._pick_units()
        path = self.paths[units[0]]
        if len(path) < 2:
            return False
        place = self.random.randrange(1, len(path))
        part = self.part[path[place]]
        node = self.random.choice(self.replicas[part])
        if node == path[place]:
            return False
        self._set_paths(units, _replace_node(path, place, node))
        return True

    def _reorder(self) -> bool:
        """Let two neighbors on a path change places."""
        units = self._pick_units()
        path = list(self.paths[units[0]])
        if len(path) < 3:
            return False
        i = self.random.randrange(1, len(path) - 1)
        path[i], path[i + 1] = path[i + 1], path[i]
        parts = [self.part[node] for node in path]
        if order_fault(parts, self.problem.rules):
            return False
        self._set_paths(units, tuple(path))
        return True

    def _trade(self) -> bool:
        """Let two nodes exchange their parts and their places on all paths."""
        late_path = self.paths[self._pick_late_unit()]
        u = self.random.choice(late_path)
        v = self.random.choice(self.nodes)
        if u == v:
            return False
        if self.problem.policy.reserved and not self._slots_allow_trade(u, v):
            return False
        self._exchange_nodes(u, v)
        return True

    def _slots_allow_trade(self, u: int, v: int) -> bool:
        """Whether each of two nodes has enough slots for the paths over the other."""
        slots = self.problem.arrays.slots
        paths_over_u = int((self.state.paths == u).sum())
        paths_over_v = int((self.state.paths == v).sum())
        return bool(paths_over_u <= slots[v] and paths_over_v <= slots[u])

    def _exchange_nodes(self, u: int, v: int) -> None:
        paths = self.state.paths
        over_u = paths == u
        paths[paths == v] = u
        paths[over_u] = v
        self.state.part_of_node[[u, v]] = self.part[v], self.part[u]
        self._index()

    def _relabel(self) -> bool:
        """Give a node another part, and send the paths over it over other replicas."""
        node = self.random.choice(self.nodes)
        part = self.part[node]
        others = [other for other in self.replicas[part] if other != node]
        new_part = self.random.randrange(1, self.problem.body)
        if not others or part in (0, new_part):
            return False
        if self.problem.has_sums and self.random.random() < DROPS:
            new_part = NO_PART_HELD
            if part == NO_PART_HELD:
                return False
        for unit, path in enumerate(self.paths):
            if node in path:
                self._visit_instead(unit, node, others)
        self.state.part_of_node[node] = new_part
        self._index()
        return True

    def _reroute(self) -> bool:
        """Send units over the cheapest replicas of their parts."""
        units = self._pick_units()
        old = self.paths[units[0]]
        if len(old) < 2:
            return False
        price = self._prices(units)
        new = self._reroute_path(old[0], old, price)
        if new == old:
            return False
        self._set_paths(units, new)
        return True

    def _move_data_node(self) -> bool:
        """Let another node take the place of a data node, and find new routes where they are needed."""
        late = self._pick_late_unit()
        old = self.paths[late][0]
        if len(self.paths[late]) < 2:
            return False
        new = self.random.choice(self.nodes)
        part = self.part[new]
        others = [node for node in self.replicas[part] if node != new]
        if part == 0 or (part > 0 and not others):
            return False
        passing = [unit for unit, path in enumerate(self.paths) if new in path]
        begun = [unit for unit, path in enumerate(self.paths) if path[0] == old]
        for unit in passing:
            self._visit_instead(unit, new, others)
        self.state.part_of_node[[new, old]] = 0, part
        self._index()
        for unit in begun:
            price = self._prices([unit])
            path = self._reroute_path(new, self.paths[unit], price)
            self._set_paths([unit], path)
        return True

    def _prices(self, units: list[int]) -> Floats:
        """Return what a visit of each node costs because of its load without these units."""
        loads = np.zeros(len(self.part))
        rows = np.delete(self.state.paths, units, axis=0)[:, 1:]
        np.add.at(loads, rows.ravel(), 1.0)
        weight = self.random.choice(DRAWN_BUSY_PRICES)
        price: Floats = self.terms.hop * (1.0 + weight * loads)
        return price

    def _reroute_path(self, data_node: int, path: NodePath, price: Floats) -> NodePath:
        """Return the cheapest path from a data node over the parts of a path, in one of their orders."""
        parts = frozenset([self.part[node] for node in path[1:]])
        order = self.random.choice(part_orders(parts, self.problem.rules))
        replicas = [np.array(self.replicas[part]) for part in order]
        return cheapest_path(self.terms, data_node, replicas, price)[1]

    def _change_queueing(self) -> bool:
        """Change the stagger, the queue order of all units, or the delay of one unit."""
        policy = self.problem.policy
        if not policy.ordered:
            before = self.state.stagger
            stagger = self.problem.stagger(self.random.choice(policy.staggers))
            self.state = replace(self.state, stagger=stagger)
            return stagger != before
        if self.random.random() < QUEUE_ORDER_CHANGES:
            order = self.random.choice(policy.queue_orders)
            differs = bool((self.state.orders != order).any())
            self.state.orders[:] = order
            return differs
        unit = self.random.randrange(len(self.paths))
        delay = self.random.uniform(-1.0, 1.0) * self.end * MAX_DELAY
        self.state.delays[unit] = self.random.choice((0.0, delay))
        return True


def _replace_node(path: NodePath, place: int, node: int) -> NodePath:
    """Return the path with another node at a place."""
    return (*path[:place], node, *path[place + 1 :])
