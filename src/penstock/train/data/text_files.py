"""Files of text: which files a config names, and their texts in pieces, record by record or line by line."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple

from penstock.config import DataConfig
from penstock.errors import FileError
from penstock.train.data.conversations import Record
from penstock.train.data.tables import TABLE_KINDS, table_records, table_texts
from penstock.train.data.tokenizer import TokenArray

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

ENCODED = ".tokens"  # the note of text that is encoded already (`penstock.train.data.dataset`)

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

ProgressBytes = Callable[[int, int], None]  # bytes read, and bytes in all


def source_files(data: DataConfig) -> list[Path]:
    """Return every file of a config's sources, with folders in the order of names.

    Raises FileError for a source that is missing, empty or not text.
    """
    if not data.sources and data.instructions:
        raise FileError(
            "data.instructions = true needs conversations\n  name their files in data.sources"
        )
    if not data.sources:
        return sorted(_walk(Path(sysconfig.get_path("stdlib")), (".py",)))
    endings = data.endings
    if data.instructions:  # Beside them there may be a README.
        endings = tuple(one for one in endings if _kind(Path(f"a{one}")) in RECORDS)
    files: list[Path] = []
    for source in data.sources:
        files += _files_of(source, endings, data.split)
    for file in files:
        kind = _kind(file)
        if kind in BINARY:
            raise FileError(f"{file} is {BINARY[kind]}")
        if data.instructions and kind not in (*RECORDS, ENCODED):
            raise FileError(
                f"{file} is plain text, but data.instructions = true asks for conversations\n"
                "  write them as lines of JSON (.jsonl) or as a table (.parquet, .arrow)"
            )
    return files


def _files_of(source: str, endings: tuple[str, ...], split: str) -> list[Path]:
    if not source.strip():
        raise FileError(
            "data.sources has a source without a name\n  name files or folders, "
            "or give an empty list for Python's own standard library"
        )
    path = Path(source).expanduser()
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileError(
            f"cannot read {source}: there is no such file or folder\n  see data.sources"
        )
    if (path / DATASET_DICT).is_file():
        path = _split_of(path, split)
    files = sorted(_walk(path, endings, everything=True))
    if not files:
        raise FileError(
            f"the folder {source} has no file that ends in {' '.join(endings)}\n"
            "  name another folder in data.sources, or more endings in data.endings"
        )
    return files


def _split_of(folder: Path, split: str) -> Path:
    """One split of a folder that DatasetDict.save_to_disk wrote; the others are for tests, not for training."""
    if (folder / split).is_dir():
        return folder / split
    known = sorted(one.name for one in folder.iterdir() if one.is_dir())
    raise FileError(
        f"the dataset {folder} has no split {split!r}; it has {', '.join(known)}\n"
        "  name another one in data.split"
    )


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


class Piece(NamedTuple):
    """A document, or as much of it as is encoded at once."""

    text: bytes
    ends: bool  # whether the document ends with this piece
    place: int  # bytes of the file that have been read
    line: int = 0  # the line in a .jsonl file
    before: int = 0  # bytes of the document before this piece


class EncodedPiece(NamedTuple):
    """The words of a piece."""

    words: TokenArray
    ends: bool  # whether the document ends with this piece
    text_bytes: int = 0  # 0 if there was no text, only tokens


CutText = Callable[[bytes], int]  # where a text may be cut in two; 0 if it may not yet


def text_pieces(file: Path, field: str, cut: CutText) -> Iterator[Piece]:
    """Yield the texts of a file, cut where `cut` allows it.

    A text is the whole file, one field of each line of a .jsonl file, or one of each row of a table.
    """
    if file.suffix == ENCODED:
        raise FileError(f"{file} holds tokens, not text")
    if _kind(file) in TABLE_KINDS:
        size = file.stat().st_size
        for row, (text, share) in enumerate(table_texts(file, field), start=1):
            place = partial(int, share * size)
            yield from cut_up(BytesIO(text), cut, place, row)
        return
    with _opened(file) as (opened, raw):
        if _kind(file) == ".jsonl":
            yield from _lines(opened, field, file, cut, raw.tell)
            return
        for piece in cut_up(opened, cut, raw.tell):
            _check_text(piece, file)
            yield piece


@contextmanager
def _opened(file: Path) -> Iterator[tuple[IO[bytes], BinaryIO]]:
    """Open a file: its content, unpacked, and the file itself, which knows how much has been read."""
    try:
        with file.open("rb") as raw, _unpacked(file, raw) as opened:
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


def _unpacked(file: Path, raw: BinaryIO) -> AbstractContextManager[IO[bytes]]:
    """The content of a compressed file, or the file as it is."""
    return UNPACK[file.suffix](raw) if file.suffix in UNPACK else nullcontext(raw)


def cut_up(
    opened: IO[bytes], cut: CutText, place: Callable[[], int], line: int = 0
) -> Iterator[Piece]:
    """Yield a document in pieces. Where it cannot be cut, read twice as much."""
    text = b""
    size = PIECE_BYTES // 4
    before = 0
    while more := opened.read(size):
        text += more
        end = cut(text) if len(text) >= size else 0
        if end:
            yield Piece(text[:end], False, place(), line, before)
            text = text[end:]
            before += end
            size = PIECE_BYTES // 4
        else:
            size = len(text)
    yield Piece(text, True, place(), line, before)


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


def _lines(
    opened: IO[bytes], field: str, file: Path, cut: CutText, place: Callable[[], int]
) -> Iterator[Piece]:
    for number, entry in _entries(opened, file):
        text = _text_of(entry, field, f"{file}:{number}")
        yield from cut_up(BytesIO(text), cut, place, number)


def _entries(opened: IO[bytes], file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of a .jsonl file, each with the number of its line."""
    for number, line in enumerate(opened, start=1):
        if line.strip():
            yield number, _entry(line, f"{file}:{number}")


def file_records(file: Path, fields: Sequence[str]) -> Iterator[Record]:
    """Yield the objects of a .jsonl file, or the rows of a table with some of its columns."""
    if _kind(file) in TABLE_KINDS:
        size = file.stat().st_size
        rows = table_records(file, fields)
        for number, (content, share) in enumerate(rows, start=1):
            yield Record(content, f"{file}, row {number}", int(share * size))
        return
    with _opened(file) as (opened, raw):
        for number, entry in _entries(opened, file):
            yield Record(entry, f"{file}:{number}", raw.tell())


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


def _text_of(entry: dict[str, Any], field: str, where: str) -> bytes:
    if field not in entry:
        known = ", ".join(map(repr, list(entry)[:8])) or "nothing"
        raise FileError(
            f"{where}: this line has no text under {field!r}; it has {known}\n"
            "  name the field in data.field"
        )
    text = entry[field]
    if not isinstance(text, str):
        raise FileError(
            f"{where}: the value of {field!r} is not text: {json.dumps(text)[:40]}\n"
            "  put it in quotes, or leave the line out"
        )
    return text.encode("utf-8", "surrogatepass")
