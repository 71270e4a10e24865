"""Runs that compile their stages: the same training, and clear words if there is no compiler."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from penstock.config import Config
from penstock.errors import RunError
from penstock.formats.config_toml import apply_changes
from penstock.runtime.compiled import compiled_method
from penstock.train import compiling, loop, setup
from penstock.train.before import profile
from penstock.train.compiling import is_compiling, starting_patience
from penstock.train.placement import decide_placement
from trainings import SMALL, apart, job_of, losses, train

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
    ),
    pytest.mark.filterwarnings(
        "ignore:.*Function'> should not be instantiated:DeprecationWarning"
    ),
]
CPU, GPU = torch.device("cpu"), torch.device("cuda")


def job_config(*changes: str) -> Config:
    return apply_changes(SMALL, changes)


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def test_a_compiled_run_trains_like_any_other(tmp_path, monkeypatch, caplog):
    """Traced but not made into kernels, which takes too long here. All is compiled before the first step."""
    torch.compiler.reset()
    compiled_method.cache_clear()
    monkeypatch.setattr(setup, "COMPILER", "aot_eager")
    monkeypatch.setattr(compiling, "missing_compiler", lambda device: "")
    caplog.set_level(logging.INFO, "penstock.train")
    changes = ("run.steps=2", "run.eval_every=2")
    plain = train(job_of(tmp_path / "plain", "zb-h1", *changes))
    counts = []
    original = loop.Trainer.steps

    def steps(self, history, stop):
        self.comm.barrier()
        counts.append(graphs())
        return original(self, history, stop)

    monkeypatch.setattr(loop.Trainer, "steps", steps)
    rows = train(job_of(tmp_path / "fast", "zb-h1", *changes, "run.compile=true"))
    assert apart(rows, losses(plain)) < 1e-5
    assert [row.evaluation for row in rows[1::2]] == pytest.approx(
        [row.evaluation for row in plain[1::2]], abs=1e-5
    )
    assert "compiled the stages in" in caplog.text
    assert "W has less to do" not in caplog.text
    assert counts[0] > 0
    assert graphs() == counts[-1]


def test_auto_compiles_on_gpus_only_and_never_a_mesh(monkeypatch):
    monkeypatch.setattr(compiling, "missing_compiler", lambda device: "")
    assert is_compiling(SMALL, GPU)
    assert not is_compiling(SMALL, CPU)
    assert is_compiling(job_config("run.compile=true"), CPU)
    assert not is_compiling(job_config("run.compile=false"), GPU)
    assert not is_compiling(job_config("parallel.dp_shard=2"), GPU)
    monkeypatch.setattr(compiling, "missing_compiler", lambda device: "triton")
    assert not is_compiling(SMALL, GPU)


def test_a_machine_without_a_compiler_is_told_so(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(RunError, match=r"needs a C\+\+ compiler such as g\+\+, which"):
        is_compiling(job_config("run.compile=true"), CPU)


def test_ranks_are_patient_while_others_compile(monkeypatch):
    monkeypatch.setattr(compiling, "missing_compiler", lambda device: "")
    config = job_config("run.compile=true", "run.timeout=5")
    assert starting_patience(config, CPU) > 600
    assert starting_patience(job_config("run.timeout=5"), CPU) == 5


def test_a_large_vocabulary_trains_alike_with_and_without_chunks(tmp_path, monkeypatch):
    """544 tokens of 32,000 words have more than 64 MiB of logits in float32."""
    changes = (
        "model.vocab_size=32000",
        "run.steps=2",
        "run.checks=forecast,memory",
        "data.global_batch=68",
        "parallel.pp=1",
    )
    rows = {}
    for chunk in (0, 200):
        monkeypatch.setattr(compiling, "LOSS_CHUNK", chunk)
        job = job_of(
            tmp_path / str(chunk),
            "1f1b",
            *changes,
            ranks=1,
            microbatches=1,
        )
        rows[chunk] = train(job)
    assert apart(rows[200], losses(rows[0])) < 1e-4


def test_a_profile_is_measured_as_the_run_computes(monkeypatch):
    """Compiled, and with a loss in chunks that holds fewer bytes than all logits."""
    monkeypatch.setattr(profile, "COMPILER", "aot_eager")
    monkeypatch.setattr(compiling, "missing_compiler", lambda device: "")
    changes = ("model.vocab_size=32000", "data.seq_len=544")
    monkeypatch.setattr(compiling, "LOSS_CHUNK", 0)
    plain = request_for(*changes)
    monkeypatch.setattr(compiling, "LOSS_CHUNK", 128)
    chunked = request_for(*changes, "run.compile=true")
    assert (plain.compiled, plain.loss_chunk) == (False, 0)
    assert (chunked.compiled, chunked.loss_chunk) == (True, 128)
    torch.compiler.reset()
    compiled_method.cache_clear()
    before = graphs()
    found = [profile.measure_request(None, one) for one in (plain, chunked)]
    assert graphs() > before
    facts = [dict(one.device) for one in found]
    assert [one["loss_chunk"] for one in facts] == [0, 128]
    assert [one["compiled"] for one in facts] == [False, True]
    assert 0 < found[1].head.held < found[0].head.held
    moments = [one.part(0, first=False, last=True).working for one in found]
    assert moments[1] < moments[0]


def request_for(*changes):
    config = job_config(*changes)
    request = profile.request_of(config, decide_placement(config, 1), 1)
    return replace(request, rounds=1, where=((544, 0),), depth=1, threads=None)
