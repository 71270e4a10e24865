"""LoRA trains the adapters that peft would train, in a pipeline, and peft loads what is exported."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from commands import called
from crews import Crew
from hugging_face import decoder_sizes, gpt2_sizes
from penstock.config import LoraConfig, OptimizerConfig
from penstock.errors import ConfigError, RunError
from penstock.measure.probe import Probe, footprint
from penstock.models import token_loss, valid_tokens
from penstock.train.after.export import export_run
from penstock.train.before.profile import ProfileRequest, subjects_of
from penstock.train.checkpoints.checkpoint import newest, step_name
from penstock.train.data.loader import BatchShape, Loader
from penstock.train.history import read_rows
from penstock.train.hub import keep_origin, read_sizes
from penstock.train.lora import check_adapters, trained_names
from penstock.train.optimizer import parameter_numbers
from penstock.train.weights import blueprint
from trainings import SMALL, VOCAB, apart, corpus, job_of, losses, train

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
tokenizers = pytest.importorskip("tokenizers")
pytestmark = pytest.mark.numerics

STEPS = 4
RECIPE = (
    *("lora.rank=2", "lora.alpha=8", "optimizer.lr_schedule=constant"),
    *("optimizer.warmup_steps=0", "optimizer.lr=0.05", f"run.steps={STEPS}"),
)


def llama() -> torch.nn.Module:
    config = transformers.LlamaConfig(**decoder_sizes(VOCAB))
    return transformers.LlamaForCausalLM(config)


def gpt2() -> torch.nn.Module:
    config = transformers.GPT2Config(**gpt2_sizes(VOCAB, positions=8))
    return transformers.GPT2LMHeadModel(config)


def qwen2() -> torch.nn.Module:
    sizes = decoder_sizes(VOCAB, tie_word_embeddings=True)
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes))


def job(folder: Path, base: Path, name: str, *changes: str, **shape):
    """A run that trains adapters beside the model in a folder."""
    found = job_of(folder, name, *RECIPE, f"model.path={base}", *changes, **shape)
    return replace(found, sizes=read_sizes(base))


def by_peft(base: Path, targets, start) -> tuple[list[float], torch.nn.Module]:
    """The losses of peft's own model in one piece with torch's AdamW, from the same adapters."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base).eval()
    settings = peft.LoraConfig(
        r=2, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(model, settings)
    peft.set_peft_model_state_dict(model, start)
    trained = [one for one in model.parameters() if one.requires_grad]
    adamw = torch.optim.AdamW(trained, lr=0.05, betas=(0.9, 0.95), weight_decay=0.1)
    loader = Loader(
        corpus(SMALL), BatchShape(SMALL.data.global_batch, 1), SMALL.run.seed
    )
    found = []
    for _ in range(STEPS):
        batch = loader.step()[0]
        x, y = batch.inputs[0], batch.labels[0]
        loss = token_loss(model(x).logits, y) / valid_tokens(y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, SMALL.optimizer.clip_norm)
        adamw.step()
        adamw.zero_grad()
        found.append(float(loss.detach()))
    return found, model


@pytest.mark.parametrize(
    ("build", "targets", "theirs", "name", "shape"),
    [
        (
            llama,
            "[q_proj, v_proj, mlp.down]",
            ["q_proj", "v_proj", "down_proj"],
            "zb-h1",
            {},
        ),
        (gpt2, "[c_attn]", ["c_attn"], "1f1b", {"ranks": 4}),
        (qwen2, "[]", "all-linear", "seq1f1b", {"slices": 2}),
    ],
    ids=["llama", "gpt2", "qwen2"],
)
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
# peft 0.21 asks models of transformers 5.23 by an old name.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_adapters_train_as_in_peft_and_peft_loads_them(
    build, targets, theirs, name, shape, tmp_path
):
    torch.manual_seed(0)
    base = tmp_path / "base"
    build().save_pretrained(base)
    run = tmp_path / "run"
    targets = f"lora.targets={targets}"
    # The adapters before the first step, as peft sees them.
    still = "optimizer.groups=[{match='*', lr=0.0}]"
    train(job(run, base, "1f1b", targets, "run.steps=1", still))
    export_run(run, tmp_path / "start")
    start = peft.load_peft_weights(str(tmp_path / "start"), device="cpu")
    assert all(bool(one.any()) == ("lora_A" in key) for key, one in start.items())
    # Two ranks begin, others go on from their checkpoint.
    run = tmp_path / "trained"
    train(job(run, base, "1f1b", targets, "run.steps=2"))
    rows = train(job(run, base, name, targets, resume=True, **shape))
    losses, oracle = by_peft(base, theirs, start)
    assert apart(rows, losses) < 1e-4
    assert rows[-1].loss < rows[0].loss
    # Checkpoints have adapters only.
    (newest_one, *_) = newest(run / "checkpoints")
    size = sum(file.stat().st_size for file in newest_one.glob("*.safetensors"))
    assert size < sum(file.stat().st_size for file in base.glob("*.safetensors")) * 3
    # peft loads the exported adapters, and transformers the merged model.
    export_run(run, tmp_path / "adapters")
    export_run(run, tmp_path / "merged", merged=True)
    x = torch.arange(8)[None] % VOCAB
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    loaded = peft.PeftModel.from_pretrained(plain, str(tmp_path / "adapters"))
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        expected = oracle.eval()(x).logits
        assert torch.allclose(loaded.eval()(x).logits, expected, atol=1e-3)
        assert torch.allclose(merged.eval()(x).logits, loaded(x).logits, atol=1e-5)
    said = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert (said["r"], said["lora_alpha"]) == (2, 8)


