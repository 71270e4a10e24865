"""Random Hugging Face models through random schedules, each compared with the unsplit model.

    model      twelve families of decoders, from Llama to Mixtral; rotary type, grouped heads, windows, biases, ties,
               padding, kernel, capped logits, experts
    schedule   any name of the registry or one drawn at random; cuts, split backwards, copies
    run        recomputed stages, packed documents, sequences of several lengths, frozen weights, dropout

A case passes if its loss and every gradient are those of Hugging Face's own model (`exact`), or if it is refused with a
reason (`refused`). Anything else is a failure: a difference, another exception, a warning, a pipeline that hangs.

With dropout the unsplit model draws other random numbers than a pipeline whose micro-batches take turns. Such a case
has one rank, so that one order of draws is defined, and is compared with plain autograd in the order of the lane (whole
sequences), with Hugging Face's model (one micro-batch), and with itself without recomputation.

    python tests/fuzz.py --cases 1000 --seed 0        cases with the seeds 0 to 999
    python tests/fuzz.py --cases 1 --seed 123         the one case that was printed as seed=123
    python tests/fuzz.py --modules                    modules of many kinds (tests/fuzz_modules.py)
    python tests/fuzz.py --kind "batch norm"          modules of which each has something of this kind
"""

from __future__ import annotations

import argparse
import copy
import logging
import math
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from hugging_face import checkpoint_activations
from penstock import REGISTRY, Schedule, make
from penstock.errors import PenstockError, ShapeError
from penstock.ir import Op
from penstock.models import document_starts, shift_labels, split, token_loss
from penstock.runtime import Batch, batch_of
from penstock.schedules import shape_of
from penstock.schedules.transforms import recut, replicate, slice_tokens, split_backward
from pipelines import gradients_of, piped, without_float32
from random_schedules import random_schedule

VOCAB = 37
LIMIT = 8  # tokens; longer sequences get other rotary frequencies
POSITIONS = 20  # rows of GPT-2's table; the longest sequence has 19 tokens
FAMILIES = {
    "llama": transformers.LlamaForCausalLM,
    "mistral": transformers.MistralForCausalLM,
    "qwen2": transformers.Qwen2ForCausalLM,
    "gpt2": transformers.GPT2LMHeadModel,
    "qwen3": transformers.Qwen3ForCausalLM,
    "gemma2": transformers.Gemma2ForCausalLM,
    "gemma3": transformers.Gemma3ForCausalLM,
    "phi3": transformers.Phi3ForCausalLM,
    "olmo2": transformers.Olmo2ForCausalLM,
    "gpt_neox": transformers.GPTNeoXForCausalLM,
    "mixtral": transformers.MixtralForCausalLM,
    "qwen3_moe": transformers.Qwen3MoeForCausalLM,
}
EXPERTS = ("mixtral", "qwen3_moe")  # their routers round to float32
ROPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
FROZEN = (
    "embedding",
    "head",
    "norms",
    "first part",
    "last part",
    "all but the head",
    "a layer",
    "half",
)
EMBEDDINGS = ("model.embed", "transformer.wte", "transformer.wpe", "gpt_neox.embed")
HEADS = ("lm_head", "embed_out", "model.norm", "transformer.ln_f", "gpt_neox.final")
FLOAT64 = 1e-10  # tolerance for sums in another order
# Hugging Face's eager attention rounds its softmax to float32, in up to a dozen layers.
FLOAT32 = 64 * 2.0**-24
# A reason; other kinds of PenstockError say that a run broke.
REFUSALS = (PenstockError, ShapeError)
Said = tuple[list[float], dict[str, Tensor]]  # the loss of each step, and the gradients


# ---------------------------------------------------------------- a case
@dataclass(frozen=True)
class Case:
    """Everything that one seed decides. `marks` describes it, and counts what was covered."""

    seed: int
    family: str
    settings: dict[str, object]
    kernel: str
    schedule: Schedule
    partition: tuple[int, ...]
    lengths: tuple[int, ...]
    packed: bool
    recompute: frozenset[int]
    frozen: str
    dropout: float
    checkpointing: bool
    steps: int
    marks: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        told = ", ".join(
            f"{word} {value}" for word, value in self.marks.items() if value
        )
        return f"seed={self.seed}  {told}\n  {self.command}"

    @property
    def command(self) -> str:
        """The command that repeats the case."""
        return f"python tests/fuzz.py --cases 1 --seed {self.seed}"

    @property
    def counted(self) -> tuple[str, ...]:
        """The names under which the case is counted."""
        said = {f"with {word}" for word, value in self.marks.items() if value == "yes"}
        return (f"model {self.family}", f"schedule {self.marks['schedule']}", *said)


