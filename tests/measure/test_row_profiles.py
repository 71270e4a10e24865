"""Profiles for several numbers of rows of a micro-batch, and quick measurements."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace

import pytest
import torch

from commands import called
from penstock.config import Config
from penstock.cost import CorrectedCurve, Profile, RowProfiles, Seconds
from penstock.cost.profile import Point, block
from penstock.errors import FileError, ShapeError
from penstock.formats import (
    dump_profile,
    dump_row_profiles,
    load_row_profiles,
    read_profile,
    read_row_profiles,
)
from penstock.formats.config_toml import preset
from penstock.ir import Op
from penstock.measure.probe import Probe, Subject
from penstock.measure.profile import measuring_points, quick_points
from penstock.train.before.profile import affordable, request_of
from penstock.train.placement import decide_placement

TOKENS = 64
OPS = (Op.F, Op.B, Op.I, Op.W)
SIZES = {"held": 100.0, "kept": 80.0, "weights": 5e6, "update": 1e-3}


def seconds_of(rows: int, tokens: int, prefix: int, op: Op) -> float:
    """Times with a step, so that the fit is a table."""
    tiles = -(-tokens // 24)
    work = rows * (40 * tiles + tokens * prefix / 64)
    return (5 + work) * (1 + OPS.index(op)) * 1e-5


def made_block(rows: int, prefixes: bool):
    fitted, held_out = measuring_points(TOKENS, prefixes)
    points = [
        Point(
            tokens,
            prefix,
            *(seconds_of(rows, tokens, prefix, op) for op in OPS),
            held_out=(tokens, prefix) in held_out,
        )
        for tokens, prefix in [*fitted, *held_out]
    ]
    sizes = {**SIZES, "held": rows * 100.0, "kept": rows * 80.0}
    return block(points, **sizes)


def made_profile(rows: int, tokens: int = TOKENS) -> Profile:
    return Profile(
        4,
        tokens,
        rows,
        rows * 256.0,
        embed=made_block(rows, False),
        layer=made_block(rows, True),
        head=made_block(rows, False),
        model=(("family", "llama"),),
        device=(("device", "cpu"),),
        turn=1e-4 * rows,
        switch=0.1 * rows,
    )


PROFILES = RowProfiles((made_profile(1), made_profile(2), made_profile(6)))


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    return lambda line: called(monkeypatch, capsys, line)


# ---------------------------------------------------------------- other numbers of rows
def test_a_measured_number_of_rows_is_returned_as_it_was_measured():
    assert PROFILES.rows == (1, 2, 6)
    for profile in PROFILES.measured:
        assert PROFILES.at(profile.rows) is profile


@pytest.mark.parametrize("op", OPS)
def test_between_two_measurements_every_curve_is_linear_in_the_rows(op):
    assert isinstance(PROFILES.measured[1].layer.F.curve, CorrectedCurve)
    fewer, more = PROFILES.at(2), PROFILES.at(6)
    between = PROFILES.at(3)
    assert between.rows == 3
    for name in ("embed", "layer", "head"):
        curves = [getattr(each, name).fit(op).curve for each in (fewer, between, more)]
        for tokens, prefix in ((64, 0), (7, 0), (7, 31), (48, 16)):
            low, middle, high = (curve.of(tokens, prefix) for curve in curves)
            assert middle == pytest.approx(0.75 * low + 0.25 * high)
    assert between.message == 3 * 256.0
    assert between.layer.held == 300.0
    assert between.layer.weights == SIZES["weights"]
    assert between.layer.update == pytest.approx(SIZES["update"])
    assert between.turn == pytest.approx(3e-4)
    assert between.switch == pytest.approx(0.3)
    point = between.layer.points[5]
    assert pytest.approx(seconds_of(3, point.tokens, point.prefix, Op.F)) == point.F


def test_beyond_the_measurements_the_nearest_one_is_scaled():
    larger = PROFILES.at(24)
    assert larger.rows == 24
    assert larger.message == 24 * 256.0
    assert larger.layer.weights == SIZES["weights"]
    for op in OPS:
        nearest = PROFILES.at(6).layer.fit(op).curve
        assert larger.layer.fit(op).curve.of(20, 30) == pytest.approx(
            4 * nearest.of(20, 30)
        )
    only_four = RowProfiles((made_profile(4),))
    assert only_four.at(1).layer.held == 100.0
    assert larger.cost((2, 2)).parts[0].F.of(64, 0) > PROFILES.at(6).cost((2, 2)).parts[
        0
    ].F.of(64, 0)


def test_a_scaled_formula_stays_a_formula():
    plain = replace(made_profile(2), layer=block([Point(8, 0, *[1.0] * 4)]))
    found = RowProfiles((plain,)).at(4).layer.F.curve
    assert isinstance(found, Seconds)


def test_profiles_that_do_not_belong_together_are_refused():
    with pytest.raises(ShapeError, match="at least one profile"):
        RowProfiles(())
    with pytest.raises(ShapeError, match=r"\[2, 2\] rows"):
        RowProfiles((made_profile(2), made_profile(2)))
    with pytest.raises(ShapeError, match="one model and one length"):
        RowProfiles((made_profile(1), made_profile(2, tokens=32)))
    with pytest.raises(ShapeError, match="at least 1 row, not 0"):
        PROFILES.at(0)


# ---------------------------------------------------------------- the file
def test_profiles_of_several_rows_come_back_from_their_file(tmp_path):
    text = dump_row_profiles(PROFILES)
    assert load_row_profiles(text) == PROFILES
    (tmp_path / "p.json").write_text(text)
    assert read_profile(tmp_path / "p.json") == PROFILES.measured[0]


def test_a_file_of_one_number_of_rows_is_read_as_before():
    text = dump_profile(made_profile(2))
    assert "larger" not in json.loads(text)
    assert load_row_profiles(text) == RowProfiles((made_profile(2),))


def test_rows_out_of_order_are_one_error_at_their_place():
    text = dump_row_profiles(PROFILES)
    broken = text.replace('"rows": 6', '"rows": 2')
    with pytest.raises(FileError, match=r"\[1, 2, 2\] rows"):
        load_row_profiles(broken)
    missing = re.sub(r'"message": 512.0, "turn"', '"turn"', text)
    with pytest.raises(FileError, match="message"):
        load_row_profiles(missing)


# ---------------------------------------------------------------- measuring
CONFIG = """
[model]
layers = 3
hidden_size = 32
heads = 4
kv_heads = 2
intermediate_size = 48
[data]
seq_len = 16
global_batch = 8
[schedule]
microbatches = 2
[parallel]
pp = 2
[run]
device = "cpu"
"""


def test_profile_measures_the_model_of_a_config_with_several_rows(run, tmp_path):
    (tmp_path / "c.toml").write_text(CONFIG)
    line = "profile c.toml --set data.seq_len=32 --rows 2,1 --ranks 1 --quick -o p.json --json"
    code, out, err = run(line)
    assert code == 0, err
    answer = json.loads(out)
    assert [each["rows"] for each in answer["rows"]] == [1, 2]
    found = read_row_profiles("p.json")
    assert (found.rows, found.tokens, found.layers) == ((1, 2), 32, 3)
    assert answer["worst_error"] == found.worst_error
    one, two = found.measured
    assert dict(one.model)["kv_heads"] == 2
    assert dict(one.device)["threads"] == 1
    for each in (one, two):
        fitted, held_out = quick_points(32)
        assert {(p.tokens, p.prefix) for p in each.layer.points if not p.held_out} == (
            set(fitted)
        )
        assert sum(p.held_out for p in each.layer.points) == len(held_out) > 0
    assert two.layer.held == pytest.approx(2 * one.layer.held, rel=0.05)
    assert two.layer.weights == one.layer.weights
    assert two.message == 2 * one.message


def test_a_config_brings_its_own_rows_precision_and_documents():
    config = preset("tiny")
    config = replace(
        config,
        data=replace(config.data, document_mask=True),
        schedule=replace(config.schedule, microbatches=8),
        run=replace(config.run, precision="bfloat16", device="cpu"),
    )
    placement = decide_placement(config, 4)
    request = request_of(config, placement, quick=True)
    assert (request.tokens, request.rows) == (128, 2)
    assert (request.autocast, request.separate, request.quick) == (
        "bfloat16",
        True,
        True,
    )
    assert request_of(config, placement, 5).rows == 5


def test_a_quick_measurement_leaves_out_what_takes_too_long():
    config = Config()
    placement = decide_placement(replace_device(config), 4)
    small = request_of(replace_device(config), placement, quick=True)
    assert affordable(small, [1, 2, 4]) == (small, [1, 2, 4])
    assert affordable(small, [1, 1_000_000])[1] == [1]
    large = request_of(replace_device(preset("llama-1b")), placement, quick=True)
    request, rows = affordable(large, [1, 2, 4])
    assert rows == [1]
    assert request.tokens < large.tokens
    assert large.tokens % request.tokens == 0


def replace_device(config: Config) -> Config:
    return replace(config, run=replace(config.run, device="cpu"))


@pytest.mark.parametrize("tokens", [16, 32, 100, 1000, 4096])
@pytest.mark.parametrize("tile", [1, 128])
def test_quick_points_are_few_and_have_the_whole_sequence_and_slices(tokens, tile):
    fitted, held_out = quick_points(tokens, True, tile)
    assert (tokens, 0) in fitted
    assert not set(fitted) & set(held_out)
    assert len(fitted) + len(held_out) <= 9
    assert all(length + prefix <= tokens for length, prefix in [*fitted, *held_out])
    if tile == 1:
        assert any(length + prefix == tokens > length for length, prefix in fitted)
        assert held_out


MISTAKES = {
    "profile --set data.seq_len=32": "name a model",
    "profile tiny --rows 0": "--rows must be at least 1",
    "profile tiny --rows 1,x": "several numbers such as 1,2,4, not 1,x",
    "profile missing.toml": "missing.toml",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_message(run, tmp_path, line):
    (tmp_path / "c.toml").write_text(CONFIG)
    code, out, err = run(line)
    assert (code, out) == (2, "")
    assert MISTAKES[line] in " ".join(err.split())
    assert "Traceback" not in err


def test_a_busy_machine_slows_all_points_alike_and_not_the_one_it_hits():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        probe = Probe(Subject(torch.nn.Linear(4, 4), torch.randn(1, 16, 4)))
        if not probe.by_thread:
            pytest.skip("this system has no fine clock of a thread's processor time")
        assert probe.clock(lambda: time.sleep(0.05)) < 0.05
        assert probe.load > 1.0
        assert probe.elapsed_seconds >= 0.05
    finally:
        torch.set_num_threads(threads)
