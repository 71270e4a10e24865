"""Encoders of transformers in the trainer: from a folder and back to one, with the losses of transformers itself."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file

from commands import write_text_run
from hugging_face import bert_sizes
from penstock.errors import PenstockError
from penstock.formats.config_toml import read_config
from penstock.measure.probe import Probe
from penstock.models import EncoderConfig
from penstock.models.decoder import build_decoder
from penstock.models.family import count_parameters
from penstock.train.after.generate import open_trained
from penstock.train.before.profile import ProfileRequest, subjects_of
from penstock.train.data.loader import BatchShape, Loader
from penstock.train.data.masking import bert_words, masking_of
from penstock.train.data.tokenizer import FileTokenizer
from penstock.train.history import read_rows
from penstock.train.hub import read_sizes
from penstock.train.job import job_of
from penstock.train.weights import draw_parameters, hold_whole

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
WORDS = ["the", "cats", "sat", "on", "mats", "and", "so", "did", "dogs", "."]
VOCAB, PAD, TOKENS = len(SPECIAL) + len(WORDS), 1, 28
STORIES = [
    " ".join(f"{WORDS[k % 9]} {WORDS[(k + n) % 9]} sat." for k in range(3 + n % 11))
    for n in range(60)
]
SIZES = bert_sizes(VOCAB, positions=TOKENS + 2, pad_token_id=PAD, initializer_range=0.2)
CONFIGS: dict[str, transformers.PreTrainedConfig] = {
    "roberta": transformers.RobertaConfig(**SIZES, type_vocab_size=1),
    "xlm-roberta": transformers.XLMRobertaConfig(**SIZES, type_vocab_size=1),
    "camembert": transformers.CamembertConfig(**SIZES, type_vocab_size=1),
    "electra": transformers.ElectraConfig(**SIZES, embedding_size=16),
    "distilbert": transformers.DistilBertConfig(
        **{"vocab_size": VOCAB, "dim": 32, "n_layers": 4, "n_heads": 4},
        **{"hidden_dim": 48, "max_position_embeddings": TOKENS, "pad_token_id": PAD},
        **{"dropout": 0.0, "attention_dropout": 0.0, "initializer_range": 0.2},
    ),
    "modernbert": transformers.ModernBertConfig(
        **SIZES, local_attention=8, bos_token_id=0, eos_token_id=2
    ),
}
OWN = "bert"  # transformers' config of our own Bert


def word_list(folder: Path) -> Path:
    """Write a tokenizer with the special words of RoBERTa, as the Hub has them: nothing beside it names them."""
    numbers = {word: n for n, word in enumerate([*SPECIAL, *WORDS])}
    theirs = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(numbers, unk_token="<unk>")
    )
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    theirs.add_special_tokens(SPECIAL)
    folder.mkdir(exist_ok=True)
    theirs.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def folder_of(name: str, folder: Path) -> Any:
    """Save a small model and its tokenizer; return the model."""
    torch.manual_seed(1)
    config = transformers.BertConfig(**SIZES)
    if name != OWN:
        config = copy.deepcopy(CONFIGS[name])
    model = transformers.AutoModelForMaskedLM.from_config(config).eval()
    model.save_pretrained(folder)
    word_list(folder)
    return model


@pytest.fixture
def penstock(run, tmp_path):
    """Run a command line in a folder with some stories; return exit code and output."""
    write_text_run(tmp_path, "")
    (tmp_path / "stories").mkdir()
    for number, story in enumerate(STORIES):
        (tmp_path / "stories" / f"{number}.txt").write_text(story)

    def run_line(line: str) -> tuple[int, str]:
        code, out, err = run(line)
        return code, out + err

    return run_line


TRAIN = (
    'train config.toml --set data.sources=[\\"stories\\"] --set model.path=start --set run.folder=run '
    f"--set data.seq_len={TOKENS} --set optimizer.clip_norm=0 --set optimizer.weight_decay=0 "
)


@pytest.mark.numerics
@pytest.mark.parametrize(
    ("name", "segments", "schedule"),
    [
        (OWN, 2, "1f1b"),
        ("roberta", 1, "1f1b"),
        ("xlm-roberta", 0, "1f1b --set parallel.pp=4"),
        ("camembert", 1, "zb-h1"),
        ("electra", 2, "hanayo"),
        ("distilbert", 1, "hanayo"),
        ("modernbert", 1, "1f1b --set parallel.pp=4"),
    ],
)
def test_an_encoder_is_trained_evaluated_and_exported(
    name, segments, schedule, penstock, tmp_path
):
    """The losses are those of transformers' own model, step by step, with its masks and types on the same rows."""
    model = folder_of(name, tmp_path / "start")
    code, said = penstock(
        f"{TRAIN} --set data.format=text:segments={segments} --set schedule.name={schedule} --set run.steps=3"
    )
    assert code == 0, said
    shown = OWN if name == OWN else type(model).__name__
    assert f"{shown}, 4 layers" in said
    rows = read_rows(tmp_path / "run")
    assert [row.loss for row in rows] == pytest.approx(
        losses_of(model, tmp_path / "run", [row.rate for row in rows]), rel=5e-5
    )
    code, said = penstock("export run -o end")
    assert code == 0, said
    exported = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "end")
    assert type(exported) is type(model)
    tokens = torch.randint(0, VOCAB, (2, 16))
    with torch.no_grad():
        expected = exported.eval()(tokens).logits
        found = open_trained(tmp_path / "run").model(tokens)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    for line in (
        "eval run --batches 1 --omit 2",
        f"eval end --text stories --seq-len {TOKENS}",
    ):
        code, said = penstock(line)
        assert code == 0, said
        assert "perplexity" in said
    code, said = penstock("generate run")
    assert code != 0
    assert f"a {shown} fills in words" in said


