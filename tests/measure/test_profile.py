"""Measuring a model, fitting curves to it, keeping them in a file, and simulating by them."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

from hugging_face import decoder_sizes
from penstock import Network, Seconds, make, portfolio, simulate
from penstock.cost import CorrectedCurve, Profile, ProfileCost, RowProfiles
from penstock.cost.curve import Fit, fit_curve, fit_formula, least_squares
from penstock.cost.profile import Point, block
from penstock.errors import FileError, ShapeError
from penstock.formats import (
    dump_profile,
    load_profile,
    read_plan,
    read_profile,
    write_profile,
)
from penstock.ir import Action, MicroBatch, Op, stretch
from penstock.measure.probe import Probe, Subject
from penstock.measure.profile import measuring_points
from penstock.models import Llama, LlamaConfig, split, token_loss
from penstock.partition import even_partition
from penstock.schedules.transforms import slice_tokens
from penstock.train.before.profile import (
    ProfileRequest,
    subjects_of,
)
from penstock.view.numbers import write_time

LAYER = {
    Op.F: Seconds(1e-3, 2e-5, 3e-7, 2e-8),
    Op.B: Seconds(2e-3, 4e-5, 9e-7, 4e-8),
    Op.I: Seconds(1e-3, 2.5e-5, 8e-7, 4e-8),
    Op.W: Seconds(1e-3, 1.5e-5),
}


def noisy(curve, where, rng, spread=0.02):
    return [
        (i, j, curve.of(i, j) * (1 + spread * (2 * rng.random() - 1))) for i, j in where
    ]


def points(curves, tokens=1024, prefixes=True, spread=0.0, seed=0):
    rng = np.random.default_rng(seed)
    seen, unseen = measuring_points(tokens, prefixes)
    return [
        Point(
            i,
            j,
            *(curves[op].of(i, j) * (1 + spread * rng.normal()) for op in LAYER),
            held_out=(i, j) in unseen,
        )
        for i, j in [*seen, *unseen]
    ]


def flat(factor):
    """What depends on the tokens of a slice alone."""
    return {
        op: Seconds(factor * curve.base, factor * curve.token)
        for op, curve in LAYER.items()
    }


def profile(layers=8, network=Network(1e-4, 1e9, serial=True), tokens=1024) -> Profile:  # noqa: B008  # frozen
    return Profile(
        layers,
        tokens,
        1,
        2048.0,
        embed=block(points(flat(0.5), tokens, False), 8.0, 0.0, 5e6, 1e-3),
        layer=block(points(LAYER, tokens), 20_000.0, 16_000.0, 12e6, 2e-3),
        head=block(points(flat(3.0), tokens, False), 9_000.0, 7_000.0, 6e6, 1.5e-3),
        network=network,
        model=(("family", "llama"), ("width", 256)),
        device=(("device", "cpu"), ("autocast", None)),
    )


# ---------------------------------------------------------------- points
@pytest.mark.parametrize("tokens", [16, 17, 100, 512, 1000, 1024, 4096, 131_072])
def test_points_lie_in_the_sequence_and_held_out_points_are_not_fitted(tokens):
    fitted, held_out = measuring_points(tokens)
    assert all(i >= 1 and j >= 0 and i + j <= tokens for i, j in [*fitted, *held_out])
    assert len({*fitted, *held_out}) == len(fitted) + len(held_out)
    assert (tokens, 0) in fitted
    assert held_out
    assert len(fitted) + len(held_out) <= 50
    assert any(i + j == tokens for i, j in fitted if j)
    whole, unseen = measuring_points(tokens, sliceable=False)
    assert all(j == 0 for _, j in [*whole, *unseen])


@pytest.mark.parametrize("tokens", [128, 200, 1024, 4096, 16_384, 131_072])
def test_points_of_a_gpu_lie_on_its_tiles(tokens):
    fitted, held_out = measuring_points(tokens, tile=128)
    for i, j in [*fitted, *held_out]:
        assert i % 128 == 0 or i == tokens
        assert j % 128 == 0 or i + j == tokens
    assert len({*fitted, *held_out}) == len(fitted) + len(held_out)
    assert (tokens, 0) in fitted
    assert bool(held_out) is (tokens >= 1024)


def test_too_short_a_sequence_is_refused():
    with pytest.raises(
        ShapeError, match="3 tokens are too few to measure slices of; use at least 16"
    ):
        measuring_points(3)


# ---------------------------------------------------------------- fits
@pytest.mark.parametrize("op", LAYER)
def test_the_fit_recovers_known_coefficients_from_noisy_points(op):
    rng, curve = np.random.default_rng(1), LAYER[op]
    seen, unseen = measuring_points(2048)
    found = fit_curve(noisy(curve, seen, rng), noisy(curve, unseen, rng))
    assert found.form == "formula"
    assert found.worst < 0.05
    for i, j in ((16, 0), (100, 1900), (700, 1000), (2000, 0)):
        assert found.curve.of(i, j) == pytest.approx(curve.of(i, j), rel=0.03)
    assert found.curve.token == pytest.approx(curve.token, rel=0.1)
    assert found.curve.pair == pytest.approx(curve.pair, rel=0.15, abs=1e-9)


def test_coefficients_are_not_negative_and_the_best_possible():
    rng = np.random.default_rng(2)
    for _ in range(50):
        a, b = rng.normal(size=(9, 4)), rng.normal(size=9)
        x = least_squares(a, b)
        assert (x >= 0).all()
        # The sum of squares cannot fall, except where a coefficient would become negative.
        slope = a.T @ (a @ x - b)
        assert (np.abs(slope[x > 0]) < 1e-9).all()
        assert (slope[x == 0] > -1e-9).all()


def stepped(i, j):
    """A kernel that works in tiles of 128 rows, and without a mask when there is no prefix."""
    return (1e-3 + 4e-5 * 128 * math.ceil(i / 128)) * (1.0 if j == 0 else 1.6)


def test_a_table_treats_the_whole_sequence_separately():
    """It goes without a piece: nothing is kept for later slices."""
    lengths = (128, 256, 512, 1024)
    seen = [
        (i, j, 1e-6 * i * (1.3 if j else 1.0))
        for i in lengths
        for j in (0, 512)
        if i + j <= 1024
    ]
    seen = [(i, j, 0.5 * s if i == 1024 else s) for i, j, s in seen]
    table = CorrectedCurve(fit_formula(seen), tuple(seen))
    for i, j, seconds in seen:
        assert table.of(i, j) == pytest.approx(seconds)
    plain = CorrectedCurve(table.formula, tuple(one for one in seen if one[0] < 1024))
    assert table.of(896, 0) / table.of(512, 0) == pytest.approx(
        plain.formula.of(896, 0) / plain.formula.of(512, 0)
    )


def test_stepped_times_choose_a_table_of_what_was_measured():
    lengths = (64, 128, 192, 256, 384, 512, 640, 1024)
    seen = [
        (i, j, stepped(i, j)) for i in lengths for j in (0, 100, 512) if i + j <= 1024
    ]
    unseen = [
        (i, j, stepped(i, j))
        for i in (96, 224, 352, 500, 600)
        for j in (0, 300)
        if i + j <= 1024
    ]
    found = fit_curve(seen, unseen)
    assert found.form == "table"
    assert isinstance(found.curve, CorrectedCurve)
    for i, j, seconds in seen:
        assert found.curve.of(i, j) == pytest.approx(seconds)
    plain = fit_formula(seen)
    errors = [
        [abs(curve.of(i, j) / s - 1) for i, j, s in unseen]
        for curve in (plain, found.curve)
    ]
    assert np.median(errors[1]) < np.median(errors[0])


def test_a_table_interpolates_and_extrapolates():
    formula = Seconds(1.0, 1.0)
    table = CorrectedCurve(
        formula,
        tuple(
            (i, j, 2.0 * formula.of(i, j))
            for i, j in ((8, 0), (32, 0), (8, 8), (32, 32))
        ),
    )
    for i, j in ((8, 0), (16, 0), (100, 0), (16, 16), (1000, 4000), (1, 1)):
        assert table.of(i, j) == pytest.approx(2.0 * formula.of(i, j))
    uneven = CorrectedCurve(
        formula, ((8, 0, formula.of(8, 0)), (32, 0, 3.0 * formula.of(32, 0)))
    )
    # Half way, by the logarithm.
    assert uneven.of(16, 0) == pytest.approx(2.0 * formula.of(16, 0))
    # No prefix was measured: none matters.
    assert uneven.of(16, 50) == pytest.approx(2.0 * formula.of(16, 50))


def test_errors_are_measured_on_held_out_points():
    curve = LAYER[Op.F]
    seen = [(i, 0, curve.of(i, 0)) for i in (16, 64, 256, 1024)]
    twice = [(100, 0, 2.0 * curve.of(100, 0)), (500, 0, curve.of(500, 0))]
    found = fit_curve(seen, twice)
    assert found.worst == pytest.approx(0.5, abs=1e-6)
    assert found.median == pytest.approx(0.25, abs=1e-6)
    # Nor did they pull at it.
    assert found.curve.of(100, 0) == pytest.approx(curve.of(100, 0), rel=1e-6)


def test_an_op_that_does_nothing_costs_nothing():
    idle = block([replace(point, W=0.0) for point in points(LAYER)])
    assert idle.W.curve == Seconds()


# ---------------------------------------------------------------- the cost of a partition
def test_the_cost_is_what_the_curves_say_with_embedding_first_and_head_last():
    known, schedule = profile(), make("seq1f1b", ranks=4, microbatches=2, slices=4)
    cost = known.cost((3, 2, 2, 1), tokens=1024)
    ends = {0: flat(0.5), 3: flat(3.0)}
    for part, layers in enumerate((3, 2, 2, 1)):
        for op in (Op.F, Op.B, Op.I, Op.W):
            for piece in range(4):
                expected = layers * LAYER[op].of(256, 256 * piece)
                expected += ends[part][op].of(256, 0) if part in ends else 0.0
                assert cost.seconds(
                    schedule, Action(op, part, 0, piece)
                ) == pytest.approx(expected, rel=1e-6)
        first = Action(Op.F, part, 0, 0)
        held = (
            20_000 * layers
            + (8.0 if part == 0 else 0.0)
            + (9_000.0 if part == 3 else 2048.0)
        )
        assert cost.bytes(schedule, first).held == pytest.approx(256 * held)
        assert cost.message(schedule, first) == 256 * 2048
    assert [cost.weights(schedule, stage).weights for stage in range(4)] == [
        41e6,
        24e6,
        24e6,
        18e6,
    ]
    assert known.update((3, 2, 2, 1)) == pytest.approx((7e-3, 4e-3, 4e-3, 3.5e-3))
    assert (cost.latency(0, 1), cost.bandwidth(0, 1), cost.network.serial) == (
        1e-4,
        1e9,
        True,
    )


def test_recomputing_keeps_only_the_input_and_repeats_the_forward():
    known, schedule = profile(), make("1f1b", ranks=2, microbatches=1)
    plain, again = (
        known.cost((4, 4), recompute=flag, tokens=1024) for flag in (False, True)
    )
    back, there = Action(Op.B, 0, 0), Action(Op.F, 0, 0)
    assert again.bytes(schedule, there).held == 1024 * 2048
    more = again.seconds(schedule, back) - plain.seconds(schedule, back)
    assert more == pytest.approx(plain.seconds(schedule, there))


def test_one_profile_costs_schedules_with_any_number_of_parts_and_all_do_the_same_work():
    cost = ProfileCost(profile())
    work = []
    for name, shape in (
        ("1f1b", {}),
        ("interleaved", {"chunks": 2}),
        ("hanayo", {"waves": 2}),
        ("zb-v", {}),
    ):
        schedule = make(name, ranks=2, microbatches=2, **shape)
        own = profile().cost(even_partition(8, schedule.parts), tokens=1024)
        assert simulate(schedule, cost).makespan == simulate(schedule, own).makespan
        if name != "zb-v":  # split: I and W together are not quite B
            work.append(float(simulate(schedule, cost).busy.sum()))
    assert work == pytest.approx([work[0]] * 3)


def test_cuts_are_shares_of_the_tokens():
    cost = ProfileCost(profile(), tokens=512)
    shares = make("terapipe", ranks=2, microbatches=1, slices=4)
    tokens = slice_tokens(
        make("gpipe", ranks=2, microbatches=1), (0, 128, 256, 384, 512)
    )
    assert (
        simulate(shares, cost).makespan
        == simulate(tokens, profile().cost((4, 4))).makespan
    )
    assert stretch(MicroBatch((0,), 4, (0, 1, 4)), 512).cuts == (0, 128, 512)
    with pytest.raises(ShapeError, match="cannot be cut into 4 slices"):
        simulate(
            make("terapipe", ranks=2, microbatches=1, slices=4),
            ProfileCost(profile(), tokens=2),
        )


def test_a_planner_ranks_schedules_with_different_parts_and_leaves_out_those_with_too_many():
    found = portfolio(2, 2, ProfileCost(profile(layers=4)), memory=1e9, slices=2)
    parts = {candidate.schedule.parts for candidate in found.candidates}
    assert {2, 4} <= parts
    assert max(parts) <= 4
    with pytest.raises(
        ShapeError, match="no schedule can be built: 4 layers cannot fill 8 parts"
    ):
        portfolio(8, 4, ProfileCost(profile(layers=4)))


def test_a_partition_or_links_that_do_not_fit_are_refused():
    with pytest.raises(
        ShapeError, match=r"the partition \(4, 3\) has 7 layers, but the model has 8"
    ):
        profile().cost((4, 3))
    matrix = Network(
        ((0.0, 1e-4), (1e-4, 0.0)), ((math.inf, 1e9), (1e9, math.inf)), serial=True
    )
    assert profile(network=matrix).cost((4, 4), ranks=2).bandwidth(1, 0) == 1e9
    with pytest.raises(
        ShapeError, match="the links of 2 ranks, but the schedule has 4 ranks"
    ):
        profile(network=matrix).cost((2, 2, 2, 2), ranks=4)


# ---------------------------------------------------------------- the file
MATRIX = Network(
    ((0.0, 1e-4), (2e-4, 0.0)), ((math.inf, 1e9), (2e9, math.inf)), serial=True
)


@pytest.mark.parametrize(
    "network",
    [Network(), Network(1e-4, 1e9, serial=True), MATRIX],
    ids=["none", "one", "pairs"],
)
def test_a_profile_comes_back_from_its_file(tmp_path, network):
    made = replace(
        profile(network=network), layer=block(points(LAYER, spread=0.1, seed=3))
    )
    write_profile(made, tmp_path / "p.json")
    assert read_profile(tmp_path / "p.json") == made
    tabled = replace(
        made,
        layer=block([replace(p, F=stepped(p.tokens, p.prefix)) for p in points(LAYER)]),
    )
    assert tabled.layer.F.form == "table"
    back = load_profile(dump_profile(tabled))
    assert back == tabled
    assert back.layer.F.curve.of(300, 77) == tabled.layer.F.curve.of(300, 77)


# What the file has | what is written there | what the error says | what it advises
BROKEN = r"""
"version": 1 | "version": 2 | p.json:3:14: this profile has version 2 | upgrade Penstock
"penstock": "profile" | "penstock": "plan" | its kind is "plan", not "profile" | give a profile.json
"layers": 8 | "layers": 0 | layers is out of range | write a number from 1
"layers": 8 | "layers": "8" | layers is "8", not a whole number | write a number
"layers": 8 | "lawyers": 8 | the profile has no key 'lawyers' | did you mean 'layers'?
"form": "formula" | "form": "spline" | blocks.embed.fits.F.form is "spline" | a "formula" or a "table"
"base":  | "base": - | blocks.embed.fits.F.base is out of range | from 0 to 1e+18
"held_out": true | "held_out": 1 | held_out is 1 | true or false
"tokens": 16, | "tokens": 16.5, | tokens is 16.5, not a whole number | write a number
"bandwidth": 1000000000.0 | "bandwidth": "fast" | network.bandwidth is "fast", not a number | from 0 to 1e+18
"bandwidth": 1000000000.0 | "bandwidth": [[1, 2], [3]] | the bandwidth matrix has 2 rows | a row of numbers
"serial": true | "serial": true, "sum_bandwidth": 0 | bandwidth of sums from rank 0 to rank 0 is 0 | a row of numbers
"message": 2048.0 | "message": HUGE | message is out of range | from 0 to 1e+18
"latency": 0.0001 | "latency": null | network.latency is null, not a number | from 0 to 1e+18
"serial": true}\n} | "serial": true | the file ends too early | write or copy it again
"""


@pytest.mark.parametrize("row", BROKEN.strip().splitlines())
def test_a_broken_profile_is_one_clear_error_at_its_place(tmp_path, row):
    row = row.replace("\\n", "\n").replace("HUGE", str(10**400))
    old, new, what, advice = row.split(" | ")
    text = dump_profile(profile())
    assert old in text
    (tmp_path / "p.json").write_text(text.replace(old, new, 1))
    with pytest.raises(FileError) as caught:
        read_profile(tmp_path / "p.json")
    assert what in str(caught.value)
    assert advice in str(caught.value)
    assert "^" in str(caught.value)


def test_neither_a_plan_nor_an_empty_file_is_a_profile(tmp_path):
    for text, what in (
        ("", "is empty"),
        ("[]", "this is not a Penstock profile"),
        ("{}", 'begins with {"penstock": "profile"'),
    ):
        (tmp_path / "p.json").write_text(text)
        with pytest.raises(FileError, match=what):
            read_profile(tmp_path / "p.json")
    with pytest.raises(FileError, match=r"name a profile\.json that exists"):
        read_profile(tmp_path / "none.json")


# ---------------------------------------------------------------- on the command line, without torch
@pytest.fixture
def run(run):
    """Run a command line in a folder with a profile."""
    write_profile(profile(), "p.json")
    return run


def test_simulate_takes_a_profile_and_shows_seconds_and_mib(run):
    line = "draw seq1f1b:slices=4 --pp 2 --microbatches 2 --cost p.json"
    code, out, err = run(f"{line} --json")
    assert (code, err) == (0, "")
    facts = json.loads(out)
    timeline = simulate(
        make("seq1f1b", ranks=2, microbatches=2, slices=4),
        profile().cost((4, 4), tokens=1024),
    )
    assert facts["makespan"] == timeline.makespan
    assert facts["peak_activations"] == timeline.peak_activations.tolist()
    assert facts["optimizer"] == pytest.approx(9.5e-3)
    assert facts["tokens_per_second"] == pytest.approx(
        2048 / (timeline.makespan + 9.5e-3)
    )
    _, out, _ = run(line)
    assert write_time(timeline.makespan, digits=6) in out
    assert out.count("MiB") == 3
    _, out, _ = run(f"{line} --seq-len 2048")
    assert "2048 (measured up to 1024)" in out


def test_plan_takes_a_profile_and_writes_the_layers_of_each_part(run):
    code, out, _ = run(
        "plan --pp 2 --microbatches 4 --cost p.json --memory 600MiB --json -o plan.json"
    )
    assert code == 0
    rows = json.loads(out)["schedules"]
    assert all(row["peak"] <= 600 * 2**20 for row in rows)
    plan = read_plan("plan.json")
    assert len(plan.partition) == plan.schedule.parts
    assert sum(plan.partition) == 8
    assert list(plan.partition) == rows[0]["partition"]
    assert plan.facts["profile"] == "p.json"
    _, out, _ = run("draw plan.json --cost p.json --json")
    assert json.loads(out)["makespan"] == pytest.approx(rows[0]["makespan"])
    _, out, _ = run("plan --pp 2 --microbatches 4 --cost p.json --top 3")
    assert all(len(line) <= 100 for line in out.splitlines())


@pytest.mark.parametrize(
    ("device", "tokens", "step"),
    [("cpu", 1024, 16), ("cuda", 1024, 128), ("cuda", 1000, 8)],
)
def test_cuts_lie_on_the_tiles_of_the_device_that_was_measured(
    run, device, tokens, step
):
    write_profile(replace(profile(), device=(("device", device),)), "p.json")
    code, out, _ = run(
        f"plan --pp 3 --microbatches 1 --cost p.json:seq_len={tokens} --json "
        "--limit stages=1,slices=4"
    )
    assert code == 0
    cuts = [cut for row in json.loads(out)["schedules"] for cut in row["cuts"]]
    assert len(set(cuts)) > 2
    assert math.gcd(*cuts, tokens) == step


def off_by(error: float) -> Profile:
    """A profile whose layer is off by so much on the points held out."""
    fitted = profile()
    return replace(
        fitted, layer=replace(fitted.layer, B=replace(fitted.layer.B, worst=error))
    )


@pytest.mark.parametrize("line", ["plan", "draw 1f1b"])
def test_a_profile_that_is_far_off_warns_beside_its_figures(run, line):
    line += " --pp 2 --microbatches 2 --cost p.json"
    write_profile(off_by(18.65), "p.json")
    code, out, err = run(line)
    assert (code, bool(out)) == (0, True)
    words = " ".join(err.split())
    assert "WARNING p.json: the measured times are off by up to 1,865%" in words
    assert "do not trust a plan with more than 50%" in words
    write_profile(off_by(0.4), "p.json")
    assert "WARNING" not in run(line)[2]


def test_an_error_of_a_negligible_time_does_not_matter():
    fitted = profile()
    assert off_by(18.65).worst_error == 18.65
    tiny = Fit(Seconds(1e-9), 18.65, 18.65)
    assert (
        replace(fitted, embed=replace(fitted.embed, F=tiny)).worst_error
        == fitted.worst_error
        < 0.5
    )


def test_profile_warns_if_the_profile_it_writes_is_far_off(run, monkeypatch):
    from penstock.train.before import profile as measuring  # noqa: PLC0415

    for error, warned in ((18.65, True), (0.2, False)):
        monkeypatch.setattr(
            measuring,
            "profile_rows",
            lambda *_, error=error: RowProfiles((off_by(error),)),
        )
        code, out, err = run("profile tiny --rows 1 -o p.json --json")
        assert code == 0
        assert json.loads(out)["worst_error"] == pytest.approx(
            max(error, profile().worst_error)
        )
        assert ("WARNING" in err) is warned
        assert ("off by up to 1,865%" in err) is warned


MISTAKES = {
    "draw 1f1b --pp 2 --microbatches 2 --cost none.json": "cannot read none.json",
    "draw 1f1b --pp 2 --microbatches 2 --cost p.json:comm=0.1": "p.json has no 'comm'",
    "draw 1f1b --pp 9 --microbatches 2 --cost p.json": "8 layers cannot fill 9 parts",
    "plan --pp 9 --microbatches 2 --cost p.json": "8 layers cannot fill 9 parts",
    "plan --pp 2 --cost p.json --memory 1mb": "is a size above 0 with its unit, such as 80GiB, not 1mb",
    "draw 1f1b --pp 2 --microbatches 2 --seq-len 64": "--seq-len needs the times of a model",
    "draw 1f1b --pp 2 --microbatches 2 --cost p.json --seq-len 0": "--seq-len must be at least 1, not 0",
    "profile": "name a model: a config, a Hugging Face folder",
    "profile huge": "neither a file nor a preset huge",
    "profile tiny --rows 1 --ranks 1 --set data.seq_len=4": "4 tokens are too few to measure slices of",
    "profile tiny --gpu v100 --set run.precision=bfloat16": "does not compute in bfloat16",
    "profile none/config.json": "cannot read none/config.json",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_message(run, line):
    code, out, err = run(line)
    assert (code, out) == (2, "")
    assert MISTAKES[line] in " ".join(err.split())
    assert "Traceback" not in err


# ---------------------------------------------------------------- real measurements, of tiny models
TINY = (
    "tiny --set parallel.pp=2 --set model.hidden_size=32 --set model.layers=3 --set model.heads=4 "
    "--set model.kv_heads=2 "
    "--set model.intermediate_size=48 --quick"
)


def test_a_real_profile_of_a_tiny_model_is_whole_and_i_and_w_are_about_b(run):
    code, out, _ = run(
        f"profile {TINY} --set data.seq_len=32 --rows 2 -o mine.json --json"
    )
    assert code == 0
    assert {fit["form"] for fit in json.loads(out)["fits"]} <= {"formula", "table"}
    found = read_profile("mine.json")
    assert (found.layers, found.tokens, found.rows) == (3, 32, 2)
    assert dict(found.device)["threads"] == 1
    assert found.message == 2 * 32 * 4
    layer = found.layer
    assert sum(p.held_out for p in layer.points) >= 2
    assert 0.5 < np.median([(p.I + p.W) / p.B for p in layer.points]) < 2.0
    assert found.embed.W.curve == Seconds()
    assert all(p.prefix == 0 for p in (*found.embed.points, *found.head.points))
    numbers = 32 * (32 + 16 + 16 + 32) + 3 * 32 * 48 + 2 * 32
    # Weights, gradients and two states.
    assert layer.weights == pytest.approx(4 * 4 * numbers, rel=0.01)
    assert layer.held > layer.kept > found.message
    assert (
        run("draw terapipe:slices=4 --pp 3 --microbatches 1 --cost mine.json")[0] == 0
    )


def test_whole_sequences_alone_need_no_keys_of_earlier_slices():
    """Otherwise a GPU would compile slices that nobody times."""
    sizes = LlamaConfig(vocab=17, width=8, layers=2, heads=2, kv_heads=2, inner=8)
    request = ProfileRequest(sizes, 32)
    assert Probe(subjects_of(request).layer).carry.rows
    request = replace(request, where=((request.tokens, 0),))
    assert not subjects_of(request).layer.prefixes
    probe = Probe(subjects_of(request).layer)
    assert not probe.carry.rows, "nothing has run slice by slice"


def test_several_ranks_measure_together_and_then_their_links(run):
    code, out, err = run(
        f"profile {TINY} --set data.seq_len=16 --rows 1 --ranks 2 --links -o mine.json"
    )
    assert code == 0
    assert err.startswith("wrote mine.json\n")  # on a busy machine a warning follows
    assert "errors are those on" in out
    network = read_profile("mine.json").network
    assert isinstance(network.latency, tuple)
    assert len(network.latency) == 2
    assert 0 < network.latency[0][1] < 1
    assert network.bandwidth[0][1] > 1e5
    assert np.min(network.sum_bandwidth) > 1e5


def test_a_hugging_face_folder_is_measured_by_its_config(run):
    sizes = decoder_sizes(300, layers=5, width=32, inner=48, max_position_embeddings=64)
    config = transformers.LlamaConfig(**sizes)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained("folder")
    code, _, err = run(
        "profile folder --set data.seq_len=16 --rows 1 --ranks 1 --quick -o mine.json"
    )
    assert code == 0
    assert err.startswith("wrote mine.json\n")  # on a busy machine a warning follows
    assert read_profile("mine.json").layers == 5


def test_a_probe_leaves_gradients_as_the_executor_would():
    torch.manual_seed(0)
    model = Llama(LlamaConfig(64, 32, 2, 4, 2, 48)).double()
    _, middle, head = split(model, (0, 2, 0))
    x = torch.randn(1, 24, 32, dtype=torch.float64)
    probe = Probe(Subject(middle, x, layers=2, prefixes=True))
    assert {tuple(rows.shape) for rows in probe.carry.rows.values()} == {(1, 2, 24, 8)}
    with torch.no_grad():
        whole = middle(x)
    last, all_of_it = probe.open(8, 16), probe.open(24, 0)
    probe.forward(last)
    # It sees the prefix.
    assert torch.allclose(probe.outputs[last], whole[:, 16:], atol=1e-12)
    probe.forward(all_of_it)
    assert torch.allclose(probe.outputs[all_of_it], whole, atol=1e-12)
    labels = torch.randint(0, 64, (1, 24))
    times = Probe(Subject(head, x, loss=token_loss, labels=labels)).times(24, 0)[0]
    assert min(times) > 0
    expected = torch.autograd.grad(
        token_loss(head(x), labels) / 24, list(head.parameters())
    )
    for parameter, gradient in zip(head.parameters(), expected, strict=True):
        # Once whole, once split.
        assert torch.allclose(parameter.grad, 2 * gradient, atol=1e-12)


@pytest.mark.parametrize(("tokens", "prefix"), [(24, 0), (8, 8)])
def test_passes_are_in_flight_together_as_micro_batches_are(
    tokens, prefix, monkeypatch
):
    whole = Llama(
        LlamaConfig(vocab=11, width=16, layers=2, heads=2, kv_heads=2, inner=16)
    ).double()
    _, middle, _ = split(whole, (0, 2, 0))
    probe, alive = (
        Probe(
            Subject(
                middle, torch.randn(1, 24, 16, dtype=torch.float64), 2, prefixes=True
            )
        ),
        [],
    )

    def clock(act) -> float:
        act()
        alive.append(len(probe.outputs))
        return float(len(alive))

    monkeypatch.setattr(probe, "clock", clock)
    found = probe.times(tokens, prefix, passes=3)
    # F, B, F again, I, W; three of each.
    assert alive == [1, 2, 3, 2, 1, 0, 1, 2, 3, 2, 1, 0, 0, 0, 0]
    assert [(one.F, one.B, one.I, one.W) for one in found] == [
        # The second forward took 6 longer, which is a part of the price of I.
        (n, n + 3, n + 9 + 6, n + 12)
        for n in (1, 2, 3)
    ]


def test_a_profile_whose_layer_takes_no_time_is_refused():
    terms = r'"base": [^,]+, "token": [^,]+, "prefix": [^,]+, "pair": [^,]+,'
    text = re.sub(
        terms, '"base": 0, "token": 0, "prefix": 0, "pair": 0,', dump_profile(profile())
    )
    with pytest.raises(FileError, match="F of a layer takes no time"):
        load_profile(text)


def test_a_formula_that_is_zero_at_a_point_is_not_corrected_by_a_table():
    noisy = [(4, 5, 0.9728), (12, 0, 718.4), (16, 1, 0.13388)]
    assert fit_curve(noisy, [(6, 9, 0.4), (1, 0, 0.5345)]).form == "formula"
