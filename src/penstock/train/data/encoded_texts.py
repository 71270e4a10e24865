"""Texts as tokens: pieces of files, encoded several at a time; or records, for conversations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Protocol

from penstock.config import DataConfig
from penstock.errors import FileError
from penstock.train.data.conversations import FIELDS, Record
from penstock.train.data.segments import split_sentences
from penstock.train.data.text_files import (
    PIECE_BYTES,
    EncodedPiece,
    Piece,
    ProgressBytes,
    file_records,
    text_pieces,
)
from penstock.train.data.tokenizer import Tokenizer, not_text


class Texts(Protocol):
    """What is encoded: the files of a config, or a dataset of the user's own."""

    def records(self) -> Iterator[Record]:
        """Yield conversations, for data.instructions."""
        ...

    def encoded(self) -> Iterator[EncodedPiece]:
        """Yield the words of every piece of text."""
        ...


@dataclass(frozen=True, slots=True)
class FileTexts:
    """The texts of files."""

    files: list[Path]
    data: DataConfig
    tokenizer: Tokenizer
    watch: ProgressBytes

    def records(self) -> Iterator[Record]:
        """Yield the records of all files."""
        return _all_records(self.files, self.watch)

    def encoded(self) -> Iterator[EncodedPiece]:
        """Encode all files, piece by piece."""
        return _encode_files(self.files, self.data, self.tokenizer, self.watch)


def _all_records(files: list[Path], watch: ProgressBytes) -> Iterator[Record]:
    """Yield the records of all files, and tell how much has been read."""
    total = sum(file.stat().st_size for file in files)
    before = 0
    for file in files:
        told = 0
        for record in file_records(file, FIELDS):
            if record.read - told >= PIECE_BYTES:
                told = record.read
                watch(before + told, total)
            yield record
        before += file.stat().st_size
        watch(before, total)


def _encode_files(
    files: list[Path],
    data: DataConfig,
    tokenizer: Tokenizer,
    watch: ProgressBytes,
) -> Iterator[EncodedPiece]:
    """Yield the words of every piece, and tell how much has been read."""
    total = sum(file.stat().st_size for file in files)
    before = 0
    for file in files:

        def tell(place: int, before: int = before) -> None:
            watch(before + place, total)

        pieces = text_pieces(file, data.field, tokenizer.cut)
        yield from encode_pieces(pieces, data, tokenizer, str(file), tell)
        before += file.stat().st_size
        watch(before, total)


def encode_pieces(
    pieces: Iterable[Piece],
    data: DataConfig,
    tokenizer: Tokenizer,
    source: str,
    tell: Callable[[int], None] = lambda place: None,
) -> Iterator[EncodedPiece]:
    """Encode many short pieces together."""
    waiting: list[Piece] = []
    count = 0  # bytes of these pieces
    begin = 0  # where they begin in the file
    for piece in pieces:
        waiting += _sentences(piece) if data.segments else [piece]
        count += len(piece.text)
        if max(count, piece.place - begin) >= PIECE_BYTES:
            yield from _encode_together(waiting, tokenizer, source)
            tell(piece.place)
            waiting = []
            count = 0
            begin = piece.place
    yield from _encode_together(waiting, tokenizer, source)


def _sentences(piece: Piece) -> list[Piece]:
    """The sentences of a piece, each a piece of its own."""
    texts = split_sentences(piece.text) or [b""]
    before = accumulate(map(len, texts), initial=piece.before)
    sentences = [
        piece._replace(text=text, before=place, ends=False)
        for text, place in zip(texts, before, strict=False)
    ]
    return [*sentences[:-1], sentences[-1]._replace(ends=piece.ends)]


def _encode_together(
    pieces: list[Piece], tokenizer: Tokenizer, source: str
) -> Iterator[EncodedPiece]:
    try:
        encoded = tokenizer.encode_all([piece.text for piece in pieces], source)
    except FileError:
        for piece in pieces:
            _check_utf8(piece, source)  # This error also names the line.
        raise
    for piece, words in zip(pieces, encoded, strict=True):
        yield EncodedPiece(words, piece.ends, len(piece.text))


def _check_utf8(piece: Piece, source: str) -> None:
    try:
        piece.text.decode("utf-8")
    except UnicodeDecodeError as error:
        where = f"{source}:{piece.line}" if piece.line else source
        raise not_text(where, piece.before + error.start) from None
