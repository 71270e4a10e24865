"""Messages of one byte a number: every row has its own scale, and what rounding loses is sent along next time.

    x          0.30   -1.27    0.02      a row: the hidden state of one token, or its gradient
    int8         30    -127       2      with the scale 1.27 / 127, in four bytes at the end of the row
    lost       0.00    0.00    0.00      added to the message of the same action in the next step

Rounding errors of gradients would add up over the steps. The sender keeps the error of each message and adds
it to the next message of the same action, so that the errors cancel over time instead (error feedback).
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.cost.profile import SCALE_BYTES

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
