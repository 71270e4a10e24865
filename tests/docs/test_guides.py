"""The guides work as they stand: their commands are run, their output and every error message compared."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from itertools import takewhile
from pathlib import Path

import pytest
from test_docs import BLOCK, GUIDES, ROOT, arguments, blocks, named, shortened

import penstock
from commands import SMALL_CONFIG, called, torchrun
from forked import Command

TROUBLE = ROOT / "docs" / "guides" / "troubleshooting.md"
# The messages of all mistakes; the guide shows those that users meet most.
MISTAKES = ROOT / "tests" / "docs" / "mistakes.txt"
COMMAND = re.compile(
    r"^(?:penstock [a-z]|torchrun |python \S+\.py)(?:.*\\\n)*.*$"
    r"|^python - <<'EOF'\n(?s:.*?)^EOF$",
    re.M,
)
Shown = list[tuple[str, list[str]]]  # a command, and the lines after it


def shown(block: str) -> Shown:
    """Of a console block, every command with its output."""
    lines, found = block.splitlines(), []
    for number, line in enumerate(lines):
        if line.startswith("$ "):
            output = takewhile(
                lambda other: not other.startswith("$ "), lines[number + 1 :]
            )
            found.append((line[2:], [one.rstrip() for one in output]))
    return found


@pytest.fixture
def shell(tmp_path, monkeypatch, capsys):
    """Runs a script in a folder with the examples, as from a checkout.

    `penstock` itself runs in this process, torchrun and scripts in Python in a fork.
    """
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    for name, value in {
        "PYTHONPATH": str(Path(penstock.__file__).parents[1]),
        "COLUMNS": "100",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }.items():
        monkeypatch.setenv(name, value)

    def others(script: str) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            capture_output=True,
            encoding="utf-8",
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
        return done.stdout

    def ours(line: str) -> str:
        if line.startswith("torchrun "):
            words = shlex.split(shortened(line.replace("\\\n", " ")))[1:]
            process = torchrun(tmp_path, words, os.environ)
            out, err = process.communicate()
            code = process.returncode
        elif line.startswith("python "):
            first, *typed = line.splitlines()
            script, *words = shlex.split(first)[1:]
            if typed:  # up to EOF
                script, words = "typed.py", []
                Path(script).write_text("\n".join(typed[:-1]))
            file = tmp_path / script
            process = Command(tmp_path, words, os.environ, script=file)
            out, err = process.communicate()
            code = process.returncode
        else:
            code, out, err = called(monkeypatch, capsys, arguments(line))
        assert code == 0, f"{line}\n{out}{err}"
        return out

    def run(script: str) -> str:
        commands, between = COMMAND.findall(script), COMMAND.split(script)
        outputs = []
        for place, text in enumerate(between):
            outputs += [others(text)] if text.strip() else []
            outputs += [ours(commands[place])] if place < len(commands) else []
        return "".join(outputs)

    return run


@pytest.mark.parametrize(
    "page", [page for page in GUIDES if page != TROUBLE], ids=named
)
def test_the_commands_of_a_guide_run_in_order_and_print_what_is_shown(page, shell):
    for _, language, text in BLOCK.findall(page.read_text(encoding="utf-8")):
        if language == "sh":
            shell(text)
        for command, output in shown(text) if language == "console" else []:
            assert [line.rstrip() for line in shell(command).splitlines()] == output, (
                command
            )


def test_the_ten_lines_of_the_guide_are_those_of_the_example():
    lines = blocks(ROOT / "docs" / "guides" / "own_schedule.md", "python")[0]
    assert lines in (ROOT / "examples" / "own_schedule.py").read_text(encoding="utf-8")
    assert len(lines.splitlines()) <= 12


# ---------------------------------------------------------------- mistakes
def test_the_guide_shows_messages_as_they_are():
    def pairs(page: Path) -> list[tuple[str, list[str]]]:
        return [
            (line, [one for one in message if one])
            for block in blocks(page, "console")
            for line, message in shown(block)
        ]

    known = pairs(MISTAKES)
    assert [pair for pair in pairs(TROUBLE) if pair not in known] == []


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """A folder with a config, text, and what can be wrong."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(
        "".join(f"the {n % 7} cats sat on {n % 5} mats\n" for n in range(500))
    )
    Path("config.toml").write_text(
        SMALL_CONFIG.replace("[data]", '[data]\nsources = ["text.txt"]')
    )
    Path("wrong-type.toml").write_text('[data]\nseq_len = "64"\n')
    Path("no-toml.toml").write_text("[model\nlayers = 4\n")
    Path("short.txt").write_text("too few tokens")
    Path("lines.jsonl").write_text('{"text": "one"}\n{"body": "two"}\n')
    Path("odd.jsonl").write_text('{"text": 3}\n')
    Path("empty").mkdir()
    Path("full").mkdir()
    Path("full/1f1b.svg").symlink_to("/dev/full")
    sizes = {
        "model_type": "llama",
        "vocab_size": 100,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "rms_norm_eps": 1e-5,
        "num_attention_heads": 4,
        "intermediate_size": 64,
    }
    for folder, vocab in (("small-llama", 100), ("pickled", 256)):
        Path(folder).mkdir()
        Path(folder, "config.json").write_text(
            json.dumps(sizes | {"vocab_size": vocab})
        )
    saved = Path("done/checkpoints/step-00000003")
    saved.mkdir(parents=True)
    note = {
        "penstock": "checkpoint",
        "version": 1,
        "step": 3,
        "files": {"model.safetensors": {"bytes": 1, "crc32": 0}},
    }
    (saved / "checkpoint.json").write_text(json.dumps(note))
    Path("cut-off.json").write_text(
        '{"penstock": "plan", "version": 1,\n "stages": [[0, 0]'
    )
    return tmp_path


@pytest.mark.parametrize(
    ("line", "message"),
    [pair for block in blocks(MISTAKES, "console") for pair in shown(block)],
    ids=lambda value: (
        re.sub(r"penstock |config.toml |--set ", "", value)
        if isinstance(value, str)
        else ""
    ),
)
def test_a_mistake_gives_its_message(line, message, broken, monkeypatch, capsys):
    code, out, err = called(monkeypatch, capsys, line.removeprefix("penstock "))
    assert code == 2, out + err
    assert [one.rstrip() for one in err.splitlines() if one.strip()] == [
        one for one in message if one
    ]
    assert not list(broken.glob("runs/*/metrics.jsonl"))
