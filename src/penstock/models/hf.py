"""Splits Hugging Face models by their lists of layers, without tracing.

    first part              every part          last part
    embed_tokens            rotary_emb          norm, lm_head         Llama, Mistral, Qwen, Gemma, Phi-3, OLMo, Mixtral
    embed_in, emb_dropout   rotary_emb          final_layer_norm,     GPT-NeoX
                                                embed_out
    wte, wpe, drop                              ln_f, lm_head         GPT-2
    embeddings                                  lm_head               RoBERTa, whose layers are in `encoder.layer`

No family is known by name. The pieces are found in what transformers publishes: the list of layers, the embeddings
that go in and come out, and `base_model_pp_plan`, which says what runs before and after the layers. A part then calls
the model's own forward, in which the pieces of other parts pass x on (`penstock.models.hf_part`). Whether that gives
what the whole model gives is tried on a small model of the same class (`penstock.models.hf_trial`) before any part of
it is used. A model that fails is refused.
"""

from __future__ import annotations

import copy
import importlib
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from penstock.errors import PenstockError

# While transformers builds or loads a model, it replaces functions of torch.nn.init and the default type of numbers for
# all threads. Ranks may be threads, so one after the other has it build.
BUILDING = threading.RLock()


# ---------------------------------------------------------------- layout
@dataclass(frozen=True, slots=True)
class Encoding:
    """How an encoder, whose words see both ways, takes its words."""

    first: int = 0  # the position of the first word; a RoBERTa counts from 2
    padding: int | None = None  # the word that is not counted, if there is one
    table: str = ""  # the embedding of positions in the whole model, if it has one
    types: bool = False  # whether it takes the types of segments


@dataclass(frozen=True, slots=True)
class Pieces:
    """Where a Hugging Face model has its pieces; all names but those of `outside` are names in its base model."""

    base: str  # the module with the layers: "model", "transformer" or, in an OPT, "model.decoder"
    before: tuple[str, ...]  # the embedding of tokens comes first
    layers: str  # the name of the list: "layers" or, in a RoBERTa, "encoder.layer"
    after: tuple[str, ...]
    everywhere: tuple[str, ...]
    outside: tuple[str, ...]  # what follows the base model, such as "lm_head"
    cached: bool = True  # whether it runs with the keys and values of earlier slices
    tuples: bool = False  # whether layers return tuples; the hidden state comes first
    encoding: Encoding | None = None  # of an encoder; None for a decoder
    # What a model of transformers' own modules consists of (`penstock.models.hf_trial`).
    theirs: frozenset[Any] = field(default=frozenset(), repr=False)

    def layout(self, config: Any, unsliceable: str = "") -> ModelLayout:
        """The names of all pieces in the whole model."""
        inside = f"{self.base}."
        layers = range(config.num_hidden_layers)
        return ModelLayout(
            config.hidden_size,
            tuple(inside + path for path in self.before),
            tuple(f"{inside}{self.layers}.{number}" for number in layers),
            (*(inside + path for path in self.after), *self.outside),
            tuple(inside + path for path in self.everywhere),
            unsliceable,
            self,
        )


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """The names of a model's pieces."""

    width: int
    embed: tuple[str, ...]  # held only by the first part
    layers: tuple[str, ...]
    head: tuple[str, ...]  # held only by the last part, in the order they run
    everywhere: tuple[str, ...]  # without weights; every part has a copy
    unsliceable: str = ""  # why it cannot be run slice by slice; "" if it can
    pieces: Pieces | None = None  # of a Hugging Face model; None for our own


