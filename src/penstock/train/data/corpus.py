"""Text on disk as one long row of tokens, kept in a file that is mapped into memory.

    a.txt   b.py   c.jsonl                files, folders, lines of JSON
      │       │    │ │ │
      ▼       ▼    ▼ ▼ ▼
    ┌──────┬─┬────┬─┬──┬─┬──┬─┬──┬─┐
    │ a    │0│ b  │0│  │0│  │0│  │0│      packed one after the other, with an end word after each
    └──────┴─┴────┴─┴──┴─┴──┴─┴──┴─┘
    └─ sequence 0 ─┴─ sequence 1 ─┴─ …    cut when the length is reached

A sequence may hold several documents. Attention crosses their borders unless
`data.separate` forbids it.

The name of the file is a digest of its sources, so other text or another tokenizer gets
another file. Its content has a second digest: text that was moved or copied is still the
same text, and a run can resume with it.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from io import BytesIO
from itertools import accumulate, chain
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple, Protocol

import numpy as np

from penstock.config import BYTE_TOKENIZER, DataConfig, names_a_file
from penstock.errors import FileError
from penstock.train.data.conversations import (
    FIELDS,
    Conversation,
    Marks,
    Record,
    Tally,
    encode_records,
    find_template,
    pack_rows,
    padding_row,
)
from penstock.train.data.document_end import side_files
from penstock.train.data.masking import Masking, bert_words
from penstock.train.data.order import shuffled
from penstock.train.data.segments import (
    RowLayout,
    pad_rows,
    segment_rows,
    split_sentences,
)
from penstock.train.data.tables import TABLE_KINDS, table_records, table_texts
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
DATASET_DICT = "dataset_dict.json"  # written by the library `datasets`
CACHE_VERSION = 3
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
EMPTY_TEXT = "the text is empty\n  give some in data.sources"
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


class Ticket(NamedTuple):
    """A sequence to read, and how often all sequences were read before."""

    sequence: int
    epoch: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """All tokens, cut into sequences: `trained` ones for training, then `held_out` ones."""

    tokens: TokenArray
    length: int  # tokens of a sequence
    trained: int
    held_out: int
    digest: str  # of the tokens
    end: int | None = None  # the word after each document, if documents are kept apart
    # Of conversations and segments: which tokens are learned, and with which a document begins.
    marks: Marks | None = None
    separate: bool = False  # whether conversations or segments are kept apart
    tally: Tally | None = None  # of conversations
    masking: Masking | None = None  # for models that guess masked words
    bytes_per_token: float | None = None  # of text; None if nobody has counted

    def ticket(self, position: int, seed: int) -> Ticket:
        """Return which sequence comes at a position, in which epoch."""
        return Ticket(shuffled(position, self.trained, seed), position // self.trained)

    @property
    def token_count(self) -> int:
        """The number of tokens."""
        return len(self.tokens)

    @property
    def text_source(self) -> Corpus:
        """The corpus that stands for the others where several are mixed."""
        return self

    @property
    def apart(self) -> bool:
        """Whether documents or conversations are kept apart."""
        return self.end is not None or self.separate

    @property
    def has_segments(self) -> bool:
        """Whether its rows are segments of text for a Bert, and not conversations."""
        return self.marks is not None and self.masking is not None

    def sequence(self, number: int) -> TokenArray:
        """Return a sequence and the token after it, which is the label of the last one."""
        return self.tokens[number * self.length : (number + 1) * self.length + 1]

    def sequence_marks(self, number: int) -> Marks:
        """Return the marks of a sequence's tokens, and of the token after it."""
        assert self.marks is not None
        return self.marks[number * self.length : (number + 1) * self.length + 1]


