"""Sums gradients as a plan says, with messages between the ranks that it names, while the lane goes on.

    lane         0F0 ... 0B3 ──► part 0 is complete   0F4 ... 0B9 ──► the head is complete ... end of the step
                              │                                    │                            ▲
    SumThread    waits ───────┴─► rounds of part 0 ── waits ───────┴─► rounds of the head ──────┘

The rounds are those of `penstock.ir.sums`, which `penstock.ir.verify_sums` proves. They have a connection of
their own, so neither the messages of the lane nor its waits hold them up. A rank takes part in one sum at a time, and
all ranks in the same order. What a rank will receive first is asked for ahead of time, so that ranks which are done
early can send early.

All replicas end up with the same bits, also if numbers are rounded on their way: whoever sends a sum keeps what the
others restore, and passes on what it has received without packing it again. In int8, each sender adds what rounding
has lost to its next message of the same cell.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.cost.profile import SCALE_BYTES, SUM_ROW
from penstock.ir.sums import Round, RoundKind, SumPlan, cell_bounds, rounds_of
from penstock.runtime.comm.comm import Arriving, Comm, Pending
from penstock.runtime.passed_values import quantize, restore

TOTALS = -1  # in place of a round, where totals are rounded that several ranks add up


class PlannedSum:
    """One rank's rounds of a sum. It remembers what rounding has lost."""

    def __init__(
        self, plan: SumPlan, rank: int, numbers: int, cell_format: CellFormat
    ) -> None:
        self.plan = plan
        self.format = cell_format
        self.bounds = cell_bounds(plan, numbers)
        self.rounds = rounds_of(plan, rank)
        # Keys: round and cell.
        self.lost: dict[tuple[int, int], Tensor] = {}
        # When this rank had its gradients, and when it had the sum, in the last step.
        self.begin = 0.0
        self.end = 0.0

    @property
    def bytes(self) -> int:
        """The bytes of the gradients that are summed."""
        return self.bounds[-1] * self.format.dtype.itemsize

    def lengths(self, cells: Sequence[int]) -> list[int]:
        """The numbers of each of these cells."""
        return [self.bounds[cell + 1] - self.bounds[cell] for cell in cells]

    def post(self, comm: Comm, number: int) -> list[Arriving | None]:
        """Ask for everything that a round will receive. Empty messages do not travel."""
        arriving: list[Arriving | None] = []
        for message in self.rounds[number].receives:
            lengths = self.lengths(message.cells)
            length = sum(map(self.format.packed_length, lengths))
            posted = None
            if length:
                posted = comm.receive((length,), self.format.sent_as, message.peer)
            arriving.append(posted)
        return arriving

    def run(
        self,
        comm: Comm,
        flat: Tensor,
        first: list[Arriving | None],
        post_next: Callable[[], None],
    ) -> None:
        """Sum in place. `first` is what the first round receives; `post_next` is called once all else is asked for."""
        cells = [
            flat[begin:end]
            for begin, end in zip(self.bounds, self.bounds[1:], strict=False)
        ]
        sums: dict[int, Tensor] = {}  # cells that are final, as they travel
        sends: list[Pending] = []
        for number, one in enumerate(self.rounds):
            arriving = first if number == 0 else self.post(comm, number)
            if number == len(self.rounds) - 1:
                post_next()
            outgoing = self.pack_round(number, one, cells, sums)
            for message in one.sends:
                packed = [outgoing[cell] for cell in message.cells]
                joined = packed[0] if len(packed) == 1 else torch.cat(packed)
                if len(joined):
                    sends.append(comm.send(joined, message.peer))
            self.take_round(comm, one, cells, arriving, sums)
        for send in sends:
            send.wait()

    def pack_round(
        self, number: int, one: Round, cells: list[Tensor], sums: dict[int, Tensor]
    ) -> dict[int, Tensor]:
        """The cells that leave in a round, as they travel."""
        outgoing = {}
        for cell in dict.fromkeys(c for message in one.sends for c in message.cells):
            known = sums.get(cell) if one.kind is RoundKind.COPY else None
            if known is not None:
                outgoing[cell] = known
                continue
            packed = self.pack((number, cell), cells[cell])
            if one.kind is not RoundKind.ADD:
                # Others use these numbers too, so this rank keeps exactly what they restore.
                if self.format.rounds:
                    length = len(cells[cell])
                    cells[cell].copy_(self.format.restore(packed, length))
                elif one.kind is RoundKind.EXCHANGE:
                    packed = packed.clone()  # This rank adds to its own while it sends.
            if one.kind is RoundKind.COPY:
                sums[cell] = packed
            outgoing[cell] = packed
        return outgoing

    def pack(self, place: tuple[int, int], cell: Tensor) -> Tensor:
        """Pack a cell; in int8, with what the last message of its place has lost."""
        if not self.format.quantizes:
            return self.format.pack(cell)
        lost = self.lost.get(place)
        exact = cell if lost is None else cell + lost
        packed = self.format.pack(exact)
        lost = exact - self.format.restore(packed, len(cell))
        # An error that is not finite would spoil all later steps.
        self.lost[place] = lost.nan_to_num_(0.0, 0.0, 0.0)
        return packed

    def take_round(
        self,
        comm: Comm,
        one: Round,
        cells: list[Tensor],
        arriving: list[Arriving | None],
        sums: dict[int, Tensor],
    ) -> None:
        """Wait for everything that a round receives, and add it or take it over."""
        layers: dict[int, list[tuple[int, Tensor]]] = {}
        for message, posted in zip(one.receives, arriving, strict=True):
            if posted is None:
                continue
            whole = posted.wait()
            lengths = self.lengths(message.cells)
            sizes = list(map(self.format.packed_length, lengths))
            pieces = torch.split(whole, sizes)
            for cell, piece, length in zip(message.cells, pieces, lengths, strict=True):
                restored = self.format.restore(piece, length)
                if one.kind is RoundKind.COPY:
                    cells[cell].copy_(restored)
                    if self.format.rounds:
                        sums[cell] = piece.clone()
                else:
                    layers.setdefault(cell, []).append((message.layer, restored))
        for cell, found in layers.items():
            found.append((one.own_layer, cells[cell]))
            found.sort(key=lambda layer: layer[0])
            total = found[0][1].clone()
            for _, numbers in found[1:]:
                total += numbers
            if one.kind is RoundKind.EXCHANGE and self.format.rounds:
                # Members of other groups have the same total, and all of them round it here.
                sums[cell] = self.pack((TOTALS, cell), total)
                total = self.format.restore(sums[cell], len(total))
            cells[cell].copy_(total)


