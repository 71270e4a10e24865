"""One thread at a time lets transformers build or load a model: meanwhile it changes torch for all threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import transformers

from penstock.models import decoder, padding_rows, split
from penstock.models.decoder import DecoderConfig, EncoderConfig, decoder_of
from penstock.models.hf import BUILDING


def another_thread_could_build() -> bool:
    taken = BUILDING.acquire(blocking=False)
    if taken:
        BUILDING.release()
    return taken


@pytest.fixture
def free(monkeypatch):
    """For each model that transformers begins to build, whether another thread could begin, too."""
    found: list[bool] = []
    own = transformers.PreTrainedModel.__init__
    with ThreadPoolExecutor(1) as other:

        def init(self, *args, **options):
            found.append(other.submit(another_thread_could_build).result())
            own(self, *args, **options)

        monkeypatch.setattr(transformers.PreTrainedModel, "__init__", init)
        yield found


@pytest.fixture
def sizes(request) -> DecoderConfig:
    # Results are cached by config, so every test has a config of its own.
    eps = 1e-9 * sum(map(ord, request.node.name))
    config = transformers.LlamaConfig(
        vocab_size=41,
        rms_norm_eps=eps,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    return decoder_of(config)


def load(sizes: DecoderConfig, folder: Path) -> None:
    decoder.build_decoder(sizes).save_pretrained(folder)
    decoder.load_whole(folder, decoder.read_decoder(folder))


@pytest.mark.parametrize(
    "build",
    [
        decoder.build_decoder,
        decoder.decoder_blueprint,
        decoder.initial_constants,
        decoder.count_decoder,
    ],
)
def test_one_thread_at_a_time_builds_a_model(build, sizes, free):
    build(sizes)
    assert free
    assert not any(free)
    assert another_thread_could_build()


def test_one_thread_at_a_time_tries_a_class_of_models(sizes, free):
    model = transformers.LlamaForCausalLM(decoder.transformers_config(sizes))
    free.clear()  # That was not Penstock.
    split(model, [1, 1])
    assert free
    assert not any(free)


def test_one_thread_at_a_time_loads_a_model(sizes, free, tmp_path):
    load(sizes, tmp_path)
    assert len(free) > 1
    assert not any(free)


def test_one_thread_at_a_time_builds_an_encoder(free):
    config = transformers.BertConfig(
        vocab_size=53,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
    )
    sizes = decoder_of(config)
    assert isinstance(sizes, EncoderConfig)
    padding_rows(sizes)
    assert free
    assert not any(free)
