"""Each fault of three tables that are not a schedule, by its message and its carets."""

from __future__ import annotations

from itertools import pairwise

import pytest

from penstock.errors import ScheduleError
from penstock.ir import MicroBatch, Schedule, Stage, parse_action, schedule_of

STAGES = (Stage(0, 0), Stage(1, 1), Stage(2, 2))
PATH = (0, 1, 2)
WHOLE = (MicroBatch(PATH), MicroBatch(PATH))
LANES = ("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1", "2F0 2B0 2F1 2B1")


def tables(*lanes: str, stages=STAGES, microbatches=WHOLE) -> Schedule:
    return schedule_of(
        stages,
        microbatches,
        [[parse_action(word) for word in lane.split()] for lane in lanes],
    )


def refused(*lanes: str, **tables_: object) -> ScheduleError:
    with pytest.raises(ScheduleError) as raised:
        tables(*lanes, **tables_)
    return raised.value


def caret_is_under(error: ScheduleError, word: str) -> bool:
    """Is some caret drawn exactly under that word?"""
    lines = str(error).splitlines()
    carets = [(a, b) for a, b in pairwise(lines) if set(b.strip()) == {"^"}]
    return any(a[b.index("^") : b.rindex("^") + 1] == word for a, b in carets)


def test_good_tables_are_a_schedule():
    assert tables(*LANES).actions == 12


# Another lane of rank 0 and what the error says of it; if a word follows, carets are drawn under that.
LANE_FAULTS = """
0F0 0F1 0B0          | no rank ever runs 0B1                                        | 0F1
0F0 0F1 0B0 0B1 0B1  | 0B1 occurs twice                                             | 0B1
0F0 0F1 0B0 0B1 0I1 0W1 | 0I1 and 0B1 both occur                                    |
0F0 0F1 0B0 0I1      | 0I1 has no 0W1: the weight gradient is never computed        | 0I1
0F0 0F1 0B0 0B1 0W1  | 0W1 has no 0I1: its backward is 0B1                          |
0F0 0F1 1F0 0B0 0B1  | 1F0 is in the lane of rank 0, but stage 1 lives on rank 1    | 1F0
0F0 0F1 7F0 0B0 0B1  | 7F0 is on stage 7, which does not exist (stages 0..2)        | 7F0
0F0 0F1 0F9 0B0 0B1  | 0F9 is for micro-batch 9, which does not exist (micro-batches 0..1) | 0F9
0F0 0F1 0F1.3 0B0 0B1 | 0F1.3 is for slice 3, but micro-batch 1 has 1               | 0F1.3
"""


@pytest.mark.parametrize("row", LANE_FAULTS.strip().splitlines())
def test_a_fault_of_a_lane_is_drawn_under_the_action(row):
    lane, says, word = map(str.strip, row.split("|"))
    error = refused(lane, *LANES[1:])
    assert says in str(error)
    assert not word or caret_is_under(error, word)


def test_a_missing_forward_is_drawn_under_the_action_that_needs_it():
    error = refused(LANES[0], LANES[1], "2B0 2F1 2B1")
    assert "2B0 needs 2F0, which no rank ever runs" in str(error)
    assert caret_is_under(error, "2B0")


def test_a_duplicate_action_is_drawn_where_it_occurs_again():
    error = refused("0F0 0F1 0B0 0B1 0B1", *LANES[1:])
    assert "rank 0 | 0F0 0F1 0B0 0B1 0B1\n                           ^^^" in str(error)


@pytest.mark.parametrize(
    ("says", "stages", "paths"),
    [
        ("1F0 is off the path of micro-batch 0, which is 0 2", STAGES, [(0, 2), PATH]),
        (
            "stage 2 lives on rank 5, which does not exist (ranks 0..2)",
            (Stage(0, 0), Stage(1, 1), Stage(5, 2)),
            [PATH, PATH],
        ),
        (
            "stage 0 holds part -1; parts are numbered from 0",
            (Stage(0, -1), Stage(1, 1), Stage(2, 2)),
            [PATH, PATH],
        ),
        (
            "micro-batch 1 visits stage 9, which does not exist (stages 0..2)",
            STAGES,
            [PATH, (0, 1, 9)],
        ),
        (
            "micro-batch 0 visits part 1 twice: on stages 1 and 2",
            (Stage(0, 0), Stage(1, 1), Stage(2, 1)),
            [PATH, PATH],
        ),
        ("micro-batch 1 visits no stage", STAGES, [PATH, ()]),
    ],
)
def test_stages_and_paths_that_do_not_fit_are_refused(says, stages, paths):
    error = refused(*LANES, stages=stages, microbatches=tuple(map(MicroBatch, paths)))
    assert says in str(error)