def draw_case(seed: int) -> Case:
    """Draw the case of a seed. No model is built yet."""
    rng = np.random.default_rng([41, seed])
    dropout = 0.3 if rng.random() < 0.15 else 0.0
    name, schedule = draw_schedule(rng, ranks=1 if dropout else None)
    partition = draw_partition(rng, schedule.parts)
    family = str(rng.choice(list(FAMILIES)))
    settings, rope = draw_settings(rng, family, sum(partition), dropout)
    packed = bool(rng.random() < 0.25)
    lengths = draw_lengths(rng, schedule)
    stages = [stage for stage in range(len(schedule.stages)) if rng.random() < 0.6]
    recompute = frozenset(stages if rng.random() < 0.4 else ())
    frozen = str(rng.choice(FROZEN)) if rng.random() < 0.2 else ""
    checkpointing = bool(not dropout and rng.random() < 0.06)
    kernel, steps = str(rng.choice(["eager", "sdpa"])), int(rng.choice([1, 1, 2]))
    if family == "gemma2":
        kernel = "eager"  # others know no capped scores
    marks = {
        "model": family,
        "kernel": kernel,
        "rope": rope,
        "schedule": name,
        "ranks": str(schedule.ranks),
        "parts": "+".join(map(str, partition)),
        "lengths": " ".join(map(str, lengths)),
        "slices": str(schedule.slices) if schedule.slices > 1 else "",
        "split": "yes"
        if any(action.op is Op.W for lane in schedule.lanes for action in lane)
        else "",
        "replicas": "yes" if len(schedule.stages) > schedule.parts else "",
        "window": str(settings.get("sliding_window") or ""),
        "tied": "yes" if settings["tie_word_embeddings"] else "",
        "packed": "yes" if packed else "",
        "recompute": " ".join(map(str, sorted(recompute))),
        "frozen": frozen,
        "dropout": str(dropout or ""),
        "checkpointing": "yes" if checkpointing else "",
        "steps": str(steps),
    }
    return Case(
        *(seed, family, settings, kernel, schedule, partition, lengths, packed),
        *(recompute, frozen, dropout, checkpointing, steps, marks),
    )


def draw_schedule(rng: np.random.Generator, ranks: int | None) -> tuple[str, Schedule]:
    """Draw a schedule from the registry, perhaps sliced, split and copied, or a random one."""
    if rng.random() < 0.3:
        sizes = {
            "ranks": ranks or int(rng.integers(1, 4)),
            "parts": int(rng.integers(1, 5)),
        }
        return "random", random_schedule(
            rng, **sizes, microbatches=int(rng.integers(1, 4)), ends=True
        )
    name = str(
        rng.choice([word for word in REGISTRY if word != "chimera" or ranks is None])
    )
    own = {
        word: int(rng.integers(1, 3))
        for word in shape_of(name)
        if word in ("chunks", "waves", "skips")
    }
    cuts = draw_cuts(rng, slices=int(rng.integers(1, 4)))
    if "slices" in shape_of(name):
        cuts = cuts if len(cuts) > 2 else (0, 4, cuts[-1])
        own["slices"] = len(cuts) - 1
    try:
        sizes = {
            "ranks": ranks or int(rng.integers(1, 4)),
            "microbatches": int(rng.integers(1, 5)),
        }
        schedule = make(name, **sizes, **own)
    except ShapeError:  # the schedule does not have this shape
        return draw_schedule(rng, ranks)
    schedule = (
        recut(schedule, cuts) if "slices" in own else slice_tokens(schedule, cuts)
    )
    if rng.random() < 0.3:
        schedule = split_backward(schedule)
    if schedule.ranks < 3 and not ranks and rng.random() < 0.25:
        schedule = replicate(schedule, 2)
    return name, schedule


