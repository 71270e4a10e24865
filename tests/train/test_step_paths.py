"""Steps take different paths: several sets in turn, all parts now and then, and a run that resumes takes the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_checkpoint import stop_after, tensors_in

from penstock import Plan, UnitCost, make
from penstock.config import ParallelConfig, ScheduleConfig, check_config
from penstock.errors import ConfigError, ScheduleError, ShapeError
from penstock.formats import dump_plan, load_plan
from penstock.formats.config_toml import apply_changes, dump_config, load_config
from penstock.ir import lower, verify
from penstock.models import split, token_loss
from penstock.plan.planner import plan_run
from penstock.schedules.coverage import (
    drop_empty_ranks,
    full_schedule,
    through_all_parts,
    visits_all_parts,
)
from penstock.schedules.list_scheduling import sequential_schedule
from penstock.schedules.skip import skipping_schedules
from penstock.schedules.transforms import slice_tokens, split_backward
from penstock.sim.simulate import simulate
from penstock.train.data.loader import BatchShape, Loader
from penstock.train.job import Job
from penstock.train.optimizer import Optimizer, factor_at
from penstock.train.step_paths import StepPaths, mean_layers, step_paths
from penstock.train.weights import draw_parameters, hold_whole, sizes_of
from trainings import SMALL, VOCAB, corpus, losses, outcomes, train

SKIP = replace(
    SMALL,
    schedule=ScheduleConfig(name="skip", microbatches=4),
    parallel=ParallelConfig(pp=4),
    run=replace(SMALL.run, steps=9),
)
ROTATING = ("schedule.name=skip:rotate=3,full=4,warmup=1",)


def run_of(folder: Path, *changes: str, resume: bool = False) -> Job:
    """A run as `penstock train` prepares it, with a skip schedule on four ranks."""
    config = check_config(apply_changes(SKIP, changes))
    sizes = sizes_of(config.model, VOCAB, config.data.seq_len)
    config, plan = plan_run(config, sizes.layers)
    return Job(config, plan, sizes, corpus(config), folder, resume)


# ---------------------------------------------------------------- which step takes which paths
def test_steps_take_the_paths_of_the_picture():
    a, b, c = skipping_schedules(ranks=4, microbatches=3, count=3)
    paths = StepPaths((a, b, c), full_schedule(a), warmup=2, period=5)
    words = ["abc*"[paths.at(step)] for step in range(11)]
    assert "".join(words) == "**ab*cabc*a"
    assert [paths.is_full(step) for step in range(11)] == [w == "*" for w in words]


@given(st.integers(0, 7), st.integers(0, 6), st.integers(1, 4))
def test_partial_steps_go_on_in_turn_between_the_full_ones(warmup, period, sets):
    schedules = tuple(skipping_schedules(ranks=3, microbatches=2, count=sets))
    paths = StepPaths(schedules, full_schedule(schedules[0]), warmup, period)
    taken = [paths.at(step) for step in range(40)]
    assert taken[:warmup] == [sets] * warmup
    partial = [number for number in taken if number < sets]
    assert partial == [step % sets for step in range(len(partial))]
    if period:
        assert set(taken[period - 1 :: period]) == {sets}
    for step in range(40):
        same = [s for s in range(step) if paths.is_full(s) is paths.is_full(step)]
        assert paths.previous(step) == (same[-1] if same else -1)


# ---------------------------------------------------------------- full steps
@pytest.mark.parametrize(
    "schedule",
    [
        make("skip", ranks=4, microbatches=6),
        slice_tokens(make("skip", ranks=3, microbatches=4), (0, 3, 8)),
        split_backward(make("skip", ranks=4, microbatches=4)),
    ],
    ids=["skip", "slices", "split"],
)
def test_full_steps_visit_all_parts_and_hold_no_more(schedule):
    full = full_schedule(schedule)
    verify(lower(full))
    assert visits_all_parts(full)
    assert full.stages == schedule.stages
    paths = [microbatch.path for microbatch in through_all_parts(schedule).microbatches]
    assert [microbatch.path for microbatch in full.microbatches] == paths
    unit = UnitCost()
    held = [max(simulate(one, unit).peak_activations) for one in (schedule, full)]
    assert held[1] <= max(held[0], len(full.stages) / full.ranks + 1e-9)
    assert full_schedule(full) is full


def test_ranks_without_stages_are_renumbered():
    schedule = make("1f1b", ranks=2, microbatches=2)
    stages = tuple(replace(one, rank=one.rank + 1) for one in schedule.stages)
    shifted = replace(schedule, stages=stages, lanes=((), *schedule.lanes))
    assert drop_empty_ranks(shifted) == schedule
    assert drop_empty_ranks(schedule) is schedule


# ---------------------------------------------------------------- training
def reference(job: Job) -> list[float]:
    """The losses of the same steps in one process: whole model, one path after the other."""
    config = job.config
    model = hold_whole(job.sizes)
    draw_parameters(model, config.run.seed)
    parts = list(split(model.stages[0], job.plan.partition))
    shape = BatchShape(config.rows, len(job.plan.schedule.microbatches))
    loader = Loader(job.corpus, shape, config.run.seed)
    optimizer = Optimizer(model.parameters, config.optimizer)
    paths = step_paths(job.plan, config.paths)
    found = []
    for step in range(config.run.steps):
        (batch,) = loader.step()
        schedule = paths.schedules[paths.at(step)]
        visited = [
            [schedule.stages[stage].part for stage in one.path]
            for one in schedule.microbatches
        ]
        loss = torch.zeros(())
        for words, path, labels in zip(
            batch.inputs, visited, batch.labels, strict=True
        ):
            x = words
            for part in path:
                x = parts[part](x)
            loss = loss + token_loss(x, labels)
        (loss / batch.valid).backward()
        found.append(float(loss.detach()) / batch.valid)
        norm = torch.nn.utils.get_total_norm(
            [p.grad for p in model.parameters.values() if p.grad is not None]
        )
        torch.nn.utils.clip_grads_with_norm_(
            model.parameters.values(), config.optimizer.clip_norm, norm
        )
        optimizer.step(factor_at(step, config.run.steps, config.optimizer))
    return found


@pytest.mark.parametrize(
    "changes",
    [
        ROTATING,
        ("schedule.name=skip:skips=2,rotate=3,full=4,warmup=1",),
        ("schedule.name=skip:rotate=2,swaps=1,keep=2", "parallel.dp_replicate=2"),
    ],
    ids=["rotation", "skips", "copies"],
)
def test_a_run_with_changing_paths_computes_what_one_process_does(changes, tmp_path):
    job = run_of(tmp_path, *changes)
    assert len(job.plan.schedules) > 1
    found = losses(train(job))
    assert found == pytest.approx(reference(job), abs=2e-5)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    rows = train(run_of(folder, *ROTATING, "run.eval_every=4"))
    return rows, tensors_in(folder / "checkpoints" / "step-00000009")


@pytest.mark.parametrize("stop", [1, 3])  # the next step is partial, or full
def test_a_run_with_changing_paths_resumes_exactly(stop, undisturbed, tmp_path):
    whole, weights = undisturbed
    outcomes(run_of(tmp_path, *ROTATING), stop_after(stop))
    rows = train(run_of(tmp_path, *ROTATING, "run.eval_every=4", resume=True))
    assert losses(rows) == losses(whole)
    assert rows[-1].evaluation == whole[-1].evaluation
    resumed = tensors_in(tmp_path / "checkpoints" / "step-00000009")
    assert all(torch.equal(weights[key], resumed[key]) for key in weights)


def test_the_history_says_how_many_layers_ran(undisturbed, tmp_path):
    assert [row.layers for row in undisturbed[0]] == [4, 3, 3, 4, 3, 3, 3, 4, 3]
    plain = train(
        run_of(tmp_path, "schedule.name=1f1b", "parallel.pp=2", "run.steps=2")
    )
    assert {row.layers for row in plain} == {None}


def test_a_part_that_no_path_visits_in_a_step_is_left_alone(tmp_path):
    """Its replicas sum zeros, with which AdamW would still decay and move its weights."""
    pair = make("skip", ranks=3, microbatches=2, skips=1, copies=2)
    paths = [one.path for one in pair.microbatches]
    without = [path for path in paths if pair.stages[path[1]].part == 1]
    always = tuple(without[0] if path[0] == 0 else without[-1] for path in paths)
    changed = [
        replace(m, path=p) for m, p in zip(pair.microbatches, always, strict=True)
    ]
    partial = sequential_schedule(pair.stages, changed)
    plan = Plan(partial, "own", (2, 1, 1, 0), full=full_schedule(pair))
    made = run_of(tmp_path, "run.steps=2", "parallel.dp_replicate=1")
    config = replace(
        made.config,
        schedule=ScheduleConfig("own:warmup=1", microbatches=4),
        parallel=ParallelConfig(pp=6),
    )
    job = replace(made, config=config, plan=plan)
    outcomes(job, stop_after(1))
    before = tensors_in(tmp_path / "checkpoints" / "step-00000001")
    outcomes(replace(job, resume=True))
    after = tensors_in(tmp_path / "checkpoints" / "step-00000002")
    moved = {key for key in before if not torch.equal(before[key], after[key])}
    skipped = {key for key in before if "layers.3." in key}
    assert skipped
    assert not skipped & moved
    assert {key for key in before if "layers.2.mlp" in key} <= moved


# ---------------------------------------------------------------- plans and configs
def test_a_plan_keeps_its_rotation_and_its_full_schedule_in_its_file():
    first, *others = skipping_schedules(ranks=4, microbatches=3, count=3)
    plan = Plan(first, "own", rotation=tuple(others), full=full_schedule(first))
    assert load_plan(dump_plan(plan)) == plan
    before, key, after = dump_plan(plan).partition('"full"')
    broken = before + key + after.replace("0F0 ", "", 1)
    with pytest.raises(ScheduleError, match=r"plan\.json\.full: .*0F0"):
        load_plan(broken)


def test_schedules_of_a_plan_have_the_same_stages_and_micro_batches():
    first = make("skip", ranks=4, microbatches=3)
    with pytest.raises(ShapeError, match="full has other stages"):
        Plan(first, full=make("1f1b", ranks=4, microbatches=3))
    with pytest.raises(ShapeError, match=r"rotation\[0\] has 4 micro-batches"):
        Plan(first, rotation=(make("skip", ranks=4, microbatches=4),))


def test_a_share_of_the_parts_is_rounded_to_the_nearest_number():
    for share, ranks, skips in ((0.25, 4, 1), (0.33, 6, 2), (0.25, 8, 2), (0.5, 6, 3)):
        config = apply_changes(
            SKIP,
            [
                f"schedule.name=skip:share={share}",
                f"parallel.pp={ranks}",
                "model.layers=8",
            ],
        )
        _, plan = plan_run(check_config(config), 8)
        lengths = {len(one.path) for one in plan.schedule.microbatches}
        assert lengths == {ranks - skips + 1}  # the head comes last


def test_the_head_of_partial_paths_has_no_layers():
    _, plan = plan_run(SKIP, 8)
    assert plan.partition == (2, 2, 2, 2, 0)
    _, plan = plan_run(apply_changes(SKIP, ["schedule.partition=[2,2,2,1,1]"]), 8)
    assert plan.partition == (2, 2, 2, 1, 1)
    refusal = (
        r"has 4 parts and a head, but the model has only 3 layers: set model\.layers=4"
    )
    with pytest.raises(ConfigError, match=refusal):
        plan_run(SKIP, 3)


def test_kept_parts_are_on_every_path():
    config = apply_changes(SKIP, ["schedule.name=skip:keep=1+3,rotate=4"])
    _, plan = plan_run(config, 8)
    for schedule in plan.schedules:
        assert all({0, 1, 3} <= set(one.path) for one in schedule.microbatches)
        assert all(2 not in one.path for one in schedule.microbatches)
    refusal = "at most 1 can be left out, because the parts 0 1 3 always run; not 2"
    two = "schedule.name=skip:skips=2,keep=1+3,rotate=4"
    with pytest.raises(ShapeError, match=refusal):
        plan_run(apply_changes(config, [two]), 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["schedule.name=1f1b:full=3"], "is for schedules that leave out parts"),
        (["schedule.name=auto:rotate=3"], "is for schedules that leave out parts"),
        (["schedule.name=skip:share=0.25,skips=1"], "both say how many parts are left out"),
        (["schedule.name=skip:share=2"], "share must be from 0 to 1"),
        (["schedule.name=skip:keep=7"], "keep in schedule.name names part 7, but the parts of 4 ranks are 0 to 3"),
        (["schedule.name=skip:full=-2"], "must be at least 0"),
        (["schedule.name=plan.json:share=0.25"], "share in schedule.name is for skip"),
    ],
    ids=str,
)  # fmt: skip
def test_values_of_paths_that_change_nothing_or_contradict_are_refused(
    changes, message
):
    with pytest.raises(ConfigError, match=message):
        check_config(apply_changes(SKIP, changes))


def test_paths_that_auto_has_chosen_may_change_from_step_to_step():
    partial = make("skip", ranks=4, microbatches=4)
    auto = ["schedule.name=auto:skip=0.25,full=3"]
    config = check_config(apply_changes(SKIP, auto))
    for chosen in (partial, full_schedule(partial)):
        found = Plan(chosen, "own", (1, 1, 1, 1, 0))
        settled, plan = plan_run(config, 4, plan_auto=lambda _, found=found: found)
        assert load_config(dump_config(settled)) == settled  # as the workers read it
        assert (plan.full is not None) is (chosen is partial)


def test_recordings_do_not_go_with_changing_paths():
    config = apply_changes(SKIP, ["run.cuda_graphs=true", "schedule.name=skip:full=3"])
    with pytest.raises(
        ConfigError, match=r"run.cuda_graphs = true does not go with paths"
    ):
        plan_run(config, 4)


def test_a_config_keeps_its_paths():
    config = apply_changes(SKIP, ["schedule.name=skip:keep=2,full=4"])
    assert load_config(dump_config(config)).paths == config.paths


def test_layers_are_counted_along_the_paths():
    schedule = make("skip", ranks=4, microbatches=3)
    assert mean_layers(schedule, (2, 2, 2, 2, 0)) == 6
    assert mean_layers(full_schedule(schedule), (2, 2, 2, 2, 0)) == 8
