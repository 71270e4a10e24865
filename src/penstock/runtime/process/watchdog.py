"""What ranks tell each other through the store of torch.distributed, and the text of a failed run's error.

    state/3     rank 3 waits at 3B2 for 4B2 from rank 4        each rank writes its own, four times a second
    state/4     rank 4 is at 4F5
    failure     StuckError, and its text                       the first failure wins; all ranks raise it, in all
                                                               pipelines that train one model

Everything is JSON text; nothing is pickled.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Any, Protocol

import torch.distributed as dist

from penstock.errors import (
    FileError,
    PeerLostError,
    PenstockError,
    ProofError,
    RunError,
    StuckError,
)
from penstock.ir.action import parse_action
from penstock.ir.needs import needs
from penstock.ir.program import Program
from penstock.runtime.comm.comm import Comm
from penstock.runtime.comm.process import PendingMessage, ProcessComm
from penstock.torch_internals import PrefixStore, Store, default_store

MAX_RANKS_SHOWN = 32  # in the text of a failure
COUNTER_POLL_SECONDS = 0.02
PATIENCE_ADVICE = "if such a long wait can be right, raise the patience (run.timeout)"
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
    nothing came for 2 s; if such a long wait can be right, raise the patience (run.timeout)
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


TICK_SECONDS = 0.25  # between two looks
TICKS_BETWEEN_ROUNDS = 4  # rank 0 checks the heartbeats of all ranks this often
TICKS_BEFORE_COMPARING = 2  # a wait must last this long before shapes are compared
# How long a busy rank may take to stop by itself, and again after the alarm.
GRACE_SECONDS = 2.0
# A rank whose connection is broken is lost once it has been silent for this long.
SILENCE_SECONDS = 1.5
REASON_SECONDS = 4.0  # how long a rank with a broken connection looks for the reason
# How long rank 0, which may keep the store, waits until all ranks have read it.
LINGER_SECONDS = 3.0
BEAT_POLL_SECONDS = 0.05
# Nobody else uses this signal, and by default it does nothing.
ALARM_SIGNAL = signal.SIGURG

_log = logging.getLogger(__name__)


class WatchedExecutor(Protocol):
    """The part of an `Executor` that the watchdog looks at."""

    @property
    def program(self) -> Program:
        """The program whose actions the ranks run."""
        ...

    @property
    def comm(self) -> Comm:
        """The connection to the other ranks."""
        ...

    @property
    def doing(self) -> str:
        """The action that runs now or waits for its input."""
        ...


def watching(
    executor: WatchedExecutor, store: Store | None = None, silence: float = 30.0
) -> AbstractContextManager[object]:
    """Watch over an executor while the `with` block runs; all ranks must enter it.

    with watching(executor):
        for batch in batches:
            executor.step(batch)

    A rank that is silent for `silence` seconds counts as dead, and far sooner if its
    connection breaks. For ranks that are threads, this does nothing.
    """
    comm = executor.comm
    if not isinstance(comm, ProcessComm):
        return nullcontext()
    return Watchdog(executor, comm, store, silence)


@contextlib.contextmanager
def alarm_held() -> Iterator[None]:
    """Hold back the alarm of a watchdog while the `with` block runs, and let it ring afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    try:
        # An alarm that has come already rings in here.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {ALARM_SIGNAL})
    except BaseException:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {ALARM_SIGNAL})
        raise
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class Watchdog:
    """One rank's watchdog, which its `ProcessComm` also asks why a wait has failed."""

    def __init__(
        self,
        executor: WatchedExecutor,
        comm: ProcessComm,
        store: Store | None = None,
        silence: float = 30.0,
    ) -> None:
        self.executor = executor
        self.comm = comm
        self.silence = silence
        # Whether a launcher outlives all ranks: it keeps the store, and decides what becomes
        # of a rank that does not stop.
        self.kept_by_launcher = comm.store is not None
        # Its own connection to the store, which nothing else can block.
        shared = store or comm.store or default_store()
        connection = shared.clone()  # type: ignore[attr-defined]
        self.board = Board(connection, comm.rank, comm.ranks, comm.name)
        self.thread = threading.Thread(
            target=self.run, name=f"watchdog of rank {comm.rank}", daemon=True
        )
        self.lock = threading.Lock()
        # Set when the rank has left or raises the failure: nothing is left to do.
        self.over = threading.Event()
        self.failure: Failure | None = None
        self.alarm_installed = False
        # Whether rank 0 has left without a failure, and may take the store with it.
        self.rank_0_left = False
        self.message: PendingMessage | None = None  # awaited at the last look
        self.looks = 0
        self.looks_waited = 0  # for the same message
        # The last beat of each other rank, and the look at which it was new.
        self.beats: dict[int, tuple[int, int]] = {}

    def __enter__(self) -> Watchdog:
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(ALARM_SIGNAL) is signal.SIG_DFL:
            signal.signal(ALARM_SIGNAL, self.alarm)
            self.alarm_installed = True
        self.comm.set_guard(self, REASON_SECONDS)
        self.board.publish(self.state())
        self.thread.start()
        return self

    def __exit__(
        self,
        _: type[BaseException] | None,
        error: BaseException | None,
        __: TracebackType | None,
    ) -> None:
        self.over.set()
        self.thread.join(GRACE_SECONDS)
        self.comm.set_guard(None)
        if self.alarm_installed:
            signal.signal(ALARM_SIGNAL, signal.SIG_DFL)
        caused_elsewhere = _may_be_caused_elsewhere(error)
        failure = self.failure
        if not self.board.gone:
            with contextlib.suppress(dist.DistError):
                if failure is None and caused_elsewhere:
                    failure = self.board.failure()
                left_normally = isinstance(error, SystemExit) and not error.code
                self.leave(None if left_normally else error)
        if failure is not None and (error is None or caused_elsewhere):
            raise failure.error from None

    def leave(self, error: BaseException | None) -> None:
        """Tell the others that this rank leaves, and why, and give them time to read it."""
        rank = self.comm.rank
        if error is not None and self.failure is None:
            reason = f"{type(error).__name__}: {error}".removesuffix(": ")
            text = f"rank {rank} has failed at {self.executor.doing}: {reason}"
            self.settle(Failure("PeerLostError", text))
        self.board.publish(replace(self.state(), left=True, kind=""))
        if self.failure is not None:
            self.linger(self.failure)
        elif rank == 0:
            self.board.wait_for("gone", self.comm.ranks - 1, LINGER_SECONDS)
        elif not self.rank_0_left:
            self.board.count("gone")

    def linger(self, failure: Failure) -> None:
        """Keep rank 0, which may keep the store, alive until the others know why."""
        if self.comm.rank == 0 and not self.kept_by_launcher:
            readers = self.comm.ranks - len(failure.lost)
            self.board.wait_for("seen", readers, LINGER_SECONDS)

    # ------------------------------------------------------------ looking for failures
    def run(self) -> None:
        """Look again and again, until something is wrong or the rank leaves."""
        while not self.over.wait(TICK_SECONDS):
            try:
                failure = self.look()
            except dist.DistError:
                failure = self.lost_store()
                if self.rank_0_left:
                    return
            if failure is not None:
                return self.stop(failure)

    def look(self) -> Failure | None:
        """Publish what the rank does, and return a failure if there is one."""
        self.looks += 1
        message = self.comm.pending()
        if message is not None and message == self.message:
            self.looks_waited += 1
        else:
            self.looks_waited = 0
        self.message = message
        self.board.publish(self.state())
        failure = self.board.failure()
        waited = self.looks_waited * TICK_SECONDS
        if failure is None and waited >= self.comm.patience:
            states = self.board.states()
            failure = stuck_failure(self.comm.rank, states, self.comm.patience)
        return failure or self.find_mismatch() or self.find_silent_rank()

    def state(self) -> RankState:
        """What the rank is doing now."""
        position = self.executor.doing
        message = self.comm.pending()
        recent = self.recent_sends()
        beat = self.looks + 1
        if message is None:
            return RankState(beat, position, recent=recent)
        awaited = self.describe(message, position)
        return RankState(
            beat, position, message.kind, awaited, message.peers, recent=recent
        )

    def recent_sends(self) -> dict[str, dict[str, str]]:
        """The tensors sent last, by target and by message number."""
        recent: dict[str, dict[str, str]] = {}
        for rank, sends in enumerate(self.comm.recent):
            if not sends:
                continue
            tensors = {}
            for turn, shape, dtype in tuple(sends):  # the rank's thread may add to it
                message = PendingMessage("send", (), turn, shape, dtype)
                tensors[str(turn)] = message.tensor
            recent[str(rank)] = tensors
        return recent

    def describe(self, message: PendingMessage, position: str) -> str:
        """What the rank waits for, as text.

        On gloo a receive is described by the action that produces the tensor, which the
        current action needs.
        """
        if message.kind == "receive" and not self.comm.on_gpu:
            schedule = self.executor.program.schedule
            peer = message.peers[0]
            with contextlib.suppress(FileError):  # no action has run yet
                for needed in needs(schedule, parse_action(position)):
                    if schedule.rank_of(needed) == peer:
                        return f"for {needed} from rank {peer}"
        return str(message)

    def find_mismatch(self) -> Failure | None:
        """The failure of a rank that waits for a tensor that was sent in another shape."""
        message = self.message
        if message is None or message.kind != "receive":
            return None
        if self.looks_waited < TICKS_BEFORE_COMPARING:
            return None
        rank = self.comm.rank
        all_sends = self.board.state(message.peers[0]).recent or {}
        sends = all_sends.get(str(rank), {})
        sent = sends.get(str(message.turn), message.tensor)
        if sent == message.tensor:
            return None
        position = self.executor.doing
        text = (
            f"rank {rank} waits at {position} {message}, which has sent {sent}\n\n"
            "all ranks must be given micro-batches of the same shapes"
        )
        return Failure("RunError", text)

    def find_silent_rank(self) -> Failure | None:
        """The failure when a rank has been silent for long.

        Rank 0 checks all ranks now and then, and the others check rank 0.
        """
        for rank in self.ranks_to_check():
            state = self.board.state(rank)
            last_beat, _ = self.beats.get(rank, (-1, 0))
            if last_beat != state.beat:
                self.beats[rank] = (state.beat, self.looks)
            if state.left and rank == 0 and not self.rank_0_left:
                self.rank_0_left = self.board.count("gone") > 0
            _, heard_at = self.beats[rank]
            silent = (self.looks - heard_at) * TICK_SECONDS >= self.silence
            if state.beat and not state.left and silent:
                return lost_failure(self.comm.rank, self.board.states(), [rank])
        return None

    def ranks_to_check(self) -> range:
        """The ranks whose heartbeat this rank checks at this look."""
        if self.comm.rank:
            return range(1)
        if self.looks % TICKS_BETWEEN_ROUNDS == 0:
            return range(1, self.comm.ranks)
        return range(0)

    # ------------------------------------------------------------ explaining a failed wait, on the rank's own thread
    def explain(self, message: PendingMessage, late: bool, cause: str) -> RunError:
        """The error to raise for a failed wait: what another rank reported, or who is silent."""
        try:
            failure = self.failure or self.find_reason(message, late, cause)
        except dist.DistError:
            failure = self.lost_store()
        failure = self.settle(failure)
        self.over.set()
        return failure.error

    def find_reason(self, message: PendingMessage, late: bool, cause: str) -> Failure:
        """The failure behind a failed wait, when this rank does not know it yet."""
        rank = self.comm.rank
        self.board.publish(self.state())
        if late:
            return stuck_failure(rank, self.board.states(), self.comm.patience)
        suspects = [peer for peer in message.peers if peer != rank]
        # The last beat of each suspect, and when it was new.
        beats = dict.fromkeys(suspects, (-1, 0.0))
        now = time.monotonic()
        end = now + REASON_SECONDS
        while now < end:
            failure = self.failure or self.board.failure()
            if failure is not None:
                return failure
            silent = []
            for peer in suspects:
                beat = self.board.state(peer).beat
                if beats[peer][0] != beat:
                    beats[peer] = (beat, now)
                if now - beats[peer][1] >= SILENCE_SECONDS:
                    silent.append(peer)
            if silent:
                return lost_failure(rank, self.board.states(), silent)
            time.sleep(BEAT_POLL_SECONDS)
            now = time.monotonic()
        head = f"rank {rank} {self.state()}, but the connection is lost"
        story = describe_ranks(self.board.states())
        return Failure("PeerLostError", f"{head}{story}\n\n{cause}")

    def lost_store(self) -> Failure:
        """The failure when the store is gone, and with it all that the others reported."""
        self.board.gone = True
        under_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        kept_by_launcher = under_agent or self.kept_by_launcher
        keeper = "the launcher" if kept_by_launcher else "rank 0"
        lost = () if kept_by_launcher else (0,)
        text = f"{keeper}, which keeps the store, is lost; rank {self.comm.rank} {self.state()}"
        return Failure("PeerLostError", text, lost)

    # ------------------------------------------------------------ stopping
    def settle(self, failure: Failure) -> Failure:
        """Agree with the others on the first failure, and cut the connections.

        After that nobody waits for this rank.
        """
        with self.lock:
            if self.failure is None:
                if not self.board.gone:
                    with contextlib.suppress(dist.DistError):
                        failure = self.board.fail(failure)
                        self.board.count("seen")
                self.failure = failure
                self.comm.cut_connections()
        return self.failure

    def stop(self, failure: Failure) -> None:
        """Stop the rank's own thread: at its next message, by the alarm, or by force."""
        self.settle(failure)
        if self.over.wait(GRACE_SECONDS):
            return
        if self.alarm_installed:
            signal.pthread_kill(threading.main_thread().ident or 0, ALARM_SIGNAL)
        if not self.over.wait(GRACE_SECONDS) and not self.kept_by_launcher:
            self.end_process()

    def alarm(self, *_: object) -> None:
        """Raise the failure in the rank's own thread, wherever it is."""
        if self.failure is not None and not self.over.is_set():
            raise self.failure.error

    def end_process(self) -> None:
        """End the process as a last resort, and print where every thread is."""
        assert self.failure is not None
        _log.critical("%s: %s", self.failure.kind, self.failure.text)
        with contextlib.suppress(Exception):
            faulthandler.dump_traceback(sys.stderr)
            self.linger(self.failure)
        os._exit(1)


def _may_be_caused_elsewhere(error: BaseException | None) -> bool:
    """Whether an error is what a wait raises when another rank has ended it."""
    from_torch = isinstance(error, RuntimeError) and not isinstance(
        error, PenstockError
    )
    return from_torch or isinstance(error, PeerLostError)
