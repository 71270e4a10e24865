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

import hashlib
import json
import os
import sysconfig
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from penstock.errors import FileError
from penstock.train.config import Data
from penstock.train.tokenizer import Tokenizer, Tokens, tokenizer_of

LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3", "config-stdlib"}
VERSION = 1  # of the cache
PIECE = 1 << 24  # bytes that are read, or encoded, at once
Watch = Callable[[int, int], None]  # bytes that are read, of how many


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """All tokens, and how they are cut: `trained` sequences are for training, the `held_out` ones after them not."""

    tokens: Tokens
    length: int  # tokens of a sequence
    trained: int
    held_out: int
    digest: str  # of the tokens
    end: int | None = None  # the word after each document, if documents are to be told apart

    def sequence(self, number: int) -> Tokens:
        """A sequence and the token after it, so that each of its tokens has a next one."""
        return self.tokens[number * self.length : (number + 1) * self.length + 1]


def open_corpus(data: Data, cache: Path, watch: Watch = lambda done, total: None) -> Corpus:
    """The corpus of a config; its tokens are made once, and found in the cache after that. `watch` sees how it goes."""
    tokenizer, files = tokenizer_of(data.tokenizer), files_of(data)
    if data.separate and tokenizer.end is None:
        raise FileError(
            f"{data.tokenizer} has no word that ends a document, so documents cannot be told apart\n"
            "  set data.separate=false, or use a tokenizer with one, <|endoftext|> say"
        )
    name = _name(data, files)
    row, note = cache / f"{name}.bin", cache / f"{name}.json"
    if not _whole(row, note):
        _fill(row, note, data, tokenizer, files, watch)
    facts = json.loads(note.read_text(encoding="utf-8"))
    try:
        tokens: Tokens = np.memmap(row, dtype=np.uint16 if facts["width"] == 2 else np.uint32, mode="r")
    except OSError as error:
        raise FileError(f"cannot read the token cache {row}: {error.strerror}\n  data.cache names its folder") from None
    return cut(tokens, data, facts["digest"], tokenizer.end if data.separate else None)


def cut(tokens: Tokens, data: Data, digest: str = "", end: int | None = None) -> Corpus:
    """Sequences of one length, the last ones held out."""
    sequences = (len(tokens) - 1) // data.tokens
    held = max(min(max(round(sequences * data.held_out), 1), sequences - 1), 0) if data.held_out else 0
    if sequences < 1:
        raise FileError(
            f"the text has {len(tokens)} tokens, too few for sequences of {data.tokens}\n"
            "  give more text in data.sources, or shorter sequences in data.tokens"
        )
    return Corpus(tokens, data.tokens, sequences - held, held, digest, end)


# ---------------------------------------------------------------- files
def files_of(data: Data) -> list[Path]:
    """Every file, folders walked in the order of names; an error names a source that is not there or has nothing."""
    if not data.sources:
        return sorted(_walk(Path(sysconfig.get_path("stdlib")), (".py",)))
    found: list[Path] = []
    for source in data.sources:
        path = Path(source).expanduser()
        if path.is_dir():
            inside = sorted(_walk(path, data.endings, everything=True))
            if not inside:
                raise FileError(f"the folder {source} has no file that ends in {' '.join(data.endings)}\n"
                                "  name another folder in data.sources, or more endings in data.endings")  # fmt: skip
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            raise FileError(f"cannot read {source}: there is no such file or folder\n  see data.sources")
    return found


def _walk(folder: Path, endings: tuple[str, ...], everything: bool = False) -> Iterator[Path]:
    def unreadable(error: OSError) -> None:
        raise FileError(f"cannot read {error.filename}: {error.strerror}\n  see data.sources")

    for parent, folders, names in os.walk(folder, onerror=unreadable):
        folders[:] = sorted(name for name in folders if everything or name not in LEFT_OUT)
        for name in names:
            if name.endswith(endings):
                yield Path(parent) / name


