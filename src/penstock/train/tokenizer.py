"""From text to numbers and back: bytes as they are, or a tokenizer.json of Hugging Face's.

    bytes            "def" ──► 100 101 102            256 words; 0 stands between two documents
    tokenizer.json   "def" ──► 4299                   needs the package `tokenizers`
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.errors import FileError, RunError
from penstock.train.config import BYTES

ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "[SEP]")  # of a document, in known families
TOKENIZER = "tokenizer.json"  # in a Hugging Face folder, and in a run's
Tokens = NDArray[np.uint16] | NDArray[np.uint32]


class Tokenizer(Protocol):
    """What the data needs of one."""

    @property
    def vocab(self) -> int:
        """How many words it has."""
        ...

    @property
    def end(self) -> int | None:
        """The word that stands between two documents, if there is one."""
        ...

    @property
    def by_pieces(self) -> bool:
        """Whether a text may be encoded piece by piece, wherever it is cut."""
        ...

    def encode(self, raw: bytes, source: str) -> Tokens:
        """A document as words; `source` is its name in errors."""
        ...

    def encode_all(self, raws: Sequence[bytes], source: str) -> list[Tokens]:
        """Several at once."""
        ...

    def decode(self, words: Sequence[int]) -> str:
        """Words as text; what is no text is marked."""
        ...


class ByteTokenizer:
    """Every byte is a word."""

    vocab, end, by_pieces = 256, 0, True

    def encode(self, raw: bytes, source: str) -> Tokens:
        """The bytes."""
        return np.frombuffer(raw, dtype=np.uint8).astype(np.uint16)

    def encode_all(self, raws: Sequence[bytes], source: str) -> list[Tokens]:
        """One after the other."""
        return [self.encode(raw, source) for raw in raws]

    def decode(self, words: Sequence[int]) -> str:
        """The text of these bytes.

        >>> ByteTokenizer().decode([104, 105])
        'hi'
        """
        return bytes(words).decode("utf-8", errors="replace")


class FileTokenizer:
    """A tokenizer.json."""

    by_pieces = False

    def __init__(self, path: str) -> None:
        try:
            from tokenizers import Tokenizer as Theirs  # noqa: PLC0415  # optional
        except ModuleNotFoundError:
            raise RunError(f"{path} needs the package tokenizers: pip install 'penstock[hf]'") from None
        if not Path(path).is_file():
            raise FileError(f"there is no tokenizer {path}\n  data.tokenizer is bytes, or a tokenizer.json that exists")
        try:
            self.theirs = Theirs.from_file(path)
        except Exception as error:  # it raises nothing more special
            raise FileError(f"{path} is no tokenizer.json: {error}") from None
        known = self.theirs.get_vocab(with_added_tokens=True)
        self.vocab = int(max(known.values(), default=-1)) + 1  # numbers that it leaves out have a place too

    @property
    def end(self) -> int | None:
        """The first of the usual ones that it knows."""
        found = (self.theirs.token_to_id(word) for word in ENDS)
        return next((int(number) for number in found if number is not None), None)

    def encode(self, raw: bytes, source: str) -> Tokens:
        """Without special words around it: they are put between documents by whoever packs them."""
        return self.encode_all([raw], source)[0]

    def encode_all(self, raws: Sequence[bytes], source: str) -> list[Tokens]:
        """On all cores, if there are several."""
        try:
            texts = [raw.decode("utf-8") for raw in raws]
        except UnicodeDecodeError as error:
            what = f"{source} is not text: byte {error.start} is no UTF-8"
            raise FileError(f"{what}\n  leave it out, or use bytes") from None
        rows = [one.ids for one in self.theirs.encode_batch(texts, add_special_tokens=False)]
        if self.vocab <= 1 << 16:
            return [np.asarray(row, dtype=np.uint16) for row in rows]
        return [np.asarray(row, dtype=np.uint32) for row in rows]

    def decode(self, words: Sequence[int]) -> str:
        """The text of these words."""
        return str(self.theirs.decode(list(words), skip_special_tokens=False))


def tokenizer_of(name: str) -> Tokenizer:
    """By its name in a config."""
    return ByteTokenizer() if name == BYTES else FileTokenizer(name)


def kept_tokenizer(name: str, folder: Path) -> str:
    """The tokenizer of a run: the one that it names, or its own copy if that is gone or has been changed."""
    own, theirs = folder / TOKENIZER, Path(name)
    if name == BYTES or not own.is_file() or (theirs.is_file() and theirs.read_bytes() == own.read_bytes()):
        return name
    return str(own.absolute())


def keep_tokenizer(name: str, folder: Path) -> None:
    """A copy of a tokenizer.json in the folder of its run, which can then be moved."""
    if name != BYTES and Path(name).resolve() != (folder / TOKENIZER).resolve():
        (folder / TOKENIZER).write_bytes(Path(name).read_bytes())
