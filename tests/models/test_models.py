"""Compares our models with Hugging Face's, and parts with whole models, for both."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hugging_face import NO_MARKS, checkpoint_activations, decoder_sizes
from penstock.errors import PenstockError, ShapeError
from penstock.models import (
    GPT,
    Bert,
    BertConfig,
    GPTConfig,
    Llama,
    LlamaConfig,
    even_partition,
    layer_count,
    model_width,
    part_parameters,
    shared_names,
    shift_labels,
    split,
    token_loss,
    valid_tokens,
)
from penstock.models.bert import bert_to_hf
from penstock.models.gpt import gpt_from_hf, gpt_to_hf
from penstock.models.hf import small_config
from penstock.models.llama import llama_from_hf, llama_to_hf
from penstock.models.slice import Carry
from penstock.runtime import run_threads
from pipelines import without_float32

pytestmark = pytest.mark.numerics  # run once more with other kernels by .ci/run

PARTITIONS = [
    (4,),
    (2, 2),
    (1, 1, 1, 1),
    (1, 3),
    (3, 1),
    (0, 2, 2),
    (2, 2, 0),
    (0, 4, 0),
]
TOKENS = 16
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
GATED = decoder_sizes(96, width=32, inner=64, **NO_MARKS)
MIXED_LAYERS = ["sliding_attention", "full_attention"] * 2


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def plain_kernels():
    """Some virtual machines announce AMX and then forbid it: oneDNN's bf16 kernels would end the process."""
    enabled, *_ = torch.backends.mkldnn.set_flags(False)
    yield
    torch.backends.mkldnn.set_flags(enabled)


def some_tokens(batch: int = 2) -> Tensor:
    return torch.randint(0, 96, (batch, TOKENS))


def some_labels(tokens: Tensor) -> Tensor:
    """Shifted, and some more left out: the sum over what counts is not the mean over all."""
    return shift_labels(tokens).masked_fill(torch.rand(tokens.shape) < 0.2, -100)


def shaken(model: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Every weight, norms and biases too, far enough from its birth to matter."""
    for parameter in model.parameters():
        parameter.data.add_(0.2 * torch.randn(parameter.shape))
    return model.to(dtype).eval()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def unused(theirs: nn.Module) -> set[str]:
    """A BertForMaskedLM whose weights are not tied has a second bias that nothing reads."""
    return set() if theirs.config.tie_word_embeddings else {"cls.predictions.bias"}


def assert_near(
    ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float
) -> None:
    assert ours.keys() == theirs.keys()
    for name, grad in ours.items():
        assert (grad - theirs[name]).abs().max() <= tolerance, name
        # (the same added to all keys changes no softmax: the gradient of their bias is 0)
        assert name.endswith("key.bias") or grad.abs().max() > 1e-6, (
            f"{name}: nothing was tested"
        )


# ---------------------------------------------------------------- models of ours and of Hugging Face
class Conversion(NamedTuple):
    """Converts the weights of a model from and to Hugging Face's names."""

    from_hf: Callable[..., dict[str, Tensor]]
    to_hf: Callable[..., dict[str, Tensor]]


def bert_from_hf(state: dict[str, Tensor], config: BertConfig) -> dict[str, Tensor]:
    """What a run reads of a folder of theirs: every tensor of ours, under the name that we would save it with."""
    with torch.device("meta"):
        names = Bert(config).state_dict()
    ours = {}
    for name, blank in names.items():
        embedding = "bert.embeddings.word_embeddings.weight"  # the head is tied to it
        theirs = next(iter(bert_to_hf({name: blank}, config)), embedding)
        ours[name] = state[theirs]
    return ours


LLAMA_NAMES = Conversion(llama_from_hf, llama_to_hf)
GPT_NAMES = Conversion(gpt_from_hf, gpt_to_hf)
BERT_NAMES = Conversion(bert_from_hf, bert_to_hf)


def llama_pair(kv_heads: int = 2, tied: bool = False):
    theirs = transformers.LlamaConfig(
        **GATED | {"num_key_value_heads": kv_heads, "tie_word_embeddings": tied}
    )
    config = LlamaConfig(96, 32, 4, 4, kv_heads, 64, eps=theirs.rms_norm_eps, tied=tied)
    return Llama(config), transformers.LlamaForCausalLM(theirs), LLAMA_NAMES


def gpt_pair(tied: bool = True):
    theirs = transformers.GPT2Config(
        **SIZES, **NO_MARKS, n_inner=64, n_positions=TOKENS, tie_word_embeddings=tied
    )
    return (
        GPT(GPTConfig(96, 32, 4, 4, 64, TOKENS, tied=tied)),
        transformers.GPT2LMHeadModel(theirs),
        GPT_NAMES,
    )


def bert_pair(tied: bool = True):
    theirs = transformers.BertConfig(
        **SIZES | NO_MARKS | {"pad_token_id": 0},
        intermediate_size=64,
        max_position_embeddings=TOKENS,
        tie_word_embeddings=tied,
    )
    return (
        Bert(BertConfig(96, 32, 4, 4, 64, TOKENS, tied=tied)),
        transformers.BertForMaskedLM(theirs),
        BERT_NAMES,
    )


PAIRS = {
    "llama": llama_pair,
    "llama, tied": lambda: llama_pair(tied=True),
    "llama, no groups": lambda: llama_pair(kv_heads=4),
    "llama, one group": lambda: llama_pair(kv_heads=1),
    "gpt": gpt_pair,
    "gpt, untied": lambda: gpt_pair(tied=False),
    "bert": bert_pair,
    "bert, untied": lambda: bert_pair(tied=False),
}
OURS = {name: lambda pair=pair: pair()[0] for name, pair in PAIRS.items()}
THEIRS = {
    "LlamaForCausalLM": lambda: llama_pair()[1],
    "LlamaForCausalLM, tied": lambda: llama_pair(tied=True)[1],
    "MistralForCausalLM": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(**GATED)
    ),
    "MistralForCausalLM, window": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(**GATED, sliding_window=5)
    ),
    "Qwen2ForCausalLM": lambda: transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**GATED)
    ),
    "Qwen2ForCausalLM, tied, windows": lambda: transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(
            **GATED,
            tie_word_embeddings=True,
            use_sliding_window=True,
            sliding_window=5,
            max_window_layers=1,
        )
    ),
    "GPT2LMHeadModel": lambda: gpt_pair()[1],
    "GPT2LMHeadModel, untied": lambda: gpt_pair(tied=False)[1],
}


