"""Splits Hugging Face decoders by their lists of layers, without tracing and without importing transformers.

    family                   first part               every part         last part
    Llama, Mistral, Qwen2    model.embed_tokens       model.rotary_emb   model.norm, lm_head
    GPT-2                    transformer.wte, .wpe,                      transformer.ln_f, lm_head
                             .drop

Only these classes are accepted. Another decoder may have its modules in the same places and yet do more between them
(Gemma scales its embeddings). Split in the same way, it would silently train wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from penstock.carry import Slice
from penstock.errors import PenstockError, ShapeError
from penstock.models.attention import token_positions

KERNELS = (
    "eager",
    "sdpa",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
)


# ---------------------------------------------------------------- anatomy
@dataclass(frozen=True, slots=True)
class Anatomy:
    """The names of a model's pieces, and how to run them: `enter`, `through` layers, then the head.

    The first argument of both functions, the root, is the module that has the pieces
    under these names: the model or a part of it.
    """

    width: int
    embed: tuple[str, ...]  # held only by the first part
    layers: tuple[str, ...]
    head: tuple[str, ...]  # held only by the last part, in the order they run
    everywhere: tuple[str, ...]  # without weights; every part has a copy
    enter: Callable[[nn.Module, Tensor, Slice | None], Tensor]
    through: Callable[[nn.Module, Iterable[nn.Module], Tensor, Slice | None], Tensor]
    unsliceable: str = ""  # why it cannot be run slice by slice; "" if it can


HF_FAMILIES = {
    "LlamaForCausalLM": "model.layers",
    "MistralForCausalLM": "model.layers",
    "Qwen2ForCausalLM": "model.layers",
    "GPT2LMHeadModel": "transformer.h",
}


def hf_anatomy(model: nn.Module) -> Anatomy:
    """Return the anatomy of a Hugging Face decoder; refuse any other model."""
    config: Any = getattr(model, "config", None)
    family = _family_of(model)
    if family is None or config is None:
        two_stacks = bool(getattr(config, "is_encoder_decoder", False))
        raise PenstockError(_unknown(type(model).__name__, two_stacks))
    _refuse_extras(family, config)
    prefix = HF_FAMILIES[family]
    layers = tuple(f"{prefix}.{i}" for i in range(config.num_hidden_layers))
    if family == "GPT2LMHeadModel":
        anatomy = _gpt2(config.hidden_size, layers)
        attention = "attn"
    else:
        anatomy = _llama(config.hidden_size, layers)
        attention = "self_attn"
    pieces = (*anatomy.embed, *anatomy.everywhere, *anatomy.layers, *anatomy.head)
    _look_for(model, family, pieces)
    _refuse_own_forward(model, family)
    for path in layers:
        _sight(model.get_submodule(f"{path}.{attention}"))  # refuses unknown kernels
    return anatomy


def _family_of(model: nn.Module) -> str | None:
    for cls in type(model).__mro__:
        if cls.__name__ in HF_FAMILIES and _is_theirs(cls):
            return cls.__name__
    return None


def _llama(width: int, layers: tuple[str, ...]) -> Anatomy:
    """Llama's anatomy: positions are angles from the model's own rotary module."""

    def enter(root: nn.Module, tokens: Tensor, piece: Slice | None) -> Tensor:
        return cast(Tensor, root.get_submodule("model.embed_tokens")(tokens))

    def through(
        root: nn.Module, layers: Iterable[nn.Module], x: Tensor, piece: Slice | None
    ) -> Tensor:
        angles = _angles(root.get_submodule("model.rotary_emb"), x, piece)
        return _masked(layers, "self_attn", x, piece, position_embeddings=angles)

    embed = ("model.embed_tokens",)
    head = ("model.norm", "lm_head")
    rotary = ("model.rotary_emb",)
    return Anatomy(width, embed, layers, head, rotary, enter, through)


def _gpt2(width: int, layers: tuple[str, ...]) -> Anatomy:
    """GPT-2's anatomy: positions are a table of weights, added to the tokens."""
    embed = ("transformer.wte", "transformer.wpe", "transformer.drop")
    head = ("transformer.ln_f", "lm_head")

    def enter(root: nn.Module, tokens: Tensor, piece: Slice | None) -> Tensor:
        words, positions, drop = (root.get_submodule(path) for path in embed)
        length = tokens.shape[1] if piece is None else piece.tokens
        if length > cast(nn.Embedding, positions).num_embeddings:
            raise ShapeError(
                f"{length} tokens, but only {positions.num_embeddings} positions"
            )
        x = words(tokens) + positions(_places(tokens, piece))
        return cast(Tensor, drop(x))

    def through(
        root: nn.Module, layers: Iterable[nn.Module], x: Tensor, piece: Slice | None
    ) -> Tensor:
        return _masked(layers, "attn", x, piece)

    return Anatomy(width, embed, layers, head, (), enter, through)


