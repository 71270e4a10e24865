"""The least time of one data node, whatever happens elsewhere: an exact search over all orders of its tasks.

Each micro-batch comes by four times, with a way in between that takes so long at least; the node does one thing at a
time, and no more than `slots` micro-batches are under way at once:

    F ──── there ────► H h ──── back ────► B           H, h: the head, there and back
    |------------------ a slot ----------------|

The micro-batches are alike, so they may keep one order everywhere: where one overtakes another between two tasks, the
two can exchange what is left of their ways, and everything stays where it is in time. So an order of the tasks is a
word over F H h B, each letter q times, and the k-th H is that of the k-th F. Letter by letter, all that matters of
the letters so far is how many of each there were, when the node is free, and when those under way will be back. Of two
words with the same counts, one that is nowhere later makes the other superfluous. What is left is few, and the least
end among all words is exact for these ways, hence a bound for longer ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_LABELS = 2_500  # words that are kept at most; past that there is no bound from here
TIME_TOLERANCE = 1e-12

Counts = tuple[int, int, int, int]
Label = tuple[
    float, ...
]  # when the node is free, and then who comes back when: for H, for h, for B


@dataclass(frozen=True, slots=True)
class Window:
    """What a data node has to do for one micro-batch. Seconds; a pause follows h and B, another one F."""

    forward: float
    head: float
    head_back: float
    backward: float
    there: float
    back: float
    pause: float = 0.0
    first_pause: float = 0.0


def least_end(window: Window, microbatches: int, slots: int) -> float:
    """The least time in which a node with so many slots is through with its micro-batches; 0 if that is too hard.

    >>> least_end(Window(1.0, 0.5, 0.5, 2.0, there=2.0, back=3.0), microbatches=1, slots=1)
    9.0
    """
    begin: Counts = (0, 0, 0, 0)
    now: dict[Counts, list[Label]] = {begin: [(0.0,)]}
    seen = 0
    for _ in range(4 * microbatches):
        then: dict[Counts, list[Label]] = {}
        for counts, labels in now.items():
            kept = _undominated(labels)
            seen += len(kept)
            if seen > MAX_LABELS:
                return 0.0
            for label in kept:
                for after, more in _next(window, counts, label, microbatches, slots):
                    then.setdefault(after, []).append(more)
        now = then
    ends = [label[0] for labels in now.values() for label in labels]
    return min(ends) - window.pause if ends else 0.0


def _next(
    window: Window, counts: Counts, label: Label, microbatches: int, slots: int
) -> list[tuple[Counts, Label]]:
    """The words that are one letter longer."""
    begun, headed, turned, done = counts
    free = label[0]
    for_head = label[1 : 1 + begun - headed]
    for_turn = label[1 + begun - headed : 1 + begun - turned]
    for_back = label[1 + begun - turned :]
    found: list[tuple[Counts, Label]] = []
    if begun < microbatches and begun - done < slots:
        end = free + window.forward
        late = (
            end + window.first_pause,
            *for_head,
            end + window.there,
            *for_turn,
            *for_back,
        )
        found.append(((begun + 1, headed, turned, done), late))
    if for_head:
        end = max(free, for_head[0]) + window.head
        found.append(
            (
                (begun, headed + 1, turned, done),
                (end, *for_head[1:], *for_turn, end, *for_back),
            )
        )
    if for_turn:
        end = max(free, for_turn[0]) + window.head_back
        late = (
            end + window.pause,
            *for_head,
            *for_turn[1:],
            *for_back,
            end + window.back,
        )
        found.append(((begun, headed, turned + 1, done), late))
    if for_back:
        end = max(free, for_back[0]) + window.backward
        found.append(
            (
                (begun, headed, turned, done + 1),
                (end + window.pause, *for_head, *for_turn, *for_back[1:]),
            )
        )
    return found


def _undominated(labels: list[Label]) -> list[Label]:
    """Those that are earlier somewhere than each of the others."""
    kept: list[Label] = []
    for label in sorted(labels):
        if not any(all(map(_no_later, other, label)) for other in kept):
            kept.append(label)
    return kept


def _no_later(one: float, other: float) -> bool:
    return one <= other + TIME_TOLERANCE


def rounded_down(seconds: float) -> float:
    """Four digits, never more than it was: nodes that are nearly alike are reckoned once."""
    if seconds <= 0 or not math.isfinite(seconds):
        return seconds
    step = 10.0 ** (math.floor(math.log10(seconds)) - 3)
    return math.floor(seconds / step) * step
