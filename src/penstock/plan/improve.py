"""Improves the order of the lanes by local search.

A schedule's lanes fix its time: every action starts as soon as its rank is free and its needs have arrived. So the
search moves single actions along their lanes and keeps a move if the step does not become slower, or, while the
search is still warm, only a little slower:

    before  rank 1 | F0 F1 F2 I0 W0 I1 ...        the chain that ends last waits for I0, and I0 for F2:
    after   rank 1 | F0 F1 I0 F2 W0 I1 ...        move I0 to the left, or F2 to the right

If the messages of a rank wait for each other, as over NCCL, lanes are timed by the rule of `penstock.sim.simulate`. A
test expects the same times from both.

Most moves touch the critical path, because no other move can make the step shorter. The others let ranks that are not
critical drift, which opens new ways. A move is dropped at once if a rank would hold more than its cap, or if the lanes
could then wait for each other for ever.

The search counts moves, never seconds. It works in rounds that begin warm and end cold. A round's length and warmth
depend on nothing but its number. So the first N moves are the same for every budget, and a larger budget never gives a
slower schedule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from penstock.cost.columns import columns
from penstock.cost.cost import Cost
from penstock.errors import ShapeError
from penstock.ir.compiled import compile_if_large
from penstock.ir.schedule import Schedule
from penstock.ir.table import Floats, Ints
from penstock.schedules.list_scheduling import (
    caps_by_rank,
    schedule_with_lanes,
    users_of,
)
from penstock.sim.simulate import Actions, actions_of

DEFAULT_MOVES = 20_000
MOVES_PER_CALL = 500  # the loop returns to Python this often
RANDOM_NUMBERS_PER_MOVE = 5
# Memory that differs by less than this share of the largest activation counts as equal.
ACTIVATION_ROUNDING = 1e-9
# A schedule must be faster by this share to count as better.
LEAST_GAIN = 1e-12
CRITICAL_MOVES = 0.7  # share of the moves that touch the critical path
MAX_DISTANCE = 64  # places that an action moves at most
# The goal is the makespan plus this share of the mean time at which ranks end.
MEAN_END_WEIGHT = 0.1


class MoveRound(NamedTuple):
    """One round of moves.

    passes: how many moves there are for each action.
    warmth: how much slower a move may make the step at the start of the round, in mean actions; this falls to 0 at its
        end.
    price: the price of one activation too much while one action runs, in mean actions. It rises without limit towards
        the end of a round, so that rounds end below the caps. An infinite price forbids it from the start.
    """

    passes: int
    warmth: float
    price: float


FIRST_ROUNDS = (
    MoveRound(4, 0.2, math.inf),
    MoveRound(16, 0.5, math.inf),
    MoveRound(64, 1.0, 0.5),
)
LATER_ROUNDS = (
    MoveRound(256, 2.0, 1.0),
    MoveRound(256, 3.0, 0.5),
    MoveRound(256, 5.0, 0.5),
)


def round_of(number: int) -> MoveRound:
    """Return a round: first some short and cool ones, then long and warm ones for ever."""
    if number < len(FIRST_ROUNDS):
        return FIRST_ROUNDS[number]
    return LATER_ROUNDS[(number - len(FIRST_ROUNDS)) % len(LATER_ROUNDS)]


class LaneColumns(NamedTuple):
    """Everything about a schedule but the order of its lanes, as the loop below takes it.

    The actions have the numbers of the schedule's own table.
    """

    actions: Actions
    user_start: Ints
    users: Ints
    need_counts: Ints  # how many actions each action needs
    serial: bool
    channels: int  # shared by a rank's messages; 0 if they do not wait for each other
    gain: Floats
    loss: Floats
    caps: Floats  # the most bytes of activations on each rank


@dataclass(frozen=True, slots=True)
class OrderProblem:
    """A schedule whose lanes may be put into another order, with its columns."""

    schedule: Schedule
    columns: LaneColumns
    size: int  # actions that all simulations together will time

    def __len__(self) -> int:
        return len(self.columns.gain)

    @property
    def activation(self) -> float:
        """The bytes of the largest activation."""
        return float(self.columns.gain.max(initial=0.0)) or 1.0

    def with_caps(self, caps: Floats, work: int) -> OrderProblem:
        """Return the same actions under other caps, for `work` simulations."""
        return OrderProblem(
            self.schedule, self.columns._replace(caps=caps), len(self) * work
        )


def problem_of(
    schedule: Schedule,
    cost: Cost,
    cap: float | Sequence[float] | None,
    work: int = 1,
) -> OrderProblem:
    """Return the columns of a schedule under a cost and a cap, for `work` simulations."""
    table = schedule.table
    costs = columns(schedule, cost)
    user_start, users = users_of(table.needs)
    lanes = LaneColumns(
        actions_of(schedule, costs, costs.seconds),
        user_start,
        users,
        (table.needs >= 0).sum(axis=1),
        cost.network.serial,
        cost.network.channels or 0,
        costs.gain,
        costs.loss,
        caps_by_rank(schedule, cap),
    )
    return OrderProblem(schedule, lanes, len(table) * work)


def improve_order(
    schedule: Schedule,
    cost: Cost,
    cap: float | Sequence[float] | None = None,
    work: int = DEFAULT_MOVES,
    seed: int = 0,
) -> Schedule:
    """Return a schedule with the same actions that is never slower, after trying `work` moves.

    No rank holds more than its cap, or, where the given schedule exceeds the cap, more than it does there.

    >>> from penstock import UnitCost, make, simulate
    >>> given = make("v-half", ranks=3, microbatches=4)
    >>> better = improve_order(given, UnitCost(comm=0.2), work=500)
    >>> simulate(better, UnitCost(comm=0.2)).makespan < simulate(given, UnitCost(comm=0.2)).makespan
    True
    """
    problem = problem_of(schedule, cost, cap, work)
    search = Search(problem, np.arange(len(problem)), seed)
    search.run(work)
    return search.schedule()


class Search:
    """A search that can be continued. It begins with the given order of the problem's actions, lane by lane."""

    def __init__(self, problem: OrderProblem, lane: Ints, seed: int = 0) -> None:
        self.problem = problem
        self.seed = seed
        self.best = lane
        self.makespan = time_lanes(problem, lane)  # of the best order
        if self.makespan < 0:
            raise ShapeError(
                "the lanes wait for each other, so there is no first time to improve"
            )
        self._lane = lane.copy()
        self._random: np.random.Generator | None = None
        self._columns = problem.columns
        self._round = 0
        self._begin = 0  # moves of this round so far

    @property
    def round_moves(self) -> int:
        """The number of moves of the current round."""
        return round_of(self._round).passes * len(self.problem)

    def run(self, moves: int) -> None:
        """Try this many more moves."""
        if self._random is None:  # Many searches never run.
            caps = np.maximum(self._columns.caps, lane_peaks(self.problem, self.best))
            caps += ACTIVATION_ROUNDING * self.problem.activation
            self._columns = self._columns._replace(caps=caps)
            self._random = np.random.default_rng(self.seed)
            self.best = self.best.copy()
        seconds = float(self._columns.actions.seconds.mean())
        run = compile_if_large(_run_moves, self.problem.size)
        while moves > 0:
            length = self.round_moves
            begin = self._begin
            count = min(moves, length - begin, MOVES_PER_CALL - begin % MOVES_PER_CALL)
            climate = round_of(self._round)
            price = climate.price * seconds / self.problem.activation
            random = self._random.random((count, RANDOM_NUMBERS_PER_MOVE))
            self.makespan = run(
                random,
                Climate(begin, length, climate.warmth * seconds, price),
                self._lane,
                self.best,
                self.makespan,
                self._columns,
            )
            moves -= count
            self._begin += count
            if self._begin == length:
                self._round += 1
                self._begin = 0
                self._lane = self.best.copy()

    def schedule(self) -> Schedule:
        """Return the best schedule so far."""
        return schedule_with_lanes(self.problem.schedule, self.best)


