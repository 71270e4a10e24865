"""Which parts each micro-batch leaves out, step after step, as in SkipPipe (Blagoev et al., 2025).

    micro-batch   step 0        step 1          deals(parts=6, microbatches=5, skips=2, swaps=1, seed=3)
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

Ahead   with `ahead`, no step goes further beyond the frontier: so many parts in a row are never left out, unless they
        are the last ones. The paper's bound is four parts. On its six parts, of which two are left out, no path could
        go further; where a path might, as over 12 parts of which six are left out, hands that do are not dealt. Without
        it nothing bounds a step: that is how the paths of `benchmarks/convergence.py` are dealt.

A path names parts; the head comes after it and is not among them. `penstock.plan.paths.rules` has the same rules for planned
paths.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations, islice, pairwise, repeat
from math import comb
from random import Random

from penstock.errors import ShapeError
from penstock.schedules.orders import require_at_least

PartPath = tuple[int, ...]
Paths = tuple[PartPath, ...]  # of a step's micro-batches
Hand = frozenset[int]

MAX_HANDS = (
    20_000  # more subsets than so many are not counted: hands are then drawn blindly
)
MAX_DRAWS = 200  # hands drawn blindly of which one must keep to `ahead`


def deals(
    parts: int,
    microbatches: int,
    skips: int,
    swaps: int = 0,
    seed: int = 0,
    ahead: int | None = None,
) -> Iterator[Paths]:
    """Paths of step after step, without end, other ones every step.

    >>> steps = deals(parts=4, microbatches=3, skips=1)
    >>> sorted(next(steps))
    [(0, 1, 2), (0, 1, 3), (0, 2, 3)]
    """
    require_at_least(1, parts=parts, microbatches=microbatches)
    require_at_least(0, skips=skips, swaps=swaps)
    if ahead is not None:
        require_at_least(1, ahead=ahead)
    if skips > parts - 1:
        raise ShapeError(
            f"of {parts} parts at most {parts - 1} can be left out, for the first runs; not {skips}"
        )
    deck = Deck(parts, skips, ahead or parts)
    if not deck.any_hand:  # a trial deal: who cannot go on, says so here
        for _ in islice(_hands(deck, Random(f"paths {seed}")), 4 * parts):
            pass
    return _steps(deck, microbatches, swaps, Random(f"paths {seed}"))


def fixed(
    parts: int,
    microbatches: int,
    skips: int,
    swaps: int = 0,
    seed: int = 0,
    ahead: int | None = None,
) -> Iterator[Paths]:
    """The first step of `deals` for ever: each micro-batch, and so each shard of the data, keeps its path."""
    return repeat(next(deals(parts, microbatches, skips, swaps, seed, ahead)))


def with_full(steps: Iterable[Paths], parts: int, every: int) -> Iterator[Paths]:
    """Every so-manieth step runs all parts in order; the others go on where they were.  every=10: steps 9, 19, ...

    >>> list(with_full([((0, 1),), ((0, 2),), ((0, 1),)], parts=3, every=3))
    [((0, 1),), ((0, 2),), ((0, 1, 2),), ((0, 1),)]
    """
    require_at_least(1, parts=parts, every=every)
    for number, paths in enumerate(steps):
        if every == 1 or (number and number % (every - 1) == 0):
            yield (tuple(range(parts)),) * len(paths)
        if every > 1:
            yield paths


def _steps(deck: Deck, microbatches: int, swaps: int, draw: Random) -> Iterator[Paths]:
    hands = _hands(deck, draw)
    while True:
        step = []
        for _ in range(microbatches):
            hand = next(hands)
            step.append(
                _swapped(
                    [part for part in range(deck.parts) if part not in hand],
                    swaps,
                    draw,
                    deck.ahead,
                )
            )
        draw.shuffle(step)
        yield tuple(step)


# ---------------------------------------------------------------- what is left out
@dataclass(frozen=True, slots=True)
class Deck:
    """Cards 1 to parts - 1, hands of `skips` of them; a hand with more than `ahead` - 1 in a row is not dealt."""

    parts: int
    skips: int
    ahead: int

    @property
    def cards(self) -> Hand:
        """All of them."""
        return frozenset(range(1, self.parts))

    @property
    def any_hand(self) -> bool:
        """Whether no hand can have too many in a row."""
        return self.skips < self.ahead

    def may(self, hand: Hand) -> bool:
        """Whether a path that leaves these out takes no step too far."""
        kept = [part for part in range(self.parts) if part not in hand]
        return all(after - before <= self.ahead for before, after in pairwise(kept))

    @property
    def refusal(self) -> ShapeError:
        """What is said if there are no such hands, or none that leave out all parts equally often."""
        return ShapeError(
            f"{self.skips} of {self.parts} parts cannot be left out, all equally often, if no step goes more than "
            f"{self.ahead} parts ahead; leave out fewer, or allow more"
        )


def _hands(deck: Deck, draw: Random) -> Iterator[Hand]:
    """Deals hands of `skips` cards. A deck with too few for a hand gives all it has, and a new one the rest."""
    dealt: Counter[Hand] = Counter()
    left = deck.cards
    while True:
        taken, pool = (
            (frozenset[int](), left)
            if len(left) > deck.skips
            else (left, deck.cards - left)
        )
        hand = _least_dealt(deck, taken, pool, dealt, draw)
        dealt[hand] += 1
        left = (deck.cards if taken else left) - (hand - taken)
        yield hand


def _least_dealt(
    deck: Deck, taken: Hand, pool: Hand, dealt: Counter[Hand], draw: Random
) -> Hand:
    """Of all hands with `taken` and others of the pool one that was dealt least, at random."""
    more, cards = deck.skips - len(taken), sorted(pool)
    many = comb(len(pool), more) > MAX_HANDS
    if many and deck.any_hand:
        return taken | frozenset(draw.sample(cards, more))
    drawn = (
        (tuple(draw.sample(cards, more)) for _ in range(MAX_DRAWS))
        if many
        else combinations(cards, more)
    )
    hands = [
        hand
        for hand in (taken | frozenset(some) for some in drawn)
        if deck.any_hand or deck.may(hand)
    ]
    if not deck.any_hand:
        left = deck.cards if taken else pool
        hands = [
            hand for hand in hands if _goes_on(deck, left - (hand - taken))
        ] or hands
    if not hands:
        raise deck.refusal
    least = min(dealt[hand] for hand in hands)
    return draw.choice([hand for hand in hands if dealt[hand] == least])


@cache
def _goes_on(deck: Deck, left: Hand) -> bool:
    """Whether what is left of a deck can be dealt, and the last cards be made a hand with new ones."""
    missing = deck.skips - len(left)
    if missing >= 0:
        others = sorted(deck.cards - left)
        return not left or any(
            deck.may(left | frozenset(some)) for some in combinations(others, missing)
        )
    hands = (frozenset(some) for some in combinations(sorted(left), deck.skips))
    return any(deck.may(hand) and _goes_on(deck, left - hand) for hand in hands)


# ---------------------------------------------------------------- in which order
def _swapped(path: list[int], swaps: int, draw: Random, ahead: int) -> PartPath:
    """None to `swaps` pairs of neighbours, a and a + 1, change places; the first part stays.

    No part moves twice: where a and a + 1 have changed places, neither is followed by the next larger one any more.
    """
    for _ in range(draw.randint(0, swaps)):
        pairs = [at for at in range(1, len(path) - 1) if path[at + 1] == path[at] + 1]
        pairs = [at for at in pairs if path[at + 1] - max(path[:at]) <= ahead]
        if pairs:
            at = draw.choice(pairs)
            path[at], path[at + 1] = path[at + 1], path[at]
    return tuple(path)
