"""A plan.json survives a round trip, and every way to break it gives one clear error."""

from __future__ import annotations

import json
from collections.abc import Callable
from errno import EACCES
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from case_tables import cases
from penstock.cost import Cluster
from penstock.errors import FileError, ScheduleError, ShapeError
from penstock.formats import (
    dump_cluster,
    dump_plan,
    dump_torch_csv,
    load_plan,
    read_cluster,
    read_plan,
    read_profile,
    read_torch_csv,
    write_plan,
)
from penstock.formats.config_toml import read_config
from penstock.ir import MicroBatch, Stage, parse_action, schedule_of
from penstock.ir.plan import Plan
from penstock.schedules import REGISTRY, make
from random_schedules import named_schedules, random_schedule

PICTURE = """\
{
  "penstock": "plan",
  "version": 1,
  "name": "1f1b",
  "partition": [8, 7],
  "why": {
    "makespan": 33.0,
    "seed": 7,
    "exact": true,
    "note": null
  },
  "stages": [
    {"rank": 0, "part": 0},
    {"rank": 1, "part": 1}
  ],
  "microbatches": [
    {"path": [0, 1], "tokens": 1, "count": 2}
  ],
  "lanes": [
    "0F0 0F1 0B0 0B1",
    "1F0 1B0 1F1 1B1"
  ]
}
"""


@pytest.fixture
def plan() -> Plan:
    why = (("makespan", 33.0), ("seed", 7), ("exact", True), ("note", None))
    return Plan(make("1f1b", ranks=2, microbatches=2), "1f1b", (8, 7), why)


def refusal(text: str) -> str:
    with pytest.raises(FileError) as caught:
        load_plan(text, "my.json")
    return str(caught.value)


# ---------------------------------------------------------------- round trips
def test_a_plan_is_written_as_pictured(plan: Plan) -> None:
    assert dump_plan(plan) == PICTURE
    assert load_plan(PICTURE) == plan


def test_facts_are_found_by_name(plan: Plan) -> None:
    assert plan.facts["seed"] == 7
    assert hash(plan) == hash(load_plan(PICTURE))


def test_a_plan_without_facts_survives_a_round_trip() -> None:
    plan = Plan(make("gpipe", ranks=1, microbatches=1))
    assert load_plan(dump_plan(plan)) == plan


def test_layout_does_not_matter(plan: Plan) -> None:
    assert load_plan(json.dumps(json.loads(PICTURE))) == plan
    assert load_plan(json.dumps(json.loads(PICTURE), indent=7)) == plan


@pytest.mark.parametrize("name", REGISTRY)
def test_every_named_schedule_survives_a_round_trip(name: str) -> None:
    for schedule in named_schedules(name):
        plan = Plan(schedule, name)
        assert load_plan(dump_plan(plan)) == plan


