"""Runs a part of a Hugging Face encoder, whose words see both ways, with the model's own forward.

    first part       token ids, types of segments ──► embeddings ──► layers ──► x
    other parts                                x ──► layers ──► x, or the head and logits

Every part takes rows in one of two forms. With an `attention_mask`, as transformers has it, padding is hidden. With
packed documents (`penstock.carry`), every document is a sequence of its own, whose positions begin anew; padding is a
document too, which nobody else sees.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from penstock.carry import Slice
from penstock.errors import PenstockError, ShapeError
from penstock.models.hf import Encoding, Pieces
from penstock.models.hf_part import Runner, Visit, submodule

UNSLICEABLE = "its tokens see later tokens, so a slice cannot run before the whole sequence is known"


class EncoderRunner(Runner):
    """Hugging Face's encoder with the pieces of one part."""

    def __init__(
        self,
        model: nn.Module,
        pieces: Pieces,
        part: nn.Module,
        layers: range,
        ends: tuple[bool, bool],
    ) -> None:
        super().__init__(model, pieces, part, layers, ends)
        assert pieces.encoding is not None
        self.encoding: Encoding = pieces.encoding
        self.kernel = str(self.base.config._attn_implementation)
        self.longest = 0
        if self.first and self.encoding.table:
            table = submodule(part, self.encoding.table)
            self.longest = table.num_embeddings - self.encoding.first

    def stand_in(self, piece: nn.Module) -> Any:
        """What takes the place of an embedding that only the first part runs."""
        return Arrived(self.visit)

    def __call__(
        self,
        x: Tensor,
        piece: Slice | None,
        types: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Turn token ids, or the hidden state of the part before, into the next hidden state or logits."""
        arguments: dict[str, Any] = {"attention_mask": attention_mask}
        if self.first:
            self._check_tokens(x.shape[1])
            arguments["input_ids"] = x
            if types is not None:
                arguments["token_type_ids"] = types
        else:
            self.visit.arrived = x
            arguments["inputs_embeds"] = x
        self.visit.piece = piece
        starts = None if piece is None else piece.carry.starts
        if starts is not None:
            starts = starts.to(x.device)
            arguments["position_ids"] = self._positions(x, starts)
            self._refuse_mask(attention_mask)
            seen = (starts[:, :, None] == starts[:, None, :])[:, None]
            self.visit.apart = Apart(seen, self.kernel == "eager")
        try:
            if self.last:
                return cast(Tensor, self.model(**arguments).logits)
            return cast(Tensor, self.base(**arguments).last_hidden_state)
        finally:
            self.visit.leave()

    def _check_tokens(self, tokens: int) -> None:
        if self.longest and tokens > self.longest:
            raise ShapeError(
                f"{tokens} tokens, but only {self.longest} positions\n"
                f"  use sequences of at most {self.longest} tokens (data.tokens)"
            )

    def _positions(self, x: Tensor, starts: Tensor) -> Tensor:
        """The position of each token in its document, counted as the model does.

        Only the first part knows which words are not counted; the others are told the plain positions.
        """
        place = torch.arange(starts.shape[1], device=x.device)
        first, padding = self.encoding.first, self.encoding.padding
        if padding is None or not self.first:
            return place - starts + first
        counted = (x != padding).long()
        so_far = counted.cumsum(1)
        before = (so_far - counted).gather(1, starts)
        return (so_far - before) * counted + first - 1

    def _refuse_mask(self, attention_mask: Tensor | None) -> None:
        """Refuse what packed documents do not go with."""
        if attention_mask is not None:
            raise PenstockError(
                "rows have packed documents and an attention_mask: padding is a document of its own, so leave out "
                "the mask"
            )
        if self.kernel not in ("eager", "sdpa"):
            raise PenstockError(
                f"{self.kernel} would look across packed documents; call model.set_attn_implementation('sdpa')"
            )


class Arrived:
    """An embedding of another part: its result, which has arrived, whatever it is asked for."""

    def __init__(self, visit: Visit) -> None:
        self.visit = visit

    def __call__(self, *args: object, **kwargs: object) -> Tensor:
        """Return the hidden state of the part before."""
        assert self.visit.arrived is not None
        return self.visit.arrived


class Apart:
    """Keeps the documents of packed rows apart, besides what a mask of Hugging Face's hides."""

    def __init__(self, seen: Tensor, added: bool) -> None:
        self.seen = seen  # whether two tokens are in the same document
        self.added = added  # whether the kernel adds masks to its scores

    def __call__(self, given: Tensor | None, x: Tensor) -> Tensor:
        """Return one mask for both, for layers that get x."""
        if given is None and not self.added:
            return self.seen
        if given is not None and given.dtype == torch.bool:
            return given & self.seen
        if given is None:
            given = torch.zeros_like(self.seen, dtype=x.dtype)
        return given.masked_fill(~self.seen, torch.finfo(given.dtype).min)