def losses_of(model: Any, run: Path, rates: list[float]) -> list[float]:
    """Train transformers' own model on the rows of a run; return the loss of each step."""
    job = job_of(run, read_config(run / "config.toml"))
    loader = Loader(job.corpus, BatchShape(8, 1), job.config.run.seed)
    settings = job.config.optimizer
    adam = torch.optim.AdamW(model.parameters(), betas=settings.betas, weight_decay=0.0)
    losses = []
    for rate in rates:
        batch = loader.step()[0]
        arguments = {}
        if batch.starts:
            arguments["attention_mask"] = (batch.starts[0] == 0).long()
            assert not arguments["attention_mask"].all(), "there is padding"
        if batch.named:
            arguments["token_type_ids"] = batch.named[0]["types"]
        loss = model(batch.inputs[0], labels=batch.labels[0], **arguments).loss
        adam.param_groups[0]["lr"] = rate
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(float(loss.detach()))
    return losses


def test_a_resumed_run_of_an_encoder_goes_on_with_other_ranks(penstock, tmp_path):
    folder_of("roberta", tmp_path / "start")
    line = f"{TRAIN} --set data.format=text:segments=1 --set data.document_mask=true --set schedule.name=1f1b"
    code, said = penstock(f"{line} --set run.steps=4 --set run.folder=whole")
    assert code == 0, said
    for steps, ranks in ((2, "2"), (4, "4 --resume")):
        code, said = penstock(
            f"{line} --set run.steps={steps} --set run.save_every=2 --set parallel.pp={ranks}"
        )
        assert code == 0, said
    whole = [row.loss for row in read_rows(tmp_path / "whole")]
    parts = [row.loss for row in read_rows(tmp_path / "run")]
    assert parts == pytest.approx(whole, rel=1e-5)


def test_a_planned_run_of_a_new_encoder(penstock, tmp_path):
    """The planner measures its layers and does not slice it."""
    CONFIGS["electra"].save_pretrained(tmp_path / "start")
    word_list(tmp_path / "start")
    line = TRAIN.replace("model.path=start", "model.path=start/config.json")
    code, said = penstock(
        f"{line} --set data.document_mask=true --set schedule.name=auto "
        "--set run.steps=1 "
        "--set run.checks=forecast,gradients,memory"
    )
    assert code == 0, said
    assert len(read_rows(tmp_path / "run")) == 1


def test_the_special_words_of_roberta_are_found_without_files_that_name_them(tmp_path):
    file = word_list(tmp_path)
    tokenizer = FileTokenizer(str(file))
    words = bert_words(tokenizer, segments=1)
    assert (words.mask, words.begin, words.border, words.padding) == (4, 0, 2, 1)
    assert words.vocab == VOCAB
    assert masking_of(tokenizer, 0.15, 1).spared == (0, 1, 2)