def _places(x: Tensor, piece: Slice | None) -> Tensor:
    """Return the position of each token, (1 or rows, tokens)."""
    return _as_rows(token_positions(x, piece))


def _as_rows(positions: Tensor) -> Tensor:
    return positions if positions.dim() == 2 else positions[None]


def _angles(rotary: Any, x: Tensor, piece: Slice | None) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of the tokens, from the model's own rotary module.

    The types `dynamic` and `longrope` choose their frequencies by the largest position
    that they are given. A slice therefore asks for the positions of its whole sequence
    and takes its own rows of the answer.
    """
    kind = str(getattr(rotary, "rope_type", "default"))
    if "dynamic" not in kind and kind != "longrope":
        cos, sin = rotary(x, _places(x, piece))
        return cos, sin
    whole = _places(x, None) if piece is None else piece.all_positions(x.device)
    if "dynamic" in kind:
        length = whole.shape[-1]
        if piece is not None and piece.carry.starts is not None:  # packed documents
            length = int(whole.max()) + 1
        _forget_lengths(rotary, length, x.device)
    cos, sin = rotary(x, _as_rows(whole))
    if piece is None:
        return cos, sin
    return cos[:, piece.begin : piece.end], sin[:, piece.begin : piece.end]


def _forget_lengths(rotary: Any, length: int, device: torch.device) -> None:
    """Make a `dynamic` rotary module choose its frequencies by this sequence alone."""
    refuse_lengths(rotary, [length])
    frequencies = rotary.original_inv_freq.to(device)
    rotary.register_buffer("inv_freq", frequencies, persistent=False)
    rotary.max_seq_len_cached = int(rotary.original_max_seq_len)


def remembers_lengths(rotary: Any) -> bool:
    """Return whether a rotary module depends on the longest sequence so far."""
    return "dynamic" in str(getattr(rotary, "rope_type", "default"))


def refuse_lengths(rotary: Any, lengths: Iterable[int]) -> None:
    """Refuse lengths for which a `dynamic` rotary module would depend on its history.

    The module keeps the frequencies of the longest sequence so far, and uses them for
    all later sequences of `max_position_embeddings` tokens or more. The result would
    depend on the order of the micro-batches, which a schedule changes and recomputation
    repeats. So only one length of that size is accepted.
    """
    if not remembers_lengths(rotary):
        return
    plain = int(rotary.original_max_seq_len)
    cached = int(rotary.max_seq_len_cached)
    for length in lengths:
        if length < plain:
            continue
        longest = cached if cached > plain else length
        first = getattr(rotary, "long_length", longest)
        if length != first:
            raise ShapeError(
                f"sequences of {first} and of {length} tokens cannot be mixed with rope_type={rotary.rope_type!r}: "
                "Hugging Face's model keeps the frequencies of the longest one so far, so their order would matter\n"
                "give all sequences (or the longest document of each micro-batch) the same length, or fewer than "
                f"{plain} tokens (max_position_embeddings), or choose another rope_type, such as 'yarn'"
            )
        rotary.long_length = length


def _unknown(name: str, encoder_decoder: bool) -> str:
    reason = "its family is not supported"
    if encoder_decoder:
        reason = "it has two stacks of layers, an encoder and a decoder"
    families = ", ".join(HF_FAMILIES)
    return (
        f"cannot split a {name}: {reason}\n"
        f"use a model of penstock.models, or a Hugging Face {families} (or a subclass)"
    )


def _refuse_extras(family: str, config: Any) -> None:
    """Refuse options that the whole model knows but its parts do not."""
    supported = {
        "is_encoder_decoder": False,
        "add_cross_attention": False,
        "is_causal": True,
    }
    for option, value in supported.items():
        if getattr(config, option, value) is not value:
            raise PenstockError(
                f"cannot split a {family} with {option}={not value}: only plain causal "
                "decoders can be split"
            )


def _is_theirs(cls: type) -> bool:
    """Return whether a class is Hugging Face's own, and not another of the same name."""
    return cls.__module__.startswith("transformers.models.")


def _refuse_own_forward(model: nn.Module, family: str) -> None:
    """Refuse a model with an overridden forward, which its parts would ignore.

    Parts run the modules inside a model, not the model's own forward.
    """
    inner = HF_FAMILIES[family].partition(".")[0]
    for module in (model, model.get_submodule(inner)):
        cls = type(module)
        theirs = next((base for base in cls.__mro__ if _is_theirs(base)), None)
        if theirs is None or cls.forward is not getattr(theirs, "forward", None):
            raise PenstockError(
                f"cannot split this {family}: {cls.__name__} overrides forward, and parts would not run it\n"
                "move what it adds into the layers, the embedding or the loss, and use Hugging Face's own class"
            )


