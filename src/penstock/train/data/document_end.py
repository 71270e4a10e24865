"""Finds the word that ends a document, as a tokenizer and the files beside it say.

tokenizer_config.json  special_tokens_map.json      "eos_token": "</s>"
generation_config.json  config.json                 "eos_token_id": 2
tokenizer.json                                      the word that it adds after a text, a special word
                                                    whose name says so, or its only special word
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

TOKENIZER_CONFIG = "tokenizer_config.json"
WORD_FILES = (TOKENIZER_CONFIG, "special_tokens_map.json")
NUMBER_FILES = ("generation_config.json", "config.json")
# Names of special words, the best first: the end of a text, of a sentence, of a turn.
END_NAMES = (
    re.compile(r"end.?of.?(text|doc)|^</s>$|eos|eod", re.IGNORECASE),
    re.compile(r"end.?of.?sentence|\[sep\]", re.IGNORECASE),
    re.compile(r"end.?of.?turn|eot", re.IGNORECASE),
)


class Vocabulary(Protocol):
    """What is asked of a tokenizer of the package `tokenizers`."""

    def token_to_id(self, token: str) -> int | None:
        """The number of a word; None if it does not know the word."""
        ...

    def id_to_token(self, id: int) -> str | None:
        """The word with a number; None if there is none."""
        ...

    def get_added_tokens_decoder(self) -> dict[int, Any]:
        """The words that were added to the vocabulary, by number."""
        ...

    def encode(self, sequence: str, *, add_special_tokens: bool) -> Any:
        """Encode a text."""
        ...


def find_end(path: Path, words: Vocabulary) -> int | None:
    """The number of the word that ends a document; None if nothing names one."""
    for word in _words_beside(path):
        number = words.token_to_id(word)
        if number is not None:
            return int(number)
    for number in _numbers_beside(path):
        if words.id_to_token(number) is not None:
            return number
    appended = _appended(words)
    return _special(words) if appended is None else appended


def side_files(path: Path) -> list[Path]:
    """The files beside a tokenizer.json that can name the word."""
    files = [path.with_name(name) for name in (*WORD_FILES, *NUMBER_FILES)]
    return [file for file in files if file.is_file()]


def keep_end(path: Path, copy: Path, word: str) -> None:
    """Write a tokenizer_config.json beside a copy of a tokenizer, with its word."""
    content = read_json(path.with_name(TOKENIZER_CONFIG)) | {"eos_token": word}
    text = json.dumps(content, indent=2, ensure_ascii=False)
    copy.with_name(TOKENIZER_CONFIG).write_text(text, encoding="utf-8")


# ---------------------------------------------------------------- beside the tokenizer
def _words_beside(path: Path) -> Iterator[str]:
    for name in WORD_FILES:
        word = read_json(path.with_name(name)).get("eos_token")
        if isinstance(word, dict):  # as older versions of transformers wrote it
            word = word.get("content")
        if isinstance(word, str):
            yield word


def _numbers_beside(path: Path) -> Iterator[int]:
    for name in NUMBER_FILES:
        number = read_json(path.with_name(name)).get("eos_token_id")
        if isinstance(number, list) and number:
            number = number[0]
        if isinstance(number, int) and not isinstance(number, bool):
            yield number


def read_json(file: Path) -> dict[str, Any]:
    """The content of a JSON file; nothing if it is missing or is not an object."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


# ---------------------------------------------------------------- in the tokenizer
def _appended(words: Vocabulary) -> int | None:
    """The word that the tokenizer adds after a text."""
    bare = words.encode("a", add_special_tokens=False).ids
    full = words.encode("a", add_special_tokens=True).ids
    return int(full[-1]) if full and full[-1:] != bare[-1:] else None


def _special(words: Vocabulary) -> int | None:
    """A special word whose name says that it ends something, or the only special word."""
    special = {
        number: str(word.content)
        for number, word in sorted(words.get_added_tokens_decoder().items())
        if word.special
    }
    for pattern in END_NAMES:
        for number, name in special.items():
            if pattern.search(name):
                return int(number)
    return int(next(iter(special))) if len(special) == 1 else None