def time_lanes(problem: OrderProblem, lane: Ints) -> float:
    """Return the makespan of an order of all actions, lane by lane; -1 if the lanes wait for each other."""
    run = compile_if_large(_run_moves, problem.size)
    no_moves = np.empty((0, RANDOM_NUMBERS_PER_MOVE))
    climate = Climate(0, 1, 0.0, 0.0)
    return float(run(no_moves, climate, lane, lane, 0.0, problem.columns))


def fits_caps(problem: OrderProblem, lane: Ints) -> bool:
    """Return whether no rank exceeds its cap in an order of its actions."""
    rounding = ACTIVATION_ROUNDING * problem.activation
    peaks = lane_peaks(problem, lane)
    return bool((peaks <= problem.columns.caps + rounding).all())


def lane_peaks(problem: OrderProblem, lane: Ints) -> Floats:
    """Return the most bytes of activations that each rank holds in an order of its actions."""
    first = problem.schedule.table.first.tolist()
    gain = problem.columns.gain[lane]
    loss = problem.columns.loss[lane]
    peaks = np.zeros(len(first) - 1)
    for rank, (begin, end) in enumerate(pairwise(first)):
        freed = np.cumsum(loss[begin:end]) - loss[begin:end]
        peaks[rank] = (np.cumsum(gain[begin:end]) - freed).max(initial=0.0)
    return peaks


# ---------------------------------------------------------------- the loop
class Climate(NamedTuple):
    """The moves of a round that a call of the loop makes: from number `begin` of `length`, with the units of a step."""

    begin: int
    length: int
    warmth: float
    price: float


