"""What ranks tell each other through the store of torch.distributed, and the text of a failed run's error.

    state/3     rank 3 waits at 3B2 for 4B2 from rank 4        each rank writes its own, four times a second
    state/4     rank 4 is at 4F5
    failure     StuckError, and its text                       the first failure wins; all ranks raise it, in all
                                                               pipelines that train one model

Everything is JSON text; nothing is pickled.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from penstock.errors import PeerLostError, ProofError, RunError, StuckError
from penstock.runtime.torch_internals import PrefixStore, Store

MAX_RANKS_SHOWN = 32  # in the text of a failure
COUNTER_POLL_SECONDS = 0.02
PATIENCE_ADVICE = "if such a long wait can be right, raise the patience (run.patience)"
ERRORS = {
    kind.__name__: kind for kind in (RunError, ProofError, StuckError, PeerLostError)
}


@dataclass(frozen=True, slots=True)
class RankState:
    """What a rank says it is doing."""

    beat: int = 0  # counts up as long as the rank lives
    position: str = "the start"  # its current action
    kind: str = ""  # "receive", "send", "sum" or "barrier" if it waits
    awaited: str = ""  # what it waits for, such as "for 4B2 from rank 4"
    peers: tuple[int, ...] = ()  # the ranks it waits for
    left: bool = False
    # The tensors it sent last, by target and by message number.
    recent: Mapping[str, Mapping[str, str]] | None = None

    def __str__(self) -> str:
        if self.kind:
            preposition = "at" if self.kind == "receive" else "after"
            return f"waits {preposition} {self.position} {self.awaited}"
        if self.left:
            return f"has left after {self.position}"
        return f"is at {self.position}"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the run cannot go on; all ranks raise the same error."""

    kind: str  # the name of the error's class
    text: str
    lost: tuple[int, ...] = ()  # ranks that are gone

    @property
    def error(self) -> RunError:
        """The failure as an exception."""
        error_class = ERRORS.get(self.kind, RunError)
        return error_class(self.text)


def announce(store: Store, failure: Failure) -> None:
    """Tell all ranks of a run why it cannot go on; unless one has said so already.

    The launcher calls it, which has no board. It reaches the ranks of the first run that
    uses this store.
    """
    board = PrefixStore("penstock/board/1", store)
    board.compare_set("failure", "", json.dumps(asdict(failure)))


class Board:
    """One rank's view of the store. All ranks create a new one for each run."""

    def __init__(self, store: Store, rank: int, ranks: int, name: str = "") -> None:
        self.rank = rank
        self.ranks = ranks
        self.name = name
        run = store.add(f"penstock/boards/{name}/{rank}", 1)
        self.common = PrefixStore(f"penstock/board/{run}", store)  # for all pipelines
        self.store = PrefixStore(name, self.common)  # for this pipeline
        # Set once the store is lost: asking it again would only print more errors.
        self.gone = False

    def publish(self, state: RankState) -> None:
        """Publish this rank's state."""
        self.store.set(f"state/{self.rank}", json.dumps(asdict(state)))

    def state(self, rank: int) -> RankState:
        """The state that a rank published last."""
        fields = _read(self.store, f"state/{rank}")
        if not fields:
            return RankState()
        fields["peers"] = tuple(fields["peers"])
        return RankState(**fields)

    def states(self) -> dict[int, RankState]:
        """The last states of all ranks."""
        return {rank: self.state(rank) for rank in range(self.ranks)}

    def failure(self) -> Failure | None:
        """The published failure, if any."""
        fields = _read(self.common, "failure")
        if not fields:
            return None
        return Failure(fields["kind"], fields["text"], tuple(fields["lost"]))

    def fail(self, failure: Failure) -> Failure:
        """Publish a failure; return the one that was published first."""
        published = failure
        if self.name:
            text = f"{failure.text}\n\nin the pipeline of {self.name}"
            published = replace(failure, text=text)
        self.common.compare_set("failure", "", json.dumps(asdict(published)))
        return self.failure() or failure

    def count(self, name: str, increment: int = 1) -> int:
        """Add to a counter that all ranks share, and return its value."""
        return int(self.store.add(name, increment))

    def wait_for(self, name: str, number: int, seconds: float) -> None:
        """Wait until a counter has reached a number, or the time is over."""
        end = time.monotonic() + seconds
        while self.count(name, 0) < number and time.monotonic() < end:
            time.sleep(COUNTER_POLL_SECONDS)


