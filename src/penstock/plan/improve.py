"""Improves the order of the lanes by local search.

A schedule's lanes fix its time: every action starts as soon as its rank is free and its needs have arrived. So the
search moves single actions along their lanes and keeps a move if the step does not become slower, or, while the
search is still warm, only a little slower:

    before  rank 1 | F0 F1 F2 I0 W0 I1 ...        the chain that ends last waits for I0, and I0 for F2:
    after   rank 1 | F0 F1 I0 F2 W0 I1 ...        move I0 to the left, or F2 to the right

If the messages of a rank wait for each other, as over NCCL, lanes are timed by the rule of `penstock.sim.in_order`. A
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
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from penstock.cost.columns import Columns, columns
from penstock.cost.cost import Cost
from penstock.errors import ShapeError
from penstock.ir.compiled import compile_if_large
from penstock.ir.schedule import Schedule
from penstock.ir.table import Floats, Ints
from penstock.schedules.list_scheduling import (
    schedule_with_lanes,
    users_of,
)

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


@dataclass(frozen=True, slots=True)
class OrderProblem:
    """Everything about a schedule but the order of its lanes, as columns of numbers.

    The actions have the numbers of the schedule's own table.
    """

    schedule: Schedule
    costs: Columns
    caps: Floats  # the most bytes of activations on each rank
    serial: bool
    channels: int  # shared by a rank's messages; 0 if they do not wait for each other
    receiver: Ints  # the rank that receives each result; -1 if the result stays
    user_start: Ints
    users: Ints
    needs: Ints  # how many actions each action needs
    size: int  # actions that all simulations together will time

    def __len__(self) -> int:
        return len(self.needs)


def problem_of(
    schedule: Schedule,
    cost: Cost,
    cap: float | Sequence[float] | None,
    work: int = 1,
) -> OrderProblem:
    """Return the columns of a schedule under a cost and a cap, for `work` simulations."""
    table = schedule.table
    given = np.asarray(np.inf if cap is None else cap, dtype=np.float64)
    if given.ndim and len(given) != schedule.ranks:
        raise ShapeError(
            f"there are caps for {len(given)} ranks, but stages on {schedule.ranks}"
        )
    user_start, users = users_of(table.needs)
    return OrderProblem(
        schedule,
        columns(schedule, cost),
        np.broadcast_to(given, (schedule.ranks,)).copy(),
        cost.serial,
        cost.channels or 0,
        table.target(),
        user_start,
        users,
        (table.needs >= 0).sum(axis=1),
        len(table) * work,
    )


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


@dataclass(slots=True)
class Search:
    """A search that can be continued. It begins with the given order of the problem's actions, lane by lane."""

    problem: OrderProblem
    lane: Ints
    seed: int = 0
    best: Ints = field(init=False)
    makespan: float = field(init=False)  # of the best order
    moves: int = field(init=False, default=0)
    _random: np.random.Generator = field(init=False)
    _caps: Floats = field(init=False)
    _round: int = field(init=False, default=0)
    _begin: int = field(init=False, default=0)  # moves of this round so far

    def __post_init__(self) -> None:
        self.lane = np.array(self.lane, dtype=np.int64)
        self.best = self.lane.copy()
        self._random = np.random.default_rng(self.seed)
        unit = float(self.problem.costs.gain.max(initial=0.0)) or 1.0
        peak = lane_peaks(self.problem, self.lane)
        self._caps = np.maximum(self.problem.caps, peak) + ACTIVATION_ROUNDING * unit
        self.makespan = time_lanes(self.problem, self.lane)
        if self.makespan < 0:
            raise ShapeError(
                "the lanes wait for each other, so there is no first time to improve"
            )

    @property
    def round_moves(self) -> int:
        """The number of moves of the current round."""
        return round_of(self._round).passes * len(self.problem)

    def run(self, moves: int) -> None:
        """Try this many more moves."""
        while moves > 0:
            length = self.round_moves
            begin = self._begin
            count = min(moves, length - begin, MOVES_PER_CALL - begin % MOVES_PER_CALL)
            self._run_moves(begin, count, length)
            moves -= count
            self.moves += count
            self._begin += count
            if self._begin == length:
                self._round += 1
                self._begin = 0
                self.lane = self.best.copy()

    def schedule(self) -> Schedule:
        """Return the best schedule so far."""
        return schedule_with_lanes(self.problem.schedule, self.best)

    def _run_moves(self, begin: int, count: int, length: int) -> None:
        problem = self.problem
        random = self._random.random((count, RANDOM_NUMBERS_PER_MOVE))
        self.makespan = _call_loop(
            problem,
            random,
            begin,
            length,
            round_of(self._round),
            self.lane,
            self.best,
            self.makespan,
            self._caps,
        )


