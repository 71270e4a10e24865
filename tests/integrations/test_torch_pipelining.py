"""torch's own runtime runs our schedules with our messages, and computes our losses and gradients."""

from __future__ import annotations

import csv
import io
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

import peer_workers as workers
from penstock import lower, make
from penstock.errors import FileError, ShapeError
from penstock.formats import dump_torch_comms, load_torch_csv, torch_csv
from penstock.formats.torch_csv import installed_torch_waits, torch_rows
from penstock.integrations.torch_pipelining import torch_runtime, torch_stages
from penstock.runtime import spawn
from random_schedules import named_schedules, random_schedule

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, while it is imported
    from torch.distributed.pipelining import schedules as torch_schedules

CASES = [
    ("1f1b", {"ranks": 2, "microbatches": 4}),
    ("1f1b", {"ranks": 2, "microbatches": 1}),  # fewer micro-batches than ranks
    ("interleaved", {"ranks": 2, "microbatches": 4, "chunks": 3}),
    ("hanayo", {"ranks": 2, "microbatches": 4, "waves": 2}),
    ("hanayo", {"ranks": 2, "microbatches": 3, "waves": 2, "split": 1}),
    ("zb-v", {"ranks": 2, "microbatches": 4}),
]


@pytest.mark.numerics
def test_torchs_runtime_has_our_losses_and_gradients():
    for results in spawn(2, workers.compare_with_torch, CASES):
        assert len(results) == len(CASES)
        for case, loss, gradient in results:
            assert loss < 1e-12, case
            assert gradient < 1e-12, case


@pytest.mark.numerics
def test_torchs_runtime_gathers_and_sums_stages_under_fsdp():
    assert max(spawn(2, workers.run_sharded)) < 1e-12


def actions_of(rows):
    return {
        rank: [torch_schedules._Action.from_str(word) for word in row]
        for rank, row in enumerate(rows)
    }


def simulated(schedule) -> None:
    """Run the rows through torch's own simulation, which finds deadlocks and missing messages."""
    order = actions_of(torch_rows(lower(schedule), installed_torch_waits()))
    if installed_torch_waits():
        without = {
            rank: [a for a in lane if not a.computation_type.value.startswith("WAIT_S")]
            for rank, lane in order.items()
        }
        assert torch_schedules._add_wait_send(without) == order
    rank_of = {stage.part: stage.rank for stage in schedule.stages}
    torch_schedules._validate_schedule(
        order, schedule.ranks, schedule.parts, len(schedule.microbatches)
    )
    busy = {rank: lane for rank, lane in order.items() if lane}
    messages = [
        [a for a in lane if not a.computation_type.value.endswith(("SHARD", "GRAD"))]
        for lane in busy.values()
    ]
    torch_schedules._simulate_comms_compute(
        dict(zip(busy, messages, strict=True)), rank_of.__getitem__, schedule.parts
    )


@pytest.mark.parametrize(
    "name", ["gpipe", "1f1b", "interleaved", "hanayo", "zb-h1", "zb-v", "dualpipe-v"]
)
def test_torch_accepts_the_messages_of_every_schedule(name):
    for schedule in named_schedules(name):
        simulated(schedule)


def test_torch_accepts_the_messages_of_random_schedules():
    taken = 0
    for seed in range(300):
        schedule = random_schedule(np.random.default_rng([7, seed]), slices=1)
        try:
            dump_torch_comms(lower(schedule))
        except FileError:
            continue
        simulated(schedule)
        taken += 1
    assert taken > 15


def test_our_reader_skips_the_messages():
    schedule = make("hanayo", ranks=3, microbatches=4, waves=2)
    text = dump_torch_comms(lower(schedule))
    assert load_torch_csv(text, "ours.comms.csv") == schedule
    words = [
        word
        for row in csv.reader(io.StringIO(text))
        for word in row
        if "WAIT" not in word
    ]
    assert {word for word in words if word.endswith("UNSHARD")} == {
        f"{stage}UNSHARD" for stage in range(12)
    }
    assert sum("SEND" in word for word in words) == sum(
        "RECV" in word for word in words
    )


def test_gradients_are_reduced_once_and_after_the_last_message():
    for row in torch_rows(lower(make("1f1b", ranks=3, microbatches=4)), waits=False):
        assert row[-2].endswith("REDUCE_GRAD")
        assert row[-1].endswith("RESHARD")
        assert sum(word.endswith("REDUCE_GRAD") for word in row) == 1


def test_every_send_and_sum_is_waited_for_once_and_later():
    for name in ("interleaved", "zb-v", "dualpipe-v"):
        for schedule in named_schedules(name):
            program = lower(schedule)
            bare = torch_rows(program, waits=False)
            for row, waiting in zip(bare, torch_rows(program, waits=True), strict=True):
                assert [word for word in waiting if "WAIT" not in word] == row
                waits = [word for word in waiting if "WAIT" in word]
                begun = [word.replace("WAIT_", "") for word in waits]
                assert sorted(begun) == sorted(
                    word for word in row if "SEND" in word or "REDUCE" in word
                )
                assert all(
                    waiting.index(wait) > waiting.index(word)
                    for wait, word in zip(waits, begun, strict=True)
                )


@pytest.mark.parametrize(
    ("installed", "waits"), [("2.11.0+cpu", False), ("2.14.1", False), ("2.15.0", True)]
)
def test_a_file_of_messages_is_for_the_torch_that_is_installed(
    monkeypatch, installed, waits
):
    monkeypatch.setattr(torch_csv, "version", lambda package: installed)
    text = dump_torch_comms(lower(make("1f1b", ranks=2, microbatches=2)))
    assert ("WAIT_SEND" in text) == waits
    assert ("WAIT_REDUCE_GRAD" in text) == waits


def test_slices_cannot_run_on_torchs_runtime():
    with pytest.raises(FileError, match="is cut into 2 token slices"):
        dump_torch_comms(lower(make("seq1f1b", ranks=2, microbatches=2, slices=2)))


def test_stages_of_another_rank_are_refused():
    schedule = make("hanayo", ranks=2, microbatches=2, waves=1)
    assert torch_stages(schedule, 0) == (0, 3)
    stages = [SimpleNamespace(group_rank=0, stage_index=n) for n in (0, 2)]
    with pytest.raises(
        ShapeError, match="rank 0 has the stages 0 3, but 0 2 are given"
    ):
        torch_runtime(schedule, stages)
    with pytest.raises(ShapeError, match="at least one stage"):
        torch_runtime(schedule, [])