# ---------------------------------------------------------------- ours are theirs
@pytest.mark.parametrize("name", PAIRS)
def test_logits_loss_and_every_gradient_are_those_of_hugging_face(name):
    ours, theirs, names = PAIRS[name]()
    without_float32(shaken(theirs))
    ours.double().load_state_dict(names.from_hf(theirs.state_dict(), ours.config))
    tokens = some_tokens()
    labels = some_labels(tokens)

    logits, expected = ours(tokens), theirs(tokens).logits
    loss = token_loss(logits, labels)
    wanted = F.cross_entropy(expected.view(-1, 96), labels.view(-1), reduction="sum")
    loss.backward()
    wanted.backward()

    assert (logits - expected).abs().max() < 1e-9
    assert abs(loss - wanted) < 1e-9
    wanted = {
        name: grad
        for name, grad in gradients(theirs).items()
        if name not in unused(theirs)
    }
    assert_near(names.to_hf(gradients(ours), ours.config), wanted, 1e-9)


@pytest.mark.parametrize("name", PAIRS)
def test_in_float32_nothing_of_hugging_face_needs_changing(name):
    ours, theirs, names = PAIRS[name]()
    shaken(theirs, torch.float32)
    ours.load_state_dict(names.from_hf(theirs.state_dict(), ours.config))
    tokens = some_tokens()
    assert torch.allclose(ours(tokens), theirs(tokens).logits, atol=2e-4)


@pytest.mark.parametrize("name", ["llama", "gpt", "bert"])
def test_the_sum_of_losses_over_valid_tokens_is_the_mean_that_hugging_face_reports(
    name,
):
    ours, theirs, names = PAIRS[name]()
    shaken(theirs, torch.float32)
    ours.load_state_dict(names.from_hf(theirs.state_dict(), ours.config))
    tokens = some_tokens()
    labels = tokens if name == "bert" else shift_labels(tokens)
    mean = token_loss(ours(tokens), labels) / valid_tokens(labels)
    assert abs(mean - theirs(tokens, labels=tokens).loss) < 1e-5


def test_bert_takes_token_types_and_padding_as_hugging_face_does():
    ours, theirs, names = bert_pair()
    shaken(theirs)
    ours.double().load_state_dict(names.from_hf(theirs.state_dict(), ours.config))
    tokens, types, real = (
        some_tokens(),
        torch.randint(0, 2, (2, TOKENS)),
        torch.ones(2, TOKENS, dtype=torch.bool),
    )
    real[1, 11:] = False
    expected = theirs(tokens, token_type_ids=types, attention_mask=real.long()).logits
    assert (ours(tokens, types, real) - expected)[real].abs().max() < 1e-9
    assert (ours(tokens, types) - expected)[real].abs().max() > 1e-3


@pytest.mark.parametrize("tied", [True, False])
def test_bert_takes_the_optimizer_steps_of_hugging_face_when_padding_occurs(tied):
    ours, theirs, names = bert_pair(tied)
    shaken(theirs)
    ours.double().load_state_dict(names.from_hf(theirs.state_dict(), ours.config))
    tokens = some_tokens().masked_fill(torch.rand(2, TOKENS) < 0.3, 0)
    losses = []
    for model in (ours, theirs):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        losses.append([])
        for step in range(4):
            out = model(tokens.roll(step, 1))
            loss = token_loss(getattr(out, "logits", out), tokens) / tokens.numel()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], abs=1e-9)