def draw_cuts(rng: np.random.Generator, slices: int) -> tuple[int, ...]:
    tokens = int(rng.integers(6, 17))
    inner = rng.permutation(np.arange(1, tokens))[: slices - 1]
    return (0, *sorted(inner.tolist()), tokens)


def draw_partition(rng: np.random.Generator, parts: int) -> tuple[int, ...]:
    """Draw one or two layers per part; the first and the last part may have none."""
    layers = [int(rng.choice([1, 1, 1, 2])) for _ in range(parts)]
    for end in (0, -1):
        if parts > 2 and rng.random() < 0.2:
            layers[end] = 0
    return tuple(layers)


def draw_lengths(rng: np.random.Generator, schedule: Schedule) -> tuple[int, ...]:
    """Keep the planned lengths, or make some micro-batches a multiple as long."""
    planned = [m.tokens for m in schedule.microbatches]
    if rng.random() < 0.3:
        return tuple(n * int(rng.choice([1, 2])) if n < 10 else n for n in planned)
    return tuple(planned)


def draw_settings(
    rng: np.random.Generator, family: str, layers: int, dropout: float
) -> tuple[dict[str, object], str]:
    """Draw the options of the config, and the rotary type."""
    plain: dict[str, object] = {
        "vocab_size": VOCAB,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "initializer_range": 0.2,
        "tie_word_embeddings": bool(rng.random() < 0.5),
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 3 if rng.random() < 0.3 else None,
    }
    if family == "gpt2":
        return plain | {
            "hidden_size": 16,
            "n_inner": int(rng.choice([24, 40])),
            "n_positions": POSITIONS,
            "resid_pdrop": dropout,
            "embd_pdrop": dropout,
            "attn_pdrop": dropout,
            "scale_attn_by_inverse_layer_idx": bool(rng.random() < 0.3),
            "scale_attn_weights": bool(rng.random() < 0.8),
            "activation_function": str(rng.choice(["gelu_new", "relu"])),
        }, ""
    heads, rope = int(rng.choice([4, 8])), str(rng.choice(ROPES))
    if family == "phi3" and rope != "longrope":
        rope = "default"  # it knows no others
    rotated = 0.5 if family == "gpt_neox" and rng.random() < 0.5 else 1.0
    plain |= {
        "hidden_size": 4 * heads,
        "intermediate_size": 24,
        "num_key_value_heads": int(rng.choice([1, 2, 4])),
        "attention_dropout": dropout,
        "rope_parameters": draw_rope(rng, rope, int(heads * rotated) // 2)
        | {"partial_rotary_factor": rotated},
        "max_position_embeddings": LIMIT if rope == "dynamic" else 4 * LIMIT,
        "hidden_act": "silu",
    }
    window = int(rng.integers(1, 9)) if rng.random() < 0.5 else None
    kinds = rng.choice(["sliding_attention", "full_attention"], size=layers).tolist()
    return plain | draw_own_settings(rng, family, plain, heads, window, kinds), rope


def draw_own_settings(
    rng: np.random.Generator,
    family: str,
    plain: dict[str, object],
    heads: int,
    window: int | None,
    kinds: list[str],
) -> dict[str, object]:
    """Draw the options that only some families have; `heads` is the width of a head."""

    def maybe(share: float = 0.4) -> bool:
        return bool(rng.random() < share)

    def cap() -> float | None:
        return float(rng.choice([2.0, 30.0])) if maybe(0.7) else None

    windows = {
        "use_sliding_window": True,
        "sliding_window": window,
        "layer_types": kinds,
    }
    experts = {"num_experts_per_tok": int(rng.choice([1, 2])), "num_local_experts": 3}
    own: dict[str, object] = {}
    match family:
        case "llama":
            biases = {word: maybe() for word in ("attention_bias", "mlp_bias")}
            lanes = int(rng.choice([1, 2]))
            own = {"head_dim": heads, "pretraining_tp": lanes, **biases}
        case "mistral":
            own = {"sliding_window": window, "head_dim": heads}
        case "qwen2":
            own = windows if window is not None else {}
        case "qwen3":
            own = {"head_dim": int(rng.choice([4, 8])), "attention_bias": maybe()}
            own["rope_parameters"] = draw_rope(
                rng, str(plain["rope_parameters"]["rope_type"]), own["head_dim"] // 2
            )
            own |= windows if window is not None else {}
        case "gemma2" | "gemma3":
            rope = plain["rope_parameters"]
            both = {"full_attention": rope, "sliding_attention": {**rope}}
            own = {
                "head_dim": heads,
                "query_pre_attn_scalar": int(rng.choice([4, 16])),
                "sliding_window": window or 4 * LIMIT,
                "layer_types": kinds,
                "final_logit_softcapping": cap(),
                "attn_logit_softcapping": cap(),
                "rope_parameters": rope if family == "gemma2" else both,
            }
        case "phi3":
            own = {
                "sliding_window": window,
                "resid_pdrop": plain["attention_dropout"],
                "original_max_position_embeddings": LIMIT,
            }
        case "olmo2":
            own = {"attention_bias": maybe()}
        case "gpt_neox":
            own = {
                "use_parallel_residual": maybe(0.6),
                "attention_bias": maybe(0.6),
                "hidden_dropout": plain["attention_dropout"],
                "hidden_act": "gelu",
            }
            rope = plain["rope_parameters"]
            if rope["rope_type"] == "dynamic":
                # transformers divides by the number of rotated features minus two.
                own["rope_parameters"] = {**rope, "partial_rotary_factor": 1.0}
        case "mixtral":
            own = {"sliding_window": window, "head_dim": heads, **experts}
        case "qwen3_moe":
            own = {
                "head_dim": heads,
                "num_experts": 3,
                "moe_intermediate_size": 12,
                "num_experts_per_tok": experts["num_experts_per_tok"],
                "norm_topk_prob": maybe(0.5),
                "decoder_sparse_step": int(rng.choice([1, 2])),
            }
    return own


def draw_rope(rng: np.random.Generator, kind: str, angles: int) -> dict[str, object]:
    told: dict[str, object] = {
        "rope_type": kind,
        "rope_theta": float(rng.choice([100.0, 10000.0])),
    }
    if kind != "default":
        told["factor"] = 4.0
    if kind in ("yarn", "longrope", "llama3"):
        told["original_max_position_embeddings"] = LIMIT
    if kind == "longrope":
        told |= {
            "short_factor": [1.0] * angles,
            "long_factor": rng.uniform(1.5, 4.0, angles).tolist(),
        }
    if kind == "llama3":
        told |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return told


# ---------------------------------------------------------------- its model and data
def model_of(case: Case) -> nn.Module:
    """Build the model of a case, with the parameters frozen that it names."""
    model = whole_model_of(case)
    freeze(model, case)
    return without_float32(model)


def whole_model_of(case: Case) -> nn.Module:
    """Build the model in float64, with biases and norms away from their initial values."""
    kind = FAMILIES[case.family]
    settings = copy.deepcopy(case.settings)
    config = kind.config_class(**settings, attn_implementation=case.kernel)
    config._experts_implementation = "eager"  # the others know no float64
    model = kind(config).double().train()
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn(parameter.shape, dtype=torch.float64))
    return model


