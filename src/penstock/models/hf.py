"""Splits Hugging Face decoders by their lists of layers, without tracing and without importing transformers.

    first part              every part          last part
    embed_tokens            rotary_emb          norm, lm_head         Llama, Mistral, Qwen, Gemma, Phi-3, OLMo, Mixtral
    embed_in, emb_dropout   rotary_emb          final_layer_norm,     GPT-NeoX
                                                embed_out
    wte, wpe, drop                              ln_f, lm_head         GPT-2

No family is known by name. The pieces are found in what transformers publishes: the list of layers, the embeddings
that go in and come out, and `base_model_pp_plan`, which says what runs before and after the layers. A part then calls
the model's own forward, in which the pieces of other parts pass x on (`penstock.models.hf_part`). Whether that gives
what the whole model gives is tried on a small model of the same class (`penstock.models.hf_trial`) before any part of
it is used. A model that fails is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from penstock.errors import PenstockError


# ---------------------------------------------------------------- anatomy
@dataclass(frozen=True, slots=True)
class Pieces:
    """Where a Hugging Face decoder has its pieces; all names but those of `outside` are names in its base model."""

    base: str  # the name of the base model, such as "model" or "transformer"
    before: tuple[str, ...]  # the embedding of tokens comes first
    layers: str  # the name of the list
    after: tuple[str, ...]
    everywhere: tuple[str, ...]
    outside: tuple[str, ...]  # what follows the base model, such as "lm_head"
    cached: bool = True  # whether it runs with the keys and values of earlier slices

    def anatomy(self, config: Any, unsliceable: str = "") -> Anatomy:
        """The names of all pieces in the whole model."""
        inside = f"{self.base}."
        layers = range(config.num_hidden_layers)
        return Anatomy(
            config.hidden_size,
            tuple(inside + path for path in self.before),
            tuple(f"{inside}{self.layers}.{number}" for number in layers),
            (*(inside + path for path in self.after), *self.outside),
            tuple(inside + path for path in self.everywhere),
            unsliceable,
            self,
        )


@dataclass(frozen=True, slots=True)
class Anatomy:
    """The names of a model's pieces."""

    width: int
    embed: tuple[str, ...]  # held only by the first part
    layers: tuple[str, ...]
    head: tuple[str, ...]  # held only by the last part, in the order they run
    everywhere: tuple[str, ...]  # without weights; every part has a copy
    unsliceable: str = ""  # why it cannot be run slice by slice; "" if it can
    pieces: Pieces | None = None  # of a Hugging Face model; None for our own


def find_pieces(model: nn.Module) -> Pieces:
    """Find the pieces of a Hugging Face decoder; refuse any other model."""
    config: Any = getattr(model, "config", None)
    name = type(model).__name__
    if config is None or not any(map(_is_theirs, type(model).__mro__)):
        raise PenstockError(_unknown(name, "it is not one of transformers' models"))
    _refuse_extras(name, config)
    prefix = str(getattr(model, "base_model_prefix", ""))
    base = getattr(model, prefix, None) if prefix else None
    if not isinstance(base, nn.Module) or base is model:
        raise PenstockError(_unknown(name, "it has no base model and head"))
    _refuse_own_forward(model, base, name)
    children = dict(base.named_children())
    layers = _list_of_layers(children, config.num_hidden_layers)
    if layers is None:
        raise PenstockError(_unknown(name, "its layers are not one list of modules"))
    before, after = _around(children, layers, config)
    embeddings: Any = getattr(model, "get_input_embeddings", None)
    tokens = None if embeddings is None else embeddings()
    word = next((path for path, one in children.items() if one is tokens), None)
    if word is None:
        raise PenstockError(_unknown(name, "its base model does not embed the tokens"))
    before = (word, *(path for path in before if path != word))
    everywhere = []
    for path, module in children.items():
        if path in (*before, layers, *after):
            continue
        if next(module.parameters(), None) is not None:
            raise PenstockError(
                _unknown(
                    name, f"{prefix}.{path} has weights that run between its layers"
                )
            )
        everywhere.append(path)
    outside = tuple(path for path, _ in model.named_children() if path != prefix)
    if not outside:
        raise PenstockError(_unknown(name, "it has no head that makes logits"))
    return Pieces(prefix, before, layers, after, tuple(everywhere), outside)


def _list_of_layers(children: Mapping[str, nn.Module], count: int) -> str | None:
    """The name of the list that has as many modules as the config says."""
    for path, module in children.items():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return path
    return None


def _around(
    children: Mapping[str, nn.Module], layers: str, config: Any
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What runs before and after the layers: as transformers publishes it, otherwise in the order of the modules.

    Without a published plan a module after the layers counts only if it has weights: a rotary module has none.
    """
    plan = getattr(config, "base_model_pp_plan", None)
    order = list(plan) if plan and layers in plan else list(children)
    missing = [path for path in order if path not in children]
    if missing:
        raise PenstockError(
            f"cannot split this model: its base model has no {', '.join(missing)}"
        )
    cut = order.index(layers)
    before, after = tuple(order[:cut]), tuple(order[cut + 1 :])
    if order == list(children):
        after = tuple(
            path for path in after if any(True for _ in children[path].parameters())
        )
    return before, after


def _unknown(name: str, reason: str) -> str:
    return (
        f"cannot split a {name}: {reason}\n"
        "use a model of penstock.models, or a causal language model of transformers with one stack of layers "
        "(Llama, Mistral, Qwen, Gemma, Phi, OLMo, GPT-2, GPT-NeoX, Mixtral, ...)"
    )


def _refuse_extras(name: str, config: Any) -> None:
    """Refuse options that the whole model knows but its parts do not."""
    if getattr(config, "is_encoder_decoder", False):
        raise PenstockError(
            _unknown(name, "it has two stacks of layers, an encoder and a decoder")
        )
    supported = {
        "add_cross_attention": False,
        "is_causal": True,
        "output_router_logits": False,
    }
    for option, value in supported.items():
        if bool(getattr(config, option, value)) is not value:
            raise PenstockError(
                f"cannot split a {name} with {option}={not value}: only plain causal "
                "decoders can be split\n"
                f"  set {option}={value} in its config, or train it whole, on one rank"
            )


def _is_theirs(cls: type) -> bool:
    """Return whether a class is Hugging Face's own, and not another of the same name."""
    return cls.__module__.startswith("transformers.models.")


def _refuse_own_forward(model: nn.Module, base: nn.Module, name: str) -> None:
    """Refuse a model with an overridden forward: what it was tried with is Hugging Face's own."""
    for module in (model, base):
        cls = type(module)
        theirs = next((one for one in cls.__mro__ if _is_theirs(one)), None)
        if theirs is None or cls.forward is not getattr(theirs, "forward", None):
            raise PenstockError(
                f"cannot split this {name}: {cls.__name__} overrides forward, and parts would not run it\n"
                "move what it adds into the layers, the embedding or the loss, and use Hugging Face's own class"
            )


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
