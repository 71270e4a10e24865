"""Hugging Face decoders, taken apart by their layer lists, without tracing and without importing transformers.

    family                   first part               every part         last part
    Llama, Mistral, Qwen2    model.embed_tokens       model.rotary_emb   model.norm, lm_head
    GPT-2                    transformer.wte, .wpe,                      transformer.ln_f, lm_head
                             .drop

The list is closed, by class name: another decoder may have its modules in the same places and yet do more between them
(Gemma scales its embeddings), which would train, wrongly, in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from penstock.carry import Slice
from penstock.errors import PenstockError, ShapeError

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
    """Where the pieces of a model are, by name, and how to run them: `enter`, `through` some layers, then the head.

    `root` is whatever has the pieces asked for under their names: the model, or a part of it.
    """

    width: int
    embed: tuple[str, ...]  # what only the first part holds
    layers: tuple[str, ...]
    head: tuple[str, ...]  # what only the last part holds, in the order it runs
    everywhere: tuple[str, ...]  # what has no weights, and every part needs
    enter: Callable[[nn.Module, Tensor, Slice | None], Tensor]
    through: Callable[[nn.Module, Iterable[nn.Module], Tensor, Slice | None], Tensor]
    unsliceable: str = ""  # why it cannot be run slice by slice, if it cannot


HF_FAMILIES = {
    "LlamaForCausalLM": "model.layers",
    "MistralForCausalLM": "model.layers",
    "Qwen2ForCausalLM": "model.layers",
    "GPT2LMHeadModel": "transformer.h",
}


def hf_anatomy(model: nn.Module) -> Anatomy:
    """Where the pieces of a Hugging Face decoder are; an error that says what was looked for if it is none."""
    config: Any = getattr(model, "config", None)
    family = next(
        (
            cls.__name__
            for cls in type(model).__mro__
            if cls.__name__ in HF_FAMILIES and _is_theirs(cls)
        ),
        None,
    )
    if family is None or config is None:
        raise PenstockError(
            _unknown(
                type(model).__name__, bool(getattr(config, "is_encoder_decoder", False))
            )
        )
    _refuse_extras(family, config)
    layers = tuple(
        f"{HF_FAMILIES[family]}.{i}" for i in range(config.num_hidden_layers)
    )
    anatomy = (_gpt2 if family == "GPT2LMHeadModel" else _llama)(
        config.hidden_size, layers
    )
    _look_for(
        model,
        family,
        (*anatomy.embed, *anatomy.everywhere, *anatomy.layers, *anatomy.head),
    )
    _refuse_own_forward(model, family)
    for path in layers:
        _sight(
            model.get_submodule(
                f"{path}.{'attn' if family == 'GPT2LMHeadModel' else 'self_attn'}"
            )
        )
    return anatomy


def _llama(width: int, layers: tuple[str, ...]) -> Anatomy:
    """Positions are angles, computed by the model's own rotary module."""

    def enter(root: nn.Module, tokens: Tensor, piece: Slice | None) -> Tensor:
        return cast(Tensor, root.get_submodule("model.embed_tokens")(tokens))

    def through(
        root: nn.Module, layers: Iterable[nn.Module], x: Tensor, piece: Slice | None
    ) -> Tensor:
        angles = _angles(root.get_submodule("model.rotary_emb"), x, piece)
        return _masked(layers, "self_attn", x, piece, position_embeddings=angles)

    head, rotary = ("model.norm", "lm_head"), ("model.rotary_emb",)
    return Anatomy(width, ("model.embed_tokens",), layers, head, rotary, enter, through)


def _gpt2(width: int, layers: tuple[str, ...]) -> Anatomy:
    """Positions are a table of weights, added to the tokens."""
    embed = ("transformer.wte", "transformer.wpe", "transformer.drop")

    def enter(root: nn.Module, tokens: Tensor, piece: Slice | None) -> Tensor:
        words, positions, drop = (root.get_submodule(path) for path in embed)
        length = tokens.shape[1] if piece is None else piece.tokens
        if length > cast(nn.Embedding, positions).num_embeddings:
            raise ShapeError(
                f"{length} tokens, but only {positions.num_embeddings} positions"
            )
        return cast(Tensor, drop(words(tokens) + positions(_places(tokens, piece))))

    def through(
        root: nn.Module, layers: Iterable[nn.Module], x: Tensor, piece: Slice | None
    ) -> Tensor:
        return _masked(layers, "attn", x, piece)

    return Anatomy(
        width, embed, layers, ("transformer.ln_f", "lm_head"), (), enter, through
    )


