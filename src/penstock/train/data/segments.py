"""Rows for a Bert: one or two segments of a document between words that mark their borders.

    data.segments = 1      [CLS] a a a a a a [SEP] . .            every token is of type 0
    data.segments = 2      [CLS] a a a [SEP] b b b [SEP] .        up to the first [SEP] of type 0, then of type 1

A row holds as many whole sentences of one document as fit, and padding that nobody sees. Two segments follow each
other in their document, and the border between them is a border of sentences, drawn at random as in BERT's own data
(Devlin et al., 2019). There is no next sentence to predict, so the second segment always continues the first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from random import Random
from typing import Any, NamedTuple

import numpy as np

from penstock.errors import FileError
from penstock.train.data.conversations import (
    BEGINS,
    SECOND,
    Conversation,
    Marks,
    padding_row,
)
from penstock.train.data.masking import BertWords
from penstock.train.data.text_files import EncodedPiece
from penstock.train.data.tokenizer import TokenArray, TokenType

SENTENCE_END = re.compile(rb"[.!?]+(?=[ \t])|\n+")


class RowLayout(NamedTuple):
    """How rows are made: the words at their borders, how many segments, and how many tokens."""

    words: BertWords
    segments: int
    length: int
    dtype: TokenType

    @property
    def room(self) -> int:
        """The tokens of a row that are text."""
        room = self.length - 1 - self.segments
        if room < self.segments:
            raise FileError(
                f"data.tokens = {self.length} is too short for {self.segments} segments with their borders\n"
                f"  give at least {1 + 2 * self.segments}"
            )
        return room


def split_sentences(text: bytes) -> list[bytes]:
    r"""Cut a text after every sentence and line; the pieces together are the text.

    >>> split_sentences(b"One. Two?\n\nThree")
    [b'One.', b' Two?\n\n', b'Three']
    """
    ends = [match.end() for match in SENTENCE_END.finditer(text)]
    begins = [0, *ends]
    pieces = [text[a:b] for a, b in zip(begins, [*ends, len(text)], strict=True)]
    return [piece for piece in pieces if piece]


def segment_rows(
    sentences: Iterable[EncodedPiece], layout: RowLayout
) -> Iterator[Conversation]:
    """Yield one example after the other, without padding."""
    for number, texts in enumerate(_fill_rows(sentences, layout.room)):
        segments = _draw_pair(texts, number) if layout.segments == 2 else [_join(texts)]
        yield _framed(segments, layout)


def _fill_rows(
    sentences: Iterable[EncodedPiece], room: int
) -> Iterator[list[TokenArray]]:
    """Yield sentences of one document that fit into a row; one that is longer than a row is cut."""
    row: list[TokenArray] = []
    size = 0
    for sentence in sentences:
        rest = sentence.words
        while len(rest):
            if size and size + len(rest) > room:
                yield row
                row, size = [], 0
            row.append(rest[:room])
            size += len(row[-1])
            rest = rest[room:]
        if sentence.ends and row:
            yield row
            row, size = [], 0
    if row:
        yield row


def _draw_pair(texts: Sequence[TokenArray], number: int) -> list[TokenArray]:
    """Cut a row's text into two segments: between two sentences, or a single sentence in its middle."""
    if len(texts) == 1:
        half = len(texts[0]) // 2
        pair = [texts[0][:half], texts[0][half:]]
        return [segment for segment in pair if len(segment)]
    border = 1 + int(Random(number).random() * (len(texts) - 1))
    return [_join(texts[:border]), _join(texts[border:])]


def _join(texts: Sequence[Any]) -> TokenArray:
    joined: TokenArray = np.concatenate(texts)
    return joined


def _framed(segments: Sequence[TokenArray], layout: RowLayout) -> Conversation:
    """Put the words of the borders around segments, and mark the tokens of the second one."""
    words = [np.asarray([layout.words.begin], layout.dtype)]
    border = np.asarray([layout.words.border], layout.dtype)
    marks: list[Marks] = [np.asarray([BEGINS])]
    for number, segment in enumerate(segments):
        words += [segment.astype(layout.dtype), border]
        marks.append(np.full(len(segment) + 1, SECOND * number, dtype=np.uint8))
    return Conversation(np.concatenate(words), np.concatenate(marks))


def pad_rows(
    examples: Iterable[Conversation], length: int, padding: int
) -> Iterator[Conversation]:
    """Fill up every example to a row of its own. The padding is a document that the example does not see."""
    for one in examples:
        rest = padding_row(length - one.tokens, padding, one.words.dtype)
        words: TokenArray = np.concatenate([one.words, rest.words])
        yield Conversation(words, np.concatenate([one.marks, rest.marks]))
