"""A wheel that pip builds and installs into an empty environment, without `make`, has all that the package needs."""

from __future__ import annotations

import email
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from itertools import chain
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

import penstock

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "README.md", "LICENSE")


def run(*words: object, cwd: Path, **more: str) -> str:
    """Run a command outside of the checkout, without its path; return stdout."""
    names = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    env = {key: value for key, value in os.environ.items() if key not in names}
    done = subprocess.run(
        list(map(str, words)),
        cwd=cwd,
        env=env | more,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built from a copy, as pip's build backend builds it."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(
        Path(penstock.__file__).parent,
        folder / "src" / "penstock",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    for name in SOURCES:
        shutil.copy(ROOT / name, folder)
    build = "from setuptools.build_meta import build_wheel; build_wheel('.')"
    run(sys.executable, "-c", build, cwd=folder)
    return next(folder.glob("*.whl"))


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    source = wheel.parent / "src"
    files = {
        path.relative_to(source).as_posix()
        for path in (source / "penstock").rglob("*")
        if path.is_file()
    }
    assert {"penstock/view/page.js", "penstock/view/page.css"} <= files
    assert files <= set(ZipFile(wheel).namelist())


def test_the_wheel_says_what_it_is_and_needs_no_torch(wheel: Path) -> None:
    archive = ZipFile(wheel)
    (name,) = [one for one in archive.namelist() if one.endswith("/METADATA")]
    about = email.message_from_bytes(archive.read(name))
    assert about["Author"] == "The Penstock authors"
    assert about["License-Expression"] == "Apache-2.0"
    assert "Typing :: Typed" in about.get_all("Classifier")
    assert about.get_payload().startswith("# Penstock")
    needed = [Requirement(text) for text in about.get_all("Requires-Dist")]
    plain = {one.name for one in needed if one.marker is None}
    assert plain == {"numpy", "numba", "rich", "typer"}
    extras = {"torch", "hf", "lora", "ray", "titan", "tensorboard", "wandb"}
    assert extras <= set(about.get_all("Provides-Extra"))


def test_the_installed_wheel_runs_in_an_environment_of_its_own(
    wheel: Path, tmp_path: Path
) -> None:
    pytest.importorskip("pip")
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    run(
        *(sys.executable, "-m", "pip", "--python", python, "install", "--quiet"),
        *("--no-deps", "--no-index", "--disable-pip-version-check", wheel),
        cwd=tmp_path,
    )
    # The packages that Penstock depends on are those of this interpreter.
    packages = sysconfig.get_path("purelib", vars={"base": str(tmp_path / "env")})
    (Path(packages) / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    command = tmp_path / "env" / "bin" / "penstock"
    assert run(command, "--version", cwd=tmp_path).strip() == (
        f"penstock {wheel.name.split('-')[1]}"
    )
    shape = ("1f1b", "--pp", "2", "--microbatches", "2")
    run(command, "draw", *shape, "-o", "page.html", cwd=tmp_path)
    script = (Path(penstock.__file__).parent / "view" / "page.js").read_text()
    assert script.strip()[:200] in (tmp_path / "page.html").read_text()
    where = "import json, penstock; print(json.dumps([penstock.__file__, penstock.__version__]))"
    file, version = json.loads(run(python, "-c", where, cwd=tmp_path))
    assert Path(file).is_relative_to(tmp_path / "env")
    assert version == wheel.name.split("-")[1]


def test_the_tested_versions_are_among_those_that_the_package_allows():
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    extras = project["optional-dependencies"].values()
    allowed = [Requirement(text) for text in chain(project["dependencies"], *extras)]
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        name, _, version = line.partition("==")
        ranges = [one.specifier for one in allowed if one.name == name]
        assert all(one.contains(version) for one in ranges), line
