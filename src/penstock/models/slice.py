"""What the later slices of a sequence need from the earlier ones, and the gradient that comes back for it.

    forward    slice 0      slice 1            slice 2
    extend     [k k . . .]  [k k k k .]        [k k k k k]     one buffer of all tokens; each slice fills its own rows
    take          -            h                  h            a state that the slice before has left
    leave         h ─────────► h ───────────────► h

    backward   slice 2      slice 1            slice 0         the last slice first
    extend     [d d d d d]  [+ + + + .]        [+ + . . .]     each adds to the rows it saw; then its own are complete
    take, leave   d ─────────► d ───────────────► d

A module that can be sliced has a parameter `piece`. Attention uses it to extend its keys and values; a recurrent
layer takes a state from it and leaves one. It all needs the memory of one sequence, for any number of slices.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from penstock.errors import RunError

Key: TypeAlias = tuple[Hashable, str]  # owner, name


class Carry:
    """The rows and states of one sequence in one stage so far and, on the way back, their gradients.

    For packed documents, `starts` holds the position at which each token's document starts: (rows, tokens).
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
        self.tokens = tokens
        self.starts = starts
        self.reached = 0  # tokens that went forward
        self.left = tokens  # tokens that have not come back yet
        self.rows: dict[Key, Tensor] = {}
        self.gradients: dict[Key, Tensor] = {}
        self.states: dict[Key, Tensor] = {}  # what the last slice left
        self.state_gradients: dict[Key, Tensor] = {}  # from the last backward

    def open(self, begin: int, end: int) -> Slice:
        """Begin the forward of the next slice."""
        if begin != self.reached or not begin < end <= self.tokens:
            raise RunError(
                f"tokens {begin}:{end} of {self.tokens} go forward, but the next one is {self.reached}"
            )
        self.reached = end
        return Slice(self, begin, end)

    def back(self, piece: Slice) -> tuple[list[Tensor], list[Tensor]]:
        """Begin the backward of a slice; return the states it left whose gradients are known, and these gradients.

        The backward must begin from these states too.
        """
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
        """End the backward of a slice; keep the gradients that the slice before it needs."""
        self.left = piece.begin
        self.state_gradients = {
            key: one.grad for key, one in piece.taken.items() if one.grad is not None
        }
        piece.taken.clear()
        piece.gave.clear()


class DocumentPart(NamedTuple):
    """The tokens of one document in a slice: from `begin` to `end`; the document begins at `start`."""

    start: int
    begin: int
    end: int


def _document_parts(starts: Tensor, begin: int) -> list[DocumentPart]:
    """The documents in a slice that begins at `begin`, given the start of each token's document.

    >>> _document_parts(torch.tensor([1, 1, 4]), 2)
    [DocumentPart(start=1, begin=2, end=4), DocumentPart(start=4, begin=4, end=5)]
    """
    documents, counts = torch.unique_consecutive(starts, return_counts=True)
    parts = []
    for start, count in zip(documents.tolist(), counts.tolist(), strict=True):
        parts.append(DocumentPart(start, begin, begin + count))
        begin += count
    return parts


class Slice:
    """The tokens from `begin` to `end` of a sequence, while a stage computes them."""

    __slots__ = (
        "added",
        "again",
        "begin",
        "carry",
        "end",
        "found",
        "gave",
        "taken",
    )

    def __init__(self, carry: Carry, begin: int, end: int) -> None:
        self.carry = carry
        self.begin = begin
        self.end = end
        self.again = False  # whether its forward runs a second time, for the backward
        self.taken: dict[Key, Tensor] = {}
        self.gave: dict[Key, Tensor] = {}
        self.added: Tensor | None = None  # the mask, once computed
        self.found: list[list[DocumentPart]] | None = None  # documents, once found

    @property
    def tokens(self) -> int:
        """The number of tokens of the whole sequence."""
        return self.carry.tokens

    @property
    def causal(self) -> bool:
        """Whether plain causal attention is right: this is the first slice, and there is one document."""
        return self.begin == 0 and self.carry.starts is None

    @property
    def partial(self) -> bool:
        """Whether the sequence has other slices."""
        return self.tokens > self.end - self.begin

    def positions(self, device: torch.device) -> Tensor:
        """The position of each token in its document: (tokens), or (rows, tokens) if documents are packed."""
        place = torch.arange(self.begin, self.end, device=device)
        starts = self.carry.starts
        return (
            place
            if starts is None
            else place - starts[:, self.begin : self.end].to(device)
        )

    def all_positions(self, device: torch.device) -> Tensor:
        """The positions of all tokens of the sequence; `positions` are those from `begin` to `end`."""
        place = torch.arange(self.tokens, device=device)
        return (
            place if self.carry.starts is None else place - self.carry.starts.to(device)
        )

    def documents(self) -> list[list[DocumentPart]]:
        """The parts of packed documents in this slice, for each row; empty if documents are not packed."""
        if self.found is None:
            self.found = []
            starts = self.carry.starts
            if starts is not None:
                rows = starts[:, self.begin : self.end].cpu()
                self.found = [_document_parts(row, self.begin) for row in rows]
        return self.found

    def mask(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """`seen` as attention takes it: on a GPU as flash kernels know it, otherwise one tensor for all layers."""
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
        """The keys that each query sees, which are those before it in its document: (tokens, keys), or with rows.

        The queries are the last of the keys, so the mask is aligned at its lower right corner.

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
        """Append x to that of all earlier slices along `dim`; return a view of the buffer that holds them all."""
        rows: Tensor = _Extend.apply(x, self, (owner, name), dim % x.dim())  # type: ignore[no-untyped-call]
        return rows

    def take(self, owner: Hashable, name: str) -> Tensor | None:
        """The state that the previous slice has left; None in the first slice."""
        key = (owner, name)
        state = self.taken.get(key) if self.again else self.carry.states.get(key)
        if state is None:
            return None
        self.taken[key] = state.detach().requires_grad_(torch.is_grad_enabled())
        return self.taken[key]

    def leave(self, owner: Hashable, name: str, state: Tensor) -> None:
        """Leave a state for the next slice."""
        key = (owner, name)
        if state.requires_grad:
            self.gave[key] = state
        if not self.again:
            self.carry.states[key] = state.detach()


class _Extend(torch.autograd.Function):
    """Writes to a buffer without telling autograd: nobody writes again to the rows that earlier slices have saved."""

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
        if total is None:  # this is the last slice, which sees all rows
            wide = torch.promote_types(grad.dtype, torch.float32)
            total = sums[ctx.key] = grad.to(wide, copy=True)
        else:
            total.narrow(dim, 0, piece.end).add_(grad)
        own = total.narrow(dim, piece.begin, piece.end - piece.begin)
        return own.to(grad.dtype), None, None, None
