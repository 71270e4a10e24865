"""Analytic profiles of known GPUs, against what was measured on one of them."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import pytest

from commands import called
from penstock import make, simulate
from penstock.config import ModelConfig
from penstock.cost import ProfileCost
from penstock.cost.gpus import GPUS, analytic_profile, gpu_network, gpu_of
from penstock.cost.mesh import mesh_profile
from penstock.cost.network import Link
from penstock.cost.sizes import parameters_of_pieces
from penstock.errors import ShapeError, UnknownNameError
from penstock.formats import dump_profile, load_profile
from penstock.ir import Op
from penstock.models import GPTConfig, LlamaConfig
from penstock.models.family import count_parameters
from penstock.train.weights import held_in_layer

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results" / "h200"
WHOLE = json.loads((RESULTS / "whole.json").read_text())["rows"]
LLAMA = ModelConfig(
    layers=16,
    hidden_size=2048,
    heads=16,
    kv_heads=16,
    intermediate_size=5632,
    vocab_size=32_000,
)


def config_of(model: dict) -> ModelConfig:
    known = {"kv_heads": model["heads"], "positions": 0} | model
    names = ("family", "layers", "width", "heads", "kv_heads", "inner", "vocab")
    return ModelConfig(*(known[name] for name in names), tie_embeddings=known["tied"])


def ratios(row: dict, piece: str, ops: str = "FBIW", least: int = 0) -> list[float]:
    """Computed over measured times of one piece of one measured profile."""
    profile = row["profile"]
    computed = analytic_profile(
        config_of(profile["model"]),
        profile["tokens"],
        gpu="h200",
        recorded=row["recorded"],
    )
    block = getattr(computed, piece)
    found = []
    for point in profile["blocks"][piece]["points"]:
        for op in ops:
            if point[op] and point["tokens"] >= least:
                curve = block.fit(Op(op)).curve
                seconds = curve.of(point["tokens"], point["prefix"])
                found.append(seconds / point[op])
    return found


@pytest.mark.parametrize("row", [row for row in WHOLE if row["recorded"]])
def test_times_on_an_h200_are_those_that_were_measured(row):
    layer = ratios(row, "layer")
    head = ratios(row, "head")
    assert 0.97 < median(layer) < 1.03
    assert 0.97 < median(head) < 1.03
    assert max(layer + head) < 1.2
    assert min(layer + head) > 0.83


@pytest.mark.parametrize("row", WHOLE)
def test_bytes_on_an_h200_are_those_that_were_measured(row):
    profile = row["profile"]
    computed = analytic_profile(config_of(profile["model"]), 4096, gpu="h200")
    assert computed.message == profile["message"]
    assert computed.tied == pytest.approx(profile.get("tied", 0.0), rel=1e-6)
    for piece in ("embed", "layer", "head"):
        block = getattr(computed, piece)
        measured = profile["blocks"][piece]
        assert block.weights == pytest.approx(measured["weights"], rel=1e-4)
        if piece != "embed":
            # GPT's fused kernels keep a tenth less than the estimate.
            assert block.held == pytest.approx(measured["held"], rel=0.12)
            assert block.kept == pytest.approx(measured["kept"], rel=0.01)
            assert 0.5 < block.update / measured["update"] < 1.3


def test_an_eighth_of_an_h200_takes_as_long_as_the_workers_of_the_testbed():
    """Held out: the testbed took no part in the fit. Its weights are bfloat16, so only long slices compare."""
    h200 = gpu_of("h200")
    eighth = replace(
        h200,
        multiprocessors=16,
        peak={name: peak * 16 / 132 for name, peak in h200.peak.items()},
        bandwidth=h200.bandwidth / 8,
    )
    rows = json.loads((RESULTS / "profiles.json").read_text())["rows"]
    for row in rows:
        profile = row["profile"]
        computed = analytic_profile(config_of(profile["model"]), 4096, gpu=eighth)
        for point in profile["blocks"]["layer"]["points"]:
            if point["tokens"] < 2048:
                continue
            for op in "FI":
                curve = computed.layer.fit(Op(op)).curve
                seconds = curve.of(point["tokens"], point["prefix"])
                assert 0.75 < seconds / point[op] < 1.3


def test_small_slices_are_less_efficient():
    curve = analytic_profile(LLAMA, 4096).layer.F.curve
    per_token = [curve.of(tokens, 0) / tokens for tokens in (128, 512, 2048)]
    assert per_token[0] > 2 * per_token[1] > 2 * per_token[2]


@pytest.mark.parametrize(
    "sizes",
    [
        LlamaConfig(vocab=1000, width=64, layers=3, heads=4, kv_heads=2, inner=176),
        GPTConfig(
            vocab=1000, width=64, layers=3, heads=4, inner=256, positions=32, tied=False
        ),
    ],
)
def test_parameters_and_held_numbers_are_those_of_the_models(sizes):
    is_gpt = isinstance(sizes, GPTConfig)
    model = ModelConfig(
        family="gpt" if is_gpt else "llama",
        layers=3,
        hidden_size=64,
        heads=4,
        kv_heads=4 if is_gpt else 2,
        intermediate_size=sizes.inner,
        vocab_size=1000,
    )
    expected = count_parameters(sizes)
    counts = parameters_of_pieces(model, tokens=32)
    assert counts == (expected.embed, expected.layer, expected.head)
    computed = analytic_profile(model, 32, precision="float32")
    assert computed.layer.held == 4 * sum(held_in_layer(sizes))


def test_faster_gpus_are_faster():
    names = ("v100", "a100-40", "a100", "h100", "h200")
    times = []
    for name in names:
        precision = "float16" if name == "v100" else "bfloat16"
        profile = analytic_profile(LLAMA, 2048, gpu=name, precision=precision)
        schedule = make("1f1b", ranks=4, microbatches=8)
        times.append(simulate(schedule, ProfileCost(profile)).makespan)
    assert times == sorted(times, reverse=True)
    assert times[0] > 4 * times[-1]
    assert [GPUS[name].memory for name in names] == sorted(
        GPUS[name].memory for name in names
    )


def test_machines_have_fast_links_inside_and_slow_ones_between():
    gpu = gpu_of("h100")
    assert gpu_network(gpu, 8).bandwidth == gpu.inside.bandwidth
    network = gpu_network(gpu, 6, devices_per_rank=4)
    assert network.bandwidth[0][1] == gpu.inside.bandwidth
    assert network.bandwidth[0][2] == gpu.between.bandwidth
    assert network.latency[1][2] == gpu.between.latency


def test_a_profile_says_that_it_is_analytic_and_survives_a_file():
    profile = analytic_profile(LLAMA, 1024, rows=2, gpu="a100", ranks=16)
    assert dict(profile.device)["analytic"] is True
    again = load_profile(dump_profile(profile))
    assert again == profile


def test_what_is_unknown_is_refused():
    with pytest.raises(UnknownNameError, match="h20"):
        gpu_of("h20")
    with pytest.raises(ShapeError, match="does not compute in bfloat16"):
        analytic_profile(LLAMA, 128, gpu="v100")
    with pytest.raises(ShapeError, match="vocabulary is missing"):
        analytic_profile(replace(LLAMA, vocab_size=0), 128)


def test_the_command_writes_a_profile_without_measuring(monkeypatch, capsys, tmp_path):
    run = partial(called, monkeypatch, capsys)
    file = tmp_path / "h100.json"
    line = (
        f"profile llama-1b --gpu h100 --set model.vocab_size=32000 --ranks 16 -o {file}"
    )
    code, _, error = run(line)
    assert code == 0, error
    profile = load_profile(file.read_text())
    assert dict(profile.device)["name"] == "NVIDIA H100"
    assert len(profile.network.bandwidth) == 16
    code, out, error = run(f"draw 1f1b --pp 8 --microbatches 8 --cost {file} --json")
    assert code == 0, error
    assert json.loads(out)["makespan"] > 0


def test_a_loss_in_chunks_keeps_no_whole_logits_except_on_a_mesh():
    large = replace(LLAMA, vocab_size=128_000)
    whole = analytic_profile(large, 4096, gpu="h100")
    chunked = analytic_profile(large, 4096, gpu="h100", loss_chunk=2048)
    logits = 4096 * 128_000
    assert (whole.head.held - chunked.head.held) * 4096 == 2 * logits  # half precision
    before, after = (one.part(1, False, True) for one in (whole, chunked))
    assert after.working < 0.1 * before.working
    assert dict(chunked.device)["loss_chunk"] == 2048
    small = analytic_profile(LLAMA, 256, gpu="h100", loss_chunk=2048)
    assert dict(small.device)["loss_chunk"] == 0
    on_mesh = [mesh_profile(one, 2, 1, Link(0.0, 1e12)) for one in (whole, chunked)]
    assert on_mesh[0].head.held == on_mesh[1].head.held
    assert (
        on_mesh[0].part(1, False, True).working
        == on_mesh[1].part(1, False, True).working
    )
