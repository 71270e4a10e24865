"""Makes a small Hugging Face model that computes in the same way as a large one, and compares two computations.

    the user's config ──► the same with few layers, few words and little width ──► a model with random weights

The small model keeps everything that changes what is computed: kinds of layers, windows, rotary types, head sizes,
biases, experts.
"""

from __future__ import annotations

import copy
import json
from typing import Any

from torch import Tensor, nn

WINDOW = 4  # of attention with a window, less than TRIAL_TOKENS so that it matters
HEADS_IN_GROUP = 2  # heads that share keys and values, at most
SLACK = 2e-4  # relative difference that rounding in float32 explains, with wide margins
# The largest sizes of a trial, where a config has them.
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


class ConfigText:
    """A config that can be compared and cached: two are equal if they say the same."""

    def __init__(self, config: Any, kernel: str) -> None:
        self.config = config
        self.kernel = kernel if kernel in ("eager", "sdpa") else "sdpa"
        said = json.dumps(config.to_dict(), sort_keys=True, default=str)
        self.text = f"{type(config).__name__} {self.kernel} {said}"

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ConfigText) and self.text == other.text


# ---------------------------------------------------------------- a small config
def small_config(config: Any, padded: bool = False) -> Any:
    """The config of a small model that computes in the same way.

    In a `padded` one the word of padding keeps its number: a RoBERTa counts its positions from there.
    """
    small = copy.deepcopy(config)
    layers = config.num_hidden_layers
    few = min(layers, _layers_of_all_kinds(config))
    for name, value in vars(config).items():
        if isinstance(value, list | tuple) and len(value) == layers:
            setattr(small, name, type(value)(value[:few]))
    small.num_hidden_layers = few
    for name, limit in LIMITS.items():
        value = getattr(config, name, None)
        if isinstance(value, int) and value > limit:
            setattr(small, name, limit)
    _give_few_heads(small, config)
    for name in ("sliding_window", "attention_chunk_size", "window_size"):
        if isinstance(value := getattr(config, name, None), int):
            setattr(small, name, min(value, WINDOW))
    padding = getattr(config, "pad_token_id", None)
    if padded and padding is not None:
        small.vocab_size = max(small.vocab_size, padding + 1)
    marks = ("bos_token_id", "eos_token_id")
    for name in marks if padded else ("pad_token_id", *marks):
        if getattr(config, name, None) is not None:
            setattr(small, name, None)
    return small


def _give_few_heads(small: Any, config: Any) -> None:
    """Reduce the heads of a config, and its width with them, but not the width of a head."""
    heads = getattr(config, "num_attention_heads", None) or 1
    groups = getattr(config, "num_key_value_heads", None)
    groups = groups or getattr(config, "num_kv_heads", None) or heads
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    few_groups = 2 if groups % 2 == 0 else 1
    few_heads = min(heads // groups, HEADS_IN_GROUP) * few_groups
    if few_heads < heads:
        small.num_attention_heads = few_heads
        for name in ("num_key_value_heads", "num_kv_heads"):
            if hasattr(config, name):
                setattr(small, name, few_groups)
        small.hidden_size = config.hidden_size // heads * few_heads
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
    last_new = max((kinds.index(kind) for kind in set(kinds)), default=0)
    return max(4, last_new + 1)


# ---------------------------------------------------------------- a small model
def random_model(kind: type[nn.Module], text: ConfigText) -> Any:
    """A small model whose biases and norms are random too."""
    config = copy.deepcopy(text.config)
    config._attn_implementation = text.kernel
    model: Any = kind(config).float()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    return model.eval()


# ---------------------------------------------------------------- comparing
def take_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of a model, and leave it without any."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[name] = parameter.grad
            parameter.grad = None
    return found


def near(one: Tensor, other: Tensor, least: float = 0.0) -> bool:
    """Whether two tensors differ by no more than rounding explains, in numbers of at least this size."""
    one, other = one.detach(), other.detach()
    scale = max(float(other.abs().max()), least)
    return float((one - other).abs().max()) <= SLACK * max(scale, 1e-6)


def first_line(error: Exception) -> str:
    """Say in one line what an error is."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"