def freeze(model: nn.Module, case: Case) -> None:
    """Freeze the parameters that a case names. A tied head is frozen with its embedding."""
    if not case.frozen:
        return
    parts = split(model, case.partition)
    inside = {id(p): part for part, one in enumerate(parts) for p in one.parameters()}
    for number, (name, parameter) in enumerate(model.named_parameters()):
        part, head = inside[id(parameter)], name.startswith(HEADS)
        chosen = {
            "embedding": name.startswith(EMBEDDINGS),
            "head": head,
            "norms": "norm" in name or ".ln_" in name,
            "first part": part == 0,
            "last part": part == len(parts) - 1,
            "all but the head": not head,
            "a layer": ".0." in name,
            "half": number % 2 == 0,
        }
        if chosen[case.frozen]:
            parameter.requires_grad_(False)


def batch_for(case: Case, step: int) -> Batch:
    """Draw one or two rows per micro-batch; some labels do not count.

    Packed rows hold documents of random lengths.
    """
    draw = torch.Generator().manual_seed(1000 * case.seed + step)
    inputs, labels, starts = [], [], []
    for number, length in enumerate(case.lengths):
        x = torch.randint(0, VOCAB, (1 + number % 2, length), generator=draw)
        begin = (
            torch.stack([documents(length, draw) for _ in x]) if case.packed else None
        )
        counted = torch.rand(x.shape, generator=draw) < 0.9
        inputs.append(x)
        labels.append(shift_labels(x, begin).masked_fill(~counted, -100))
        starts += [] if begin is None else [begin]
    return batch_of(inputs, labels, starts=starts)