def test_an_export_of_adapters_has_the_tokenizer_and_says_that_it_is_no_model(
    tmp_path, monkeypatch, capsys
):
    base, run = tmp_path / "base", tmp_path / "run"
    llama().save_pretrained(base)
    words = {f"word{n}": n for n in range(VOCAB)}
    told = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "word0"))
    told.save(str(base / "tokenizer.json"))
    (base / "tokenizer_config.json").write_text('{"eos_token": "word7"}')
    train(
        job(run, base, "1f1b", f"data.tokenizer={base}/tokenizer.json", "run.steps=1")
    )
    keep_origin(base, run)
    line = f"export {run} -o {tmp_path / 'adapters'}"
    code, out, err = called(monkeypatch, capsys, line)
    assert code == 0, err
    assert "the LoRA adapters of " in out
    assert f"peft loads them beside the base model, {base}" in out
    assert f"penstock export {run} --merge -o FOLDER" in out
    assert sorted(file.name for file in (tmp_path / "adapters").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    code, out, _ = called(monkeypatch, capsys, f"export {run} --merge -o {tmp_path}/m")
    assert out.startswith(f"wrote {tmp_path}/m, the model of ")


def test_other_adapters_than_those_of_the_checkpoint_are_refused(tmp_path):
    base = tmp_path / "base"
    llama().save_pretrained(base)
    train(job(tmp_path / "run", base, "1f1b", "run.steps=1", ranks=1))
    with pytest.raises(RunError, match=r"trained with lora.rank = 2, here it is 3"):
        train(job(tmp_path / "run", base, "1f1b", "lora.rank=3", resume=True, ranks=1))
    with pytest.raises(ConfigError, match=r"called 'w_proj'\n  known: down_proj, "):
        check_adapters(read_sizes(base), LoraConfig(rank=2, targets=("w_proj",)))


def test_memory_counts_gradients_and_state_of_adapters_only(tmp_path):
    llama().save_pretrained(tmp_path)
    sizes = read_sizes(tmp_path)
    lora = LoraConfig(rank=2, targets=("q_proj",))
    model = blueprint(sizes)
    layers = sum(one.numel() for one in model.layers.parameters())
    adapters = 4 * 2 * (16 + 16)
    assert len(trained_names(sizes, lora)) == len(list(model.parameters())) + 4 * 2
    numbers = parameter_numbers(OptimizerConfig(), sizes, lora)
    assert numbers.layers == pytest.approx((layers + 4 * adapters) / layers)
    assert (numbers.ends, numbers.ends_trained) == (1, 0)
    subjects = subjects_of(ProfileRequest(sizes, 8, lora=lora))
    measured = footprint(Probe(subjects.layer)).weights
    both = 2 * layers / 4 + 4 * adapters / 2  # of the two layers that are measured
    assert measured == pytest.approx(4 * both, rel=0.02)


def test_dropout_of_adapters_is_the_same_on_other_ranks(tmp_path):
    torch.manual_seed(0)
    qwen2().save_pretrained(tmp_path / "base")

    def run(folder: str, name: str, *changes: str, **shape):
        changes = (*changes, "run.steps=3")
        return losses(
            train(job(tmp_path / folder, tmp_path / "base", name, *changes, **shape))
        )

    plain = run("a", "1f1b", ranks=1, microbatches=1)
    drops = run("b", "1f1b", "lora.dropout=0.4", ranks=1, microbatches=1)
    split = run("c", "seq1f1b", "lora.dropout=0.4", slices=2)
    assert split == pytest.approx(drops, abs=1e-5)
    # B is zero in the first step, so that nothing can be dropped there.
    assert abs(drops[2] - plain[2]) > 1e-4


@pytest.mark.parametrize("mirror", [True, False])
def test_adapters_of_a_lost_worker_come_back_from_its_mirror_or_the_checkpoint(
    mirror, tmp_path
):
    torch.manual_seed(0)
    llama().save_pretrained(tmp_path / "base")
    settings = (
        "run.save_every=1",
        "run.keep_checkpoints=9",
    )
    shape = {"ranks": 3, "microbatches": 4}
    crewed = job(tmp_path / "crew", tmp_path / "base", "1f1b", *settings, **shape)
    crewed = replace(crewed, plan=replace(crewed.plan, partition=(2, 1, 1)))
    crew = Crew(crewed, mirror)
    crew.change_at = 2
    crew.run(crew.decide())
    crew.change_at = 0
    del crew.reports[1]  # It alone had its part.
    decision = crew.decide()
    assert (decision.keep, bool(decision.restores)) == (True, not mirror)
    crew.run(decision)
    kept = crewed.checkpoints / step_name(2)
    other = replace(crewed, plan=decision.plan, folder=tmp_path / "other", resume=True)
    shutil.copytree(kept, other.checkpoints / kept.name)
    expected = losses(train(other))
    assert losses(read_rows(tmp_path / "crew"))[2:] == expected[-STEPS + 2 :]
