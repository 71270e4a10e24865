"""What the ranks write down for one another in the store of torch.distributed, and how it reads when a run fails.

    state/3     rank 3 waits at 3B2 for 4B2 from rank 4        each rank its own, four times a second
    state/4     rank 4 is at 4F5
    failure     StuckError, and its text                       the first one to come; all ranks raise it, of all
                                                               pipelines that train one model

Texts, never pickles.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from penstock.errors import PeerLostError, ProofError, RunError, StuckError
from penstock.runtime.torch_internals import PrefixStore, Store

MAX_RANKS_SHOWN = 32  # ranks in the story of a failure
ADVICE = "if that can be right, give more patience"
ERRORS = {
    kind.__name__: kind for kind in (RunError, ProofError, StuckError, PeerLostError)
}


@dataclass(frozen=True, slots=True)
class RankState:
    """What a rank says of itself."""

    beat: int = 0  # counts up for as long as it lives
    at: str = "the start"
    kind: str = ""  # of what it waits for, if it waits
    words: str = ""  # the same: "for 4B2 from rank 4"
    peers: tuple[int, ...] = ()  # for whom
    left: bool = False
    recent: Mapping[str, Mapping[str, str]] | None = (
        None  # its last sends: rank to turn to tensor
    )

    def __str__(self) -> str:
        if self.kind:
            return f"waits {'at' if self.kind == 'receive' else 'after'} {self.at} {self.words}"
        return f"has left after {self.at}" if self.left else f"is at {self.at}"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the run cannot go on, in the words that all ranks raise."""

    kind: str
    text: str
    lost: tuple[int, ...] = ()

    @property
    def error(self) -> RunError:
        """As an exception."""
        return ERRORS.get(self.kind, RunError)(self.text)


class Board:
    """One rank's view of the store. A new one for each run, on all ranks alike."""

    def __init__(self, store: Store, rank: int, ranks: int, name: str = "") -> None:
        self.rank, self.ranks, self.name = rank, ranks, name
        turn = store.add(f"penstock/boards/{name}/{rank}", 1)
        self.common = PrefixStore(
            f"penstock/board/{turn}", store
        )  # of all pipelines of a run
        self.store = PrefixStore(name, self.common)
        self.gone = False  # the store is; asking it again would only fill the screen

    def say(self, state: RankState) -> None:
        """Publishes this rank's state."""
        self.store.set(f"state/{self.rank}", json.dumps(asdict(state)))

    def state(self, rank: int) -> RankState:
        """What a rank has said last."""
        known = self._get(f"state/{rank}")
        return (
            RankState(**(known | {"peers": tuple(known["peers"])}))
            if known
            else RankState()
        )

    def states(self) -> dict[int, RankState]:
        """What all have."""
        return {rank: self.state(rank) for rank in range(self.ranks)}

    def failure(self) -> Failure | None:
        """What has gone wrong, if something has."""
        known = self._get("failure", self.common)
        return (
            Failure(known["kind"], known["text"], tuple(known["lost"]))
            if known
            else None
        )

    def fail(self, failure: Failure) -> Failure:
        """Publishes a failure; the first one counts, and is given back."""
        named = (
            replace(failure, text=f"{failure.text}\n\nin the pipeline of {self.name}")
            if self.name
            else failure
        )
        self.common.compare_set("failure", "", json.dumps(asdict(named)))
        return self.failure() or failure

    def count(self, name: str, more: int = 1) -> int:
        """Adds to a number that all share."""
        return int(self.store.add(name, more))

    def wait_for(self, name: str, number: int, seconds: float) -> None:
        """Until so many have counted, or the time is over."""
        end = time.monotonic() + seconds
        while self.count(name, 0) < number and time.monotonic() < end:
            time.sleep(0.02)

    def _get(self, key: str, where: Store | None = None) -> dict[str, Any]:
        store = where or self.store
        known: dict[str, Any] = json.loads(store.get(key)) if store.check([key]) else {}
        return known


# ---------------------------------------------------------------- what went wrong, in words
def stuck_failure(
    rank: int, states: Mapping[int, RankState], patience: float
) -> Failure:
    """A rank has waited too long. Headed by the end of the chain of those who wait for one another.

    >>> states = {0: RankState(1, "0B0", "receive", "for 1B0 from rank 1", (1,)), 1: RankState(1, "1F1")}
    >>> print(stuck_failure(0, states, 2.0).text)
    rank 0 waits at 0B0 for 1B0 from rank 1; rank 1 is at 1F1
    <BLANKLINE>
      rank 0 waits at 0B0 for 1B0 from rank 1
      rank 1 is at 1F1
    <BLANKLINE>
    nothing came for 2 s; if that can be right, give more patience
    """
    waiter, blamed, seen = rank, _blamed(rank, states), {rank}
    while blamed is not None and states[blamed].kind and blamed not in seen:
        seen.add(blamed)
        waiter, blamed = blamed, _blamed(blamed, states)
    if blamed in seen:  # a ring: any place is as good
        waiter, blamed = rank, _blamed(rank, states)
    head = "; ".join(f"rank {r} {states[r]}" for r in (waiter, blamed) if r is not None)
    return Failure(
        "StuckError",
        f"{head}{failure_story(states)}\n\nnothing came for {patience:g} s; {ADVICE}",
    )


def _blamed(rank: int, states: Mapping[int, RankState]) -> int | None:
    """For whom a rank waits: of a group one that is not there yet, rather one that is busy than one that waits too."""
    mine = states[rank]
    absent = [
        p
        for p in mine.peers
        if p != rank and (states[p].kind, states[p].peers) != (mine.kind, mine.peers)
    ]
    return min(absent, key=lambda p: (bool(states[p].kind), p), default=None)


def lost_failure(
    rank: int, states: Mapping[int, RankState], who: Iterable[int]
) -> Failure:
    """Ranks have died, left too early, or are cut off; `rank` has found out.

    >>> states = {0: RankState(7, "0B0", "receive", "for 1B0 from rank 1", (1,)), 1: RankState(5, "1F1")}
    >>> lost_failure(0, states, [1]).text.splitlines()[0]
    'rank 0 waits at 0B0 for 1B0 from rank 1; rank 1 is lost, last seen at 1F1'
    """
    gone = tuple(who)
    mine = [f"rank {rank} {states[rank]}"] if states[rank].kind else []
    head = "; ".join([*mine, *(f"rank {r} {_farewell(states[r])}" for r in gone)])
    return Failure("PeerLostError", f"{head}{failure_story(states, gone)}", gone)


def _farewell(state: RankState) -> str:
    return str(state) if state.left else f"is lost, last seen at {state.at}"


def failure_story(states: Mapping[int, RankState], gone: tuple[int, ...] = ()) -> str:
    """A line a rank."""
    lines = [
        f"  rank {rank} {_farewell(state) if rank in gone else state}"
        for rank, state in states.items()
    ]
    more = (
        [f"  and {len(lines) - MAX_RANKS_SHOWN} more"]
        if len(lines) > MAX_RANKS_SHOWN
        else []
    )
    return "\n".join(["", "", *lines[:MAX_RANKS_SHOWN], *more])
