"""The beginning of a text, for a sample: the first words of a document that was held out.

The model has not seen this document, and it is a text of the kind that the model has learned
to write. A run keeps the words in its folder, so that a sample needs no corpus.
"""

from __future__ import annotations

from pathlib import Path

from penstock.train.data.chat import LEARNED, Marks
from penstock.train.data.corpus import Corpus
from penstock.train.data.tokenizer import TokenArray, Tokenizer

PROMPT = "prompt.txt"  # in the folder of a run
MAX_PROMPT_TOKENS = 64
MAX_QUESTION_TOKENS = 512
MAX_PROMPT_CHARACTERS = 24


def find_prompt(corpus: Corpus, tokenizer: Tokenizer) -> str:
    """The first words of the first document that begins in the held-out text.

    If no document begins there, the first words of a line of the held-out text. Of a conversation it is everything
    before the first answer.
    """
    corpus = corpus.text_source
    if corpus.marks is not None:
        return _first_question(corpus, corpus.marks, tokenizer)
    begin = min(corpus.trained * corpus.length, len(corpus.tokens) - 1)
    tokens = corpus.tokens[begin : begin + corpus.held_out * corpus.length + 1]
    if tokenizer.end is not None:
        ends = (tokens == tokenizer.end).nonzero()[0]
        if len(ends) and ends[0] + 1 < len(tokens):
            tokens = tokens[int(ends[0]) + 1 :]
            return _first_words(_decode(tokens, tokenizer))
    text = _decode(tokens, tokenizer)
    return _first_words(text.partition("\n")[2]) or _first_words(text)


def _first_question(corpus: Corpus, marks: Marks, tokenizer: Tokenizer) -> str:
    """The text before the first answer of a conversation, a held-out one if there is any."""
    begin = corpus.trained * corpus.length if corpus.held_out else 0
    answer = int((marks[begin : begin + corpus.length] & LEARNED).argmax())
    question = corpus.tokens[begin : begin + answer][-MAX_QUESTION_TOKENS:]
    return tokenizer.decode(question.tolist())


def _decode(tokens: TokenArray, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(tokens[:MAX_PROMPT_TOKENS].tolist())


def _first_words(text: str) -> str:
    """The first words of the first line of a text, within a few characters.

    >>> _first_words("The quick brown fox jumps over the lazy dog")
    'The quick brown fox'
    >>> _first_words("  import os")
    'import os'
    """
    lines = text.replace("\x00", " ").strip().splitlines()
    line = lines[0] if lines else ""
    if len(line) > MAX_PROMPT_CHARACTERS:
        cut = line[: MAX_PROMPT_CHARACTERS + 1].rpartition(" ")[0]
        line = cut or line[:MAX_PROMPT_CHARACTERS]
    return line.rstrip("\ufffd ")


def read_prompt(path: Path) -> str:
    """The prompt of a run, given its folder or one of its checkpoints; empty if there is none."""
    for folder in (path, path.parent.parent):
        if (folder / PROMPT).is_file():
            return (folder / PROMPT).read_text(encoding="utf-8")
    return ""
