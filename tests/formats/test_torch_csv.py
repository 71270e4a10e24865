"""torch's schedule CSV: our checker accepts what the installed torch emits, and torch reads what we write."""

from __future__ import annotations

import csv
import io
import warnings
from collections.abc import Sequence
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from penstock.errors import FileError, ScheduleError
from penstock.formats.torch_csv import dump_torch_csv, load_torch_csv
from penstock.ir import MicroBatch, Schedule, Stage, parse_action, schedule_of
from penstock.ir.program import lower
from penstock.ir.verify import verify
from penstock.schedules import REGISTRY
from random_schedules import named_schedules, random_schedule

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, while it is imported
    pytest.importorskip("torch")
    from torch.distributed.pipelining import schedules as torch_schedules
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

# Ranks, micro-batches and stages of a rank.
ROUNDS = [(p, p * k, v) for p in (2, 3, 4) for k, v in ((1, 2), (2, 3), (4, 2))]
SHAPES = {
    "GPipe": product((1, 2, 4, 8), (1, 4, 9), [1]),
    "Interleaved1F1B": ROUNDS,
    "InterleavedZeroBubble": ROUNDS,
    "ZBVZeroBubble": product((2, 4, 6), (2, 8, 16), [2]),
    "DualPipeV": [(2, 4, 2), (2, 20, 2), (4, 8, 2), (4, 20, 2)],
    "LoopedBFS": product((2, 3, 4), (1, 6), (2, 3)),
}
EMITTED = [(name, *shape) for name, shapes in SHAPES.items() for shape in shapes]
# Communication is skipped word by word, so a shape of each kind is enough.
WITH_COMMUNICATION = {one[:2]: one for one in EMITTED if one[0] != "GPipe"}.values()


@cache
def emitted(
    name: str, ranks: int, microbatches: int, per_rank: int, with_comms: bool = False
) -> str:
    """The CSV of torch's own order, written as `_dump_csv` writes it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some schedules call themselves experimental
        rows = get_schedule_ops(
            name, ranks, microbatches, per_rank, with_comms=with_comms
        )
    return written(rows)


def written(rows: Sequence[Sequence[object]]) -> str:
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    return text.getvalue()


def words(text: str) -> list[list[str]]:
    """The computations of a CSV, pairs taken apart."""
    rows = csv.reader(io.StringIO(text, newline=""))
    cells = [
        [w for c in row for w in c.removesuffix("OVERLAP_F_B").strip("()").split(";")]
        for row in rows
    ]
    return [
        [w for w in row if w and "_" not in w and "SHARD" not in w] for row in cells
    ]


# ---------------------------------------------------------------- torch's own orders
@pytest.mark.parametrize("shape", EMITTED, ids=str)
def test_the_orders_torch_emits_pass_our_checker_and_torch_reads_them_again(
    shape: tuple[str, int, int, int], tmp_path: Path
) -> None:
    _, ranks, microbatches, per_rank = shape
    text = emitted(*shape)
    schedule = load_torch_csv(text, "torch.csv")
    assert (schedule.ranks, len(schedule.microbatches)) == (ranks, microbatches)
    assert len(schedule.stages) == ranks * per_rank
    assert [[str(action) for action in lane] for lane in schedule.lanes] == words(text)
    verify(lower(schedule))
    assert taken_by_torch(schedule, tmp_path / "ours.csv") == words(text)
    assert load_torch_csv(dump_torch_csv(schedule), "ours.csv") == schedule


@pytest.mark.parametrize("shape", WITH_COMMUNICATION, ids=str)
def test_communication_is_skipped(shape: tuple[str, int, int, int]) -> None:
    text = emitted(*shape, with_comms=True)
    assert "SEND_F" in text
    assert "UNSHARD" in text
    assert load_torch_csv(text, "torch.csv") == load_torch_csv(
        emitted(*shape), "torch.csv"
    )


def test_the_order_torch_draws_for_1f1b_is_refused() -> None:
    with pytest.raises(ScheduleError) as caught:
        load_torch_csv(emitted("1F1B", 3, 4, 1), "torch.csv")
    text = str(caught.value)
    assert "2B0 needs 2F0, which no rank ever runs" in text
    assert "micro-batch 4, which does not exist (micro-batches 0..3)" in text
    assert "  rank 2 | 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3\n               ^^^" in text


# ---------------------------------------------------------------- torch reads what we write
def taken_by_torch(schedule: Schedule, path: Path) -> list[list[str]]:
    """Torch's own loader and validation of our CSV, and its lowering to communication; the actions as it saw them."""
    path.write_text(dump_torch_csv(schedule), newline="")
    runtime = SimpleNamespace(
        pipeline_order={},
        pp_group_size=schedule.ranks,
        _num_stages=len(schedule.stages),
        _stages=[],
        _n_microbatches=len(schedule.microbatches),
    )
    multi = torch_schedules.PipelineScheduleMulti
    runtime._validate_and_set_stage_mapping = lambda actions: (
        multi._validate_and_set_stage_mapping(runtime, actions)
    )
    multi._load_csv(runtime, str(path))
    assert runtime.stage_index_to_group_rank == {
        stage.part: stage.rank for stage in schedule.stages
    }
    order = {
        rank: [action for action in lane if action]
        for rank, lane in runtime.pipeline_order.items()
    }
    busy = {rank: list(lane) for rank, lane in order.items() if lane}
    torch_schedules._add_send_recv(
        busy, runtime.stage_index_to_group_rank.__getitem__, len(schedule.stages)
    )
    return [[str(action) for action in lane] for lane in order.values()]


