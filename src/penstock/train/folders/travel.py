"""Copies a file from one rank to others, over the connection that the run trains with.

rank 0 ──► rank 4 ──► rank 8        each passes a piece on as soon as it has it,
 reads      writes     writes       so the time hardly grows with the number of machines
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.runtime import Comm
from penstock.train.checkpoint import PART

PIECE_BYTES = 16 << 20  # that travel at once
PIECES_BETWEEN_BARRIERS = 16


class Passage(NamedTuple):
    """A file that goes from the first rank of a chain to all others."""

    file: Path  # this rank's own name for it
    size: int
    chain: Sequence[int]


def pass_files(comm: Comm, passages: Iterable[Passage]) -> None:
    """Copy files one after another; all ranks must call it, with the same sizes and chains.

    A rank that fails at a file still takes part in all others before it raises OSError, so that nobody waits for it.
    """
    failure: OSError | None = None
    for passage in passages:
        try:
            pass_file(comm, *passage)
        except OSError as error:
            failure = failure or error
    if failure is not None:
        raise failure


def pass_file(comm: Comm, file: Path, size: int, chain: Sequence[int]) -> None:
    """Copy a file from the first rank of a chain to all others, under each rank's own name for it.

    All ranks must call it. A rank that cannot read or write passes all pieces on before it raises OSError.
    """
    place = chain.index(comm.rank) if comm.rank in chain else -1
    source = _Source(file) if place == 0 else None
    target = _Target(file) if place > 0 else None

    def relay(count: int, own: Tensor | None) -> Tensor:
        if own is None:
            own = comm.receive((count,), torch.uint8, chain[place - 1]).wait()
        if place + 1 < len(chain):
            comm.send(own, chain[place + 1]).wait()
        return own

    for number, begin in enumerate(range(0, size, PIECE_BYTES), 1):
        count = min(PIECE_BYTES, size - begin)
        if place >= 0:
            piece = relay(count, source.read(count) if source else None)
            if target is not None:
                target.write(piece)
        if number % PIECES_BETWEEN_BARRIERS == 0:
            comm.barrier()  # Ranks outside the chain would run out of patience.
    if place >= 0:
        whole = relay(1, source.is_whole() if source else None)
        if target is not None:
            target.whole = bool(whole.item())
    comm.barrier()
    for end in (source, target):
        if end is not None:
            end.close()


class _Source:
    """A file that is read; if that fails, zeros take its place."""

    def __init__(self, file: Path) -> None:
        self.failure: OSError | None = None
        try:
            self.opened = file.open("rb")
        except OSError as error:
            self.failure = error

    def read(self, count: int) -> Tensor:
        content = b""
        if self.failure is None:
            try:
                content = self.opened.read(count)
            except OSError as error:
                self.failure = error
        if len(content) < count:
            self.failure = self.failure or OSError(
                "a file became shorter while it was sent"
            )
            content = content.ljust(count, b"\0")
        return torch.frombuffer(bytearray(content), dtype=torch.uint8)

    def is_whole(self) -> Tensor:
        """Whether nothing failed, as a message to the other ranks."""
        return torch.tensor([self.failure is None], dtype=torch.uint8)

    def close(self) -> None:
        if self.failure is not None:
            raise self.failure
        self.opened.close()


class _Target:
    """A file that is written under another name, and renamed when it is complete."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.part = file.with_name(file.name + PART)
        self.whole = False  # whether the source had everything
        self.failure: OSError | None = None
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            self.opened = self.part.open("wb")
        except OSError as error:
            self.failure = error

    def write(self, piece: Tensor) -> None:
        if self.failure is None:
            try:
                self.opened.write(piece.cpu().numpy().data)
            except OSError as error:
                self.failure = error

    def close(self) -> None:
        if self.failure is None:
            try:
                self.opened.close()
                if self.whole:
                    self.part.replace(self.file)
                    return
            except OSError as error:
                self.failure = error
        with suppress(OSError):
            self.part.unlink()
        if self.failure is not None:
            raise self.failure
