"""torchtitan's own package with our pipelining: its config, its contract, its losses and gradients, its trainer."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import warnings
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from penstock import Plan, make
from penstock.errors import ConfigError, PenstockError, RunError
from penstock.formats import write_plan
from penstock.runtime import spawn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torchtitan and what it imports
    pytest.importorskip("torchtitan")
    import titan_names  # noqa: F401  # before the rest of torchtitan

    pytest.importorskip("torchtitan.trainer", exc_type=ImportError)
    from torchtitan.config import ConfigManager
    from torchtitan.distributed.pipeline_parallel import (
        _generate_llm_fqn_per_model_part as own_rule,
    )
    from torchtitan.tools.logging import logger

    import titan_workers as workers
    from penstock.integrations.torchtitan import refuse_other_version
    from penstock.integrations.torchtitan.model_method import (
        pipeline_group,
        pipeline_with,
    )
    from penstock.integrations.torchtitan.options import PenstockOptions
    from penstock.integrations.torchtitan.trainer import (
        PenstockTrainer,
        forecast_of,
        known_gpu,
        loss_rank_name,
        plan_pipeline,
        use_plan,
        with_penstock,
    )
    from penstock.view.numbers import write_range, write_time
    from titan_workers import CHUNKS, TOKENS, Case

ROUNDING = 1e-5  # of float32, after slices have added in another order


# ---------------------------------------------------------------- the version
def test_a_torchtitan_with_another_contract_is_refused():
    for other in ("0.2.2", "0.4.0.dev20261101", "1.0"):
        with pytest.raises(RunError, match=f"but {re.escape(other)} is installed"):
            refuse_other_version(other)


# ---------------------------------------------------------------- the config
def test_torchtitan_reads_our_options_and_keeps_its_own():
    config = ConfigManager().parse_args(
        [
            *(
                "--module",
                "penstock.integrations.torchtitan",
                "--config",
                "llama3_debugmodel",
            ),
            *("--parallelism.pipeline_parallel_degree", "2"),
            *("--training.local_batch_size", "4"),
            *("--penstock.schedule", "hanayo", "--penstock.waves", "1"),
            "--penstock.no-prove",
        ]
    )
    assert isinstance(config, PenstockTrainer.Config)
    assert config.penstock == PenstockOptions(schedule="hanayo", waves=1, prove=False)
    assert config.training.local_batch_size == 4
    assert config.training.disable_cuda_graphs  # torchtitan refuses them in pipelines
    assert config.model_spec.name == "llama3"


def test_torchtitan_reads_the_command_of_the_guide():
    page = Path(__file__).parents[2] / "docs" / "guides" / "torchtitan.md"
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    (command,) = re.findall(r"torchrun .* -m torchtitan.train (.*)", text)
    config = ConfigManager().parse_args(shlex.split(command))
    planned = plan_pipeline(config, config.penstock)
    assert planned.plan.schedule.parts == 16
    named = set(re.findall(r"`(?:--penstock)?\.(\w+)`", text))
    assert named <= {one.name for one in fields(PenstockOptions)}


def test_a_config_that_torchtitan_lacks_is_refused_by_name():
    with pytest.raises(ValueError, match="llama9_8b"):
        ConfigManager().parse_args(
            ["--module", "penstock.integrations.torchtitan", "--config", "llama9_8b"]
        )


def test_without_a_pipeline_torchtitan_stays_as_it_is():
    config = workers.trainer_config(Case("1f1b"), 1)
    assert use_plan(config) is config


# ---------------------------------------------------------------- the plan
def test_named_schedules_have_the_parts_of_torchtitans_own_rule():
    config = workers.trainer_config(Case("hanayo", {"waves": 1}), 2)
    planned = plan_pipeline(config, config.penstock)
    assert [list(one) for one in planned.modules] == own_rule(4, workers.LAYERS)
    assert planned.plan.partition == (1, 2, 2, 1)


def test_torchtitan_logs_the_loss_where_the_last_stage_is():
    for name, rank, schedule in (("1f1b", 1, "1F1B"), ("hanayo", 0, "ZBVZeroBubble")):
        config = workers.trainer_config(Case(name), 2)
        planned = plan_pipeline(config, config.penstock)
        assert planned.last_rank == rank
        assert loss_rank_name(planned) == schedule
        settled = use_plan(config)
        assert settled.parallelism.pipeline_parallel_schedule == schedule


def test_a_plan_file_brings_its_layers(tmp_path):
    file = tmp_path / "plan.json"
    write_plan(Plan(make("1f1b", ranks=2, microbatches=4), "mine", (4, 2)), file)
    config = workers.trainer_config(Case(str(file)), 2)
    first, last = plan_pipeline(config, config.penstock).modules
    assert first == ("tok_embeddings", *(f"layers.{n}" for n in range(4)))
    assert last == ("layers.4", "layers.5", "norm", "lm_head")


@pytest.mark.parametrize(
    ("name", "memory", "gpu"),
    [
        ("NVIDIA A100-SXM4-40GB", 42e9, "A100-40"),
        ("NVIDIA A100-SXM4-80GB", 85e9, "A100"),
        ("NVIDIA H200", 150e9, "H200"),
        ("Some other GPU", 80e9, None),
    ],
)
def test_the_gpu_of_a_machine_is_known_by_name_and_memory(name, memory, gpu):
    found = known_gpu(name, memory)
    assert (found and found.name) == gpu


def test_auto_plans_and_forecasts_with_the_data_sheet_of_a_gpu():
    config = workers.trainer_config(Case("auto", {"gpu": "h100"}, batch=1), 2)
    planned = plan_pipeline(config, config.penstock)
    assert planned.plan.schedule.ranks == 2
    assert sum(planned.plan.partition) == workers.LAYERS
    predicted = forecast_of(config, config.penstock, planned)
    assert predicted is not None
    assert predicted.seconds > 0
    unknown = replace(config.penstock, gpu="")
    if not torch.cuda.is_available():
        assert forecast_of(config, unknown, planned) is None
        with pytest.raises(ConfigError, match="no GPU whose data sheet"):
            plan_pipeline(config, unknown)


def test_the_logged_forecast_has_a_range(monkeypatch):
    config = workers.trainer_config(Case("1f1b", {"gpu": "h100"}, batch=1), 2)
    predicted = forecast_of(
        config, config.penstock, plan_pipeline(config, config.penstock)
    )
    lines = []
    monkeypatch.setattr(logger, "info", lines.append)
    use_plan(config)
    step = write_time(predicted.seconds, digits=3)
    words = f"forecast: {step} per step ({write_range(*predicted.range)}), bubble"
    assert [line for line in lines if words in line]


# ---------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("section", "changes", "message"),
    [
        ("parallelism", {"tensor_parallel_degree": 2}, "tensor_parallel_degree 2"),
        (
            "parallelism",
            {"pipeline_parallel_schedule_csv": "a.csv"},
            "name the file in --penstock.schedule",
        ),
        (
            "parallelism",
            {"module_fqns_per_model_part": [["layers.0"]]},
            "has 1 parts with 1 layers",
        ),
        (
            "parallelism",
            {"pipeline_parallel_last_stage_less_layers": 9},
            "torchtitan cannot divide the model into 4 parts",
        ),
        ("training", {"enable_cpu_offload": True}, "enable_cpu_offload"),
        ("penstock", {"schedule": "chimera"}, "more than once"),
        ("penstock", {"schedule": "skip"}, "leaves out parts"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(section, changes, message):
    config = workers.trainer_config(Case("1f1b"), 4)
    changed = replace(getattr(config, section), **changes)
    config = replace(config, **{section: changed})
    with pytest.raises(ConfigError, match=message):
        plan_pipeline(config, config.penstock)


def test_a_backend_that_this_torch_cannot_shard_is_refused(monkeypatch):
    """torchtitan divides the weights among all processes, if it is not told otherwise."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    config = workers.trainer_config(Case("1f1b"), 2)
    shards = replace(config.parallelism, data_parallel_shard_degree=-1)
    config = replace(config, parallelism=shards)
    with pytest.raises(ConfigError, match=r"add --parallelism.* partial_dtensor"):
        plan_pipeline(config, config.penstock)
    other = replace(shards, spmd_backend="partial_dtensor")
    planned = plan_pipeline(replace(config, parallelism=other), config.penstock)
    assert planned.config.parallel.size == 2


