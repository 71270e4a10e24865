"""Whether a run fits into memory is known from its sizes, before anything is built or started."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from commands import called
from penstock import Plan, make
from penstock.config import (
    Config,
    DataConfig,
    ElasticConfig,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    ScheduleConfig,
)
from penstock.formats.config_toml import apply_changes
from penstock.measure.profile import Setup, measure
from penstock.models import GPTConfig, LlamaConfig
from penstock.models.family import count_parameters
from penstock.runtime.process.machine import available_memory
from penstock.schedules.transforms import replicate
from penstock.train.before.capacity import (
    MemoryPool,
    load_of,
    memory_pools,
    needs_of,
    too_large,
    why_too_large,
)
from penstock.train.before.profile import ProfileRequest, subjects_of
from penstock.train.job import Verdict
from penstock.train.placement import decide_placement
from penstock.train.weights import blueprint, sizes_of

LLAMA, GPT = LlamaConfig(37, 16, 3, 4, 2, 24), GPTConfig(37, 16, 3, 4, 24, positions=32)
SIZES = [
    LLAMA,
    replace(LLAMA, tied=True),
    GPT,
    replace(GPT, tied=False),
    replace(LLAMA, layers=1, kv_heads=4),
]
CONFIG = Config(
    ModelConfig(
        layers=8, hidden_size=256, heads=4, intermediate_size=512, vocab_size=1000
    ),
    DataConfig(seq_len=64, global_batch=16),
    ScheduleConfig("1f1b", microbatches=8),
)


def load(config: Config = CONFIG, name: str = "1f1b"):
    plan = Plan(make(name, ranks=4, microbatches=8), name, (2, 2, 2, 2))
    return load_of(config, plan, sizes_of(config.model, 256, config.data.seq_len))


# ---------------------------------------------------------------- what a run needs
@pytest.mark.parametrize("sizes", SIZES)
def test_parameters_are_counted_as_the_model_has_them(sizes):
    model, found = blueprint(sizes), count_parameters(sizes)
    assert found.total == sum(one.numel() for one in model.parameters())
    for path, count in (
        ("embed", found.embed),
        ("layers.0", found.layer),
        ("head", found.head),
    ):
        assert count == sum(
            one.numel() for one in model.get_submodule(path).parameters()
        )


@pytest.mark.parametrize(
    "sizes",
    [LlamaConfig(512, 64, 1, 4, 2, 128), GPTConfig(512, 64, 1, 4, 256, positions=64)],
)
def test_bytes_by_sizes_are_those_that_are_measured(sizes):
    found = measure(
        subjects_of(
            ProfileRequest(sizes, 64, 2, where=((64, 0),), rounds=1, mean=True, depth=1)
        ),
        Setup(rounds=1, where=((64, 0),)),
    )
    config = replace(CONFIG, data=replace(CONFIG.data, seq_len=64, global_batch=2))
    alone = Plan(make("1f1b", ranks=1, microbatches=1), "1f1b", (1,))
    config = replace(
        config,
        schedule=ScheduleConfig("1f1b", microbatches=1),
        parallel=ParallelConfig(pp=1),
    )
    need = needs_of(load_of(config, alone, sizes))[0]
    measured = found.cost((1,), tokens=64)
    assert need.weights == pytest.approx(measured.parts[0].weights, rel=0.02)
    assert need.activations == pytest.approx(64 * measured.parts[0].held, rel=0.15)


def test_1f1b_holds_less_on_later_ranks_and_gpipe_the_same_on_all_but_the_ends():
    steps, all_at_once = (
        [need.activations for need in needs_of(load(name=name))]
        for name in ("1f1b", "gpipe")
    )
    assert steps[0] == pytest.approx(2 * steps[2])
    assert all_at_once[1] == all_at_once[2] == pytest.approx(8 / 3 * steps[1])


def test_shards_recomputation_and_half_precision_need_less():
    plain = needs_of(load())
    shards = needs_of(load(replace(CONFIG, parallel=ParallelConfig(dp_shard=4))))
    again, half = (
        needs_of(load(replace(CONFIG, run=run)))
        for run in (RunConfig(recompute="full"), RunConfig(precision="bfloat16"))
    )
    assert shards[1].weights < plain[1].weights
    for less in (again, half):
        assert less[0].activations < plain[0].activations
    assert again[0].weights == plain[0].weights
    # Two bytes for each number of a matrix, beside sixteen.
    assert 1.05 < half[0].weights / plain[0].weights < 18 / 16


# ---------------------------------------------------------------- what a machine has
def test_int8_keeps_what_rounding_takes_from_the_gradients_that_a_rank_sends():
    as_int8 = replace(CONFIG, run=replace(CONFIG.run, comm_dtype="int8"))
    as_half = replace(CONFIG, run=replace(CONFIG.run, comm_dtype="bfloat16"))
    int8, half = (needs_of(load(config)) for config in (as_int8, as_half))
    message = 2 * 256 * 64 * 4  # rows, width, tokens, bytes
    first, *_, last = (a.total - b.total for a, b in zip(int8, half, strict=True))
    assert first < 0  # It sends no gradients, and its messages are smaller.
    assert last - first == pytest.approx(8 * message)


def test_a_container_may_have_less_than_its_machine(tmp_path, monkeypatch):
    everything = available_memory()
    assert everything > 0
    (tmp_path / "memory.max").write_text("5000000\n")
    (tmp_path / "memory.current").write_text("2000000\n")
    monkeypatch.setattr("penstock.runtime.process.machine.CGROUP", tmp_path)
    assert available_memory() == 3e6
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory() > 3e6


def test_ranks_are_counted_where_they_are(monkeypatch):
    config = replace(
        CONFIG, parallel=ParallelConfig(dp_shard=2), run=RunConfig(device="cpu")
    )
    assert memory_pools(decide_placement(config, 4), 2)[0].ranks == (0, 0, 1, 1)
    for name, value in {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
    }.items():
        monkeypatch.setenv(name, value)
    assert memory_pools(decide_placement(config, 4), 2)[0].ranks == (1, 1)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert memory_pools(decide_placement(config, 4), 2)[0].ranks == (1,)


def test_ranks_on_gpus_are_counted_by_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda gpu: type("P", (), {"total_memory": 100 + gpu}),
    )
    assert memory_pools(decide_placement(CONFIG, 3)) == [
        MemoryPool("GPU 0", 100, (0, 2)),
        MemoryPool("GPU 1", 101, (1,)),
    ]


def test_a_machine_that_others_join_needs_room_to_begin_alone(monkeypatch):
    """Two of eight workers begin here, each with half of the model and two mirrors."""
    schedule = replicate(make("1f1b", ranks=4, microbatches=8), 2)
    plan = Plan(schedule, "1f1b", (2, 2, 2, 2))
    sizes = sizes_of(CONFIG.model, 256, CONFIG.data.seq_len)
    config = replace(
        CONFIG,
        run=RunConfig(device="cpu"),
        elastic=ElasticConfig(listen="here:1", workers=2),
    )
    placement = decide_placement(config, 8)
    assert list(placement.local) == [0, 1]
    alone = replace(config, elastic=ElasticConfig(mode="on"))
    begins = Plan(make("1f1b", ranks=2, microbatches=16), "1f1b", (4, 4))
    monkeypatch.setattr("penstock.train.before.capacity.available_memory", lambda: 1.0)
    refusals = [
        why_too_large(config, plan, sizes, placement),
        why_too_large(alone, begins, sizes, decide_placement(alone, 2)),
    ]
    first, second = (re.findall(r"rank (\d): (.* state)", one) for one in refusals)
    assert first == second
    assert [rank for rank, _ in first] == ["0", "1"]


# ---------------------------------------------------------------- the two together
@pytest.mark.parametrize("room", [2e6, 2e7, 1e8])
def test_what_is_said_to_fit_does(room):
    places = [MemoryPool("this machine", room, (0, 1, 2, 3))]
    words = too_large(load(), places)
    changes = re.findall(r"[a-z]+\.[a-z]+=\w+", words)
    assert changes or "no single size" in words
    for change in changes:
        config = apply_changes(CONFIG, [change])
        config = replace(
            config,
            data=replace(config.data, global_batch=max(8, config.data.global_batch)),
        )
        plan = Plan(
            make("1f1b", ranks=4, microbatches=8),
            "1f1b",
            (config.model.layers // 4,) * 4,
        )
        other = load_of(config, plan, sizes_of(config.model, 256, config.data.seq_len))
        assert too_large(other, places) == "", change
    assert too_large(load(), [MemoryPool("this machine", 1e12, (0, 1, 2, 3))]) == ""


@pytest.fixture
def here(monkeypatch, capsys, tmp_path):
    """Runs a command line on a machine with 20 GB, where nothing may be built."""

    def built(*_: object) -> None:
        raise AssertionError("a model was built")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("penstock.train.before.capacity.available_memory", lambda: 20e9)
    monkeypatch.setattr("penstock.train.weights.blueprint", built)
    return lambda line: called(monkeypatch, capsys, line)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            "model.hidden_size=100000000",
            "but this machine has 18.6 GiB available\n  rank 0: 1,164,1",
        ),
        (
            "model.layers=10000 --set model.hidden_size=4096",
            "any one of these would fit: model.layers=",
        ),
        ("model.layers=1000000", "model.layers = 1000000 must be at most 10000"),
        (
            "model.vocab_size=1000000000000",
            "any one of these would fit: model.vocab_size=",
        ),
        ("data.seq_len=1000000000", "any one of these would fit: data.seq_len="),
        (
            "data.global_batch=1600000000",
            "any one of these would fit: data.global_batch=",
        ),
        (
            "model.hidden_size=100000000 --dry-run",
            "timing one layer, the embedding and the head takes",
        ),
    ],
)
def test_a_run_that_cannot_fit_is_refused_with_figures_before_anything_starts(
    here, tmp_path, change, words
):
    code, _, err = here(
        f"train --set run.device=cpu --set schedule.name=1f1b --set {change}"
    )
    assert code == 2
    assert words in err
    assert "alloc" not in err
    assert not (tmp_path / "runs").exists()


def test_those_who_know_better_are_not_refused(here, tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("the cats sat on the mats\n" * 200)
    monkeypatch.setattr("penstock.train.before.capacity.available_memory", lambda: 1e6)
    monkeypatch.setattr("penstock.training.launch", lambda *_: Verdict(0, stopped=True))
    line = (
        "train --set run.device=cpu --set schedule.name=1f1b --set data.sources=text.txt "
        "--set run.checks=gradients,memory"
    )
    code, _, err = here(line)
    assert code == 2
    assert "but this machine has 977 KiB available" in err
    code, out, err = here(f"{line} --set run.checks=forecast,gradients")
    assert code == 0, err
    assert "stopped before the first step" in out


def test_a_dry_run_shows_the_memory_that_is_missing_and_is_refused_like_the_run(
    here, tmp_path, monkeypatch
):
    (tmp_path / "text.txt").write_text("the cats sat on the mats\n" * 200)
    # Enough to time a layer, but not to hold eight.
    monkeypatch.setattr("penstock.train.before.capacity.available_memory", lambda: 3e6)
    line = "train --set run.device=cpu --set schedule.name=gpipe --set parallel.pp=1 --set data.sources=text.txt"
    code, out, err = here(f"{line} --dry-run")
    assert code == 2
    assert "predicted: " in out
    assert "but this machine has 2.86 MiB available" in err
    assert here(line)[0] == 2