# No slices, replicas or skips.
WHOLE = ("gpipe", "1f1b", "interleaved", "hanayo", "zb-h1", "zb-v", "dualpipe-v")


@pytest.mark.parametrize("name", REGISTRY)
def test_torch_reads_what_we_write(name: str, tmp_path: Path) -> None:
    for schedule in named_schedules(name):
        try:
            text = dump_torch_csv(schedule)
        except FileError:
            assert name not in WHOLE
            continue
        bare = schedule_of(
            schedule.stages,
            [MicroBatch(m.path) for m in schedule.microbatches],
            schedule.lanes,
        )
        assert load_torch_csv(text, "ours.csv") == bare
        taken = taken_by_torch(schedule, tmp_path / "ours.csv")
        assert taken == [[str(action) for action in lane] for lane in schedule.lanes]


def test_torch_reads_our_random_schedules(tmp_path: Path) -> None:
    taken = 0
    for seed in range(400):
        schedule = random_schedule(np.random.default_rng([5, seed]), slices=1)
        try:
            text = dump_torch_csv(schedule)
        except FileError:
            continue
        taken_by_torch(schedule, tmp_path / "ours.csv")
        assert dump_torch_csv(load_torch_csv(text, "ours.csv")) == text
        taken += 1
    assert taken > 20


def test_an_idle_rank_at_the_end_survives_a_round_trip() -> None:
    lane = [parse_action("0F0"), parse_action("0B0")]
    schedule = schedule_of([Stage(0, 0)], [MicroBatch((0,))], [lane, []])
    assert load_torch_csv(dump_torch_csv(schedule), "ours.csv") == schedule


def test_parts_become_the_stages_of_torch() -> None:
    lanes = [
        [parse_action("1F0"), parse_action("1B0")],
        [parse_action("0F0"), parse_action("0B0")],
    ]
    schedule = schedule_of([Stage(1, 1), Stage(0, 0)], [MicroBatch((1, 0))], lanes)
    assert dump_torch_csv(schedule) == "0F0,0B0\r\n1F0,1B0\r\n"


# ---------------------------------------------------------------- what the CSV cannot hold
def one_rank(stages: list[Stage], microbatch: MicroBatch) -> Schedule:
    pieces = range(microbatch.slices)
    there = [f"{stage}F0.{piece}" for stage in microbatch.path for piece in pieces]
    back = [word.replace("F", "B") for word in reversed(there)]
    return schedule_of(
        stages, [microbatch], [[parse_action(word) for word in there + back]]
    )


