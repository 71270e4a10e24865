"""The templates for Kubernetes and SkyPilot: their scripts run with a torchrun that writes down what it is asked."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from commands import environment
from penstock.cli.app import load

yaml = pytest.importorskip("yaml")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TORCHRUN = """#!/bin/bash
printf '%s\\n' "$@" > "$WORDS"
"""
pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")


def run_script(tmp_path: Path, command: list[str], env: dict[str, str]) -> list[str]:
    """Run a template's script; return the words that torchrun gets."""
    script = tmp_path / "bin" / "torchrun"
    script.parent.mkdir(exist_ok=True)
    script.write_text(TORCHRUN)
    script.chmod(0o755)
    words = tmp_path / "words"
    path = {"PATH": f"{script.parent}:/usr/bin:/bin", "WORDS": str(words)}
    whole = environment(RUN=str(tmp_path / "run"), **env) | path
    subprocess.run(command, cwd=tmp_path, env=whole, check=True)
    return words.read_text().splitlines()


def kubeflow(tmp_path: Path) -> list[str]:
    spec = yaml.safe_load((EXAMPLES / "kubeflow.yaml").read_text())["spec"]
    trainer = spec["trainer"]
    assert (
        trainer["numProcPerNode"]
        == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    )
    (patch,) = spec["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    mounted = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    assert mounted.keys() == {one["name"] for one in pod["volumes"]}
    env = {one["name"]: one["value"] for one in trainer["env"]}
    assert env.pop("RUN").startswith(mounted["runs"])
    assert f"{mounted['config']}/config.toml" in trainer["args"][0]
    return run_script(tmp_path, trainer["command"] + trainer["args"], env)


def skypilot(tmp_path: Path) -> list[str]:
    task = yaml.safe_load((EXAMPLES / "skypilot.yaml").read_text())
    (mount,) = task["file_mounts"]
    env = task["envs"] | {
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
        "SKYPILOT_NUM_GPUS_PER_NODE": task["resources"]["accelerators"].split(":")[1],
        "SKYPILOT_NODE_RANK": "1",
    }
    assert env.pop("RUN").startswith(mount)
    words = run_script(tmp_path, ["bash", "-c", task["run"]], env)
    asked, _ = get_args_parser().parse_known_args(words)
    assert (asked.nnodes, asked.nproc_per_node) == ("2", "4")
    assert (asked.node_rank, asked.master_addr) == (1, "10.0.0.1")
    return words


@pytest.mark.parametrize("template", [kubeflow, skypilot])
def test_a_template_asks_torchrun_for_a_run_that_our_command_line_takes(
    template, tmp_path
):
    words = template(tmp_path)
    asked = get_args_parser().parse_args(words)
    assert asked.module
    assert asked.training_script == "penstock"
    name, *rest = asked.training_script_args
    command = load(name)
    given = command.make_context(name, rest).params
    assert str(given["source"]).endswith("config.toml")
    assert list(given["changes"]) == [f"run.folder={tmp_path / 'run'}"]
    assert given["resume"] == "auto"


def test_kubeflow_knows_every_field_of_the_template():
    models = pytest.importorskip("kubeflow_trainer_api.models")
    written = yaml.safe_load((EXAMPLES / "kubeflow.yaml").read_text())
    read = models.TrainerV1alpha1TrainJob.from_dict(written)
    assert read.to_dict() == written