FACTS = st.one_of(
    st.text(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.integers(),
    st.booleans(),
    st.none(),
)


@given(st.integers(0, 2**32 - 1), st.text(), st.dictionaries(st.text(), FACTS))
@settings(max_examples=200)
def test_any_plan_survives_a_round_trip(
    seed: int, name: str, why: dict[str, str | float | int | bool | None]
) -> None:
    rng = np.random.default_rng(seed)
    schedule = random_schedule(rng)
    partition = (
        tuple(rng.integers(0, 50, size=schedule.parts).tolist())
        if rng.random() < 0.5
        else ()
    )
    plan = Plan(schedule, name, partition, tuple(why.items()))
    again = load_plan(dump_plan(plan))
    assert again == plan
    assert [(key, type(fact)) for key, fact in again.why] == [
        (key, type(fact)) for key, fact in plan.why
    ]
    assert dump_plan(again) == dump_plan(plan)


def test_a_written_file_reads_back_the_same(plan: Plan, tmp_path: Path) -> None:
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == plan
    (tmp_path / "bom.json").write_text(PICTURE, encoding="utf-8-sig")
    assert read_plan(str(tmp_path / "bom.json")) == plan


# ---------------------------------------------------------------- impossible plans
def test_a_partition_must_fit_the_parts(plan: Plan) -> None:
    with pytest.raises(ShapeError, match="for 3 parts, but the schedule has 2"):
        Plan(plan.schedule, partition=(1, 2, 3))
    with pytest.raises(ShapeError, match="at least 0 layers, not -1"):
        Plan(plan.schedule, partition=(1, -1))


@pytest.mark.parametrize(
    "fact",
    [float("nan"), float("inf"), 10**5000, [1]],
    ids=["nan", "inf", "long", "list"],
)
def test_a_fact_that_json_cannot_hold_is_refused(plan: Plan, fact: float) -> None:
    with pytest.raises(FileError, match="cannot hold the fact 'bubble'"):
        dump_plan(Plan(plan.schedule, why=(("bubble", fact),)))


# ---------------------------------------------------------------- files
@pytest.mark.parametrize(
    ("make_file", "words"),
    [
        (lambda path: None, "No such file"),
        (lambda path: path.mkdir(), "Is a directory"),
        (lambda path: path.write_bytes(b""), "is empty"),
        (lambda path: path.write_bytes(b" \n\t "), "is empty"),
        (
            lambda path: path.write_bytes(b"\x93NUMPY\x01\x00"),
            "is not text: byte 0 is not valid UTF-8",
        ),
        (lambda path: path.write_bytes(b"\x00\x01\x02"), "this is not JSON"),
        (lambda path: path.write_bytes(PICTURE.encode("utf-16")), "is not text"),
    ],
)
def test_the_error_for_a_file_that_is_not_a_plan_names_it(
    tmp_path: Path, make_file: Callable[[Path], object], words: str
) -> None:
    path = tmp_path / "plan.json"
    make_file(path)
    with pytest.raises(FileError, match=words) as caught:
        read_plan(path)
    assert str(path) in str(caught.value)


def test_an_impossible_path_is_refused(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot read"):
        read_plan("a\0b")
    with pytest.raises(FileError, match="cannot write"):
        write_plan(plan, tmp_path / "nowhere" / "plan.json")


READERS = (read_plan, read_profile, read_cluster, read_config, read_torch_csv)


@pytest.mark.parametrize("read", READERS)
def test_every_format_reports_an_unreadable_file_in_the_same_way(
    tmp_path: Path, read: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    with pytest.raises(FileError, match=r"cannot read .*file: No such file") as caught:
        read(path)
    assert len(str(caught.value).splitlines()) == 2
    with pytest.raises(FileError, match="Is a directory\n  name a file, not a folder"):
        read(tmp_path)
    path.write_bytes(b"a\xff")
    with pytest.raises(FileError, match="is not text: byte 1 is not valid UTF-8"):
        read(path)

    def refuse(path: Path) -> bytes:
        raise PermissionError(EACCES, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(FileError, match="Permission denied\n  check the permissions"):
        read(path)


@pytest.mark.parametrize("read", READERS)
def test_every_format_accepts_a_byte_order_mark(
    tmp_path: Path, plan: Plan, read: Callable[[Path], object]
) -> None:
    texts = {
        read_plan: PICTURE,
        read_profile: "{}",
        read_cluster: dump_cluster(Cluster.even(2)),
        read_config: "[run]\nsteps = 7\n",
        read_torch_csv: dump_torch_csv(plan.schedule),
    }
    path = tmp_path / "file"
    path.write_text(texts[read], encoding="utf-8-sig")
    if read is read_profile:
        with pytest.raises(FileError, match="1:1: this is not a Penstock profile"):
            read(path)
    else:
        assert read(path)


# ---------------------------------------------------------------- texts that are not a plan
def test_the_error_for_a_truncated_text_says_where_it_ends() -> None:
    cut = PICTURE[: PICTURE.index("0B0 0B1")]
    assert refusal(cut) == (
        "my.json:20:5: the file ends too early\n\n"
        '  20 |     "0F0 0F1\n'
        "           ^\n"
        "  it was cut off while it was written or copied: write or copy it again"
    )


def test_every_truncated_text_ends_too_early() -> None:
    whole = PICTURE.replace('"1f1b"', '"1f1b \\u00e9"').replace("33.0", "-3.5e-07")
    whole = whole.rstrip()
    for length in range(1, len(whole)):
        text = refusal(whole[:length])
        assert "ends too early" in text or "is empty" in text, text


def test_a_text_that_is_not_json_is_drawn() -> None:
    assert refusal(PICTURE.replace('"tokens": 1,', '"tokens": 1;')) == (
        "my.json:17:33: this is not JSON: Expecting ',' delimiter\n\n"
        '  17 |     {"path": [0, 1], "tokens": 1; "count": 2}\n'
        "                                       ^\n"
        "  correct this line, or write the plan again"
    )


def test_too_deep_nesting_and_too_many_digits_are_refused() -> None:
    assert "nested too deep" in refusal("[" * 100_000)
    assert "too long" in refusal(PICTURE.replace("33.0", "3" * 5000))


@pytest.mark.parametrize("text", ["[]", "3", '"plan"', "{}", '{"schedule": 1}'])
def test_json_that_is_not_a_plan_is_refused(text: str) -> None:
    assert "my.json:1:1: this is not a Penstock plan" in refusal(text)


def test_another_kind_of_file_is_refused() -> None:
    text = refusal(PICTURE.replace('"plan"', '"profile"'))
    assert (
        'my.json:2:15: this is a Penstock file, but its kind is "profile", not "plan"'
        in text
    )


def test_a_newer_version_asks_for_an_upgrade() -> None:
    text = refusal(
        PICTURE.replace('"version": 1', '"version": 2').replace('"lanes"', '"rails"')
    )
    assert (
        "my.json:3:14: this plan has version 2, but this Penstock reads versions up to 1"
        in text
    )
    assert "upgrade Penstock" in text


CHANGES = cases(r"""
"lanes"  =>  "lames"  =>  my.json:19:3: the plan has no key 'lames'  =>  did you mean 'lanes'?
"version": 1,  =>    =>  my.json:1:1: the plan lacks the key 'version'  =>  it needs penstock, version, stages
"part": 1}  =>  "pasrt": 1}  =>  my.json:14:17: stages[1] has no key 'pasrt'  =>  did you mean 'part'?
, "part": 1  =>    =>  my.json:14:5: stages[1] lacks the key 'part'  =>  it needs rank, part
"rank": 1  =>  "rank": "1"  =>  my.json:14:14: stages[1].rank is "1", not a whole number  =>  from 0 to 2147483647
"rank": 1  =>  "rank": -1  =>  stages[1].rank is out of range  =>  from 0 to 2147483647
"rank": 1  =>  "rank": 1.0  =>  stages[1].rank is 1.0, not a whole number
"rank": 1  =>  "rank": true  =>  stages[1].rank is true, not a whole number
"rank": 1  =>  "rank": 1e999  =>  stages[1].rank is Infinity, not a whole number
[0, 1]  =>  [0, null]  =>  my.json:17:18: microbatches[0].path[1] is null, not a whole number
[0, 1]  =>  7  =>  microbatches[0].path is 7, not a list  =>  write it in [ and ]
"count": 2  =>  "count": 0  =>  microbatches[0].count is out of range  =>  from 1 to
"count": 2  =>  "count": 2000000000  =>  my.json:16:19: the micro-batches need at least 8000000000
    =>  a count too large
"1f1b"  =>  []  =>  my.json:4:11: name is a list, not a string
[8, 7]  =>  [8, 7, 6]  =>  my.json:5:16: the partition is for 3 parts, but the schedule has 2  =>  every part
33.0  =>  [33.0]  =>  my.json:7:17: the fact 'makespan' is a list  =>  facts are text
33.0  =>  NaN  =>  the fact 'makespan' is NaN  =>  finite
"seed": 7  =>  "makespan": 7  =>  my.json:8:5: the key 'makespan' occurs twice  =>  remove one of them
"seed": 7  =>  "é": 7, "é": 8  =>  the key 'é' occurs twice
1B0 1F1  =>  1B0 1X1  =>  my.json:21:14: word 2 of lane 1, '1X1', is not an action  =>  2F0, or sliced 2F0.1
1B0 1F1  =>  1B0 1F99999999999  =>  is not an action  =>  an action is stage, op
"0F0 0F1 0B0 0B1"  =>  {}  =>  my.json:20:5: lanes[0] is an object, not a string
""")


@pytest.mark.parametrize(
    "case", [*CHANGES, ("1B0 1F1", "1B0 1F" + "9" * 5000, "is not an action")]
)
def test_the_error_for_a_wrong_value_has_its_line_and_column(
    case: tuple[str, ...],
) -> None:
    old, new, *words = case
    assert PICTURE.count(old) == 1
    text = refusal(PICTURE.replace(old, new))
    assert [word for word in words if word not in text] == []


def test_a_word_that_is_not_an_action_has_carets_under_it() -> None:
    assert refusal(PICTURE.replace("1B0 1F1", "1B0 1X1")) == (
        "my.json:21:14: word 2 of lane 1, '1X1', is not an action\n\n"
        '  21 |     "1F0 1B0 1X1 1B1"\n'
        "                    ^^^\n"
        "  an action is stage, op F B I or W, micro-batch: 2F0, or sliced 2F0.1"
    )


def test_a_long_line_is_drawn_around_the_fault() -> None:
    lane = " ".join(["0F0"] * 100 + ["zero"] + ["0F0"] * 100)
    drawn = refusal(PICTURE.replace("0F0 0F1 0B0 0B1", lane)).splitlines()[2:4]
    assert drawn[0].startswith("  20 | ...")
    assert drawn[0][drawn[1].index("^") :].startswith("zero 0F0")
    assert drawn[1].count("^") == 4


def test_a_schedule_that_cannot_run_is_drawn_under_the_name_of_the_file() -> None:
    with pytest.raises(
        ScheduleError, match=r"^my.json: 0B0 needs 0F0, which no rank ever runs"
    ) as caught:
        load_plan(PICTURE.replace("0F0 0F1 0B0", "0F1 0B0"), "my.json")
    assert caught.value.faults


@pytest.mark.parametrize("lanes", ["[]", '[""]', '["", "", ""]'])
def test_lanes_without_an_action_are_refused(lanes: str) -> None:
    start = PICTURE.index('"lanes"')
    assert "the micro-batches need at least 8 actions, but the lanes hold 0" in refusal(
        f'{PICTURE[:start]}"lanes": {lanes}}}'
    )


def test_only_equal_neighbours_share_a_line() -> None:
    sliced = MicroBatch((0,), 4, (0, 1, 4))
    whole = MicroBatch((0,), 4)
    words = "0F0 0F1 0F1.1 0F2 0F2.1 0F3 0B0 0B1.1 0B1 0B2.1 0B2 0B3"
    schedule = schedule_of(
        [Stage(0, 0)],
        [whole, sliced, sliced, whole],
        [[*map(parse_action, words.split())]],
    )
    plan = Plan(schedule)
    lines = [line for line in dump_plan(plan).splitlines() if '"path"' in line]
    assert lines == [
        '    {"path": [0], "tokens": 4},',
        '    {"path": [0], "tokens": 4, "cuts": [0, 1, 4], "count": 2},',
        '    {"path": [0], "tokens": 4}',
    ]
    assert load_plan(dump_plan(plan)) == plan


# ---------------------------------------------------------------- any damage
def damaged(rng: np.random.Generator, good: bytes) -> bytes:
    """A few bytes changed, doubled, lost or swapped, or the end cut off."""
    bad = bytearray(good)
    for _ in range(rng.integers(1, 4)):
        at = int(rng.integers(len(bad)))
        match rng.integers(6):
            case 0:
                bad[at] = int(rng.integers(256))
            case 1:
                bad[at] = int(rng.choice(list(b'0123456789FBIW".,:[]{}- \neE')))
            case 2:
                del bad[at : at + int(rng.integers(1, 20))]
            case 3:
                bad[at:at] = bad[at : at + int(rng.integers(1, 20))]
            case 4:
                bad[at:at] = bytes(
                    rng.choice(list(b'0123456789FBIW".,:[]{}- \n'), size=3).tolist()
                )
            case _:
                del bad[at:]
        if not bad:
            break
    return bytes(bad)


@pytest.mark.parametrize("block", range(4))
def test_any_damage_gives_a_plan_or_one_clear_error(tmp_path: Path, block: int) -> None:
    path = tmp_path / "plan.json"
    errors = []
    for seed in range(block * 500, block * 500 + 500):
        rng = np.random.default_rng([3, seed])
        schedule = random_schedule(rng, microbatches=2, slices=2)
        layers = tuple(range(schedule.parts))
        plan = Plan(schedule, "a plan", layers, (("bubble", 0.25), ("mad", True)))
        path.write_bytes(damaged(rng, dump_plan(plan).encode()))
        try:
            read_plan(path)
        except (FileError, ScheduleError) as error:
            errors.append(str(error))
    assert all(str(path) in error for error in errors)
    assert 250 < len(errors) < 500