def documents(length: int, draw: torch.Generator) -> Tensor:
    """Return where each token's document starts, in a row cut at up to three places."""
    cuts = (
        torch.randperm(length - 1, generator=draw)[
            : int(torch.randint(0, 4, (), generator=draw))
        ]
        + 1
    )
    bounds = torch.cat((torch.tensor([0]), cuts.sort().values, torch.tensor([length])))
    return document_starts(bounds.diff())


# ---------------------------------------------------------------- what Hugging Face's model says
def unsplit(case: Case, model: nn.Module, batches: Sequence[Batch]) -> Said:
    """Return the losses and summed gradients of the unsplit model.

    Micro-batches run one after the other, each along its own path.
    """
    model = copy.deepcopy(model)
    losses: list[float] = []
    for batch in batches:
        losses.append(0.0)
        for number, (x, labels) in enumerate(
            zip(batch.inputs, batch.labels, strict=True)
        ):
            place = torch.arange(x.shape[1]) - (
                batch.starts[number] if batch.starts else 0
            )
            with along(model, layers_on_path(case, number)):
                out = model(
                    x,
                    position_ids=place if place.dim() == 2 else place[None],
                    use_cache=False,
                )
            loss = token_loss(out.logits, labels) / batch.valid
            if loss.requires_grad:
                loss.backward()
            losses[-1] += float(loss.detach())
    return losses, gradients_of(model)


def layers_on_path(case: Case, number: int) -> list[int]:
    ends = np.cumsum((0, *case.partition)).tolist()
    path = [
        case.schedule.stages[stage].part
        for stage in case.schedule.microbatches[number].path
    ]
    return [layer for part in path for layer in range(ends[part], ends[part + 1])]


@contextmanager
def along(model: nn.Module, layers: Sequence[int]) -> Iterator[None]:
    """Run the model with only these layers, in this order."""
    base = model.base_model
    name = "layers" if hasattr(base, "layers") else "h"
    held, config = getattr(base, name), model.config
    if list(layers) == list(range(len(held))):
        yield
        return
    kinds = getattr(config, "layer_types", None)
    setattr(base, name, nn.ModuleList(held[layer] for layer in layers))
    config.num_hidden_layers = len(layers)
    if kinds is not None:
        config.layer_types = [kinds[layer] for layer in layers]
    try:
        yield
    finally:
        setattr(base, name, held)
        config.num_hidden_layers = len(held)
        if kinds is not None:
            config.layer_types = kinds


# ---------------------------------------------------------------- a verdict
WORDS_OF_VERDICTS = ("exact", "refused", "unfit", "failed")


@dataclass(frozen=True)
class Verdict:
    """`exact`, `refused` (with the reason), `unfit` (not even in one piece), or `failed` (with what happened)."""

    word: str
    why: str = ""


def run_case(case: Case) -> Verdict:
    """Run a case, and turn any outcome into a verdict."""
    torch.manual_seed(case.seed)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model = model_of(case)
            batches = [batch_for(case, step) for step in range(case.steps)]
            difference = (dropout_difference if case.dropout else difference_of)(
                case, model, batches
            )
    except Exception as error:
        if type(error) in REFUSALS:
            return Verdict("refused", str(error).partition("\n")[0])
        if fails_alone(case):
            return Verdict("unfit", f"{type(error).__name__}: {error}")
        return Verdict("failed", traceback.format_exc())
    return Verdict("failed", difference) if difference else Verdict("exact")


def fails_alone(case: Case) -> bool:
    """Whether Hugging Face's own model cannot run the case either."""
    try:
        unsplit(case, whole_model_of(case), [batch_for(case, 0)])
    except Exception:
        return True
    return False


