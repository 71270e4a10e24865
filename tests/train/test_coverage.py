"""A plan may leave out parts of the model: their weights stay in every checkpoint, and an evaluation runs them all."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_checkpoint import stop_after, tensors_in

from mesh_workers import trains_along
from penstock import MicroBatch, Plan, Schedule, Stage, make
from penstock.config import ParallelConfig, ScheduleConfig
from penstock.errors import ShapeError
from penstock.formats import dump_plan
from penstock.ir import Op, parse_action
from penstock.runtime import spawn
from penstock.schedules.coverage import (
    hold_every_part,
    through_all_parts,
    visited_parts,
)
from penstock.schedules.transforms import replicate, slice_tokens, split_backward
from penstock.train.after.evaluate import perplexity
from penstock.train.after.export import export_run
from penstock.train.after.generate import generate_text, open_trained
from penstock.train.data.loader import BatchShape, Loader
from penstock.train.history import read_rows
from penstock.train.job import Job
from penstock.train.setup import EVALUATED_BATCHES
from penstock.train.weights import draw_parameters, hold_whole
from trainings import SMALL, job_of, losses, outcomes, train


def plan_of(
    stages: list[tuple[int, int]], paths: list[tuple[int, ...]], ranks: int = 2
) -> Schedule:
    """One micro-batch after the other, each along its own path."""
    lanes: list[list] = [[] for _ in range(ranks)]
    for number, path in enumerate(paths):
        for stage in path:
            lanes[stages[stage][0]].append(parse_action(f"{stage}F{number}"))
        for stage in reversed(path):
            lanes[stages[stage][0]].append(parse_action(f"{stage}B{number}"))
    return Schedule(
        tuple(Stage(*one) for one in stages),
        tuple(map(MicroBatch, paths)),
        tuple(map(tuple, lanes)),
    )


FOUR = {
    "a part has no stage": plan_of([(0, 0), (1, 1), (1, 3)], [(0, 1, 2)] * 4),
    "a part has a stage that no path visits": plan_of(
        [(0, 0), (1, 1), (0, 2), (1, 3)], [(0, 1, 3)] * 4
    ),
    "a rank trains nothing": plan_of([(0, 0), (1, 1), (0, 2), (0, 3)], [(0, 2, 3)] * 4),
    "two replicas of a part that no path visits": plan_of(
        [(0, 0), (1, 1), (0, 2), (1, 2), (1, 3)], [(0, 1, 4)] * 4
    ),
    "paths leave out parts in turn, and swap them": plan_of(
        [(0, 0), (1, 1), (0, 2), (1, 3)],
        [(0, 1, 3), (0, 2, 3), (0, 2, 1, 3), (0, 1, 2, 3)],
    ),
}


def job(folder: Path, schedule: Schedule, *changes: str, resume: bool = False) -> Job:
    made = job_of(
        folder, "1f1b", "run.save_every=2", "run.eval_every=2", *changes, resume=resume
    )
    count = len(schedule.microbatches)
    config = replace(
        made.config,
        schedule=ScheduleConfig(name="own", microbatches=count),
        parallel=ParallelConfig(pp=schedule.ranks),
    )
    return replace(made, config=config, plan=Plan(schedule, "own"))


def whole_loss(run: Job) -> float:
    """The loss on held-out text of the model that a run has saved, in one piece, as `eval` measures it."""
    loader = Loader(
        run.corpus,
        BatchShape(run.config.rows, run.config.passages),
        run.config.run.seed,
    )
    return math.log(
        perplexity(
            open_trained(run.folder).model,
            loader.evaluation(EVALUATED_BATCHES),
        )
    )


# ---------------------------------------------------------------- evaluation
@pytest.mark.parametrize("name", FOUR)
def test_the_held_out_loss_is_that_of_the_whole_model(name, tmp_path):
    run = job(tmp_path, FOUR[name], "run.steps=4")
    rows = train(run)
    assert rows[-1].evaluation == pytest.approx(whole_loss(run), abs=1e-5)


@pytest.mark.parametrize(
    "schedule",
    [
        make("skip", ranks=4, microbatches=4),
        replicate(make("skip", ranks=3, microbatches=2), 2),
        slice_tokens(make("skip", ranks=3, microbatches=4), (0, 3, 8)),
        split_backward(make("skip", ranks=3, microbatches=4)),
    ],
    ids=["skip", "copies", "slices", "split"],
)
@pytest.mark.parametrize("separate", [False, True])
def test_partial_paths_are_evaluated_as_the_whole_model(schedule, separate, tmp_path):
    run = job(tmp_path, schedule, "run.steps=3", "model.layers=5", f"data.document_mask={str(separate).lower()}",
              "data.validation=0.01")  # fmt: skip  # five sequences: the batch of eight is not full
    assert run.corpus.held_out == 5
    rows = train(run)
    assert rows[-1].evaluation == pytest.approx(whole_loss(run), abs=1e-5)


def test_partial_paths_on_a_mesh_are_evaluated_and_saved_as_the_whole_model(tmp_path):
    # No stage for part 2, and a path without part 1.
    plan = plan_of([(0, 0), (1, 1), (0, 3)], [(0, 1, 2), (0, 2)])
    meshes = {"shard": ParallelConfig(dp_shard=2), "tensor": ParallelConfig(tp=2)}
    spawn(4, trains_along, str(tmp_path), dump_plan(Plan(plan)), meshes, 3)
    runs = {name: job(tmp_path / name, plan) for name in meshes}
    for name, run in runs.items():
        assert read_rows(tmp_path / name)[-1].evaluation == pytest.approx(
            whole_loss(run), abs=1e-5
        )
    saved = [
        tensors_in(tmp_path / name / "checkpoints" / "step-00000003") for name in meshes
    ]
    assert set(saved[0]) == set(saved[1])


def test_copies_keep_their_micro_batches_in_an_evaluation():
    full = through_all_parts(replicate(make("skip", ranks=3, microbatches=2), 2))
    ranks = [
        {full.stages[stage].rank for stage in microbatch.path}
        for microbatch in full.microbatches
    ]
    assert ranks == [{0, 1, 2}, {0, 1, 2}, {3, 4, 5}, {3, 4, 5}]
    assert through_all_parts(make("hanayo", ranks=2, microbatches=4)) is not full
    plain = make("hanayo", ranks=2, microbatches=4)
    assert through_all_parts(plain) is plain


def test_an_evaluation_runs_all_forwards_of_a_tick_side_by_side():
    full = through_all_parts(make("skip", ranks=4, microbatches=3))
    forwards = [[str(a) for a in lane if a.op is Op.F] for lane in full.lanes]
    assert forwards[1] == ["1F0", "1F1", "1F2"]
    assert forwards[0] == ["0F0", "0F1", "0F2", "4F0", "4F1", "4F2"]


# ---------------------------------------------------------------- weights that no path visits
@pytest.mark.parametrize("name", FOUR)
def test_a_plan_that_leaves_out_a_part_saves_it_resumes_and_exports(name, tmp_path):
    undisturbed = train(job(tmp_path / "whole", FOUR[name], "run.steps=6"))
    outcomes(job(tmp_path / "two", FOUR[name], "run.steps=6"), stop_after(3))
    rows = train(job(tmp_path / "two", FOUR[name], "run.steps=6", resume=True))
    assert losses(rows) == losses(undisturbed)
    one, other = (
        tensors_in(tmp_path / run / "checkpoints" / "step-00000006")
        for run in ("whole", "two")
    )
    model = hold_whole(job(tmp_path, FOUR[name]).sizes)
    draw_parameters(model, SMALL.run.seed)
    assert set(model.parameters) < set(one) == set(other)
    assert all(torch.equal(one[key], other[key]) for key in one)
    untouched = {
        key
        for key, parameter in model.parameters.items()
        if torch.equal(one[key], parameter)
    }
    left_out = set(range(4)) - visited_parts(FOUR[name])
    # No decay either.
    assert {key.split(".")[1] for key in untouched} == set(map(str, left_out))
    trained = export_run(tmp_path / "two", tmp_path / "hub")
    assert open_trained(tmp_path / "hub").sizes == trained.sizes
    assert generate_text(trained, "\x05", 3).startswith("\x05")


def test_optimizer_state_of_a_part_that_is_left_out_later_is_kept(tmp_path):
    train(job_of(tmp_path, "1f1b", "run.steps=4"))
    before = tensors_in(tmp_path / "checkpoints" / "step-00000004")
    train(job(tmp_path, FOUR["a part has no stage"], "run.steps=6", resume=True))
    after = tensors_in(tmp_path / "checkpoints" / "step-00000006")
    assert set(before) == set(after)
    kept = [key for key in before if ".2." in key]
    assert any(
        before[key].any() for key in kept if key.startswith("optimizer.exp_avg.")
    )
    assert all(torch.equal(before[key], after[key]) for key in kept)


def test_memory_of_a_part_without_a_stage_is_given_to_the_emptiest_rank():
    held = hold_every_part(plan_of([(0, 0), (0, 2), (1, 5)], [(0, 1, 2)]))
    assert [(stage.rank, stage.part) for stage in held.stages[3:]] == [
        (1, 1),
        (0, 3),
        (1, 4),
    ]
    assert hold_every_part(held) is held


@pytest.mark.parametrize("path", [(1, 2, 3), (0, 1, 2)])
def test_a_path_without_embedding_or_head_is_refused(path, tmp_path):
    with pytest.raises(
        ShapeError,
        match=f"goes from part {path[0]} to part {path[-1]}; it must begin with part 0",
    ):
        job(tmp_path, plan_of([(0, 0), (1, 1), (0, 2), (1, 3)], [path]))