def test_the_vector_of_berts_padding_begins_at_zero_as_in_hugging_face():
    for tied in (True, False):
        ours, theirs, _ = bert_pair(tied)
        assert theirs.bert.embeddings.word_embeddings.weight[0].abs().max() == 0
        assert ours.embed.tokens.weight[0].abs().max() == 0
        assert ours.embed.tokens.weight[1:].abs().min(1).values.max() > 0
    assert (
        Bert(BertConfig(96, 32, 1, 4, 64, TOKENS, padding=None))
        .embed.tokens.weight[0]
        .abs()
        .max()
        > 0
    )
    with pytest.raises(
        ShapeError, match="padding must be None or a token from 0 to 95, not 96"
    ):
        BertConfig(96, 32, 1, 4, 64, TOKENS, padding=96)


@pytest.mark.parametrize("name", PAIRS)
def test_what_hugging_face_saves_is_read_and_what_we_save_it_reads(name, tmp_path):
    ours, theirs, names = PAIRS[name]()
    shaken(theirs, torch.float32)
    theirs.save_pretrained(tmp_path / "theirs")
    saved = load_file(tmp_path / "theirs" / "model.safetensors")
    ours.load_state_dict(names.from_hf(saved, ours.config))

    exported = names.to_hf(ours.state_dict(), ours.config)
    assert exported.keys() == saved.keys() - unused(theirs)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in exported.items())

    theirs.config.save_pretrained(tmp_path / "ours")
    save_file(exported, tmp_path / "ours" / "model.safetensors", {"format": "pt"})
    again = type(theirs).from_pretrained(tmp_path / "ours").eval()
    tokens = some_tokens()
    assert torch.equal(again(tokens).logits, theirs(tokens).logits)


def test_older_files_are_read_too():
    ours, theirs, names = gpt_pair()
    bare = {
        f"h.0.attn.{name}": torch.ones(1) for name in ("bias", "masked_bias")
    } | theirs.transformer.state_dict()
    ours.load_state_dict(names.from_hf(bare, ours.config))
    with pytest.raises(
        PenstockError, match=r"unknown weight 'transformer.h.0.attn.c_other.weight'"
    ):
        names.from_hf(
            {"transformer.h.0.attn.c_other.weight": torch.ones(1)}, ours.config
        )


# ---------------------------------------------------------------- parts are the whole
def run_whole(
    model: nn.Module, tokens: Tensor, labels: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    beside = (
        {"use_cache": False}
        if hasattr(model, "transformer") or hasattr(model, "model")
        else {}
    )
    # A cache copies the keys: another layout, for which some CPUs take another kernel.
    out = model(tokens, **beside)
    logits = getattr(out, "logits", out)
    token_loss(logits, labels).backward()
    return logits.detach(), gradients(model)


def run_parts(
    parts, tokens: Tensor, labels: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """As a pipeline does: every part has a graph of its own, and only x and its gradient pass between them."""
    entries, exits = [], []
    for part in parts:
        part.zero_grad()
    x = tokens
    for part in parts:
        entries.append(x)
        exits.append(part(x))
        assert part.last or exits[-1].shape == (*tokens.shape, 32)
        x = exits[-1].detach().requires_grad_()
    token_loss(exits[-1], labels).backward()
    for at in reversed(range(len(parts) - 1)):
        exits[at].backward(entries[at + 1].grad)
    named = {
        name: parameter
        for part in parts
        for name, parameter in part_parameters(part).items()
    }
    return exits[-1].detach(), {
        name: parameter.grad for name, parameter in named.items()
    }


def assert_same(parts_say, whole_says) -> None:
    assert torch.equal(parts_say[0], whole_says[0])
    assert parts_say[1].keys() == whole_says[1].keys()
    for name, grad in whole_says[1].items():
        assert torch.equal(parts_say[1][name], grad), name


# About 20 operations a layer, there and back, lie between the loss and the first weight of four layers. Each rounds to
# float32, by at most half of its epsilon of the largest number it makes.
ROUNDED = 2 * 20 * 4 * torch.finfo(torch.float32).eps / 2


def assert_same_but_for_rounding(parts_say, whole_says) -> None:
    assert parts_say[1].keys() == whole_says[1].keys()
    ours, theirs = (
        {"logits": logits, **grads} for logits, grads in (parts_say, whole_says)
    )
    for name, tensor in theirs.items():
        assert (ours[name] - tensor).abs().max() <= ROUNDED * tensor.abs().max(), name


def assert_parts_are_the_whole(model: nn.Module, compare=assert_same) -> None:
    tokens = some_tokens()
    labels = some_labels(tokens)
    logits, grads = run_whole(model, tokens, labels)
    whole = logits, {name: grad.clone() for name, grad in grads.items()}
    for partition in PARTITIONS:
        compare(run_parts(split(model, partition), tokens, labels), whole)


@pytest.mark.parametrize("name", OURS)
def test_parts_of_our_models_give_the_bits_of_the_whole(name):
    assert_parts_are_the_whole(shaken(OURS[name](), torch.float32))


@pytest.mark.parametrize("name", [name for name in THEIRS if "window" not in name])
def test_parts_of_hugging_face_models_give_the_bits_of_the_whole(name):
    model = shaken(THEIRS[name](), torch.float32)
    model.set_attn_implementation("sdpa")
    assert_parts_are_the_whole(model)


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        *((name, "eager") for name in THEIRS),
        *((name, "sdpa") for name in THEIRS if "window" in name),
    ],
)
def test_parts_of_hugging_face_models_that_take_a_mask_differ_from_the_whole_by_rounding_alone(
    name, attention
):
    """Hugging Face makes a mask for every row, parts make one for all rows. Sums with it then lie in memory in another
    order, and torch may use other kernels for them, which round differently."""
    model = shaken(THEIRS[name](), torch.float32)
    model.set_attn_implementation(attention)
    assert_parts_are_the_whole(model, assert_same_but_for_rounding)


