"""Models: their weights, names, counts and losses, and which classes of Hugging Face are refused with what words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import transformers
from freeze import hashed, said
from torch import Tensor, nn

from hugging_face import bert_sizes, decoder_sizes, gpt2_sizes
from penstock.models import (
    GPT,
    Bert,
    BertConfig,
    GPTConfig,
    Llama,
    LlamaConfig,
    document_starts,
    even_partition,
    initial_constants,
    layer_count,
    model_width,
    padding_rows,
    shared_names,
    shift_labels,
    smoothed_loss,
    split,
    token_loss,
)
from penstock.models.bert import bert_to_hf
from penstock.models.decoder import count_decoder, decoder_of
from penstock.models.family import (
    count_parameters,
    flops_per_token,
    keys_per_token,
    share_of_flops,
)
from penstock.models.gpt import gpt_from_hf, gpt_to_hf
from penstock.models.llama import llama_from_hf, llama_to_hf
from penstock.models.slice import Carry

TOLERANCE = 1e-9  # of sums of weights and losses in float64
SLACK = 1e-4  # of models that compute angles or norms in float32
WORDS, TOKENS = 61, 12
SIZES: dict[str, LlamaConfig | GPTConfig | BertConfig] = {
    "llama": LlamaConfig(WORDS, 16, 4, 4, 2, 24),
    "llama tied": LlamaConfig(WORDS, 24, 3, 6, 6, 40, theta=5e5, tied=True),
    "gpt": GPTConfig(WORDS, 16, 4, 4, 32, TOKENS),
    "gpt apart": GPTConfig(WORDS, 24, 2, 2, 40, 2 * TOKENS, tied=False),
    "bert": BertConfig(WORDS, 16, 4, 4, 32, TOKENS),
    "bert apart": BertConfig(WORDS, 16, 2, 2, 24, TOKENS, tied=False, padding=None),
}
MARKS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
PLAIN = {**decoder_sizes(WORDS), **MARKS}
BERT = bert_sizes(WORDS, width=16, inner=24, positions=TOKENS + 2, pad_token_id=1)
THEIRS: dict[str, Callable[[], Any]] = {
    "gpt2": partial(transformers.GPT2Config, **gpt2_sizes(WORDS), **MARKS),
    "mistral": partial(transformers.MistralConfig, **PLAIN, sliding_window=5),
    "gemma2": partial(transformers.Gemma2Config, **PLAIN, head_dim=8, sliding_window=5),
    "mixtral": partial(transformers.MixtralConfig, **PLAIN, num_local_experts=4),
    "deepseek": partial(
        transformers.DeepseekV3Config,
        **decoder_sizes(WORDS, kv_heads=4, q_lora_rank=8, kv_lora_rank=8),
        **{"v_head_dim": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4},
        **{"first_k_dense_replace": 1, "moe_intermediate_size": 16, "n_group": 1},
        **{"topk_group": 1, "num_experts_per_tok": 2, "n_routed_experts": 4},
    ),
    "roberta": partial(transformers.RobertaConfig, **BERT, type_vocab_size=1),
    "bert": partial(transformers.BertConfig, **BERT),
    "distilbert": partial(
        transformers.DistilBertConfig,
        **{"vocab_size": WORDS, "dim": 16, "n_layers": 4, "n_heads": 4},
        **{"hidden_dim": 24, "max_position_embeddings": TOKENS, "pad_token_id": 1},
    ),
}


def cases() -> dict[str, Callable[[], object]]:
    """Our families, models of transformers, and what is refused."""
    found: dict[str, Callable[[], object]] = {
        f"weights of {name}": partial(weights, name) for name in SIZES
    }
    found |= {f"losses of {name}": partial(losses, name) for name in SIZES}
    found |= {f"transformers {name}": partial(theirs, name) for name in THEIRS}
    found |= {"refusals": refusals, "smoothed loss": smoothed}
    return {name: partial(with_one_thread, call) for name, call in found.items()}


def with_one_thread(call: Callable[[], object]) -> object:
    """What a call returns; threads of tiny models mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return call()
    finally:
        torch.set_num_threads(before)


def build(sizes: LlamaConfig | GPTConfig | BertConfig) -> Any:
    """The model of these sizes, in float64."""
    classes: dict[type, Any] = {LlamaConfig: Llama, GPTConfig: GPT, BertConfig: Bert}
    with in_float64():
        torch.manual_seed(7)
        return classes[type(sizes)](sizes)


@contextmanager
def in_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def words(rows: int = 3) -> Tensor:
    """Words that no generator draws."""
    return (torch.arange(rows * TOKENS).reshape(rows, TOKENS) * 37 + 5) % WORDS


def checksum(x: Tensor) -> list[float]:
    """Two sums in which nothing cancels."""
    flat = x.detach().double().flatten()
    places = torch.arange(1, len(flat) + 1, dtype=torch.float64) / len(flat)
    return [float(flat.square().sum()), float((flat.abs() * places).sum())]


