"""The least time that one data node needs, whatever happens elsewhere: an exact search over all orders of its tasks.

Each micro-batch visits the data node four times, and needs a certain time between the visits. The
node does one task at a time, and at most `slots` micro-batches are under way at once:

    F ──── there ────► H h ──── back ────► B           H, h: forward and backward of the head
    |------------------ a slot ----------------|

All micro-batches are alike, so they can keep the same order everywhere: if one overtakes another
between two tasks, the two can exchange the rest of their ways, and no time changes. So an order of
the tasks is a word over the letters F H h B, each q times for q micro-batches, and the k-th H
belongs to the k-th F.

The search builds the words letter by letter. The only facts about a prefix that matter are how
often each letter occurs, when the node is free, and when the micro-batches under way come back. If
two prefixes have the same counts and one is nowhere later, the other can be dropped. Few prefixes
remain, and the least end of all words is exact for these times between the visits, and therefore a
bound for longer ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_LABELS = 2_500  # prefixes that are kept; beyond that there is no bound from here
TIME_TOLERANCE = 1e-12  # seconds

TaskCounts = tuple[int, int, int, int]  # of F, H, h and B in a prefix
# When the node is free, and then when the micro-batches under way come back: for H, for h, for B.
Label = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Window:
    """The seconds of a data node's tasks for one micro-batch, and of the ways in between.

    pause: seconds after h and after B.
    first_pause: seconds after F.
    """

    forward: float
    head: float
    head_back: float
    backward: float
    there: float
    back: float
    pause: float = 0.0
    first_pause: float = 0.0


def least_end(window: Window, microbatches: int, slots: int) -> float:
    """Return the least time for all micro-batches, or 0 if the search would be too long.

    >>> least_end(Window(1.0, 0.5, 0.5, 2.0, there=2.0, back=3.0), microbatches=1, slots=1)
    9.0
    """
    prefixes: dict[TaskCounts, list[Label]] = {(0, 0, 0, 0): [(0.0,)]}
    seen = 0
    for _ in range(4 * microbatches):
        longer: dict[TaskCounts, list[Label]] = {}
        for counts, labels in prefixes.items():
            undominated = _undominated(labels)
            seen += len(undominated)
            if seen > MAX_LABELS:
                return 0.0
            for label in undominated:
                extensions = _extend(window, counts, label, microbatches, slots)
                for new_counts, new_label in extensions:
                    longer.setdefault(new_counts, []).append(new_label)
        prefixes = longer
    ends = [label[0] for labels in prefixes.values() for label in labels]
    return min(ends) - window.pause if ends else 0.0


def _extend(
    window: Window, counts: TaskCounts, label: Label, microbatches: int, slots: int
) -> list[tuple[TaskCounts, Label]]:
    """Return the prefixes that are one letter longer."""
    begun, headed, turned, done = counts
    free = label[0]
    for_head = label[1 : 1 + begun - headed]
    for_turn = label[1 + begun - headed : 1 + begun - turned]
    for_back = label[1 + begun - turned :]
    extensions: list[tuple[TaskCounts, Label]] = []
    if begun < microbatches and begun - done < slots:  # F
        end = free + window.forward
        extended = (
            end + window.first_pause,
            *for_head,
            end + window.there,
            *for_turn,
            *for_back,
        )
        extensions.append(((begun + 1, headed, turned, done), extended))
    if for_head:  # H
        end = max(free, for_head[0]) + window.head
        extended = (end, *for_head[1:], *for_turn, end, *for_back)
        extensions.append(((begun, headed + 1, turned, done), extended))
    if for_turn:  # h
        end = max(free, for_turn[0]) + window.head_back
        extended = (
            end + window.pause,
            *for_head,
            *for_turn[1:],
            *for_back,
            end + window.back,
        )
        extensions.append(((begun, headed, turned + 1, done), extended))
    if for_back:  # B
        end = max(free, for_back[0]) + window.backward
        extended = (end + window.pause, *for_head, *for_turn, *for_back[1:])
        extensions.append(((begun, headed, turned, done + 1), extended))
    return extensions


def _undominated(labels: list[Label]) -> list[Label]:
    """Return the labels that no other label beats or equals everywhere."""
    undominated: list[Label] = []
    for label in sorted(labels):
        dominated = any(_is_nowhere_later(other, label) for other in undominated)
        if not dominated:
            undominated.append(label)
    return undominated


def _is_nowhere_later(label: Label, other: Label) -> bool:
    return all(map(_is_no_later, label, other))


def _is_no_later(time: float, other: float) -> bool:
    return time <= other + TIME_TOLERANCE


def round_down(seconds: float) -> float:
    """Return at most `seconds`, with four digits, so that nodes that are nearly alike share one result."""
    if seconds <= 0 or not math.isfinite(seconds):
        return seconds
    step = 10.0 ** (math.floor(math.log10(seconds)) - 3)
    return math.floor(seconds / step) * step
