"""Partial paths as in SkipPipe (Blagoev et al., 2025): each micro-batch leaves out parts, all equally often.

The schedule `skip` does so in turn, and `skipping_paths` draws other parts for every step:

    micro-batch   step 0        step 1          skipping_paths(parts=6, microbatches=5, skips=2, swaps=1, seed=3)
              0 | 0 1 2 . . 5 | 0 1 . 3 . 5     a dot: left out
              1 | 0 . 3 2 . 5 | 0 . 2 4 3 .     3 2: swapped
              2 | 0 2 1 . 4 . | 0 . 2 . 5 4
              3 | 0 1 . 3 4 . | 0 1 . . 5 4
              4 | 0 . . 3 4 5 | 0 1 2 3 . .
           runs | 5 3 3 3 3 3 | 5 3 3 3 3 3     the first part always runs, the others equally often

First   Part 0 always runs, and always runs first. With `keep`, further parts always run.
Share   Every path leaves out `skips` of the other parts.
Cover   The parts to leave out are drawn in sets of `skips`, one for each micro-batch, and no part is drawn twice before
        every part has been drawn once: a round. So up to any step no part has been left out more than once more
        often than another. If parts - 1 divides microbatches * skips, all parts are left out equally often in every
        step.
Meet    With a whole round before it, the sampler takes one of the sets that it has drawn least. So every subset of
        parts occurs after at most comb(parts - 1, skips) rounds. The paths of a step are shuffled, so that no
        micro-batch prefers any.
Order   The parts of a path rise. With `swaps`, up to that many pairs of neighbors change places: a step back goes one
        part behind the highest part so far, the frontier, and each part moves at most once.
Ahead   With `ahead`, no step goes further than that beyond the frontier. So no path leaves out `ahead` parts in a row,
        unless they are the last ones. The paper's limit is four parts. With its six parts, of which two are left out,
        no path could go further. Where a path could, as over 12 parts of which six are left out, sets that do so
        are not drawn. Without `ahead` the steps have no limit: `benchmarks/convergence.py` draws its paths that way.

A path lists parts without the head, which comes after it. `penstock.plan.paths.rules` has the same rules for planned
paths.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, islice, pairwise
from math import comb, floor
from random import Random

from penstock.cost.cost import UnitCost
from penstock.errors import ShapeError
from penstock.ir.schedule import MicroBatch, Schedule, Stage
from penstock.schedules.list_scheduling import list_schedule, oldest_first
from penstock.schedules.orders import require_at_least


def skip(ranks: int, microbatches: int, skips: int | None = None) -> Schedule:
    """Let every micro-batch leave out `skips` parts, by default as many as a quarter of the ranks.

    Every path begins with part 0 and ends with the head, both on rank 0. The parts left out move on
    from one micro-batch to the next, so that after every ranks - 1 micro-batches each part has been
    left out equally often (ranks=4, microbatches=4):

    rank 0 | F0 F1 F2 F3 .  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- B0 -- .  .  B1 -- .  .  B2 -- B3 --
    rank 1 | .  .  F1 -- F2 -- .  .  .  .  .  .  .  .  .  .  .  B1 -- -- -- B2 -- -- -- .  .  .  .
    rank 2 | .  F0 -- .  F3 -- F2 -- .  .  .  .  .  B0 -- -- -- B2 -- -- -- B3 -- -- -- .  .  .  .
    rank 3 | .  .  .  F0 -- F1 -- F3 -- B0 -- -- -- B1 -- -- -- B3 -- -- -- .  .  .  .  .  .  .  .

    The head is the last part. The lanes are a list schedule in which a rank holds at most `ranks`
    micro-batches.
    """
    require_at_least(1, ranks=ranks, microbatches=microbatches)
    if skips is None:
        skips = default_skips(ranks)
    max_skips = max(ranks - 2, 0)
    if not 0 <= skips <= max_skips:
        raise ShapeError(
            f"of {ranks} ranks at most {max_skips} can be left out on a path, not {skips}"
        )
    paths = [path_with_skips(ranks, skips, number) for number in range(microbatches)]
    return schedule_along(ranks, paths)


def skipping_schedules(
    ranks: int,
    microbatches: int,
    skips: int | None = None,
    count: int = 1,
    swaps: int = 0,
    keep: Sequence[int] = (),
    seed: int = 0,
) -> list[Schedule]:
    """Return `count` schedules over the same stages, with the paths that `skipping_paths` draws for as many steps.

    >>> first, second = skipping_schedules(ranks=4, microbatches=3, count=2)
    >>> [sorted(one.path for one in schedule.microbatches) for schedule in (first, second)]
    [[(0, 1, 2, 4), (0, 1, 3, 4), (0, 2, 3, 4)], [(0, 1, 2, 4), (0, 1, 3, 4), (0, 2, 3, 4)]]
    """
    if skips is None:
        skips = default_skips(ranks)
    steps = skipping_paths(ranks, microbatches, skips, swaps, seed, keep=keep)
    return [schedule_along(ranks, paths) for paths in islice(steps, count)]


def schedule_along(ranks: int, paths: Sequence[Sequence[int]]) -> Schedule:
    """Return a schedule along any paths. Each rank has one part, and rank 0 also has the head.

    A path is the parts of one micro-batch without the head, which comes last. `skipping_paths` draws
    them for every step.
    """
    require_at_least(1, ranks=ranks, microbatches=len(paths))
    head = ranks
    stages = [Stage(rank, rank) for rank in range(ranks)]
    stages.append(Stage(0, head))
    microbatches = [MicroBatch((*path, head)) for path in paths]
    return list_schedule(
        stages, microbatches, UnitCost(), cap=ranks, priority=oldest_first
    )


def default_skips(ranks: int) -> int:
    """Return a quarter of the ranks, but at least one if a part can be left out."""
    return max(ranks // 4, 1) if ranks > 2 else 0


def path_with_skips(parts: int, skips: int, number: int) -> tuple[int, ...]:
    """Return the parts that micro-batch `number` visits: all but `skips` of those after the first.

    >>> path_with_skips(4, 1, 0), path_with_skips(4, 1, 1)
    ((0, 2, 3), (0, 1, 3))
    """
    others = parts - 1
    left_out = {1 + (number * skips + step) % others for step in range(skips)}
    return tuple(part for part in range(parts) if part not in left_out)


PartPath = tuple[int, ...]
Paths = tuple[PartPath, ...]  # of a step's micro-batches
Skipped = frozenset[int]

# With more possible sets than this, one is drawn at random instead of among those drawn least.
MAX_SETS = 20_000
MAX_DRAWS = 200  # random sets, of which one must respect `ahead`


def skipping_paths(
    parts: int,
    microbatches: int,
    skips: int,
    swaps: int = 0,
    seed: int = 0,
    ahead: int | None = None,
    keep: Iterable[int] = (),
) -> Iterator[Paths]:
    """Yield the paths of step after step, without end. Every step has different paths.

    No path leaves out the parts in `keep`.

    >>> steps = skipping_paths(parts=4, microbatches=3, skips=1)
    >>> sorted(next(steps))
    [(0, 1, 2), (0, 1, 3), (0, 2, 3)]
    """
    require_at_least(1, parts=parts, microbatches=microbatches)
    require_at_least(0, skips=skips, swaps=swaps)
    if ahead is not None:
        require_at_least(1, ahead=ahead)
    kept = frozenset((0, *keep))
    if not kept <= set(range(parts)):
        raise ShapeError(
            f"part {max(kept)} cannot always run: the parts are 0 to {parts - 1}"
        )
    sampler = SkipSampler(parts, skips, ahead or parts, kept)
    most = len(sampler.candidates)
    if skips > most:
        reason = "the first one always runs"
        if len(kept) > 1:
            reason = f"the parts {' '.join(map(str, sorted(kept)))} always run"
        raise ShapeError(
            f"of {parts} parts at most {most} can be left out, because {reason}; not {skips}"
        )
    if not sampler.allows_every_set:
        _try_sampler(sampler, seed)
    return _draw_steps(sampler, microbatches, swaps, _random(seed))


def skips_of(parts: int, share: float) -> int:
    """Return how many of `parts` parts make up a share of them, to the nearest.

    >>> skips_of(12, 0.33), skips_of(12, 0.25)
    (4, 3)
    """
    if not 0.0 <= share < 1.0 or parts < 1:
        raise ShapeError(
            f"a share of {share:g} of {parts} parts cannot be left out; give one from 0 to below 1"
        )
    return min(floor(parts * share + 0.5), parts - 1)


def _random(seed: int) -> Random:
    return Random(f"paths {seed}")


def _try_sampler(sampler: SkipSampler, seed: int) -> None:
    """Draw some sets, so that a sampler that has none is refused before the first step."""
    sets = _draw_sets(sampler, _random(seed))
    for _ in islice(sets, 4 * sampler.parts):
        pass


def _draw_steps(
    sampler: SkipSampler, microbatches: int, swaps: int, random: Random
) -> Iterator[Paths]:
    sets = _draw_sets(sampler, random)
    while True:
        step = []
        for _ in range(microbatches):
            skipped = next(sets)
            path = sampler.path_without(skipped)
            step.append(_swap_neighbors(path, swaps, random, sampler.ahead))
        random.shuffle(step)
        yield tuple(step)


# ---------------------------------------------------------------- the parts to leave out
@dataclass(frozen=True, slots=True)
class SkipSampler:
    """Draws sets of `skips` parts to leave out, of those that are not `kept`.

    A skipped must not leave out so many parts in a row that a step goes more than `ahead` parts.
    """

    parts: int
    skips: int
    ahead: int
    kept: Skipped = frozenset({0})

    @property
    def candidates(self) -> Skipped:
        """All candidates."""
        return frozenset(range(self.parts)) - self.kept

    @property
    def allows_every_set(self) -> bool:
        """Whether no skipped can leave out too many parts in a row."""
        return self.skips < self.ahead

    def path_without(self, skipped: Skipped) -> list[int]:
        """Return the parts that a path with this skipped visits, in rising order."""
        return [part for part in range(self.parts) if part not in skipped]

    def allows(self, skipped: Skipped) -> bool:
        """Whether a path with this skipped takes no step that is too far."""
        steps = pairwise(self.path_without(skipped))
        return all(after - before <= self.ahead for before, after in steps)

    @property
    def refusal(self) -> ShapeError:
        """The error if no sets, or none that leave out all parts equally often, are allowed."""
        return ShapeError(
            f"{self.skips} of {self.parts} parts cannot be left out, all equally often, if no step goes more than "
            f"{self.ahead} parts ahead; leave out fewer, or allow more"
        )


def _draw_sets(sampler: SkipSampler, random: Random) -> Iterator[Skipped]:
    """Yield sets without end.

    A round with too few parts left for a set gives all that it has left, and a new round gives the rest.
    """
    times_drawn: Counter[Skipped] = Counter()
    left = sampler.candidates
    while True:
        last_ones: Skipped = frozenset()
        pool = left
        if len(left) <= sampler.skips:
            last_ones = left
            pool = sampler.candidates - left
        skipped = _draw_set(sampler, last_ones, pool, times_drawn, random)
        times_drawn[skipped] += 1
        if last_ones:
            left = sampler.candidates
        left -= skipped - last_ones
        yield skipped


def _draw_set(
    sampler: SkipSampler,
    last_ones: Skipped,
    pool: Skipped,
    times_drawn: Counter[Skipped],
    random: Random,
) -> Skipped:
    """Return a set of the last parts of a round and others from the pool.

    Of all such sets it is a random one of those that were drawn least.
    """
    missing = sampler.skips - len(last_ones)
    candidates = sorted(pool)
    too_many = comb(len(pool), missing) > MAX_SETS
    if too_many and sampler.allows_every_set:
        return last_ones | frozenset(random.sample(candidates, missing))
    draws: Iterable[Iterable[int]] = combinations(candidates, missing)
    if too_many:
        draws = [random.sample(candidates, missing) for _ in range(MAX_DRAWS)]
    sets = [last_ones | frozenset(draw) for draw in draws]
    if not sampler.allows_every_set:
        sets = _drawable(sampler, sets, last_ones, pool)
    least = min(times_drawn[skipped] for skipped in sets)
    return random.choice([skipped for skipped in sets if times_drawn[skipped] == least])


def _drawable(
    sampler: SkipSampler, sets: list[Skipped], last_ones: Skipped, pool: Skipped
) -> list[Skipped]:
    """Return the sets that the sampler allows, if possible only those after which the round can be drawn to its end."""
    allowed = [skipped for skipped in sets if sampler.allows(skipped)]
    if not allowed:
        raise sampler.refusal
    left_over = sampler.candidates if last_ones else pool

    def leaves_a_way(skipped: Skipped) -> bool:
        return _can_be_used_up(sampler, left_over - (skipped - last_ones))

    continuing = list(filter(leaves_a_way, allowed))
    return continuing or allowed


@cache
def _can_be_used_up(sampler: SkipSampler, left: Skipped) -> bool:
    """Whether the rest of a round can be drawn, and its last parts can join parts of a new round."""
    missing = sampler.skips - len(left)
    if missing >= 0:
        if not left:
            return True
        others = sorted(sampler.candidates - left)
        additions = combinations(others, missing)
        return any(sampler.allows(left | frozenset(addition)) for addition in additions)
    for candidates in combinations(sorted(left), sampler.skips):
        skipped = frozenset(candidates)
        if sampler.allows(skipped) and _can_be_used_up(sampler, left - skipped):
            return True
    return False


# ---------------------------------------------------------------- the order of the parts
def _swap_neighbors(
    path: list[int], swaps: int, random: Random, ahead: int
) -> PartPath:
    """Let 0 to `swaps` pairs of neighbors, a and a + 1, change places. The first part stays.

    No part moves twice: once a and a + 1 have changed places, neither is followed by the next
    larger part any more.
    """
    for _ in range(random.randint(0, swaps)):
        places = []
        for place in range(1, len(path) - 1):
            follows = path[place + 1] == path[place] + 1
            if follows and path[place + 1] - max(path[:place]) <= ahead:
                places.append(place)
        if places:
            place = random.choice(places)
            path[place], path[place + 1] = path[place + 1], path[place]
    return tuple(path)