# ---------------------------------------------------------------- our own families
def weights(name: str) -> dict[str, object]:
    """Names, shapes and sums of the initial weights, Hugging Face's names, counts and operations."""
    sizes = SIZES[name]
    model = build(sizes)
    state = model.state_dict()
    found: dict[str, object] = {
        key: [list(w.shape), *checksum(w)] for key, w in state.items()
    }
    found["counts"] = parameters(sizes)
    found["flops"] = [flops_per_token(sizes, 32), share_of_flops(sizes, 32, 1)]
    found["keys"] = keys_per_token(sizes)
    if isinstance(sizes, BertConfig):
        found["theirs"] = named(bert_to_hf(state, sizes))
    elif isinstance(sizes, GPTConfig):
        found["theirs"] = named(gpt_to_hf(state, sizes))
        found["ours"] = named(gpt_from_hf(gpt_to_hf(state, sizes), sizes))
    else:
        found["theirs"] = named(llama_to_hf(state, sizes))
        found["ours"] = named(llama_from_hf(llama_to_hf(state, sizes), sizes))
    return found


def parameters(sizes: Any) -> dict[str, int]:
    """The counts of embedding, layer, head and whole model; `flops` tells the matrices."""
    counts = asdict(count_parameters(sizes))
    del counts["matrices"]
    return counts


def named(state: dict[str, Tensor]) -> str:
    """The names, shapes and rows of a state as a hash; the rows are rounded, and their order shows."""
    said = sorted(
        f"{name} {tuple(w.shape)} {w.double().flatten()[:9].mul(1e6).round().tolist()}"
        for name, w in state.items()
    )
    return hashed("\n".join(said))


def losses(name: str) -> dict[str, object]:
    """The loss of the whole model, in parts, in slices and with packed documents, and the sums of its gradients."""
    model = build(SIZES[name])
    tokens = words()
    starts = document_starts(torch.tensor([5, 7]))[None].expand_as(tokens)
    encodes = isinstance(model, Bert)
    labels = tokens if encodes else shift_labels(tokens, starts)
    whole = token_loss(model(tokens), labels)
    whole.backward()
    gradients = {key: checksum(w.grad) for key, w in model.named_parameters()}
    parts = split(model, even_partition(layer_count(model), 2))
    found: dict[str, object] = {
        "whole": float(whole.detach()),
        "gradients": gradients,
        "parts": float(token_loss(through(parts, tokens, ((0, TOKENS),)), labels)),
        "packed": float(
            token_loss(through(parts, tokens, ((0, TOKENS),), starts), labels)
        ),
        "width": model_width(model),
        "shared": shared_names(parts),
        "said": [str(part.extra_repr()) for part in parts],
        "names": hashed(str([list(part.whole_names()) for part in parts])),
        "asked": [part.asked_names for part in parts],
    }
    if encodes:
        types = (tokens > 30).long()
        real = tokens > 4
        with torch.no_grad():
            found["types"] = float(token_loss(model(tokens, types, real), labels))
        found["unsliceable"] = parts[0].unsliceable
    else:
        cuts = tuple(pairwise((0, 5, 6, TOKENS)))
        found["slices"] = float(token_loss(through(parts, tokens, cuts), labels))
        sliced = through(parts, tokens, cuts, starts)
        found["packed slices"] = float(token_loss(sliced, labels))
    return found


def through(
    parts: list[Any],
    tokens: Tensor,
    cuts: tuple[tuple[int, int], ...],
    starts: Tensor | None = None,
) -> Tensor:
    """The logits of parts, one after the other, slice by slice."""
    carries = [Carry(TOKENS, starts) for _ in parts]
    logits = []
    with torch.no_grad():
        for begin, end in cuts:
            x = tokens[:, begin:end]
            for part, carry in zip(parts, carries, strict=True):
                x = part(x, carry.open(begin, end))
            logits.append(x)
    return torch.cat(logits, dim=1)


def smoothed() -> list[float]:
    logits = (words().double()[..., None] * torch.arange(1.0, 6.0)).sin()
    labels = (words() % 5).masked_fill(words() > 50, -100)
    return [float(smoothed_loss(logits, labels, *one)) for one in ((0, 0), (0.1, 0.01))]