def _run_moves(  # noqa: PLR0912, PLR0915
    random: Floats,
    climate: Climate,
    lane: Ints,
    best: Ints,
    best_makespan: float,
    columns: LaneColumns,
) -> float:
    """Try one move for each row of random numbers, and return the makespan of the best order.

    The loop changes `lane`, and `best` whenever it finds a better order. Without random numbers it only times the
    lanes: -1 says that they wait for each other.
    """
    begin, length, warmth, full_price = climate
    actions, user_start, users, need_counts, serial, channels, gain, loss, caps = (
        columns
    )
    first, rank, receiver, needs, seconds, pause, link, latency, wire, send, receive = (
        actions
    )
    size = len(lane)
    ranks = len(first) - 1
    waiting = np.empty(size, np.int64)  # results that an action lacks, and its turn
    ready = np.empty(size, np.float64)
    end = np.empty(size, np.float64)
    cause = np.empty(size, np.int64)
    free = np.empty(max(link.max(), 0) + 1, np.float64)
    where = np.empty(size, np.int64)  # place of each action in its lane
    held = np.empty(size, np.float64)  # bytes before each place of a lane
    arcs = np.empty(size, np.int64)  # critical actions that wait for the one before
    now_excess = 0.0  # of the current order
    over = np.empty(size, np.float64)
    queue = np.empty(size, np.int64)  # the actions that can run, tick by tick
    latest = np.empty(ranks, np.int64)  # the last action that has run on each rank
    busy = np.empty((ranks, max(channels, 1)), np.float64)  # until when a channel is
    blamed = np.empty((ranks, max(channels, 1)), np.int64)  # the action that delayed it
    hop = latency + wire
    for here in range(ranks):
        level = 0.0
        for place in range(first[here], first[here + 1]):
            where[lane[place]] = place
            held[place] = level
            over[place] = max(level + gain[lane[place]] - caps[here], 0.0)
            now_excess += over[place]
            level += gain[lane[place]] - loss[lane[place]]

    def leave_at_once(a: int) -> float:
        """Return when the message of an action arrives if it waits at most for the one before it on a serial link."""
        leave = end[a]
        if serial:
            leave = max(leave, free[link[a]])
            free[link[a]] = leave + wire[a]
        return float(leave + wire[a] + latency[a])

    def leave_in_order(a: int) -> tuple[float, int]:
        """Return when a message arrives if messages wait for each other, and the action for which it waited."""
        here = rank[a]
        there = receiver[a]
        channel = 1 % channels if here < there else 0
        leave = end[a]
        blame = a
        if busy[here, channel] > leave:
            leave = busy[here, channel]
            blame = blamed[here, channel]
        goes_on = leave + send[a]
        blamed[here, channel] = blame
        take = busy[there, channel]
        late = blamed[there, channel]
        before = latest[there]
        if before >= 0 and end[before] > take:
            take = end[before]
            late = before
        arrival = leave + hop[a]
        if take - (hop[a] - receive[a]) > leave:
            arrival = take + receive[a]
            blame = late
        busy[here, channel] = goes_on
        if goes_on >= arrival:
            busy[here, channel] = arrival
            blamed[here, channel] = blame
        busy[there, channel] = arrival
        blamed[there, channel] = blame
        return arrival, blame

    def pass_on(user: int, time: float, blame: int, is_need: bool, tail: int) -> int:
        """Note when an action has one more thing that it waits for: a need, or the end of the action before it.

        If both come at the same time, the need is the cause. Returns the end of the queue, which has the action after
        the last one.
        """
        if time > ready[user] or (is_need and time == ready[user]):
            ready[user] = time
            cause[user] = blame
        waiting[user] -= 1
        if waiting[user] == 0:
            queue[tail] = user
            return tail + 1
        return tail

    def sort_by_rank(head: int, tail: int) -> None:
        """Sort the few actions of a tick by their ranks: in this order their messages leave."""
        for index in range(head + 1, tail):
            a = queue[index]
            place = index
            while place > head and rank[queue[place - 1]] > rank[a]:
                queue[place] = queue[place - 1]
                place -= 1
            queue[place] = a

    def time_all() -> float:  # noqa: PLR0912
        """Return the makespan; -1 if the lanes wait for each other.

        In each tick every rank runs the next action of its lane if all that it needs has run in earlier ticks. Then the
        messages of this tick leave, as in a program.
        """
        for a in range(size):
            waiting[a] = need_counts[a] + 1
            ready[a] = 0.0
            cause[a] = -1
        free[:] = 0.0
        busy[:] = 0.0
        blamed[:] = -1
        latest[:] = -1
        head = 0
        tail = 0
        for here in range(ranks):
            if first[here] < first[here + 1]:
                tail = pass_on(lane[first[here]], 0.0, -1, False, tail)
        while head < tail:
            upto = tail
            if channels > 0:
                sort_by_rank(head, upto)
            for index in range(head, upto):
                a = queue[index]
                end[a] = ready[a] + seconds[a]
                latest[rank[a]] = a
            for index in range(head, upto):
                a = queue[index]
                here = rank[a]
                arrival = end[a]
                blame = a
                if receiver[a] >= 0:
                    if channels == 0:
                        arrival = leave_at_once(a)
                    else:
                        arrival, blame = leave_in_order(a)
                place = where[a] + 1
                if place < first[here + 1]:
                    tail = pass_on(lane[place], end[a] + pause[a], a, False, tail)
                for entry in range(user_start[a], user_start[a + 1]):
                    user = users[entry]
                    if rank[user] == here:
                        tail = pass_on(user, end[a], a, True, tail)
                    else:
                        tail = pass_on(user, arrival, blame, True, tail)
            head = upto
        makespan = -1.0
        if tail == size:
            for last in latest:
                if last >= 0:
                    makespan = max(makespan, end[last])
        return float(makespan)

    def with_mean_end(makespan: float) -> float:
        """Return a makespan plus a share of the mean time at which ranks end."""
        total = 0.0
        for last in latest:
            if last >= 0:
                total += end[last]
        return float(makespan + MEAN_END_WEIGHT * total / ranks)

    def find_arcs() -> int:
        """Walk back along the critical path, and count its actions that wait for the one before on their rank."""
        count = 0
        a = np.int64(-1)
        for last in latest:
            if last >= 0 and (a < 0 or end[last] >= end[a]):
                a = last
        while cause[a] >= 0:
            before = cause[a]
            if where[before] + 1 == where[a] and rank[before] == rank[a]:
                arcs[count] = a
                count += 1
            a = before
        return count

    def farthest_place(number: int, target: int, distance: int) -> int:
        """Return how far an action can move along its lane, at most by a distance, until one of two needs the other."""
        step = 1 if distance > 0 else -1
        here = rank[number]
        goal = min(max(target + distance, first[here]), first[here + 1] - 1)
        while target != goal:
            sooner = number
            later = lane[target + step]
            if step < 0:
                sooner, later = later, sooner
            for column in range(needs.shape[1]):
                if needs[later, column] == sooner:
                    return target
            target += step
        return target

    def move(source: int, target: int) -> None:
        """Move the action at one place of a lane to another."""
        step = 1 if target > source else -1
        number = lane[source]
        for place in range(source, target, step):
            lane[place] = lane[place + step]
        lane[target] = number

    makespan = time_all()
    if len(random) == 0 or makespan < 0.0:
        return makespan
    now_time = with_mean_end(makespan)
    arc_count = find_arcs()
    for step in range(len(random)):
        part = (begin + step) / length
        heat = warmth * (1.0 - part)
        price = full_price * part / (1.001 - part)
        if full_price == np.inf:
            price = 1e300
        now = now_time + now_excess * price
        # Choose an action and a place in its lane.
        pick, kind, shift, luck, side = random[step]
        later = side < 0.5
        if kind < CRITICAL_MOVES and arc_count > 0:
            source = where[arcs[int(pick * arc_count)]]
            if later:  # move what it waits for behind it
                source -= 1
        else:
            source = int(pick * size)
        number = lane[source]
        here = rank[number]
        reach = first[here + 1] - first[here]
        distance = 1 + int(shift * shift * shift * min(reach, MAX_DISTANCE))
        target = farthest_place(number, source, distance if later else -distance)
        if target == source:
            continue
        # Move it, and check the memory on the way.
        low = min(source, target)
        high = max(source, target)
        move(source, target)
        level = held[low]
        excess = now_excess
        for place in range(low, high + 1):
            excess += max(level + gain[lane[place]] - caps[here], 0.0) - over[place]
            level += gain[lane[place]] - loss[lane[place]]
        time = np.inf
        if excess * price <= now - now_time + 1.5 * heat:
            for place in range(low, high + 1):
                where[lane[place]] = place
            makespan = time_all()
            if makespan >= 0.0:
                time = with_mean_end(makespan)
        if time + excess * price > now + heat * luck * luck * luck:
            # Take it back.
            move(target, source)
            for place in range(low, high + 1):
                where[lane[place]] = place
            continue
        now_time = time
        now_excess = excess
        level = held[low]
        for place in range(low, high + 1):
            held[place] = level
            over[place] = max(level + gain[lane[place]] - caps[here], 0.0)
            level += gain[lane[place]] - loss[lane[place]]
        if now_excess <= 1e-12 and makespan < best_makespan * (1.0 - LEAST_GAIN):
            best_makespan = makespan
            best[:] = lane
        arc_count = find_arcs()
    return best_makespan
