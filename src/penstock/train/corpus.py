"""Text on disk as one long row of tokens, kept in a file that is mapped into memory.

    a.txt   b.py   c.jsonl                files, folders, lines of JSON
      │       │    │ │ │
      ▼       ▼    ▼ ▼ ▼
    ┌──────┬─┬────┬─┬──┬─┬──┬─┬──┬─┐
    │ a    │0│ b  │0│  │0│  │0│  │0│      packed, one after the other, an end between two
    └──────┴─┴────┴─┴──┴─┴──┴─┴──┴─┘
    └─ sequence 0 ─┴─ sequence 1 ─┴─ …    cut where the length is full

A sequence may hold several documents. Attention goes across them, unless `data.separate` says that it must not.

The file's name is made of what it was made from, so that other text, or another tokenizer, is another file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.errors import FileError
from penstock.train.config import Data
from penstock.train.tokenizer import Tokenizer, Tokens, tokenizer_of

_log = logging.getLogger(__name__)
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3", "config-stdlib"}
VERSION = 1  # of the cache


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """All tokens, and how they are cut: `trained` sequences are for training, the `held_out` ones after them not."""

    tokens: Tokens
    length: int  # tokens of a sequence
    trained: int
    held_out: int
    digest: str  # of what it was made from
    end: int | None = None  # the word after each document, if documents are to be told apart

    def sequence(self, number: int) -> Tokens:
        """A sequence and the token after it, so that each of its tokens has a next one."""
        return self.tokens[number * self.length : (number + 1) * self.length + 1]


def open_corpus(data: Data, cache: Path) -> Corpus:
    """The corpus of a config; its tokens are made once, and found in the cache after that."""
    tokenizer, files = tokenizer_of(data.tokenizer), files_of(data)
    if data.separate and tokenizer.end is None:
        raise FileError(
            f"{data.tokenizer} has no word that ends a document, so documents cannot be told apart\n"
            "  set data.separate=false, or use a tokenizer with one, <|endoftext|> say"
        )
    digest = _digest(data, files)
    row, note = cache / f"tokens-{digest}.bin", cache / f"tokens-{digest}.json"
    if not _whole(row, note):
        _fill(row, note, data, tokenizer, files)
    facts = json.loads(note.read_text(encoding="utf-8"))
    tokens: Tokens = np.memmap(row, dtype=np.uint16 if facts["width"] == 2 else np.uint32, mode="r")
    return cut(tokens, data, digest, tokenizer.end if data.separate else None)


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
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if everything or name not in LEFT_OUT)
        for name in names:
            if name.endswith(endings):
                yield Path(parent) / name


def _digest(data: Data, files: list[Path]) -> str:
    """Of names, sizes and times of change: reading it all to know whether to read it all would help nobody."""
    known = hashlib.sha256(f"{VERSION}\n{data.tokenizer}\n{data.field}\n".encode())
    named = [*files] if data.tokenizer == "bytes" else [*files, Path(data.tokenizer)]
    for file in named:
        try:
            about = file.stat()
        except OSError as error:
            raise FileError(f"cannot read {file}: {error.strerror}") from None
        known.update(f"{file.resolve()}\n{about.st_size}\n{about.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
    return known.hexdigest()[:16]


def documents(file: Path, field: str) -> Iterator[bytes]:
    """The texts of a file: all of it, or of each line of a .jsonl one field."""
    try:
        with file.open("rb") as opened:
            if file.suffix != ".jsonl":
                yield opened.read()
                return
            for number, line in enumerate(opened, start=1):
                if line.strip():
                    yield _text_of(line, field, f"{file}:{number}")
    except OSError as error:
        raise FileError(f"cannot read {file}: {error.strerror}\n  see data.sources") from None


def _text_of(line: bytes, field: str, where: str) -> bytes:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{where}: this line is no JSON: {error}") from None
    text = entry.get(field) if isinstance(entry, dict) else None
    if not isinstance(text, str):
        known = f"; it has {', '.join(map(repr, list(entry)[:8]))}" if isinstance(entry, dict) else ""
        raise FileError(f"{where}: this line has no text under {field!r}{known}\n  say which in data.field")
    return text.encode("utf-8", "surrogatepass")


# ---------------------------------------------------------------- the cache
def _whole(row: Path, note: Path) -> bool:
    """Whether the cache is there and as long as it says."""
    try:
        facts = json.loads(note.read_text(encoding="utf-8"))
        return bool(row.stat().st_size == facts["tokens"] * facts["width"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _fill(row: Path, note: Path, data: Data, tokenizer: Tokenizer, files: list[Path]) -> None:
    """Writes beside its place, then moves there: the note, which makes it whole, last."""
    _log.info("reading %d files", len(files))
    width = 2 if tokenizer.vocab <= 1 << 16 else 4
    between = [] if tokenizer.end is None else [tokenizer.end]
    tail = np.asarray(between, dtype=np.uint16 if width == 2 else np.uint32).tobytes()
    tokens = 0
    try:
        row.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=row.parent, prefix="tokens-", suffix=".part", delete=False) as part:
            try:
                for file in files:
                    for raw in documents(file, data.field):
                        words = tokenizer.encode(raw, str(file))
                        part.write(words.tobytes())
                        part.write(tail)
                        tokens += len(words) + len(between)
            except BaseException:
                Path(part.name).unlink()
                raise
        if not tokens:
            Path(part.name).unlink()
            raise FileError("the text is empty\n  give some in data.sources")
        Path(part.name).replace(row)
        _note(note, {"tokens": tokens, "width": width, "files": len(files)})
    except OSError as error:
        what = f"cannot write the token cache {row}: {error.strerror}"
        raise FileError(f"{what}\n  data.cache names its folder") from None
    _log.info("%d tokens", tokens)


def _note(note: Path, facts: dict[str, int]) -> None:
    part = note.with_suffix(".json.part")
    part.write_text(json.dumps(facts), encoding="utf-8")
    part.replace(note)
