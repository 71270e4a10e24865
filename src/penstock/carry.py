"""A sequence read slice by slice: what later slices need of earlier ones, and the gradient that comes back for it.

    forward    slice 0      slice 1            slice 2
    extend     [k k . . .]  [k k k k .]        [k k k k k]     one buffer of all tokens; each slice fills its own rows
    take          -            h                  h            a state: what the slice before has left
    leave         h ─────────► h ───────────────► h

    backward   slice 2      slice 1            slice 0         the last slice first
    extend     [d d d d d]  [+ + + + .]        [+ + . . .]     each adds to the rows it saw; its own are complete then
    take, leave   d ─────────► d ───────────────► d

A module that can be sliced takes a second argument, `piece`, and asks it. Attention extends its keys and values; a
recurrent layer takes a state and leaves one. Memory is that of one sequence, whatever the number of slices.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from penstock.errors import RunError

Key: TypeAlias = tuple[Hashable, str]  # whose, and what


class Carry:
    """Of one sequence in one stage: the rows and states so far and, on the way back, their gradients.

    `starts` is for packed documents: of each token the first one of its document, (rows, tokens).
    """

    __slots__ = (
        "gradients",
        "left",
        "reached",
        "rows",
        "starts",
        "state_gradients",
        "states",
        "tokens",
    )

    def __init__(self, tokens: int, starts: Tensor | None = None) -> None:
        self.tokens, self.starts = tokens, starts
        self.reached = 0  # tokens that went forward
        self.left = tokens  # tokens that did not come back yet
        self.rows: dict[Key, Tensor] = {}
        self.gradients: dict[Key, Tensor] = {}
        self.states: dict[Key, Tensor] = {}  # what the last slice left
        self.state_gradients: dict[
            Key, Tensor
        ] = {}  # what the slice that came back last has to say of it

    def open(self, begin: int, end: int) -> Slice:
        """The next slice, on its way forward."""
        if begin != self.reached or not begin < end <= self.tokens:
            raise RunError(
                f"tokens {begin}:{end} of {self.tokens} go forward, but the next one is {self.reached}"
            )
        self.reached = end
        return Slice(self, begin, end)

    def back(self, piece: Slice) -> tuple[list[Tensor], list[Tensor]]:
        """A slice is about to go back: states it left from which the backward must also begin, with their gradients."""
        if self.reached != self.tokens or piece.end != self.left:
            forward = f"the forward of token {self.reached}"
            due = (
                f"the backward of token {self.left - 1}"
                if self.reached == self.tokens
                else forward
            )
            raise RunError(
                f"the backward of tokens {piece.begin}:{piece.end} comes out of order: {due} is due"
            )
        roots = [
            (left, self.state_gradients[key])
            for key, left in piece.gave.items()
            if key in self.state_gradients
        ]
        return [left for left, _ in roots], [gradient for _, gradient in roots]

    def close(self, piece: Slice) -> None:
        """A slice came back: keeps what the slice before it needs to know."""
        self.left = piece.begin
        self.state_gradients = {
            key: one.grad for key, one in piece.taken.items() if one.grad is not None
        }
        piece.taken.clear()
        piece.gave.clear()


class Slice:
    """The tokens `begin` to `end` of a sequence, on their way through a stage."""

    __slots__ = ("added", "again", "begin", "carry", "end", "gave", "taken")

    def __init__(self, carry: Carry, begin: int, end: int) -> None:
        self.carry, self.begin, self.end = carry, begin, end
        self.again = False  # its forward runs once more, before its backward
        self.taken: dict[Key, Tensor] = {}
        self.gave: dict[Key, Tensor] = {}
        self.added: Tensor | None = None  # the mask, once made

    @property
    def tokens(self) -> int:
        """Of the whole sequence."""
        return self.carry.tokens

    @property
    def causal(self) -> bool:
        """Whether plain causal attention is right: nothing before it, and one document."""
        return self.begin == 0 and self.carry.starts is None

    @property
    def partial(self) -> bool:
        """Whether the sequence has other slices."""
        return self.tokens > self.end - self.begin

    def positions(self, device: torch.device) -> Tensor:
        """Of each token its place in its document: (tokens), or (rows, tokens) if there are several."""
        place = torch.arange(self.begin, self.end, device=device)
        starts = self.carry.starts
        return (
            place
            if starts is None
            else place - starts[:, self.begin : self.end].to(device)
        )

    def all_positions(self, device: torch.device) -> Tensor:
        """The positions of the whole sequence, of which `positions` are those from `begin` to `end`."""
        place = torch.arange(self.tokens, device=device)
        return (
            place if self.carry.starts is None else place - self.carry.starts.to(device)
        )

    def mask(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """`seen` as attention takes it: on a GPU what the flash kernels know, else one tensor for all layers."""
        if self.carry.starts is None and device.type == "cuda" and dtype.itemsize == 2:
            # imported here: it loads all of torch's compiler, and only a GPU needs it
            from torch.nn.attention.bias import causal_lower_right  # noqa: PLC0415

            return causal_lower_right(self.end - self.begin, self.end)
        if self.added is None or self.added.dtype != dtype:
            seen = self.seen(device)
            self.added = torch.zeros(
                seen.shape, device=device, dtype=dtype
            ).masked_fill_(~seen, -torch.inf)
        return self.added

    def seen(self, device: torch.device) -> Tensor:
        """Which of all keys so far each query sees: those before it, in its own document. (tokens, keys), or with rows.

        Queries are the last of the keys, not the first: the mask is aligned at its lower right corner.

            keys   0 1 2 3 4 5
            3      ■ ■ ■ ■ . .
            4      ■ ■ ■ ■ ■ .
            5      ■ ■ ■ ■ ■ ■
        """
        query = torch.arange(self.begin, self.end, device=device)[:, None]
        key = torch.arange(self.end, device=device)
        if self.carry.starts is None:
            return key <= query
        start = self.carry.starts[:, self.begin : self.end].to(device)[..., None]
        return ((key <= query) & (key >= start))[:, None]

    def extend(self, owner: Hashable, name: str, x: Tensor, dim: int = -2) -> Tensor:
        """x of this slice after those of all slices before it, along `dim`; a view of the buffer that holds them."""
        rows: Tensor = _Extend.apply(x, self, (owner, name), dim % x.dim())  # type: ignore[no-untyped-call]
        return rows

    def take(self, owner: Hashable, name: str) -> Tensor | None:
        """The state that the slice before has left; None in the first slice."""
        key = (owner, name)
        state = self.taken.get(key) if self.again else self.carry.states.get(key)
        if state is None:
            return None
        self.taken[key] = state.detach().requires_grad_(torch.is_grad_enabled())
        return self.taken[key]

    def leave(self, owner: Hashable, name: str, state: Tensor) -> None:
        """A state for the next slice."""
        key = (owner, name)
        if state.requires_grad:
            self.gave[key] = state
        if not self.again:
            self.carry.states[key] = state.detach()


class _Extend(torch.autograd.Function):
    """Writes past autograd: what earlier slices saved of the buffer are rows that nobody writes again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, piece: Slice, key: Key, dim: int) -> Tensor:
        rows = piece.carry.rows.get(key)
        if rows is None:
            rows = piece.carry.rows[key] = x.new_empty(
                *x.shape[:dim], piece.tokens, *x.shape[dim + 1 :]
            )
        rows.data.narrow(dim, piece.begin, piece.end - piece.begin).copy_(x)
        ctx.piece, ctx.key, ctx.dim = piece, key, dim
        return rows.data.narrow(dim, 0, piece.end)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        piece, dim, sums = ctx.piece, ctx.dim, ctx.piece.carry.gradients
        total = sums.get(ctx.key)
        if total is None:  # of the last slice, which sees all rows
            wide = torch.promote_types(grad.dtype, torch.float32)
            total = sums[ctx.key] = grad.to(wide, copy=True)
        else:
            total.narrow(dim, 0, piece.end).add_(grad)
        own = total.narrow(dim, piece.begin, piece.end - piece.begin)
        return own.to(grad.dtype), None, None, None
