"""Turns text into numbers and back: bytes as they are, or a Hugging Face tokenizer.json.

bytes            "def" ──► 100 101 102            256 words; 0 stands between two documents
tokenizer.json   "def" ──► 4299                   needs the package `tokenizers`
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.config import names_a_file
from penstock.errors import FileError, RunError
from penstock.train.data.document_end import find_end, keep_end, side_files

TOKENIZER = "tokenizer.json"  # in a Hugging Face folder, and in the folder of a run
# Bytes on either side of a cut that must give the same tokens with and without the cut.
CONTEXT_BYTES = 4096
MAX_TRIED_CUTS = 64  # before more of a text is read
TokenArray = NDArray[np.uint16] | NDArray[np.uint32]
TokenType = type[np.uint16] | type[np.uint32]


def token_type(vocab: int) -> TokenType:
    """Return the smallest type of number that holds all tokens below `vocab`."""
    return np.uint16 if vocab <= 1 << 16 else np.uint32


class Tokenizer(Protocol):
    """What the data needs of a tokenizer."""

    @property
    def vocab(self) -> int:
        """The number of words."""
        ...

    @property
    def end(self) -> int | None:
        """The word that stands between two documents; None if there is none."""
        ...

    def cut(self, raw: bytes) -> int:
        """Return where the beginning of a text may be cut in two; 0 if it may not.

        Encoding both sides alone must give the words of the whole.
        """
        ...

    def encode(self, raw: bytes, source: str) -> TokenArray:
        """Return the words of a document; `source` is its name in errors."""
        ...

    def encode_all(self, raws: Sequence[bytes], source: str) -> list[TokenArray]:
        """Encode several documents at once."""
        ...

    def decode(self, words: Sequence[int]) -> str:
        """Return words as text, with a mark for bytes that are not text."""
        ...


class ByteTokenizer:
    """Uses every byte as a word."""

    vocab = 256
    end = 0

    def cut(self, raw: bytes) -> int:
        """Cut at the end: bytes may be cut anywhere."""
        return len(raw)

    def encode(self, raw: bytes, source: str) -> TokenArray:
        """Return the bytes as words."""
        return np.frombuffer(raw, dtype=np.uint8).astype(np.uint16)

    def encode_all(self, raws: Sequence[bytes], source: str) -> list[TokenArray]:
        """Encode the documents one after the other."""
        return [self.encode(raw, source) for raw in raws]

    def decode(self, words: Sequence[int]) -> str:
        """Return the text of these bytes.

        >>> ByteTokenizer().decode([104, 105])
        'hi'
        """
        return bytes(words).decode("utf-8", errors="replace")


def _between_words(raw: bytes, begin: int, end: int) -> Iterator[int]:
    """Places after a single end of line or before a single space, from last to first."""
    while begin < end:
        line = raw.rfind(b"\n", begin, end - 1) + 1
        space = raw.rfind(b" ", begin, end)
        place = max(line, space)
        if place <= begin:
            return
        # Three bytes: the end of a word, white space, the beginning of a word.
        first = place - 2 if line > space else place - 1
        around = raw[first : first + 3]
        if len(around) == 3 and around[:1].strip() and around[2:].strip():
            yield place
        end = place if line > space else place - 1


class FileTokenizer:
    """Uses a Hugging Face tokenizer.json."""

    def __init__(self, path: str) -> None:
        try:
            from tokenizers import Tokenizer as Theirs  # noqa: PLC0415  # optional
        except ModuleNotFoundError:
            raise RunError(
                f"{path} needs the package tokenizers: pip install 'penstock[hf]'"
            ) from None
        if not Path(path).is_file():
            raise FileError(
                f"there is no tokenizer {path}\n"
                "  data.tokenizer is bytes, or a tokenizer.json that exists"
            )
        try:
            self.theirs = Theirs.from_file(path)
        except Exception as error:  # The package has no type of its own.
            raise FileError(f"{path} is not a tokenizer.json: {error}") from None
        # Truncation and padding are for models of one sentence.
        self.theirs.no_truncation()
        self.theirs.no_padding()
        # Numbers without a word also take a place in the vocabulary.
        numbers = self.theirs.get_vocab(with_added_tokens=True).values()
        self.vocab = int(max(numbers, default=-1)) + 1
        self.end = find_end(Path(path), self.theirs)

    def cut(self, raw: bytes) -> int:
        """Cut between two words, where the text gives the same tokens together and apart.

        Up to CONTEXT_BYTES bytes on either side are compared. A tokenizer that does not
        split text into words before it looks for tokens is never cut.
        """
        if self.theirs.pre_tokenizer is None:
            return 0
        margin = min(CONTEXT_BYTES, len(raw) // 8)
        places = _between_words(raw, len(raw) // 2, len(raw) - margin)
        for place in islice(places, MAX_TRIED_CUTS):
            if self._may_cut(raw, place):
                return place
        return 0

    def _may_cut(self, raw: bytes, place: int) -> bool:
        # The outer ends may cut a letter in two, which is ignored.
        before = raw[max(0, place - CONTEXT_BYTES) : place]
        after = raw[place : place + CONTEXT_BYTES]
        left = before.decode("utf-8", errors="ignore")
        right = after.decode("utf-8", errors="ignore")
        if left[-2:].isspace() or right[:2].isspace():
            return False
        apart = self.theirs.encode_batch_fast([left, right], add_special_tokens=False)
        together = self.theirs.encode(left + right, add_special_tokens=False)
        return bool(apart[0].ids + apart[1].ids == together.ids)

    def encode(self, raw: bytes, source: str) -> TokenArray:
        """Return the words of a document; the corpus adds the words between documents."""
        return self.encode_all([raw], source)[0]

    def encode_all(self, raws: Sequence[bytes], source: str) -> list[TokenArray]:
        """Encode several documents on all cores."""
        try:
            texts = [raw.decode("utf-8") for raw in raws]
        except UnicodeDecodeError as error:
            raise not_text(source, error.start) from None
        encoded = self.theirs.encode_batch_fast(texts, add_special_tokens=False)
        dtype: Any = token_type(self.vocab)
        return [np.asarray(one.ids, dtype=dtype) for one in encoded]

    def decode(self, words: Sequence[int]) -> str:
        """Return the text of these words."""
        return str(self.theirs.decode(list(words), skip_special_tokens=False))


def not_text(source: str, place: int) -> FileError:
    """Return the error for bytes that a tokenizer cannot read."""
    return FileError(
        f"{source} is not text: byte {place} is not UTF-8\n"
        "  leave it out, or set data.tokenizer=bytes"
    )


def tokenizer_of(name: str) -> Tokenizer:
    """Return the tokenizer that a config names; "auto" means bytes here.

    A file is read once, and again only if it or a file beside it that says how documents end has changed.
    """
    if not names_a_file(name):
        return ByteTokenizer()
    path = Path(name)
    states = []
    for file in (path, *side_files(path)):
        if file.is_file():
            status = file.stat()
            states.append((str(file), status.st_mtime_ns, status.st_size))
    return _read_tokenizer(name, tuple(states))


@lru_cache(maxsize=4)
def _read_tokenizer(name: str, states: tuple[tuple[str, int, int], ...]) -> Tokenizer:
    """Read a tokenizer.json. The `states` of its files are only there to tell the cache when it is out of date."""
    return FileTokenizer(name)


def kept_tokenizer(name: str, folder: Path) -> str:
    """Return the tokenizer of a run, given the one that its config names.

    It is the run's own copy if the named file is gone or has changed.
    """
    copy = folder / TOKENIZER
    if not names_a_file(name) or not copy.is_file():
        return name
    named = Path(name)
    if named.is_file() and named.read_bytes() == copy.read_bytes():
        return name
    return str(copy.absolute())


def keep_tokenizer(name: str, folder: Path) -> None:
    """Copy a tokenizer.json into the folder of its run, which can then be moved."""
    copy = folder / TOKENIZER
    if names_a_file(name) and Path(name).resolve() != copy.resolve():
        copy.write_bytes(Path(name).read_bytes())


def keep_end_word(name: str, tokenizer: Tokenizer, folder: Path) -> None:
    """Name the word that ends a document beside the copy of a run's tokenizer."""
    if isinstance(tokenizer, FileTokenizer) and tokenizer.end is not None:
        word = tokenizer.theirs.id_to_token(tokenizer.end)
        assert word is not None, "the word was found in this tokenizer"
        keep_end(Path(name), folder / TOKENIZER, word)
