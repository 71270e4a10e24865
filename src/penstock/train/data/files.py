"""Text as it is found: files, folders, lines of JSON, tables, and datasets of the user's own.

    a.txt ─────────────────────────────────► pieces ──┐
    b.jsonl  c.parquet  a dataset ──► records ┤       ├──► words of every piece
                                              └───────┘
                                              └──────────► conversations (`penstock.train.data.chat`)

A text is a whole file, one field of each line of a .jsonl file or one column of each row of a table. Long ones are cut
where that changes no words. A few megabytes are in memory at a time, however large a file or a dataset is.
"""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from glob import glob
from io import BytesIO
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple, TypeVar

import numpy as np

from penstock.config import DataConfig
from penstock.errors import FileError
from penstock.train.data.tokenizer import (
    TokenArray,
    Tokenizer,
    not_text,
    token_type,
)

SKIPPED_FOLDERS = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "lib2to3",
    "config-stdlib",
}

DATASET_DICT = "dataset_dict.json"  # written by the library `datasets`

PIECE_BYTES = 1 << 22  # encoded at once

ITEM_BYTES = 256  # of memory that a piece needs besides its text

DATASET = "the dataset"  # its name in errors

SENTENCE_END = re.compile(rb"[.!?]+(?=[ \t])|\n+")

UNPACK: dict[str, Callable[[BinaryIO], AbstractContextManager[Any]]] = {
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
}

READABLE_KINDS = (
    "Penstock reads text and .jsonl, also as .gz, .bz2 or .xz, and .parquet and .arrow"
)

TABLE = (
    "a table: write its texts as lines of JSON, for example with "
    "pandas.read_orc(...).to_json('text.jsonl', orient='records', lines=True)"
)

ENCODED = (
    ".tokens"  # the note of text that is encoded already (`penstock.train.data.cache`)
)

TABLE_KINDS = (".parquet", ".arrow", ".feather")

ROWS_AT_ONCE = 256  # of a table

RECORDS = (".jsonl", *TABLE_KINDS)  # files that hold records rather than plain text

ARCHIVE = "an archive: unpack it first"

BINARY = {".orc": TABLE}

BINARY |= dict.fromkeys(
    (".zst", ".zip", ".tar", ".tgz", ".7z", ".lz4", ".br", ".rar"), ARCHIVE
)

BINARY |= dict.fromkeys(
    (
        ".bin",
        ".idx",
        ".npy",
        ".npz",
        ".pt",
        ".pth",
        ".pkl",
        ".safetensors",
        ".pdf",
        ".docx",
        ".h5",
    ),
    f"not text: {READABLE_KINDS}",
)

MAGIC = {  # the first bytes of files that are not text
    b"PAR1": "a Parquet table",
    b"ARROW1": "an Arrow table",
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
    b"\x1f\x8b": "compressed by gzip",
    b"BZh9": "compressed by bzip2",
    b"\xfd7zXZ": "compressed by xz",
    b"PK\x03\x04": "a zip archive",
    b"%PDF-": "a PDF",
}

# Of the files that are read from folders.
ENDINGS: tuple[str, ...] = (
    *(".txt", ".md", ".py", ".jsonl", ".txt.gz", ".jsonl.gz"),
    *(".parquet", ".arrow"),
)
TRAIN_SPLIT = "train"  # of a folder that DatasetDict.save_to_disk wrote
ProgressBytes = Callable[[int, int], None]  # bytes read, and bytes in all


def source_files(data: DataConfig) -> list[Path]:
    """Return every file of a config's sources, with folders in the order of names.

    Raises FileError for a source that is missing, empty or not text.
    """
    if not data.sources and data.instructions:
        raise FileError(
            "data.format = chat needs conversations\n  name their files in data.sources"
        )
    if not data.sources:
        return sorted(_walk(Path(sysconfig.get_path("stdlib")), (".py",)))
    endings = ENDINGS
    if data.instructions:  # Beside them there may be a README.
        endings = tuple(one for one in endings if _kind(Path(f"a{one}")) in RECORDS)
    files: list[Path] = []
    for source in data.files:
        files += _files_of(source, endings)
    for file in files:
        kind = _kind(file)
        if kind in BINARY:
            raise FileError(f"{file} is {BINARY[kind]}")
        if data.instructions and kind not in (*RECORDS, ENCODED):
            raise FileError(
                f"{file} is plain text, but data.format = chat asks for conversations\n"
                "  write them as lines of JSON (.jsonl) or as a table (.parquet, .arrow)"
            )
    return files


