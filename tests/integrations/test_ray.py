"""Ray Train with `penstock.integrations.ray.train_loop`: the real package, on workers of this machine."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from commands import SMALL_CONFIG, called
from penstock.config import Config, ParallelConfig, ScheduleConfig
from penstock.errors import ConfigError
from penstock.train.checkpoints.checkpoint import faults
from penstock.train.history import read_rows

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Ray, while it is imported
    ray = pytest.importorskip("ray", exc_type=ImportError)
    from ray.cluster_utils import Cluster
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from penstock.integrations.ray import fit_ranks, read_settings, train_loop

STEPS = 12


def test_ranks_follow_the_number_of_workers():
    config = Config(schedule=ScheduleConfig("1f1b", microbatches=4))
    assert fit_ranks(config, 4).parallel.pp == 4
    planned = Config(schedule=ScheduleConfig("plan.json"))
    assert fit_ranks(planned, 3) is planned
    sharded = Config(parallel=ParallelConfig(dp_shard=2))
    with pytest.raises(ConfigError, match="a multiple of 2"):
        fit_ranks(sharded, 3)


@pytest.mark.parametrize("settings", [{"set": []}, {"config": "a.toml", "steps": 3}])
def test_other_settings_are_refused(settings):
    with pytest.raises(ConfigError, match="give it 'config'"):
        read_settings(settings)


@pytest.fixture
def cluster(monkeypatch, tmp_path):
    """Two nodes of Ray on this machine, with a processor each. The second one has the resource `spot`."""
    warnings.simplefilter("ignore")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    # How long Ray waits for a node that is lost before it starts fewer workers.
    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "30")
    # Workers cannot import this file.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    nodes = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "include_dashboard": False},
    )
    nodes.add_node(num_cpus=1, resources={"spot": 1})
    ray.init(nodes.address, log_to_driver=False, configure_logging=False)
    yield nodes
    ray.shutdown()
    nodes.shutdown()


@pytest.fixture
def config(tmp_path) -> Path:
    text = tmp_path / "text.txt"
    text.write_text(
        "".join(f"the {n % 7} cats sat on {n % 5} mats\n" for n in range(999))
    )
    file = tmp_path / "config.toml"
    file.write_text(SMALL_CONFIG.replace("[data]", f'[data]\nsources = ["{text}"]'))
    return file


def die_after(settings: dict[str, Any], step: int, *processes: int) -> None:
    """Kill processes once, in a thread, when the checkpoint of a step is there."""
    folder = Path(settings["set"][0].partition("=")[2])
    lost = folder.with_name(f"lost-{step}")

    def die() -> None:
        while not (folder / "checkpoints" / f"step-{step:08}").exists():
            time.sleep(0.01)
        lost.touch()
        for process in processes:
            os.kill(process, signal.SIGKILL)

    if not lost.exists():
        threading.Thread(target=die, daemon=True).start()


def lose_worker(settings: dict[str, Any]) -> None:
    """Train, but the second worker is killed once, after the checkpoint of step 6."""
    if os.environ["RANK"] == "1":
        die_after(settings, 6, os.getpid())
    train_loop(settings)


def lose_node(settings: dict[str, Any]) -> None:
    """Train, but the spot node is lost with its worker, after the checkpoint of step 15."""
    here = ray.get_runtime_context().get_node_id()
    node = next(one for one in ray.nodes() if one["NodeID"] == here)
    if "spot" in node["Resources"]:
        die_after(settings, 15, os.getppid(), os.getpid())  # the node's own process
    train_loop(settings)


def lose_separate_node(settings: dict[str, Any]) -> None:
    """Train with a folder for each node; the spot node is lost with its folder, after the checkpoint of step 6."""
    here = ray.get_runtime_context().get_node_id()
    node = next(one for one in ray.nodes() if one["NodeID"] == here)
    folder = Path(settings["set"][0].partition("=")[2])
    own = folder.with_name("spot" if "spot" in node["Resources"] else "head")
    settings = settings | {"set": [f"run.folder={own}", *settings["set"][1:]]}
    if own.name == "spot":
        # Ray has the checkpoint of step 6 when that of step 9 is begun.
        die_after(settings, 9, os.getppid(), os.getpid())
    train_loop(settings)


WAITING = """
import os, time

