"""Text on disk as one long row of tokens, kept in a file that is mapped into memory.

    a.txt   b.py   c.jsonl                files, folders, lines of JSON
      │       │    │ │ │
      ▼       ▼    ▼ ▼ ▼
    ┌──────┬─┬────┬─┬──┬─┬──┬─┬──┬─┐
    │ a    │0│ b  │0│  │0│  │0│  │0│      packed, one after the other, an end between two
    └──────┴─┴────┴─┴──┴─┴──┴─┴──┴─┘
    └─ sequence 0 ─┴─ sequence 1 ─┴─ …    cut where the length is full

A sequence may hold several documents. Attention goes across them, unless `data.separate` says that it must not.

The file's name is made of what it was made from, so that other text, or another tokenizer, is another file. What is in
it has a digest of its own: text that was moved or copied is the same text, and a run goes on with it.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import lzma
import os
import sysconfig
import uuid
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple

import numpy as np

from penstock.config import BYTE_TOKENIZER, DataConfig, names_a_file
from penstock.errors import FileError
from penstock.train.data.tokenizer import TokenArray, Tokenizer, not_text, tokenizer_of

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
CACHE_VERSION = 2  # of the cache
PIECE = 1 << 22  # bytes that are encoded at once
UNPACK: dict[str, Callable[[BinaryIO], AbstractContextManager[Any]]] = {
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
}
ADVICE = "Penstock reads text and .jsonl, also as .gz, .bz2 or .xz"
TABLE = (
    "a table: write its texts as lines of JSON, pandas.read_parquet(...).to_json('text.jsonl', orient='records', "
    "lines=True) say"
)
ARCHIVE = "an archive: unpack it first"
BINARY = dict.fromkeys((".parquet", ".arrow", ".feather", ".orc"), TABLE)
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
    f"no text: {ADVICE[0].lower()}{ADVICE[1:]}",
)
MAGIC = {  # what files begin with
    b"PAR1": "a Parquet table",
    b"ARROW1": "an Arrow table",
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
    b"\x1f\x8b": "compressed by gzip",
    b"BZh9": "compressed by bzip2",
    b"\xfd7zXZ": "compressed by xz",
    b"PK\x03\x04": "a zip archive",
    b"%PDF-": "a PDF",
}
ProgressBytes = Callable[[int, int], None]  # bytes that are read, of how many


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """All tokens, and how they are cut: `trained` sequences are for training, the `held_out` ones after them not."""

    tokens: TokenArray
    length: int  # tokens of a sequence
    trained: int
    held_out: int
    digest: str  # of the tokens
    end: int | None = (
        None  # the word after each document, if documents are to be told apart
    )

    def sequence(self, number: int) -> TokenArray:
        """A sequence and the token after it, so that each of its tokens has a next one."""
        return self.tokens[number * self.length : (number + 1) * self.length + 1]


def open_corpus(
    data: DataConfig, cache: Path, watch: ProgressBytes = lambda done, total: None
) -> Corpus:
    """The corpus of a config; its tokens are made once, and found in the cache after that. `watch` sees how it goes."""
    tokenizer, files = tokenizer_of(data.tokenizer), source_files(data)
    if data.separate and tokenizer.end is None:
        raise FileError(
            f"{_named(data)} has no word that ends a document, so documents cannot be told apart\n"
            "  set data.separate=false, or use a tokenizer with one, <|endoftext|> say"
        )
    name = _name(data, files)
    row, note = cache / f"{name}.bin", cache / f"{name}.json"
    if not _whole(row, note):
        _fill(row, note, data, tokenizer, files, watch)
    facts = json.loads(note.read_text(encoding="utf-8"))
    try:
        tokens: TokenArray = np.memmap(
            row, dtype=np.uint16 if facts["width"] == 2 else np.uint32, mode="r"
        )
    except OSError as error:
        raise FileError(
            f"cannot read the token cache {row}: {error.strerror}\n  data.cache names its folder"
        ) from None
    return cut_corpus(
        tokens, data, facts["digest"], tokenizer.end if data.separate else None
    )


def cut_corpus(
    tokens: TokenArray, data: DataConfig, digest: str = "", end: int | None = None
) -> Corpus:
    """Sequences of one length, the last ones held out."""
    sequences = (len(tokens) - 1) // data.tokens
    held = (
        max(min(max(round(sequences * data.held_out), 1), sequences - 1), 0)
        if data.held_out
        else 0
    )
    if sequences < 1:
        raise FileError(
            f"the text has {len(tokens)} tokens, too few for sequences of {data.tokens}\n"
            "  give more text in data.sources, or shorter sequences in data.tokens"
        )
    return Corpus(tokens, data.tokens, sequences - held, held, digest, end)


# ---------------------------------------------------------------- files
def source_files(data: DataConfig) -> list[Path]:
    """Every file, folders walked in the order of names; an error names a source that is not there or has nothing."""
    if not data.sources:
        return sorted(_walk(Path(sysconfig.get_path("stdlib")), (".py",)))
    found: list[Path] = []
    for source in data.sources:
        if not source.strip():
            raise FileError(
                "data.sources has a source without a name\n  name files or folders, or give an empty list "
                "for Python's own standard library"
            )
        path = Path(source).expanduser()
        if path.is_dir():
            inside = sorted(_walk(path, data.endings, everything=True))
            if not inside:
                raise FileError(
                    f"the folder {source} has no file that ends in {' '.join(data.endings)}\n"
                    "  name another folder in data.sources, or more endings in data.endings"
                )
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            raise FileError(
                f"cannot read {source}: there is no such file or folder\n  see data.sources"
            )
    for file in found:
        if _kind(file) in BINARY:
            raise FileError(f"{file} is {BINARY[_kind(file)]}")
    return found


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


def _named(data: DataConfig) -> str:
    return data.tokenizer if names_a_file(data.tokenizer) else BYTE_TOKENIZER


def _name(data: DataConfig, files: list[Path]) -> str:
    """Of names, sizes and times of change: reading it all to know whether to read it all would help nobody."""
    tokenizer = _named(data)
    known = hashlib.sha256(f"{CACHE_VERSION}\n{tokenizer}\n{data.field}\n".encode())
    named = [*files, Path(tokenizer)] if names_a_file(tokenizer) else [*files]
    for file in named:
        try:
            about = file.stat()
        except OSError as error:
            raise FileError(f"cannot read {file}: {error.strerror}") from None
        known.update(
            f"{file.resolve()}\n{about.st_size}\n{about.st_mtime_ns}\n".encode(
                "utf-8", "surrogateescape"
            )
        )
    return f"tokens-{known.hexdigest()[:16]}"


class Piece(NamedTuple):
    """Of a document all, or as much as is encoded at once."""

    text: bytes
    ends: bool  # the document
    place: int  # bytes of the file that are read
    line: int = 0  # of a .jsonl
    before: int = 0  # bytes of the document before this piece


Cut = Callable[[bytes], int]  # where a text may be cut into two; 0: not yet


def text_pieces(file: Path, field: str, cut: Cut) -> Iterator[Piece]:
    """The texts of a file, cut where `cut` allows it: all of it, or of each line of a .jsonl one field."""
    try:
        with file.open("rb") as raw, _unpacked(file, raw) as opened:
            if _kind(file) == ".jsonl":
                yield from _lines(opened, field, file, cut, raw.tell)
                return
            for piece in _cut_up(opened, cut, raw.tell):
                _check_text(piece, file)
                yield piece
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        raise FileError(
            f"cannot unpack {file}: {error}\n  it is damaged, or was not written to its end"
        ) from None
    except OSError as error:
        raise FileError(
            f"cannot read {file}: {error.strerror or error}\n  see data.sources"
        ) from None


def _kind(file: Path) -> str:
    """The ending of a file, without that of its compression: .jsonl of a.jsonl.gz."""
    return (file.with_suffix("") if file.suffix in UNPACK else file).suffix.lower()


def _unpacked(file: Path, raw: BinaryIO) -> AbstractContextManager[IO[bytes]]:
    """What a compressed file holds; other files as they are."""
    return UNPACK[file.suffix](raw) if file.suffix in UNPACK else nullcontext(raw)


def _cut_up(
    opened: IO[bytes], cut: Cut, place: Callable[[], int], line: int = 0
) -> Iterator[Piece]:
    """A document in pieces. Where it cannot be cut more of it is read, twice as much each time."""
    held, size, before = b"", PIECE // 4, 0
    while more := opened.read(size):
        held += more
        end = cut(held) if len(held) >= size else 0
        if end:
            yield Piece(held[:end], False, place(), line, before)
            held, size, before = held[end:], PIECE // 4, before + end
        else:
            size = len(held)
    yield Piece(held, True, place(), line, before)


def _check_text(piece: Piece, file: Path) -> None:
    """Raises if a file is something else than text."""
    found = next(
        (
            what
            for begin, what in MAGIC.items()
            if not piece.before and piece.text.startswith(begin)
        ),
        None,
    )
    if found:
        raise FileError(f"{file} is {found}, whatever its name says\n  {ADVICE}")
    zero = piece.text.find(b"\0")
    if zero >= 0:
        raise FileError(
            f"{file} is not text: byte {piece.before + zero} is zero\n  {ADVICE}; text in UTF-16 must be "
            "converted to UTF-8"
        )


def _lines(
    opened: IO[bytes], field: str, file: Path, cut: Cut, place: Callable[[], int]
) -> Iterator[Piece]:
    for number, line in enumerate(opened, start=1):
        if line.strip():
            text = _text_of(line, field, f"{file}:{number}")
            yield from _cut_up(BytesIO(text), cut, place, number)


def _text_of(line: bytes, field: str, where: str) -> bytes:
    try:
        entry = json.loads(line.rstrip())
    except json.JSONDecodeError as error:
        raise FileError(
            f"{where}:{error.colno}: this line is no JSON: {error.msg}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise FileError(f"{where}: this line is no JSON: {error}") from None
    if not isinstance(entry, dict):
        raise FileError(
            f"{where}: this line is no JSON object\n  a document is an object, its text under {field!r}"
        )
    if field not in entry:
        known = ", ".join(map(repr, list(entry)[:8])) or "nothing"
        raise FileError(
            f"{where}: this line has no text under {field!r}; it has {known}\n  say which in data.field"
        )
    text = entry[field]
    if not isinstance(text, str):
        raise FileError(
            f"{where}: what is under {field!r} is no text: {json.dumps(text)[:40]}\n  put it in quotes, or "
            "leave the line out"
        )
    return text.encode("utf-8", "surrogatepass")


# ---------------------------------------------------------------- the cache
def _whole(row: Path, note: Path) -> bool:
    """Whether the cache is there and as long as it says."""
    try:
        facts = json.loads(note.read_text(encoding="utf-8"))
        return bool(
            row.stat().st_size == facts["tokens"] * facts["width"] and facts["digest"]
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _fill(
    row: Path,
    note: Path,
    data: DataConfig,
    tokenizer: Tokenizer,
    files: list[Path],
    watch: ProgressBytes,
) -> None:
    """Writes beside its place, then moves there: the note, which makes it whole, last."""
    width = 2 if tokenizer.vocab <= 1 << 16 else 4
    tail = [] if tokenizer.end is None else [tokenizer.end]
    end = np.asarray(tail, dtype=np.uint16 if width == 2 else np.uint32)
    tokens, read, digest = 0, 0, hashlib.sha256()
    try:
        row.parent.mkdir(parents=True, exist_ok=True)
        place = row.with_name(f"tokens-{uuid.uuid4().hex}.part")
        with place.open("xb") as part:
            try:
                for words, ends in _encoded(files, data, tokenizer, watch):
                    read += len(words)
                    for some in (words, end) if ends else (words,):
                        part.write(some.data)
                        digest.update(some.data)
                        tokens += len(some)
                if not read:
                    raise FileError("the text is empty\n  give some in data.sources")
            except BaseException:
                place.unlink()
                raise
        place.replace(row)
        _note(
            note,
            {
                "tokens": tokens,
                "width": width,
                "files": len(files),
                "digest": digest.hexdigest()[:16],
            },
        )
    except OSError as error:
        what = f"cannot write the token cache {row}: {error.strerror}"
        raise FileError(f"{what}\n  data.cache names its folder") from None


def _encoded(
    files: list[Path], data: DataConfig, tokenizer: Tokenizer, watch: ProgressBytes
) -> Iterator[tuple[TokenArray, bool]]:
    """The words of every piece, and whether a document ends with it; many short ones are encoded together."""
    total, before = sum(file.stat().st_size for file in files), 0
    for file in files:
        held: list[Piece] = []
        count = begin = 0  # bytes of these, and where they begin in the file
        for piece in text_pieces(file, data.field, tokenizer.cut):
            held.append(piece)
            count += len(piece.text)
            if max(count, piece.place - begin) >= PIECE:
                yield from _words(held, tokenizer, file)
                watch(before + piece.place, total)
                held, count, begin = [], 0, piece.place
        yield from _words(held, tokenizer, file)
        before += file.stat().st_size
        watch(before, total)


def _words(
    held: list[Piece], tokenizer: Tokenizer, file: Path
) -> Iterator[tuple[TokenArray, bool]]:
    try:
        encoded = tokenizer.encode_all([piece.text for piece in held], str(file))
    except FileError:
        for piece in held:  # the one that it is, by its line
            _check_utf8(piece, file)
        raise
    return zip(encoded, (piece.ends for piece in held), strict=True)


def _check_utf8(piece: Piece, file: Path) -> None:
    try:
        piece.text.decode("utf-8")
    except UnicodeDecodeError as error:
        where = f"{file}:{piece.line}" if piece.line else f"{file}"
        raise not_text(where, piece.before + error.start) from None


def _note(note: Path, facts: dict[str, int | str]) -> None:
    part = note.with_suffix(".json.part")
    part.write_text(json.dumps(facts), encoding="utf-8")
    part.replace(note)
