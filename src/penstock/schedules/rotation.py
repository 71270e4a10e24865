"""Which parts each micro-batch leaves out, step after step, as in SkipPipe (Blagoev et al., 2025).

    micro-batch   step 0        step 1          rotating(parts=6, microbatches=5, skips=2, swaps=1, seed=3)
              0 | 0 1 2 . . 5 | 0 1 . 3 . 5     a dot: left out
              1 | 0 . 3 2 . 5 | 0 . 2 4 3 .     3 2: swapped
              2 | 0 2 1 . 4 . | 0 . 2 . 5 4
              3 | 0 1 . 3 4 . | 0 1 . . 5 4
              4 | 0 . . 3 4 5 | 0 1 2 3 . .
           runs | 5 3 3 3 3 3 | 5 3 3 3 3 3     the first part always, the others equally often

First   part 0 always runs, always first.
Share   every path leaves out `skips` of the other parts.
Cover   what is left out is dealt like cards: each part is a card, a micro-batch gets `skips` of them, and nobody gets a
        card twice before all have been dealt. So up to any step no part has been left out more than once more often
        than another; and exactly equally often in every step, where parts - 1 divides microbatches * skips.
Meet    a full deck deals, of all hands, one that was dealt least. So every subset is met, at the latest after
        comb(parts - 1, skips) decks; and the paths of a step are shuffled, so that no micro-batch prefers any.
Order   rising. With `swaps`, up to so many pairs of neighbours change places: a step back goes one part behind the
        highest so far, the frontier, and each part moves at most once.

A path names parts; the head comes after it and is not among them. The paper also bounds how far a step may jump ahead,
at four parts; on its six parts, of which two are left out, no path could. Here nothing bounds it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import combinations, repeat
from math import comb
from random import Random

from penstock.errors import ShapeError
from penstock.schedules.orders import at_least

Path = tuple[int, ...]
Paths = tuple[Path, ...]  # of a step's micro-batches

HANDS = 20_000  # more subsets than so many are not counted: hands are then drawn blindly


def rotating(parts: int, microbatches: int, skips: int, swaps: int = 0, seed: int = 0) -> Iterator[Paths]:
    """Paths of step after step, without end, other ones every step.

    >>> steps = rotating(parts=4, microbatches=3, skips=1)
    >>> sorted(next(steps))
    [(0, 1, 2), (0, 1, 3), (0, 2, 3)]
    """
    at_least(1, parts=parts, microbatches=microbatches)
    at_least(0, skips=skips, swaps=swaps)
    if skips > parts - 1:
        raise ShapeError(f"of {parts} parts at most {parts - 1} can be left out, for the first runs; not {skips}")
    return _steps(parts, microbatches, skips, swaps, Random(f"paths {seed}"))


def fixed(parts: int, microbatches: int, skips: int, swaps: int = 0, seed: int = 0) -> Iterator[Paths]:
    """The first step of `rotating` for ever: each micro-batch, and so each shard of the data, keeps its path."""
    return repeat(next(rotating(parts, microbatches, skips, swaps, seed)))


def with_full(steps: Iterable[Paths], parts: int, every: int) -> Iterator[Paths]:
    """Every so-manieth step runs all parts in order; the others go on where they were.  every=10: steps 9, 19, ...

    >>> list(with_full([((0, 1),), ((0, 2),), ((0, 1),)], parts=3, every=3))
    [((0, 1),), ((0, 2),), ((0, 1, 2),), ((0, 1),)]
    """
    at_least(1, parts=parts, every=every)
    for number, paths in enumerate(steps):
        if every == 1 or (number and number % (every - 1) == 0):
            yield (tuple(range(parts)),) * len(paths)
        if every > 1:
            yield paths


def _steps(parts: int, microbatches: int, skips: int, swaps: int, draw: Random) -> Iterator[Paths]:
    hands = _hands(frozenset(range(1, parts)), skips, draw)
    while True:
        step = []
        for _ in range(microbatches):
            hand = next(hands)
            step.append(_swapped([part for part in range(parts) if part not in hand], swaps, draw))
        draw.shuffle(step)
        yield tuple(step)


# ---------------------------------------------------------------- what is left out
def _hands(every: frozenset[int], skips: int, draw: Random) -> Iterator[frozenset[int]]:
    """Deals hands of `skips` cards. A deck with too few for a hand gives all it has, and a new one the rest."""
    dealt: Counter[frozenset[int]] = Counter()
    deck = every
    while True:
        taken, pool = (frozenset[int](), deck) if len(deck) > skips else (deck, every - deck)
        hand = _least_dealt(taken, sorted(pool), skips - len(taken), dealt, draw)
        dealt[hand] += 1
        deck = (every if taken else deck) - (hand - taken)
        yield hand


def _least_dealt(
    taken: frozenset[int], pool: list[int], more: int, dealt: Counter[frozenset[int]], draw: Random
) -> frozenset[int]:
    """Of all hands with `taken` and so many more of the pool one that was dealt least, at random."""
    if comb(len(pool), more) > HANDS:
        return taken | frozenset(draw.sample(pool, more))
    hands = [taken | frozenset(cards) for cards in combinations(pool, more)]
    least = min(dealt[hand] for hand in hands)
    return draw.choice([hand for hand in hands if dealt[hand] == least])


# ---------------------------------------------------------------- in which order
def _swapped(path: list[int], swaps: int, draw: Random) -> Path:
    """None to `swaps` pairs of neighbours, a and a + 1, change places; the first part stays.

    No part moves twice: where a and a + 1 have changed places, neither is followed by the next larger one any more.
    """
    for _ in range(draw.randint(0, swaps)):
        pairs = [at for at in range(1, len(path) - 1) if path[at + 1] == path[at] + 1]
        if pairs:
            at = draw.choice(pairs)
            path[at], path[at + 1] = path[at + 1], path[at]
    return tuple(path)
