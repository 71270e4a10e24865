"""Who may import whom: the table of docs/design.md, walked."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import penstock

ROOT = Path(penstock.__file__).parent
ROOMS = {
    "errors": set(),
    "version": {"errors"},
    "shaped": {"errors"},
    "partition": {"errors"},
    "families": {"errors"},
    "torch_internals": set(),
    "config": {"errors"},
    "ir": {"errors"},
    "cost": {"ir", "partition", "errors"},
    "formats": {"ir", "cost", "config", "errors"},
    "sim": {"ir", "cost", "errors"},
    "schedules": {"ir", "cost", "sim", "shaped", "errors"},
    "plan": {
        *("ir", "cost", "config", "formats", "partition", "schedules", "sim"),
        "errors",
    },
    "view": {"ir", "errors"},
    "runtime": {"ir", "cost", "models", "torch_internals", "errors"},
    "measure": {"ir", "cost", "models", "runtime", "torch_internals", "errors"},
    "models": {"families", "partition", "errors"},
    "pipeline": {"ir", "partition", "runtime", "models", "errors"},
    "train": {
        *("ir", "cost", "config", "formats", "schedules", "sim", "plan", "view"),
        *("families", "runtime", "measure", "models"),
        *("torch_internals", "version", "errors"),
    },
    "crew": {
        *("ir", "config", "formats", "schedules", "plan", "models"),
        *("runtime", "torch_internals", "train", "errors"),
    },
    "training": {
        *("ir", "config", "formats", "runtime", "train", "crew", "version", "errors"),
    },
    "integrations": {
        *("ir", "cost", "config", "formats", "schedules", "plan", "view"),
        *("crew", "models", "partition", "runtime", "torch_internals", "train"),
        "errors",
    },
    "cli": {
        *("ir", "cost", "config", "formats", "schedules", "sim", "plan", "view"),
        *(
            "crew",
            "integrations",
            "partition",
            "runtime",
            "measure",
            "train",
            "training",
            "version",
        ),
        "errors",
    },
    "__main__": {"cli"},
}
LIBRARIES = {
    "errors": set(),
    "version": set(),
    "shaped": set(),
    "partition": set(),
    "families": set(),
    "torch_internals": {"torch"},
    "config": set(),
    "ir": {"numpy", "numba"},
    "cost": {"numpy"},
    "formats": set(),
    "sim": {"numpy"},
    "schedules": {"numpy"},
    "plan": {"numpy"},
    "view": {"numpy", "rich"},
    "runtime": {"numpy", "torch"},
    "measure": {"numpy", "torch"},
    # transformers only where a decoder of it is built
    "models": {"torch", "transformers"},
    "pipeline": {"torch"},
    "train": {
        "fsspec",
        "numpy",
        "torch",
        "rich",
        "peft",
        "pyarrow",
        "safetensors",
        "tokenizers",
        "transformers",
        "wandb",
    },
    "crew": {"cryptography", "rich", "torch"},
    "training": set(),
    "integrations": {"ray", "torch", "torchtitan"},
    "cli": {"typer", "rich"},
    "__main__": set(),
}


def imports_of(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            found.add(node.module or "")
    return found


FILES = [file for file in ROOT.rglob("*.py") if file != ROOT / "__init__.py"]


def room_of(file: Path) -> str:
    return file.relative_to(ROOT).parts[0].removesuffix(".py")


def test_every_file_is_in_a_room():
    assert {room_of(file) for file in FILES} == set(ROOMS) == set(LIBRARIES)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_it_may(room):
    for file in FILES:
        if room_of(file) != room:
            continue
        for name in imports_of(file):
            top, *rest = name.split(".")
            if top == "penstock":
                assert rest, f"{file}: imports the whole package"
                allowed = rest[0] in ROOMS[room] | {room}
                assert allowed, f"{file}: {room} may not import {rest[0]}"
            elif top not in sys.stdlib_module_names:
                assert top in LIBRARIES[room], f"{file}: {room} may not import {top}"


def test_every_file_is_a_noun_and_none_is_a_drawer():
    for file in FILES:
        assert file.stem not in {"utils", "common", "helpers", "misc"}


def test_nothing_prints_below_the_command_line():
    for file in FILES:
        calls = [
            n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Call)
        ]
        assert not [
            n for n in calls if isinstance(n.func, ast.Name) and n.func.id == "print"
        ], file.name


def test_planning_and_drawing_need_no_torch_and_small_work_no_compiler():
    code = (
        "import sys; import penstock; from penstock.view import svg; "
        "wave = penstock.make('hanayo', ranks=4, microbatches=4, waves=2); "
        "svg(penstock.simulate(wave, penstock.UnitCost())); "
        "from penstock.cli.terminal import ProfileOptions; "
        "from penstock.cli.plan import DeviceOptions, LimitOptions, ModelOptions, config_question; "
        "from penstock.plan.space import Limits; "
        "devices = DeviceOptions(devices=8, gpu='h100'); "
        "model = ModelOptions(None, ('model.layers=8',), devices, ProfileOptions(), LimitOptions()); "
        "asked = config_question(model, Limits()); "
        "assert asked.workload.layers == 8 and asked.analytic; "
        "assert 'torch' not in sys.modules and 'numba' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_public_face_is_sorted_and_there():
    names = penstock.__all__
    assert names == sorted(
        names, key=lambda n: (0 if n.isupper() else 1 if n[0].isupper() else 2, n)
    )
    assert all(hasattr(penstock, name) for name in names)
