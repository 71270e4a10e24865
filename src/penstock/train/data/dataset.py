"""Encodes a dataset of the user's own, a Python object, so that a run can read it like any other text.

    texts           "a text", ...                         or {"text": "a text"}, as datasets.Dataset has them
    tokens          [5, 17, 4], ...                       or {"input_ids": [5, 17, 4]} with data.field = "input_ids"
    conversations   {"messages": [...]}, ...              with data.instructions
      │
      ▼  one after the other, once
    dataset-4f1c….tokens      what is known about the tokens        data.sources = ["dataset-4f1c….tokens"]
    dataset-4f1c….bin         the tokens, which workers map into their memory

The dataset may be anything that can be iterated over, also a stream. A few megabytes of it are in memory at a time.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from penstock.config import DataConfig
from penstock.errors import FileError
from penstock.train.data.conversations import Record
from penstock.train.data.encoded_texts import encode_pieces
from penstock.train.data.text_files import ENCODED, EncodedPiece, Piece, cut_up
from penstock.train.data.token_cache import file_of_marks, fill_cache
from penstock.train.data.tokenizer import Tokenizer, token_type, tokenizer_of

DATASET = "the dataset"  # its name in errors


def encode_dataset(
    dataset: Iterable[Any], data: DataConfig, folder: Path, vocab: int = 0
) -> Path:
    """Write the tokens of a dataset into a folder, and return the file to name in data.sources.

    `data` says how text becomes tokens. The name of the file is a digest of its content. Tokens that a dataset brings
    along must be below `vocab`, or else below the number of the tokenizer's words.
    """
    refuse_others(dataset)
    tokenizer = tokenizer_of(data.tokenizer)
    vocab = max(vocab, tokenizer.vocab)
    texts = DatasetTexts(dataset, data, tokenizer, vocab)
    note = folder / f"dataset-{uuid.uuid4().hex}{ENCODED}"
    row = note.with_suffix(".bin")
    fill_cache(row, note, data, tokenizer, texts, vocab)
    digest = json.loads(note.read_text(encoding="utf-8"))["digest"]
    final = folder / f"dataset-{digest}{ENCODED}"
    for source, target in (
        (file_of_marks(row), file_of_marks(final)),
        (row, final.with_suffix(".bin")),
        (note, final),  # It makes the others complete.
    ):
        if source.exists():
            source.replace(target)
    return final


def refuse_others(dataset: object) -> None:
    """Refuse what is not a dataset, though Python could iterate over it."""
    if isinstance(dataset, str | bytes | Path):
        raise FileError(
            f"{str(dataset)[:40]!r} is not a dataset but a text or a path\n  name files in data.sources"
        )
    if isinstance(dataset, Mapping):
        names = ", ".join(map(repr, list(dataset)[:8]))
        raise FileError(
            f"the dataset is a mapping from names ({names}), perhaps to its splits\n"
            "  hand over one of them, such as dataset['train']"
        )
    if not isinstance(dataset, Iterable) and not hasattr(dataset, "__getitem__"):
        raise FileError(
            f"a {type(dataset).__name__} is not a dataset: nobody can iterate over it"
        )


@dataclass(frozen=True, slots=True)
class DatasetTexts:
    """The texts, tokens or conversations of a dataset."""

    dataset: Iterable[Any]
    data: DataConfig
    tokenizer: Tokenizer
    vocab: int

    def records(self) -> Iterator[Record]:
        """Yield conversations."""
        for number, one in enumerate(self.dataset):
            where = f"example {number} of {DATASET}"
            if not isinstance(one, Mapping):
                raise FileError(
                    f"{where} is not a mapping with `messages`, or with `prompt` and `completion`, "
                    f"but {_kind(one)}\n  set data.instructions=false to train on plain text"
                )
            yield Record(one, where, 0)

    def encoded(self) -> Iterator[EncodedPiece]:
        """Encode texts, or take tokens as they are; the first example says which of them they are."""
        examples = self._examples()
        first = next(examples, None)
        if first is None:
            return
        examples = chain((first,), examples)
        if isinstance(first[1], str):
            pieces = self._pieces(examples)
            yield from encode_pieces(pieces, self.data, self.tokenizer, DATASET)
        else:
            yield from self._tokens(examples)

    def _examples(self) -> Iterator[tuple[str, Any]]:
        """Yield the value of each example and its place; those without a value are left out."""
        field = self.data.field
        for number, one in enumerate(self.dataset):
            where = f"example {number} of {DATASET}"
            value = one
            if isinstance(one, Mapping):
                if field not in one:
                    known = ", ".join(map(repr, list(one)[:8])) or "nothing"
                    raise FileError(
                        f"{where} has no {field!r}; it has {known}\n  name the field in data.field"
                    )
                value = one[field]
            if value is not None:
                yield where, value

    def _pieces(self, examples: Iterable[tuple[str, Any]]) -> Iterator[Piece]:
        """The texts, of which long ones come in pieces."""
        for where, text in examples:
            if not isinstance(text, str):
                raise FileError(
                    f"{where} is not text, as those before, but {_kind(text)}"
                )
            raw = BytesIO(text.encode("utf-8", "replace"))
            yield from cut_up(raw, self.tokenizer.cut, int)

    def _tokens(self, examples: Iterable[tuple[str, Any]]) -> Iterator[EncodedPiece]:
        """The tokens of each example. The word that ends a document follows unless it is there already."""
        if self.data.segments:
            raise FileError(
                f"data.segments = {self.data.segments} cuts texts into sentences, but {DATASET} brings tokens\n"
                "  hand over texts, or set data.segments=0"
            )
        dtype = token_type(self.vocab)
        for where, value in examples:
            words = _numbers(value, where)
            if len(words) and not 0 <= words.min() <= words.max() < self.vocab:
                wrong = words[(words < 0) | (words >= self.vocab)][0]
                raise FileError(
                    f"{where} has the token {wrong}, but the model has {self.vocab} words\n"
                    "  data.tokenizer must be the one that made the tokens, or model.vocab large enough"
                )
            if len(words) and words[-1] == self.tokenizer.end:
                words = words[:-1]
            yield EncodedPiece(words.astype(dtype), ends=True)


def _numbers(value: object, where: str) -> Any:
    """The tokens of an example, from a list, an array or a tensor of whole numbers."""
    fits = isinstance(value, Sequence | np.ndarray) or hasattr(value, "numpy")
    words = np.asarray(value) if fits and not isinstance(value, str) else np.zeros(1)
    if words.ndim == 1 and not len(words):
        return words.astype(np.int64)
    if words.ndim != 1 or words.dtype.kind not in "iu":
        raise FileError(
            f"{where} is neither a text nor a list of tokens, but {_kind(value)}"
        )
    return words


def _kind(value: object) -> str:
    """A value in a few words."""
    return f"{type(value).__name__}: {str(value)[:40]}"
