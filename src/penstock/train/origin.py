"""What a Hugging Face folder holds besides weights: a run that starts from one keeps it, and an export gives it back.

folder of the user                    folder of the run              folder of the export
config.json                 ──►       huggingface/config.json   ──►  config.json, with the new dtype
generation_config.json, chat_template.jinja, tokenizer_config.json, ...  unchanged
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from penstock.errors import FileError
from penstock.train.data.tokenizer import TOKENIZER

ORIGIN_FOLDER = "huggingface"
CONFIG = "config.json"
MODEL_FILES = (CONFIG, "generation_config.json")
# Files that belong to a tokenizer.json; with another tokenizer they would be wrong.
TOKENIZER_FILES = (
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
)


def keep_origin(source: Path, run: Path) -> None:
    """Copy what an export will need from a Hugging Face folder into the folder of a run."""
    kept = run / ORIGIN_FOLDER
    kept.mkdir(parents=True, exist_ok=True)
    for name in (*MODEL_FILES, *TOKENIZER_FILES):
        if (source / name).is_file():
            shutil.copyfile(source / name, kept / name)


def find_origin(path: Path) -> Path | None:
    """The files of the model from which a run, or a checkpoint, started; None if its first weights were random."""
    for folder in (path, path.parent.parent):
        kept = folder / ORIGIN_FOLDER
        if (kept / CONFIG).is_file():
            return kept
    return path if (path / CONFIG).is_file() else None


def give_back(origin: Path, folder: Path, dtype: str) -> None:
    """Write what the original had into an export, unless training has replaced it."""
    (folder / CONFIG).write_text(
        json.dumps(_config(origin / CONFIG, dtype), indent=2) + "\n", encoding="utf-8"
    )
    _copy([name for name in MODEL_FILES if name != CONFIG], origin, folder)
    give_back_tokenizer(origin, folder)


def give_back_tokenizer(origin: Path, folder: Path) -> None:
    """Write what belongs to the original's tokenizer into an export, if the model was trained with it."""
    if _same_tokenizer(origin, folder):
        _copy(TOKENIZER_FILES, origin, folder)


def _copy(names: Iterable[str], origin: Path, folder: Path) -> None:
    for name in names:
        if (origin / name).is_file():
            shutil.copyfile(origin / name, folder / name)


def _config(file: Path, dtype: str) -> dict[str, Any]:
    """The original config.json with the type of the exported weights."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FileError(f"cannot read {file}: {error}") from None
    key = "torch_dtype" if "torch_dtype" in content else "dtype"
    return {**content, key: dtype}


def _same_tokenizer(origin: Path, folder: Path) -> bool:
    """Whether the model was trained with its own tokenizer."""
    theirs, ours = origin / TOKENIZER, folder / TOKENIZER
    if not ours.is_file() or not theirs.is_file():
        return ours.is_file() == theirs.is_file()
    return theirs.read_bytes() == ours.read_bytes()