def _name(data: Data, files: list[Path]) -> str:
    """Of names, sizes and times of change: reading it all to know whether to read it all would help nobody."""
    known = hashlib.sha256(f"{VERSION}\n{data.tokenizer}\n{data.field}\n".encode())
    named = [*files] if data.tokenizer == "bytes" else [*files, Path(data.tokenizer)]
    for file in named:
        try:
            about = file.stat()
        except OSError as error:
            raise FileError(f"cannot read {file}: {error.strerror}") from None
        known.update(f"{file.resolve()}\n{about.st_size}\n{about.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
    return f"tokens-{known.hexdigest()[:16]}"


class Piece(NamedTuple):
    """Of a document all, or as much as is read at once."""

    text: bytes
    ends: bool  # the document
    place: int  # bytes of the file up to its end
    line: int = 0  # of a .jsonl


def pieces(file: Path, field: str, piece: int = -1) -> Iterator[Piece]:
    """The texts of a file: all of it, `piece` bytes at a time if given; or of each line of a .jsonl one field."""
    try:
        with file.open("rb") as opened:
            if file.suffix == ".jsonl":
                yield from _lines(opened, field, file)
                return
            text, place = opened.read(piece), 0
            while True:
                after = opened.read(piece) if piece > 0 else b""
                place += len(text)
                yield Piece(text, not after, place)
                if not after:
                    return
                text = after
    except OSError as error:
        raise FileError(f"cannot read {file}: {error.strerror}\n  see data.sources") from None


def _lines(opened: BinaryIO, field: str, file: Path) -> Iterator[Piece]:
    place = 0
    for number, line in enumerate(opened, start=1):
        place += len(line)
        if line.strip():
            yield Piece(_text_of(line, field, f"{file}:{number}"), True, place, number)


def _text_of(line: bytes, field: str, where: str) -> bytes:
    try:
        entry = json.loads(line.rstrip())
    except json.JSONDecodeError as error:
        raise FileError(f"{where}:{error.colno}: this line is no JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise FileError(f"{where}: this line is no JSON: {error}") from None
    if not isinstance(entry, dict):
        raise FileError(f"{where}: this line is no JSON object\n  a document is an object, its text under {field!r}")
    if field not in entry:
        known = ", ".join(map(repr, list(entry)[:8])) or "nothing"
        raise FileError(f"{where}: this line has no text under {field!r}; it has {known}\n  say which in data.field")
    text = entry[field]
    if not isinstance(text, str):
        raise FileError(f"{where}: what is under {field!r} is no text: {json.dumps(text)[:40]}\n  put it in quotes, or "
                        "leave the line out")  # fmt: skip
    return text.encode("utf-8", "surrogatepass")


# ---------------------------------------------------------------- the cache
def _whole(row: Path, note: Path) -> bool:
    """Whether the cache is there and as long as it says."""
    try:
        facts = json.loads(note.read_text(encoding="utf-8"))
        return bool(row.stat().st_size == facts["tokens"] * facts["width"] and facts["digest"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _fill(row: Path, note: Path, data: Data, tokenizer: Tokenizer, files: list[Path], watch: Watch) -> None:
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
        _note(note, {"tokens": tokens, "width": width, "files": len(files), "digest": digest.hexdigest()[:16]})
    except OSError as error:
        what = f"cannot write the token cache {row}: {error.strerror}"
        raise FileError(f"{what}\n  data.cache names its folder") from None


def _encoded(files: list[Path], data: Data, tokenizer: Tokenizer, watch: Watch) -> Iterator[tuple[Tokens, bool]]:
    """The words of every piece, and whether a document ends with it; many short ones are encoded together."""
    total, before = sum(file.stat().st_size for file in files), 0
    for file in files:
        held: list[Piece] = []
        begin = 0
        for piece in pieces(file, data.field, PIECE if tokenizer.by_pieces else -1):
            held.append(piece)
            if piece.place - begin >= PIECE:
                yield from _words(held, tokenizer, file)
                watch(before + piece.place, total)
                held, begin = [], piece.place
        yield from _words(held, tokenizer, file)
        before += file.stat().st_size
        watch(before, total)


def _words(held: list[Piece], tokenizer: Tokenizer, file: Path) -> Iterator[tuple[Tokens, bool]]:
    try:
        encoded = tokenizer.encode_all([piece.text for piece in held], str(file))
    except FileError:
        for piece in held if len(held) > 1 or held[0].line else ():  # the one that it is, by its line
            tokenizer.encode(piece.text, f"{file}:{piece.line}")
        raise
    return zip(encoded, (piece.ends for piece in held), strict=True)


def _note(note: Path, facts: dict[str, int | str]) -> None:
    part = note.with_suffix(".json.part")
    part.write_text(json.dumps(facts), encoding="utf-8")
    part.replace(note)
