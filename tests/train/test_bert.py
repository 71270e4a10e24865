"""Bert in the trainer: words are masked reproducibly, documents stay apart, folders of Hugging Face go in and out."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file

from commands import write_text_run
from hugging_face import bert_sizes
from penstock import make
from penstock.config import DataConfig
from penstock.errors import FileError
from penstock.formats.config_toml import load_config
from penstock.models import (
    Bert,
    BertConfig,
    EncoderConfig,
    document_starts,
    token_loss,
)
from penstock.models.family import count_parameters, flops_per_token
from penstock.runtime import Batch, batch_of
from penstock.train.data.chat import BEGINS, SECOND
from penstock.train.data.corpus import cut_corpus, open_corpus
from penstock.train.data.loader import BatchShape, Loader
from penstock.train.data.masking import Masking, bert_words, masking_of
from penstock.train.data.tokenizer import ByteTokenizer, FileTokenizer, train_tokenizer
from penstock.train.hub import read_sizes, read_weights
from penstock.train.weights import draw_parameters, hold_whole
from pipelines import gradients_of, piped

MASK, END = 300, 7
MASKING = Masking(MASK, 256, 0.15, (END,))
TEXT = "".join(
    f"the {n % 7} cats sat on {n % 5} mats\n" + "\n" * (n % 9 == 0) for n in range(900)
)


def corpus_of(tokens: int = 40_001, length: int = 100):
    words = np.random.default_rng(0).integers(0, 256, tokens).astype(np.uint16)
    data = DataConfig(seq_len=length, validation=0.1)
    return replace(cut_corpus(words, data, "random"), masking=MASKING)


def same(one: list[Batch], other: list[Batch]) -> bool:
    pairs = [
        (getattr(a, key), getattr(b, key))
        for a, b in zip(one, other, strict=True)
        for key in ("inputs", "labels")
    ]
    return all(torch.equal(torch.cat(a), torch.cat(b)) for a, b in pairs)


# ---------------------------------------------------------------- masks
def test_fifteen_of_a_hundred_words_are_chosen_and_eight_of_ten_of_them_masked():
    corpus = corpus_of()
    loader = Loader(corpus, BatchShape(90, 4), seed=1)
    batch = loader.step()[0]  # one epoch
    seen, labels = torch.cat(batch.inputs), torch.cat(batch.labels)
    chosen = labels != -100
    assert batch.valid == int(chosen.sum()) == sum(batch.counts)
    share = float(chosen.float().mean())
    spared = 1 / 256  # of the words are ends, which are never chosen
    assert share == pytest.approx(0.15 * (1 - spared), abs=0.01)
    assert not (labels == END).any()
    masked = seen[chosen] == MASK
    stays = seen[chosen] == labels[chosen]
    assert float(masked.float().mean()) == pytest.approx(0.8, abs=0.03)
    assert float(stays.float().mean()) == pytest.approx(0.1, abs=0.03)
    assert int(seen[chosen][~masked].max()) < 256
    plain = Loader(replace(corpus, masking=None), BatchShape(90, 4), seed=1).step()[0]
    assert torch.equal(seen[~chosen], torch.cat(plain.inputs)[~chosen])
    assert torch.equal(labels[chosen], torch.cat(plain.inputs)[chosen])


def test_words_to_guess_follow_from_seed_sequence_and_epoch_alone():
    corpus = corpus_of(10_001)

    def steps(seed: int, deal: BatchShape, count: int = 2) -> list[Batch]:
        loader = Loader(corpus, deal, seed)
        return [batch for _ in range(count) for batch in loader.step()]

    first = steps(1, BatchShape(45, 2))
    assert same(first, steps(1, BatchShape(45, 2)))
    assert same(first, steps(1, BatchShape(90, 1)))
    assert not same(first, steps(2, BatchShape(45, 2)))
    resumed = Loader(corpus, BatchShape(15, 6), seed=1)
    resumed.resume({**resumed.state(), "seen": 90})
    assert same(resumed.step(), first[1:])
    labels = [torch.cat(batch.labels) for batch in first]
    assert not torch.equal(labels[0].sort(0).values, labels[1].sort(0).values)
    held = Loader(corpus, BatchShape(5, 4), seed=1).evaluation(9)
    assert same(held, Loader(corpus, BatchShape(5, 4), seed=1).evaluation(9))
    counted = sum(int((y != -100).sum()) for batch in held for y in batch.labels)
    assert {batch.valid for batch in held} == {counted}


def test_the_mask_is_the_tokenizers_word_or_a_new_one(tmp_path):
    words = bert_words(ByteTokenizer())
    assert (words.mask, words.vocab) == (256, 257)
    words = bert_words(ByteTokenizer(), segments=2)
    assert (words.mask, words.begin, words.border) == (256, 257, 258)
    assert (words.padding, words.vocab) == (0, 259)
    file = tmp_path / "tokenizer.json"
    train_tokenizer([TEXT], 280, file)
    plain = FileTokenizer(str(file))
    assert bert_words(plain).vocab == plain.vocab + 1
    plain.theirs.add_special_tokens(["[CLS]", "[MASK]"])
    plain.theirs.save(str(file))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"cls_token": "[CLS]", "eos_token": "<|endoftext|>"})
    )
    again = FileTokenizer(str(file))
    assert bert_words(again).vocab == again.vocab
    masking = masking_of(again, 0.15)
    names = [again.theirs.id_to_token(number) for number in masking.spared]
    assert sorted(names) == ["<|endoftext|>", "[CLS]"]
    assert again.theirs.id_to_token(masking.word) == "[MASK]"


# ---------------------------------------------------------------- documents
def test_packed_documents_and_padding_see_only_themselves_in_every_part():
    """A pipeline over packed rows computes what the whole model computes for each document alone."""
    torch.manual_seed(0)
    model = Bert(BertConfig(61, 16, 3, 4, 24, 12)).double()
    lengths = [[5, 4, 3], [7, 5]]
    starts = [document_starts(torch.tensor(one))[None] for one in lengths]
    inputs = [torch.randint(1, 61, (1, 12)) for _ in lengths]
    labels = [torch.where(torch.rand(1, 12) < 0.5, x, -100) for x in inputs]
    labels[1][0, 7:] = -100  # the last document is padding
    batch = batch_of(inputs, labels, starts=starts)
    ours = piped(make("1f1b", ranks=3, microbatches=2), model, [batch])
    whole = copy.deepcopy(model)
    total = 0.0
    for x, y, cut in zip(inputs, labels, lengths, strict=True):
        documents = zip(x.split(cut, 1), y.split(cut, 1), strict=True)
        for words, wanted in documents:
            loss = token_loss(whole(words), wanted) / batch.valid
            loss.backward()
            total += float(loss.detach())
    assert ours.losses[0] == pytest.approx([total], rel=1e-12)
    for name, gradient in ours.gradients.items():
        expected = gradients_of(whole)[name.split(":")[2]]
        assert (gradient - expected).abs().max() <= 1e-12, name


# ---------------------------------------------------------------- segments
WORDS = ["the", "cats", "sat", "on", "mats", "and", "so", "did", "dogs"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VOCAB = len(SPECIAL) + len(WORDS) + 1
STORIES = [
    " ".join(f"{WORDS[k % 9]} {WORDS[(k + n) % 9]} sat." for k in range(3 + n % 11))
    for n in range(60)
]


def word_pieces(folder: Path) -> transformers.PreTrainedTokenizerFast:
    """Write a tokenizer as BERT has it, and return what transformers makes of it."""
    numbers = {word: n for n, word in enumerate([*SPECIAL, *WORDS, "."])}
    theirs = tokenizers.Tokenizer(
        tokenizers.models.WordPiece(numbers, unk_token="[UNK]")
    )
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    theirs.post_processor = tokenizers.processors.BertProcessing(
        ("[SEP]", 3), ("[CLS]", 2)
    )
    theirs.add_special_tokens(SPECIAL)
    folder.mkdir()
    theirs.save(str(folder / "tokenizer.json"))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )


@pytest.mark.parametrize("segments", [1, 2])
def test_rows_of_segments_are_those_of_hugging_faces_tokenizer(segments, tmp_path):
    """Sentences fill a row, which transformers builds alike from the texts of its segments."""
    theirs = word_pieces(tmp_path / "words")
    lines = "\n".join(json.dumps({"text": story}) for story in STORIES)
    (tmp_path / "a.jsonl").write_text(lines)
    data = DataConfig(
        sources=(str(tmp_path / "a.jsonl"),),
        tokenizer=str(tmp_path / "words" / "tokenizer.json"),
        seq_len=24,
        validation=0.0,
        format=f"text:segments={segments}",
    )
    corpus = open_corpus(data, tmp_path)
    found = []
    borders = set()
    for number in range(corpus.trained):
        row = corpus.sequence(number)[:-1]
        kinds = (corpus.sequence_marks(number)[:-1] & SECOND) > 0
        texts = " ".join(theirs.convert_ids_to_tokens(row.tolist()))
        said = texts.split("[CLS] ")[1].split(" [SEP]")[:-1]
        assert len(said) == segments
        assert said[-1].endswith(".")
        assert said[0].endswith(".") or "." not in said[0] + said[1][:-1]
        expected = theirs(
            *said, padding="max_length", max_length=24, return_token_type_ids=True
        )
        assert row.tolist() == expected["input_ids"]
        assert kinds.tolist() == [bool(one) for one in expected["token_type_ids"]]
        padded = (corpus.sequence_marks(number)[:-1] & BEGINS).nonzero()[0].tolist()
        real = sum(expected["attention_mask"])
        assert padded == ([0, real] if real < 24 else [0])
        found += said
        borders.add(expected["token_type_ids"].index(1) if segments == 2 else 0)
    assert len(borders) > 1 or segments == 1, "the border is drawn"
    joined = " ".join(found).split()
    assert joined == " ".join(STORIES).replace(".", " .").split(), "nothing is lost"
    packed = open_corpus(replace(data, document_mask=True), tmp_path)
    assert packed.trained < corpus.trained
    assert packed.apart


# ---------------------------------------------------------------- the command line
@pytest.fixture
def penstock(run, tmp_path):
    """Run a command line in a folder with some text; return exit code and output."""
    write_text_run(tmp_path, TEXT)

    def run_line(line: str) -> tuple[int, str]:
        code, out, err = run(line)
        return code, out + err

    return run_line


def theirs(vocab_size: int = 257) -> transformers.BertForMaskedLM:
    torch.manual_seed(1)
    sizes = bert_sizes(vocab_size, initializer_range=0.2)
    config = transformers.BertConfig(**sizes)
    return transformers.BertForMaskedLM(config).eval()


def test_new_berts_begin_as_hugging_faces_do_and_are_counted_without_memory(tmp_path):
    config = load_config('preset = "bert-base"')
    assert (config.model.family, config.data.seq_len) == ("bert", 512)
    theirs().config.save_pretrained(tmp_path)
    sizes = read_sizes(tmp_path)
    assert sizes == BertConfig(257, 32, 4, 4, 48, 32)
    holding = hold_whole(sizes)
    draw_parameters(holding, 0)
    for name, parameter in holding.parameters.items():
        if name == "embed.tokens.weight":
            assert not parameter[0].any(), "the vector of padding"
            spread = float(parameter[1:].detach().std())
            assert spread == pytest.approx(0.02, rel=0.1)
    counted = sum(one.numel() for one in holding.parameters.values())
    assert count_parameters(sizes).total == counted
    matrices = 4 * (4 * 32**2 + 2 * 32 * 48) + 32**2 + 257 * 32
    assert flops_per_token(sizes, 16) == 6 * matrices + 12 * 4 * 32 * 16


def test_norms_with_the_names_of_the_first_berts_are_read(tmp_path):
    """Files from the first years of BERT call the weights of a norm gamma and beta."""
    theirs().save_pretrained(tmp_path)
    sizes = read_sizes(tmp_path)
    names = [name for name in hold_whole(sizes).parameters if "norm" in name]
    expected = dict(read_weights(tmp_path, names, sizes))
    file = tmp_path / "model.safetensors"
    older = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(older, file)
    found = dict(read_weights(tmp_path, names, sizes))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in names)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            "schedule.name=1f1b:slices=2",
            "slices=2 does not go with model.family = bert:",
        ),
        ("data.format=chat", "does not go with model.family = bert:"),
        (
            "data.format=text:segments=2 --set data.seq_len=4",
            "too short for 2 segments",
        ),
        (
            "model.family=gpt --set data.format=text:segments=2",
            "segments=2 is for an encoder, but model.family = gpt:",
        ),
        ("parallel.tp=2", "only our own Llama and GPT can be divided"),
    ],
)
def test_what_a_bert_cannot_do_is_refused(change, words, penstock):
    code, said = penstock(f"train config.toml --set model.family=bert --set {change}")
    assert code != 0
    assert words in " ".join(said.split())


def test_a_bert_that_ours_is_not_is_taken_from_transformers_or_refused(tmp_path: Path):
    said = theirs().config.to_dict()
    (tmp_path / "config.json").write_text(json.dumps(said | {"hidden_act": "relu"}))
    sizes = read_sizes(tmp_path)
    assert isinstance(sizes, EncoderConfig)
    assert (sizes.architecture, sizes.positions) == ("BertForMaskedLM", 32)
    (tmp_path / "config.json").write_text(json.dumps(said | {"is_decoder": True}))
    with pytest.raises(FileError, match=r"is_decoder = True, .*it has False"):
        read_sizes(tmp_path)
