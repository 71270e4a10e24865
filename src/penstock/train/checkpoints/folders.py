"""Which ranks see the same folder of the run, and how they copy files to those that see another one.

    rank 0, 1 on node1   writes .seen-TOKEN-0, .seen-TOKEN-1     sees both      rank 0 keeps /data/run on node1
    rank 2, 3 on node2   writes .seen-TOKEN-2, .seen-TOKEN-3     sees only its own    rank 2 keeps /data/run on node2

The ranks find out before they train. Otherwise a file that is missing on one machine would stop the run late, or make
one rank wait for another forever. A file goes from one rank to others over the connection that the run trains with:

    rank 0 ──► rank 4 ──► rank 8        each passes a piece on as soon as it has it,
     reads      writes     writes       so the time hardly grows with the number of machines
"""

from __future__ import annotations

import socket
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from penstock.errors import FileError, PenstockError
from penstock.runtime.comm.comm import Comm, exchange

PART = ".part"  # suffix of a file that is not complete
TOKEN_PREFIX = ".seen-"
PULSE_SECONDS = 5.0  # between two signs of life of a rank that works


@dataclass(frozen=True, slots=True)
class RunFolders:
    """The folder of every rank."""

    owners: tuple[int, ...]  # for each rank, the first rank that sees the same folder
    hosts: tuple[str, ...]  # for each rank, its machine
    paths: tuple[str, ...]  # for each rank, its folder there

    @property
    def shared(self) -> bool:
        """Whether all ranks see one folder."""
        return not any(self.owners)

    @property
    def keepers(self) -> tuple[int, ...]:
        """The first rank of each folder, which keeps its files in order."""
        return tuple(sorted(set(self.owners)))

    def keeps(self, rank: int) -> bool:
        """Whether a rank is the first one that sees its folder."""
        return self.owners[rank] == rank

    def neighbours(self, rank: int) -> list[int]:
        """All ranks that see the folder of this one."""
        owner = self.owners[rank]
        return [other for other, one in enumerate(self.owners) if one == owner]

    def place(self, rank: int) -> str:
        """The machine and folder of a rank."""
        return f"{self.paths[rank]} on {self.hosts[rank]}"

    def __str__(self) -> str:
        if self.shared:
            count = len(self.owners)
            return f"all {count} ranks see it" if count > 1 else "one rank"
        told = []
        for keeper in self.keepers:
            ranks = _write_ranks(self.neighbours(keeper))
            told.append(f"{ranks} {self.place(keeper)}")
        return f"{len(told)} separate ones: {', '.join(told)}"