def _places(x: Tensor, piece: Slice | None) -> Tensor:
    """The position of each token, (1 or rows, tokens)."""
    place = (
        torch.arange(x.shape[1], device=x.device)
        if piece is None
        else piece.positions(x.device)
    )
    return place if place.dim() == 2 else place[None]


def _angles(rotary: Any, x: Tensor, piece: Slice | None) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the tokens at hand, from the model's own rotary module.

    The types `dynamic` and `longrope` choose their frequencies by the largest position that they are given. A slice
    therefore asks for the positions of its whole sequence and takes its own rows of the answer.
    """
    kind = str(getattr(rotary, "rope_type", "default"))
    if "dynamic" not in kind and kind != "longrope":
        cos, sin = rotary(x, _places(x, piece))
        return cos, sin
    whole = _places(x, None) if piece is None else piece.all_positions(x.device)
    if "dynamic" in kind:
        packed = piece is not None and piece.carry.starts is not None
        _forget_lengths(
            rotary, int(whole.max()) + 1 if packed else whole.shape[-1], x.device
        )
    cos, sin = rotary(x, whole if whole.dim() == 2 else whole[None])
    if piece is None:
        return cos, sin
    return cos[:, piece.begin : piece.end], sin[:, piece.begin : piece.end]


def _forget_lengths(rotary: Any, length: int, device: torch.device) -> None:
    """Makes a `dynamic` rotary module choose its frequencies by this sequence alone."""
    refuse_lengths(rotary, [length])
    rotary.register_buffer(
        "inv_freq", rotary.original_inv_freq.to(device), persistent=False
    )
    rotary.max_seq_len_cached = int(rotary.original_max_seq_len)


def remembers_lengths(rotary: Any) -> bool:
    """Whether a rotary module keeps something of the longest sequence so far."""
    return "dynamic" in str(getattr(rotary, "rope_type", "default"))


def refuse_lengths(rotary: Any, lengths: Iterable[int]) -> None:
    """Raises if sequences of these lengths and those before them give a `dynamic` rotary module a history.

    The module keeps the frequencies of the longest sequence so far for every later one that is shorter but not shorter
    than `max_position_embeddings`. Then the result depends on the order of the micro-batches, which a schedule changes
    and recomputation repeats, so only one such length is accepted.
    """
    if not remembers_lengths(rotary):
        return
    plain, cached = int(rotary.original_max_seq_len), int(rotary.max_seq_len_cached)
    for length in lengths:
        if length < plain:
            continue
        first = getattr(rotary, "long_length", cached if cached > plain else length)
        if length != first:
            raise ShapeError(
                f"sequences of {first} and of {length} tokens cannot be mixed with rope_type={rotary.rope_type!r}: "
                f"Hugging Face's model keeps the frequencies of the longest one so far, so their order would matter\n"
                f"give all sequences (or the longest document of each micro-batch) one length, or fewer than {plain} "
                "tokens (max_position_embeddings), or choose another rope_type, such as 'yarn'"
            )
        rotary.long_length = length


def _unknown(name: str, encoder_decoder: bool) -> str:
    reason = (
        "its layers are two stacks, an encoder and a decoder"
        if encoder_decoder
        else "it is of no family known"
    )
    return (
        f"cannot split a {name}: {reason}\n"
        f"looked for a model of penstock.models, or a Hugging Face {', '.join(HF_FAMILIES)} (or a subclass)"
    )


def _refuse_extras(family: str, config: Any) -> None:
    """What the forward of a family can do that parts do not."""
    for word, plain in (
        ("is_encoder_decoder", False),
        ("add_cross_attention", False),
        ("is_causal", True),
    ):
        if getattr(config, word, plain) is not plain:
            raise PenstockError(
                f"cannot split a {family} with {word}={not plain}: only plain causal decoders"
            )


def _is_theirs(cls: type) -> bool:
    """Whether a class is Hugging Face's own: another one of the same name may do something else."""
    return cls.__module__.startswith("transformers.models.")


