"""Decoders of transformers in the trainer: any family with one stack of layers, from its folder and back to one."""

from __future__ import annotations

import copy
import json
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from commands import write_text_run
from hugging_face import NO_MARKS, decoder_sizes, gpt2_sizes
from penstock import make
from penstock.config import Config, ModelConfig
from penstock.errors import ConfigError, FileError, PenstockError, RunError, ShapeError
from penstock.formats.config_toml import read_config
from penstock.models import DecoderConfig, GPTConfig, LlamaConfig, hf_trial, token_loss
from penstock.models.decoder import (
    LOADER,
    build_decoder,
    check_positions,
    decoder_blueprint,
    decoder_of,
    load_whole,
)
from penstock.models.family import count_parameters
from penstock.models.hf import small_config
from penstock.models.split import find_layout
from penstock.plan.space import Limits
from penstock.runtime import run_threads
from penstock.train.after.export import export_run
from penstock.train.after.generate import open_trained
from penstock.train.before.start import check_training
from penstock.train.data.loader import BatchShape, Loader
from penstock.train.history import read_rows
from penstock.train.hub import read_sizes, read_weights, write_model
from penstock.train.job import (
    check_same_model,
    describe_model,
    job_of,
    model_sizes,
    settle_model,
)
from penstock.train.own_models import limits_of
from penstock.train.weights import copy_weights, draw_parameters, hold, hold_whole

SIZES = decoder_sizes(256, width=32, inner=48, max_position_embeddings=64, **NO_MARKS)
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
CONFIGS = {
    "gemma3": transformers.Gemma3TextConfig(
        **SIZES,
        head_dim=8,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
        tie_word_embeddings=True,
    ),
    "mixtral": transformers.MixtralConfig(**SIZES, num_local_experts=4),
    "gpt_neox": transformers.GPTNeoXConfig(
        **{key: size for key, size in SIZES.items() if key != "num_key_value_heads"}
    ),
    "llama 3.1": transformers.LlamaConfig(**SIZES, rope_parameters=SCALED),
}
if hasattr(transformers, "Gemma4TextConfig"):
    CONFIGS["gemma4"] = transformers.Gemma4TextConfig(
        **SIZES,
        head_dim=8,
        global_head_dim=16,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=8,
        top_k_experts=2,
        moe_intermediate_size=16,
    )
TEXT = "".join(f"the {n % 7} cats sat on {n % 5} mats\n" for n in range(3000))


def folder_of(name: str, folder: Path) -> Path:
    torch.manual_seed(1)
    config = copy.deepcopy(CONFIGS[name])
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture
def penstock(run, tmp_path):
    """Run a command line in a folder with some text; return its output."""
    write_text_run(tmp_path, TEXT)

    def run_line(line: str) -> str:
        code, out, err = run(line)
        assert code == 0, err
        return out + err

    return run_line


