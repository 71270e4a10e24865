"""From text to numbers and back: bytes as they are, or a tokenizer.json of Hugging Face's.

bytes            "def" ──► 100 101 102            256 words; 0 stands between two documents
tokenizer.json   "def" ──► 4299                   needs the package `tokenizers`
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.config import names_a_file
from penstock.errors import FileError, RunError

ENDS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eot_id|>",
    "[SEP]",
)  # of a document, in known families
TOKENIZER = "tokenizer.json"  # in a Hugging Face folder, and in a run's
CONTEXT = 4096  # bytes on either side of a cut that must give the same tokens with and without it
TRIES = 64  # places that are tried before more of a text is read
TokenArray = NDArray[np.uint16] | NDArray[np.uint32]


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

    def cut(self, raw: bytes) -> int:
        """Where the beginning of a text may be cut, so that both sides encoded alone give the words of the whole.

        0: not in these bytes.
        """
        ...

    def encode(self, raw: bytes, source: str) -> TokenArray:
        """A document as words; `source` is its name in errors."""
        ...

    def encode_all(self, raws: Sequence[bytes], source: str) -> list[TokenArray]:
        """Several at once."""
        ...

    def decode(self, words: Sequence[int]) -> str:
        """Words as text; what is no text is marked."""
        ...


class ByteTokenizer:
    """Every byte is a word."""

    vocab, end = 256, 0

    def cut(self, raw: bytes) -> int:
        """Anywhere."""
        return len(raw)

    def encode(self, raw: bytes, source: str) -> TokenArray:
        """The bytes."""
        return np.frombuffer(raw, dtype=np.uint8).astype(np.uint16)

    def encode_all(self, raws: Sequence[bytes], source: str) -> list[TokenArray]:
        """One after the other."""
        return [self.encode(raw, source) for raw in raws]

    def decode(self, words: Sequence[int]) -> str:
        """The text of these bytes.

        >>> ByteTokenizer().decode([104, 105])
        'hi'
        """
        return bytes(words).decode("utf-8", errors="replace")


def _between_words(raw: bytes, begin: int, end: int) -> Iterator[int]:
    """Places after a single end of line, and before a single space, from the last to the first."""
    while begin < end:
        line, space = raw.rfind(b"\n", begin, end - 1) + 1, raw.rfind(b" ", begin, end)
        place = max(line, space)
        if place <= begin:
            return
        around = (
            raw[place - 2 : place + 1] if line > space else raw[place - 1 : place + 2]
        )  # word, white, word
        if len(around) == 3 and around[:1].strip() and around[2:].strip():
            yield place
        end = place if line > space else place - 1


class FileTokenizer:
    """A tokenizer.json."""

    def __init__(self, path: str) -> None:
        try:
            from tokenizers import Tokenizer as Theirs  # noqa: PLC0415  # optional
        except ModuleNotFoundError:
            raise RunError(
                f"{path} needs the package tokenizers: pip install 'penstock[hf]'"
            ) from None
        if not Path(path).is_file():
            raise FileError(
                f"there is no tokenizer {path}\n  data.tokenizer is bytes, or a tokenizer.json that exists"
            )
        try:
            self.theirs = Theirs.from_file(path)
        except Exception as error:  # it raises nothing more special
            raise FileError(f"{path} is no tokenizer.json: {error}") from None
        self.theirs.no_truncation()  # for models of one sentence; here a document is as long as it is
        self.theirs.no_padding()
        known = self.theirs.get_vocab(with_added_tokens=True)
        self.vocab = (
            int(max(known.values(), default=-1)) + 1
        )  # numbers that it leaves out have a place too

    @property
    def end(self) -> int | None:
        """The first of the usual ones that it knows."""
        found = (self.theirs.token_to_id(word) for word in ENDS)
        return next((int(number) for number in found if number is not None), None)

    def cut(self, raw: bytes) -> int:
        """Between two words, where the text on either side, up to CONTEXT bytes of it, gives the same tokens together
        and apart. A tokenizer that does not split text into words before it looks for tokens is not cut."""
        if self.theirs.pre_tokenizer is None:
            return 0
        places = _between_words(
            raw, len(raw) // 2, len(raw) - min(CONTEXT, len(raw) // 8)
        )
        return next(
            (place for place in islice(places, TRIES) if self._may_cut(raw, place)), 0
        )

    def _may_cut(self, raw: bytes, place: int) -> bool:
        around = (raw[max(0, place - CONTEXT) : place], raw[place : place + CONTEXT])
        left, right = (
            one.decode("utf-8", errors="ignore") for one in around
        )  # the ends may cut a letter in two
        if left[-2:].isspace() or right[:2].isspace():
            return False
        apart, whole = (
            self.theirs.encode_batch_fast([left, right], add_special_tokens=False),
            left + right,
        )
        return bool(
            apart[0].ids + apart[1].ids
            == self.theirs.encode(whole, add_special_tokens=False).ids
        )

    def encode(self, raw: bytes, source: str) -> TokenArray:
        """Without special words around it: they are put between documents by whoever packs them."""
        return self.encode_all([raw], source)[0]

    def encode_all(self, raws: Sequence[bytes], source: str) -> list[TokenArray]:
        """On all cores, if there are several."""
        try:
            texts = [raw.decode("utf-8") for raw in raws]
        except UnicodeDecodeError as error:
            raise not_text(source, error.start) from None
        rows = [
            one.ids
            for one in self.theirs.encode_batch_fast(texts, add_special_tokens=False)
        ]
        if self.vocab <= 1 << 16:
            return [np.asarray(row, dtype=np.uint16) for row in rows]
        return [np.asarray(row, dtype=np.uint32) for row in rows]

    def decode(self, words: Sequence[int]) -> str:
        """The text of these words."""
        return str(self.theirs.decode(list(words), skip_special_tokens=False))


def not_text(source: str, place: int) -> FileError:
    """The error for bytes that a tokenizer cannot read."""
    return FileError(
        f"{source} is not text: byte {place} is no UTF-8\n  leave it out, or use bytes"
    )


def tokenizer_of(name: str) -> Tokenizer:
    """By its name in a config; "auto" without a folder to start from is bytes."""
    return FileTokenizer(name) if names_a_file(name) else ByteTokenizer()


def kept_tokenizer(name: str, folder: Path) -> str:
    """The tokenizer of a run: the one that it names, or its own copy if that is gone or has been changed."""
    own, theirs = folder / TOKENIZER, Path(name)
    if (
        not names_a_file(name)
        or not own.is_file()
        or (theirs.is_file() and theirs.read_bytes() == own.read_bytes())
    ):
        return name
    return str(own.absolute())


def keep_tokenizer(name: str, folder: Path) -> None:
    """A copy of a tokenizer.json in the folder of its run, which can then be moved."""
    if names_a_file(name) and Path(name).resolve() != (folder / TOKENIZER).resolve():
        (folder / TOKENIZER).write_bytes(Path(name).read_bytes())