def test_slices_are_refused_where_attention_does_not_take_them():
    config = workers.trainer_config(Case("1f1b", {"slices": 2}), 2)
    config.model_spec.model.layers[3].moe = object()
    with pytest.raises(ConfigError, match="layer 3 has experts"):
        plan_pipeline(config, config.penstock)


def test_another_trainers_config_is_refused():
    with pytest.raises(ConfigError, match="not the config of torchtitan's own"):
        with_penstock(workers.trainer_config(Case("1f1b"), 2))


# ---------------------------------------------------------------- losses and gradients
def judge(results, number, case):
    """Compare what all ranks together computed in a case: ours and torchtitan's."""
    losses, peer_losses, gradients, peer_gradients = [], [], {}, {}
    evaluated = 0.0
    for of_rank in results:
        own, grads, peers, peer_grads, evaluation, proof = of_rank[number]
        losses += own
        peer_losses += peers
        gradients |= grads
        peer_gradients |= peer_grads
        evaluated += sum(evaluation)
        assert bool(proof.skipped) == (case.shard > 1), proof
    assert len(losses) == case.accumulate * case.shard * case.batch // case.rows
    assert losses == pytest.approx(peer_losses, rel=ROUNDING)
    assert gradients.keys() == peer_gradients.keys()
    for name, expected in peer_gradients.items():
        gap = (gradients[name] - expected).abs().max()
        assert gap <= ROUNDING * expected.abs().max(), (case, name)
    if case.accumulate == 1:
        labels = case.batch * case.shard * (TOKENS - 2)
        assert evaluated == pytest.approx(sum(losses) * labels, rel=ROUNDING)