ROPES = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": 8,
        "long_factor": [3.0] * 4,
        "short_factor": [1.0] * 4,
    },
}


def rotary_model(kind: str) -> nn.Module:
    """Sequences of more than 8 tokens have frequencies of their own."""
    longest = 8 if kind == "dynamic" else 32
    rope = {"rope_parameters": {**ROPES[kind], "rope_theta": 100.0}}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**GATED, **rope, max_position_embeddings=longest)
    )


@pytest.mark.parametrize("kind", ROPES)
def test_frequencies_that_depend_on_the_length_are_those_of_the_whole_model(kind):
    model = shaken(rotary_model(kind), torch.float32)
    parts = split(model, (2, 2))
    for length in (5, 16, 7, 16):
        tokens = some_tokens()[:, :length]
        expected = model(tokens).logits
        assert torch.equal(parts[1](parts[0](tokens)), expected)
    short, long = model(tokens[:, :7]).logits, model(tokens).logits[:, :7]
    assert (short - long).abs().max() > 0.01, "nothing was tested"


def test_a_dynamic_rotary_module_takes_one_long_length_as_order_would_matter_otherwise():
    model = shaken(rotary_model("dynamic"))
    part = split(model, (4,))[0]
    for length in (16, 7, 16):
        part(some_tokens()[:, :length])
    for length in (8, 12):
        with pytest.raises(
            ShapeError,
            match=rf"sequences of 16 and of {length} tokens cannot be mixed .*'dynamic'",
        ):
            part(some_tokens()[:, :length])
    with pytest.raises(ShapeError, match="sequences of 16 and of 12 tokens"):
        # Another replica may be the one that sees them.
        part.refuse_lengths([16, 7, 12])
    for other in (
        split(model, (4,))[0],
        split(OURS["llama"](), (4,))[0],
        split(THEIRS["GPT2LMHeadModel"](), (4,))[0],
    ):
        other.refuse_lengths([12, 12, 5])
    model(some_tokens()[:, :12])  # the whole model has grown already
    with pytest.raises(ShapeError, match="sequences of 12 and of 16 tokens"):
        split(model, (4,))[0](some_tokens())


def test_parts_of_a_model_with_dropout_draw_the_numbers_of_the_whole():
    model = shaken(THEIRS["GPT2LMHeadModel"](), torch.float32).train()
    tokens = some_tokens()
    torch.manual_seed(1)
    expected = model(tokens).logits
    torch.manual_seed(1)
    x = tokens
    for part in split(model, (1, 3)):
        assert part.training
        x = part(x)
    assert torch.equal(x, expected)
    assert not torch.equal(model(tokens).logits, expected)


def test_recomputing_layers_as_hugging_face_does_changes_nothing():
    model = shaken(THEIRS["LlamaForCausalLM"](), torch.float32).train()
    tokens = some_tokens()
    whole = run_whole(model, tokens, shift_labels(tokens))
    whole = whole[0], {name: grad.clone() for name, grad in whole[1].items()}
    checkpoint_activations(model)
    assert_same(run_parts(split(model, (2, 2)), tokens, shift_labels(tokens)), whole)


