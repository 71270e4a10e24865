"""Dropout drops the same numbers for every schedule, and it drops as many as it should."""

from __future__ import annotations

import pytest
import torch

from penstock.errors import ConfigError, ShapeError
from penstock.formats.config_toml import load_config
from penstock.models.layer import Dropout, dropping, place_at
from penstock.train.before.start import check_training
from penstock.train.job import model_sizes
from trainings import apart, job_of, losses, train

pytestmark = pytest.mark.numerics

DROPS = (
    *("model.dropout=0.3", "run.steps=2", "optimizer.warmup_steps=0"),
    "run.checks=forecast,memory",
)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory) -> list[float]:
    folder = tmp_path_factory.mktemp("alone")
    return losses(train(job_of(folder, "1f1b", *DROPS, ranks=1, microbatches=1)))


@pytest.mark.parametrize(
    ("name", "changes", "shape"),
    [
        ("hanayo", ("run.recompute=full",), {"waves": 1}),
        ("zb-h1", ("run.accumulate=2",), {"microbatches": 2}),
        ("seq1f1b", ("run.recompute=full",), {"slices": 4}),
    ],
    ids=["recomputed", "accumulated", "sliced"],
)
def test_every_schedule_drops_the_same_numbers(
    name, changes, shape, one_process, tmp_path
):
    rows = train(job_of(tmp_path, name, *DROPS, *changes, **shape))
    assert apart(rows, one_process) < 1e-5


def test_a_resumed_run_drops_what_it_would_have_dropped(one_process, tmp_path):
    constant = ("optimizer.lr_schedule=constant",)
    whole = losses(train(job_of(tmp_path / "a", "1f1b", *DROPS, *constant)))
    train(job_of(tmp_path / "b", "1f1b", *DROPS, *constant, "run.steps=1"))
    again = job_of(tmp_path / "b", "gpipe", *DROPS, *constant, resume=True, ranks=1)
    assert apart(train(again), whole) < 1e-5
    assert whole[0] == pytest.approx(one_process[0], abs=1e-6)
    plain = losses(train(job_of(tmp_path / "c", "1f1b", *DROPS, "model.dropout=0")))
    assert abs(plain[0] - whole[0]) > 1e-4


def test_it_drops_its_share_and_keeps_the_mean():
    dropout = Dropout("here", 0.25)
    x = torch.ones(8, 64, 96)
    assert torch.equal(dropout(x), x)  # outside of a step
    with dropping(seed=1, step=5):
        y = dropout(x)
        again = dropout(x)
        place_at(row=3, token=16)
        piece = dropout(x[3:, 16:])
        other = Dropout("there", 0.25)(x)
    with dropping(seed=1, step=6):
        later = dropout(x)
    with dropping(seed=1, step=5, first_row=8):
        further = dropout(x)
    dropped = y == 0
    assert torch.equal(y, again)
    assert torch.equal(piece, y[3:, 16:])
    assert torch.equal(y[~dropped], torch.full_like(y[~dropped], 1 / 0.75))
    # Five standard deviations of a binomial distribution.
    count = dropped.numel()
    noise = 5 * (0.25 * 0.75 / count) ** 0.5
    assert abs(float(dropped.double().mean()) - 0.25) < noise
    for far in (later, further, other):
        both = float((dropped & (far == 0)).double().mean())
        assert abs(both - 0.25**2) < noise  # independent of each other
    for dim in (0, 1, 2):  # neighbors are independent, too
        pair = dropped.narrow(dim, 1, y.shape[dim] - 1)
        first = dropped.narrow(dim, 0, y.shape[dim] - 1)
        assert abs(float((pair & first).double().mean()) - 0.25**2) < noise


def test_models_without_such_modules_are_refused():
    config = load_config("", changes=["model.family=bert", "model.dropout=0.1"])
    with pytest.raises(ConfigError, match="is for our own llama and gpt"):
        check_training(config, model_sizes(config))
    with dropping(0, 0), pytest.raises(ShapeError, match="rows, tokens and features"):
        Dropout("here", 0.5)(torch.ones(2, 3))
    with pytest.raises(
        ConfigError, match=r"run\.compile = true does not go with dropout"
    ):
        load_config("", changes=["model.dropout=0.1", "run.compile=true"])