class Wait:
    def on_step(self, row):
        while row.step > 21 and os.environ["WORLD_SIZE"] == "1":
            time.sleep(0.1)  # until Ray ends this worker, because there is room for two
"""


def start_node_after(address: str, folder: Path, step: int) -> subprocess.Popen[bytes]:
    """Bring a node back, in a process of its own, when the checkpoint of a step is there."""
    saved = shlex.quote(str(folder / "checkpoints" / f"step-{step:08}"))
    ray_start = f"{sys.executable} -m ray.scripts.scripts start --address={address}"
    script = f"until [ -e {saved} ]; do sleep 0.1; done; exec {ray_start} --num-cpus=1 --block"
    return subprocess.Popen(
        ["sh", "-c", script], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def fit(tmp_path: Path, loop: Any, config: Path, workers: Any, *changes: str) -> Any:
    """Train with Ray; return its result."""
    folder = tmp_path / "run"
    return TorchTrainer(
        loop,
        train_loop_config={
            "config": str(config),
            "set": [f"run.folder={folder}", *changes],
        },
        scaling_config=ScalingConfig(
            num_workers=workers, elastic_resize_monitor_interval_s=1.0
        ),
        run_config=RunConfig(
            storage_path=str(tmp_path / "storage"),
            failure_config=FailureConfig(max_failures=3),
        ),
    ).fit()


@pytest.mark.numerics
def test_ray_goes_on_after_a_loss_with_the_workers_that_are_left_or_come_back(
    tmp_path, config, cluster, monkeypatch, capsys
):
    first = fit(tmp_path, lose_worker, config, 2)
    assert (tmp_path / "lost-6").exists()
    assert (first.metrics["step"], first.metrics["workers"]) == (STEPS, 2)
    assert (Path(first.checkpoint.path) / "checkpoint.json").is_file()
    second = fit(tmp_path, lose_node, config, (1, 2), f"run.steps={STEPS + 6}")
    assert (tmp_path / "lost-15").exists()
    assert (second.metrics["step"], second.metrics["workers"]) == (STEPS + 6, 1)
    (tmp_path / "wait.py").write_text(WAITING)
    node = start_node_after(cluster.address, tmp_path / "run", STEPS + 9)
    third = fit(
        *(tmp_path, train_loop, config, (1, 2), f"run.steps={STEPS + 12}"),
        f'run.callbacks=["{tmp_path}/wait.py:Wait"]',
    )
    node.terminate()
    node.wait(timeout=60)
    assert (third.metrics["step"], third.metrics["workers"]) == (STEPS + 12, 2)
    rows = read_rows(tmp_path / "run")
    assert [row.step for row in rows] == list(range(1, STEPS + 13))
    # The same steps without Ray and without a loss.
    plain = tmp_path / "plain"
    for line in (
        f"train {config} --set run.folder={plain}",
        f"train {plain} --resume --set run.steps={STEPS + 6}",
        f"train {plain} --resume --set run.steps={STEPS + 12}",
    ):
        code, _, err = called(monkeypatch, capsys, line)
        assert code == 0, err
    expected = [row.loss for row in read_rows(plain)]
    assert [row.loss for row in rows] == pytest.approx(expected, rel=1e-5)


@pytest.mark.numerics
def test_nodes_with_folders_of_their_own_go_on_from_the_storage_of_ray(
    tmp_path, config, cluster, monkeypatch, capsys
):
    result = fit(tmp_path, lose_separate_node, config, (1, 2))
    assert (tmp_path / "lost-9").exists()
    assert (result.metrics["step"], result.metrics["workers"]) == (STEPS, 1)
    # Ray has joined the files of both nodes. Neither folder has all files of these checkpoints.
    joined = (tmp_path / "storage").glob("*/checkpoint_*/*-00002-of-00002.safetensors")
    assert not all(faults(one, quick=True) for one in {file.parent for file in joined})
    # If the lost node had rank 0, the figures of its steps are lost with it.
    rows = read_rows(tmp_path / "head")
    assert [row.step for row in rows] == list(range(rows[0].step, STEPS + 1))
    plain = tmp_path / "plain"
    line = f"train {config} --set run.folder={plain}"
    code, _, err = called(monkeypatch, capsys, line)
    assert code == 0, err
    expected = [row.loss for row in read_rows(plain)]
    losses = [row.loss for row in rows]
    assert losses == pytest.approx(expected[-len(rows) :], rel=1e-5)