def time_lanes(problem: OrderProblem, lane: Ints) -> float:
    """Return the makespan of an order of all actions, lane by lane; -1 if the lanes wait for each other."""
    return _call_loop(
        problem,
        np.empty((0, RANDOM_NUMBERS_PER_MOVE)),
        0,
        1,
        round_of(0),
        lane,
        lane,
        0.0,
        problem.caps,
    )


def _call_loop(
    problem: OrderProblem,
    random: Floats,
    begin: int,
    length: int,
    climate: MoveRound,
    lane: Ints,
    best: Ints,
    makespan: float,
    caps: Floats,
) -> float:
    """Call the loop below with the columns of a problem."""
    table = problem.schedule.table
    costs = problem.costs
    run = compile_if_large(_run_moves, problem.size)
    action = float(costs.seconds.mean())
    activation = float(costs.gain.max(initial=0.0)) or 1.0
    return float(
        run(
            random,
            begin,
            length,
            climate.warmth * action,
            climate.price * action / activation,
            lane,
            best,
            makespan,
            table.first,
            table.rank,
            table.needs,
            problem.needs,
            problem.user_start,
            problem.users,
            costs.seconds,
            costs.pause,
            costs.link,
            costs.latency,
            costs.wire,
            costs.send,
            costs.receive,
            problem.serial,
            problem.channels,
            problem.receiver,
            costs.gain,
            costs.loss,
            caps,
        )
    )


def fits_caps(problem: OrderProblem, lane: Ints) -> bool:
    """Return whether no rank exceeds its cap in an order of its actions."""
    unit = float(problem.costs.gain.max(initial=0.0)) or 1.0
    peaks = lane_peaks(problem, lane)
    return bool((peaks <= problem.caps + ACTIVATION_ROUNDING * unit).all())


def lane_peaks(problem: OrderProblem, lane: Ints) -> Floats:
    """Return the most bytes of activations that each rank holds in an order of its actions."""
    first = problem.schedule.table.first.tolist()
    gain = problem.costs.gain[lane]
    loss = problem.costs.loss[lane]
    peaks = np.zeros(len(first) - 1)
    for rank, (begin, end) in enumerate(pairwise(first)):
        freed = np.cumsum(loss[begin:end]) - loss[begin:end]
        peaks[rank] = (np.cumsum(gain[begin:end]) - freed).max(initial=0.0)
    return peaks


