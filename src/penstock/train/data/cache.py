"""The cache of encoded text: a file of tokens for each set of sources and each way to encode them.

    texts ─► tokenizer ─► tokens-….part ─► renamed when it is complete, with a note that says what it holds

The name of a file is a digest of its sources, so other text or another tokenizer gets another file.

A dataset of the user's own, a Python object, becomes a file of tokens that a run reads like any other text:

    texts           "a text", ...                         or {"text": "a text"}, as datasets.Dataset has them
    tokens          [5, 17, 4], ...                       or {"input_ids": [5, 17, 4]} with data.field = "input_ids"
    conversations   {"messages": [...]}, ...              with data.instructions
      │
      ▼  one after the other, once
    dataset-4f1c….tokens      what is known about the tokens        data.sources = ["dataset-4f1c….tokens"]
    dataset-4f1c….bin         the tokens, which workers map into their memory
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable, Iterable
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from penstock.config import BYTE_TOKENIZER, DataConfig, names_a_file
from penstock.errors import FileError
from penstock.train.data.chat import (
    Conversation,
    Tally,
    encode_records,
    find_template,
    pack_rows,
    padding_row,
)
from penstock.train.data.files import (
    ENCODED,
    DatasetTexts,
    EncodedPiece,
    Record,
    Texts,
    refuse_others,
    source_files,
)
from penstock.train.data.masking import RowLayout, bert_words, pad_rows, segment_rows
from penstock.train.data.tokenizer import (
    Tokenizer,
    TokenType,
    side_files,
    token_type,
    tokenizer_of,
)

CACHE_VERSION = 3

EMPTY_TEXT = "the text is empty\n  give some in data.sources"


def cached_tokens(data: DataConfig, cache: Path) -> tuple[Path, Path]:
    """Return the two files in which the tokens of a config are cached: tokens and facts."""
    return cache_files(data, source_files(data), cache)


def cache_files(data: DataConfig, files: list[Path], cache: Path) -> tuple[Path, Path]:
    """Return the files with the tokens of these texts and what is known about them."""
    encoded = [file for file in files if file.suffix == ENCODED]
    if encoded and len(files) > 1:
        raise FileError(
            f"{encoded[0]} is an encoded dataset, and cannot be joined with other files\n"
            "  name it alone in data.sources, or as a source of its own in data.mixture"
        )
    if encoded:
        _check_encoding(encoded[0], data)
        return encoded[0].with_suffix(".bin"), encoded[0]
    name = _cache_name(data, files)
    return cache / f"{name}.bin", cache / f"{name}.json"


def encoding_of(data: DataConfig) -> dict[str, object]:
    """What encoded tokens depend on besides the text; a run with other values cannot use them."""
    wanted: dict[str, object] = {
        "tokenizer": _describe_tokenizer(data),
        "instructions": data.instructions,
        "segments": data.segments,
    }
    if data.marked:  # Rows are filled while text is encoded.
        wanted |= {"tokens": data.tokens, "separate": data.separate}
    return wanted


def _check_encoding(note: Path, data: DataConfig) -> None:
    """Refuse an encoded dataset that was made for other settings."""
    try:
        made_for = json.loads(note.read_text(encoding="utf-8")).get("encoding", {})
    except (OSError, ValueError, AttributeError):
        raise FileError(f"{note} is not the note of an encoded dataset") from None
    wanted = encoding_of(data)
    for key in {**made_for, **wanted}:
        theirs, ours = made_for.get(key), wanted.get(key)
        if theirs != ours:
            raise FileError(
                f"{note} was encoded with data.{key} = {theirs}, but here it is {ours}\n"
                "  encode the dataset again, or give the same value"
            )


def tokenizer_name(data: DataConfig) -> str:
    """Return the file of the tokenizer, or the name of the tokenizer of bytes."""
    return data.tokenizer if names_a_file(data.tokenizer) else BYTE_TOKENIZER


def _describe_tokenizer(data: DataConfig) -> str:
    """The tokenizer by its content, since every run has a copy of its file."""
    name = tokenizer_name(data)
    if not names_a_file(name):
        return name
    try:
        content = Path(name).read_bytes()
    except OSError as error:
        raise FileError(f"cannot read {name}: {error.strerror}") from None
    return f"a file with the digest {hashlib.sha256(content).hexdigest()[:16]}"


def _cache_name(data: DataConfig, files: list[Path]) -> str:
    """A digest of the names, sizes and times of the sources, and of the tokenizer.

    It does not depend on their content, since the cache exists to avoid reading that.
    """
    tokenizer = tokenizer_name(data)
    # The path of a tokenizer may be relative to the working directory. Its file is below.
    kind = "file" if names_a_file(tokenizer) else tokenizer
    settings = f"{CACHE_VERSION}\n{kind}\n{data.field}\n"
    if data.instructions:
        template = find_template(data)
        text = "" if template is None else f"{template.text}{template.special}"
        settings += f"{data.tokens}\n{text}\n"
    if data.segments:
        settings += f"{data.tokens}\n{data.segments}\n{data.separate}\n"
    digest = hashlib.sha256(settings.encode())
    sources = [*files]
    if names_a_file(tokenizer):
        sources += [Path(tokenizer), *side_files(Path(tokenizer))]
    for file in sources:
        try:
            status = file.stat()
        except OSError as error:
            raise FileError(f"cannot read {file}: {error.strerror}") from None
        entry = f"{file.resolve()}\n{status.st_size}\n{status.st_mtime_ns}\n"
        digest.update(entry.encode("utf-8", "surrogateescape"))
    return f"tokens-{digest.hexdigest()[:16]}"


def is_complete_cache(row: Path, note: Path) -> bool:
    """Whether the cache exists and is as long as its note says."""
    try:
        facts = json.loads(note.read_text(encoding="utf-8"))
        expected = facts["tokens"] * facts["width"]
        marked = facts.get("marked", "conversations" in facts)
        if marked and file_of_marks(row).stat().st_size != facts["tokens"]:
            return False
        return row.stat().st_size == expected and bool(facts["digest"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def fill_cache(
    row: Path,
    note: Path,
    data: DataConfig,
    tokenizer: Tokenizer,
    texts: Texts,
    vocab: int = 0,
) -> None:
    """Write the cache under another name and rename it; the note makes it complete.

    Tokens that come without a text are below `vocab`.
    """
    try:
        row.parent.mkdir(parents=True, exist_ok=True)
        part = row.with_name(f"tokens-{uuid.uuid4().hex}.part")
        facts: dict[str, object] = {"encoding": encoding_of(data)}
        if data.instructions:
            facts |= _write_conversations(part, row, texts.records(), data, tokenizer)
        elif data.segments:
            words = bert_words(tokenizer, data.segments)
            dtype = token_type(words.vocab)
            layout = RowLayout(words, data.segments, data.tokens, dtype)
            facts |= _write_segments(part, row, texts.encoded(), layout, data.separate)
        else:
            dtype = token_type(max(vocab, tokenizer.vocab))
            facts |= _write_tokens(part, texts.encoded(), tokenizer.end, dtype)
        part.replace(row)
        note_part = part.with_suffix(".note.part")  # Other processes may write theirs.
        note_part.write_text(json.dumps(facts), encoding="utf-8")
        note_part.replace(note)
    except OSError as error:
        raise FileError(
            f"cannot write the token cache {row}: {error.strerror}\n"
            "  data.cache names its folder"
        ) from None


def _write_tokens(
    file: Path, encoded: Iterable[EncodedPiece], end_word: int | None, dtype: TokenType
) -> dict[str, object]:
    """Write tokens with an end word after each document; return what to note down."""
    end = np.asarray([] if end_word is None else [end_word], dtype)
    digest = hashlib.sha256()
    text_tokens = 0
    all_tokens = 0
    text_bytes = 0
    with file.open("xb") as opened:
        try:
            for piece in encoded:
                words = piece.words.astype(dtype, copy=False)
                text_tokens += len(words)
                text_bytes += piece.text_bytes
                for array in (words, end) if piece.ends else (words,):
                    opened.write(array.data)
                    digest.update(array.data)
                    all_tokens += len(array)
            if not text_tokens:
                raise FileError(EMPTY_TEXT)
        except BaseException:
            file.unlink()
            raise
    return {
        "width": end.itemsize,
        "tokens": all_tokens,
        "digest": digest.hexdigest()[:16],
        "bytes": text_bytes,
    }


def file_of_marks(row: Path) -> Path:
    """The file that keeps the marks of the tokens in another one."""
    return row.with_suffix(".marks")


def _write_conversations(
    part: Path,
    row: Path,
    records: Iterable[Record],
    data: DataConfig,
    tokenizer: Tokenizer,
) -> dict[str, object]:
    """Write rows of conversations and, beside them, their marks; return what to note down."""
    tally = Tally()
    padding = tokenizer.end or 0
    encoded = encode_records(
        records, tokenizer, find_template(data), data.tokens, tally
    )
    rows = pack_rows(encoded, data.tokens, padding)

    def complain() -> None:
        if not tally.learned:
            raise FileError(
                f"there is nothing to learn: none of {tally.conversations} conversations has an answer within "
                f"{data.tokens} tokens\n  give other data.sources, or more data.tokens"
            )

    last = padding_row(1, padding, token_type(tokenizer.vocab))
    facts = _write_rows(part, row, rows, last, complain)
    return {**facts, "conversations": asdict(tally)}


def _write_segments(
    part: Path,
    row: Path,
    encoded: Iterable[EncodedPiece],
    layout: RowLayout,
    packed: bool,
) -> dict[str, object]:
    """Write rows of segments for a Bert and, beside them, their marks; return what to note down."""
    examples = segment_rows(encoded, layout)
    padding = layout.words.padding
    fill = pack_rows if packed else pad_rows
    rows = fill(examples, layout.length, padding)
    return _write_rows(part, row, rows, padding_row(1, padding, layout.dtype))


def _write_rows(
    part: Path,
    row: Path,
    rows: Iterable[Conversation],
    last: Conversation,
    complain: Callable[[], None] = lambda: None,
) -> dict[str, object]:
    """Write rows and, beside them, their marks. The `last` token comes after the last row, which needs one.

    `complain` may raise an error once all rows are made.
    """
    digest = hashlib.sha256()
    tokens = 0
    part_of_marks = part.with_suffix(".marks.part")
    try:
        with part.open("xb") as words_file, part_of_marks.open("xb") as marks_file:
            for packed in chain(rows, (last,)):
                words_file.write(packed.words.data)
                marks_file.write(packed.marks.data)
                digest.update(packed.words.data)
                digest.update(packed.marks.data)
                tokens += packed.tokens
        complain()
        if tokens == last.tokens:
            raise FileError(EMPTY_TEXT)
        part_of_marks.replace(file_of_marks(row))
    except BaseException:
        part.unlink(missing_ok=True)
        part_of_marks.unlink(missing_ok=True)
        raise
    return {
        "width": last.words.itemsize,
        "tokens": tokens,
        "digest": digest.hexdigest()[:16],
        "marked": True,
    }


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