def test_an_sdpa_layer_is_given_no_mask_unless_a_window_is_shorter_than_the_sequence():
    for name, masks in {
        "LlamaForCausalLM": 0,
        "GPT2LMHeadModel": 0,
        "MistralForCausalLM, window": 4,
    }.items():
        model, seen = THEIRS[name](), []
        layers = model.get_submodule(
            "transformer.h" if name.startswith("GPT2") else "model.layers"
        )
        for layer in layers:

            def look(layer, args, arguments, seen=seen):
                # GPT-2 passes its mask by position, as the third argument.
                seen.append(arguments.get("attention_mask", (*args, None, None)[2]))

            layer.register_forward_pre_hook(look, with_kwargs=True)
        for part in split(model, (4,)):
            part(some_tokens())
        assert sum(mask is not None for mask in seen) == masks
        assert all(
            mask is None or mask.shape[1:] == (1, TOKENS, TOKENS) for mask in seen
        )


# ---------------------------------------------------------------- names
@pytest.mark.parametrize("name", [*OURS, *THEIRS])
def test_a_part_holds_the_models_own_parameters_under_the_models_names(name):
    model = (OURS | THEIRS)[name]()
    whole = dict(model.named_parameters())
    for partition in PARTITIONS:
        parts = split(model, partition)
        held = {name for part in parts for name in part_parameters(part)}
        assert held == whole.keys()
        for part in parts:
            assert all(
                parameter is whole[name]
                for name, parameter in part_parameters(part).items()
            )
            assert len(part_parameters(part)) == len(list(part.parameters()))


TIED = {
    "llama, tied": "embed.weight",
    "gpt": "embed.tokens.weight",
    "bert": "embed.tokens.weight",
    "LlamaForCausalLM, tied": "model.embed_tokens.weight",
    "Qwen2ForCausalLM, tied, windows": "model.embed_tokens.weight",
    "GPT2LMHeadModel": "transformer.wte.weight",
}


@pytest.mark.parametrize("name", [*OURS, *THEIRS])
def test_a_tied_weight_is_said_to_live_in_the_first_and_last_part_and_nothing_else_in_two(
    name,
):
    parts = split((OURS | THEIRS)[name](), (1, 2, 1))
    assert shared_names(parts) == ({TIED[name]: (0, 2)} if name in TIED else {})
    assert shared_names(split((OURS | THEIRS)[name](), (4,))) == {}


def test_two_parameters_with_one_memory_in_two_parts_are_refused():
    model = gpt_pair()[1]
    torch.nn.utils.parametrizations.weight_norm(model.lm_head)
    split(copy.deepcopy(model), (4,))  # one part holds both
    with pytest.raises(ShapeError, match=r"wte.weight \(part 0\).* with one memory"):
        split(model, (2, 2))


def test_a_part_made_without_memory_and_then_given_some_keeps_its_tie():
    with torch.device("meta"):
        model = OURS["gpt"]()
    part = split(model, (4,))[0]
    names = part_parameters(part).keys()
    part.to_empty(device="cpu")
    assert part.head.output.weight is part.embed.tokens.weight
    assert part_parameters(part).keys() == names


def test_a_replica_of_a_part_is_a_part_of_its_own():
    part = split(shaken(OURS["llama"](), torch.float32), (2, 2))[1]
    replica, x = copy.deepcopy(part), torch.randn(2, TOKENS, 32)
    assert torch.equal(replica(x), part(x))
    assert part_parameters(replica).keys() == part_parameters(part).keys()
    assert not {id(p) for p in replica.parameters()} & {
        id(p) for p in part.parameters()
    }


def test_parts_share_nothing_that_a_device_or_a_thread_could_change():
    first, last = split(THEIRS["LlamaForCausalLM"](), (2, 2))
    assert not {id(module) for module in first.modules()} & {
        id(module) for module in last.modules()
    }
    assert not {id(buffer) for buffer in first.buffers()} & {
        id(buffer) for buffer in last.buffers()
    }


def test_a_part_says_what_it_is():
    first, last = split(OURS["llama"]().eval(), (3, 1))
    assert not first.training
    assert first.extra_repr() == "layers 0:3, embedding"
    assert last.extra_repr() == "layers 3:4, head"


@pytest.mark.parametrize("name", [*OURS, *THEIRS])
def test_width_and_layers_of_a_model_are_known(name):
    model = (OURS | THEIRS)[name]()
    assert (model_width(model), layer_count(model)) == (32, 4)


# ---------------------------------------------------------------- types of numbers, compilers
@pytest.mark.usefixtures("plain_kernels")
@pytest.mark.parametrize("name", [*OURS, *THEIRS])
def test_bf16_autocast_runs_and_hidden_states_stay_float32_between_parts(name):
    model = shaken((OURS | THEIRS)[name](), torch.float32)
    tokens = some_tokens()
    with torch.autocast("cpu", torch.bfloat16):
        first, last = split(model, (2, 2))
        x = first(tokens)
        loss = token_loss(last(x), shift_labels(tokens))
    loss.backward()
    assert (x.dtype, loss.dtype) == (torch.float32, torch.float32)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.usefixtures("plain_kernels")
