"""The cache of encoded text: a file of tokens for each set of sources and each way to encode them.

    texts ─► tokenizer ─► tokens-….part ─► renamed when it is complete, with a note that says what it holds

The name of a file is a digest of its sources, so other text or another tokenizer gets another file.

A dataset of the user's own, a Python object, becomes a file of tokens that a run reads like any other text:

    texts           "a text", ...                         or {"text": "a text"}, as datasets.Dataset has them
    tokens          [5, 17, 4], ...                       or {"input_ids": [5, 17, 4]}, data.text_field = "input_ids"
    conversations   {"messages": [...]}, ...              with data.format = "chat"
      │
      ▼  one after the other, once
    dataset-4f1c….tokens      what is known about the tokens        data.sources = ["dataset-4f1c….tokens"]
    dataset-4f1c….bin         the tokens, which workers map into their memory
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from penstock.config import BYTE_TOKENIZER, DataConfig, names_a_file
from penstock.errors import FileError
from penstock.train.data.chat import (
    FIELDS,
    Conversation,
    Tally,
    conversations,
    find_template,
    pack_rows,
    padding_row,
    pieces_of,
)
from penstock.train.data.files import (
    ENCODED,
    EncodedPiece,
    ProgressBytes,
    conversations_of,
    encode,
    encode_examples,
    file_records,
    refuse_others,
    source_files,
    text_pieces,
    watched,
)
from penstock.train.data.masking import bert_words, pad_rows, segment_rows
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
            "  name it alone in data.sources, or in a table of its own"
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
        wanted |= {"seq_len": data.seq_len, "document_mask": data.document_mask}
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
    settings = f"{CACHE_VERSION}\n{kind}\n{data.text_field}\n"
    if data.instructions:
        template = find_template(data)
        text = "" if template is None else f"{template.text}{template.special}"
        settings += f"{data.seq_len}\n{text}\n"
    if data.segments:
        settings += f"{data.seq_len}\n{data.segments}\n{data.document_mask}\n"
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
    encoded: Iterator[EncodedPiece],
    vocab: int = 0,
) -> None:
    """Write the cache under another name and rename it; the note makes it complete.

    Tokens that come without a text are below `vocab`.
    """
    try:
        row.parent.mkdir(parents=True, exist_ok=True)
        part = row.with_name(f"tokens-{uuid.uuid4().hex}.part")
        facts: dict[str, object] = {}
        if data.instructions:
            pieces = _conversations(encoded, data, tokenizer, facts)
        elif data.segments:
            pieces = _segments(encoded, data, tokenizer)
        else:
            dtype = token_type(max(vocab, tokenizer.vocab))
            pieces = _plain_text(encoded, tokenizer.end, dtype, facts)
        written = _write(part, row, pieces)
        facts = {"encoding": encoding_of(data), **written, **facts}
        part.replace(row)
        note_part = part.with_suffix(".note.part")  # Other processes may write theirs.
        note_part.write_text(json.dumps(facts), encoding="utf-8")
        note_part.replace(note)
    except OSError as error:
        raise FileError(
            f"cannot write the token cache {row}: {error.strerror}\n"
            "  it is beside the run's folder: name another run.folder"
        ) from None


def _plain_text(
    encoded: Iterable[EncodedPiece],
    end_word: int | None,
    dtype: TokenType,
    facts: dict[str, object],
) -> Iterator[Conversation]:
    """Yield tokens without marks, with an end word after each document."""
    unmarked = np.zeros(0, dtype=np.uint8)
    end: Any = np.asarray([] if end_word is None else [end_word], dtype)
    text_tokens = 0
    text_bytes = 0
    for piece in encoded:
        words: Any = piece.words.astype(dtype, copy=False)
        text_tokens += len(piece.words)
        text_bytes += piece.text_bytes
        yield Conversation(words, unmarked)
        if piece.ends:
            yield Conversation(end, unmarked)
    if not text_tokens:
        raise FileError(EMPTY_TEXT)
    facts["bytes"] = text_bytes


def _conversations(
    encoded: Iterable[EncodedPiece],
    data: DataConfig,
    tokenizer: Tokenizer,
    facts: dict[str, object],
) -> Iterator[Conversation]:
    """Yield rows of conversations, and the token after the last row, which needs one."""
    tally = Tally()
    padding = tokenizer.end or 0
    found = conversations(encoded, data.seq_len, tally)
    yield from pack_rows(found, data.seq_len, padding)
    if not tally.learned:
        raise FileError(
            f"there is nothing to learn: none of {tally.conversations} conversations has an answer within "
            f"{data.seq_len} tokens\n  give other data.sources, or more data.seq_len"
        )
    yield padding_row(1, padding, token_type(tokenizer.vocab))
    facts["conversations"] = asdict(tally)


def _segments(
    encoded: Iterable[EncodedPiece], data: DataConfig, tokenizer: Tokenizer
) -> Iterator[Conversation]:
    """Yield rows of segments for a Bert, and the token after the last row."""
    words = bert_words(tokenizer, data.segments)
    found = segment_rows(encoded, words, data.segments, data.seq_len)
    fill = pack_rows if data.document_mask else pad_rows
    rows = 0
    for row in fill(found, data.seq_len, words.padding):
        rows += 1
        yield row
    if not rows:
        raise FileError(EMPTY_TEXT)
    yield padding_row(1, words.padding, token_type(words.vocab))


def file_of_marks(row: Path) -> Path:
    """The file that keeps the marks of the tokens in another one."""
    return row.with_suffix(".marks")


def _write(part: Path, row: Path, pieces: Iterable[Conversation]) -> dict[str, object]:
    """Write tokens and, beside them, their marks if they have any; return what to note down."""
    digest = hashlib.sha256()
    part_of_marks = part.with_suffix(".marks.part")
    try:
        with part.open("xb") as words_file, part_of_marks.open("xb") as marks_file:
            for words, marks in pieces:
                words_file.write(words.data)
                marks_file.write(marks.data)
                digest.update(words.data)
                digest.update(marks.data)
        facts: dict[str, object] = {
            "width": words.itemsize,
            "tokens": part.stat().st_size // words.itemsize,
            "digest": digest.hexdigest()[:16],
        }
        if len(marks):
            facts["marked"] = True
            part_of_marks.replace(file_of_marks(row))
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    finally:
        part_of_marks.unlink(missing_ok=True)
    return facts


# ---------------------------------------------------------------- what is encoded
def encode_files(
    files: Sequence[Path], data: DataConfig, tokenizer: Tokenizer, watch: ProgressBytes
) -> Iterator[EncodedPiece]:
    """Yield the words of every piece of text, or of every conversation in pieces."""
    if data.instructions:
        records = watched(files, partial(file_records, fields=FIELDS), watch)
        pieces = pieces_of(records, find_template(data))
    else:
        read = partial(text_pieces, field=data.text_field, cut=tokenizer.cut)
        pieces = watched(files, read, watch)
    return encode(pieces, data, tokenizer)


def encode_dataset(
    dataset: Iterable[Any], data: DataConfig, folder: Path, vocab: int = 0
) -> Path:
    """Write the tokens of a dataset into a folder, and return the file to name in data.sources.

    `data` says how text becomes tokens. The name of the file is a digest of its content. Tokens that a dataset brings
    along must be below `vocab`, or else below the number of the tokenizer's words.
    """
    tokenizer = tokenizer_of(data.tokenizer)
    vocab = max(vocab, tokenizer.vocab)
    refuse_others(dataset)
    if data.instructions:
        pieces = pieces_of(conversations_of(dataset), find_template(data))
        encoded = encode(pieces, data, tokenizer)
    else:
        encoded = encode_examples(dataset, data, tokenizer, vocab)
    note = folder / f"dataset-{uuid.uuid4().hex}{ENCODED}"
    row = note.with_suffix(".bin")
    fill_cache(row, note, data, tokenizer, encoded, vocab)
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