def find_pieces(model: nn.Module, called: Sequence[str] = ()) -> Pieces:
    """Find the pieces of a Hugging Face model that gives logits of words; refuse any other model.

    `called` has the modules of its base model in the order in which its forward calls them, if that is known.
    """
    config: Any = getattr(model, "config", None)
    name = type(model).__name__
    if config is None or not any(map(_is_theirs, type(model).__mro__)):
        raise _unknown(name, "it is not one of transformers' models")
    encoder = is_encoder(model)
    _refuse_extras(name, config, encoder)
    prefix, word = _embedding_of_tokens(model, name)
    if encoder:
        prefix, word = _base_of_encoder(model, f"{prefix}.{word}")
    base = model.get_submodule(prefix)
    children, layers = stack_of(base, config.num_hidden_layers, encoder)
    if not layers:
        reason = f"there is no list of all its layers beside {prefix}.{word}"
        raise _unknown(name, reason)
    holder = base.get_submodule(layers.rpartition(".")[0])
    _refuse_own_forward((model, base, holder), name)
    before, after = _around(children, layers, config, called)
    before = (word, *(path for path in before if path != word))
    everywhere = []
    for path, module in children.items():
        if path in (*before, layers, *after):
            continue
        if next(module.parameters(), None) is not None:
            raise _unknown(
                name, f"{prefix}.{path} has weights that run between its layers"
            )
        everywhere.append(path)
    top, _, inner = prefix.partition(".")
    if inner and len(list(model.get_submodule(top).children())) > 1:
        raise _unknown(name, f"{top} has more than one stack of layers")
    outside = tuple(path for path, _ in model.named_children() if path != top)
    if not outside:
        raise _unknown(name, "it has no head that makes logits")
    pieces = Pieces(
        prefix,
        before,
        layers,
        after,
        tuple(everywhere),
        outside,
        encoding=Encoding() if encoder else None,
    )
    _refuse_loose_weights(model, pieces, name)
    return pieces


def _refuse_loose_weights(model: nn.Module, pieces: Pieces, name: str) -> None:
    """Refuse weights that are in no piece: every part would use them, and none would train them."""
    inside = (*pieces.before, pieces.layers, *pieces.after)
    paths = (*(f"{pieces.base}.{path}" for path in inside), *pieces.outside)
    held = {
        id(parameter)
        for path in paths
        for parameter in model.get_submodule(path).parameters()
    }
    for path, parameter in model.named_parameters():
        if id(parameter) not in held:
            raise _unknown(name, f"{path} is a weight outside of its modules")


def is_encoder(model: nn.Module) -> bool:
    """Whether transformers lists the class of one of its models among those that guess masked words."""
    auto: Any = importlib.import_module("transformers.models.auto.modeling_auto")
    listed = set(auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.values())
    return any(one.__name__ in listed for one in type(model).__mro__)


def _base_of_encoder(model: nn.Module, embedding: str) -> tuple[str, str]:
    """The base model of an encoder, and its module that embeds the tokens: the embedding, or one that holds it."""
    base = str(getattr(model, "base_model_prefix", ""))
    if not base or not embedding.startswith(f"{base}."):
        reason = "its base model does not embed the tokens"
        raise _unknown(type(model).__name__, reason)
    return base, embedding.removeprefix(f"{base}.").partition(".")[0]


def stack_of(
    base: nn.Module, count: int, deep: bool
) -> tuple[dict[str, nn.Module], str]:
    """The modules of a base model by name, and the name of the list of layers among them; empty if there is none.

    If the list is in one of the modules and not beside them, and `deep` allows that, the modules of that one are named
    instead: `encoder.layer`.
    """
    children = dict(base.named_children())
    layers = _list_of_layers(children, count)
    if layers is not None or not deep:
        return children, layers or ""
    for holder, module in children.items():
        inner = dict(module.named_children())
        layers = _list_of_layers(inner, count)
        if layers is None:
            continue
        named: dict[str, nn.Module] = {}
        for path, child in children.items():
            if path == holder:
                named |= {f"{holder}.{name}": one for name, one in inner.items()}
            else:
                named[path] = child
        return named, f"{holder}.{layers}"
    return children, ""


def _embedding_of_tokens(model: nn.Module, name: str) -> tuple[str, str]:
    """The module that holds the embedding of tokens, and the name of the embedding in it."""
    embeddings: Any = getattr(model, "get_input_embeddings", None)
    tokens = None if embeddings is None else embeddings()
    for path, module in model.named_modules():
        base, _, word = path.rpartition(".")
        if module is tokens and base:
            return base, word
    raise _unknown(name, "it has no base model that embeds the tokens")


def _list_of_layers(children: Mapping[str, nn.Module], count: int) -> str | None:
    """The name of the list that has as many modules as the config says."""
    for path, module in children.items():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return path
    return None


