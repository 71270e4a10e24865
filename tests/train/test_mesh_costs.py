"""The profile of a process in a mesh, with its communication."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from commands import called
from mesh_shares import shares_of
from penstock import make
from penstock.config import ModelConfig, ParallelConfig
from penstock.cost.gpus import analytic_profile, gpu_of
from penstock.cost.mesh import gather_seconds, mesh_profile
from penstock.cost.network import Link, Network
from penstock.errors import ShapeError
from penstock.formats import write_plan, write_profile
from penstock.ir import Op, Plan
from penstock.ir.action import COMPUTING_OPS
from penstock.models import GPTConfig, LlamaConfig

MODEL = ModelConfig(
    layers=8,
    hidden_size=1024,
    heads=16,
    kv_heads=8,
    intermediate_size=2816,
    vocab_size=32_000,
)
FREE = Link(0.0, 1e30)
FAST = Link(10e-6, 300e9)


def profile_of(model: ModelConfig = MODEL, precision: str = "float32"):
    return analytic_profile(model, 1024, rows=2, gpu="a100", precision=precision)


@pytest.mark.parametrize("tensor", [2, 4])
@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_shares_are_those_of_the_runtime(family, tensor):
    common = {"vocab": 1001, "width": 64, "layers": 2, "heads": 4, "inner": 128}
    if family == "gpt":
        sizes = GPTConfig(**common, positions=1024)
        model = ModelConfig("gpt", 2, 64, 4, 4, 128, 1001)
    else:
        sizes = LlamaConfig(**common, kv_heads=4)
        model = ModelConfig("llama", 2, 64, 4, 4, 128, 1001)
    whole = profile_of(model)
    for shard in (1, 2):
        found = mesh_profile(whole, tensor, shard, FREE)
        expected = shares_of(sizes, ParallelConfig(tp=tensor, dp_shard=shard))
        for name, share in zip(("embed", "layer", "head"), expected, strict=True):
            before, after = getattr(whole, name), getattr(found, name)
            bytes_ = after.weights + after.gathered
            assert bytes_ / before.weights == pytest.approx(share.memory)
            assert after.update / before.update == pytest.approx(share.numbers)
            assert after.held / before.held == pytest.approx(share.held)
            ratio = after.F.curve.of(512, 0) / before.F.curve.of(512, 0)
            assert ratio == pytest.approx(share.work)


def test_a_layer_sums_the_hidden_state_twice_forward_and_twice_backward():
    whole = profile_of(precision="bfloat16")
    free, priced = (mesh_profile(whole, 4, 1, link) for link in (FREE, FAST))
    size = 2 * 1024 * 2 * 512  # rows, width, bytes and tokens
    once = 2 * 3 * (10e-6 + size / 4 / 300e9)
    for op, sums in ((Op.F, 2), (Op.I, 2), (Op.B, 2), (Op.W, 0)):
        without = free.layer.fit(op).curve.of(512, 0)
        found = priced.layer.fit(op).curve.of(512, 0)
        assert found - without == pytest.approx(sums * once)
        point = next(one for one in priced.layer.points if one.tokens == 512)
        bare = next(one for one in free.layer.points if one.tokens == 512)
        assert point.of(op) - bare.of(op) == pytest.approx(sums * once)
    logits = 3 * (10e-6 + 2 * 32_000 * 2 * 512 / 4 / 300e9)
    head = priced.head.F.curve.of(512, 0) - free.head.F.curve.of(512, 0)
    assert head == pytest.approx(logits)


def test_shards_gather_and_sum_once_a_step():
    whole = profile_of()
    free, priced = (mesh_profile(whole, 1, 4, link) for link in (FREE, FAST))
    for op in COMPUTING_OPS:
        found, alone = (one.layer.fit(op).curve for one in (priced, whole))
        assert found.of(512, 256) == alone.of(512, 256)
    gradients = whole.layer.weights / 4
    once = 3 * (10e-6 + gradients / 4 / 300e9)
    assert priced.layer.update - free.layer.update == pytest.approx(once)
    assert gather_seconds(whole, 1, 1, FAST) == 0.0
    assert gather_seconds(whole, 1, 4, FAST) > 8 * once
    assert dict(priced.device)["shard"] == 4


def test_copies_of_sharded_ranks_sum_only_their_shares():
    whole = profile_of()
    schedule = make("1f1b", ranks=2, microbatches=2, copies=2)
    alone = whole.cost((4, 4))
    cost = mesh_profile(whole, 1, 4, FAST).cost((4, 4))
    shared, whole_weights = cost.weights(schedule, 0), alone.weights(schedule, 0)
    ratio = shared.gradients / whole_weights.gradients
    assert ratio == pytest.approx(1 / 4)
    # Gathered weights make the memory of a rank larger than a quarter.
    assert shared.weights > whole_weights.weights / 2


def test_more_processes_share_the_work_of_a_layer():
    whole = profile_of(
        replace(MODEL, hidden_size=4096, intermediate_size=11264), "bfloat16"
    )
    inside = gpu_of("a100").inside
    times = [
        mesh_profile(whole, tensor, 1, inside).layer.F.curve.of(1024, 0)
        for tensor in (1, 2, 4, 8)
    ]
    assert times == sorted(times, reverse=True)
    assert times[0] / times[3] < 8


def test_what_cannot_be_divided_is_refused():
    with pytest.raises(ShapeError, match="heads = 16"):
        mesh_profile(profile_of(), 3, 1, FAST)
    with pytest.raises(ShapeError, match="must be at least 1"):
        mesh_profile(profile_of(), 0, 1, FAST)
    unknown = replace(profile_of(), model=())
    with pytest.raises(ShapeError, match="does not say the model's"):
        mesh_profile(unknown, 2, 1, FAST)
    assert mesh_profile(unknown, 1, 1, FAST) is unknown


def test_simulate_counts_the_mesh_of_a_plan(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    whole = profile_of()
    link = Network(latency=10e-6, bandwidth=300e9)
    write_profile(replace(whole, network=link), Path("profile.json"))
    schedule = make("1f1b", ranks=2, microbatches=4)
    layers = (MODEL.layers // 2,) * 2

    def simulated(**mesh):
        write_plan(Plan(schedule, "plan", layers, **mesh), Path("plan.json"))
        line = "draw plan.json --cost profile.json"
        code, out, err = called(monkeypatch, capsys, f"{line} --json")
        assert code == 0, err
        return json.loads(out)

    plain, alone = simulated(), simulated(tensor=1, shard=1)
    tensor, shard = simulated(tensor=2, shard=1), simulated(tensor=1, shard=2)
    assert plain == alone
    assert tensor["makespan"] < plain["makespan"]
    assert max(tensor["weights"]) < 0.6 * max(plain["weights"])
    assert shard["gather"] > plain["gather"] == 0.0
    assert shard["makespan"] == pytest.approx(plain["makespan"])
    slow = replace(whole, network=replace(link, sum_bandwidth=3e9))
    write_profile(slow, Path("profile.json"))
    assert simulated() == plain
    assert simulated(tensor=1, shard=2)["gather"] > 10 * shard["gather"]
    assert simulated(tensor=2, shard=1)["makespan"] > tensor["makespan"]
    write_profile(replace(whole, network=link), Path("profile.json"))
    simulated(tensor=1, shard=2)
    # Twice the sequences, with an optimizer step of half the weights.
    assert 1.5 < shard["tokens_per_second"] / plain["tokens_per_second"] < 2.1
    code, out, _ = called(monkeypatch, capsys, "draw plan.json --cost profile.json")
    assert code == 0
    assert re.search(r"weight all-gather\s+[\d.]+ [mµ]?s", out)
    Path("cluster.toml").write_text(
        'penstock = "cluster"\n[[nodes]]\nsite = "Tokyo"\n[[nodes]]\nsite = "Osaka"\n'
    )
    line = "draw plan.json --cost profile.json --cluster cluster.toml"
    code, _, err = called(monkeypatch, capsys, line)
    assert code == 2
    assert "leave --cluster out" in err
