"""Which ranks see the same folder of the run.

    rank 0, 1 on node1   writes .seen-TOKEN-0, .seen-TOKEN-1     sees both      rank 0 keeps /data/run on node1
    rank 2, 3 on node2   writes .seen-TOKEN-2, .seen-TOKEN-3     sees only its own    rank 2 keeps /data/run on node2

The ranks find out before they train. Otherwise a file that is missing on one machine would stop the run late, or make
one rank wait for another forever.
"""

from __future__ import annotations

import json
import socket
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import FileError, PenstockError
from penstock.runtime import Comm
from penstock.runtime.comm.texts import gather_texts

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
    token = gather_texts(comm, uuid.uuid4().hex if comm.rank == 0 else "")[0]
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
        told = [json.loads(text) for text in gather_texts(comm, json.dumps(place))]
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
    told = gather_texts(comm, json.dumps([host, fault]))
    for rank, text in enumerate(told):
        where, what = json.loads(text)
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
        told = gather_texts(comm, "" if ends_within(PULSE_SECONDS) else "works")
        ended = not any(told)
