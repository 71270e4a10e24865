"""What a new user meets first: `penstock` alone, its version, completion, `doctor`, and names that are near."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest

import penstock
from penstock import REGISTRY, make
from penstock.cli.app import app
from penstock.config import Config, find_settings
from penstock.config.names import OTHER_WORDS, RENAMED
from penstock.errors import ConfigError, nearest_name
from penstock.formats.config_toml import load_config
from penstock.schedules import OTHER_NAMES, read_name
from penstock.train.before import doctor
from penstock.train.before.doctor import State, examine
from penstock.version import extra_of, missing_package
from suite import installed


def test_penstock_alone_names_commands_that_exist(run):
    code, out, err = run("")
    assert (code, err) == (0, "")
    known = {command.name for command in app.registered_commands}
    shown = re.findall(r"^  penstock (.+?)  ", out, re.M)
    assert {line.split()[0] for line in shown} <= known
    assert {"doctor", "draw", "train"} <= {line.split()[0] for line in shown}
    for line in shown:
        if line.split()[0] == "draw":  # the others take seconds
            assert run(line)[0] == 0


@installed
def test_the_version_is_that_of_the_installed_package(run):
    assert penstock.__version__ == version("penstock")
    assert run("--version") == (0, f"penstock {version('penstock')}\n", "")


# ---------------------------------------------------------------- completion
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("penstock doc", ["doctor"]),
        ("penstock draw ha", ["hanayo"]),
        ("penstock train --set model.la", ["model.layers="]),
        ("penstock plan --gpu h2", ["h200"]),
        ("penstock train gp", ["gpt2"]),
        ("penstock init --from gp", ["gpt2"]),
    ],
)
def test_a_shell_completes_commands_and_names(run, monkeypatch, line, words):
    monkeypatch.setenv("_PENSTOCK_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(shlex.split(line)) - 1))
    code, out, _ = run("")
    assert (code, out.split()) == (0, words)


def test_the_script_for_a_shell_calls_penstock(run, monkeypatch):
    # typer asks which shell has called it, and here it may be none.
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("bash", "/bin/bash"))
    code, out, err = run("--show-completion")
    assert code == 0, err
    assert "_PENSTOCK_COMPLETE=complete_bash" in out


# ---------------------------------------------------------------- doctor
def test_doctor_says_what_is_there(run):
    torch = pytest.importorskip("torch")
    code, out, _ = run("doctor --json")
    facts = json.loads(out)
    found = {one["topic"]: one for one in facts["findings"]}
    assert code == 0
    assert torch.__version__.startswith(found["torch"]["found"])  # without +cu130
    assert found["torch"]["state"] == "ok"
    assert facts["can_train"]
    assert facts["cores"] >= 1
    assert facts["memory"] > 0
    assert len(facts["gpus"]) == torch.cuda.device_count()
    code, out, _ = run("doctor")
    assert code == 0
    assert facts["verdict"] in " ".join(out.split())


def test_doctor_says_how_to_install_torch(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it now fails
    code, out, _ = run("doctor")
    assert code == 0
    assert "pip install 'penstock[torch]'" in out
    assert "can plan, simulate and draw. To train:" in out


def finding(topic: str) -> doctor.Finding:
    return next(one for one in examine().findings if one.topic == topic)


def test_doctor_explains_a_gpu_that_torch_cannot_use(monkeypatch, tmp_path):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("torch uses the GPU of this machine")
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(doctor, "NVIDIA_DEVICE", tmp_path / "nvidia0")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA" in finding("GPUs").advice
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert "CUDA_VISIBLE_DEVICES" in finding("GPUs").advice


@installed
def test_doctor_names_what_is_missing(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(doctor, "find_spec", lambda _: None)
    monkeypatch.setattr(doctor, "version", lambda _: "1.9.0")
    assert finding("transformers").advice.startswith("pip install 'penstock[hf]'")
    assert finding("safetensors").state is State.MISSING
    assert not examine().can_train
    assert "which was never tried" in finding("torch").found


def test_doctor_names_the_gpus(monkeypatch):
    torch = pytest.importorskip("torch")
    cuda = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 2,
        get_device_name=lambda _: "NVIDIA H100",
        get_device_properties=lambda _: SimpleNamespace(total_memory=80 << 30),
        nccl=SimpleNamespace(version=lambda: (2, 27, 5)),
    )
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setenv("PATH", "")  # without a daemon of MPS
    assert finding("GPUs").found.startswith(
        "NVIDIA H100 (80 GiB), NVIDIA H100 (80 GiB)"
    )
    assert examine().verdict.endswith("or on 2 GPUs.")
    assert "nvidia-cuda-mps-control" in finding("NVIDIA MPS").advice


# ---------------------------------------------------------------- packages that are missing
@installed
@pytest.mark.parametrize(
    ("line", "module", "package", "extra"),
    [
        ("check plan.json --run", "penstock.train.before.trial", "torch", "torch"),
        (
            "generate run",
            "penstock.train.checkpoints.checkpoint",
            "safetensors",
            "torch",
        ),
    ],
)
def test_a_command_says_how_to_install_what_it_lacks(
    run, monkeypatch, line, module, package, extra
):
    pytest.importorskip(package)
    code, _, err = run("draw 1f1b --pp 1 --microbatches 1 -o plan.json")
    assert code == 0, err
    for loaded in sorted(sys.modules, reverse=True):
        if loaded == module or loaded.startswith("penstock.train.after"):
            parent, _, child = loaded.rpartition(".")
            monkeypatch.delattr(sys.modules[parent], child, raising=False)
            monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, package, None)  # importing it now fails
    code, _, err = run(line)
    assert code == 2
    assert f"this command needs {package}, which is not installed" in err
    assert f"pip install 'penstock[{extra}]'" in err


def test_penstock_in_ray_says_how_to_install_ray(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.delitem(sys.modules, "penstock.integrations.ray", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)  # importing it now fails
    monkeypatch.setitem(sys.modules, "ray.train", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'penstock\[ray\]'"):
        importlib.import_module("penstock.integrations.ray")


@installed
def test_packages_of_no_extra_are_not_explained():
    assert missing_package(ModuleNotFoundError("no", name="penstock.nothing")) is None
    assert missing_package(ModuleNotFoundError("no")) is None
    assert extra_of("tokenizers") == "hf"


# ---------------------------------------------------------------- did you mean
@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("loar", ""),
        ("quantized", ""),
        ("layer", "layers"),
        ("num_layers", "layers"),
        ("num_heads", "heads"),
        ("vocabulary_size", "vocab_size"),
        ("Hidden_size", "hidden_size"),
        ("hiden_size", "hidden_size"),
    ],
)
def test_a_suggestion_is_near_or_absent(given, meant):
    with pytest.raises(ConfigError) as caught:
        load_config(f"[model]\n{given} = 1\n")
    found = re.findall(r"did you mean '(\w+)'", str(caught.value))
    assert found == [meant] * bool(meant)
    assert ("known: family, layers" in str(caught.value)) is not bool(meant)


@pytest.mark.parametrize(
    ("change", "advice"),
    [
        ("model.steps=3", "did you mean 'run.steps'?"),
        ("train.lr=3", "did you mean 'optimizer.lr'?"),
        ("optimizer.learning_rate=3", "did you mean 'lr'?"),
        ("steps=3", "as in --set run.steps=3"),
        ("model.lora=8", "did you mean 'lora.rank'?"),
        ("nothing=3", "as in --set model.layers=24"),
    ],
)
def test_a_key_is_found_in_another_section_or_by_the_word_of_another_framework(
    change, advice
):
    with pytest.raises(ConfigError) as caught:
        load_config("", changes=[change])
    assert advice in str(caught.value)


def test_a_section_of_another_framework_leads_to_its_keys():
    with pytest.raises(ConfigError, match=r"did you mean 'run\.steps'"):
        load_config("[training]\ntrain_iters = 3\n")


def test_every_earlier_name_of_a_setting_is_refused_with_the_new_one():
    for old, new in RENAMED.items():
        said = new
        if " " not in new:
            section, key = new.split(".")
            assert hasattr(getattr(Config(), section), key)
            said = f"this is called {new}"
        text = "[{}]\n{} = 1\n".format(*old.split("."))
        for given in ({"text": text}, {"text": "", "changes": [f"{old}=1"]}):
            with pytest.raises(ConfigError, match=re.escape(said)):
                load_config(**given)


def test_every_word_of_another_framework_leads_to_a_setting():
    for word, setting in OTHER_WORDS.items():
        section, key = setting.split(".")
        assert find_settings(section, word) == (key,)
        assert hasattr(getattr(Config(), section), key)


def test_a_schedule_has_the_name_that_torch_gives_it():
    for name, meant in OTHER_NAMES.items():
        assert read_name(name)[0] == meant
    sizes = {"ranks": 2, "microbatches": 2}
    assert make("ScheduleZBVZeroBubble", **sizes) == make("zb-v", **sizes)


def test_a_schedule_is_found_by_one_of_its_words():
    assert nearest_name("interleaved-1f1b", REGISTRY) == "interleaved"
    assert nearest_name("torch", REGISTRY) == ""
    assert nearest_name("", REGISTRY) == ""


# ---------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("line", "way_out"),
    [
        (
            "plan tiny --gpu h100 --cost p.json",
            "leave the GPU out to plan with measured",
        ),
        (
            "lab testbed --workers 2 -- true",
            "run the command without `penstock lab testbed`",
        ),
        ("train --set run.device=cuda", "`penstock doctor` says what is missing"),
        ("plan --pp 2 --microbatches 2 --for x", "known: megatron, torchtitan"),
        ("train --set model.path=an/llama", "`hf download an/llama --local-dir"),
        ("profile bert-base --gpu h100", "leave out --gpu"),
        ("draw config.toml", "`penstock plan config.toml -o plan.json`"),
        ("join 10.0.0.1", "for example 10.0.0.1:29500"),
    ],
)
def test_a_refusal_says_what_to_do_instead(run, monkeypatch, line, way_out):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("penstock.runtime.process.mps.MPS_CONTROL", "no-such-program")
    code, _, err = run(line)
    assert code == 2
    others = err.strip().splitlines()[1:]
    assert way_out in " ".join(" ".join(others).split())


def test_a_dry_run_under_a_launcher_is_refused_and_trains_nothing(run, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    code, _, err = run("train --dry-run --set run.folder=run")
    assert (code, "start penstock train without it" in err) == (2, True)
    assert not Path("run").exists()


def test_a_plan_in_the_place_of_a_config_is_led_to_schedule_name(run):
    assert run("draw 1f1b --pp 2 --microbatches 2 -o plan.json")[0] == 0
    for command in ("plan", "train"):
        code, _, err = run(f"{command} plan.json")
        assert (code, "--set schedule.name=plan.json" in err) == (2, True)
