"""Text on disk as one long row of tokens, kept in a file that is mapped into memory.

    a.txt   b.py   c.jsonl                files, folders, lines of JSON
      │       │    │ │ │
      ▼       ▼    ▼ ▼ ▼
    ┌──────┬─┬────┬─┬──┬─┬──┬─┬──┬─┐
    │ a    │0│ b  │0│  │0│  │0│  │0│      packed one after the other, with an end word after each
    └──────┴─┴────┴─┴──┴─┴──┴─┴──┴─┘
    └─ sequence 0 ─┴─ sequence 1 ─┴─ …    cut when the length is reached

A sequence may hold several documents. Attention crosses their borders unless
`data.separate` forbids it.

The name of the file is a digest of its sources, so other text or another tokenizer gets
another file. Its content has a second digest: text that was moved or copied is still the
same text, and a run can resume with it.
"""

from __future__ import annotations

import json
import mmap
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.config import DataConfig
from penstock.errors import FileError
from penstock.train.data.conversations import Marks, Tally
from penstock.train.data.encoded_texts import FileTexts
from penstock.train.data.masking import Masking
from penstock.train.data.order import shuffled
from penstock.train.data.text_files import ENCODED, ProgressBytes, source_files
from penstock.train.data.token_cache import (
    cache_files,
    file_of_marks,
    fill_cache,
    is_complete_cache,
    tokenizer_name,
)
from penstock.train.data.tokenizer import TokenArray, tokenizer_of