def _look_for(model: nn.Module, family: str, paths: Iterable[str]) -> None:
    """Refuse a model in which one of these modules is missing."""
    names = {name for name, _ in model.named_modules(remove_duplicate=False)}
    missing = [path for path in paths if path not in names]
    if missing:
        raise PenstockError(
            f"cannot split this {family}: it has no {', '.join(missing)}"
        )


# ---------------------------------------------------------------- slices and masks
CHECKPOINTED = (
    "its layers use Hugging Face's gradient checkpointing, which drops the keys and values of earlier slices "
    "(call model.gradient_checkpointing_disable() and recompute whole stages instead, with Executor(recompute=...) or "
    "run.recompute)"
)
"""Why layers with gradient checkpointing cannot be run slice by slice."""


class PastKeys:
    """The cache that Hugging Face's attention asks for earlier keys and values: those of a slice."""

    def __init__(self, piece: Slice) -> None:
        self.piece = piece

    def update(
        self, k: Tensor, v: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values, and return all so far."""
        keys = self.piece.extend(layer_idx, "keys", k)
        values = self.piece.extend(layer_idx, "values", v)
        return keys, values


def _masked(
    layers: Iterable[nn.Module],
    attention: str,
    x: Tensor,
    piece: Slice | None,
    **arguments: Any,
) -> Tensor:
    """Run the layers, with one mask for all layers that see alike."""
    masks: dict[tuple[str, int | None], Tensor | None] = {}
    if piece is not None and piece.partial:
        arguments["past_key_values"] = PastKeys(piece)
    for layer in layers:
        sight = _sight(layer.get_submodule(attention))
        if sight not in masks:
            masks[sight] = causal_mask(*sight, x, piece)
        x = layer(x, attention_mask=masks[sight], **arguments)
    return x


def causal_mask(
    kernel: str, window: int | None, x: Tensor, piece: Slice | None = None
) -> Tensor | None:
    """Return the mask with which a layer sees only the last `window` tokens.

    None means that the kernel needs no mask.

    tokens   window 3
    0        ■ . . . .
    1        ■ ■ . . .
    2        ■ ■ ■ . .
    3        . ■ ■ ■ .
    4        . . ■ ■ ■
    """
    if kernel.startswith("flash"):
        if piece is not None and piece.carry.starts is not None:
            raise PenstockError(
                f"{kernel} would look across packed documents; call model.set_attn_implementation('sdpa')"
            )
        return None
    begin, end = (0, x.shape[1]) if piece is None else (piece.begin, piece.end)
    fits_window = window is None or end <= window
    is_causal = piece is None or piece.causal
    if kernel == "sdpa" and is_causal and fits_window:
        return None
    queries = torch.arange(begin, end, device=x.device)[:, None]
    distance = queries - torch.arange(end, device=x.device)
    allowed = distance >= 0 if piece is None else piece.seen(x.device)
    seen = allowed & (distance < (end if window is None else window))
    if seen.dim() != 4:
        seen = seen[None, None]
    if kernel == "eager":
        zeros = torch.zeros_like(seen, dtype=x.dtype)
        return zeros.masked_fill(~seen, torch.finfo(x.dtype).min)
    return seen


def _sight(attention: Any) -> tuple[str, int | None]:
    """Return the kernel of a layer's attention, and its window.

    Mistral has one window for all layers, Qwen2 one per layer, the others have none.
    """
    kernel = str(attention.config._attn_implementation)
    if kernel not in KERNELS:
        raise PenstockError(
            f"attention {kernel!r} cannot run in parts; call model.set_attn_implementation('sdpa')"
        )
    mistral = any(cls.__name__ == "MistralAttention" for cls in type(attention).__mro__)
    holder = attention.config if mistral else attention
    return kernel, getattr(holder, "sliding_window", None)


# ---------------------------------------------------------------- names
def rename(state: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """Translate the names of a state.

    `names` maps names of modules or tensors; `*` stands for the number of a layer.
    """
    return {_translate(name, names): tensor for name, tensor in state.items()}


def inverse_names(names: Mapping[str, str]) -> dict[str, str]:
    """Return the mapping in the other direction."""
    return {theirs: ours for ours, theirs in names.items()}


def _translate(name: str, names: Mapping[str, str]) -> str:
    words = name.split(".")
    number = next((word for word in words if word.isdigit()), "")
    pattern = ".".join("*" if word == number else word for word in words)
    module, _, leaf = pattern.rpartition(".")
    if pattern in names:
        return names[pattern].replace("*", number)
    if module in names:
        return f"{names[module].replace('*', number)}.{leaf}"
    raise PenstockError(
        f"unknown weight {name!r}; known names: {', '.join(sorted(names))}"
    )
