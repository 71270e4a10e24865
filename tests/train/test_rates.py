"""The course of the learning rate: those of torch's own schedulers, and the user's own function."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, SequentialLR

from penstock.config import PRESETS, OptimizerConfig
from penstock.errors import ConfigError
from penstock.formats.config_toml import dump_config, load_config, with_absolute_paths
from penstock.models import LlamaConfig
from penstock.train.before.start import find_run
from penstock.train.hub import write_model
from penstock.train.optimizer import describe_rate, factor_at, rate_at
from penstock.train.weights import hold_whole

WARMUP = 4
STEPS = 14


def torch_rates(after) -> list[float]:
    """The rates of torch's schedulers: a linear warm-up, then `after`."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=2.0)
    rise = LinearLR(optimizer, 1 / WARMUP, 1.0, WARMUP - 1)
    course = SequentialLR(optimizer, [rise, after(optimizer)], [WARMUP])
    rates = []
    for _ in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        course.step()
    return rates


def wsd(step: int) -> float:
    """Called with the steps after the warm-up: constant until 7 of 14 are left."""
    return min(1.0, (STEPS - WARMUP - step) / 7)


@pytest.mark.filterwarnings("ignore:.*epoch parameter in `scheduler.step")
@pytest.mark.parametrize(
    ("name", "after"),
    [
        ("constant", lambda o: LambdaLR(o, lambda step: 1.0)),
        ("linear:min=0.25", lambda o: LinearLR(o, 1.0, 0.25, STEPS - WARMUP)),
        ("cosine:min=0.25", lambda o: CosineAnnealingLR(o, STEPS - WARMUP, 2.0 * 0.25)),
        ("wsd:0.5,min=0", lambda o: LambdaLR(o, wsd)),
        (
            "inverse_sqrt:min=0",
            lambda o: LambdaLR(o, lambda step: math.sqrt(WARMUP / (WARMUP + step + 1))),
        ),
    ],
    ids=["constant", "linear", "cosine", "wsd", "inverse_sqrt"],
)
def test_a_named_schedule_has_the_rates_of_torch(name, after):
    settings = OptimizerConfig(lr=2.0, lr_schedule=name, warmup_steps=WARMUP)
    ours = [rate_at(step, STEPS, settings) for step in range(STEPS)]
    assert ours == pytest.approx(torch_rates(after))


def test_a_function_of_ones_own_gives_the_factor(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("saws.py").write_text("def saw(step):\n    return 1 - step % 3 / 4\n")
    config = load_config("", changes=["optimizer.lr_schedule=saws.py:saw"])
    settings = with_absolute_paths(config).optimizer
    monkeypatch.chdir("/")  # as a resumed run may
    assert [factor_at(step, 99, settings) for step in (19, 21, 23)] == [1.0, 1.0, 0.5]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module_here:saw", "cannot be imported"),
        ("saws.py:no", "has no 'no'"),
        ("saws.py:below", "returned -1 for step 30"),
        ("saws.py:number", "is a int, not a function"),
    ],
)
def test_a_function_that_gives_no_factor_is_refused(
    name, message, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("saws.py").write_text("number = 1\ndef below(step):\n    return -1\n")
    settings = OptimizerConfig(lr_schedule=name)
    with pytest.raises(ConfigError, match=message):
        factor_at(30, 99, settings)


# ---------------------------------------------------------------- the highest rate
@pytest.mark.parametrize(
    ("changes", "rate", "words"),
    [
        ([], 6e-4, "0.0006, as suits new weights"),
        (["model.path=hub/config.json"], 6e-4, "0.0006, as suits new weights"),
        (["model.path=hub"], 2e-5, "2e-05, as suits weights that are trained"),
        (["model.path=hub", "lora.rank=4"], 1e-4, "0.0001, as suits adapters"),
        (
            ["model.path=hub", "optimizer.lr=0.003"],
            3e-3,
            "0.003, as optimizer.lr says; 2e-05 suits weights",
        ),
    ],
)
@pytest.mark.parametrize("source", ["preset", "file of init"])
def test_the_highest_rate_suits_what_is_trained_unless_it_is_set(
    source, changes, rate, words, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    sizes = LlamaConfig(256, 32, 3, 4, 2, 48)
    weights = {n: p.detach() for n, p in hold_whole(sizes).parameters.items()}
    Path("hub").mkdir()
    write_model(Path("hub"), weights, sizes)
    file, name = None, "llama-150m"
    if source == "file of init":
        file, name = Path("config.toml"), None
        file.write_text(dump_config(PRESETS["llama-150m"]))
    config, _ = find_run(file, name, changes, exists=False)
    assert config.optimizer.lr == rate
    assert rate_at(config.optimizer.warmup_steps, 10_000, config.optimizer) == rate
    assert describe_rate(config).startswith(words)
    # The folder of the run keeps it, so that a run that is resumed goes on with it.
    kept = load_config(dump_config(config))
    assert kept.optimizer.lr == rate
