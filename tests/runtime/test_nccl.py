"""Tests over NCCL with all ranks on one GPU: penstock lab testbed --workers 4 --backend nccl -- pytest THIS.

They are skipped outside of such a testbed; `make test-gpu` starts them. A testbed that has lost ranks in the middle
of a kernel may turn others away from then on, so give each case of the last test a testbed of its own: -k raise,
-k sleep, -k kill.
"""

from __future__ import annotations

import math
import os

import pytest
import torch

from commands import train_elsewhere
from gpu_workers import kind_of
from mesh_workers import Case
from mesh_workers import gradients as mesh_gradients
from nccl_workers import goes_wrong, trains_every_schedule
from penstock.config import ParallelConfig
from penstock.errors import PeerLostError, RunError, StuckError
from penstock.measure.links import measured_network
from penstock.runtime import spawn

RANKS = 4
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available()
        or os.environ.get("PENSTOCK_TESTBED_BACKEND") != "nccl",
        reason="needs a GPU and a testbed with --backend nccl",
    ),
]
SOME = ("1f1b", "hanayo", "zb-v", "chimera", "1f1b, 2 copies")


def test_ranks_that_share_a_gpu_find_the_backend_of_the_testbed():
    assert spawn(2, kind_of, backend=None) == ["nccl"] * 2


def test_measured_links_say_that_messages_wait_for_each_other():
    network, _ = spawn(2, measured_network, backend="nccl", patience=60)
    assert network.channels in (1, 2)
    assert 1e6 < network.sum_bandwidth < math.inf
    smallest, *_, largest = network.buffers
    assert smallest.send < math.inf, "buffers hold 4 KiB"
    assert smallest.receive < largest.receive < math.inf


@pytest.mark.parametrize("recorded", [False, True])
def test_every_schedule_trains_like_one_piece(recorded):
    for worst in spawn(
        RANKS, trains_every_schedule, recorded, backend="nccl", patience=60
    ):
        assert len(worst) >= 17
        assert max(worst.values()) < 1e-4, worst


def test_tied_weights_are_summed_over_their_owners():
    for worst in spawn(
        RANKS,
        trains_every_schedule,
        False,
        SOME,
        None,
        True,
        backend="nccl",
        patience=60,
    ):
        assert set(worst) == set(SOME)
        assert max(worst.values()) < 1e-4, worst


@pytest.mark.parametrize("recorded", [False, True])
def test_messages_in_bfloat16_change_gradients_by_their_rounding(recorded):
    for worst in spawn(
        RANKS,
        trains_every_schedule,
        recorded,
        SOME,
        torch.bfloat16,
        backend="nccl",
        patience=60,
    ):
        assert max(worst.values()) < 5e-2, worst
    assert max(worst.values()) > 1e-5, worst


MESHES = [
    Case(mesh=ParallelConfig(dp_shard=2)),
    Case(mesh=ParallelConfig(tp=2)),
    Case("zb-v", mesh=ParallelConfig(dp_shard=2)),
    Case(mesh=ParallelConfig(dp_shard=2, tp=2), shape={"ranks": 1}),
]


def test_a_mesh_has_the_gradients_of_the_unsplit_model():
    for results in spawn(
        RANKS, mesh_gradients, MESHES, "cuda", backend="nccl", patience=60
    ):
        for case, wrong in zip(MESHES, results, strict=True):
            assert wrong["gradient"] < 1e-10, case
            assert wrong["loss"] < 1e-10, case


def test_the_command_line_trains_a_mesh_on_a_shared_gpu(tmp_path):
    """Two ranks of two processes each, as `penstock train` starts them."""
    text, rows = train_elsewhere(
        tmp_path / "run",
        "run.device=cuda",
        "run.steps=4",
        "run.log_every=1",
        "run.eval_every=0",
        "run.checks=gradients,memory",
        "elastic.restarts=0",
        "run.comm_dtype=bfloat16",
        "model.layers=4",
        "data.global_batch=16",
        "schedule.name=1f1b",
        "parallel.pp=2",
        "schedule.microbatches=4",
        "parallel.dp_shard=2",
    )
    assert "4 processes on 1 GPU, NCCL, side by side" in text
    assert rows[3].loss < rows[0].loss


@pytest.mark.parametrize(
    ("how", "error", "story"),
    [
        ("raise", RunError, "rank 1 has failed"),
        ("sleep", StuckError, "rank 1 is at 1F"),
        ("kill", PeerLostError, "rank 1 was killed by SIGKILL"),
    ],
)
def test_a_rank_that_goes_wrong_ends_the_run_with_one_story(how, error, story):
    with pytest.raises(error) as caught:
        spawn(3, goes_wrong, how, backend="nccl", patience=3)
    assert story in str(caught.value)
    if how == "raise":
        assert "out of cheese" in str(caught.value)