def difference_of(case: Case, model: nn.Module, batches: Sequence[Batch]) -> str:
    """Describe the difference from Hugging Face's model; "" if there is none."""
    expected = unsplit(case, model, batches)
    if case.checkpointing:
        checkpoint_activations(model)
    ours = piped(
        case.schedule,
        model,
        batches,
        partition=case.partition,
        recompute=case.recompute,
    )
    found = [
        difference(case, losses, ours.gradients, expected) for losses in ours.losses
    ]
    evaluated = difference(
        case, ours.evaluated, {}, (expected[0][:1] * len(ours.evaluated), {})
    )
    return next(filter(None, [*found, evaluated]), "")


def dropout_difference(case: Case, model: nn.Module, batches: Sequence[Batch]) -> str:
    """Describe the difference, with the same random numbers, from plain runs or the model."""

    def run(recompute: frozenset[int]) -> Said:
        torch.manual_seed(case.seed)
        ours = piped(
            case.schedule, model, batches, partition=case.partition, recompute=recompute
        )
        return ours.losses[0], ours.gradients

    losses, gradients = run(frozenset())
    expected = (
        losses,
        {name.split(":")[2]: gradient for name, gradient in gradients.items()},
    )
    torch.manual_seed(case.seed)
    if len(case.lengths) == 1 and case.schedule.slices == 1:
        text = difference(case, losses, gradients, unsplit(case, model, batches))
    elif case.schedule.slices == 1 and not case.packed:
        text = difference(case, losses, gradients, in_lane_order(case, model, batches))
    else:
        text = ""
    return text or difference(case, *run(case.recompute), expected)


def in_lane_order(case: Case, model: nn.Module, batches: Sequence[Batch]) -> Said:
    """Run the forwards of the only rank in plain autograd, then one backward through all."""
    model = copy.deepcopy(model)
    parts, losses = split(model, case.partition), []
    for batch in batches:
        state: list[Tensor] = list(batch.inputs)
        for action in case.schedule.lanes[0]:
            if action.op is Op.F:
                stage = case.schedule.stages[action.stage]
                state[action.microbatch] = parts[stage.part](state[action.microbatch])
        loss = (
            sum(token_loss(x, y) for x, y in zip(state, batch.labels, strict=True))
            / batch.valid
        )
        if loss.requires_grad:
            loss.backward()
        losses.append(float(loss.detach()))
    return losses, gradients_of(model)


def difference(
    case: Case, losses: Sequence[float], gradients: dict[str, Tensor], expected: Said
) -> str:
    """Describe the first wrong loss or gradient; a missing gradient counts as zeros."""
    rounds = case.kernel == "eager" and case.family != "gpt2"
    limit = FLOAT32 if rounds or case.family in EXPERTS else FLOAT64
    for ours, theirs in zip(losses, expected[0], strict=True):
        if not math.isclose(ours, theirs, rel_tol=limit, abs_tol=limit):
            return f"the loss is {ours!r}, not {theirs!r}"
    if not gradients:
        return ""
    names = {place: place.split(":")[2] for place in gradients}  # rank, part and name
    missing = expected[1].keys() - names.values()
    names |= {name: name for name in missing}
    theirs = {
        place: expected[1][name] for place, name in names.items() if name in expected[1]
    }
    text = difference_of_tensors(names, gradients, theirs, limit)
    return f"the gradient of {text}" if text else ""


def difference_of_tensors(
    names: Iterable[str],
    ours: Mapping[str, Tensor],
    theirs: Mapping[str, Tensor],
    limit: float,
) -> str:
    """Describe the worst tensor; a missing one counts as zeros."""
    zero = torch.zeros((), dtype=torch.float64)
    largest = max(map(size_of, theirs.values()), default=0.0)
    worst, where = 0.0, ""
    for name in names:
        mine, other = ours.get(name, zero), theirs.get(name, zero)
        far = math.inf
        if mine.shape == other.shape or not (mine.dim() and other.dim()):
            far = size_of(mine.to(torch.complex128) - other)
        if not far <= worst:
            worst, where = far, name
    if worst <= limit * max(1.0, largest):
        return ""
    return f"{where} is off by {worst:.3g}, of at most {largest:.3g}"


def size_of(x: Tensor) -> float:
    """The largest number of a tensor; infinity if one is not finite."""
    if not x.numel():
        return 0.0
    size = float(x.abs().max())
    return size if math.isfinite(size) else math.inf


# ---------------------------------------------------------------- many
ENOUGH = 8  # cases after which a kind that is always refused is reported