CUT = MicroBatch((0,), 2, (0, 1, 2))
TWO_PARTS = [Stage(0, 0), Stage(0, 1)]
REPLICAS = [Stage(0, 0), Stage(0, 0)]
REFUSED = [
    (one_rank([Stage(0, 0)], CUT), "micro-batch 0 is cut into 2 token slices"),
    (one_rank(TWO_PARTS, MicroBatch((1,))), "micro-batch 0 visits parts 1 of 2"),
    (one_rank(TWO_PARTS, MicroBatch((1, 0))), "micro-batch 0 visits parts 1 0 of 2"),
    (one_rank(REPLICAS, MicroBatch((1,))), "stages 0 and 1 are replicas of part 0"),
]


@pytest.mark.parametrize(("schedule", "words"), REFUSED)
def test_a_schedule_that_the_csv_cannot_hold_is_refused(
    schedule: Schedule, words: str
) -> None:
    with pytest.raises(FileError, match=words) as caught:
        dump_torch_csv(schedule)
    assert "plan.json holds everything" in str(caught.value)


# ---------------------------------------------------------------- texts that are not a schedule
UNREADABLE = [
    ("", "has no action"),
    ("\n\n", "has no action"),
    (",,\n,,", "has no action"),
    (
        "0F0,0B0\n0F1,0B1",
        r"stage 0 is on two ranks: 0F0 in row 1, column 1, and 0F1 in row 2, column 1",
    ),
    ("0F0,0B0\n2F0,2B0", "has stages up to 2, but not stage 1"),
    ("1F0,1B0\n0B0", "stage 0 runs no forward"),
    ("0F0,0X0", r"^my.csv:1:5: '0X0' is not one of torch's actions"),
    ("0F0,0F", "'0F' is not one of torch's actions"),
    ("0F0,0F1.1", "'0F1.1' is not one of torch's actions"),
    ("0F0,0F99999999999999999999", "is not one of torch's actions"),
    ("0F0,(0B0;0F1)OVERLAP", "is not one of torch's actions"),
    ("0F0,(0B0;zero)OVERLAP_F_B", "'zero' is not one of torch's actions"),
    ("x" * 200_000, "is not a CSV: field larger than field limit"),
    ("0F0,0B0\x00", "is not"),
]


@pytest.mark.parametrize(("text", "words"), UNREADABLE)
def test_a_text_that_is_not_a_schedule_is_refused(text: str, words: str) -> None:
    with pytest.raises(FileError, match=words) as caught:
        load_torch_csv(text, "my.csv")
    assert "my.csv" in str(caught.value)


def test_a_cell_that_is_not_an_action_has_carets_under_it() -> None:
    with pytest.raises(FileError) as caught:
        load_torch_csv("0F0,0F1,0F2\n,,1F0,1F1,1F2,nonsense,1B0", "my.csv")
    assert str(caught.value) == (
        "my.csv:2:15: 'nonsense' is not one of torch's actions\n\n"
        "  2 | ,,1F0,1F1,1F2,nonsense,1B0\n"
        "                    ^^^^^^^^\n"
        "  actions are 2F0 2B0 2I0 2W0, 2SEND_F0 and the like, 2UNSHARD and the like, (2F1;3B0)OVERLAP_F_B"
    )


def test_an_order_that_cannot_run_is_drawn() -> None:
    with pytest.raises(ScheduleError, match=r"^my.csv: this order can never run"):
        load_torch_csv("0B0,0F0\n1F0,1B0", "my.csv")


def test_overlapped_pairs_are_read_one_after_the_other() -> None:
    schedule = load_torch_csv("0F0,(0F1;0B0)OVERLAP_F_B,(0B1)OVERLAP_F_B", "my.csv")
    assert [str(action) for action in schedule.lanes[0]] == ["0F0", "0F1", "0B0", "0B1"]


def test_any_damage_gives_a_schedule_or_one_clear_error() -> None:
    good = emitted("ZBVZeroBubble", 2, 4, 2)
    errors = []
    for seed in range(1000):
        rng = np.random.default_rng([4, seed])
        bad = list(good)
        for at in rng.integers(0, len(bad), size=2):
            bad[at : at + int(rng.integers(0, 3))] = list(
                rng.choice(list('0123FBIW,;()"\r\n \0_'), size=2)
            )
        try:
            load_torch_csv("".join(bad), "my.csv")
        except (FileError, ScheduleError) as error:
            errors.append(str(error))
    assert all("my.csv" in error for error in errors)
    assert len(errors) > 500
