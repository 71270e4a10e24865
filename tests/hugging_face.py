"""The sizes of small models of Hugging Face, under the names that their configs use.

transformers.LlamaConfig(**decoder_sizes(vocab=61, layers=2))
"""

from __future__ import annotations

from typing import Any

from torch import nn

# Models of random words have no words that begin, end or pad a text.
NO_MARKS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def decoder_sizes(
    vocab: int,
    layers: int = 4,
    width: int = 16,
    heads: int = 4,
    kv_heads: int = 2,
    inner: int = 24,
    **more: Any,
) -> dict[str, Any]:
    """Return the sizes of a Llama, a Mistral, a Qwen and others like them."""
    return {
        "vocab_size": vocab,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        **more,
    }


def gpt2_sizes(
    vocab: int,
    layers: int = 4,
    width: int = 16,
    heads: int = 4,
    positions: int = 32,
    **more: Any,
) -> dict[str, Any]:
    """Return the sizes of a GPT-2 without dropout."""
    return {
        "vocab_size": vocab,
        "n_embd": width,
        "n_layer": layers,
        "n_head": heads,
        "n_positions": positions,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        **more,
    }


def bert_sizes(
    vocab: int,
    layers: int = 4,
    width: int = 32,
    heads: int = 4,
    inner: int = 48,
    positions: int = 32,
    **more: Any,
) -> dict[str, Any]:
    """Return the sizes of a Bert without dropout."""
    return {
        "vocab_size": vocab,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": inner,
        "max_position_embeddings": positions,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        **more,
    }


def checkpoint_activations(model: nn.Module, enable: bool = True) -> None:
    """Let the layers of a model recompute their activations, or no longer; transformers 5.23 gave that a new name."""
    prefix = (
        "activation"
        if hasattr(model, "activation_checkpointing_enable")
        else "gradient"
    )
    getattr(model, f"{prefix}_checkpointing_{'enable' if enable else 'disable'}")()
