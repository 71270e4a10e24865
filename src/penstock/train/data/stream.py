"""Batches from a dataset of the library `datasets`, for a training loop of your own: stored or streamed.

    dataset ──► texts ──► tokens, with an end word after each text ──► rows of `tokens` tokens ──► (inputs, labels)

Texts are read and encoded one by one, so that memory does not grow with the dataset. The state is that of the dataset
and the tokens that are not in a row yet. A stream with this state goes on with the next batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.errors import FileError, RunError, ShapeError
from penstock.train.data.files import few, refuse_others
from penstock.train.data.tokenizer import Tokenizer, tokenizer_of

StreamState = dict[str, Any]


class TextStream:
    """Rows of tokens out of a `Dataset` or `IterableDataset`, as (inputs, labels), each (rows, tokens).

    Labels are shifted already. `tokenizer` is "bytes" or the path of a tokenizer.json. The last texts of a dataset may
    not fill a batch. They begin the first one of the next epoch, if you iterate again.
    """

    def __init__(
        self,
        dataset: Iterable[str | Mapping[str, Any]],
        tokens: int,
        rows: int,
        tokenizer: str | Tokenizer = "bytes",
        field: str = "text",
    ) -> None:
        if tokens < 1 or rows < 1:
            raise ShapeError(
                f"rows and tokens must be at least 1, not {rows} and {tokens}"
            )
        refuse_others(dataset)
        if not hasattr(dataset, "state_dict") and not hasattr(dataset, "__getitem__"):
            raise FileError(
                f"a {type(dataset).__name__} cannot go back to where a stream was\n"
                "  hand over a list, a Dataset or an IterableDataset, or train with `fit`, which reads it once"
            )
        self.dataset: Any = dataset
        # A dataset that streams knows its place itself.
        self.knows = hasattr(dataset, "state_dict")
        self.tokens = tokens
        self.rows = rows
        self.field = field
        self.tokenizer: Tokenizer = (
            tokenizer_of(tokenizer) if isinstance(tokenizer, str) else tokenizer
        )
        self.epoch = 0  # how often the dataset was read to its end
        self.examples = 0  # read in this epoch
        self.left: list[int] = []  # tokens that are in no batch yet
        self._resumes = False

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches up to the end of the dataset."""
        if not self._resumes:
            self.examples = 0
            self._rewind()
        self._resumes = False
        yield from self._batches()
        rest = self.dataset
        if not self.knows:
            rest = map(rest.__getitem__, range(self.examples, len(rest)))
        for example in rest:
            self.examples += 1
            self.left += self._encode(example)
            yield from self._batches()
        self.epoch += 1

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches as long as there are enough tokens; the last token begins the next one."""
        needed = self.rows * self.tokens + 1  # and the label of the last token
        while len(self.left) >= needed:
            words = torch.tensor(self.left[:needed])
            del self.left[: needed - 1]
            shape = (self.rows, self.tokens)
            yield words[:-1].view(shape), words[1:].view(shape)

    def _encode(self, example: str | Mapping[str, Any]) -> list[int]:
        if isinstance(example, str):
            example = {self.field: example}
        if not isinstance(example, Mapping):
            raise FileError(
                f"example {self.examples - 1} is neither a text nor a mapping, but {type(example).__name__}"
            )
        text = example.get(self.field)
        if text is None and self.field not in example:
            raise FileError(
                f"example {self.examples - 1} has no {self.field!r}; it has {few(example)}\n"
                "  name another field"
            )
        if text is None:
            return []
        if not isinstance(text, str):
            raise FileError(
                f"example {self.examples - 1}: {self.field!r} does not hold text, but {type(text).__name__}"
            )
        words = self.tokenizer.encode(text.encode("utf-8", "replace"), "an example")
        end = [] if self.tokenizer.end is None else [self.tokenizer.end]
        return [*np.asarray(words).tolist(), *end]

    # ------------------------------------------------------------ the place in the dataset
    def _rewind(self) -> None:
        """Begin a new epoch; a dataset that shuffles does so again."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self.epoch)

    def state_dict(self) -> StreamState:
        """Return everything that is needed to go on after the last batch."""
        return {
            "dataset": self.dataset.state_dict() if self.knows else None,
            "epoch": self.epoch,
            "examples": self.examples,
            "left": list(self.left),
            "tokens": self.tokens,
        }

    def load_state_dict(self, state: StreamState) -> None:
        """Go on where another stream of the same dataset was."""
        if self.knows != (state.get("dataset") is not None):
            raise RunError(
                "the state is that of another kind of dataset: one of the two is streamed, the other is not"
            )
        if state["tokens"] != self.tokens:
            raise RunError(
                f"the state belongs to rows of {state['tokens']} tokens, but these rows have {self.tokens}"
            )
        self.epoch = int(state["epoch"])
        self.examples = int(state["examples"])
        self.left = list(state["left"])
        self._rewind()
        if self.knows:
            self.dataset.load_state_dict(state["dataset"])
        self._resumes = True