class SumThread:
    """Takes part in the planned sums of one rank in one step, one after the other."""

    def __init__(self, comm: Comm, sums: Sequence[PlannedSum]) -> None:
        self.comm = comm
        self.sums = sums
        self.waiting: queue.SimpleQueue[Tensor | None] = queue.SimpleQueue()
        self.done: list[Future[None]] = [Future() for _ in sums]
        self.started = 0  # sums whose gradients are complete
        self.posted: list[Arriving | None] = []
        name = f"sums of rank {comm.rank}"
        threading.Thread(target=self.work, name=name, daemon=True).start()

    def put(self, flat: Tensor) -> PendingSum:
        """Begin the next sum, which happens in place."""
        pending = PendingSum(self.done[self.started], flat, flat.cpu())
        self.started += 1
        self.waiting.put(pending.host)
        return pending

    def abandon(self) -> None:
        """End the thread, because the step has failed: it waits for no more gradients."""
        self.waiting.put(None)

    def work(self) -> None:
        """Run all sums; an error ends all that are left."""
        try:
            with torch.no_grad():
                self.post_first(0)
                for number, done in enumerate(self.done):
                    self.run_one(number)
                    done.set_result(None)
        except BaseException as error:
            for done in self.done:
                if not done.done():
                    done.set_exception(error)

    def run_one(self, number: int) -> None:
        """Wait for the gradients of a sum, and sum them."""
        one = self.sums[number]
        flat = self.waiting.get()
        if flat is None:
            raise RuntimeError("the step has failed")
        one.begin = time.perf_counter()
        first = self.posted
        one.run(self.comm, flat, first, lambda: self.post_first(number + 1))
        one.end = time.perf_counter()

    def post_first(self, number: int) -> None:
        """Ask for what the first round of a sum receives."""
        if number < len(self.sums):
            self.posted = self.sums[number].post(self.comm, 0)


@dataclass(frozen=True, slots=True)
class PendingSum:
    """A planned sum in progress, of numbers that may have a copy on the host."""

    done: Future[None]
    flat: Tensor
    host: Tensor

    def wait(self) -> None:
        """Block until the sum is there."""
        self.done.result()
        if self.host is not self.flat:
            self.flat.copy_(self.host)


# ---------------------------------------------------------------- cell format
# How the numbers of a planned sum travel: as they are, in bfloat16, or in int8 with a scale for every row.
#
# A cell is packed by itself, whichever message it is part of. So all ranks that get it restore the same bits.


class CellFormat:
    """Packs cells of one type of numbers; `messages` is the type in which they travel, by default their own."""

    def __init__(self, dtype: torch.dtype, messages: torch.dtype | None = None) -> None:
        self.dtype = dtype
        self.sent_as = messages or dtype
        self.quantizes = messages is torch.int8
        self.rounds = self.sent_as is not dtype

    def packed_length(self, numbers: int) -> int:
        """The numbers of a packed cell."""
        if not self.quantizes:
            return numbers
        return numbers + SCALE_BYTES * -(-numbers // SUM_ROW)

    def pack(self, cell: Tensor) -> Tensor:
        """A cell as it travels."""
        if not self.quantizes:
            return cell.to(self.sent_as)
        count = len(cell) // SUM_ROW
        full = count * SUM_ROW
        rows = [quantize(cell[:full].view(count, SUM_ROW)).view(-1)]
        if full < len(cell):  # The last row is shorter.
            rows.append(quantize(cell[full:]))
        return torch.cat(rows)

    def restore(self, packed: Tensor, numbers: int) -> Tensor:
        """The numbers of a packed cell."""
        if not self.quantizes:
            return packed.to(self.dtype)
        row_bytes = SUM_ROW + SCALE_BYTES
        count = numbers // SUM_ROW
        full = count * row_bytes
        rows = [restore(packed[:full].view(count, row_bytes), self.dtype).view(-1)]
        if full < len(packed):
            rows.append(restore(packed[full:], self.dtype))
        return torch.cat(rows)
