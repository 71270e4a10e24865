"""A model that goes on with a text reads every word once, and says what it would say if it read all of it each time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.config import BYTE_TOKENIZER
from penstock.errors import ShapeError
from penstock.models import GPTConfig, LlamaConfig
from penstock.train.after.generate import (
    Trained,
    chosen_path,
    generate_text,
    parse_omission,
)
from penstock.train.data.tokenizer import (
    ByteTokenizer,
    keep_tokenizer,
    kept_tokenizer,
    train_tokenizer,
)
from penstock.train.weights import draw_parameters, hold_whole

pytestmark = pytest.mark.numerics  # run once more with other kernels by .ci/run

PROMPT = "once"
LLAMA = LlamaConfig(256, 32, 3, 4, 2, 48)
GPT = GPTConfig(256, 32, 3, 4, 48, positions=64)


def trained(sizes: LlamaConfig | GPTConfig) -> Trained:
    """Weights as drawn, but of a size at which words differ. In float64: with a cache other kernels run, and what they
    round must not decide between two words that are almost equally likely.
    """
    holding = hold_whole(sizes)
    draw_parameters(holding, 1)
    for parameter in holding.parameters.values():
        parameter.data = parameter.data.double() * (8 if parameter.dim() > 1 else 1)
    return Trained(holding.stages[0], sizes, holding, "bytes", Path("drawn"))


@torch.no_grad()
def reading_all_again(
    model: Trained, tokens: int, temperature: float, seed: int
) -> list[int]:
    """The oracle: no cache; the whole window goes through the model for every word."""
    row, first = list(PROMPT.encode()), 0
    longest = model.sizes.positions if isinstance(model.sizes, GPTConfig) else 10**9
    generator = torch.Generator().manual_seed(seed)
    for _ in range(tokens):
        if len(row) - first > longest:
            first = len(row) - longest // 2
        logits = model.model(torch.tensor([row[first:]]))[0, -1]
        drawn = torch.multinomial(
            (logits / (temperature or 1)).softmax(-1), 1, generator=generator
        )
        row.append(int(drawn if temperature else logits.argmax()))
        if row[-1] == 0:
            break
    return row


def counted(model: Trained, *args: float) -> tuple[list[int], list[int]]:
    """The words, and how many of them went through the model in each call."""
    calls: list[int] = []
    hook = model.model.register_forward_pre_hook(
        lambda _, inputs: calls.append(inputs[0].shape[1])
    )
    row: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "penstock.train.after.generate.tokenizer_of", lambda name: Words(row)
        )
        generate_text(model, PROMPT, *args)
    hook.remove()
    return row, calls


class Words(ByteTokenizer):
    """Keeps what it is to decode: most of it is no text."""

    def __init__(self, row: list[int]) -> None:
        self.row = row

    def decode(self, words):
        self.row[:] = words
        return ""


@pytest.mark.parametrize("sizes", [LLAMA, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize(("temperature", "seed"), [(0.0, 0), (0.8, 0), (1.3, 7)])
def test_the_cache_changes_no_word(sizes, temperature, seed):
    model = trained(sizes)
    row, _ = counted(model, 60, temperature, seed)
    assert row == reading_all_again(model, 60, temperature, seed)
    assert len(set(row)) > 5


@pytest.mark.parametrize("temperature", [-1.0, float("nan"), float("inf")])
def test_a_temperature_that_is_none_is_refused(temperature):
    with pytest.raises(ShapeError, match="is not a temperature"):
        generate_text(trained(LLAMA), "def ", 1, temperature)


def test_a_run_keeps_its_tokenizer_wherever_it_goes(tmp_path):
    named = tmp_path / "theirs.json"
    train_tokenizer(["a text"], 257, named)
    run = tmp_path / "run"
    run.mkdir()
    assert kept_tokenizer(str(named), run) == str(named)
    keep_tokenizer(str(named), run)
    assert kept_tokenizer(str(named), run) == str(named)
    named.write_text("[]")
    assert kept_tokenizer(str(named), run) == str(run / "tokenizer.json")
    named.unlink()
    assert kept_tokenizer(str(named), run) == str(run / "tokenizer.json")
    keep_tokenizer(BYTE_TOKENIZER, run)
    assert kept_tokenizer(BYTE_TOKENIZER, run) == BYTE_TOKENIZER


def test_every_word_goes_through_the_model_once():
    _, calls = counted(trained(LLAMA), 100, 0.9, 3)
    assert calls == [len(PROMPT)] + [1] * (len(calls) - 1)
    assert len(calls) > 50
    again = sum(len(PROMPT) + k for k in range(len(calls)))  # without a cache
    assert again / sum(calls) > 25


def test_a_text_longer_than_the_positions_goes_on_in_windows():
    model = trained(GPT)
    row, calls = counted(model, 150, 0.9, 3)
    assert row == reading_all_again(model, 150, 0.9, 3)
    windows = [call for call in calls if call > 1]
    assert windows == [len(PROMPT), 32, 32, 32]
    assert sum(calls) < 2 * len(row)


def test_words_that_the_tokenizer_does_not_have_are_never_drawn():
    model = trained(LlamaConfig(1024, 32, 3, 4, 2, 48))
    for temperature in (0.0, 1.3):
        assert generate_text(model, "def ", 40, temperature).startswith("def ")


def test_a_temperature_next_to_nothing_takes_the_likeliest_word():
    model = trained(LLAMA)
    for little in (1e-40, 1e-300):
        assert generate_text(model, "def ", 20, little) == generate_text(
            model, "def ", 20, 0.0
        )


def test_a_prompt_may_be_any_bytes_and_a_seed_may_not_be_any_number():
    assert generate_text(trained(LLAMA), "\udcff", 0) == "\ufffd"
    with pytest.raises(ShapeError, match="is not a seed"):
        generate_text(trained(LLAMA), "def ", 1, seed=10**30)


# ---------------------------------------------------------------- some of the layers
@pytest.mark.parametrize("sizes", [LLAMA, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize("path", [(0, 2), (0,)], ids=["omitted", "exit"])
def test_some_layers_say_what_a_model_of_only_these_layers_says(sizes, path):
    whole = trained(sizes)
    smaller = trained(replace(sizes, layers=len(path)))
    for name, parameter in smaller.holding.parameters.items():
        source = name
        if name.startswith("layers."):
            _, number, rest = name.split(".", 2)
            source = f"layers.{path[int(number)]}.{rest}"
        parameter.data.copy_(whole.holding.parameters[source].data)
    found = generate_text(whole, PROMPT, 80, 0.0, path=path)
    assert found == generate_text(smaller, PROMPT, 80, 0.0)
    assert found != generate_text(whole, PROMPT, 80, 0.0)
    everything = tuple(range(sizes.layers))
    assert generate_text(whole, PROMPT, 9, 0.0, path=everything) == generate_text(
        whole, PROMPT, 9, 0.0
    )


@pytest.mark.parametrize(
    ("omit", "message"),
    [
        ([0], "layer 0 cannot be left out: it always runs in training"),
        ([8], "layer 8 cannot be left out: the layers are 0 to 7"),
        ([-1], "layer -1 cannot be left out: the layers are 0 to 7"),
    ],
)
def test_layers_that_cannot_be_left_out_are_refused(omit, message):
    with pytest.raises(ShapeError, match=message):
        chosen_path(8, omit)


def test_an_omission_is_a_share_or_some_layers():
    texts = ("0.25", "0", "1.0", "1", "2,5", " 3 ")
    assert [parse_omission(text) for text in texts] == [0.25, 0, 1.0, [1], [2, 5], [3]]
    for text in ("2;5", "half"):
        with pytest.raises(ShapeError, match="does not name layers"):
            parse_omission(text)
