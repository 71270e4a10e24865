"""How the numbers of a planned sum travel: as they are, in bfloat16, or in int8 with a scale for every row.

A cell is packed by itself, whichever message it is part of. So all ranks that get it restore the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.cost.profile import SCALE_BYTES
from penstock.cost.sum_bytes import SUM_ROW
from penstock.runtime.quantized import quantize, restore


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

    def message_length(self, cells: Sequence[int]) -> int:
        """The numbers of a message with cells of these lengths."""
        return sum(map(self.packed_length, cells))

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