def _refuse_own_forward(model: nn.Module, family: str) -> None:
    """Parts run the modules inside a model, not the forward of the model: one that was overridden would be ignored."""
    for module in (model, model.get_submodule(HF_FAMILIES[family].partition(".")[0])):
        theirs = next((cls for cls in type(module).__mro__ if _is_theirs(cls)), None)
        if theirs is None or type(module).forward is not getattr(
            theirs, "forward", None
        ):
            name = type(module).__name__
            raise PenstockError(
                f"cannot split this {family}: {name} has a forward of its own, which parts would not run\n"
                f"put what it adds into the layers, the embedding or the loss, and use Hugging Face's own class"
            )


def _look_for(model: nn.Module, family: str, paths: Iterable[str]) -> None:
    held = {name for name, _ in model.named_modules(remove_duplicate=False)}
    missing = [path for path in paths if path not in held]
    if missing:
        raise PenstockError(
            f"cannot split this {family}: looked for {', '.join(missing)}, which it does not have"
        )


# ---------------------------------------------------------------- slices and masks
CHECKPOINTED = (
    "its layers use Hugging Face's gradient checkpointing, which drops the keys and values of earlier slices "
    "(call model.gradient_checkpointing_disable() and recompute whole stages instead, with Executor(recompute=...) or "
    "run.recompute)"
)
"""Why layers with gradient checkpointing cannot be run slice by slice."""


class PastKeys:
    """What attention of Hugging Face asks for the keys and values before its own; here a slice's."""

    def __init__(self, piece: Slice) -> None:
        self.piece = piece

    def update(
        self, k: Tensor, v: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """All so far."""
        return self.piece.extend(layer_idx, "keys", k), self.piece.extend(
            layer_idx, "values", v
        )


def _masked(
    layers: Iterable[nn.Module],
    attention: str,
    x: Tensor,
    piece: Slice | None,
    **beside: Any,
) -> Tensor:
    """Through the layers, with one mask for all that see alike; none at all where the kernel knows what is causal."""
    masks: dict[tuple[str, int | None], Tensor | None] = {}
    if piece is not None and piece.partial:
        beside["past_key_values"] = PastKeys(piece)
    for layer in layers:
        sight = _sight(layer.get_submodule(attention))
        if sight not in masks:
            masks[sight] = causal_mask(*sight, x, piece)
        x = layer(x, attention_mask=masks[sight], **beside)
    return x


def causal_mask(
    kernel: str, window: int | None, x: Tensor, piece: Slice | None = None
) -> Tensor | None:
    """What a layer must be told to see only the past, `window` tokens of it. None: it knows by itself.

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
                f"{kernel} looks across packed documents; model.set_attn_implementation('sdpa')"
            )
        return None
    begin, end = (0, x.shape[1]) if piece is None else (piece.begin, piece.end)
    if (
        kernel == "sdpa"
        and (piece is None or piece.causal)
        and (window is None or end <= window)
    ):
        return None
    back = torch.arange(begin, end, device=x.device)[:, None] - torch.arange(
        end, device=x.device
    )
    seen = (back >= 0 if piece is None else piece.seen(x.device)) & (
        back < (end if window is None else window)
    )
    seen = seen if seen.dim() == 4 else seen[None, None]
    if kernel == "eager":
        return torch.zeros_like(seen, dtype=x.dtype).masked_fill(
            ~seen, torch.finfo(x.dtype).min
        )
    return seen


def _sight(attention: Any) -> tuple[str, int | None]:
    """Which kernel, and how far back: Mistral has one window for all layers, Qwen2 one a layer, the others none."""
    kernel = str(attention.config._attn_implementation)
    if kernel not in KERNELS:
        raise PenstockError(
            f"attention {kernel!r} cannot run in parts; model.set_attn_implementation('sdpa') can"
        )
    mistral = any(cls.__name__ == "MistralAttention" for cls in type(attention).__mro__)
    holder = attention.config if mistral else attention
    return kernel, getattr(holder, "sliding_window", None)


# ---------------------------------------------------------------- names
def rename(state: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """A state with its names translated. `names` holds names of modules or of tensors, `*` for a layer's number."""
    return {_translate(name, names): tensor for name, tensor in state.items()}


def inverse_names(names: Mapping[str, str]) -> dict[str, str]:
    """The way back."""
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
        f"there is no place for {name!r}; known: {', '.join(sorted(names))}"
    )