def _read(store: Store, key: str) -> dict[str, Any]:
    """The JSON object under a key, or an empty one."""
    if not store.check([key]):
        return {}
    fields: dict[str, Any] = json.loads(store.get(key))
    return fields


# ---------------------------------------------------------------- the text of a failure
def stuck_failure(
    rank: int, states: Mapping[int, RankState], patience: float
) -> Failure:
    """The failure of a rank that has waited too long.

    Ranks often wait for ranks that wait themselves. The text starts with the end of that
    chain, which is the most likely culprit.

    >>> states = {0: RankState(1, "0B0", "receive", "for 1B0 from rank 1", (1,)), 1: RankState(1, "1F1")}
    >>> print(stuck_failure(0, states, 2.0).text)
    rank 0 waits at 0B0 for 1B0 from rank 1; rank 1 is at 1F1
    <BLANKLINE>
      rank 0 waits at 0B0 for 1B0 from rank 1
      rank 1 is at 1F1
    <BLANKLINE>
    nothing came for 2 s; if such a long wait can be right, raise the patience (run.patience)
    """
    waiter = rank
    blamed = _blamed_peer(rank, states)
    seen = {rank}
    while blamed is not None and states[blamed].kind and blamed not in seen:
        seen.add(blamed)
        waiter = blamed
        blamed = _blamed_peer(waiter, states)
    if blamed in seen:  # they wait in a circle, where any start is as good
        waiter = rank
        blamed = _blamed_peer(rank, states)
    culprits = [waiter] if blamed is None else [waiter, blamed]
    head = "; ".join(f"rank {culprit} {states[culprit]}" for culprit in culprits)
    end = f"nothing came for {patience:g} s; {PATIENCE_ADVICE}"
    return Failure("StuckError", f"{head}{describe_ranks(states)}\n\n{end}")


def _blamed_peer(rank: int, states: Mapping[int, RankState]) -> int | None:
    """The peer that a rank waits for.

    In a group that is one that has not joined yet, preferably one that does not wait
    itself.
    """
    mine = states[rank]
    absent = []
    for peer in mine.peers:
        theirs = states[peer]
        joined = (theirs.kind, theirs.peers) == (mine.kind, mine.peers)
        if peer != rank and not joined:
            absent.append(peer)
    return min(absent, key=lambda peer: (bool(states[peer].kind), peer), default=None)


def lost_failure(
    rank: int, states: Mapping[int, RankState], lost: Iterable[int]
) -> Failure:
    """The failure when `rank` finds that ranks have died, left early, or are cut off.

    >>> states = {0: RankState(7, "0B0", "receive", "for 1B0 from rank 1", (1,)), 1: RankState(5, "1F1")}
    >>> lost_failure(0, states, [1]).text.splitlines()[0]
    'rank 0 waits at 0B0 for 1B0 from rank 1; rank 1 is lost, last seen at 1F1'
    """
    gone = tuple(lost)
    clauses = [f"rank {rank} {states[rank]}"] if states[rank].kind else []
    clauses += [f"rank {peer} {_last_seen(states[peer])}" for peer in gone]
    head = "; ".join(clauses)
    return Failure("PeerLostError", f"{head}{describe_ranks(states, gone)}", gone)


def _last_seen(state: RankState) -> str:
    return str(state) if state.left else f"is lost, last seen at {state.position}"


def describe_ranks(states: Mapping[int, RankState], gone: tuple[int, ...] = ()) -> str:
    """A paragraph with one line for each rank."""
    lines = []
    for rank, state in states.items():
        text = _last_seen(state) if rank in gone else str(state)
        lines.append(f"  rank {rank} {text}")
    hidden = len(lines) - MAX_RANKS_SHOWN
    if hidden > 0:
        lines[MAX_RANKS_SHOWN:] = [f"  and {hidden} more"]
    return "\n".join(["", "", *lines])