CASES = [
    Case("1f1b"),
    Case("1f1b", batch=1),  # fewer micro-batches than ranks, compared with GPipe
    Case("zb-h1", chunks=CHUNKS, precision="bfloat16"),
    Case("zb-h1", {"slices": 2}, recompute="full", accumulate=2),
    Case("hanayo", {"waves": 1, "slices": 2, "split": True}, rows=2, chunks=CHUNKS),
    Case("1f1b", {"slices": 2}, rows=2, recompute="selective", documents=True),
]


@pytest.mark.numerics
def test_losses_and_gradients_are_those_of_torchtitans_own_pipeline():
    results = spawn(2, workers.compare, CASES, backend=workers.BACKEND)
    for number, case in enumerate(CASES):
        judge(results, number, case)


SHARDED = [
    Case(
        "hanayo",
        {"waves": 1, "slices": 2, "split": True},
        rows=2,
        chunks=CHUNKS,
        shard=2,
    ),
    Case("1f1b", batch=8),
]


@pytest.mark.numerics
def test_four_ranks_and_fsdp_compute_the_same():
    results = spawn(4, workers.compare, SHARDED, backend=workers.BACKEND)
    for number, case in enumerate(SHARDED):
        judge(results, number, case)


@pytest.mark.skipif(not CHUNKS, reason="torch 2.11 cannot run losses in chunks")
def test_a_loss_in_chunks_must_fit_the_slices():
    case = Case("1f1b", {"slices": 2}, chunks=16)
    with pytest.raises(
        PenstockError, match="16 chunks, but there is a slice of 8 tokens"
    ):
        spawn(2, workers.compare, [case], backend=workers.BACKEND)


