"""How numbers travel in fewer bytes than they have: in int8 with a scale for every row, or in bfloat16."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.cost.profile import SCALE_BYTES
from penstock.cost.sum_bytes import SUM_ROW

# ---------------------------------------------------------------- messages
# Messages of one byte a number: every row has its own scale, and what rounding loses is sent along next time.
#
#     x          0.30   -1.27    0.02      a row: the hidden state of one token, or its gradient
#     int8         30    -127       2      with the scale 1.27 / 127, in four bytes at the end of the row
#     lost       0.00    0.00    0.00      added to the message of the same action in the next step
#
# Rounding errors of gradients would add up over the steps. The sender keeps the error of each message and adds
# it to the next message of the same action, so that the errors cancel over time instead (error feedback).


LARGEST = 127

SMALLEST_SCALE = 1e-30  # of a row of zeros


def quantized_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a message whose numbers have one byte."""
    return (*shape[:-1], shape[-1] + SCALE_BYTES)


def quantize(x: Tensor) -> Tensor:
    """Round each row to 8 bits; the result holds the rows and their scales."""
    numbers = x.float()
    scales = numbers.abs().amax(-1, keepdim=True) / LARGEST
    scales = scales.clamp_min(SMALLEST_SCALE)  # NaN stays NaN, and reaches the loss.
    width = x.shape[-1]
    packed = torch.empty(quantized_shape(x.shape), dtype=torch.int8, device=x.device)
    packed[..., :width] = (numbers / scales).round_().to(torch.int8)
    packed[..., width:] = scales.view(torch.int8)
    return packed


def restore(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of a message that `quantize` has made."""
    width = packed.shape[-1] - SCALE_BYTES
    # A copy, because the scale of a single row need not lie where a float may lie.
    scales = packed[..., width:].clone(memory_format=torch.contiguous_format)
    scales = scales.view(torch.float32)
    return (packed[..., :width].float() * scales).to(dtype)


class Feedback:
    """What rounding has lost of the last message of each action.

    Only gradients get it back, unless `states` says that hidden states do, too.
    """

    def __init__(self, states: bool = False) -> None:
        self.states = states
        # Keys: the number of the action, and the place among the tensors that it passes on.
        self.lost: dict[tuple[int, int], Tensor] = {}

    def quantize(self, x: Tensor, place: tuple[int, int]) -> Tensor:
        """Quantize a message together with what the last one of the same place has lost."""
        lost = self.lost.get(place)
        if lost is not None and lost.shape == x.shape:
            x = x + lost
        packed = quantize(x)
        lost = x - restore(packed, x.dtype)
        # An error that is not finite would spoil all later steps.
        self.lost[place] = lost.nan_to_num_(0.0, 0.0, 0.0)
        return packed


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
