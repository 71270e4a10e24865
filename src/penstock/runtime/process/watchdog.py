"""No rank waits for ever: a thread a rank says what the rank is doing, hears the others, and ends a hopeless wait.

    rank 3   main      │ 3B1 │ waits at 3B2 for 4B2 from rank 4 ......... │ raises StuckError
             watchdog  │  .     .     .     .     .     .   too long: says so, cuts the connections
    store              │  state/3: waits at 3B2   state/4: at 4F5        failure
    rank 4   watchdog  │  .     .     .     .     .     .     .     .     hears it, cuts, alarms
             main      │ 4F5 ................................................... │ raises the same StuckError

What can be wrong; the first that is written down is what all ranks raise:

    too long    a wait outlasts the patience
    lost        a connection breaks and the other end is quiet; a rank is silent for long; the store is gone
    unlike      a rank waits for a tensor of another shape than the one that was sent
    failed      an exception leaves the `with` on some rank

A rank whose wait is cut raises at once. One that is busy gets a moment to come to its next message, then a signal
whose handler raises, then its process is ended. The rank's own thread only notes what it waits for.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import TracebackType
from typing import Protocol

import torch.distributed as dist

from penstock.errors import FileError, PeerLostError, PenstockError, RunError
from penstock.ir.action import parse_action
from penstock.ir.needs import needs
from penstock.ir.program import Program
from penstock.runtime.comm.comm import Comm
from penstock.runtime.comm.process import PendingMessage, ProcessComm
from penstock.runtime.process.status import (
    Board,
    Failure,
    RankState,
    failure_story,
    lost_failure,
    stuck_failure,
)
from penstock.runtime.torch_internals import Store, default_store

TICK_SECONDS = 0.25  # seconds between two looks
GRACE_SECONDS = (
    2.0  # for a rank that has failed to stop by itself, and again after the alarm
)
SILENCE_SECONDS = (
    1.5  # a rank whose connection is broken and that says nothing for so long is lost
)
REASON_SECONDS = 4.0  # how long a rank with a broken connection looks for the reason
ALARM_SIGNAL = (
    signal.SIGURG
)  # the one signal that nobody uses and that does nothing where nobody has asked for it
LINGER_SECONDS = (
    3.0  # how long rank 0, which may keep the store, waits until all have read it
)

_log = logging.getLogger(__name__)


class Doer(Protocol):
    """What is watched: an `Executor`."""

    program: Program
    comm: Comm

    @property
    def doing(self) -> str:
        """The action that runs now, or that waits for its input."""
        ...


def watching(
    executor: Doer, store: Store | None = None, silence: float = 30.0
) -> AbstractContextManager[object]:
    """Watches over an executor for as long as the `with` lasts; all ranks enter it. Ranks that are threads need none.

    with watching(executor):
        for batch in batches:
            executor.step(batch)

    A rank that says nothing for `silence` seconds is taken for dead; one whose connection breaks, far sooner.
    """
    comm = executor.comm
    return (
        Watchdog(executor, comm, store, silence)
        if isinstance(comm, ProcessComm)
        else nullcontext()
    )


class Watchdog:
    """One rank's watchdog; also what its `ProcessComm` asks when a wait fails."""

    def __init__(
        self,
        executor: Doer,
        comm: ProcessComm,
        store: Store | None = None,
        silence: float = 30.0,
    ) -> None:
        self.executor, self.comm, self.silence = executor, comm, silence
        shared = store or default_store()
        own = shared.clone()  # type: ignore[attr-defined]  # a connection that nothing else can block
        self.board = Board(own, comm.rank, comm.ranks, comm.name)
        self.thread = threading.Thread(
            target=self.run, name=f"watchdog of rank {comm.rank}", daemon=True
        )
        self.lock = threading.Lock()
        self.over = (
            threading.Event()
        )  # the rank has left, or raises the failure: nothing more to do
        self.failure: Failure | None = None
        self.alarmed = False  # the alarm is set up
        self.in_peace = False  # rank 0 has left, and may take the store with it
        self.message: PendingMessage | None = (
            None  # what the rank waited for at the last look
        )
        self.looks = self.waited = 0
        self.heard: dict[
            int, tuple[int, int]
        ] = {}  # of other ranks: the last beat, and at which look it was new

    def __enter__(self) -> Watchdog:
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(ALARM_SIGNAL) is signal.SIG_DFL
        ):
            signal.signal(ALARM_SIGNAL, self.alarm)
            self.alarmed = True
        self.comm.listen_to(self, REASON_SECONDS)
        self.board.say(self.state())
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
        self.comm.listen_to(None)
        if self.alarmed:
            signal.signal(ALARM_SIGNAL, signal.SIG_DFL)
        torchs = isinstance(error, RuntimeError) and not isinstance(
            error, PenstockError
        )
        cut = torchs or isinstance(
            error, PeerLostError
        )  # what a wait says that someone else has ended
        known = self.failure
        if not self.board.gone:
            with contextlib.suppress(dist.DistError):
                known = known or (self.board.failure() if cut else None)
                self.leave(
                    None if isinstance(error, SystemExit) and not error.code else error
                )
        if known is not None and (error is None or cut):
            raise known.error from None

    def leave(self, error: BaseException | None) -> None:
        """Tells the others, in peace or not, and lets them read it."""
        if error is not None and self.failure is None:
            what = f"{type(error).__name__}: {error}".removesuffix(": ")
            self.settle(
                Failure(
                    "PeerLostError",
                    f"rank {self.comm.rank} has failed at {self.executor.doing}: {what}",
                )
            )
        self.board.say(replace(self.state(), left=True, kind=""))
        if self.failure is not None:
            self.linger(self.failure)
        elif self.comm.rank == 0:
            self.board.wait_for("gone", self.comm.ranks - 1, LINGER_SECONDS)
        elif not self.in_peace:
            self.board.count("gone")

    def linger(self, failure: Failure) -> None:
        """Rank 0 may keep the store: it stays until the others have read why."""
        if self.comm.rank == 0:
            self.board.wait_for(
                "seen", self.comm.ranks - len(failure.lost), LINGER_SECONDS
            )

    # ------------------------------------------------------------ looking
    def run(self) -> None:
        """Looks, again and again, until something is wrong or the rank leaves."""
        while not self.over.wait(TICK_SECONDS):
            try:
                failure = self.look()
            except dist.DistError:
                failure = self.storeless()
                if self.in_peace:
                    return
            if failure is not None:
                return self.stop(failure)

    def look(self) -> Failure | None:
        """Says what the rank does, and finds out what is wrong."""
        self.looks += 1
        message = self.comm.pending()
        self.waited = (
            self.waited + 1 if message is not None and message == self.message else 0
        )
        self.message = message
        self.board.say(self.state())
        failure = self.board.failure()
        if failure is None and self.waited * TICK_SECONDS >= self.comm.patience:
            failure = stuck_failure(
                self.comm.rank, self.board.states(), self.comm.patience
            )
        return failure or self.unlike() or self.silent()

    def state(self) -> RankState:
        """What the rank is doing now."""
        at, message = self.executor.doing, self.comm.pending()
        recent = {
            str(rank): {
                str(turn): PendingMessage("send", (), turn, shape, kind).tensor
                for turn, shape, kind in tuple(sends)
            }
            for rank, sends in enumerate(self.comm.recent)
            if sends
        }
        if message is None:
            return RankState(self.looks + 1, at, recent=recent)
        return RankState(
            self.looks + 1,
            at,
            message.kind,
            self.words(message, at),
            message.peers,
            recent=recent,
        )

    def words(self, message: PendingMessage, at: str) -> str:
        """What is waited for: on gloo a receive by the action that makes it, which the one that runs now needs."""
        if message.kind == "receive" and not self.comm.on_gpu:
            schedule, peer = self.executor.program.schedule, message.peers[0]
            with contextlib.suppress(FileError):  # before the first action
                for needed in needs(schedule, parse_action(at)):
                    if schedule.rank_of(needed) == peer:
                        return f"for {needed} from rank {peer}"
        return str(message)

    def unlike(self) -> Failure | None:
        """Whether what the rank waits for was sent in another shape."""
        message = self.message
        if message is None or message.kind != "receive" or self.waited < 2:
            return None
        sends = (self.board.state(message.peers[0]).recent or {}).get(
            str(self.comm.rank), {}
        )
        came = sends.get(str(message.turn), message.tensor)
        if came == message.tensor:
            return None
        head = f"rank {self.comm.rank} waits at {self.executor.doing} {message}, which has sent {came}"
        return Failure(
            "RunError",
            f"{head}\n\nall ranks must be given micro-batches of the same shapes",
        )

    def silent(self) -> Failure | None:
        """Whether a rank says nothing for long. Rank 0 looks after all, now and then; the others after rank 0."""
        watched = (
            (0,)
            if self.comm.rank
            else range(1, self.comm.ranks if self.looks % 4 == 0 else 0)
        )
        for rank in watched:
            state = self.board.state(rank)
            if self.heard.get(rank, (-1, 0))[0] != state.beat:
                self.heard[rank] = (state.beat, self.looks)
            if state.left and rank == 0 and not self.in_peace:
                self.in_peace = self.board.count("gone") > 0
            if (
                state.beat
                and not state.left
                and (self.looks - self.heard[rank][1]) * TICK_SECONDS >= self.silence
            ):
                return lost_failure(self.comm.rank, self.board.states(), [rank])
        return None

    # ------------------------------------------------------------ finding the reason, on the rank's own thread
    def explain(self, message: PendingMessage, late: bool, cause: str) -> RunError:
        """Why a wait has failed: what someone has said, or who is quiet."""
        try:
            failure = self.failure or self.reason(message, late, cause)
        except dist.DistError:
            failure = self.storeless()
        failure = self.settle(failure)
        self.over.set()
        return failure.error

    def reason(self, message: PendingMessage, late: bool, cause: str) -> Failure:
        """The same, of a failure not yet known here."""
        self.board.say(self.state())
        if late:
            return stuck_failure(
                self.comm.rank, self.board.states(), self.comm.patience
            )
        suspects = [peer for peer in message.peers if peer != self.comm.rank]
        begin, heard = (
            time.monotonic(),
            dict.fromkeys(suspects, (-1, 0.0)),
        )  # the last beat, and when it was new
        while (now := time.monotonic()) < begin + REASON_SECONDS:
            failure = self.failure or self.board.failure()
            if failure is not None:
                return failure
            beats = {peer: self.board.state(peer).beat for peer in suspects}
            heard = {
                peer: heard[peer] if heard[peer][0] == beat else (beat, now)
                for peer, beat in beats.items()
            }
            gone = [
                peer for peer in suspects if now - heard[peer][1] >= SILENCE_SECONDS
            ]
            if gone:
                return lost_failure(self.comm.rank, self.board.states(), gone)
            time.sleep(0.05)
        head = f"rank {self.comm.rank} {self.state()}, but the connection is lost"
        return Failure(
            "PeerLostError", f"{head}{failure_story(self.board.states())}\n\n{cause}"
        )

    def storeless(self) -> Failure:
        """The store is gone, and with it all that the others have said."""
        self.board.gone = True
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        keeper = "the launcher" if agent else "rank 0"
        text = f"{keeper}, which keeps the store, is lost; rank {self.comm.rank} {self.state()}"
        return Failure("PeerLostError", text, () if agent else (0,))

    # ------------------------------------------------------------ stopping
    def settle(self, failure: Failure) -> Failure:
        """Agrees with the others on the first failure, and breaks the connections: nobody waits for this rank."""
        with self.lock:
            if self.failure is None:
                if not self.board.gone:
                    with contextlib.suppress(dist.DistError):
                        failure = self.board.fail(failure)
                        self.board.count("seen")
                self.failure = failure
                self.comm.cut()
        return self.failure

    def stop(self, failure: Failure) -> None:
        """Makes the rank's own thread stop: by its next message, by the alarm, by the end of the process."""
        self.settle(failure)
        if self.over.wait(GRACE_SECONDS):
            return
        if self.alarmed:
            signal.pthread_kill(threading.main_thread().ident or 0, ALARM_SIGNAL)
        if not self.over.wait(GRACE_SECONDS):
            self.end()

    def alarm(self, *_: object) -> None:
        """On the rank's own thread, wherever it is."""
        if self.failure is not None and not self.over.is_set():
            raise self.failure.error

    def end(self) -> None:
        """The last resort, with a word on where every thread is."""
        assert self.failure is not None
        _log.critical("%s: %s", self.failure.kind, self.failure.text)
        with contextlib.suppress(Exception):
            faulthandler.dump_traceback(sys.stderr)
            self.linger(self.failure)
        os._exit(1)
