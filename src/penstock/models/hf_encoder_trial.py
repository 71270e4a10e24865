"""Tries a class of Hugging Face encoders on a small model before any part of it is used.

    logits and gradients of the whole model                 ══?══  those of two parts, one after the other
    the same with an attention_mask that hides padding      ══?══  those of two parts with that mask
    those of documents one by one                           ══?══  those of two parts with both in one row

How the model counts positions is read off its embedding of positions: the position of the first word, and whether
padding is counted. The words of the trial include those of padding and of the mask, so a class that treats them in a
way that parts do not is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.carry import Carry
from penstock.models.hf import Encoding, Pieces
from penstock.models.hf_encoder import EncoderRunner
from penstock.models.hf_small import first_line, near, take_gradients

DOCUMENTS = (4, 5)  # tokens of two documents in one row
PADDING = 3  # tokens of padding in one row
# Where attention sees both ways, the bias of its keys changes nothing, and its gradient is rounding alone. So gradients
# count as no smaller than this share of the largest one.
SMALL_GRADIENT = 0.05
WORDS_IN_CONFIG = ("pad_token_id", "mask_token_id")


def trial_words(model: Any, rows: int, tokens: int, special: bool = True) -> Tensor:
    """Random words; if wanted, also those with a meaning of their own, which are otherwise left out."""
    known: list[Any] = [getattr(model.config, key, None) for key in WORDS_IN_CONFIG]
    everything = range(model.config.vocab_size)
    numbers = [one for one in known if one in everything]
    others = torch.tensor([word for word in everything if word not in numbers])
    words = others[torch.randint(0, len(others), (rows, tokens))]
    if special:
        for place, number in enumerate(numbers):
            words[0, 2 + 3 * place] = number
    return words


def find_encoding(model: Any, pieces: Pieces, plain: Tensor, words: Tensor) -> Encoding:
    """How a model counts positions and whether it takes types; `words` has padding where `plain` has none."""
    embeddings = f"{pieces.base}.{pieces.before[0]}"
    types = "token_type_ids" in inspect.signature(type(model).forward).parameters
    types = types and bool(getattr(model.config, "type_vocab_size", 0))
    for name, module in model.get_submodule(embeddings).named_modules():
        if not isinstance(module, nn.Embedding) or not name:
            continue
        places = _looked_up(model, module, plain)
        if places is None or not bool((places[:, 1:] == places[:, :-1] + 1).all()):
            continue
        first = int(places[0, 0])
        padding = getattr(model.config, "pad_token_id", None)
        found = _looked_up(model, module, words)
        counted = padding is None or found is None or torch.equal(found, places)
        table = f"{embeddings}.{name}"
        return Encoding(first, None if counted else padding, table, types)
    return Encoding(types=types)


def _looked_up(model: Any, table: nn.Embedding, words: Tensor) -> Tensor | None:
    """What a table is asked for, a row for each row of words; None if it is not asked for that many."""
    asked: list[Tensor] = []
    hook = table.register_forward_pre_hook(lambda _, given: asked.append(given[0]))
    with torch.no_grad():
        model(words)
    hook.remove()
    if not asked or asked[0].shape[-1:] != words.shape[-1:]:
        return None
    return asked[0].expand_as(words)


# ---------------------------------------------------------------- the trial
def fault_of_encoder(model: Any, pieces: Pieces, tokens: Tensor) -> str:
    """What is wrong when two parts run one after the other; empty if they are the whole model."""
    whole = model(tokens).logits
    if whole.shape != (*tokens.shape, model.config.vocab_size):
        return "it does not give a logit for every word at every token"
    other = tokens.clone()
    other[:, -1] = (other[:, -1] + 1) % model.config.vocab_size
    if torch.equal(model(other).logits[:, :-1], whole[:, :-1]):
        return "its words do not see later words, so it is not an encoder"
    case = _Case(model, pieces, tokens, _draw_types(model, pieces, tokens))
    for check in (_as_they_are, _with_padding, _with_documents):
        fault = check(case)
        if fault:
            return fault
    return ""


@dataclass(frozen=True, slots=True)
class _Case:
    """A model and the rows that it is tried on."""

    model: Any
    pieces: Pieces
    tokens: Tensor
    types: Tensor | None

    def whole(self, begin: int, end: int, mask: Tensor | None = None) -> Tensor:
        """The logits of the whole model for some of the tokens of each row."""
        arguments: dict[str, Any] = {"attention_mask": mask}
        if self.types is not None:
            arguments["token_type_ids"] = self.types[:, begin:end]
        logits: Tensor = self.model(self.tokens[:, begin:end], **arguments).logits
        return logits

    def parts(self, mask: Tensor | None = None, starts: Tensor | None = None) -> Tensor:
        """The logits of two parts, one after the other."""
        model, count = self.model, self.model.config.num_hidden_layers
        cut = max(1, count // 2)
        tokens = self.tokens.shape[1]

        def run(layers: range, ends: tuple[bool, bool], x: Tensor) -> Tensor:
            runner = EncoderRunner(model, self.pieces, model, layers, ends)
            piece = None
            if starts is not None:
                piece = Carry(tokens, starts).open(0, tokens)
            return runner(x, piece, self.types if ends[0] else None, mask)

        x = run(range(cut), (True, False), self.tokens)
        return run(range(cut, count), (False, True), x)


def _draw_types(model: Any, pieces: Pieces, tokens: Tensor) -> Tensor | None:
    if pieces.encoding is None or not pieces.encoding.types:
        return None
    return torch.randint(0, model.config.type_vocab_size, tokens.shape)


def _as_they_are(case: _Case) -> str:
    tokens = case.tokens.shape[1]
    counts = torch.ones_like(case.tokens, dtype=torch.bool)
    return _difference(
        case, counts, lambda: case.whole(0, tokens), case.parts, "rows of text"
    )


def _with_padding(case: _Case) -> str:
    tokens = case.tokens.shape[1]
    mask = torch.ones_like(case.tokens)
    mask[0, -PADDING:] = 0
    return _difference(
        case,
        mask == 1,
        lambda: case.whole(0, tokens, mask),
        lambda: case.parts(mask),
        "rows with padding",
    )


def _with_documents(case: _Case) -> str:
    border = DOCUMENTS[0]
    starts = torch.zeros_like(case.tokens)
    starts[:, border:] = border
    tokens = case.tokens.shape[1]

    def alone() -> Tensor:
        return torch.cat([case.whole(0, border), case.whole(border, tokens)], dim=1)

    counts = torch.ones_like(case.tokens, dtype=torch.bool)
    return _difference(
        case, counts, alone, lambda: case.parts(starts=starts), "documents in one row"
    )


def _difference(
    case: _Case,
    counts: Tensor,
    whole: Callable[[], Tensor],
    parts: Callable[[], Tensor],
    what: str,
) -> str:
    """Where the logits that count, or the gradients, are not those of the whole model; empty if they all are."""
    expected = whole().where(counts[..., None], 0.0)
    weights = torch.linspace(-1, 1, expected.numel()).reshape(expected.shape)
    torch.autograd.backward((expected * weights).sum())
    wanted = take_gradients(case.model)
    try:
        found = parts().where(counts[..., None], 0.0)
    except Exception as error:
        return f"its forward does not run in parts, for {what} ({first_line(error)})"
    if not near(found, expected):
        return f"its parts, one after the other, do not give its logits for {what}"
    torch.autograd.backward((found * weights).sum())
    gradients = take_gradients(case.model)
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    least = SMALL_GRADIENT * largest
    for name, gradient in wanted.items():
        if name not in gradients or not near(gradients[name], gradient, least):
            return f"the gradient of {name} in its parts is not that of the whole model, for {what}"
    return ""