@pytest.mark.parametrize(
    "cuts", [(0, 4), (1, 8), (0, 4, 4, 8), (0, 6, 4, 8), (8,), (0, 9)]
)
def test_cuts_that_do_not_cover_the_tokens_are_refused(cuts):
    error = refused(*LANES, microbatches=(WHOLE[0], MicroBatch((0, 1, 2), 8, cuts)))
    assert "the cuts of micro-batch 1 do not cover its tokens 0..8" in str(error)


def test_an_order_that_can_never_run_shows_its_circle():
    error = refused("0F0 0B0 0F1 0B1", "1F1 1F0 1B0 1B1", LANES[2])
    assert "this order can never run" in str(error)
    assert "rank 0 waits at 0B0 for 1B0, which rank 1 runs after 1F1" in str(error)
    assert "rank 1 waits at 1F1 for 0F1, which rank 0 runs after 0B0" in str(error)
    assert caret_is_under(error, "0B0")
    assert caret_is_under(error, "1F1")


def test_a_rank_waits_for_the_next_action_of_one_that_waits_for_it():
    stages = (Stage(0, 0), Stage(1, 1), Stage(0, 2))
    error = refused("2F0 0F0 2B0 0B0", "1F0 1B0", stages=stages, microbatches=WHOLE[:1])
    assert "rank 0 waits at 2F0 for 1F0\n" in str(error)
    assert "rank 1 waits at 1F0 for 0F0, which rank 0 runs after 2F0" in str(error)


def test_a_backward_before_its_own_forward_is_a_circle_of_one():
    error = refused(LANES[0], LANES[1], "2B0 2F0 2F1 2B1")
    assert "rank 2 waits at 2B0 for 2F0, which rank 2 runs after 2B0" in str(error)


def test_backwards_of_slices_run_from_the_last_to_the_first():
    sliced = (MicroBatch((0,), 8, (0, 3, 8)),)
    one = (Stage(0, 0),)
    assert tables("0F0 0F0.1 0B0.1 0B0", stages=one, microbatches=sliced).slices == 2
    assert "can never run" in str(
        refused("0F0 0F0.1 0B0 0B0.1", stages=one, microbatches=sliced)
    )
    assert "can never run" in str(
        refused("0F0.1 0F0 0B0.1 0B0", stages=one, microbatches=sliced)
    )


def test_every_fault_is_collected_and_raised_once():
    error = refused("0F0 0F1 0B0 0B1 0B1 9F0", "1F0 1F1 1B0", LANES[2])
    assert len(error.faults) == 3
    assert all(fault in str(error) for fault in error.faults)


def test_many_faults_are_counted_not_all_printed():
    lane = " ".join(f"0F{m}" for m in range(2, 500))
    error = refused(f"{LANES[0]} {lane}", *LANES[1:])
    assert len(str(error).splitlines()) < 80
    assert "more" in str(error)


@pytest.mark.parametrize("empty", ["lanes", "stages", "microbatches", "actions"])
def test_empty_tables_are_refused(empty):
    full = {"stages": STAGES, "microbatches": WHOLE, "lanes": ((), (), ())}
    with pytest.raises(ScheduleError):
        schedule_of(
            **{name: () if name == empty else value for name, value in full.items()}
        )


def test_a_long_lane_is_drawn_around_the_fault():
    lane = (
        " ".join(f"0F{m}" for m in range(40))
        + " 0F0 "
        + " ".join(f"0B{m}" for m in range(40))
    )
    one = (Stage(0, 0),)
    error = refused(lane, stages=one, microbatches=(MicroBatch((0,)),) * 40)
    drawn = next(line for line in str(error).splitlines() if "rank 0 |" in line)
    assert (
        drawn
        == "  rank 0 | ... 0F34 0F35 0F36 0F37 0F38 0F39 0F0 0B0 0B1 0B2 0B3 0B4 0B5 ..."
    )
    assert caret_is_under(error, "0F0")