def _around(
    children: Mapping[str, nn.Module], layers: str, config: Any, called: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What runs before and after the layers: as transformers publishes it, otherwise in the order of the calls.

    If that is not known yet, the order of the modules counts. Without a published plan, modules without weights, such
    as a rotary module, belong to neither side; dropout does.
    """
    plan: Any = getattr(config, "base_model_pp_plan", None) or {}
    published = layers in plan
    order = list(plan if published else called or children)
    missing = [path for path in order if path not in children]
    if missing:
        raise PenstockError(
            f"cannot split this model: its base model has no {', '.join(missing)}"
        )
    cut = order.index(layers)
    before, after = order[:cut], order[cut + 1 :]
    if not published:
        before, after = (
            [path for path in side if _has_work(children[path])]
            for side in (before, after)
        )
    return tuple(before), tuple(after)


def _has_work(module: nn.Module) -> bool:
    """Whether only one part should run a module: it has weights, or it draws random numbers."""
    return isinstance(module, nn.Dropout) or any(True for _ in module.parameters())


def _unknown(name: str, reason: str) -> PenstockError:
    """The error for a model that cannot be split."""
    return PenstockError(
        f"cannot split a {name}: {reason}\n"
        "use a model of penstock.models, or a language model of transformers with one stack of layers (Llama, Mistral, "
        "Qwen, Gemma, Phi, OLMo, GPT-2, GPT-NeoX, Mixtral, ..., or RoBERTa and other encoders with a masked-LM head); "
        "a model of your own is a list of layers, which penstock.Pipeline takes"
    )


def _refuse_extras(name: str, config: Any, encoder: bool) -> None:
    """Refuse options that the whole model knows but its parts do not."""
    if getattr(config, "is_encoder_decoder", False):
        raise _unknown(name, "it has two stacks of layers, an encoder and a decoder")
    supported = {"add_cross_attention": False, "output_router_logits": False}
    supported["is_decoder" if encoder else "is_causal"] = not encoder
    kind = "encoders that see both ways" if encoder else "causal decoders"
    for option, value in supported.items():
        if bool(getattr(config, option, value)) is not value:
            raise PenstockError(
                f"cannot split a {name} with {option}={not value}: only plain {kind} can be split\n"
                f"  set {option}={value} in its config, or train it whole, on one rank"
            )
    if (
        encoder
        and getattr(config, "attention_type", "original_full") != "original_full"
    ):
        # Attention to blocks begins at a length that no trial has.
        raise PenstockError(
            f"cannot split a {name} with attention_type={config.attention_type!r}: long rows would be computed in "
            "another way than short ones\n"
            "  set attention_type='original_full' in its config"
        )


def _is_theirs(cls: type) -> bool:
    """Return whether a class is Hugging Face's own, and not another of the same name."""
    return cls.__module__.startswith("transformers.models.")


def _refuse_own_forward(modules: Sequence[nn.Module], name: str) -> None:
    """Refuse a model with an overridden forward: what it was tried with is Hugging Face's own."""
    for module in modules:
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


def saved_once(state: Mapping[str, Tensor], tied: bool) -> dict[str, Tensor]:
    """Return the weights of one of our models; an output matrix that is tied to the embedding is left out."""
    left_out = {"head.output.weight"} if tied else set()
    return {name: tensor for name, tensor in state.items() if name not in left_out}


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


WINDOW = 4  # of attention with a window in a small model, less than the tokens of a trial so that it matters
HEADS_IN_GROUP = 2  # heads that share keys and values, at most
# The largest sizes of a small config, where a config has them.
LIMITS = {
    "vocab_size": 64,
    "vocab_size_per_layer_input": 64,
    "intermediate_size": 48,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_inner": 48,
    "hidden_dim": 48,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
}


# ---------------------------------------------------------------- values
def layer_configs(config: Any) -> list[Any]:
    """Return a config for each layer if layers differ, otherwise the one for all."""
    if getattr(config, "is_heterogeneous", False):
        return list(config.per_layer_config)
    return [config]


def config_value(config: Any, name: str, default: Any = None) -> Any:
    """Return a value of a config; where layers differ, the largest."""
    found = [getattr(one, name, default) for one in layer_configs(config)]
    numbers = [one for one in found if isinstance(one, int | float)]
    return max(numbers) if len(numbers) > 1 else found[0]


# ---------------------------------------------------------------- a small config
def small_config(config: Any, padded: bool = False) -> Any:
    """The config of a small model that computes in the same way.

    In a `padded` one the word of padding keeps its number: a RoBERTa counts its positions from there.
    """
    few = min(config.num_hidden_layers, _layers_of_all_kinds(config))
    heads = max(map(_few_heads, layer_configs(config)))
    if not getattr(config, "is_heterogeneous", False):
        return _reduced(config, few, heads, padded)
    plain = copy.deepcopy(config)
    plain.per_layer_config = None
    small = _reduced(plain, few, heads, padded)
    names = sorted(config.per_layer_attributes)
    layers = config.per_layer_config[:few]
    own = [_reduced(one, few, heads, padded) for one in layers]
    small.per_layer_config = {
        number: {name: getattr(one, name) for name in names} | {"skip": one.skip}
        for number, one in enumerate(own)
    }
    return small


def _reduced(config: Any, few: int, heads: int, padded: bool) -> Any:
    """A config with few layers, few heads and little width."""
    small = copy.deepcopy(config)
    for name, value in vars(config).items():
        if isinstance(value, list | tuple) and len(value) == config.num_hidden_layers:
            setattr(small, name, type(value)(value[:few]))
    small.num_hidden_layers = few
    for name, limit in LIMITS.items():
        value = getattr(config, name, None)
        if isinstance(value, int) and value > limit:
            setattr(small, name, limit)
    _give_few_heads(small, config, heads)
    for name in ("sliding_window", "attention_chunk_size", "window_size"):
        if isinstance(value := getattr(config, name, None), int):
            setattr(small, name, min(value, WINDOW))
    padding = getattr(config, "pad_token_id", None)
    if padded and padding is not None:
        small.vocab_size = max(small.vocab_size, padding + 1)
    marks = ("bos_token_id", "eos_token_id")
    for name in marks if padded else ("pad_token_id", *marks):
        if getattr(config, name, None) is not None:
            _leave_out_word(small, name)
    return small


def _leave_out_word(small: Any, name: str) -> None:
    """Leave out a special word, which may not be among the few words; some configs insist on one."""
    try:
        setattr(small, name, None)
    except Exception:  # of transformers, which checks its configs in many ways
        setattr(small, name, 0)


def _groups(config: Any) -> tuple[int, int]:
    """Return the heads of a layer, and in how many groups they share keys and values."""
    heads = getattr(config, "num_attention_heads", None) or 1
    groups = getattr(config, "num_key_value_heads", None)
    return heads, groups or getattr(config, "num_kv_heads", None) or heads


def _few_groups(groups: int) -> int:
    return 2 if groups % 2 == 0 else 1


def _few_heads(config: Any) -> int:
    """The fewest heads that share keys and values as those of the config do; all, if they cannot be shared evenly."""
    heads, groups = _groups(config)
    if heads % groups:
        return int(heads)
    return min(heads // groups, HEADS_IN_GROUP) * _few_groups(groups)


def _give_few_heads(small: Any, config: Any, few: int) -> None:
    """Reduce the heads of a config, and its width with them, but not the width of a head."""
    heads, groups = _groups(config)
    if few >= heads:
        return
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    small.num_attention_heads = few
    for name in ("num_key_value_heads", "num_kv_heads"):
        if hasattr(config, name):
            setattr(small, name, _few_groups(groups))
    small.hidden_size = config.hidden_size // heads * few
    if getattr(config, "word_embed_proj_dim", None) == config.hidden_size:
        small.word_embed_proj_dim = small.hidden_size
    embedded = getattr(config, "embedding_size", None)
    if embedded is not None:  # the same, or another one
        same = embedded == config.hidden_size
        small.embedding_size = small.hidden_size // (1 if same else 2)
    if "head_dim" in vars(config):
        small.head_dim = head


def _layers_of_all_kinds(config: Any) -> int:
    """The number of layers after which every kind of layer has come at least once; at least four."""
    kinds = list(getattr(config, "layer_types", None) or [])
    overrides = config.to_dict().get("per_layer_config") or {}
    if overrides:
        own = {int(number): values for number, values in overrides.items()}
        kinds = kinds or [""] * config.num_hidden_layers
        kinds = [
            f"{kind} {json.dumps(own.get(number), sort_keys=True, default=str)}"
            for number, kind in enumerate(kinds)
        ]
    last_new = max((kinds.index(kind) for kind in set(kinds)), default=0)
    return max(4, last_new + 1)