def test_what_a_run_adds_to_a_model_is_not_tried_on_empty_memory(monkeypatch):
    """Weights come later than the schedule, which asks whether a part can be sliced."""

    class Adapted(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    def adapt(model: torch.nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.__class__ = Adapted

    monkeypatch.setattr(hf_trial, "_fault_of", lambda *_: "it gives random numbers")
    schedule = make("seq1f1b", ranks=1, microbatches=2, slices=2)
    sizes = decoder_of(transformers.LlamaConfig(**SIZES))
    part = hold(sizes, schedule, (sizes.layers,), 0, prepare=adapt).stages[0]
    assert part.unsliceable == ""


def test_threads_read_whole_models_one_after_the_other(tmp_path, monkeypatch):
    """transformers replaces `tie_weights` of all models meanwhile; two at once would leave the replacement behind."""
    sizes = decoder_of(CONFIGS["gemma3"])
    inside = threading.Semaphore(1)

    def read(*_, **__) -> tuple[torch.nn.Module, dict[str, set[str]]]:
        assert inside.acquire(blocking=False)
        time.sleep(0.05)
        inside.release()
        told: dict[str, set[str]] = {"missing_keys": set(), "mismatched_keys": set()}
        return torch.nn.Linear(1, 1), told

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", read)
    assert len(run_threads(2, lambda comm: load_whole(tmp_path, sizes))) == 2


@pytest.mark.parametrize(
    ("sizes", "slices"),
    [
        (transformers.Gemma2Config(**SIZES, head_dim=8), 8),
        # Its linear attention goes on from a state that Penstock does not know.
        (transformers.Qwen3NextConfig(**SIZES, head_dim=8, num_experts=2), 1),
    ],
)
def test_the_planner_knows_which_decoders_run_in_slices(sizes, slices, tmp_path):
    sizes.save_pretrained(tmp_path)
    config = replace(Config(), model=ModelConfig(path=str(tmp_path / "config.json")))
    config = replace(config, data=replace(config.data, seq_len=64))
    found = limits_of(model_sizes(config), Limits(slices=8))
    assert found == Limits(slices=slices)


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("gemma3", "seq1f1b:slices=2"),
        ("mixtral", "zb-h1 --set parallel.pp=1"),
    ],
)
def test_a_decoder_is_trained_and_exported_in_its_own_format(
    name, schedule, penstock, tmp_path
):
    """The first loss is that of transformers' model, and what is exported computes what was trained."""
    folder_of(name, tmp_path / "start")
    said = penstock(
        f"train config.toml --set model.path=start --set schedule.name={schedule} "
        "--set run.steps=2 --set run.folder=run"
    )
    assert (
        type(transformers.AutoModelForCausalLM.from_config(CONFIGS[name])).__name__
        in said
    )
    penstock("export run -o end")
    trained = open_trained(tmp_path / "run")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "end").eval()
    tokens = torch.randint(0, 256, (2, 16))
    with torch.no_grad():
        expected = theirs(tokens).logits
        found = trained.model(tokens)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    rows = read_rows(tmp_path / "run")
    begun = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "start").eval()
    batch = first_batch(tmp_path / "run")
    with torch.no_grad():
        logits = begun(batch[:, :-1]).logits
        loss = token_loss(logits, batch[:, 1:]) / batch[:, 1:].numel()
    assert rows[0].loss == pytest.approx(float(loss), rel=1e-5)
    assert "perplexity" in penstock("eval run --batches 1")


def first_batch(run: Path) -> torch.Tensor:
    """The sequences of the first step, each with the token after it."""
    config = read_config(run / "config.toml")
    job = job_of(run, config)
    batch = Loader(
        job.corpus, BatchShape(config.data.global_batch, 1), config.run.seed
    ).step()[0]
    return torch.cat([batch.inputs[0], batch.labels[0][:, -1:]], dim=1)


@pytest.mark.parametrize("name", CONFIGS)
def test_new_weights_begin_as_those_of_transformers_do_and_are_counted(name):
    sizes = decoder_of(CONFIGS[name])
    holding = hold_whole(sizes)
    draw_parameters(holding, 0)
    torch.manual_seed(0)
    theirs = dict(build_decoder(sizes).named_parameters())
    assert holding.parameters.keys() == theirs.keys()
    total = sum(parameter.numel() for parameter in theirs.values())
    assert count_parameters(sizes).total == total
    for path, parameter in holding.parameters.items():
        ours, expected = parameter.detach(), theirs[path].detach()
        if bool((expected == expected.flatten()[0]).all()):
            assert torch.equal(ours, expected), path
        else:
            assert float(ours.std()) == pytest.approx(float(expected.std()), rel=0.2)
    again = hold_whole(sizes)
    draw_parameters(again, 0)
    for path, parameter in again.parameters.items():
        assert torch.equal(parameter, holding.parameters[path])