@pytest.mark.parametrize("name", ["llama", "gpt", "bert"])
def test_a_model_in_bf16_alone_runs(name):
    model, tokens = OURS[name]().bfloat16(), some_tokens()
    logits = model(tokens)
    loss = token_loss(logits, shift_labels(tokens))
    loss.backward()
    assert (logits.dtype, loss.dtype) == (torch.bfloat16, torch.float32)


def test_the_loss_is_a_sum_that_slices_and_micro_batches_add_up_to():
    logits, tokens = torch.randn(4, TOKENS, 96, dtype=torch.float64), some_tokens(4)
    labels = some_labels(tokens)
    pieces = [
        token_loss(logits[rows, cut], labels[rows, cut])
        for rows in (slice(0, 1), slice(1, 4))
        for cut in (slice(0, 5), slice(5, None))
    ]
    assert abs(sum(pieces) - token_loss(logits, labels)) < 1e-9
    assert valid_tokens(labels) == (labels >= 0).sum()
    assert token_loss(logits, torch.full_like(labels, -100)) == 0


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_compiled_part_is_one_graph_there_and_one_back_and_computes_the_same(name):
    """Everything of torch.compile but its code generator, which takes half a minute of C++ compiler."""
    torch.compiler.reset()
    model, tokens = shaken((OURS | THEIRS)[name](), torch.float32), some_tokens()
    for part, x in zip(
        split(model, (1, 2, 1))[::2], (tokens, torch.randn(2, TOKENS, 32)), strict=True
    ):
        compiled = torch.compile(part, backend="aot_eager", fullgraph=True)
        results = []
        for run in (part, compiled):
            part.zero_grad()
            y = run(x)
            y.pow(2).sum().backward()
            results.append([y, *(parameter.grad for parameter in part.parameters())])
        assert all(
            torch.allclose(a, b, rtol=1e-4, atol=1e-3)
            for a, b in zip(*results, strict=True)
        )


# ---------------------------------------------------------------- errors
PLAIN_SIZES = {"vocab": 96, "width": 32, "layers": 4, "heads": 4, "inner": 64}
LLAMA_SIZES = PLAIN_SIZES | {"kv_heads": 2}
SIZES_WITH_POSITIONS = PLAIN_SIZES | {"positions": 16}
NO_PAIRS = "width / heads must be a multiple of 2 .*: 9 is not"
NOT_SHARED = "must be a multiple of heads: 30 is not one of 4; 28 or 32 is"


@pytest.mark.parametrize(
    ("kind", "sizes", "change", "words"),
    [
        (LlamaConfig, LLAMA_SIZES, {"width": 0}, "width must be at least 1, not 0"),
        (LlamaConfig, LLAMA_SIZES, {"layers": -1}, "layers must be at least 1, not -1"),
        (LlamaConfig, LLAMA_SIZES, {"width": 30}, f"width {NOT_SHARED}"),
        (LlamaConfig, LLAMA_SIZES, {"kv_heads": 3}, "4 is not one of 3; 3 or 6 is"),
        (LlamaConfig, LLAMA_SIZES, {"width": 36}, NO_PAIRS),
        (LlamaConfig, LLAMA_SIZES, {"eps": 0.0}, "above 0, not 10000.0 and 0.0"),
        *(
            (kind, SIZES_WITH_POSITIONS, change, words)
            for kind in (GPTConfig, BertConfig)
            for change, words in (
                ({"positions": 0}, "positions must be at least 1, not 0"),
                ({"width": 30}, f"width {NOT_SHARED}"),
                ({"eps": -1.0}, "above 0"),
            )
        ),
    ],
)
def test_sizes_that_make_no_model_are_named(kind, sizes, change, words):
    with pytest.raises(ShapeError, match=words):
        kind(**sizes | change)


@pytest.mark.parametrize("name", ["gpt", "bert", "GPT2LMHeadModel"])
def test_a_sequence_longer_than_the_positions_is_refused_with_both_numbers(name):
    part = split((OURS | THEIRS)[name](), (4,))[0]
    with pytest.raises(ShapeError, match="17 tokens, but only 16 positions"):
        part(torch.zeros(1, 17, dtype=torch.long))


@pytest.mark.parametrize(
    ("partition", "words"),
    [
        ((3, 2), r"\(3, 2\) has 5 layers, but the model has 4"),
        ((2, 0, 2), r"part 1 of \(2, 0, 2\) has no layers"),
        ((5, -1), "layers of part 1 must be at least 0, not -1"),
        ((), "parts must be at least 1, not 0"),
    ],
)
def test_a_partition_that_does_not_fit_is_refused_with_the_numbers(partition, words):
    with pytest.raises(ShapeError, match=words):
        split(OURS["gpt"](), partition)