class Ticket(NamedTuple):
    """A sequence to read, and how often all sequences were read before."""

    sequence: int
    epoch: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """All tokens, cut into sequences: `trained` ones for training, then `held_out` ones."""

    tokens: TokenArray
    length: int  # tokens of a sequence
    trained: int
    held_out: int
    digest: str  # of the tokens
    end: int | None = None  # the word after each document, if documents are kept apart
    # For conversations and segments: which tokens are learned, and with which a document begins.
    marks: Marks | None = None
    separate: bool = False  # whether conversations or segments are kept apart
    tally: Tally | None = None  # of conversations
    masking: Masking | None = None  # for models that guess masked words
    typed: bool = False  # whether rows have two segments, whose tokens differ in type
    bytes_per_token: float | None = None  # of text; None if nobody has counted

    def ticket(self, position: int, seed: int) -> Ticket:
        """Return which sequence comes at a position, in which epoch."""
        return Ticket(shuffled(position, self.trained, seed), position // self.trained)

    @property
    def token_count(self) -> int:
        """The number of tokens."""
        return len(self.tokens)

    @property
    def text_source(self) -> Corpus:
        """The corpus that stands for the others where several are mixed."""
        return self

    @property
    def apart(self) -> bool:
        """Whether documents or conversations are kept apart."""
        return self.end is not None or self.separate

    @property
    def has_segments(self) -> bool:
        """Whether its rows are segments of text for a Bert, and not conversations."""
        return self.marks is not None and self.masking is not None

    def sequence(self, number: int) -> TokenArray:
        """Return a sequence and the token after it, which is the label of the last one."""
        return copy_row(self.tokens, number, self.length)

    def sequence_marks(self, number: int) -> Marks:
        """Return the marks of a sequence's tokens, and of the token after it."""
        assert self.marks is not None
        return copy_row(self.marks, number, self.length)


def copy_row(array: NDArray[Any], number: int, length: int) -> NDArray[Any]:
    """Copy a row and the entry after it, from its file if the array is a mapped file.

    Where a mapped file is touched, the system maps up to 2 MB of it. Rows in random order would map all of it within a
    few hundred steps, and all of it would count as memory of the process.
    """
    begin, end = number * length, (number + 1) * length + 1
    if isinstance(array, np.memmap) and isinstance(array.base, mmap.mmap):
        with suppress(OSError):  # The file was removed; what is mapped remains.
            return np.fromfile(
                str(array.filename),
                array.dtype,
                end - begin,
                offset=begin * array.itemsize,
            )
    return np.array(array[begin:end])


def open_corpus(
    data: DataConfig, cache: Path, watch: ProgressBytes = lambda done, total: None
) -> Corpus:
    """Open the corpus of a config.

    The text is encoded once, and found in the cache after that. `watch` sees the progress.
    """
    tokenizer = tokenizer_of(data.tokenizer)
    files = source_files(data)
    if data.separate and tokenizer.end is None and not data.marked:
        raise FileError(
            f"{tokenizer_name(data)} has no word that ends a document, "
            "so documents cannot be told apart\n"
            "  set data.separate=false, or name the word as eos_token in a "
            "tokenizer_config.json beside the tokenizer"
        )
    row, note = cache_files(data, files, cache)
    if not is_complete_cache(row, note):
        if note.suffix == ENCODED:
            raise FileError(
                f"the encoded dataset {note} is damaged, or {row.name} beside it is missing\n  encode it again"
            )
        fill_cache(row, note, data, tokenizer, FileTexts(files, data, tokenizer, watch))
    return read_corpus(row, note, data, tokenizer.end)


def read_corpus(row: Path, note: Path, data: DataConfig, end: int | None) -> Corpus:
    """Open tokens that are encoded already; `end` is the tokenizer's word after a document."""
    facts = json.loads(note.read_text(encoding="utf-8"))
    dtype = np.uint16 if facts["width"] == 2 else np.uint32
    marks: Marks | None = None
    try:
        tokens: TokenArray = np.memmap(row, dtype=dtype, mode="r")
        if data.marked:
            marks = np.memmap(file_of_marks(row), dtype=np.uint8, mode="r")
    except OSError as error:
        raise FileError(
            f"cannot read the token cache {row}: {error.strerror}\n"
            "  data.cache names its folder"
        ) from None
    if marks is not None:
        corpus = cut_corpus(tokens, data, facts["digest"])
        told = facts.get("conversations")
        tally = None if told is None else Tally(**told)
        return replace(corpus, marks=marks, separate=data.apart, tally=tally)
    corpus = cut_corpus(tokens, data, facts["digest"], end if data.separate else None)
    # Nobody has counted in a cache that an earlier version has written, nor for tokens without text.
    if not facts.get("bytes"):
        return corpus
    return replace(corpus, bytes_per_token=facts["bytes"] / len(tokens))


def open_validation(
    data: DataConfig, cache: Path, watch: ProgressBytes = lambda done, total: None
) -> Corpus | None:
    """Open the text of data.validation, all of which counts as held out; None without any."""
    own = validation_data(data)
    return None if own is None else all_held_out(open_corpus(own, cache, watch))


def validation_data(data: DataConfig) -> DataConfig | None:
    """Return data.validation as the sources of a corpus of its own; None without any."""
    if not data.validation:
        return None
    return replace(
        data, sources=data.validation, validation=(), mixture=(), held_out=0.0
    )


def all_held_out(corpus: Corpus) -> Corpus:
    """Return a corpus all of whose sequences are held out."""
    return replace(corpus, trained=0, held_out=corpus.trained)


def cut_corpus(
    tokens: TokenArray, data: DataConfig, digest: str = "", end: int | None = None
) -> Corpus:
    """Cut tokens into sequences of one length, and hold out the last ones."""
    sequences = (len(tokens) - 1) // data.tokens
    if sequences < 1:
        raise FileError(
            f"the text has {len(tokens)} tokens, "
            f"too few for sequences of {data.tokens}\n"
            "  give more text in data.sources, or shorter sequences in data.tokens"
        )
    held_out = 0
    if data.held_out:
        held_out = max(round(sequences * data.held_out), 1)
        held_out = min(held_out, sequences - 1)
    return Corpus(tokens, data.tokens, sequences - held_out, held_out, digest, end)
