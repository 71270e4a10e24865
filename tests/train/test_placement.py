"""Where a run computes: one decision from config, machine and launcher."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from penstock.cli.run import describe_placement
from penstock.config import (
    Config,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    is_recording,
)
from penstock.errors import ConfigError, RunError
from penstock.formats.config_toml import apply_changes, preset
from penstock.plan.space import Limits
from penstock.train.before.profile import request_of
from penstock.train.before.start import (
    machine_workload,
    quick_rows,
    rows_to_measure,
    workload_limits,
)
from penstock.train.placement import (
    check_gpu_exists,
    check_gpus_suffice,
    decide_placement,
    launched_placement,
    uses_gpus,
)


@pytest.fixture
def machine(monkeypatch):
    """A machine with eight cores and some GPUs, and a launcher's environment."""
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("PENSTOCK_TESTBED_WORKERS", raising=False)

    def build(gpus: int, **environment: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: gpus > 0)
        for name, value in environment.items():
            monkeypatch.setenv(name, str(value))

    return build


def config_for(device: str = "auto", shard: int = 1) -> Config:
    return replace(
        Config(), parallel=ParallelConfig(dp_shard=shard), run=RunConfig(device=device)
    )


@pytest.mark.parametrize(
    ("gpus", "device", "shard", "chosen", "backend"),
    [
        (0, "auto", 1, "cpu", None),
        (0, "cpu", 1, "cpu", "gloo"),
        (4, "cpu", 1, "cpu", "gloo"),
        (4, "auto", 1, "cuda", None),
        (1, "auto", 1, "cuda", None),
        (4, "auto", 2, "cuda", None),
        (3, "auto", 2, "cpu", "gloo"),
        (3, "cuda", 2, "cuda", None),
    ],
)
def test_gpus_are_used_unless_the_config_or_the_mesh_forbids_it(
    machine, gpus, device, shard, chosen, backend
):
    machine(gpus)
    placement = decide_placement(config_for(device, shard), 4)
    assert (placement.device, placement.backend) == (chosen, backend)


def test_a_launcher_says_which_processes_share_this_machine(machine):
    machine(4, RANK=5, WORLD_SIZE=8, LOCAL_RANK=1, LOCAL_WORLD_SIZE=4)
    placement = launched_placement(config_for(shard=2))
    assert placement.processes == 8
    assert placement.local == range(4, 8)
    assert placement.threads == 2
    assert placement.device == "cuda"  # four processes here, a GPU each
    words = "8 processes, 4 of them here on 4 GPUs, NCCL"
    assert describe_placement(placement) == words


def test_a_launcher_that_does_not_count_is_met_with_caution(machine):
    machine(4, RANK=5, WORLD_SIZE=8)
    placement = launched_placement(config_for())
    assert placement.local == range(5, 6)
    assert placement.threads == 1  # as if all eight were here
    assert placement.shares_gpus


def test_too_few_gpus_for_a_mesh_are_named(machine):
    machine(3)
    placement = decide_placement(config_for("auto", 2), 4)
    words = "4 processes on 8 CPU cores, gloo (3 GPUs are too few)"
    assert describe_placement(placement) == words
    check_gpus_suffice(config_for("auto", 2), placement)
    forced = config_for("cuda", 2)
    with pytest.raises(ConfigError, match="need a GPU each, but there are 3"):
        check_gpus_suffice(forced, decide_placement(forced, 4))


@pytest.mark.parametrize(
    ("change", "recorded"),
    [
        ({}, True),
        ({"data": DataConfig(document_mask=True)}, False),
        ({"parallel": ParallelConfig(dp_shard=2)}, False),
        ({"model": ModelConfig(path="somewhere")}, False),
        ({"run": RunConfig(cuda_graphs="false")}, False),
        (
            {"run": RunConfig(cuda_graphs="true"), "model": ModelConfig(path="x")},
            True,
        ),
    ],
)
def test_gpus_record_their_actions_unless_something_is_in_the_way(change, recorded):
    config = replace(Config(), **change)
    assert is_recording(config, on_gpu=True) is recorded
    assert not is_recording(replace(config, run=RunConfig()), on_gpu=False)


def test_a_mesh_shares_a_gpu_in_a_testbed_with_nccl(machine, monkeypatch):
    machine(1, CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25)
    for backend, device in (("penstock_ipc", "cpu"), ("nccl", "cuda")):
        monkeypatch.setenv("PENSTOCK_TESTBED_BACKEND", backend)
        placement = decide_placement(config_for("auto", 2), 4)
        assert placement.device == device
    assert "NCCL" in describe_placement(placement)
    check_gpus_suffice(
        config_for("cuda", 2), decide_placement(config_for("cuda", 2), 4)
    )
    with pytest.raises(ConfigError, match="penstock lab testbed --backend nccl"):
        check_gpus_suffice(
            config_for("cuda", 2), decide_placement(config_for("cuda", 2), 6)
        )


@pytest.mark.parametrize(
    ("gpus", "share", "changes", "devices"),
    [
        (1, 100, [], 1),  # in turns: one process does the same work sooner
        (1, 25, [], 4),  # side by side
        (2, 100, [], 4),
        (0, 100, [], 4),
        (1, 100, ["parallel.pp=2"], 4),
        (1, 100, ["parallel.dp_replicate=2"], 4),
        (1, 100, ["elastic.mode=on"], 4),
    ],
)
def test_one_process_is_planned_where_several_would_take_turns_on_a_gpu(
    machine, gpus, share, changes, devices
):
    machine(gpus, CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=share)
    config = apply_changes(
        preset("llama-150m"), ["run.checks=forecast,gradients", *changes]
    )
    given = [change.split("=")[0] for change in changes]
    workload, placement = machine_workload(config, 12, given)
    assert workload.devices == placement.processes == devices
    limits = workload_limits(workload, Limits())
    assert limits.slices == (1 if devices == 1 else Limits().slices)


def test_the_largest_micro_batch_that_is_quick_enough_is_measured(machine):
    """A pass over 64 rows takes too long, so that 32 are the most of all divisors of the batch."""
    machine(1)
    changes = ["run.checks=forecast,gradients", "run.compile=false"]
    config = apply_changes(preset("llama-150m"), changes)
    workload, placement = machine_workload(config, 12, [])
    request = request_of(config, placement, 1, quick=True)
    assert rows_to_measure(workload) == [1, 8, 64]
    assert quick_rows(workload, request) == [1, 8, 32]


def test_a_run_that_needs_a_gpu_is_refused_without_one(machine):
    machine(0)
    assert not uses_gpus(config_for())
    check_gpu_exists(config_for())
    with pytest.raises(RunError, match="torch sees no GPU here"):
        check_gpu_exists(config_for("cuda"))
    with pytest.raises(RunError, match="torch sees none here"):
        check_gpu_exists(replace(Config(), run=RunConfig(cuda_graphs="true")))
    machine(1)
    assert uses_gpus(config_for())
    assert not uses_gpus(config_for("cpu"))
    check_gpu_exists(config_for("cuda"))