@pytest.mark.skipif("gemma4" not in CONFIGS, reason="transformers has no Gemma 4")
def test_layers_may_have_sizes_of_their_own():
    """A plan counts with the widest heads; a profile builds the first layers, and only their sizes count."""
    sizes = decoder_of(CONFIGS["gemma4"])
    assert sizes.head_width == 16
    assert sizes.inner == 2 * 16
    layers = build_decoder(sizes, layers=2).model.layers
    assert [layer.self_attn.q_proj.out_features for layer in layers] == [32, 64]
    large = transformers.Gemma4TextConfig(
        num_hidden_layers=60,
        hidden_size=5376,
        num_attention_heads=32,
        num_key_value_heads=16,
        num_global_key_value_heads=4,
        attention_k_eq_v=True,
    )
    small = small_config(large)
    assert (small.num_hidden_layers, small.hidden_size) == (6, 672)
    heads = [(one.head_dim, one.num_key_value_heads) for one in small.per_layer_config]
    assert heads == [(256, 2)] * 5 + [(512, 2)]


def test_a_run_resumes_with_another_version_of_transformers_but_not_with_another_model():
    """Versions record other values for the same model; here they are added and left out by hand."""
    sizes = decoder_of(CONFIGS["gemma3"])
    facts = {"model": describe_model(sizes)}
    recorded = json.loads(sizes.config)
    del recorded["attention_dropout"]
    recorded |= {"_name_or_path": "elsewhere", "transformers_version": "4.50.0"}
    facts["model"]["config"] = json.dumps(recorded)
    check_same_model(Path("step-1"), facts, sizes)
    recorded["sliding_window"] += 1
    facts["model"]["config"] = json.dumps(recorded)
    with pytest.raises(RunError, match=r"another model: its sliding_window is 9, here"):
        check_same_model(Path("step-1"), facts, sizes)
    facts["model"]["config"] = "{}"
    with pytest.raises(RunError, match="its config cannot be read"):
        check_same_model(Path("step-1"), facts, sizes)


def test_sizes_do_not_depend_on_how_a_folder_is_named(tmp_path, monkeypatch):
    """A run that began in one folder resumes from another; they are compared by their sizes."""
    CONFIGS["gemma3"].save_pretrained(tmp_path / "start")
    monkeypatch.chdir(tmp_path)
    assert read_sizes(Path("start")) == read_sizes(tmp_path / "start")


def test_biases_that_balance_experts_are_read_and_written_like_weights(tmp_path):
    """They are buffers, which other trainers learn without gradients."""
    config = transformers.DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4},
        **{"q_lora_rank": 8, "kv_lora_rank": 8, "v_head_dim": 8},
        **{"qk_rope_head_dim": 4, "qk_nope_head_dim": 4},
        **{"moe_intermediate_size": 16, "n_routed_experts": 4, "n_group": 1},
        **{"topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 3},
    )
    model = transformers.DeepseekV3ForCausalLM(config).eval()
    biases = model.model.layers[3].mlp.gate.e_score_correction_bias
    torch.nn.init.uniform_(biases, -5.0, 5.0)
    model.save_pretrained(tmp_path / "start")
    sizes = read_sizes(tmp_path / "start")
    holding = hold_whole(sizes)
    for name, weights in read_weights(
        tmp_path / "start", holding.parameters.keys(), sizes
    ):
        holding.parameters[name].data.copy_(weights)
    tokens = torch.randint(0, 256, (2, 16))
    with torch.no_grad():
        expected = model(tokens).logits
        found = holding.stages[0](tokens)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    path = "model.layers.3.mlp.gate.e_score_correction_bias"
    assert path in holding.parameters
    assert path not in holding.trained
    (tmp_path / "end").mkdir()
    write_model(tmp_path / "end", dict(holding.parameters), sizes)
    end = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "end")
    assert torch.equal(end.get_buffer(path), biases)


def test_weights_that_do_not_begin_around_zero_are_not_drawn(tmp_path):
    transformers.MambaConfig(hidden_size=16, num_hidden_layers=2).save_pretrained(
        tmp_path
    )
    config = replace(Config(), model=ModelConfig(path=str(tmp_path / "config.json")))
    with pytest.raises(PenstockError, match=r"(?s)A_log .* not around zero.*model\.p"):
        check_training(config, read_sizes(tmp_path))


