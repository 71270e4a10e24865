"""Instruction data: conversations as rows of tokens, of which only the answers are learned.

    messages      system  user  assistant  user  assistant     a chat template writes them as one text
    learned          .      .       ■        .       ■

    prompt  completion                                         joined as they are; the end word follows
       .        ■

    ┌──────────────┬───────┬──────────┬───┐
    │ conversation │       │          │ . │                    a row: whole conversations, then padding
    └──────────────┴───────┴──────────┴───┘

A conversation begins and ends in one row. It is cut only if it is longer than a row. Two marks of each token are kept
beside the tokens: whether it is learned, and whether a conversation begins with it.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.config import DataConfig, names_a_file
from penstock.errors import FileError, RunError
from penstock.train.data.files import EncodedPiece, Piece, Record, few
from penstock.train.data.tokenizer import (
    TOKENIZER_CONFIG,
    TokenArray,
    read_json,
    words_beside,
)

Marks: TypeAlias = NDArray[np.uint8]
LEARNED = np.uint8(1)
BEGINS = np.uint8(2)
SECOND = np.uint8(4)  # in the second segment of a pair (`penstock.train.data.masking`)

TEMPLATE = "chat_template.jinja"  # beside a tokenizer.json
FIELDS = ("messages", "prompt", "completion")  # of conversations in files
ANSWERING = "assistant"  # the role whose turns are learned
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
POOL = 512  # conversations among which the next one of a row is chosen


class Conversation(NamedTuple):
    """The tokens of a conversation and their marks."""

    words: TokenArray
    marks: Marks


def join(pieces: Sequence[Conversation]) -> Conversation:
    """Put tokens one after the other, with their marks."""
    return Conversation(*map(np.concatenate, zip(*pieces, strict=True)))


@dataclass(slots=True)
class Tally:
    """Counts of the conversations that were read, and of the tokens that are learned."""

    conversations: int = 0
    cut: int = 0  # longer than a row
    left_out: int = 0  # without anything to learn
    learned: int = 0  # tokens


# ---------------------------------------------------------------- the chat template
@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A chat template in Jinja, and the special words that it may ask for."""

    text: str
    special: Mapping[str, str] = field(default_factory=dict)

    def write(self, messages: Sequence[Any], where: str) -> list[tuple[str, bool]]:
        """Write messages as one text, cut into what is not learned and what is: the turns of the assistant."""
        if GENERATION.search(self.text):
            text, spans = self._render(
                messages, where, return_assistant_tokens_mask=True
            )
        else:
            text, _ = self._render(messages, where)
            spans = [
                self._span(messages, number, text, where)
                for number, message in enumerate(messages)
                if message["role"] == ANSWERING
            ]
        texts = []
        place = 0
        for begin, end in spans:
            texts += [(text[place:begin], False), (text[begin:end], True)]
            place = end
        return [*texts, (text[place:], False)]

    def _span(
        self, messages: Sequence[Any], number: int, text: str, where: str
    ) -> tuple[int, int]:
        """Find where a turn begins and ends in the text: after what a model is given to answer."""
        before = ""
        if number:
            before, _ = self._render(
                messages[:number], where, add_generation_prompt=True
            )
        until, _ = self._render(messages[: number + 1], where)
        if not until.startswith(before) or not text.startswith(until):
            raise FileError(
                f"{where}: the chat template writes message {number} in another way when it is the last one, "
                "so its beginning and end cannot be found\n"
                "  put {% generation %} and {% endgeneration %} around answers in the template"
            )
        return len(before), len(until)

    def _render(
        self, messages: Sequence[Any], where: str, **options: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        render = _import_renderer()
        try:
            texts, spans = render(
                conversations=[list(messages)],
                chat_template=self.text,
                **self.special,
                **options,
            )
        except Exception as error:  # A template raises whatever it wants.
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise FileError(
                f"{where}: the chat template cannot write these messages: {reason[0]}"
            ) from None
        return str(texts[0]), list(spans[0]) if spans else []


def _import_renderer() -> Any:
    try:
        from transformers.utils import chat_template_utils  # noqa: PLC0415  # optional

        return chat_template_utils.render_jinja_template
    except (ImportError, AttributeError):
        raise RunError(
            "chat templates need transformers and jinja2, which are not installed or too old: "
            "pip install 'penstock[hf]' jinja2"
        ) from None


def find_template(data: DataConfig) -> ChatTemplate | None:
    """The chat template beside the tokenizer of a config; None if there is none."""
    beside = None
    special: dict[str, str] = {}
    if names_a_file(data.tokenizer):
        beside = Path(data.tokenizer).with_name(TEMPLATE)
        special = dict(words_beside(beside))
    if beside is None:
        return None
    if beside.is_file():
        return ChatTemplate(_read_text(beside), special)
    named = read_json(beside.with_name(TOKENIZER_CONFIG)).get("chat_template")
    if isinstance(named, list):  # several, each with a name
        by_name = {one.get("name"): one.get("template") for one in named}
        named = by_name.get("default")
    return ChatTemplate(named, special) if isinstance(named, str) else None


def keep_template(data: DataConfig, folder: Path) -> None:
    """Write the chat template into the folder of a run, beside its copy of the tokenizer."""
    template = find_template(data) if data.instructions else None
    if template is not None:
        (folder / TEMPLATE).write_text(template.text, encoding="utf-8")


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FileError(f"cannot read the chat template {file}: {reason}") from None


# ---------------------------------------------------------------- from records to conversations
def pieces_of(
    records: Iterable[Record], template: ChatTemplate | None
) -> Iterator[Piece]:
    """Yield conversations in pieces, each of which is learned, or not learned, as a whole.

    Each is encoded alone, as a model gets the prompt that it is to answer.
    """
    for record in records:
        texts = _texts_of(record, template)
        for number, (text, learned) in enumerate(texts, start=1):
            yield Piece(
                text.encode("utf-8", "replace"),
                number == len(texts),
                record.read,
                record.where,
                learned=learned,
                closed=learned and record.content.get("messages") is None,
            )


def _texts_of(record: Record, template: ChatTemplate | None) -> list[tuple[str, bool]]:
    """The texts of a record, and whether each is learned: of its messages, or its prompt and completion."""
    content = record.content
    if content.get("messages") is not None:
        messages = _checked_messages(content["messages"], record.where)
        if template is None:
            raise FileError(
                f"{record.where}: messages need a chat template, and the tokenizer has none\n"
                f"  give a data.tokenizer with a {TEMPLATE} beside it; "
                "lines with `prompt` and `completion` need none"
            )
        return template.write(messages, record.where)
    pair = [content.get(key) for key in ("prompt", "completion")]
    if not all(isinstance(text, str) for text in pair):
        for key, text in zip(("prompt", "completion"), pair, strict=True):
            if text is not None and not isinstance(text, str):
                raise FileError(f"{record.where}: `{key}` is not text: {text!r}")
        raise FileError(
            f"{record.where}: there are neither `messages` nor the texts `prompt` and `completion`; "
            f"it has {few(content)}\n  set data.format=text to train on plain text"
        )
    prompt, completion = map(str, pair)
    return [(prompt, False), (completion, True)]


def _checked_messages(messages: Any, where: str) -> list[dict[str, Any]]:
    """Refuse messages that are not a list of roles and contents."""
    if not isinstance(messages, list) or not messages:
        raise FileError(f"{where}: `messages` is not a list of messages")
    for number, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str):
            raise FileError(f"{where}: message {number} has no `role`")
        if not isinstance(message.get("content"), str | None):
            raise FileError(
                f"{where}: the `content` of message {number} is not text: "
                f"{json.dumps(message['content'], default=str)[:40]}"
            )
    return messages