class Tally:
    """What became of the cases, in all and for each kind."""

    def __init__(self, must_be_refused: frozenset[str] = frozenset()) -> None:
        self.words: Counter[str] = Counter()
        self.kinds: dict[str, Counter[str]] = {}
        self.reasons: Counter[str] = Counter()
        self.must_be_refused = must_be_refused  # the kinds that may not run

    def add(self, case: Any, verdict: Verdict) -> None:
        """Count a case."""
        self.words[verdict.word] += 1
        for kind in case.counted:
            self.kinds.setdefault(kind, Counter())[verdict.word] += 1
        if verdict.word in ("refused", "unfit"):
            digits = "".join("#" if sign.isdigit() else sign for sign in verdict.why)
            self.reasons[f"{verdict.word}: {digits}"] += 1

    @property
    def always_refused(self) -> list[str]:
        """The kinds that never ran, although they came often enough: a fuzzer that only sees refusals tests nothing."""
        return [
            kind
            for kind, words in sorted(self.kinds.items())
            if words.total() >= ENOUGH
            and not words["exact"]
            and not words["failed"]
            and kind not in self.must_be_refused
        ]

    def table(self) -> list[str]:
        """A row for each kind."""
        wide = max((len(kind) for kind in self.kinds), default=0)
        lines = [" " * wide + "".join(f"{word:>9}" for word in WORDS_OF_VERDICTS)]
        for kind, words in sorted(self.kinds.items()):
            counts = (words[word] for word in WORDS_OF_VERDICTS)
            lines.append(f"{kind:{wide}}" + "".join(f"{n or '':>9}" for n in counts))
        return lines


def run_many(
    seeds: Sequence[int],
    draw: Callable[[int], Any] = draw_case,
    run: Callable[[Any], Verdict] = run_case,
    must_be_refused: frozenset[str] = frozenset(),
) -> Tally:
    """Run the cases of these seeds, print failures as they happen, and a summary.

    With a single seed, a failure prints its whole traceback.
    """
    tally = Tally(must_be_refused)
    began = time.monotonic()
    for done, seed in enumerate(seeds, start=1):
        case = draw(seed)
        verdict = run(case)
        tally.add(case, verdict)
        told = verdict.why.strip().splitlines()
        if verdict.word == "failed":
            lines = [f"FAILED {case}", *(told if len(seeds) == 1 else told[-3:])]
            print("\n  ".join(lines), flush=True)
        elif len(seeds) == 1:
            print("\n  ".join([f"{verdict.word} {case}", *told]))
        if done % 50 == 0:
            print(
                f"{done} cases, {tally.words['failed']} failed",
                file=sys.stderr,
                flush=True,
            )
    seconds = time.monotonic() - began
    counts = ", ".join(f"{tally.words[word]} {word}" for word in WORDS_OF_VERDICTS)
    if len(seeds) > 1:
        print("\n".join(tally.table()))
    print(f"{tally.words.total()} cases in {seconds:.0f} s: {counts}")
    for reason, count in tally.reasons.most_common():
        print(f"  {count} times {reason}")
    for kind in tally.always_refused:
        print(f"  always refused, so nothing was tested: {kind}")
    return tally


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description="Compare random pipelines with the same models in one piece."
    )
    parser.add_argument("--cases", type=int, default=200, help="how many cases to run")
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="the seed of the first case; the next ones count up",
    )
    parser.add_argument(
        "--modules",
        action="store_true",
        help="draw modules, hooks, tensors and losses of many kinds (tests/fuzz_modules.py)",
    )
    parser.add_argument(
        "--kind",
        default="",
        help="a kind of module or loss that all cases have (tests/fuzz_kinds.py)",
    )
    asked = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    seeds = range(asked.seed, asked.seed + asked.cases)
    if asked.modules or asked.kind:
        from fuzz_modules import (  # noqa: PLC0415
            MUST_BE_REFUSED,
            draw_module_case,
            run_module_case,
        )

        tally = run_many(
            seeds,
            lambda seed: draw_module_case(seed, asked.kind),
            run_module_case,
            MUST_BE_REFUSED,
        )
    else:
        tally = run_many(seeds)
    return 1 if tally.words["failed"] or tally.always_refused else 0


if __name__ == "__main__":
    sys.exit(main())