# ---------------------------------------------------------------- models of transformers
def theirs(name: str) -> dict[str, object]:
    """What is found in a class of transformers, and whether its parts give its logits."""
    config = THEIRS[name]()
    sizes = decoder_of(config)
    said = asdict(replace(sizes, config=""))
    found: dict[str, object] = {
        "class": type(sizes).__name__,
        **said,
        "counts": asdict(count_decoder(sizes)),
        "parameters": parameters(sizes),
        "flops": flops_per_token(sizes, 32),
        "constants": initial_constants(sizes),
    }
    encodes = hasattr(sizes, "types")
    if encodes:
        found["padding rows"] = padding_rows(sizes)
    kind = (
        transformers.AutoModelForMaskedLM
        if encodes
        else transformers.AutoModelForCausalLM
    )
    torch.manual_seed(3)
    model = kind.from_config(config).eval()
    parts = split(model, even_partition(layer_count(model), 2))
    part = parts[0]
    pieces = part.layout.pieces
    assert pieces is not None
    for key in ("width", "embed", "layers", "head", "everywhere", "unsliceable"):
        found[f"anatomy {key}"] = getattr(part.layout, key)
    for key in ("base", "before", "layers", "after", "outside", "cached", "tuples"):
        found[f"pieces {key}"] = getattr(pieces, key)
    found["encoding"] = None if pieces.encoding is None else asdict(pieces.encoding)
    found["asked"] = [one.asked_names for one in parts]
    tokens = words()
    with torch.no_grad():
        whole = model(tokens).logits
        x = tokens
        for one in parts:
            x = one(x)
    found["whole"] = near(x, whole)
    if not part.unsliceable:
        sliced = through(parts, tokens, tuple(pairwise((0, 5, 6, TOKENS))))
        found["sliced"] = near(sliced, whole)
    starts = document_starts(torch.tensor([5, 7]))[None].expand_as(tokens)
    packed = through(parts, tokens, ((0, TOKENS),), starts)[:, 5:]
    with torch.no_grad():
        found["packed"] = near(packed, model(tokens[:, 5:]).logits)
    return found


def near(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() <= SLACK * other.abs().max())


# ---------------------------------------------------------------- refusals
def refusals() -> dict[str, str]:
    """The words with which models and calls are refused."""
    llama = partial(transformers.LlamaConfig, **PLAIN)
    gpt2 = partial(transformers.GPT2Config, **gpt2_sizes(WORDS), **MARKS)
    t5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    rwkv = {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 4}
    found = {
        "a linear layer": refused(lambda: nn.Linear(2, 2)),
        "rwkv": refused(
            lambda: transformers.RwkvForCausalLM(transformers.RwkvConfig(**rwkv))
        ),
        "t5": refused(
            lambda: transformers.T5ForConditionalGeneration(
                transformers.T5Config(**t5, vocab_size=WORDS)
            )
        ),
        "cross attention": refused(
            lambda: transformers.GPT2LMHeadModel(gpt2(add_cross_attention=True))
        ),
        "an encoder as decoder": refused(
            lambda: transformers.BertLMHeadModel(
                transformers.BertConfig(**BERT, is_decoder=True)
            )
        ),
        "big bird": refused(
            lambda: transformers.BigBirdForMaskedLM(transformers.BigBirdConfig(**BERT))
        ),
        "base model": refused(lambda: transformers.LlamaModel(llama())),
    }
    changes: dict[str, Callable[[Any], object]] = {
        "without norm": lambda model: delattr(model.model, "norm"),
        "flex attention": lambda model: setattr(
            model.config, "_attn_implementation", "flex_attention"
        ),
        "loose weight": lambda model: model.model.register_parameter(
            "own", nn.Parameter(torch.zeros(3))
        ),
        "module with weights": lambda model: model.model.add_module(
            "own", nn.Linear(2, 2)
        ),
        "hook": lambda model: model.model.register_forward_hook(lambda *_: None),
        "hook on angles": lambda model: model.model.rotary_emb.register_forward_hook(
            lambda *_: None
        ),
        "forward replaced": lambda model: setattr(
            model.model, "forward", model.model.forward
        ),
        "other class": lambda model: setattr(
            model, "__class__", type("Own", (type(model),), {"forward": lambda _: 0})
        ),
        "few layers": lambda model: delattr(model.model, "layers"),
    }
    for name, change in changes.items():
        found[name] = refused(partial(made, llama, change))
    for name, partition in {"short": (1, 2), "gap": (2, 0, 2), "none": ()}.items():
        found[f"partition {name}"] = refused(partial(made, llama), partition)
        found[f"own partition {name}"] = refused(
            partial(build, SIZES["llama"]), partition
        )
    for key, change in {
        "width": {"width": 15},
        "heads": {"heads": 5},
        "layers": {"layers": 0},
    }.items():
        for name, sizes in SIZES.items():
            found[f"{name} {key}"] = said(partial(replace, sizes, **change))
    part = split(build(SIZES["bert"]), (4,))[0]
    found["slice of bert"] = said(
        lambda: part(words()[:, :5], Carry(TOKENS).open(0, 5))
    )
    long = torch.zeros(1, 40, dtype=torch.long)
    for name in ("gpt", "bert"):
        model = build(SIZES[name])
        found[f"long {name}"] = said(partial(model, long))
    hook = partial(split, build(SIZES["gpt"]), (4,))
    whole = hook()[0]
    found["out of order"] = said(
        lambda: whole(words()[:, 2:5], Carry(TOKENS).open(2, 5))
    )
    theirs = split(made(llama), (2, 2))
    found["a part of a part"] = said(lambda: split(theirs[0], (1, 1)))
    names = {"model.layers.0.what.weight": torch.zeros(2)}
    found["unknown name"] = said(
        lambda: llama_from_hf(names, SIZES["llama"])  # type: ignore[arg-type]
    )
    return found


def made(config: Callable[[], Any], change: Callable[[Any], object] = id) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config())
    change(model)
    return model


def refused(build: Callable[[], Any], partition: tuple[int, ...] = (2, 2)) -> str:
    return said(lambda: split(build(), partition))