def test_an_even_partition_differs_by_one_layer_at_most():
    for layers in range(1, 20):
        for parts in range(1, layers + 1):
            cut = even_partition(layers, parts)
            assert (len(cut), sum(cut)) == (parts, layers)
            assert max(cut) - min(cut) <= 1
    with pytest.raises(ShapeError, match="3 layers cannot fill 4 parts"):
        even_partition(3, 4)


class Plain(transformers.LlamaForCausalLM):
    pass


class Scaled(transformers.LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class Inner(transformers.LlamaModel):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


def with_inner() -> nn.Module:
    model = Plain(transformers.LlamaConfig(**GATED))
    model.model = Inner(model.config)
    return model


def impostor() -> nn.Module:
    """A class that only has the name of a known one."""
    config = {"config": transformers.LlamaConfig(**GATED)}
    return type("LlamaForCausalLM", (nn.Module,), config)()


def without_norm() -> nn.Module:
    model = THEIRS["LlamaForCausalLM"]()
    del model.model.norm
    return model


def rwkv() -> nn.Module:
    """Its layers pass a state to each other, besides the hidden state."""
    config = transformers.RwkvConfig(vocab_size=96, hidden_size=32, num_hidden_layers=4)
    return transformers.RwkvForCausalLM(config)


def t5() -> nn.Module:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    config = transformers.T5Config(**sizes, vocab_size=96)
    return transformers.T5ForConditionalGeneration(config)


def crossing() -> nn.Module:
    config = transformers.GPT2Config(**SIZES, **NO_MARKS, add_cross_attention=True)
    return transformers.GPT2LMHeadModel(config)


NOT_THEIRS = "it is not one of transformers' models"


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (
            lambda: nn.Linear(2, 2),
            rf"(?s)cannot split a Linear: {NOT_THEIRS}.*Llama, .*GPT-2",
        ),
        (impostor, f"cannot split a LlamaForCausalLM: {NOT_THEIRS}"),
        (rwkv, "cannot split a RwkvForCausalLM: its forward does not run in parts"),
        (t5, "two stacks of layers, an encoder and a decoder"),
        (crossing, "add_cross_attention=True"),
        (without_norm, "its base model has no norm"),
        (
            lambda: Scaled(transformers.LlamaConfig(**GATED)),
            "Scaled overrides forward, and parts would not run it",
        ),
        (with_inner, "Inner overrides forward"),
    ],
)
def test_a_model_that_is_more_than_its_parts_is_refused_with_the_reason(build, words):
    with pytest.raises(PenstockError, match=words):
        split(build(), (2, 2))


def test_a_subclass_without_a_forward_of_its_own_is_split():
    assert len(split(Plain(transformers.LlamaConfig(**GATED)), (2, 2))) == 2


def test_an_attention_that_needs_more_than_a_mask_is_refused():
    for name in ("LlamaForCausalLM", "GPT2LMHeadModel"):
        model = THEIRS[name]()
        model.config._attn_implementation = "flex_attention"
        with pytest.raises(PenstockError, match="'flex_attention' cannot run in parts"):
            split(model, (4,))


