"""`penstock train` runs planned paths as they are: their layers, nodes and full steps, in real processes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from commands import SMALL_CONFIG, called, environment
from forked import Command
from penstock.cost import Cluster, Node
from penstock.formats import read_plan, write_plan
from penstock.plan.paths import even_parts, paths_plan, plan_paths, replan
from penstock.plan.paths.rules import Rules
from penstock.train.history import FULL_TIMELINE, TIMELINE, read_rows

PLANNED = "train config.toml --set schedule.name=paths.json --sample 0"


@pytest.fixture
def text(tmp_path):
    """Return a folder with some text, a config and a plan of paths for five nodes."""
    lines = [f"the {n % 7} cats sat on {n % 5} mats\n" for n in range(2000)]
    (tmp_path / "text.txt").write_text("".join(lines))
    config = SMALL_CONFIG.replace("[data]", '[data]\nsources = ["text.txt"]')
    (tmp_path / "config.toml").write_text(config.replace("steps = 12", "steps = 6"))
    return tmp_path


def planned(rules: Rules = Rules(share=1 / 3, full=4)):  # noqa: B008
    """A plan for five nodes: two data nodes, and one or two of each other part."""
    nodes = tuple(Node(slots=4) for _ in range(5))
    cluster = Cluster(nodes, latency=0.01)
    return plan_paths(cluster, even_parts(3, 0.1), 2, rules, iterations=200)


def run(folder: Path, line: str) -> tuple[str, str]:
    process = Command(folder, line.split(), environment(), strict=True)
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out, err