def _files_of(source: str, endings: tuple[str, ...]) -> list[Path]:
    if not source.strip():
        raise FileError(
            "data.sources has a source without a name\n  name files or folders, "
            "or give an empty list for Python's own standard library"
        )
    path = Path(source).expanduser()
    if path.is_file():
        return [path]
    matches = [Path(one) for one in sorted(glob(str(path), recursive=True))]
    if matches and not path.exists():
        return [one for one in matches if one.is_file()]
    if not path.is_dir():
        raise FileError(
            f"cannot read {source}: there is no such file or folder\n  see data.sources"
        )
    if (path / DATASET_DICT).is_file():
        # DatasetDict.save_to_disk wrote it; the other splits are for tests, not for training.
        splits = sorted(one.name for one in path.iterdir() if one.is_dir())
        if TRAIN_SPLIT not in splits:
            raise FileError(
                f"the dataset {path} has no split {TRAIN_SPLIT!r}; it has {', '.join(splits)}\n"
                f"  name the folder of another one in data.sources, such as {path / splits[0]}"
            )
        path /= TRAIN_SPLIT
    files = sorted(_walk(path, endings, everything=True))
    if not files:
        raise FileError(
            f"the folder {source} has no file that ends in {' '.join(endings)}\n"
            f"  name another folder in data.sources, or files with a pattern, such as {source}/*.rst"
        )
    return files


def _walk(
    folder: Path, endings: tuple[str, ...], everything: bool = False
) -> Iterator[Path]:
    def unreadable(error: OSError) -> None:
        raise FileError(
            f"cannot read {error.filename}: {error.strerror}\n  see data.sources"
        )

    for parent, folders, names in os.walk(folder, onerror=unreadable):
        folders[:] = sorted(
            name for name in folders if everything or name not in SKIPPED_FOLDERS
        )
        for name in names:
            if name.endswith(endings):
                yield Path(parent) / name


class Record(NamedTuple):
    """A line of JSON, a row of a table or an example of a dataset, and its place."""

    content: Any
    where: str
    read: int = 0  # bytes of the file that have been read


class Piece(NamedTuple):
    """A document, or as much of it as is encoded at once."""

    text: bytes
    ends: bool  # whether the document ends with this piece
    read: int  # bytes of the file that have been read
    where: str  # its file, and its line or row there
    before: int = 0  # bytes of the document before this piece
    learned: bool = False  # in a conversation
    closed: bool = False  # whether the end word of the tokenizer belongs to this piece


P = TypeVar("P", Record, Piece)


class EncodedPiece(NamedTuple):
    """The words of a piece."""

    words: TokenArray
    ends: bool  # whether the document ends with this piece
    text_bytes: int = 0  # 0 if there was no text, only tokens
    learned: bool = False  # in a conversation


CutText = Callable[[bytes], int]  # where a text may be cut in two; 0 if it may not yet


# ---------------------------------------------------------------- files
def watched(
    files: Sequence[Path], read: Callable[[Path], Iterator[P]], watch: ProgressBytes
) -> Iterator[P]:
    """Yield what is in files, and say every few megabytes how much has been read."""
    sizes = [file.stat().st_size for file in files]
    begin = 0
    for file, size in zip(files, sizes, strict=True):
        told = 0
        for one in read(file):
            yield one
            if one.read - told >= PIECE_BYTES:
                told = one.read
                watch(begin + told, sum(sizes))
        begin += size
        watch(begin, sum(sizes))


def plain_texts(
    data: DataConfig, watch: ProgressBytes = lambda done, total: None
) -> Iterator[str]:
    """Yield all text of a config, in pieces that fit into memory and end with a line."""
    files = [file for part in data.parts for file in source_files(part)]
    # Words do not go over the end of a line, so a text can be cut there.
    read = partial(
        text_pieces, field=data.text_field, cut=lambda text: text.rfind(b"\n") + 1
    )
    for piece in watched(files, read, watch):
        yield piece.text.decode("utf-8", "replace")


def text_pieces(file: Path, field: str, cut: CutText) -> Iterator[Piece]:
    """Yield the texts of a file, cut where `cut` allows it."""
    if file.suffix == ENCODED:
        raise FileError(f"{file} holds tokens, not text")
    if _kind(file) in RECORDS:
        for record in file_records(file, (field,), text=True):
            text = _text_of(record, field)
            place = record.read
            yield from cut_up(BytesIO(text), cut, lambda: place, record.where)  # noqa: B023
        return
    with _opened(file) as (opened, raw):
        for piece in cut_up(opened, cut, raw.tell, str(file)):
            _check_text(piece, file)
            yield piece