# ---------------------------------------------------------------- the method of a model
@pytest.mark.numerics
def test_the_method_of_a_model_computes_what_the_whole_model_computes():
    """With the calls of torchtitan's repository; there is no release to run them with."""
    for found, expected in spawn(2, workers.call_model_method, ["zb-h1", "hanayo"]):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("schedule", "shape", "changes", "words"),
    [
        ("seq1f1b", {"slices": 2}, {}, "has token slices"),
        ("chimera", {}, {}, "copies of parts"),
        ("1f1b", {}, {"tensor_parallel_degree": 2}, "tensor_parallel_degree 2 does"),
        ("plan.json", {}, {"num_pp_microbatches": 3}, "but .* is 2 and .*batches 3"),
    ],
)
def test_what_the_method_of_a_model_cannot_do_is_refused(
    schedule, shape, changes, words, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    made = make("1f1b", ranks=2, microbatches=4)
    write_plan(Plan(made, "mine", partition=(3, 3)), Path("plan.json"))
    model = workers.packed_model()
    model.__class__.pipeline = pipeline_with(schedule, **shape)
    arguments = workers.method_arguments(None, 4)
    for key, value in changes.items():
        setattr(arguments["parallelism"], key, value)
    with pytest.raises(ConfigError, match=words):
        model.pipeline(**arguments, parallelism_context=None)
    with pytest.raises(ConfigError, match="without parallelism_context or"):
        pipeline_group({})


# ---------------------------------------------------------------- the whole trainer
@pytest.mark.numerics
def test_torchtitans_trainer_trains_validates_and_resumes_with_our_pipeline(tmp_path):
    case = Case("hanayo", {"waves": 1, "slices": 2}, chunks=CHUNKS)
    (expected,) = spawn(
        1, workers.train, case, tmp_path, [2, 4], backend=workers.BACKEND
    )
    first, _ = spawn(2, workers.train, case, tmp_path, [2, 4], backend=workers.BACKEND)
    assert [one[:2] for one in first] == [one[:2] for one in expected]
    losses = [one[2] for one in first]
    assert losses == pytest.approx([one[2] for one in expected], rel=1e-4)


def run_command(folder, ranks, steps, *options):
    """Run torchtitan's command up to each number of steps; return what the rank with the losses has logged."""
    entry = Path(__file__).parents[1] / "titan_entry.py"
    losses = folder / "losses"
    for last in steps:
        line = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run"]
        line += ["--standalone", "--nproc-per-node", str(ranks), str(entry)]
        line += ["--config", "llama3_debugmodel", "--dump_folder", str(folder / "out")]
        line += ["--training.steps", str(last), "--lr_scheduler.total_steps", "100"]
        line += ["--training.seq_len", "64", "--training.local_batch_size", "4"]
        line += ["--metrics.log_freq", "1", "--checkpoint.enable"]
        line += ["--checkpoint.interval", "2"]
        line += ["--parallelism.spmd_backend", "partial_dtensor", *options]
        done = subprocess.run(
            line,
            env={**os.environ, "LOSSES_FOLDER": str(losses)},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    for file in sorted(losses.glob("*.jsonl")):
        logged = [json.loads(one) for one in file.read_text().splitlines()]
        if logged and logged[0][2] > 0:
            return logged
    return []


@pytest.mark.numerics
def test_torchtitans_own_command_trains_and_resumes_with_our_pipeline(tmp_path):
    own = ("--module", "llama3")
    run_command(tmp_path / "seed", 1, [1], *own, "--checkpoint.create_seed_checkpoint")
    seed = tmp_path / "seed/out/checkpoint/step-0"
    begin = ("--checkpoint.initial_load_path", str(seed))
    expected = run_command(tmp_path / "own", 1, [4], *own, *begin)
    ours = (
        "--module",
        "penstock.integrations.torchtitan",
        "--parallelism.pipeline_parallel_degree",
        "2",
    )
    wave = ("--penstock.schedule", "hanayo", "--penstock.split")
    found = run_command(tmp_path / "ours", 2, [2, 4], *ours, *begin, *wave)
    assert [one[:2] for one in found] == [["train", step] for step in (1, 2, 3, 4)]
    losses = [one[2] for one in found]
    # In bfloat16, and micro-batches add up in another order than a whole batch.
    assert losses == pytest.approx([one[2] for one in expected], rel=2e-3)
    assert losses[-1] < losses[0] - 1
