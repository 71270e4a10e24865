"""The library of schedules: every schedule in REGISTRY takes part in these tests."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from penstock import REGISTRY, Op, UnitCost, make, needs, simulate
from penstock.errors import PenstockError, ShapeError, UnknownNameError
from penstock.ir import lower, parse_action, schedule_of, verify
from penstock.schedules import max_actions, shape_of
from penstock.schedules.facts import FACTS, MAX_ACTIONS
from penstock.schedules.hanayo import hanayo_unit
from penstock.schedules.orders import keep_first
from penstock.schedules.skip import default_skips
from penstock.schedules.transforms import (
    repeat,
    replicate,
    slice_tokens,
    split_backward,
)
from penstock.view import plain

FIGURES = json.loads((Path(__file__).parents[1] / "data" / "figures.json").read_text())
EXTRA = {"chunks": (1, 2, 3), "waves": (1, 2, 3), "slices": (1, 2, 3), "skips": (0, 1)}


def shapes(name: str, ranks=range(1, 9), microbatches=(1, 2, 3, 4, 5, 7, 8, 12, 17)):
    """Yield every small shape of a schedule, including fewer micro-batches than ranks."""
    word = shape_of(name)[2] if len(shape_of(name)) > 2 else None
    for p in ranks:
        if name == "chimera" and p % 2:
            continue
        for m in microbatches:
            for value in EXTRA[word] if word else (0,):
                if word == "skips" and value > max(p - 2, 0):
                    continue
                yield {"ranks": p, "microbatches": m, **({word: value} if word else {})}


# ---------------------------------------------------------------- tests of every schedule
@pytest.mark.parametrize("name", REGISTRY)
def test_any_number_of_ranks_and_micro_batches_makes_a_schedule_of_that_shape(name):
    for shape in shapes(
        name, ranks=(1, 2, 3, 4, 5, 8), microbatches=(1, 2, 3, 5, 8, 12)
    ):
        schedule = make(name, **shape)
        assert schedule.ranks == shape["ranks"]
        assert len(schedule.microbatches) == shape["microbatches"]


@pytest.mark.parametrize("name", REGISTRY)
def test_idle_time_and_memory_follow_the_formulas(name):
    facts, tested = FACTS[name], 0
    for shape in shapes(
        name, ranks=range(1, 9), microbatches=(1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
    ):
        names = {
            "P": shape["ranks"],
            "M": shape["microbatches"],
            "v": shape.get("chunks"),
            "W": shape.get("waves"),
        }
        names |= {"s": shape.get("slices"), "min": min}
        if not eval(facts.when, {}, names):
            continue
        timeline = simulate(make(name, **shape), UnitCost())
        idle, peak = (
            timeline.makespan - 3 * shape["microbatches"],
            max(timeline.peak_activations),
        )
        tested += 1
        formula_peak = eval(facts.peak, {}, names)
        if not facts.exact:
            assert peak <= formula_peak + 1e-9, shape
            assert not facts.idle or idle <= eval(facts.idle, {}, names) + 1e-9, shape
        else:
            assert idle == pytest.approx(eval(facts.idle, {}, names)), shape
            assert peak == pytest.approx(formula_peak), shape
    assert tested >= 10


@pytest.mark.parametrize("name", REGISTRY)
def test_the_picture_in_the_docstring_is_the_drawn_timeline(name):
    text = inspect.getdoc(REGISTRY[name]) or ""
    shape = {word: int(value) for word, value in re.findall(r"(\w+)=(\d+)", text)}
    drawn = [line for line in text.splitlines() if line.startswith("rank ")]
    timeline = simulate(make(name, **shape), UnitCost())
    tick = float((timeline.end - timeline.start).min())
    assert len(drawn) == shape["ranks"]
    assert "\n".join(drawn) == plain(timeline, tick)


@pytest.mark.parametrize("name", REGISTRY)
def test_it_can_be_sliced_split_and_copied(name):
    shape = {"ranks": 4, "microbatches": 4}
    plain_ = make(name, **shape)
    composed = make(name, **shape, slices=2, split=True, copies=2)
    verify(lower(composed))
    assert composed.ranks == 8
    assert composed.slices == 2
    assert all(action.op is not Op.B for lane in composed.lanes for action in lane)
    assert composed.parts == plain_.parts
    assert len(composed.microbatches) == 8


@pytest.mark.parametrize("name", REGISTRY)
@pytest.mark.parametrize(
    "shape", [{"ranks": 0, "microbatches": 4}, {"ranks": 4, "microbatches": 0}]
)
def test_zero_ranks_or_micro_batches_are_refused(name, shape):
    with pytest.raises(ShapeError, match="must be at least 1, not"):
        make(name, **shape)


def test_every_schedule_has_facts():
    assert list(FACTS) == list(REGISTRY)


# ---------------------------------------------------------------- published figures
MAKERS = {
    "gpipe": lambda p, m: make("gpipe", ranks=p, microbatches=m),
    "1f1b_dapple": lambda p, m: make("1f1b", ranks=p, microbatches=m),
    "chimera_static": lambda p, m: make("chimera", ranks=p, microbatches=m),
    "chimera_static_concat": lambda p, m: repeat(
        make("chimera", ranks=p, microbatches=p), m // p
    ),
    "zb_h1": lambda p, m: make("zb-h1", ranks=p, microbatches=m),
    "zb_v_torch": lambda p, m: make("zb-v", ranks=p, microbatches=m),
    "dualpipev_torch_noFBoverlapcredit": lambda p, m: make(
        "dualpipe-v", ranks=p, microbatches=m
    ),
}
for chunks in (2, 4, 8):
    MAKERS[f"interleaved_v{chunks}"] = lambda p, m, v=chunks: make(
        "interleaved", ranks=p, microbatches=m, chunks=v
    )
for chunks in (2, 4):
    MAKERS[f"interleaved_zb1p_torch_v{chunks}"] = lambda p, m, v=chunks: make(
        "interleaved-zb", ranks=p, microbatches=m, chunks=v
    )
for waves in (1, 2, 4):
    MAKERS[f"hanayo_w{waves}_static"] = lambda p, m, w=waves: repeat(
        hanayo_unit(p, p, w), m // p
    )


@pytest.mark.parametrize("name", MAKERS)
def test_makespan_bubble_memory_and_messages_match_the_published_figures(name):
    rows = [row for row in FIGURES["rows"] if row[0] == name]
    assert rows
    for _, ranks, microbatches, comm, makespan, bubble, most, least, messages in rows:
        timeline = simulate(MAKERS[name](ranks, microbatches), UnitCost(comm=comm))
        # Chimera has two copies of each part, and the figures leave out the sum of their gradients.
        timeline = replace(timeline, sums=())
        assert timeline.makespan == pytest.approx(makespan, abs=1e-4), (
            ranks,
            microbatches,
            comm,
        )
        assert timeline.bubble == pytest.approx(bubble, abs=1e-4)
        assert max(timeline.peak_activations) == pytest.approx(most, abs=1e-4)
        assert min(timeline.peak_activations) == pytest.approx(least, abs=1e-4)
        assert sum(1 for _ in timeline.messages()) == messages


def test_v_min_has_the_time_and_memory_of_the_published_code():
    rows = [row for row in FIGURES["rows"] if row[0] == "v_min_sail"]
    for _, ranks, microbatches, comm, makespan, bubble, most, *_ in rows:
        timeline = simulate(
            make("v-min", ranks=ranks, microbatches=microbatches), UnitCost(comm=comm)
        )
        assert timeline.makespan == pytest.approx(makespan, abs=1e-4)
        assert timeline.bubble == pytest.approx(bubble, abs=1e-4)
        assert max(timeline.peak_activations) == pytest.approx(most, abs=1e-4)


def test_v_half_is_within_a_tenth_of_the_published_code():
    for _, ranks, microbatches, _, makespan, *_ in (
        r for r in FIGURES["rows"] if r[0] == "v_half_sail" and r[3] == 0
    ):
        ours = simulate(
            make("v-half", ranks=ranks, microbatches=microbatches), UnitCost()
        ).makespan
        assert ours <= 1.1 * makespan


FIXED = {"zb_h1": "zb_h1", "zb_v_torch": "zb_v_torch"}
FIXED |= {f"interleaved_zb1p_v{v}": f"interleaved_zb1p_torch_v{v}" for v in (2, 4)}


@pytest.mark.parametrize(
    "row", [row for row in FIGURES["split_cost"] if row["schedule"] in FIXED], ids=str
)
def test_uneven_halves_of_a_backward_match_the_published_figures(row):
    schedule = MAKERS[FIXED[row["schedule"]]](row["P"], row["B"])
    for key, value in row.items():
        found = re.match(r"I([\d.]+)_W([\d.]+)", key)
        if found and value is not None:
            cost = UnitCost(comm=row["comm"], I=float(found[1]), W=float(found[2]))
            assert simulate(schedule, cost).makespan == pytest.approx(value, abs=1e-3)


@pytest.mark.parametrize("name", FIGURES["golden"])
def test_hanayo_has_the_order_of_the_papers_figures(name):
    ranks, waves, microbatches = (int(part[1:]) for part in name.split("_"))
    schedule = make("hanayo", ranks=ranks, microbatches=microbatches, waves=waves)
    ours = [
        " ".join(f"{a.op}{a.microbatch}s{a.stage}" for a in lane)
        for lane in schedule.lanes
    ]
    assert ours == FIGURES["golden"][name]["orders"]


# ---------------------------------------------------------------- closed forms
@pytest.mark.parametrize("waves", [1, 2, 3, 4, 5, 8])
def test_hanayo_has_the_makespan_of_the_formula(waves):
    for ranks in (2, 3, 4, 5, 8, *((12, 16) if waves <= 2 else ())):
        schedule = make("hanayo", ranks=ranks, microbatches=ranks, waves=waves)
        for comm in (0, 0.05, 0.5):
            formula = (
                3 * ranks
                + 2 * (ranks - 1) / waves
                + (2 * ranks - 4 + 4 * (ranks - 1) * waves) * comm
            )
            assert simulate(schedule, UnitCost(comm=comm)).makespan == pytest.approx(
                formula
            ), (ranks, comm)


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
@pytest.mark.parametrize("waves", [1, 2, 4])
def test_a_stream_of_micro_batches_beats_one_unit_after_the_other(ranks, waves):
    for microbatches in {ranks + 1, 2 * ranks - 1, 2 * ranks, 3 * ranks}:
        units = repeat(hanayo_unit(ranks, ranks, waves), -(-microbatches // ranks))
        lanes = [keep_first(list(lane), microbatches) for lane in units.lanes]
        one_by_one = schedule_of(units.stages, units.microbatches[:microbatches], lanes)
        ours = make("hanayo", ranks=ranks, microbatches=microbatches, waves=waves)
        for comm in (0, 0.05, 0.25):  # the order was chosen at 0.05
            theirs, stream = (
                simulate(s, UnitCost(comm=comm)) for s in (one_by_one, ours)
            )
            tie = (ranks, waves, microbatches, comm) == (2, 4, 4, 0)
            assert stream.makespan < theirs.makespan - (0 if tie else 1e-9) + (
                1e-6 if tie else 0
            )
            assert max(stream.peak_activations) <= ranks + 1e-9


# ---------------------------------------------------------------- single schedules
def test_skipping_leaves_out_every_part_equally_often_and_never_the_first_or_the_head():
    for ranks in (3, 4, 6, 9):
        for skips in range(1, ranks - 1):
            schedule = make(
                "skip", ranks=ranks, microbatches=3 * (ranks - 1), skips=skips
            )
            left_out = [0] * (ranks + 1)
            for microbatch in schedule.microbatches:
                assert len(microbatch.path) == ranks + 1 - skips
                for part in set(range(ranks + 1)) - set(microbatch.path):
                    left_out[part] += 1
            assert left_out == [0, *[3 * skips] * (ranks - 1), 0]


def test_skipping_too_much_is_refused_with_the_most_that_works():
    assert default_skips(8) == 2
    with pytest.raises(ShapeError, match="at most 2 can be left out"):
        make("skip", ranks=4, microbatches=4, skips=3)


def test_seq1f1b_holds_slices_not_micro_batches():
    for ranks in (2, 4, 8):
        for slices in (2, 4, 8):
            timeline = simulate(
                make("seq1f1b", ranks=ranks, microbatches=2 * ranks, slices=slices),
                UnitCost(),
            )
            assert max(timeline.peak_activations) == pytest.approx(
                (slices + ranks - 1) / slices
            )


# ---------------------------------------------------------------- transforms
def test_a_sliced_wave_with_split_backward_is_two_calls():
    wave = make("hanayo", ranks=4, microbatches=4, waves=2)
    composed = split_backward(slice_tokens(wave, (0, 300, 700, 1024)))
    verify(lower(composed))
    assert composed.actions == wave.actions // 2 * 3 * 3
    assert composed.microbatches[0].tokens == 1024
    assert (
        simulate(composed, UnitCost()).makespan <= simulate(wave, UnitCost()).makespan
    )


def test_cutting_a_sliced_schedule_is_refused():
    with pytest.raises(ShapeError, match="sliced already"):
        slice_tokens(make("seq1f1b", ranks=2, microbatches=2), (0, 1))


def test_cuts_that_do_not_rise_are_refused_by_the_checker():
    with pytest.raises(PenstockError, match="do not cover its tokens"):
        slice_tokens(make("1f1b", ranks=2, microbatches=2), (0, 5, 3))


def test_copies_do_the_same_work_side_by_side():
    one = make("zb-v", ranks=3, microbatches=5)
    three = replicate(one, 3)
    cost = UnitCost(comm=0.1)
    many = simulate(three, cost)
    assert many.end.max() == pytest.approx(simulate(one, cost).makespan)
    # Then the last part is summed in a ring of three: two hops each way.
    assert many.makespan == pytest.approx(many.end.max() + 4 * 0.1)
    assert three.parts == one.parts
    assert {stage.part for stage in three.stages} == {
        stage.part for stage in one.stages
    }


# ---------------------------------------------------------------- mistakes
def test_a_wrong_name_suggests_the_nearest():
    with pytest.raises(UnknownNameError, match="did you mean 'hanayo'"):
        make("hanyo", ranks=2, microbatches=2)


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("Schedule1F1B", "1f1b"),
        ("Interleaved1F1B", "interleaved"),
        ("ScheduleDualPipeV", "dualpipe-v"),
        ("ScheduleZBVZeroBubble", "zb-v"),
    ],
)
def test_the_names_of_torch_and_of_papers_are_taken(name, published):
    sizes = {"ranks": 2, "microbatches": 2}
    assert make(name, **sizes) == make(published, **sizes)


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("hanayo:waves=2", {"waves": 2}),
        ("hanayo:waves=2,slices=4,split", {"waves": 2, "slices": 4, "split": True}),
        ("1f1b:split", {"split": True}),
        ("1f1b:", {}),
    ],
)
def test_a_name_brings_its_shape(text, shape):
    name = text.partition(":")[0]
    sizes = {"ranks": 2, "microbatches": 4}
    assert make(text, **sizes) == make(name, **sizes, **shape)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("hanayo:wave=2", "hanayo has no 'wave'.*did you mean 'waves'"),
        ("hanayo:waves=two", "waves takes a whole number, not 'two'"),
        ("hanayo:waves", "waves takes a whole number, not ''"),
        ("hanayo:waves=2,waves=3", "gives waves twice"),
        ("1f1b:split=3", "split is a switch"),
        ("1f1b:ranks=3", "1f1b has no 'ranks'"),
    ],
)
def test_a_wrong_shape_is_refused_with_its_key(text, fault):
    with pytest.raises(ShapeError, match=fault):
        make(text, ranks=2, microbatches=4)


def test_an_unknown_word_of_a_shape_is_refused():
    with pytest.raises(
        ShapeError, match="1f1b has no waves; its shape is ranks, microbatches"
    ):
        make("1f1b", ranks=2, microbatches=2, waves=2)


def test_a_shape_without_ranks_is_refused():
    with pytest.raises(ShapeError, match="1f1b needs ranks"):
        make("1f1b", microbatches=2)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda: make("1f1b", ranks="2", microbatches=2), "ranks must be a whole"),
        (lambda: make("1f1b", ranks=2, microbatches=2.5), "microbatches must be a wh"),
        (lambda: UnitCost(B=-1), "B=-1 is not a time"),
        (lambda: UnitCost(W=float("nan")), "W=nan is not a time"),
        (
            lambda: needs(make("1f1b", ranks=2, microbatches=2), parse_action("5F0")),
            "no action 5F0",
        ),
    ],
)
def test_values_that_make_no_sense_are_refused(mistake, message):
    with pytest.raises(ShapeError, match=message):
        mistake()


def test_an_odd_chimera_is_refused_with_the_nearest_that_works():
    with pytest.raises(
        ShapeError, match="even number of ranks, not 5; the nearest is 6"
    ):
        make("chimera", ranks=5, microbatches=4)


# ---------------------------------------------------------------- sizes
@pytest.mark.parametrize(
    "more", [{}, {"slices": 3}, {"copies": 2, "split": 1}], ids=str
)
@pytest.mark.parametrize("name", REGISTRY)
def test_the_number_of_actions_is_known_before_a_schedule_is_built(name, more):
    shape = {"ranks": 4, "microbatches": 8, **more}
    actions, most = make(name, **shape).actions, max_actions(name, **shape)
    # Some leave out micro-batches of a larger order, or parts of a path.
    assert most / 2 <= actions <= most
    if name in ("gpipe", "1f1b", "interleaved", "hanayo", "chimera"):
        assert actions == most


@pytest.mark.parametrize(
    "word", ["ranks", "microbatches", "chunks", "waves", "slices", "copies"]
)
def test_absurd_sizes_are_refused_before_anything_is_built(word):
    name = {"chunks": "interleaved", "waves": "hanayo"}.get(word, "1f1b")
    with pytest.raises(
        ShapeError,
        match=rf"{word}=1000000000000.* has [0-9,]+ actions; at most {MAX_ACTIONS:,} are possible",
    ):
        make(name, **{"ranks": 4, "microbatches": 4, word: 10**12})


def test_too_many_copies_of_a_schedule_are_refused():
    with pytest.raises(
        ShapeError, match="a pipeline in 1000000000 copies has 16,000,000,000 actions"
    ):
        replicate(make("1f1b", ranks=2, microbatches=4), 10**9)
