"""Turns text into numbers and back: bytes as they are, or a Hugging Face tokenizer.json.

bytes            "def" ──► 100 101 102            256 words; 0 stands between two documents
tokenizer.json   "def" ──► 4299                   needs the package `tokenizers`

The word that ends a document follows from the tokenizer and the files beside it:

tokenizer_config.json  special_tokens_map.json      "eos_token": "</s>"
generation_config.json  config.json                 "eos_token_id": 2
tokenizer.json                                      the word that it adds after a text, a special word
                                                    whose name says so, or its only special word
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.config import names_a_file
from penstock.errors import FileError, RunError, ShapeError

TOKENIZER = "tokenizer.json"  # in a Hugging Face folder, and in the folder of a run
TOKENIZER_CONFIG = "tokenizer_config.json"
WORD_FILES = (TOKENIZER_CONFIG, "special_tokens_map.json")
NUMBER_FILES = ("generation_config.json", "config.json")
# Names of special words, the best first: the end of a text, of a sentence, of a turn.
END_NAMES = (
    re.compile(r"end.?of.?(text|doc)|^</s>$|eos|eod", re.IGNORECASE),
    re.compile(r"end.?of.?sentence|\[sep\]", re.IGNORECASE),
    re.compile(r"end.?of.?turn|eot", re.IGNORECASE),
)
END_WORD = "<|endoftext|>"  # of tokenizers that are trained here
MIN_VOCAB = 257  # every byte, and the end of a document
# Bytes on either side of a cut that must give the same tokens with and without the cut.
CONTEXT_BYTES = 4096
MAX_TRIED_CUTS = 64  # before more of a text is read
TokenArray = NDArray[np.uint16] | NDArray[np.uint32]
TokenType = type[np.uint16] | type[np.uint32]


def token_type(vocab: int) -> TokenType:
    """Return the smallest type of number that holds all tokens below `vocab`."""
    return np.uint16 if vocab <= 1 << 16 else np.uint32


class ByteTokenizer:
    """Uses every byte as a word."""

    vocab = 256
    end: int | None = 0
    named: Mapping[str, str] = MappingProxyType({})

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

    def number(self, words: Iterable[str]) -> int | None:
        """Return None: no byte stands for a special word."""
        return None


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
        self.path = Path(path)
        # Special words by their names, such as bos_token.
        self.named = dict(words_beside(self.path))
        # The word that stands between two documents; None if there is none.
        self.end = self._find_end()

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

    def number(self, words: Iterable[str]) -> int | None:
        """Return the number of the first of these words that there is."""
        for word in words:
            number = self.theirs.token_to_id(word)
            if number is not None:
                return int(number)
        return None

    # ------------------------------------------------------------ the word that ends a document
    def _find_end(self) -> int | None:
        """The number of the word that ends a document; None if nothing names one."""
        named = [word for name, word in words_beside(self.path) if name == "eos_token"]
        found = self.number(reversed(named))
        if found is not None:
            return found
        for name in NUMBER_FILES:
            number = read_json(self.path.with_name(name)).get("eos_token_id")
            if isinstance(number, list) and number:
                number = number[0]
            if not isinstance(number, int) or isinstance(number, bool):
                continue
            if self.theirs.id_to_token(number) is not None:
                return number
        bare = self.theirs.encode("a", add_special_tokens=False).ids
        full = self.theirs.encode("a", add_special_tokens=True).ids
        if full and full[-1:] != bare[-1:]:
            return int(full[-1])
        return self._special_end()

    def _special_end(self) -> int | None:
        """A special word whose name says that it ends something, or the only special word."""
        special = {
            number: str(word.content)
            for number, word in sorted(self.theirs.get_added_tokens_decoder().items())
            if word.special
        }
        for pattern in END_NAMES:
            for number, name in special.items():
                if pattern.search(name):
                    return int(number)
        return int(next(iter(special))) if len(special) == 1 else None


Tokenizer: TypeAlias = ByteTokenizer | FileTokenizer


def not_text(source: str, place: int) -> FileError:
    """Return the error for bytes that a tokenizer cannot read."""
    return FileError(
        f"{source} is not text: byte {place} is not UTF-8\n"
        "  leave it out, or set data.tokenizer=bytes"
    )


def side_files(path: Path) -> list[Path]:
    """The files beside a tokenizer.json that can say what its words mean."""
    files = [path.with_name(name) for name in (*WORD_FILES, *NUMBER_FILES)]
    return [file for file in files if file.is_file()]


def words_beside(path: Path) -> Iterator[tuple[str, str]]:
    """The special words that the files beside a tokenizer name, such as ("eos_token", "</s>"), the best file last."""
    for file in reversed(WORD_FILES):
        for name, word in read_json(path.with_name(file)).items():
            # Older versions of transformers wrote an object.
            text = word.get("content") if isinstance(word, dict) else word
            if name.endswith("_token") and isinstance(text, str):
                yield name, text


def read_json(file: Path) -> dict[str, Any]:
    """The content of a JSON file; nothing if it is missing or is not an object."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def tokenizer_of(name: str) -> Tokenizer:
    """Return the tokenizer that a config names; "auto" means bytes here.

    A file is read once, and again only if it or a file beside it that says how documents end has changed.
    """
    if not names_a_file(name):
        return ByteTokenizer()
    path = Path(name)
    files = [path, *side_files(path)] if path.is_file() else []
    stats = [(file, file.stat()) for file in files]
    states = [(str(file), stat.st_mtime_ns, stat.st_size) for file, stat in stats]
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
    """Copy a tokenizer.json into the folder of its run, which can then be moved, with the word that ends a document."""
    tokenizer = tokenizer_of(name)
    if not isinstance(tokenizer, FileTokenizer):
        return
    copy = folder / TOKENIZER
    if tokenizer.path.resolve() != copy.resolve():
        copy.write_bytes(tokenizer.path.read_bytes())
    if tokenizer.end is not None:
        beside = read_json(tokenizer.path.with_name(TOKENIZER_CONFIG))
        beside["eos_token"] = tokenizer.theirs.id_to_token(tokenizer.end)
        text = json.dumps(beside, indent=2, ensure_ascii=False)
        copy.with_name(TOKENIZER_CONFIG).write_text(text, encoding="utf-8")


def train_tokenizer(texts: Iterable[str], vocab: int, file: Path) -> int:
    """Train byte pairs on texts, as GPT-2 has them, and write them to a file; return the number of words.

    Every byte is a word, so no text is unknown to it. The last word ends a document; a file beside it says so.
    """
    if vocab < MIN_VOCAB:
        raise ShapeError(
            f"a vocabulary must have at least {MIN_VOCAB} words, not {vocab}: "
            "one for each byte and one that ends a document"
        )
    try:
        import tokenizers  # noqa: PLC0415  # an optional extra
    except ModuleNotFoundError:
        raise RunError(
            "training a tokenizer needs tokenizers, which is not installed: pip install tokenizers"
        ) from None
    pieces: Any = tokenizers.pre_tokenizers
    tokenizer: Any = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = pieces.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab - 1,
        initial_alphabet=pieces.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([END_WORD])
    beside = file.parent / TOKENIZER_CONFIG
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_WORD}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(file))
        beside.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    except Exception as error:  # tokenizers raises plain exceptions for files
        raise FileError(f"cannot write {file}: {error}") from None
    return int(tokenizer.get_vocab_size())
