"""The layer and the head that Llama and GPT share.

In a layer, attention and MLP each read a normed x, and are added to it:

x ──┬─ norm ─ attention ─(+)─┬─ norm ─ mlp ─(+)─►
    └────────────────────────┘└──────────────┘

Either of them can be recomputed in the backward (`penstock.models.recompute`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from penstock.dropout import Dropout
from penstock.models.recompute import recomputed


class PreNormLayer(nn.Module):
    """A layer with a norm before its attention and before its MLP."""

    recomputes_attention = False
    recomputes_mlp = False

    def __init__(
        self,
        make_norm: Callable[[], nn.Module],
        attention: nn.Module,
        mlp: nn.Module,
        number: int,
    ) -> None:
        super().__init__()
        self.attention_norm = make_norm()
        self.attention: Any = attention
        self.mlp_norm = make_norm()
        self.mlp = mlp
        self.attention_dropout = Dropout(f"attention {number}")
        self.mlp_dropout = Dropout(f"mlp {number}")

    def run(self, x: Tensor, *arguments: Any) -> Tensor:
        """Return the next hidden state; the attention takes the arguments after x."""

        def attend(x: Tensor) -> Tensor:
            mixed: Tensor = self.attention(self.attention_norm(x), *arguments)
            return mixed

        mixed = recomputed(attend, x, self.recomputes_attention)
        return self.add_mlp(x + self.attention_dropout(mixed))

    def before_mixing(
        self, x: Tensor, *angles: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries, keys and values of x."""
        q, k, v = self.attention.project(self.attention_norm(x), *angles)
        return q, k, v

    def after_mixing(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Return the next hidden state, given the mixed values."""
        x = x + self.attention_dropout(self.attention.output(mixed))
        return self.add_mlp(x)

    def add_mlp(self, x: Tensor) -> Tensor:
        """Add the result of the MLP to a hidden state."""
        mixed = recomputed(self.run_mlp, x, self.recomputes_mlp)
        y: Tensor = x + self.mlp_dropout(mixed)
        return y

    def run_mlp(self, x: Tensor) -> Tensor:
        """Norm a hidden state, and run the MLP."""
        y: Tensor = self.mlp(self.mlp_norm(x))
        return y


class NormedHead(nn.Module):
    """The last norm, then a logit for every word."""

    def __init__(self, norm: nn.Module, width: int, vocab: int) -> None:
        super().__init__()
        self.norm = norm
        self.output = nn.Linear(width, vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Turn a hidden state into logits."""
        logits: Tensor = self.output(self.hidden(x))
        return logits

    def hidden(self, x: Tensor) -> Tensor:
        """Return what the output layer makes logits of."""
        y: Tensor = self.norm(x)
        return y
