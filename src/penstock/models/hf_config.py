"""Configs of transformers: values that differ between layers, and a small config that computes in the same way.

                    num_hidden_layers 60   width 5376   heads 32   head_dim 256; in every sixth layer 512
                            │                  │            │                        │
    small config            6                 672           4      256; in every sixth layer 512

A config may have values of their own for some layers (`per_layer_config`, in Gemma 4 for example). transformers then
refuses to read such a value for the whole model.
"""

from __future__ import annotations

import copy
import json
from typing import Any

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
