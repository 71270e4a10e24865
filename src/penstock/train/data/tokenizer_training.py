"""Trains a tokenizer on the text of a config: byte pairs, as GPT-2 has them.

Every byte is a word, so no text is unknown to it. The last word ends a document.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.config import DataConfig
from penstock.errors import FileError, RunError, ShapeError
from penstock.train.data.document_end import TOKENIZER_CONFIG
from penstock.train.data.text_files import ProgressBytes, source_files, text_pieces

END_WORD = "<|endoftext|>"
MIN_VOCAB = 257  # every byte, and the end of a document


def train_tokenizer(
    data: DataConfig,
    vocab: int,
    file: Path,
    watch: ProgressBytes = lambda done, total: None,
) -> int:
    """Train a tokenizer and write it, with its end word beside it; return the number of its words."""
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
    tokenizer.train_from_iterator(_texts(data, watch), trainer)
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


def _texts(data: DataConfig, watch: ProgressBytes) -> Iterator[str]:
    """Yield all text, in pieces that fit into memory."""
    files = [file for part in data.parts for file in source_files(part)]
    total = sum(file.stat().st_size for file in files)
    before = 0
    for file in files:
        for piece in text_pieces(file, data.field, _cut_at_line):
            watch(before + piece.place, total)
            yield piece.text.decode("utf-8", "replace")
        before += file.stat().st_size


def _cut_at_line(text: bytes) -> int:
    """Words do not go over the end of a line, so a text can be cut there."""
    return text.rfind(b"\n") + 1