@pytest.mark.parametrize("name", CONFIGS)
def test_new_encoders_begin_as_hugging_faces_do_and_are_counted_without_memory(
    name, tmp_path
):
    CONFIGS[name].save_pretrained(tmp_path)
    sizes = read_sizes(tmp_path)
    assert isinstance(sizes, EncoderConfig)
    if name != "modernbert":  # it has no embedding of positions
        assert sizes.positions == (TOKENS + 2 if name == "electra" else TOKENS)
    holding = hold_whole(sizes)
    draw_parameters(holding, 0)
    theirs = dict(build_decoder(sizes).named_parameters())
    assert holding.parameters.keys() == theirs.keys()
    for path, parameter in holding.parameters.items():
        ours, expected = parameter.detach(), theirs[path].detach()
        zeros = [not row.any() for row in expected]
        assert [not row.any() for row in ours] == zeros, path
    total = sum(parameter.numel() for parameter in theirs.values())
    assert count_parameters(sizes).total == total


@pytest.mark.parametrize(
    "config", [CONFIGS["roberta"], transformers.BertConfig(**SIZES)]
)
@pytest.mark.parametrize("separate", [False, True])
def test_an_encoder_is_measured_on_shorter_sequences_instead_of_slices(
    separate, config, tmp_path
):
    config.save_pretrained(tmp_path)
    request = ProfileRequest(read_sizes(tmp_path), TOKENS, rows=2, separate=separate)
    for subject in (subjects_of(request).layer, subjects_of(request).head):
        times = Probe(subject).times(8, 0)
        assert all(seconds >= 0 for seconds in times[0])


# ---------------------------------------------------------------- refused
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            "schedule.name=1f1b:slices=2",
            "slices=2 does not go with model.path = start:",
        ),
        (
            "data.format=text:segments=2",
            "cannot tell 2 of them apart set data.format=text:segments=1",
        ),
        (
            "data.seq_len=29",
            "29 tokens, but a RobertaForMaskedLM of this config is for",
        ),
        ("parallel.tp=2", "only our own Llama and GPT can be divided"),
        ("model.dropout=0.1", "a RobertaForMaskedLM is trained without dropout"),
        ("data.format=chat", "does not go with model.path = start:"),
    ],
)
def test_what_an_encoder_cannot_do_is_refused(change, words, penstock, tmp_path):
    folder_of("roberta", tmp_path / "start")
    code, said = penstock(f"{TRAIN} --set {change}")
    assert code != 0
    assert words in " ".join(said.split())


def test_segments_of_a_model_without_types_are_refused(penstock, tmp_path):
    folder_of("distilbert", tmp_path / "start")
    code, said = penstock(f"{TRAIN} --set data.format=text:segments=2")
    assert code != 0
    assert "knows no types of segments" in " ".join(said.split())


def test_a_folder_without_a_head_for_masked_words_is_refused(penstock, tmp_path):
    """The discriminator of an ELECTRA has another head; transformers would draw this one at random."""
    config = copy.deepcopy(CONFIGS["electra"])
    transformers.ElectraForPreTraining(config).save_pretrained(tmp_path / "start")
    word_list(tmp_path / "start")
    code, said = penstock(TRAIN)
    assert code != 0
    assert "start has no weights generator_" in " ".join(said.split())


def test_weights_with_the_names_of_older_files_are_read(penstock, tmp_path):
    """Files from the first years of BERT call the weights of a norm gamma and beta."""
    model = folder_of("roberta", tmp_path / "start")
    file = tmp_path / "start" / "model.safetensors"
    older = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(older, file, metadata={"format": "pt"})
    code, said = penstock(f"{TRAIN} --set schedule.name=1f1b --set run.steps=1")
    assert code == 0, said
    rows = read_rows(tmp_path / "run")
    expected = losses_of(model, tmp_path / "run", [rows[0].rate])
    assert [rows[0].loss] == pytest.approx(expected, rel=5e-5)


def test_encoders_that_cannot_be_split_are_refused_before_training(tmp_path):
    transformers.AlbertConfig(**SIZES).save_pretrained(tmp_path)
    with pytest.raises(PenstockError, match="cannot split a AlbertForMaskedLM"):
        read_sizes(tmp_path)
