"""A tape that needs no GPU: it does the work again, and leaves what it makes in its place."""

from __future__ import annotations


class Again:
    """A tape that does the work again. Takes must be played in their order, and from the start again."""

    replays_memory = False

    def __init__(self) -> None:
        self.takes = self.plays = self.recorded = self.rehearsed = 0

    def begin(self) -> None:
        self.takes += 1
        self.order: list[int] = []
        self.next = [0]

    def rehearse(self, work) -> None:
        self.rehearsed += 1
        work()

    def record(self, work, prepare=None):
        first = work() or ()
        number, order, at = len(self.order), self.order, self.next
        order.append(number)
        self.recorded += 1

        def play() -> None:
            assert at[0] == number, f"action {at[0]} of this take is due, not {number}"
            at[0] = (number + 1) % len(order)
            self.plays += 1
            leave_in_place(first, work() or ())

        return first, play


def leave_in_place(first, made) -> None:
    """Copy results to where they were the first time, except for those that are only passed on."""
    for place, result in zip(first, made, strict=True):
        if place.data_ptr() != result.data_ptr():
            place.copy_(result)