def test_a_llama_that_ours_is_not_is_taken_from_transformers(tmp_path):
    """Scaled rotary positions, biases, layers with numbers of their own: our Llama has none of these."""
    plain = transformers.LlamaConfig(**SIZES)
    for number, changes in enumerate(
        (
            {},
            {"rope_parameters": SCALED},
            {"attention_bias": True},
            {"head_dim": 16},
            {"per_layer_config": {"1": {"rms_norm_eps": 0.01}}},
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        text = json.dumps(plain.to_dict() | changes)
        (folder / "config.json").write_text(text)
        kind = DecoderConfig if changes else LlamaConfig
        assert isinstance(read_sizes(folder), kind), changes


@pytest.mark.parametrize(
    "change",
    [{"scale_attn_by_inverse_layer_idx": True}, {"scale_attn_weights": False}],
    ids=["by layer", "unscaled"],
)
def test_a_gpt_whose_attention_is_scaled_otherwise_is_taken_from_transformers(
    change, tmp_path
):
    """Ours divides the scores by the root of a head's width, and by nothing else."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(**gpt2_sizes(256, **NO_MARKS), **change)
    model = transformers.GPT2LMHeadModel(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.5)
    model.save_pretrained(tmp_path)
    sizes = read_sizes(tmp_path)
    holding = hold_whole(sizes)
    for name, weights in read_weights(tmp_path, holding.parameters.keys(), sizes):
        holding.parameters[name].data.copy_(weights)
    tokens = torch.randint(0, 256, (2, 16))
    with torch.no_grad():
        expected = model(tokens).logits
        found = holding.stages[0](tokens)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "t5"}, "neither a causal nor a masked language model of type"),
        ({"model_type": "bart"}, "has two stacks of layers"),
        (
            {"model_type": "llama", "quantization_config": {"bits": 4}},
            "its weights are quantized",
        ),
        ({"model_type": "gemma3"}, "save its language model alone"),
        ({"model_type": "nonsense"}, "cannot make a model"),
        (
            {"model_type": "qwen3", "hidden_size": "32"},
            "cannot make a model .*hidden_size",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_with_the_reason(config, reason, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(PenstockError, match=reason):
        read_sizes(tmp_path)


def test_sizes_and_lengths_that_do_not_fit_are_refused():
    odd = transformers.Qwen3Config(**{**SIZES, "num_key_value_heads": 3})
    with pytest.raises(PenstockError, match="do the sizes in its config fit together"):
        find_layout(decoder_blueprint(decoder_of(odd)))
    with pytest.raises(
        ShapeError, match=r"65 tokens, but a Gemma3ForCausalLM .* 64 at"
    ):
        check_positions(decoder_of(CONFIGS["gemma3"]), 65)
    with pytest.raises(ShapeError, match=r"(?s)17 tokens, but a GPT .*seq_len=16"):
        check_positions(GPTConfig(61, 16, 2, 4, 24, 16), 17)


@pytest.mark.parametrize(
    ("name", "lost", "reason"),
    [
        (
            "gemma3",
            "model.layers.1.mlp.up_proj.weight",
            r"has no weights model\.layers",
        ),
        ("mixtral", "model.layers.1.input_layernorm.weight", r"has no weights model\."),
        (
            "mixtral",
            "model.layers.1.block_sparse_moe.experts.0.w1.weight",
            r"cannot put model\.layers\.1\.mlp\.experts\.gate_up_proj together",
        ),
    ],
)
def test_a_folder_that_lacks_weights_is_refused(name, lost, reason, tmp_path, loader):
    """transformers would draw new weights in their place, with a warning."""
    folder = folder_of(name, tmp_path)
    change_weights(folder, lost, None)
    with pytest.raises(FileError, match=reason):
        read_all(folder)
    assert loader.messages == []  # only our refusal


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (
            "model.layers.1.self_attn.q_proj.weight",
            r"q_proj\.weight is \(3, 5\) instead of \(32, 32\)",
        ),
        (
            "model.layers.1.block_sparse_moe.experts.0.w1.weight",
            r"gate_up_proj together from .* one of them is missing or has another shape",
        ),
    ],
)
def test_a_folder_whose_weights_have_other_shapes_is_refused(
    changed, reason, tmp_path, loader
):
    folder = folder_of("mixtral", tmp_path)
    change_weights(folder, changed, torch.zeros(3, 5))
    with pytest.raises(FileError, match=reason):
        read_all(folder)
    assert loader.messages == []


def test_a_weight_of_another_shape_is_named_with_both_shapes(tmp_path):
    folder = folder_of("gemma3", tmp_path)
    change_weights(folder, "model.layers.1.mlp.up_proj.weight", torch.zeros(3, 5))
    sizes = read_sizes(folder)
    holding = hold_whole(sizes)
    tensors = read_weights(folder, holding.parameters, sizes)
    with pytest.raises(
        ShapeError, match=r"up_proj.* is \(3, 5\) in the files, but \(48, 32\)"
    ):
        copy_weights(holding, tensors)


def test_segments_are_refused_for_a_folder_with_a_decoder(tmp_path):
    folder = folder_of("gemma3", tmp_path)
    config = replace(Config(), model=ModelConfig(path=str(folder)))
    config = replace(config, data=replace(config.data, format="text:segments=2"))
    with pytest.raises(
        ConfigError, match=r"the model of model\.path = .* is a decoder"
    ):
        settle_model(config)


def test_what_transformers_says_of_a_folder_that_is_read_is_still_logged(
    tmp_path, loader
):
    folder = folder_of("mixtral", tmp_path)
    change_weights(folder, "extra.weight", torch.zeros(3, 5))
    read_all(folder)
    assert any("extra.weight" in message for message in loader.messages)


def change_weights(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    """Replace a tensor of a folder, or remove it."""
    weights = load_file(folder / "model.safetensors")
    weights.pop(name, None)
    if tensor is not None:
        weights[name] = tensor
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def read_all(folder: Path) -> None:
    sizes = read_sizes(folder)
    names = hold_whole(sizes).parameters.keys()
    list(read_weights(folder, names, sizes))


@pytest.fixture
def loader(caplog):
    """What the part of transformers that reads weights logs."""
    LOADER.addHandler(caplog.handler)
    yield caplog
    LOADER.removeHandler(caplog.handler)


# ---------------------------------------------------------------- what an export keeps
def test_an_export_keeps_what_the_original_folder_said(penstock, tmp_path):
    start = tmp_path / "start"
    plain = {**SIZES, "max_position_embeddings": 8192, "bos_token_id": 3}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**plain)).save_pretrained(
        start
    )
    (start / "generation_config.json").write_text('{"temperature": 0.6}')
    (start / "chat_template.jinja").write_text("{{ messages }}")
    penstock(
        "train config.toml --set model.path=start --set run.steps=1 --set run.folder=run"
    )
    shutil.rmtree(start)  # the run has its own copies
    penstock("export run -o end --dtype bfloat16")
    end = tmp_path / "end"
    said = json.loads((end / "config.json").read_text())
    assert said["max_position_embeddings"] == 8192
    assert (said["bos_token_id"], said["dtype"]) == (3, "bfloat16")
    assert (end / "generation_config.json").read_text() == '{"temperature": 0.6}'
    assert (end / "chat_template.jinja").read_text() == "{{ messages }}"
    weights = load_file(end / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    modes = {file.stat().st_mode for file in end.iterdir()}
    assert len(modes) == 1, "other users can read some files and not others"
    trained = open_trained(tmp_path / "run").holding.parameters["embed.weight"]
    found = weights["model.embed_tokens.weight"]
    assert torch.equal(found, trained.detach().to(torch.bfloat16))


def test_an_export_has_only_known_types(penstock, tmp_path):
    with pytest.raises(ShapeError, match="no type 'int4' to export; known: float32"):
        export_run(tmp_path, tmp_path / "end", "int4")