def open_corpus(
    data: DataConfig, cache: Path, watch: ProgressBytes = lambda done, total: None
) -> Corpus:
    """Open the corpus of a config.

    The text is encoded once, and found in the cache after that. `watch` sees the progress.
    """
    tokenizer = tokenizer_of(data.tokenizer)
    files = source_files(data)
    if data.separate and tokenizer.end is None and not data.marked:
        raise FileError(
            f"{_tokenizer_name(data)} has no word that ends a document, "
            "so documents cannot be told apart\n"
            "  set data.separate=false, or name the word as eos_token in a "
            "tokenizer_config.json beside the tokenizer"
        )
    row, note = _cached(data, files, cache)
    if not is_complete(row, note):
        if note.suffix == ENCODED:
            raise FileError(
                f"the encoded dataset {note} is damaged, or {row.name} beside it is missing\n  encode it again"
            )
        fill_cache(row, note, data, tokenizer, FileTexts(files, data, tokenizer, watch))
    return read_corpus(row, note, data, tokenizer.end)


def cached_tokens(data: DataConfig, cache: Path) -> tuple[Path, Path]:
    """Return the two files in which the tokens of a config are cached: tokens and facts."""
    return _cached(data, source_files(data), cache)


def _cached(data: DataConfig, files: list[Path], cache: Path) -> tuple[Path, Path]:
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


def read_corpus(row: Path, note: Path, data: DataConfig, end: int | None) -> Corpus:
    """Open tokens that are encoded already; `end` is the tokenizer's word after a document."""
    facts = json.loads(note.read_text(encoding="utf-8"))
    dtype = np.uint16 if facts["width"] == 2 else np.uint32
    marks: Marks | None = None
    try:
        tokens: TokenArray = np.memmap(row, dtype=dtype, mode="r")
        if data.marked:
            marks = np.memmap(file_of_marks(row), dtype=np.uint8, mode="r")
    except OSError as error:
        raise FileError(
            f"cannot read the token cache {row}: {error.strerror}\n"
            "  data.cache names its folder"
        ) from None
    if marks is not None:
        corpus = cut_corpus(tokens, data, facts["digest"])
        told = facts.get("conversations")
        tally = None if told is None else Tally(**told)
        return replace(corpus, marks=marks, separate=data.apart, tally=tally)
    corpus = cut_corpus(tokens, data, facts["digest"], end if data.separate else None)
    if "bytes" not in facts:  # a cache that an earlier version has written
        return corpus
    return replace(corpus, bytes_per_token=facts["bytes"] / len(tokens))


def open_validation(
    data: DataConfig, cache: Path, watch: ProgressBytes = lambda done, total: None
) -> Corpus | None:
    """Open the text of data.validation, all of which counts as held out; None without any."""
    own = validation_data(data)
    return None if own is None else all_held_out(open_corpus(own, cache, watch))


def validation_data(data: DataConfig) -> DataConfig | None:
    """Return data.validation as the sources of a corpus of its own; None without any."""
    if not data.validation:
        return None
    return replace(
        data, sources=data.validation, validation=(), mixture=(), held_out=0.0
    )


def all_held_out(corpus: Corpus) -> Corpus:
    """Return a corpus all of whose sequences are held out."""
    return replace(corpus, trained=0, held_out=corpus.trained)


def cut_corpus(
    tokens: TokenArray, data: DataConfig, digest: str = "", end: int | None = None
) -> Corpus:
    """Cut tokens into sequences of one length, and hold out the last ones."""
    sequences = (len(tokens) - 1) // data.tokens
    if sequences < 1:
        raise FileError(
            f"the text has {len(tokens)} tokens, "
            f"too few for sequences of {data.tokens}\n"
            "  give more text in data.sources, or shorter sequences in data.tokens"
        )
    held_out = 0
    if data.held_out:
        held_out = max(round(sequences * data.held_out), 1)
        held_out = min(held_out, sequences - 1)
    return Corpus(tokens, data.tokens, sequences - held_out, held_out, digest, end)


# ---------------------------------------------------------------- files
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