def _write_ranks(ranks: list[int]) -> str:
    """Write consecutive ranks as a range.

    >>> _write_ranks([4, 5, 6, 7]), _write_ranks([0, 2])
    ('ranks 4-7', 'ranks 0 2')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"ranks {' '.join(map(str, ranks))}"


def compare_folders(comm: Comm, folder: Path) -> RunFolders:
    """Find out which ranks see the same folder; all ranks must call it.

    A rank that has no folder makes one. Raises FileError on all ranks if one cannot write to its own.
    """
    token = exchange(comm, uuid.uuid4().hex if comm.rank == 0 else "")[0]
    # Ranks look for names that nobody has asked for before: network file systems remember for a while that a file was
    # missing.
    files = [folder / f"{TOKEN_PREFIX}{token}-{rank}" for rank in range(comm.ranks)]
    own = files[comm.rank]
    try:
        with failing_together(
            comm, "name a folder that every machine can write to in run.folder"
        ):
            folder.mkdir(parents=True, exist_ok=True)
            own.touch()
        owner = next(rank for rank, file in enumerate(files) if file.exists())
        place = [owner, socket.gethostname(), str(folder.absolute())]
        told = exchange(comm, place)
    finally:
        with suppress(OSError):
            own.unlink()
    owners, hosts, paths = zip(*told, strict=True)
    return RunFolders(owners, hosts, paths)


@contextmanager
def failing_together(comm: Comm, hint: str = "") -> Iterator[None]:
    """Let all ranks raise the error of the first rank that fails; all ranks must enter and leave it.

    Otherwise the others would wait for a rank that has ended.
    """
    fault = ""
    try:
        yield
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        fault = f"{name}{error.strerror or error}"
        fault += f"\n  {hint}" if hint else ""
    except PenstockError as error:
        fault = str(error)
    host = socket.gethostname() if fault else ""
    told = exchange(comm, [host, fault])
    for rank, (where, what) in enumerate(told):
        if what:
            raise FileError(f"rank {rank} on {where}: {what}")


def work_together(comm: Comm, work: Callable[[], None], hint: str = "") -> None:
    """Do work that may last longer than ranks wait for one another; all ranks must call it, and fail together."""
    with failing_together(comm, hint), ThreadPoolExecutor(1) as pool:
        doing = pool.submit(work)
        wait_together(comm, lambda seconds: not wait([doing], seconds).not_done)
        doing.result()


def wait_together(comm: Comm, ends_within: Callable[[float], bool]) -> None:
    """Wait until something has ended on all ranks; all ranks must call it.

    `ends_within` waits at most for the given seconds, and says whether it has ended on this rank. The ranks tell one
    another so again and again, so that none of them runs out of patience.
    """
    ended = False
    while not ended:
        ended = all(exchange(comm, ends_within(PULSE_SECONDS)))


PIECE_BYTES = 16 << 20  # that travel at once
PIECES_BETWEEN_BARRIERS = 16


class FileRelay(NamedTuple):
    """A file that goes from the first rank of a chain to all others."""

    file: Path  # this rank's own name for it
    size: int
    chain: Sequence[int]


def relay_files(comm: Comm, relays: Iterable[FileRelay]) -> None:
    """Copy files one after another; all ranks must call it, with the same sizes and chains.

    A rank that fails at a file still takes part in all others before it raises OSError, so that nobody waits for it.
    """
    failure: OSError | None = None
    for relay in relays:
        try:
            relay_file(comm, *relay)
        except OSError as error:
            failure = failure or error
    if failure is not None:
        raise failure


def relay_file(comm: Comm, file: Path, size: int, chain: Sequence[int]) -> None:
    """Copy a file from the first rank of a chain to all others, under each rank's own name for it.

    All ranks must call it. A rank that cannot read or write passes all pieces on before it raises OSError.
    """
    place = chain.index(comm.rank) if comm.rank in chain else -1
    end = _End(file, reads=place == 0) if place >= 0 else None

    for number, begin in enumerate(range(0, size, PIECE_BYTES), 1):
        if end is not None:
            count = min(PIECE_BYTES, size - begin)
            arriving = None
            if not end.reads:
                arriving = comm.receive((count,), torch.uint8, chain[place - 1])
            piece = end.read(count) if arriving is None else arriving.wait()
            if place + 1 < len(chain):
                comm.send(piece, chain[place + 1]).wait()
            end.write(piece)
        if number % PIECES_BETWEEN_BARRIERS == 0:
            comm.barrier()  # Ranks outside the chain would run out of patience.
    intact = exchange(comm, end is None or end.failure is None)
    if end is not None:
        end.close(intact[chain[0]])


class _End:
    """One end of a file's way. After an error nothing more is tried, and the error is kept.

    The first rank reads, and zeros take the place of what it cannot read. The others write under another name, and
    rename the file when it is complete.
    """

    def __init__(self, file: Path, reads: bool) -> None:
        self.file = file
        self.reads = reads
        self.part = file if reads else file.with_name(file.name + PART)
        self.failure: OSError | None = None
        self.opened: BinaryIO | None = None
        with self._trying():
            if not reads:
                file.parent.mkdir(parents=True, exist_ok=True)
            self.opened = self.part.open("rb" if reads else "wb")

    @contextmanager
    def _trying(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failure = self.failure or error

    def read(self, count: int) -> Tensor:
        """Return the next bytes."""
        content = b""
        if self.opened is not None and self.failure is None:
            with self._trying():
                content = self.opened.read(count)
                if len(content) < count:
                    raise OSError("a file became shorter while it was sent")
        content = content.ljust(count, b"\0")
        return torch.frombuffer(bytearray(content), dtype=torch.uint8)

    def write(self, piece: Tensor) -> None:
        """Write the next bytes, unless this end reads."""
        if self.opened is not None and self.failure is None and not self.reads:
            with self._trying():
                self.opened.write(piece.cpu().numpy().data)

    def close(self, whole: bool) -> None:
        """Close the file and give it its name if the first rank had it `whole`; raise the error if something failed."""
        with self._trying():
            if self.opened is not None:
                self.opened.close()
            if whole and not self.reads and self.failure is None:
                self.part.replace(self.file)
        if not self.reads:
            with suppress(OSError):
                self.part.unlink()  # It is still there if something was missing.
        if self.failure is not None:
            raise self.failure
