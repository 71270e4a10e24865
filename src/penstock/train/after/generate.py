"""Generates text with a trained model, in one piece on this machine.

prompt ──► words ──► model ──► logits of the last ──► a word, drawn at a temperature ──┐
                     ▲   keys and values of all words stay: each goes through it once  │
                     └─────────────────────────────────────────────────────────────────┘

The model is the last checkpoint of a run, or a Hugging Face folder.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.config import BYTE_TOKENIZER, LoraConfig
from penstock.errors import FileError, RunError, ShapeError
from penstock.formats.config_toml import CONFIG_FILE, read_config
from penstock.models import (
    BertConfig,
    DecoderConfig,
    EncoderConfig,
    GPTConfig,
    LlamaConfig,
    Part,
    layer_count,
    split,
)
from penstock.models.family import count_parameters
from penstock.models.slice import Carry
from penstock.schedules.skip import PartPath
from penstock.train.checkpoints.checkpoint import (
    CHECKPOINTS_FOLDER,
    faults,
    load,
    lost_files,
    newest,
    newest_good,
    read_facts,
)
from penstock.train.checkpoints.place import fetch_newest, remote_checkpoints
from penstock.train.data.tokenizer import (
    TOKENIZER,
    Tokenizer,
    kept_tokenizer,
    tokenizer_of,
)
from penstock.train.hub import read_sizes, read_weights
from penstock.train.lora import (
    Adapter,
    adapter_tensors,
    empty_adapters,
    merge,
    read_lora,
)
from penstock.train.weights import (
    Holding,
    Sizes,
    copy_weights,
    hold_whole,
    model_name,
)

SMALL_WIDTH = 1024  # Narrower models run faster on one thread.
MAX_SEED = 1 << 63


@dataclass(frozen=True, slots=True)
class Trained:
    """A model in one piece, with its words; `step` -1 where nobody has counted."""

    model: Part
    sizes: Sizes
    holding: Holding
    tokenizer: str
    path: Path
    step: int = -1
    # If adapters were trained: they, and the folder of the model to which they have been added.
    lora: LoraConfig = field(default_factory=LoraConfig)
    adapters: tuple[Adapter, ...] = ()
    base: str = ""


def _newest_checkpoint(run: Path) -> Path | None:
    """The newest good checkpoint of a run; with files from its storage, if the newest one here is damaged."""
    checkpoints = run / CHECKPOINTS_FOLDER
    found = newest_good(checkpoints)
    is_newest = found is not None and found == newest(checkpoints)[0]
    if not is_newest and (run / CONFIG_FILE).is_file():
        remote = remote_checkpoints(read_config(run / CONFIG_FILE).run)
        if remote is not None:
            fetch_newest(remote, checkpoints)
            return newest_good(checkpoints)
    return found


def open_trained(path: Path) -> Trained:
    """Open the model of a run, of one checkpoint, or of a Hugging Face folder."""
    if (path / "config.json").is_file():
        sizes = read_sizes(path)
        holding = hold_whole(sizes)
        copy_weights(holding, read_weights(path, holding.parameters, sizes))
        beside = path / TOKENIZER
        return Trained(
            holding.stages[0],
            sizes,
            holding,
            str(beside) if beside.is_file() else BYTE_TOKENIZER,
            path,
        )
    found = path if (path / "checkpoint.json").is_file() else _newest_checkpoint(path)
    if found is None:
        lost = lost_files(path / CHECKPOINTS_FOLDER)
        raise FileError(
            lost
            or f"{path} has no checkpoint\n  name the folder of a run, a checkpoint, or a Hugging Face folder"
        )
    for name, fault in faults(found).items():
        raise FileError(
            f"{found} is damaged: {name} {fault}\n"
            "  name another checkpoint of the run, or train on with --resume, which takes "
            "the newest good one"
        )
    facts = read_facts(found)
    sizes = trained_sizes(facts["model"])
    holding = hold_whole(sizes)
    lora = read_lora(facts)
    adapters: tuple[Adapter, ...] = ()
    base = str(facts.get("base", ""))
    if lora.rank:
        adapters = _add_adapters(found, Path(base), holding, lora)
    else:
        load(found, {name: one.detach() for name, one in holding.parameters.items()})
    return Trained(
        holding.stages[0],
        sizes,
        holding,
        # If the named one is gone, the copy in the folder of the run.
        kept_tokenizer(
            str(facts.get("tokenizer", BYTE_TOKENIZER)), found.parent.parent
        ),
        found,
        int(facts["step"]),
        lora,
        adapters,
        base,
    )


def _add_adapters(
    checkpoint: Path, base: Path, holding: Holding, lora: LoraConfig
) -> tuple[Adapter, ...]:
    """Fill a model from its folder, and add the adapters that a checkpoint has."""
    sizes = holding.sizes
    copy_weights(holding, read_weights(base, holding.parameters, sizes))
    adapters = tuple(empty_adapters(holding.parameters, sizes, lora))
    load(checkpoint, adapter_tensors(adapters))
    merge(holding.parameters, adapters, sizes, lora)
    return adapters


def parameter_count(sizes: Sizes) -> int:
    """Count the parameters of a model."""
    return count_parameters(sizes).total


def trained_sizes(described: dict[str, Any]) -> Sizes:
    """Read the sizes that `penstock.train.resumption.describe_model` has written."""
    kinds: dict[str, type[Sizes]] = {
        "gpt": GPTConfig,
        "bert": BertConfig,
        "decoder": DecoderConfig,
        "encoder": EncoderConfig,
    }
    kind = kinds.get(str(described.get("family")), LlamaConfig)
    known = {item.name for item in fields(kind)}
    try:
        return kind(**{key: value for key, value in described.items() if key in known})
    except (TypeError, ShapeError, ZeroDivisionError) as error:
        raise FileError(
            f"the checkpoint does not say the sizes of its model: {error}"
        ) from None


def continues_texts(sizes: Sizes) -> bool:
    """Whether a model predicts the next word; an encoder does not."""
    return not isinstance(sizes, BertConfig | EncoderConfig)


# ---------------------------------------------------------------- word by word
class Reader:
    """Reads a growing row of words, each word once, and keeps keys and values.

    row    d e f _ m a i n        the prompt is one slice, every word after it another
           └─────┘ ' ' ' '
    """

    def __init__(self, parts: Sequence[Part], longest: int, room: int) -> None:
        self.parts = parts
        self.longest = longest
        self.room = room
        self.open_window(0)

    def open_window(self, first: int) -> None:
        """Begin to read at this word, with nothing kept. Each part keeps its own keys and values."""
        self.first = first
        tokens = min(self.room - first, self.longest)
        self.carries = [Carry(tokens) for _ in self.parts]

    def last(self, row: Sequence[int]) -> Tensor:
        """Return the logits after the last word.

        If all positions are used, the last half of them begins a new window.
        """
        if len(row) - self.first > self.longest:
            self.open_window(len(row) - max(self.longest // 2, 1))
        if any(part.unsliceable for part in self.parts):
            x = torch.tensor([row[self.first :]])
            for part in self.parts:
                x = part(x)
            return x[0, -1]
        begin, end = self.carries[0].reached, len(row) - self.first
        x = torch.tensor([row[self.first + begin :]])
        for part, carry in zip(self.parts, self.carries, strict=True):
            x = part(x, carry.open(begin, end))
        return x[0, -1]


def parts_along(model: Part, path: Sequence[int] | None) -> list[Part]:
    """Return what a word passes through: the whole model or, along a path, some of its layers and the head."""
    if path is None:
        return [model]
    *parts, head = split(model, [1] * layer_count(model) + [0])
    return [*(parts[layer] for layer in path), head]


@torch.no_grad()
def generate_text(
    trained: Trained,
    prompt: str,
    tokens: int,
    temperature: float = 0.8,
    seed: int = 0,
    path: Sequence[int] | None = None,
) -> str:
    """Return the prompt and a continuation; temperature 0 takes the likeliest words.

    If a `path` names layers, only these run.
    """
    if tokens < 0:
        raise ShapeError(f"the number of new tokens must be at least 0, not {tokens}")
    if not 0 <= temperature < math.inf:
        raise ShapeError(
            f"{temperature:g} is not a temperature; 0 takes the likeliest word, "
            "1 draws as trained"
        )
    if not 0 <= seed < MAX_SEED:
        raise ShapeError(f"{seed} is not a seed; it must be from 0 to 2^63 - 1")
    if not continues_texts(trained.sizes):
        raise ShapeError(
            f"a {model_name(trained.sizes)} fills in words that are masked; it does not continue a text\n"
            "  `penstock eval` measures how well it does that"
        )
    words: Tokenizer = tokenizer_of(trained.tokenizer)
    row = words.encode(
        prompt.encode("utf-8", "surrogateescape"), "the prompt"
    ).tolist() or [words.end or 0]
    draw = torch.Generator().manual_seed(seed)
    if trained.sizes.width < SMALL_WIDTH:
        torch.set_num_threads(1)
    room = len(row) + tokens
    longest = getattr(trained.sizes, "positions", 0) or room
    reader = Reader(parts_along(trained.model, path), longest, room)
    for _ in range(tokens):
        # A model may have more words than the tokenizer.
        logits = reader.last(row)[: words.vocab]
        if not torch.isfinite(logits).all():
            raise RunError(
                f"the model in {trained.path} produced NaN or infinite logits\n"
                "  check its loss"
            )
        if temperature == 0:
            row.append(int(logits.argmax()))
        else:
            likely = ((logits - logits.max()).double() / temperature).softmax(-1)
            row.append(int(torch.multinomial(likely, 1, generator=draw)))
        if row[-1] == words.end and words.end is not None:
            break
    return words.decode(row)


# ---------------------------------------------------------------- some of its layers
def chosen_path(layers: int, omit: Sequence[int] = ()) -> PartPath:
    """Return the layers that run if some are left out.

    Layers are counted from 0.

    >>> chosen_path(6, omit=[2])
    (0, 1, 3, 4, 5)
    """
    last = layers - 1
    unknown = [layer for layer in omit if not 0 <= layer <= last]
    if unknown:
        raise ShapeError(
            f"layer {unknown[0]} cannot be left out: the layers are 0 to {last}"
        )
    if 0 in omit:
        raise ShapeError(
            "layer 0 cannot be left out: it always runs in training, so the others rely on it\n"
            f"  leave out some of the layers 1 to {last}"
        )
    return tuple(layer for layer in range(layers) if layer not in omit)


def parse_layers(text: str) -> list[int]:
    """Read the numbers of layers from a text such as 2,5."""
    try:
        return [int(word) for word in text.split(",") if word.strip()]
    except ValueError:
        raise ShapeError(
            f"{text!r} does not name layers; write their numbers with commas, such as 2,5"
        ) from None


def parse_omission(text: str) -> float | list[int]:
    """Read what to leave out: a share of the layers, such as 0.25, or the layers themselves, such as 2,5.

    >>> parse_omission("0.25"), parse_omission("2,5"), parse_omission("3")
    (0.25, [2, 5], [3])
    """
    try:
        share = float(text)
    except ValueError:
        return parse_layers(text)
    is_layer = text.strip().isdecimal() and share >= 1
    return [int(text)] if is_layer else share