def _tokenizer_name(data: DataConfig) -> str:
    return data.tokenizer if names_a_file(data.tokenizer) else BYTE_TOKENIZER


def _cache_name(data: DataConfig, files: list[Path]) -> str:
    """A digest of the names, sizes and times of the sources, and of the tokenizer.

    It does not depend on their content, since the cache exists to avoid reading that.
    """
    tokenizer = _tokenizer_name(data)
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


class Piece(NamedTuple):
    """A document, or as much of it as is encoded at once."""

    text: bytes
    ends: bool  # whether the document ends with this piece
    place: int  # bytes of the file that have been read
    line: int = 0  # the line in a .jsonl file
    before: int = 0  # bytes of the document before this piece


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


# ---------------------------------------------------------------- the cache
def is_complete(row: Path, note: Path) -> bool:
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


class Texts(Protocol):
    """What is encoded: the files of a config, or a dataset of the user's own."""

    def records(self) -> Iterator[Record]:
        """Yield conversations, for data.instructions."""
        ...

    def encoded(self, sizes: list[int]) -> Iterator[tuple[TokenArray, bool]]:
        """Yield the words of every piece of text, and whether its document ends with it.

        The number of bytes of the text is added to `sizes`.
        """
        ...


@dataclass(frozen=True, slots=True)
class FileTexts:
    """The texts of files."""

    files: list[Path]
    data: DataConfig
    tokenizer: Tokenizer
    watch: ProgressBytes

    def records(self) -> Iterator[Record]:
        """Yield the records of all files."""
        return _all_records(self.files, self.watch)

    def encoded(self, sizes: list[int]) -> Iterator[tuple[TokenArray, bool]]:
        """Encode all files, piece by piece."""
        return _encode_files(self.files, self.data, self.tokenizer, self.watch, sizes)


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
    words = bert_words(tokenizer, data.tokenizer, data.segments)
    if data.marked:
        vocab = words.vocab if data.segments else tokenizer.vocab
    vocab = max(vocab, tokenizer.vocab)
    width = 2 if vocab <= 1 << 16 else 4
    try:
        row.parent.mkdir(parents=True, exist_ok=True)
        part = row.with_name(f"tokens-{uuid.uuid4().hex}.part")
        facts: dict[str, object] = {"width": width, "encoding": encoding_of(data)}
        sizes: list[int] = []
        if data.instructions:
            facts |= _write_conversations(part, row, texts.records(), data, tokenizer)
        elif data.segments:
            dtype = np.uint16 if width == 2 else np.uint32
            layout = RowLayout(words, data.segments, data.tokens, dtype)
            encoded = texts.encoded(sizes)
            facts |= _write_segments(part, row, encoded, layout, data.separate)
        else:
            encoded = texts.encoded(sizes)
            tokens, digest = _write_tokens(part, encoded, tokenizer.end, width)
            facts |= {"tokens": tokens, "digest": digest, "bytes": sum(sizes)}
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
    file: Path,
    encoded: Iterable[tuple[TokenArray, bool]],
    end_word: int | None,
    width: int,
) -> tuple[int, str]:
    """Write tokens with an end word after each document; return their count and digest."""
    end_words = [] if end_word is None else [end_word]
    end = np.asarray(end_words, dtype=np.uint16 if width == 2 else np.uint32)
    digest = hashlib.sha256()
    text_tokens = 0
    all_tokens = 0
    with file.open("xb") as opened:
        try:
            for encoded_words, document_ends in encoded:
                words = encoded_words.astype(end.dtype, copy=False)
                text_tokens += len(words)
                for array in (words, end) if document_ends else (words,):
                    opened.write(array.data)
                    digest.update(array.data)
                    all_tokens += len(array)
            if not text_tokens:
                raise FileError(EMPTY_TEXT)
        except BaseException:
            file.unlink()
            raise
    return all_tokens, digest.hexdigest()[:16]


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
    dtype = np.uint16 if tokenizer.vocab <= 1 << 16 else np.uint32
    rows = pack_rows(encoded, data.tokens, padding)

    def complain() -> None:
        if not tally.learned:
            raise FileError(
                f"there is nothing to learn: none of {tally.conversations} conversations has an answer within "
                f"{data.tokens} tokens\n  give other data.sources, or more data.tokens"
            )

    facts = _write_rows(part, row, rows, padding_row(1, padding, dtype), complain)
    return {**facts, "conversations": asdict(tally)}