# ---------------------------------------------------------------- the loop
def _run_moves(  # noqa: PLR0912, PLR0915
    random: Floats,
    begin: int,
    length: int,
    warmth: float,
    full_price: float,
    lane: Ints,
    best: Ints,
    best_makespan: float,
    first: Ints,
    rank: Ints,
    needs: Ints,
    need_counts: Ints,
    user_start: Ints,
    users: Ints,
    seconds: Floats,
    pause: Floats,
    link: Ints,
    latency: Floats,
    wire: Floats,
    send: Floats,
    receive: Floats,
    serial: bool,
    channels: int,
    receiver: Ints,
    gain: Floats,
    loss: Floats,
    caps: Floats,
) -> float:
    """Try one move for each row of random numbers, and return the makespan of the best order.

    The loop changes `lane`, and `best` whenever it finds a better order. The moves are numbers `begin` and following
    of a round of `length` moves. Without random numbers it only times the lanes: -1 says that they wait for each other.
    """
    size = len(lane)
    ranks = len(first) - 1
    waiting = np.empty(size, np.int64)
    stack = np.empty(size, np.int64)
    ready = np.empty(size, np.float64)
    end = np.empty(size, np.float64)
    cause = np.empty(size, np.int64)
    free = np.empty(max(link.max(), 0) + 1, np.float64)
    where = np.empty(size, np.int64)  # place of each action in its lane
    held = np.empty(size, np.float64)  # bytes before each place of a lane
    arcs = np.empty(size, np.int64)  # critical actions that wait for the one before
    arc_count = 0
    now_time = 0.0  # of the current order
    now_excess = 0.0
    over = np.empty(size, np.float64)
    tick = np.empty(size, np.int64)
    cursor = np.empty(ranks, np.int64)  # place of the next action of each rank
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

    def count_down(user: int, top: int) -> int:
        """Note that an action waits for one less; return the height of the stack, on which it is once it can run."""
        waiting[user] -= 1
        if waiting[user] == 0:
            stack[top] = user
            return top + 1
        return top

    def time_at_once() -> tuple[float, int]:  # noqa: PLR0912
        """Time the lanes if messages leave at once: each action waits for its needs and for the action before it.

        Returns the makespan and the action that ends last; -1 if the lanes wait for each other.
        """
        makespan = 0.0
        last = -1
        for a in range(size):
            waiting[a] = need_counts[a] + 1
            ready[a] = 0.0
            cause[a] = -1
        free[:] = 0.0
        top = 0
        for here in range(ranks):
            if first[here] < first[here + 1]:
                top = count_down(lane[first[here]], top)
        done = 0
        while top > 0:
            top -= 1
            a = stack[top]
            done += 1
            finish = ready[a] + seconds[a]
            end[a] = finish
            if finish > makespan or last < 0:
                makespan = finish
                last = a
            arrival = finish
            if link[a] >= 0:
                if serial:
                    leave = max(finish, free[link[a]])
                    free[link[a]] = leave + wire[a]
                    arrival = leave + wire[a] + latency[a]
                else:
                    arrival = finish + wire[a] + latency[a]
            here = rank[a]
            for index in range(user_start[a], user_start[a + 1]):
                user = users[index]
                there = finish if rank[user] == here else arrival
                # If the action before it ends at the same time, the need is the cause.
                if there >= ready[user]:
                    ready[user] = there
                    cause[user] = a
                top = count_down(user, top)
            place = where[a] + 1
            if place < first[here + 1]:
                user = lane[place]
                there = finish + pause[a]
                if there > ready[user]:
                    ready[user] = there
                    cause[user] = a
                top = count_down(user, top)
        if done < size:
            return -1.0, -1
        return makespan, last

    def time_in_order() -> tuple[float, int]:  # noqa: PLR0912, PLR0915
        """Time the lanes if messages wait for each other, as `penstock.sim.in_order` does; returns the same.

        In each tick every rank runs the next action of its lane if all that it needs has run in earlier ticks. Then the
        messages of this tick leave.
        """
        makespan = 0.0
        last = -1
        for a in range(size):
            tick[a] = 0
        for here in range(ranks):
            cursor[here] = first[here]
            for channel in range(channels):
                busy[here, channel] = 0.0
                blamed[here, channel] = -1
        done = 0
        now = 0
        while done < size:
            now += 1
            count = 0
            for here in range(ranks):
                place = cursor[here]
                if place == first[here + 1]:
                    continue
                a = lane[place]
                can_run = True
                for column in range(needs.shape[1]):
                    need = needs[a, column]
                    if need >= 0 and (tick[need] == 0 or tick[need] == now):
                        can_run = False
                        break
                if not can_run:
                    continue
                start = 0.0
                cause[a] = -1
                if place > first[here]:
                    before = lane[place - 1]
                    start = end[before] + pause[before]
                    cause[a] = before
                for column in range(needs.shape[1]):
                    need = needs[a, column]
                    if need >= 0:
                        is_here = rank[need] == here
                        there = end[need] if is_here else ready[need]
                        if there >= start:
                            start = there
                            cause[a] = need if is_here else waiting[need]
                end[a] = start + seconds[a]
                if end[a] > makespan or last < 0:
                    makespan = end[a]
                    last = a
                tick[a] = now
                cursor[here] = place + 1
                done += 1
                stack[count] = a
                count += 1
            if count == 0:
                return -1.0, -1
            for index in range(count):
                a = stack[index]
                there = receiver[a]
                if there < 0:
                    continue
                here = rank[a]
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
                if cursor[there] > first[there]:
                    before = lane[cursor[there] - 1]
                    if end[before] > take:
                        take = end[before]
                        late = before
                ready[a] = leave + hop[a]  # when its message has arrived
                if take - (hop[a] - receive[a]) > leave:
                    ready[a] = take + receive[a]
                    blame = late
                waiting[a] = blame  # the action for which its message waited
                busy[here, channel] = goes_on
                if goes_on >= ready[a]:
                    busy[here, channel] = ready[a]
                    blamed[here, channel] = blame
                busy[there, channel] = ready[a]
                blamed[there, channel] = blame
        return makespan, last

    for step in range(-1, len(random)):
        source = 0
        target = 0
        excess = now_excess
        time = 0.0
        part = (begin + step) / length
        heat = warmth * (1.0 - part)
        price = full_price * max(part, 0.0) / (1.001 - part)
        if full_price == np.inf:
            price = 1e300
        now = now_time + now_excess * price
        if step >= 0:
            # Choose an action and a place in its lane.
            pick, kind, shift, luck, side = random[step]
            if kind < CRITICAL_MOVES and arc_count > 0:
                number = arcs[int(pick * arc_count)]
                source = where[number]
                later = side < 0.5
                if later:  # move what it waits for behind it
                    source -= 1
            else:
                source = int(pick * size)
                later = side < 0.5
            number = lane[source]
            here = rank[number]
            reach = first[here + 1] - first[here]
            distance = 1 + int(shift * shift * shift * min(reach, MAX_DISTANCE))
            if later:
                limit = min(source + distance, first[here + 1] - 1)
                target = source
                while target < limit:
                    other = lane[target + 1]
                    if (
                        needs[other, 0] == number
                        or needs[other, 1] == number
                        or needs[other, 2] == number
                    ):
                        break
                    target += 1
            else:
                limit = max(source - distance, first[here])
                target = source
                while target > limit:
                    other = lane[target - 1]
                    if (
                        needs[number, 0] == other
                        or needs[number, 1] == other
                        or needs[number, 2] == other
                    ):
                        break
                    target -= 1
            if target == source:
                continue
            # Move it, and check the memory on the way.
            low = min(source, target)
            high = max(source, target)
            if later:
                for place in range(source, target):
                    lane[place] = lane[place + 1]
            else:
                for place in range(source, target, -1):
                    lane[place] = lane[place - 1]
            lane[target] = number
            level = held[low]
            excess = now_excess
            for place in range(low, high + 1):
                excess += max(level + gain[lane[place]] - caps[here], 0.0) - over[place]
                level += gain[lane[place]] - loss[lane[place]]
            fits = excess * price <= now - now_time + 1.5 * heat
        else:
            low = 0
            high = -1
            fits = True

        makespan = 0.0
        goal = 0.0
        if fits:
            for place in range(low, high + 1):
                where[lane[place]] = place
            if channels == 0:
                makespan, last = time_at_once()
            else:
                makespan, last = time_in_order()
            if makespan < 0.0:
                fits = False
            else:
                goal = 0.0
                for here in range(ranks):
                    if first[here] < first[here + 1]:
                        goal += end[lane[first[here + 1] - 1]]
                time = makespan + MEAN_END_WEIGHT * goal / ranks
                goal = time + excess * price

        if step < 0:
            now = goal
            now_time = time
            if len(random) == 0 or not fits:
                return makespan
        else:
            if not fits or goal > now + heat * luck * luck * luck:
                # Take it back.
                if later:
                    for place in range(target, source, -1):
                        lane[place] = lane[place - 1]
                else:
                    for place in range(target, source):
                        lane[place] = lane[place + 1]
                lane[source] = number
                for place in range(low, high + 1):
                    where[lane[place]] = place
                continue
            now_time = time
            now_excess = excess
            level = held[low]
            for place in range(low, high + 1):
                held[place] = level
                over[place] = max(level + gain[lane[place]] - caps[rank[number]], 0.0)
                level += gain[lane[place]] - loss[lane[place]]
            if now_excess <= 1e-12 and makespan < best_makespan * (1.0 - LEAST_GAIN):
                best_makespan = makespan
                for place in range(size):
                    best[place] = lane[place]
        # Walk back along the critical path.
        arc_count = 0
        a = last
        while cause[a] >= 0:
            before = cause[a]
            if where[before] + 1 == where[a] and rank[before] == rank[a]:
                arcs[arc_count] = a
                arc_count += 1
            a = before
    return best_makespan