PLAIN = {
    name: GATED[name]
    for name in (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
    )
}
FAMILIES = {
    "Qwen3": transformers.Qwen3Config(**GATED, head_dim=8),
    "Gemma": transformers.GemmaConfig(**GATED, head_dim=8),
    "Gemma2": transformers.Gemma2Config(**GATED, head_dim=8, sliding_window=5),
    "Gemma3": transformers.Gemma3TextConfig(
        **GATED, head_dim=8, sliding_window=5, layer_types=MIXED_LAYERS
    ),
    "Phi3": transformers.Phi3Config(**GATED, sliding_window=5),
    "Olmo2": transformers.Olmo2Config(**GATED),
    "GPTNeoX": transformers.GPTNeoXConfig(
        **{name: size for name, size in GATED.items() if name != "num_key_value_heads"}
    ),
    "Granite": transformers.GraniteConfig(**GATED, embedding_multiplier=3.0),
    "Falcon": transformers.FalconConfig(**PLAIN),
    "OPT": transformers.OPTConfig(**PLAIN, ffn_dim=48, word_embed_proj_dim=32),
    "Mixtral": transformers.MixtralConfig(**GATED, num_local_experts=4),
    "Qwen3Moe": transformers.Qwen3MoeConfig(
        **GATED,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
    ),
    "Exaone4": transformers.Exaone4Config(
        **GATED, head_dim=8, sliding_window=5, layer_types=MIXED_LAYERS
    ),
}
if hasattr(transformers, "Gemma4TextConfig"):
    FAMILIES["Gemma4"] = transformers.Gemma4TextConfig(
        **GATED,
        head_dim=8,
        global_head_dim=16,
        sliding_window=5,
        layer_types=MIXED_LAYERS,
        hidden_size_per_layer_input=0,
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_decoders_of_any_family_run_in_parts_and_in_slices(name):
    """What lies between the pieces differs: scaled embeddings, capped logits, two kinds of angles, experts.

    Falcon's layers return tuples, and OPT has its layers in a module of their own. Exaone 4 keeps a window also where
    it does not use it, and the heads of Gemma 4 are wider in some layers than in others.
    """
    model = shaken(
        transformers.AutoModelForCausalLM.from_config(FAMILIES[name]), torch.float32
    )
    assert_parts_are_the_whole(model, assert_same_but_for_rounding)
    tokens = some_tokens()
    parts = split(model, (1, 3))
    with torch.no_grad():
        whole = model(tokens, use_cache=False).logits
        carries = [Carry(TOKENS) for _ in parts]
        slices = []
        for begin, end in ((0, 5), (5, 6), (6, TOKENS)):
            x = tokens[:, begin:end]
            for part, carry in zip(parts, carries, strict=True):
                x = part(x, carry.open(begin, end))
            slices.append(x)
    found = torch.cat(slices, dim=1)
    assert (found - whole).abs().max() <= ROUNDED * whole.abs().max()


@pytest.mark.parametrize("name", ["DeepseekV3", "Glm", "Cwm"])
def test_the_small_model_of_a_trial_is_small_and_runs(name):
    """Deepseek's experts come in groups; Glm has few keys and values for many heads; Cwm insists on special words."""
    small = small_config(getattr(transformers, f"{name}Config")())
    assert small.hidden_size <= 512
    model = transformers.AutoModelForCausalLM.from_config(small)
    assert model(torch.zeros(1, 3, dtype=torch.long)).logits.isfinite().all()


def test_threads_inside_one_part_at_the_same_time_do_not_disturb_each_other():
    """Replicas that are threads may share a part, each with its own hidden state, slice and mask."""
    torch.manual_seed(0)
    config = transformers.MistralConfig(**decoder_sizes(61, sliding_window=3))
    first, last = split(transformers.MistralForCausalLM(config).double().eval(), (2, 2))
    rows = torch.randint(0, 61, (2, 1, TOKENS))
    with torch.no_grad():
        hidden = [first(row) for row in rows]
        wanted = [last(x) for x in hidden]
    assert last.unsliceable == ""  # tried now, because a trial would wait in the hooks
    both_inside = threading.Barrier(2, timeout=60)

    def meet(*_):
        both_inside.wait()

    for layer in last.runner.layers[2:]:
        layer.layer.register_forward_pre_hook(meet)
    cuts = ((0, 5, TOKENS), (0, 11, TOKENS))

    @torch.no_grad()
    def work(comm):
        x, bounds, carry = hidden[comm.rank], cuts[comm.rank], Carry(TOKENS)
        return [last(x[:, a:b], carry.open(a, b)) for a, b in pairwise(bounds)]

    for found, logits in zip(run_threads(2, work), wanted, strict=True):
        torch.testing.assert_close(torch.cat(found, dim=1), logits)


def test_a_copy_of_a_part_computes_the_same():
    model = shaken(THEIRS["LlamaForCausalLM"](), torch.float32)
    (part,) = split(model, (4,))
    tokens = some_tokens()
    assert torch.equal(copy.deepcopy(part)(tokens), part(tokens))


@pytest.mark.parametrize("name", ["Gemma3", "Qwen3Moe"])
def test_packed_documents_do_not_see_each_other_in_any_family(name):
    model = shaken(
        transformers.AutoModelForCausalLM.from_config(FAMILIES[name]), torch.float32
    )
    tokens = some_tokens()
    starts = torch.zeros_like(tokens)
    starts[:, 6:] = 6
    (part,) = split(model, (4,))
    with torch.no_grad():
        packed = part(tokens, Carry(TOKENS, starts).open(0, TOKENS))
        alone = model(tokens[:, 6:], use_cache=False).logits
    assert (packed[:, 6:] - alone).abs().max() <= ROUNDED * alone.abs().max()


def test_a_family_whose_attention_cannot_go_on_from_earlier_keys_runs_whole_sequences():
    """In Llama 4 a token sees its own chunk of the sequence, however long the chunks of the real model are."""
    config = transformers.Llama4TextConfig(
        **GATED, head_dim=8, intermediate_size_mlp=48, num_local_experts=2
    )
    model = shaken(transformers.AutoModelForCausalLM.from_config(config), torch.float32)
    assert_parts_are_the_whole(model, assert_same_but_for_rounding)
    part = split(model, (4,))[0]
    with pytest.raises(ShapeError, match="cannot run a slice: its slices do not give"):
        part(some_tokens()[:, :5], Carry(TOKENS).open(0, 5))


def test_a_subclass_of_mistrals_attention_keeps_its_window():
    model = shaken(THEIRS["MistralForCausalLM, window"](), torch.float32)
    for layer in model.model.layers:
        layer.self_attn.__class__ = type("Own", (type(layer.self_attn),), {})
    assert_parts_are_the_whole(model)
