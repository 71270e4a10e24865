"""Draws the parts that each micro-batch leaves out, step after step, as in SkipPipe (Blagoev et al., 2025).

    micro-batch   step 0        step 1          deals(parts=6, microbatches=5, skips=2, swaps=1, seed=3)
              0 | 0 1 2 . . 5 | 0 1 . 3 . 5     a dot: left out
              1 | 0 . 3 2 . 5 | 0 . 2 4 3 .     3 2: swapped
              2 | 0 2 1 . 4 . | 0 . 2 . 5 4
              3 | 0 1 . 3 4 . | 0 1 . . 5 4
              4 | 0 . . 3 4 5 | 0 1 2 3 . .
           runs | 5 3 3 3 3 3 | 5 3 3 3 3 3     the first part always runs, the others equally often

First   Part 0 always runs, and always runs first. With `keep`, further parts always run.
Share   Every path leaves out `skips` of the other parts.
Cover   The parts to leave out are dealt like cards. Each part is a card, each micro-batch gets a hand of `skips`
        cards, and no card is dealt twice before all cards have been dealt. So up to any step no part has been left
        out more than once more often than another. If parts - 1 divides microbatches * skips, all parts are left
        out equally often in every step.
Meet    A full deck deals one of the hands that have been dealt least. So every subset of parts occurs after at most
        comb(parts - 1, skips) decks. The paths of a step are shuffled, so that no micro-batch prefers any.
Order   The parts of a path rise. With `swaps`, up to that many pairs of neighbors change places: a step back goes one
        part behind the highest part so far, the frontier, and each part moves at most once.
Ahead   With `ahead`, no step goes further than that beyond the frontier. So no path leaves out `ahead` parts in a row,
        unless they are the last ones. The paper's limit is four parts. With its six parts, of which two are left out,
        no path could go further. Where a path could, as over 12 parts of which six are left out, hands that do so
        are not dealt. Without `ahead` the steps have no limit: `benchmarks/convergence.py` deals its paths that way.

A path lists parts without the head, which comes after it. `penstock.plan.paths.rules` has the same rules for planned
paths.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations, islice, pairwise, repeat
from math import comb, floor
from random import Random

from penstock.errors import ShapeError
from penstock.schedules.orders import require_at_least

PartPath = tuple[int, ...]
Paths = tuple[PartPath, ...]  # of a step's micro-batches
Hand = frozenset[int]

# With more possible hands than this, a hand is drawn at random instead of among those dealt least.
MAX_HANDS = 20_000
MAX_DRAWS = 200  # random hands, of which one must respect `ahead`


def deals(
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

    >>> steps = deals(parts=4, microbatches=3, skips=1)
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
    deck = Deck(parts, skips, ahead or parts, kept)
    most = len(deck.cards)
    if skips > most:
        reason = "the first one always runs"
        if len(kept) > 1:
            reason = f"the parts {' '.join(map(str, sorted(kept)))} always run"
        raise ShapeError(
            f"of {parts} parts at most {most} can be left out, because {reason}; not {skips}"
        )
    if not deck.allows_every_hand:
        _try_deal(deck, seed)
    return _deal_steps(deck, microbatches, swaps, _random(seed))


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


def fixed_paths(
    parts: int,
    microbatches: int,
    skips: int,
    swaps: int = 0,
    seed: int = 0,
    ahead: int | None = None,
) -> Iterator[Paths]:
    """Yield the first step of `deals` for ever.

    So each micro-batch, and thus each shard of the data, keeps its path.
    """
    steps = deals(parts, microbatches, skips, swaps, seed, ahead)
    return repeat(next(steps))


def with_full(steps: Iterable[Paths], parts: int, every: int) -> Iterator[Paths]:
    """Insert steps that run all parts in order, so that every `every`-th step is such a step.

    With every=10 these are the steps 9, 19, ... The given steps continue in between.

    >>> list(with_full([((0, 1),), ((0, 2),), ((0, 1),)], parts=3, every=3))
    [((0, 1),), ((0, 2),), ((0, 1, 2),), ((0, 1),)]
    """
    require_at_least(1, parts=parts, every=every)
    full_path = tuple(range(parts))
    for number, paths in enumerate(steps):
        if every == 1 or (number and number % (every - 1) == 0):
            yield (full_path,) * len(paths)
        if every > 1:
            yield paths


def _random(seed: int) -> Random:
    return Random(f"paths {seed}")


def _try_deal(deck: Deck, seed: int) -> None:
    """Deal some hands, so that an impossible deck is refused before the first step."""
    hands = _deal_hands(deck, _random(seed))
    for _ in islice(hands, 4 * deck.parts):
        pass


def _deal_steps(
    deck: Deck, microbatches: int, swaps: int, random: Random
) -> Iterator[Paths]:
    hands = _deal_hands(deck, random)
    while True:
        step = []
        for _ in range(microbatches):
            hand = next(hands)
            path = deck.path_without(hand)
            step.append(_swap_neighbors(path, swaps, random, deck.ahead))
        random.shuffle(step)
        yield tuple(step)


# ---------------------------------------------------------------- the parts to leave out
@dataclass(frozen=True, slots=True)
class Deck:
    """A card for each part that is not `kept`. They are dealt in hands of `skips` cards.

    A hand must not leave out so many parts in a row that a step goes more than `ahead` parts.
    """

    parts: int
    skips: int
    ahead: int
    kept: Hand = frozenset({0})

    @property
    def cards(self) -> Hand:
        """All cards."""
        return frozenset(range(self.parts)) - self.kept

    @property
    def allows_every_hand(self) -> bool:
        """Whether no hand can leave out too many parts in a row."""
        return self.skips < self.ahead

    def path_without(self, hand: Hand) -> list[int]:
        """Return the parts that a path with this hand visits, in rising order."""
        return [part for part in range(self.parts) if part not in hand]

    def allows(self, hand: Hand) -> bool:
        """Whether a path with this hand takes no step that is too far."""
        steps = pairwise(self.path_without(hand))
        return all(after - before <= self.ahead for before, after in steps)

    @property
    def refusal(self) -> ShapeError:
        """The error if no hands, or none that leave out all parts equally often, are allowed."""
        return ShapeError(
            f"{self.skips} of {self.parts} parts cannot be left out, all equally often, if no step goes more than "
            f"{self.ahead} parts ahead; leave out fewer, or allow more"
        )


def _deal_hands(deck: Deck, random: Random) -> Iterator[Hand]:
    """Yield hands without end.

    A deck with too few cards for a hand gives all it has left, and a new deck gives the rest.
    """
    times_dealt: Counter[Hand] = Counter()
    left = deck.cards
    while True:
        last_cards: Hand = frozenset()
        pool = left
        if len(left) <= deck.skips:
            last_cards = left
            pool = deck.cards - left
        hand = _draw_hand(deck, last_cards, pool, times_dealt, random)
        times_dealt[hand] += 1
        if last_cards:
            left = deck.cards
        left -= hand - last_cards
        yield hand


def _draw_hand(
    deck: Deck,
    last_cards: Hand,
    pool: Hand,
    times_dealt: Counter[Hand],
    random: Random,
) -> Hand:
    """Return a hand of the last cards of a deck and others from the pool.

    Of all such hands it is a random one of those that were dealt least.
    """
    missing = deck.skips - len(last_cards)
    cards = sorted(pool)
    too_many = comb(len(pool), missing) > MAX_HANDS
    if too_many and deck.allows_every_hand:
        return last_cards | frozenset(random.sample(cards, missing))
    draws: Iterable[Iterable[int]] = combinations(cards, missing)
    if too_many:
        draws = [random.sample(cards, missing) for _ in range(MAX_DRAWS)]
    hands = [last_cards | frozenset(draw) for draw in draws]
    if not deck.allows_every_hand:
        hands = _playable(deck, hands, last_cards, pool)
    least = min(times_dealt[hand] for hand in hands)
    return random.choice([hand for hand in hands if times_dealt[hand] == least])


def _playable(
    deck: Deck, hands: list[Hand], last_cards: Hand, pool: Hand
) -> list[Hand]:
    """Return the hands that the deck allows, if possible only those after which it can be dealt to its end."""
    allowed = [hand for hand in hands if deck.allows(hand)]
    if not allowed:
        raise deck.refusal
    deck_left = deck.cards if last_cards else pool

    def leaves_a_deal(hand: Hand) -> bool:
        return _can_be_dealt(deck, deck_left - (hand - last_cards))

    continuing = list(filter(leaves_a_deal, allowed))
    return continuing or allowed


@cache
def _can_be_dealt(deck: Deck, left: Hand) -> bool:
    """Whether the rest of a deck can be dealt, and its last cards can join cards of a new deck."""
    missing = deck.skips - len(left)
    if missing >= 0:
        if not left:
            return True
        others = sorted(deck.cards - left)
        additions = combinations(others, missing)
        return any(deck.allows(left | frozenset(addition)) for addition in additions)
    for cards in combinations(sorted(left), deck.skips):
        hand = frozenset(cards)
        if deck.allows(hand) and _can_be_dealt(deck, left - hand):
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