@contextmanager
def _opened(file: Path) -> Iterator[tuple[IO[bytes], BinaryIO]]:
    """Open a file: its content, unpacked, and the file itself, which knows how much has been read."""
    unpack = UNPACK.get(file.suffix, nullcontext)
    try:
        with file.open("rb") as raw, unpack(raw) as opened:
            yield opened, raw
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        raise FileError(
            f"cannot unpack {file}: {error}\n"
            "  it is damaged, or was not written completely"
        ) from None
    except OSError as error:
        raise FileError(
            f"cannot read {file}: {error.strerror or error}\n  see data.sources"
        ) from None


def _kind(file: Path) -> str:
    """The suffix of a file without its compression: .jsonl for a.jsonl.gz."""
    if file.suffix in UNPACK:
        file = file.with_suffix("")
    return file.suffix.lower()


def cut_up(
    opened: IO[bytes], cut: CutText, place: Callable[[], int], where: str
) -> Iterator[Piece]:
    """Yield a document in pieces. Where it cannot be cut, read twice as much."""
    text = b""
    size = PIECE_BYTES // 4
    before = 0
    while more := opened.read(size):
        text += more
        end = cut(text) if len(text) >= size else 0
        if end:
            yield Piece(text[:end], False, place(), where, before)
            text = text[end:]
            before += end
            size = PIECE_BYTES // 4
        else:
            size = len(text)
    yield Piece(text, True, place(), where, before)


def _check_text(piece: Piece, file: Path) -> None:
    """Raise FileError if a file is not text."""
    for first_bytes, kind in MAGIC.items():
        if not piece.before and piece.text.startswith(first_bytes):
            raise FileError(
                f"{file} is {kind}, whatever its name says\n  {READABLE_KINDS}"
            )
    zero = piece.text.find(b"\0")
    if zero >= 0:
        raise FileError(
            f"{file} is not text: byte {piece.before + zero} is zero\n"
            f"  {READABLE_KINDS}; text in UTF-16 must be converted to UTF-8"
        )


# ---------------------------------------------------------------- lines of JSON and rows of tables
def file_records(
    file: Path, fields: Sequence[str], text: bool = False
) -> Iterator[Record]:
    """Yield the objects of a .jsonl file, or the rows of a table with those of these columns that it has.

    With `text`, the one field holds texts, and rows without a text are left out.
    """
    if _kind(file) in TABLE_KINDS:
        size = file.stat().st_size
        number = 0
        for batch, share in _read_batches(file, fields, text):
            for row in batch.to_pylist():
                number += 1
                if not text or row[fields[0]] is not None:
                    yield Record(row, f"{file}, row {number}", int(share * size))
        return
    with _opened(file) as (opened, raw):
        for number, line in enumerate(opened, start=1):
            if line.strip():
                where = f"{file}:{number}"
                yield Record(_entry(line, where), where, raw.tell())


def _read_batches(
    file: Path, fields: Sequence[str], text: bool
) -> Iterator[tuple[Any, float]]:
    """Yield some rows of a table at a time, with these columns, and the share of the rows that have been read."""
    try:
        import pyarrow  # noqa: PLC0415  # an optional extra
        from pyarrow import parquet  # noqa: PLC0415
    except ModuleNotFoundError:
        raise FileError(
            f"{file} is a table, and reading it needs pyarrow, which is not installed: pip install pyarrow"
        ) from None
    try:
        if file.suffix.lower() == ".parquet":
            # With pre_buffer, which is the default, Arrow keeps all that it has read until the end of the file.
            with parquet.ParquetFile(file, pre_buffer=False) as table:
                columns = _columns(file, table.schema_arrow, fields, text)
                done = 0
                for batch in table.iter_batches(ROWS_AT_ONCE, columns=columns):
                    done += len(batch)
                    yield batch, done / table.metadata.num_rows
            return
        with (
            pyarrow.memory_map(str(file)) as mapped,
            _open_arrow(pyarrow, mapped) as table,
        ):
            columns = _columns(file, table.schema, fields, text)
            count = getattr(table, "num_record_batches", None)
            batches = table if count is None else map(table.get_batch, range(count))
            for batch in batches:
                for begin in range(0, len(batch), ROWS_AT_ONCE):
                    yield batch.slice(begin, ROWS_AT_ONCE).select(columns), 0.0
    except pyarrow.ArrowException as error:
        reason = str(error).strip().splitlines()[0]
        raise FileError(f"{file} is not a table, or is damaged: {reason}") from None


