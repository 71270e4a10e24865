"""Encoders of transformers in parts: through any schedule, they compute what transformers' own model computes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from hugging_face import bert_sizes, decoder_sizes
from penstock import Pipeline, Schedule, make
from penstock.errors import PenstockError, ShapeError
from penstock.models import document_starts, layer_count, split, token_loss
from penstock.models.hf_part import UNSLICEABLE
from penstock.models.slice import Carry
from penstock.runtime import batch_of, run_threads
from pipelines import gradients_of, piped

VOCAB, TOKENS, PAD = 61, 12, 1
SIZES = bert_sizes(VOCAB, width=16, inner=24, positions=TOKENS + 2, pad_token_id=PAD)
CONFIGS: dict[str, transformers.PreTrainedConfig] = {
    "roberta": transformers.RobertaConfig(**SIZES, type_vocab_size=1),
    "xlm-roberta": transformers.XLMRobertaConfig(**SIZES, type_vocab_size=1),
    "camembert": transformers.CamembertConfig(**SIZES, type_vocab_size=1),
    "electra": transformers.ElectraConfig(**SIZES, embedding_size=8),
    "bert": transformers.BertConfig(**SIZES, hidden_act="relu"),
    "distilbert": transformers.DistilBertConfig(
        **{"vocab_size": VOCAB, "dim": 16, "n_layers": 4, "n_heads": 4},
        **{"hidden_dim": 24, "max_position_embeddings": TOKENS, "pad_token_id": PAD},
    ),
    "modernbert": transformers.ModernBertConfig(
        **{**SIZES, "pad_token_id": 60}, local_attention=4
    ),
    "eurobert": transformers.EuroBertConfig(**decoder_sizes(VOCAB, pad_token_id=PAD)),
}
# These two compute their rotary angles and more in float32, whatever the model is in.
SLACK = {"modernbert": 1e-5, "eurobert": 1e-5}
SCHEDULES = {
    "1f1b": make("1f1b", ranks=2, microbatches=3),
    "hanayo": make("hanayo", ranks=2, microbatches=3),
}


def model_of(name: str, kernel: str = "sdpa") -> Any:
    torch.manual_seed(3)
    config = copy.deepcopy(CONFIGS[name])
    model = transformers.AutoModelForMaskedLM.from_config(
        config, attn_implementation=kernel
    )
    for parameter in model.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    return model.double().eval()


def rows_of(model: Any, rows: int) -> tuple[Tensor, Tensor]:
    """Words, among them that of padding, and labels for some of them."""
    draw = torch.Generator().manual_seed(5)
    words = torch.randint(0, VOCAB, (rows, TOKENS), generator=draw)
    words[0, 4] = model.config.pad_token_id
    guessed = torch.rand(words.shape, generator=draw) < 0.4
    return words, words.where(guessed, -100)


def takes_types(model: Any) -> bool:
    return getattr(model.config, "type_vocab_size", 0) > 1


@pytest.mark.numerics
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", CONFIGS)
def test_loss_logits_and_gradients_are_those_of_the_whole_model_with_its_mask(
    name, schedule
):
    """The padding mask goes to every part, and the types of segments to the first one."""
    model = model_of(name)
    words, labels = rows_of(model, 6)
    mask = torch.ones_like(words)
    for row, length in enumerate((12, 9, 7, 12, 5, 8)):
        mask[row, length:] = 0
        words[row, length:] = model.config.pad_token_id
        labels[row, length:] = -100
    named = {"attention_mask": mask}
    arguments = {"attention_mask": mask}
    if takes_types(model):
        types = (torch.arange(TOKENS) > 3).long().expand_as(words)
        named["types"] = arguments["token_type_ids"] = types
    ours = through(SCHEDULES[schedule], model, words, labels, named)
    logits = model(words, **arguments).logits
    loss = token_loss(logits, labels) / (labels != -100).sum()
    loss.backward()
    slack = SLACK.get(name, 1e-10)
    for found, outputs, gradients in ours:
        assert found == pytest.approx(float(loss.detach()), rel=slack)
        if outputs is not None:
            seen = mask == 1
            difference = (outputs - logits)[seen].abs().max()
            assert difference <= slack * logits.abs().max()
        compare(gradients, gradients_of(model), slack)
    together = {path for *_, gradients in ours for path in gradients}
    assert together == set(gradients_of(model))


def through(
    schedule: Schedule,
    model: nn.Module,
    words: Tensor,
    labels: Tensor,
    named: dict[str, Tensor],
) -> list[tuple[float, Tensor | None, dict[str, Tensor]]]:
    """The loss, the logits if they are there, and the gradients of each rank."""

    def work(comm):
        pipeline = Pipeline(copy.deepcopy(model), schedule, comm=comm)
        outputs = pipeline.predict(words, **named)
        loss = pipeline.step(words, labels, **named).loss
        gradients = {
            path: parameter.grad
            for path, parameter in pipeline.named_parameters()
            if parameter.grad is not None
        }
        return loss, outputs, gradients

    return run_threads(schedule.ranks, work, patience=300)


def compare(ours: dict[str, Tensor], theirs: dict[str, Tensor], slack: float) -> None:
    scale = max(float(gradient.abs().max()) for gradient in theirs.values())
    for path, gradient in ours.items():
        difference = float((gradient - theirs[path]).abs().max())
        assert difference <= slack * scale, path


@pytest.mark.numerics
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("name", CONFIGS)
def test_packed_documents_compute_what_each_computes_alone(name, kernel):
    """Positions begin anew in each document; a RoBERTa does not count words of padding, also not inside of one."""
    model = model_of(name, kernel)
    lengths = [[5, 4, 3], [7, 5]]
    starts = [document_starts(torch.tensor(one))[None] for one in lengths]
    words, labels = rows_of(model, 2)
    labels[1, 7:] = -100  # the last document is padding
    words[1, 7:] = model.config.pad_token_id
    batch = batch_of(words.split(1), labels.split(1), starts=starts)
    ours = piped(
        make("1f1b", ranks=2, microbatches=2), model, [batch], partition=(1, 3)
    )
    total = 0.0
    for x, y, cut in zip(words.split(1), labels.split(1), lengths, strict=True):
        for own, wanted in zip(x.split(cut, 1), y.split(cut, 1), strict=True):
            loss = token_loss(model(own).logits, wanted) / batch.valid
            loss.backward()
            total += float(loss.detach())
    slack = SLACK.get(name, 1e-10)
    assert ours.losses[0] == pytest.approx([total], rel=slack)
    found = {path.split(":")[2]: one for path, one in ours.gradients.items()}
    compare(found, gradients_of(model), slack)


@pytest.mark.parametrize(
    "config",
    [
        transformers.Data2VecTextConfig(**SIZES),
        transformers.ErnieConfig(**SIZES),
        transformers.MegatronBertConfig(**SIZES),
        transformers.RemBertConfig(**SIZES, input_embedding_size=8),
        transformers.RobertaPreLayerNormConfig(**SIZES),
        transformers.XLMRobertaXLConfig(**SIZES),
        transformers.BigBirdConfig(**SIZES, attention_type="original_full"),
    ],
    ids=lambda one: type(one).__name__,
)
def test_other_encoders_pass_their_trial(config):
    """It compares logits and gradients of two parts with those of the whole model."""
    model = transformers.AutoModelForMaskedLM.from_config(config)
    assert [part.unsliceable for part in split(model, (2, 2))] == [UNSLICEABLE] * 2


def test_tied_heads_live_in_the_first_and_last_part_and_nothing_else_in_two():
    parts = split(model_of("roberta"), (1, 2, 1))
    tied = "roberta.embeddings.word_embeddings.weight"
    assert parts[0].shared == {tied: (0, 2)}
    assert "lm_head.bias" in parts[2].whole_names()
    assert [part.asked_names for part in parts] == [
        ("types", "attention_mask"),
        ("attention_mask",),
        ("attention_mask",),
    ]


def test_a_part_of_all_layers_is_split_again():
    model = model_of("electra")
    whole = split(model, (4,))[0]
    words, _ = rows_of(model, 2)
    x = words
    for part in split(whole, (1, 2, 1)):
        x = part(x)
    assert torch.equal(x, whole(words))
    assert layer_count(whole) == 4


# ---------------------------------------------------------------- refused
def test_slices_of_an_encoder_are_refused_with_the_reason():
    model = model_of("roberta")
    words, labels = rows_of(model, 2)
    schedule = make("seq1f1b", ranks=2, microbatches=2, slices=2)
    with pytest.raises(ShapeError, match=r"see later tokens.*\n.*slices=1"):
        piped(
            schedule,
            model,
            [batch_of(words.split(1), labels.split(1))],
            partition=(2, 2),
        )
    part = split(model, (4,))[0]
    with pytest.raises(ShapeError, match="cannot run a slice: its tokens see later"):
        part(words[:, :6], Carry(TOKENS).open(0, 6))


def test_rows_that_are_longer_than_the_positions_are_refused_with_both_numbers():
    """Two positions of a RoBERTa are before the first word."""
    part = split(model_of("roberta"), (4,))[0]
    words = torch.full((1, TOKENS + 1), 7)
    with pytest.raises(ShapeError, match=r"13 tokens, but only 12 positions"):
        part(words)


def test_types_for_a_model_without_types_are_refused():
    model = model_of("distilbert")
    words, labels = rows_of(model, 3)
    named = {"types": torch.zeros_like(words)}
    with pytest.raises(PenstockError, match="named types, but no stage asks for it"):
        through(SCHEDULES["1f1b"], model, words, labels, named)


def test_documents_do_not_go_with_a_mask():
    model = model_of("roberta")
    words, _ = rows_of(model, 1)
    starts = document_starts(torch.tensor([5, 7]))[None]
    piece = Carry(TOKENS, starts).open(0, TOKENS)
    part = split(model, (4,))[0]
    with pytest.raises(PenstockError, match="padding is a document of its own"):
        part(words, piece, attention_mask=torch.ones_like(words))
    part(words, piece)  # and what was refused has left nothing behind


class Rotating(transformers.RobertaModel):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # DeBERTa
@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            transformers.BigBirdConfig(**SIZES),
            "set attention_type='original_full' in its config",
        ),
        (
            transformers.AlbertConfig(**SIZES, embedding_size=8),
            "there is no list of all its layers",
        ),
        (transformers.MPNetConfig(**SIZES), "does not run in parts"),
        (
            transformers.DebertaV2Config(**SIZES, relative_attention=True),
            "has weights that run between its layers",
        ),
        (
            transformers.ConvBertConfig(**SIZES, embedding_size=16),
            "do not give its logits for documents in one row",
        ),
        (
            transformers.NystromformerConfig(**SIZES),
            "do not give its logits for documents in one row",
        ),
        (transformers.FNetConfig(**SIZES), "for documents in one row"),
        (
            transformers.RobertaConfig(**SIZES, is_decoder=True),
            "only plain encoders that see both ways",
        ),
        (
            transformers.SqueezeBertConfig(**SIZES, embedding_size=16),
            "layers are not called as modules",
        ),
    ],
    ids=lambda one: type(one).__name__,
)
def test_encoders_that_parts_do_not_compute_are_refused_with_the_reason(config, words):
    model = transformers.AutoModelForMaskedLM.from_config(config)
    with pytest.raises(PenstockError, match=words):
        split(model, (2, 2))


def test_a_base_model_with_a_forward_of_its_own_is_refused():
    model = model_of("roberta")
    model.roberta.__class__ = Rotating
    with pytest.raises(PenstockError, match="Rotating overrides forward"):
        split(model, (2, 2))


def test_other_heads_than_that_of_masked_words_are_refused():
    config = copy.deepcopy(CONFIGS["roberta"])
    model = transformers.RobertaForTokenClassification(config)
    with pytest.raises(PenstockError, match="no list of all its layers beside"):
        split(model, (2, 2))
