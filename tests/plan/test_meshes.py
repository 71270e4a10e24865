"""Meshes in the planner: which ones are tried, and what they cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.config import Config, ModelConfig, ParallelConfig
from penstock.cost.gpus import gpu_of
from penstock.errors import ConfigError
from penstock.formats import read_plan, write_plan
from penstock.ir import Plan
from penstock.plan.planner import plan_run
from penstock.plan.pricing import gpu_question
from penstock.plan.search import search
from penstock.plan.space import Limits
from penstock.plan.workload import Hardware, Workload, divisions_of, workload_of
from penstock.schedules import make

MODEL = ModelConfig(
    layers=8,
    hidden_size=1024,
    heads=8,
    kv_heads=4,
    intermediate_size=2816,
    vocab_size=32_000,
)
ROUNDING = 1e-12  # sums of the same seconds in another order


def workload(*given: str, config: Config | None = None, **more) -> Workload:
    config = config or Config()
    data = replace(config.data, seq_len=512, global_batch=8)
    config = replace(config, model=MODEL, data=data)
    hardware = Hardware(more.pop("devices", 4), 8 * 2.0**30)
    return workload_of(
        config, MODEL.layers, given, hardware, **{"open_mesh": True, **more}
    )


def meshes(workload: Workload) -> set[tuple[int, int]]:
    return {(division.tensor, division.shard) for division in divisions_of(workload)}


def test_an_open_mesh_is_the_planners_choice_unless_it_is_written():
    assert meshes(workload()) == {(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)}
    assert meshes(workload(open_mesh=False)) == {(1, 1)}
    written = replace(Config(), parallel=ParallelConfig(tp=2))
    assert meshes(workload("parallel.tp", config=written)) == {(2, 1), (2, 2)}


@pytest.mark.parametrize("option", [{"cuda_graphs": "true"}, {"compile": "true"}])
def test_options_that_go_with_no_mesh_close_it(option):
    config = Config()
    config = replace(config, run=replace(config.run, device="cuda", **option))
    assert meshes(workload(config=config)) == {(1, 1)}


def test_no_plan_beats_the_bound_of_its_division_and_gathers_count():
    asked = workload()
    question = gpu_question(asked, MODEL, gpu_of("h100"), Limits(stages=2, slices=1))
    found = search(question)
    for row in found.candidates:
        assert row.step >= found.bound
        assert row.step >= question.pricing.bound(row.division) * (1 - ROUNDING)
    for division in divisions_of(asked):
        gather = question.pricing.evaluator(division).gather
        assert (gather > 0) == (division.shard > 1)


def test_a_plan_file_brings_its_mesh_along(tmp_path):
    file = tmp_path / "plan.json"
    schedule = make("1f1b", ranks=1, microbatches=2)
    write_plan(Plan(schedule, "1f1b", (2,), tensor=2, shard=2), file)
    config = Config()
    config = replace(config, schedule=replace(config.schedule, name=str(file)))
    found, plan = plan_run(config, 2, given=("schedule.name",))
    assert (found.parallel.tp, found.parallel.dp_shard) == (2, 2)
    assert (plan.tensor, plan.shard) == (2, 2)


def test_a_plan_of_single_processes_and_one_that_leaves_the_mesh_open_differ(tmp_path):
    file = tmp_path / "plan.json"
    schedule = make("1f1b", ranks=1, microbatches=2)
    config = Config()
    config = replace(
        config,
        schedule=replace(config.schedule, name=str(file)),
        parallel=replace(config.parallel, tp=2),
    )

    def mesh_of(plan, given=("schedule.name",)):
        write_plan(plan, file)
        assert read_plan(file).mesh == plan.mesh
        mesh = plan_run(config, 2, given)[0].parallel
        return mesh.tp, mesh.dp_shard

    opened = Plan(schedule, "1f1b", (2,))
    alone = Plan(schedule, "1f1b", (2,), tensor=1, shard=1)
    assert mesh_of(opened) == (2, 1)
    assert mesh_of(alone) == (1, 1)
    written = ("schedule.name", "parallel.tp")
    assert mesh_of(opened, written) == (2, 1)
    with pytest.raises(ConfigError, match=r"parallel.tp = 2, but .* has 1"):
        mesh_of(alone, written)
    with pytest.raises(ConfigError, match="leave these values out"):
        mesh_of(alone, None)
