"""A rank as several processes changes nothing: gradients, norms, losses and checkpoints are those of one process."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_loop import by_hand

from commands import called
from mesh_shares import shares_of
from mesh_workers import Case, gradients, peaks, sleeps, trains
from penstock.config import Config, ParallelConfig, ScheduleConfig, check_config
from penstock.errors import ConfigError, RunError, ShapeError
from penstock.formats import read_plan
from penstock.models import GPTConfig, LlamaConfig, token_loss
from penstock.models.tensor import check_shares, largest_share
from penstock.runtime import run_threads, spawn
from penstock.runtime.process.launch import worker_outcomes
from penstock.train.after.export import export_run
from penstock.train.after.generate import open_trained
from penstock.train.data.loader import BatchShape, Loader
from penstock.train.history import read_rows
from penstock.train.hub import read_sizes, read_weights
from penstock.train.setup import EVALUATED_BATCHES
from penstock.train.weights import (
    blueprint,
    copy_weights,
    hold_whole,
    place_of,
    sizes_of,
)
from trainings import SMALL, VOCAB, apart, corpus

TENSOR, SHARD, BOTH = (
    ParallelConfig(tp=2),
    ParallelConfig(dp_shard=2),
    ParallelConfig(dp_shard=2, tp=2),
)
CASES = [
    Case("zb-h1", mesh=TENSOR, family="gpt"),
    Case("hanayo", {"waves": 1}, TENSOR),
    Case("seq1f1b", {"slices": 2}, TENSOR, family="gpt", tied=True),
    Case("zb-h1", mesh=SHARD, family="gpt"),
    Case("hanayo", {"waves": 1}, SHARD, tied=True),
    Case("seq1f1b", {"slices": 2}, SHARD, passes=2),
    Case(mesh=SHARD, recompute=True),
    Case("gpipe", {"ranks": 1}, BOTH, family="gpt", tied=True, recompute=True),
    Case("gpipe", {"ranks": 1, "copies": 2}, SHARD, tied=True),
]
LARGE = [
    Case("hanayo", {"waves": 1, "copies": 2}, TENSOR, tied=True),
    Case("zb-h1", mesh=BOTH, family="gpt"),
]


# ---------------------------------------------------------------- one step
@pytest.mark.numerics
@pytest.mark.parametrize(
    ("processes", "cases"), [(4, CASES), (8, LARGE)], ids=["4 processes", "8 processes"]
)
def test_gradients_loss_and_norm_on_a_mesh_are_those_of_the_model_in_one_piece(
    processes, cases
):
    found = spawn(processes, gradients, cases)
    for number, case in enumerate(cases):
        for process in found:
            one = process[number]
            assert one["gradient"] < 1e-10, case
            assert one["loss"] < 1e-10, case
            assert one["norm"] < 1e-10, case
            assert (
                one["held"] < 1.5 * case.shape.get("copies", 1) * one["all"] / processes
            ), case  # norms are whole


def test_a_rank_that_sleeps_ends_the_pipelines_beside_it_too():
    found = worker_outcomes(4, sleeps, patience=5.0)
    assert {one.error for one in found} == {"StuckError"}
    assert len({one.text for one in found}) == 1
    assert "rank 0 waits at 0B0 for 1B0 from rank 1; rank 1 is at 1F0" in found[0].text
    assert re.search(r"in the pipeline of shard 0, tensor [01]$", found[0].text)


# ---------------------------------------------------------------- training
@pytest.mark.numerics
def test_a_run_on_one_mesh_goes_on_on_any_other_as_if_it_had_never_stopped(tmp_path):
    steps, model = 4, {"family": "gpt", "tied": True}
    config = replace(
        SMALL,
        model=replace(SMALL.model, family="gpt", tie_embeddings=True),
        run=replace(SMALL.run, steps=steps),
    )
    expected, norms, weights = by_hand(config, steps)
    assert (
        spawn(
            4,
            trains,
            str(tmp_path / "first"),
            Case("zb-h1", mesh=TENSOR, **model),
            steps,
            False,
            2,
        )
        == [2] * 4
    )
    for name, processes, case in (
        ("shards", 4, Case("hanayo", {"waves": 1}, SHARD, **model)),
        ("plain", 2, Case(shape={"microbatches": 4}, **model)),
    ):
        shutil.copytree(tmp_path / "first", tmp_path / name)
        assert (
            spawn(processes, trains, str(tmp_path / name), case, steps, True)
            == [steps] * processes
        )
        rows = read_rows(tmp_path / name)
        assert apart(rows, expected) < 1e-5
        assert (
            max(
                abs(row.norm - norm) / norm
                for row, norm in zip(rows, norms, strict=True)
            )
            < 1e-4
        )
        assert rows[-1].evaluation == pytest.approx(held_out(config, weights), abs=1e-4)
    exported = tmp_path / "exported"
    export_run(tmp_path / "shards", exported)
    again = hold_whole(read_sizes(exported))
    copy_weights(again, read_weights(exported, again.parameters, read_sizes(exported)))
    for name, parameter in again.parameters.items():
        assert torch.equal(
            parameter, open_trained(tmp_path / "shards").holding.parameters[name]
        )
        assert torch.allclose(parameter, weights[name], atol=1e-4)


def held_out(config: Config, weights: dict[str, torch.Tensor]) -> float:
    """The loss of the model in one piece on what is held out."""
    model = hold_whole(sizes_of(config.model, VOCAB, config.data.seq_len))
    copy_weights(model, weights.items())
    batches = Loader(
        corpus(config), BatchShape(config.data.global_batch, 1), 0
    ).evaluation(EVALUATED_BATCHES)
    with torch.no_grad():
        return sum(
            float(token_loss(model.stages[0](b.inputs[0]), b.labels[0]) / b.valid)
            for b in batches
        )


@pytest.mark.numerics
def test_shards_have_the_curve_of_one_process_and_each_sequence_is_seen_once(tmp_path):
    steps = 6
    spawn(4, trains, str(tmp_path), Case(mesh=SHARD), steps)
    rows = read_rows(tmp_path)
    config = replace(SMALL, run=replace(SMALL.run, steps=steps))
    assert apart(rows, by_hand(config, steps)[0]) < 1e-5
    text = corpus()
    plain = [
        row
        for b in Loader(text, BatchShape(2, 4), 0).step()
        for x in b.inputs
        for row in x.tolist()
    ]
    dealt = [
        row
        for shard in (0, 1)
        for b in Loader(text, BatchShape(2, 2, shards=2, shard=shard), 0).step()
        for x in b.inputs
        for row in x.tolist()
    ]
    assert sorted(plain) == sorted(dealt)


def test_labels_that_count_are_those_of_all_shards():
    text = replace(corpus(), end=7)
    whole_step = Loader(text, BatchShape(2, 4), 0).step()[0]
    shards = [
        Loader(text, BatchShape(2, 2, shards=2, shard=shard), 0) for shard in (0, 1)
    ]
    for found in (
        [one.step()[0] for one in shards],
        [one.evaluation(1)[0] for one in shards],
    ):
        assert len({batch.valid for batch in found}) == 1
        assert (
            sum(int((y >= 0).sum()) for batch in found for y in batch.labels)
            == found[0].valid
        )
    assert (
        whole_step.valid == Loader(text, BatchShape(2, 2, shards=2), 0).step()[0].valid
    )


def test_the_command_line_starts_a_process_for_every_place_of_the_mesh(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "text.txt").write_text("the cat sat on the mat and said so\n" * 500)
    monkeypatch.chdir(tmp_path)
    data = 'data.global_batch=4 data.seq_len=16 data.sources=["text.txt"]'
    shape = "model.layers=8 parallel.pp=2 schedule.microbatches=2 parallel.tp=2"
    more = "run.steps=2 run.save_every=0 run.checks=gradients,memory"

    def words(changes):
        return " ".join(f"--set {change}" for change in changes.split())

    planned = f"plan --gpu h100 --devices 4 --limit stages=1,slices=1 -o plan.json {words(f'{data} {shape}')}"
    code, out, err = called(monkeypatch, capsys, planned)
    assert code == 0, err
    plan = read_plan(tmp_path / "plan.json")
    assert (plan.schedule.ranks, plan.tensor, plan.shard) == (2, 2, 1)
    trained = f"train {words(f'{data} {more} schedule.name=plan.json')}"
    code, out, err = called(monkeypatch, capsys, trained)
    assert code == 0, err
    assert "2 ranks x shard 1 x tensor 2 = 4 processes" in err
    assert "trained 2 steps" in out
    assert len(list((tmp_path / "runs/tiny/ranks").iterdir())) == 4
    assert (
        len(
            list(
                (tmp_path / "runs/tiny/checkpoints/step-00000002").glob("*.safetensors")
            )
        )
        == 4
    )
    dry = f"train --dry-run {words(f'{data} {more} {shape} schedule.name=1f1b')}"
    code, out, err = called(monkeypatch, capsys, dry)
    assert code == 0, err
    assert "process of rank" in out
    assert "without the sums inside a rank" not in out
    assert not list((tmp_path / "runs").glob("tiny-*"))


# ---------------------------------------------------------------- before anything starts
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            "parallel.tp=3",
            "parallel.tp = 3 does not divide the model's heads = 4; 2 does",
        ),
        (
            "parallel.tp=4 model.kv_heads=2",
            "parallel.tp = 4 does not divide the model's kv_heads = 2; 2 does",
        ),
        (
            "parallel.dp_shard=3",
            "data.global_batch = 16 is not divisible by 3",
        ),
        (
            "parallel.tps=2",
            "[parallel] has no key 'tps'\n  did you mean 'tp'?",
        ),
        ("parallel.dp_shard=0", "parallel.dp_shard = 0 must be at least 1"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused_before_anything_starts(
    changes, words, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    line = " ".join(
        ["train --dry-run", *(f"--set {change}" for change in changes.split())]
    )
    code, _, err = called(monkeypatch, capsys, line)
    assert code == 2
    assert words in err
    assert not list(tmp_path.iterdir())


def test_a_mesh_needs_its_number_of_processes_and_processes_at_all():
    cpu = torch.device("cpu")
    with pytest.raises(
        ConfigError,
        match="3 ranks x shard 1 x tensor 2 = 6 processes, but 2 were launched",
    ):
        run_threads(2, lambda comm: place_of(comm, TENSOR, 3, cpu))
    with pytest.raises(RunError, match="need a process for each share"):
        run_threads(2, lambda comm: place_of(comm, TENSOR, 1, cpu))


def test_words_are_cut_so_that_nobody_is_without():
    with pytest.raises(
        ShapeError, match="with 9 words, some process would hold no word"
    ):
        check_shares(GPTConfig(9, 16, 1, 8, 16, 8), 8)
    check_shares(GPTConfig(9, 16, 1, 8, 16, 8), 2)


def test_sequences_of_a_step_are_dealt_to_the_shards_as_well():
    assert (
        check_config(
            Config(schedule=ScheduleConfig(microbatches=4), parallel=SHARD)
        ).rows
        == 2
    )


def test_the_memory_forecast_counts_what_a_process_holds():
    sizes = {
        "llama": LlamaConfig(31, 16, 2, 4, 2, 24),
        "gpt": GPTConfig(31, 16, 2, 4, 24, 6, tied=False),
    }
    found = spawn(
        2,
        gradients,
        [Case("gpipe", {"ranks": 1}, TENSOR, family=family) for family in sizes],
    )
    for number, one in enumerate(sizes.values()):
        model, paths = blueprint(one), ("embed", "layers.0", "layers.1", "head")
        counted = sum(
            largest_share(model.get_submodule(path), path, 2) for path in paths
        )
        assert max(process[number]["held"] for process in found) == counted


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(),
    reason="asks Linux for the peak of a process",
)
def test_a_process_takes_the_memory_that_was_forecast():
    sizes, numbers = LlamaConfig(VOCAB, 512, 8, 8, 8, 1408), []
    model = blueprint(sizes)
    for path, count in (("embed", 1), ("layers.0", sizes.layers), ("head", 1)):
        numbers.append(
            count * sum(p.numel() for p in model.get_submodule(path).parameters())
        )
    found = spawn(4, peaks, [BOTH], sizes)
    expected = sum(
        16 * n * share.memory
        for n, share in zip(numbers, shares_of(sizes, BOTH), strict=True)
    )
    for (peak,) in found:
        assert peak == pytest.approx(expected, rel=0.15)