def conversations(
    encoded: Iterable[EncodedPiece], length: int, tally: Tally
) -> Iterator[Conversation]:
    """Yield conversations of at most `length` tokens; those with nothing to learn are left out."""
    pieces: list[Conversation] = []
    for piece in encoded:
        marks = np.full(len(piece.words), LEARNED * piece.learned, dtype=np.uint8)
        pieces.append(Conversation(piece.words, marks))
        if not piece.ends:
            continue
        words, marks = join(pieces)
        pieces = []
        marks = marks[:length]
        marks[:1] = BEGINS  # Nothing comes before the first token to predict it from.
        learned = int((marks & LEARNED).sum())
        tally.conversations += 1
        tally.cut += len(words) > length
        tally.learned += learned
        tally.left_out += not learned
        if learned:
            yield Conversation(words[:length], marks)


# ---------------------------------------------------------------- rows
def pack_rows(
    conversations: Iterable[Conversation], length: int, padding: int
) -> Iterator[Conversation]:
    """Fill rows of `length` tokens: always with the longest conversation that still fits.

    Padding follows the last one. It is a document of its own, which no conversation sees.
    """
    coming = iter(conversations)
    pool: list[Conversation] = []

    def tokens(one: Conversation) -> int:
        return len(one.words)

    def refill() -> None:
        while len(pool) < POOL and (one := next(coming, None)) is not None:
            insort(pool, one, key=tokens)

    refill()
    while pool:
        row: list[Conversation] = []
        room = length
        while pool and room and (place := bisect_right(pool, room, key=tokens)):
            row.append(pool.pop(place - 1))
            room -= tokens(row[-1])
            refill()
        if room:
            row.append(padding_row(room, padding, row[0].words.dtype))
        yield join(row)


def padding_row(tokens: int, word: int, dtype: Any) -> Conversation:
    """Return a document of padding, which nobody learns."""
    marks = np.zeros(tokens, dtype=np.uint8)
    marks[:1] = BEGINS
    return Conversation(np.full(tokens, word, dtype=dtype), marks)