def _write_segments(
    part: Path,
    row: Path,
    encoded: Iterable[tuple[TokenArray, bool]],
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
    return {"tokens": tokens, "digest": digest.hexdigest()[:16], "marked": True}


def _all_records(files: list[Path], watch: ProgressBytes) -> Iterator[Record]:
    """Yield the records of all files, and tell how much has been read."""
    total = sum(file.stat().st_size for file in files)
    before = 0
    for file in files:
        told = 0
        for record in file_records(file, FIELDS):
            if record.read - told >= PIECE_BYTES:
                told = record.read
                watch(before + told, total)
            yield record
        before += file.stat().st_size
        watch(before, total)


def _encode_files(
    files: list[Path],
    data: DataConfig,
    tokenizer: Tokenizer,
    watch: ProgressBytes,
    sizes: list[int],
) -> Iterator[tuple[TokenArray, bool]]:
    """Yield the words of every piece, and whether its document ends with it.

    The bytes of the text in each file are added to `sizes`.
    """
    total = sum(file.stat().st_size for file in files)
    before = 0
    for file in files:
        sizes.append(0)

        def tell(place: int, before: int = before) -> None:
            watch(before + place, total)

        pieces = text_pieces(file, data.field, tokenizer.cut)
        yield from encode_pieces(pieces, data, tokenizer, str(file), sizes, tell)
        before += file.stat().st_size
        watch(before, total)


def encode_pieces(
    pieces: Iterable[Piece],
    data: DataConfig,
    tokenizer: Tokenizer,
    source: str,
    sizes: list[int],
    tell: Callable[[int], None] = lambda place: None,
) -> Iterator[tuple[TokenArray, bool]]:
    """Encode many short pieces together; their bytes are added to the last of `sizes`."""
    waiting: list[Piece] = []
    count = 0  # bytes of these pieces
    begin = 0  # where they begin in the file
    for piece in pieces:
        waiting += _sentences(piece) if data.segments else [piece]
        sizes[-1] += len(piece.text)
        count += len(piece.text)
        if max(count, piece.place - begin) >= PIECE_BYTES:
            yield from _encode_together(waiting, tokenizer, source)
            tell(piece.place)
            waiting = []
            count = 0
            begin = piece.place
    yield from _encode_together(waiting, tokenizer, source)


def _sentences(piece: Piece) -> list[Piece]:
    """The sentences of a piece, each a piece of its own."""
    texts = split_sentences(piece.text) or [b""]
    before = accumulate(map(len, texts), initial=piece.before)
    sentences = [
        piece._replace(text=text, before=place, ends=False)
        for text, place in zip(texts, before, strict=False)
    ]
    return [*sentences[:-1], sentences[-1]._replace(ends=piece.ends)]


def _encode_together(
    pieces: list[Piece], tokenizer: Tokenizer, source: str
) -> Iterator[tuple[TokenArray, bool]]:
    try:
        encoded = tokenizer.encode_all([piece.text for piece in pieces], source)
    except FileError:
        for piece in pieces:
            _check_utf8(piece, source)  # This error also names the line.
        raise
    return zip(encoded, (piece.ends for piece in pieces), strict=True)


def _check_utf8(piece: Piece, source: str) -> None:
    try:
        piece.text.decode("utf-8")
    except UnicodeDecodeError as error:
        where = f"{source}:{piece.line}" if piece.line else source
        raise not_text(where, piece.before + error.start) from None