def _open_arrow(pyarrow: Any, mapped: Any) -> Any:
    """Open Arrow's file format, or else the stream that `datasets` writes."""
    try:
        return pyarrow.ipc.open_file(mapped)
    except pyarrow.ArrowInvalid:
        mapped.seek(0)
        return pyarrow.ipc.open_stream(mapped)


def _columns(file: Path, schema: Any, fields: Sequence[str], text: bool) -> list[str]:
    """Those of these columns that a table has; a column of texts must hold text."""
    found = [field for field in fields if field in schema.names]
    if not found:
        wanted = " or ".join(map(repr, fields))
        hint = "\n  name the column in data.text_field" if text else ""
        raise FileError(
            f"{file} has no column {wanted}; it has {few(schema.names)}{hint}"
        )
    kind = str(schema.field(found[0]).type)
    if text and kind not in ("string", "large_string", "string_view"):
        raise FileError(
            f"{file}: the column {found[0]!r} does not hold text, but {kind}\n"
            "  name another column in data.text_field"
        )
    return found


def _entry(line: bytes, where: str) -> dict[str, Any]:
    try:
        entry = json.loads(line.rstrip())
    except json.JSONDecodeError as error:
        raise FileError(
            f"{where}:{error.colno}: this line is not JSON: {error.msg}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise FileError(f"{where}: this line is not JSON: {error}") from None
    if not isinstance(entry, dict):
        raise FileError(
            f"{where}: this line is not a JSON object\n"
            "  a document is an object with its text under a name"
        )
    return entry


def _text_of(record: Record, field: str) -> bytes:
    entry, where = record.content, record.where
    if field not in entry:
        raise FileError(
            f"{where}: this line has no text under {field!r}; it has {few(entry)}\n"
            "  name the field in data.text_field"
        )
    text = entry[field]
    if not isinstance(text, str):
        raise FileError(
            f"{where}: the value of {field!r} is not text: {json.dumps(text)[:40]}\n"
            "  put it in quotes, or leave the line out"
        )
    return text.encode("utf-8", "surrogatepass")


# ---------------------------------------------------------------- datasets
def _examples(dataset: Iterable[Any]) -> Iterator[Record]:
    for number, one in enumerate(dataset):
        yield Record(one, f"example {number} of {DATASET}")


def conversations_of(dataset: Iterable[Any]) -> Iterator[Record]:
    """Yield the conversations of a dataset."""
    for record in _examples(dataset):
        if not isinstance(record.content, Mapping):
            raise FileError(
                f"{record.where} is not a mapping with `messages`, or with `prompt` and `completion`, "
                f"but {_in_words(record.content)}\n  set data.format=text to train on plain text"
            )
        yield record


def encode_examples(
    dataset: Iterable[Any], data: DataConfig, tokenizer: Tokenizer, vocab: int
) -> Iterator[EncodedPiece]:
    """Encode texts, or take tokens as they are; the first example says which of them they are."""
    values = _values(dataset, data.text_field)
    first = next(values, None)
    if first is None:
        return
    values = chain((first,), values)
    if isinstance(first.content, str):
        pieces = chain.from_iterable(_cut_example(one, tokenizer) for one in values)
        yield from encode(pieces, data, tokenizer)
        return
    if data.segments:
        raise FileError(
            f"data.format = {data.format} cuts texts into sentences, but {DATASET} brings tokens\n"
            "  hand over texts, or set data.format=text"
        )
    for one in values:
        yield _check_tokens(one, tokenizer, vocab)


def _values(dataset: Iterable[Any], field: str) -> Iterator[Record]:
    """Yield the value of each example; those without a value are left out."""
    for record in _examples(dataset):
        value = record.content
        if isinstance(value, Mapping):
            if field not in value:
                raise FileError(
                    f"{record.where} has no {field!r}; it has {few(value)}\n  name the field in data.text_field"
                )
            value = value[field]
        if value is not None:
            yield record._replace(content=value)


def _cut_example(example: Record, tokenizer: Tokenizer) -> Iterator[Piece]:
    text, where, _ = example
    if not isinstance(text, str):
        raise FileError(f"{where} is not text, as those before, but {_in_words(text)}")
    raw = BytesIO(text.encode("utf-8", "replace"))
    return cut_up(raw, tokenizer.cut, int, where)


def _check_tokens(example: Record, tokenizer: Tokenizer, vocab: int) -> EncodedPiece:
    """The tokens of an example. The word that ends a document follows unless it is there already."""
    words = _numbers(example.content, example.where)
    if len(words) and not 0 <= words.min() <= words.max() < vocab:
        wrong = words[(words < 0) | (words >= vocab)][0]
        raise FileError(
            f"{example.where} has the token {wrong}, but the model has {vocab} words\n"
            "  data.tokenizer must be the one that made the tokens, or model.vocab_size large enough"
        )
    if len(words) and words[-1] == tokenizer.end:
        words = words[:-1]
    return EncodedPiece(words.astype(token_type(vocab)), ends=True)


def refuse_others(dataset: object) -> None:
    """Refuse what is not a dataset, though Python could iterate over it."""
    if isinstance(dataset, str | bytes | Path):
        raise FileError(
            f"{str(dataset)[:40]!r} is not a dataset but a text or a path\n  name files in data.sources"
        )
    if isinstance(dataset, Mapping):
        raise FileError(
            f"the dataset is a mapping from names ({few(dataset)}), perhaps to its splits\n"
            "  hand over one of them, such as dataset['train']"
        )
    if not isinstance(dataset, Iterable) and not hasattr(dataset, "__getitem__"):
        raise FileError(
            f"a {type(dataset).__name__} is not a dataset: nobody can iterate over it"
        )


def _numbers(value: object, where: str) -> Any:
    """The tokens of an example, from a list, an array or a tensor of whole numbers."""
    fits = isinstance(value, Sequence | np.ndarray) or hasattr(value, "numpy")
    words = np.asarray(value) if fits and not isinstance(value, str) else np.zeros(1)
    if words.ndim == 1 and not len(words):
        return words.astype(np.int64)
    if words.ndim != 1 or words.dtype.kind not in "iu":
        raise FileError(
            f"{where} is neither a text nor a list of tokens, but {_in_words(value)}"
        )
    return words


def few(names: Iterable[str]) -> str:
    """The first of some names."""
    return ", ".join(map(repr, islice(names, 8))) or "nothing"


def _in_words(value: object) -> str:
    """A value in a few words."""
    return f"{type(value).__name__}: {str(value)[:40]}"


# ---------------------------------------------------------------- encoding
def encode(
    pieces: Iterable[Piece], data: DataConfig, tokenizer: Tokenizer
) -> Iterator[EncodedPiece]:
    """Yield the words of every piece of text; many short pieces are encoded together."""
    if data.segments:
        pieces = chain.from_iterable(map(_sentences, pieces))
    some: list[Piece] = []
    room = PIECE_BYTES
    for piece in pieces:
        some.append(piece)
        room -= len(piece.text) + ITEM_BYTES
        if room <= 0:
            yield from _encode_together(some, tokenizer)
            some = []
            room = PIECE_BYTES
    if some:
        yield from _encode_together(some, tokenizer)


def _sentences(piece: Piece) -> list[Piece]:
    """The sentences of a piece, each a piece of its own."""
    texts = split_sentences(piece.text) or [b""]
    before = accumulate(map(len, texts), initial=piece.before)
    sentences = [
        piece._replace(text=text, before=place, ends=False)
        for text, place in zip(texts, before, strict=False)
    ]
    return [*sentences[:-1], sentences[-1]._replace(ends=piece.ends)]


def split_sentences(text: bytes) -> list[bytes]:
    r"""Cut a text after every sentence and line; the pieces together are the text.

    >>> split_sentences(b"One. Two?\n\nThree")
    [b'One.', b' Two?\n\n', b'Three']
    """
    ends = [match.end() for match in SENTENCE_END.finditer(text)]
    begins = [0, *ends]
    pieces = [text[a:b] for a, b in zip(begins, [*ends, len(text)], strict=True)]
    return [piece for piece in pieces if piece]


def _encode_together(
    pieces: list[Piece], tokenizer: Tokenizer
) -> Iterator[EncodedPiece]:
    texts = [piece.text for piece in pieces]
    try:
        encoded: list[Any] = [*tokenizer.encode_all(texts, pieces[-1].where)]
    except FileError:
        for piece in pieces:
            _check_utf8(piece)  # This error also names the line.
        raise
    for piece, words in zip(pieces, encoded, strict=True):
        end = tokenizer.end if piece.closed else None
        ended = words if end is None else np.append(words, words.dtype.type(end))
        yield EncodedPiece(ended, piece.ends, len(piece.text), piece.learned)


def _check_utf8(piece: Piece) -> None:
    try:
        piece.text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise not_text(piece.where, piece.before + error.start) from None
