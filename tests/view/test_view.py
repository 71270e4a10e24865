"""Every way to look at a timeline shows the same actions at the same times."""

from __future__ import annotations

import inspect
import json
import re
import zlib
from base64 import b64decode
from collections import Counter
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from rich.cells import cell_len

from penstock import REGISTRY, Schedule, Timeline, UnitCost, make, simulate
from penstock.errors import ShapeError
from penstock.ir import MicroBatch, schedule_of
from penstock.ir.timeline import MEASURED_UNITS, REAL_UNITS
from penstock.schedules.orders import backwards, forwards, loop_placement, paths_through
from penstock.view import (
    Series,
    gantt,
    page,
    palette,
    plain,
    report_page,
    svg,
    time_rows_of,
    trace,
)
from penstock.view.chart import chart
from penstock.view.numbers import short, write_time

SVG = "{http://www.w3.org/2000/svg}"


def chunked(ranks: int, microbatches: int, chunks: int, slices: int) -> Schedule:
    """All forwards, then all backwards, with several stages on a rank and several slices of a micro-batch."""
    stages = loop_placement(ranks, chunks)
    lanes = []
    for rank in range(ranks):
        mine = range(rank, ranks * chunks, ranks)
        there = [
            action for stage in mine for action in forwards(stage, microbatches, slices)
        ]
        back = [
            action
            for stage in reversed(mine)
            for action in backwards(stage, microbatches, slices)
        ]
        lanes.append(there + back)
    return schedule_of(stages, paths_through(stages, microbatches, slices), lanes)


def small() -> Timeline:
    return simulate(make("1f1b", ranks=4, microbatches=8), UnitCost(comm=0.1))


def sliced() -> Timeline:
    return simulate(chunked(3, 4, 2, 2), UnitCost(comm=0.1))


def idle_rank() -> Timeline:
    """A rank without actions: its stage is on no path."""
    stages = loop_placement(2)
    return simulate(
        schedule_of(stages, [MicroBatch((0,))], [forwards(0, 1) + backwards(0, 1), []]),
        UnitCost(),
    )


def large() -> Timeline:
    return simulate(make("1f1b", ranks=256, microbatches=64), UnitCost(comm=0.1))


def real() -> Timeline:
    """In seconds and bytes, as if measured."""
    there = small()
    times = {
        name: getattr(there, name) * 0.0123
        for name in ("start", "end", "sent", "arrived")
    }
    return replace(
        there,
        **times,
        activations=there.activations * 3e8,
        bytes=there.bytes * 1e6,
        units=REAL_UNITS,
    )


TIMELINES = [small, sliced, idle_rank, real, large]


# ---------------------------------------------------------------- plain
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_plain_redraws_the_picture_of_the_docstring(name: str) -> None:
    picture = [
        line
        for line in inspect.getdoc(REGISTRY[name]).splitlines()
        if line.startswith("rank")
    ]
    assert (
        plain(simulate(make(name, ranks=3, microbatches=4), UnitCost())).splitlines()
        == picture
    )


def test_plain_writes_slices_like_actions() -> None:
    timeline = simulate(chunked(2, 1, 1, 2), UnitCost(F=2, B=2))
    assert plain(timeline).splitlines() == [
        "rank 0 | F0   F0.1 .    .    B0.1 B0",
        "rank 1 | .    F0   F0.1 B0.1 B0   .",
    ]


def test_plain_accepts_any_tick_that_divides_all_times() -> None:
    timeline = simulate(chunked(3, 4, 3, 1), UnitCost(F=1, B=1))
    assert plain(timeline, tick=1 / 3).startswith("rank 0 | F0 F1 F2 F3 F0 ")


def test_plain_refuses_times_between_ticks() -> None:
    with pytest.raises(
        ShapeError, match=r"the end of 0F0, 0\.5, is not a multiple of the tick 1"
    ):
        plain(simulate(make("gpipe", ranks=2, microbatches=1), UnitCost(F=0.5, B=1.5)))


def test_plain_aligns_ranks_with_two_digits() -> None:
    lines = plain(
        simulate(make("gpipe", ranks=11, microbatches=1), UnitCost())
    ).splitlines()
    assert lines[0].startswith("rank  0 | ")
    assert lines[10].startswith("rank 10 | ")
    assert all(line == line.rstrip() for line in lines)


# ---------------------------------------------------------------- gantt
@pytest.mark.parametrize("width", range(40, 201, 20))
@pytest.mark.parametrize("timeline", TIMELINES)
def test_gantt_fits_the_width(timeline: Any, width: int) -> None:
    assert (
        max(cell_len(line) for line in gantt(timeline(), width).plain.splitlines())
        <= width
    )


def test_gantt_shows_every_action_and_the_facts_if_there_is_room() -> None:
    text = gantt(small(), 200).plain
    lanes = [
        re.findall(r"[FB]\d", line)
        for line in text.splitlines()
        if line.startswith("rank")
    ]
    assert lanes == [
        [str(action)[1:] for action in lane] for lane in small().schedule.lanes
    ]
    assert "makespan 34.6 forwards · bubble 30.6% · peak 4 micro-batches" in text


def test_gantt_of_many_ranks_shows_a_selection_and_says_so() -> None:
    lines = gantt(large(), 120).plain.splitlines()
    shown = [int(line.split()[1]) for line in lines if line.strip().startswith("rank")]
    assert len(shown) == 64
    assert (shown[0], shown[-1]) == (0, 255)
    assert "64 of 256 ranks shown" in lines


# ---------------------------------------------------------------- svg
def boxes(figure: ElementTree.Element) -> list[ElementTree.Element]:
    return figure.findall(f".//{SVG}g[@class='spans']/{SVG}rect")


@pytest.mark.parametrize("timeline", TIMELINES)
def test_svg_is_well_formed_and_self_contained(timeline: Any) -> None:
    text = svg(timeline(), 'a <title> & "more"\x00')
    assert 'a <title> & "more"' in ElementTree.fromstring(text).findtext(
        f"{SVG}title", ""
    )
    assert set(re.findall(r"https?://[^\"' ]*", text)) == {"http://www.w3.org/2000/svg"}


@pytest.mark.parametrize("timeline", [small, sliced, idle_rank, real])
def test_svg_has_a_box_for_each_span_with_its_length(timeline: Any) -> None:
    found = np.array(
        [
            float(box.get("width", ""))
            for box in boxes(ElementTree.fromstring(svg(timeline())))
        ]
    )
    lasts = timeline().end - timeline().start
    np.testing.assert_allclose(found / found.sum(), lasts / lasts.sum(), atol=1e-4)


def test_svg_has_the_numbers_of_the_micro_batches() -> None:
    figure = ElementTree.fromstring(svg(small()))
    numbers = Counter(
        text.text for text in figure.findall(f".//{SVG}g[@class='numbers']/{SVG}text")
    )
    assert numbers == {str(microbatch): 8 for microbatch in range(8)}
    captions = [text.text for text in figure.findall(f"{SVG}text")]
    assert (
        "4 ranks · 8 micro-batches · makespan 34.6 forwards · bubble 30.6% · "
        "peak 4 micro-batches" in captions
    )


def test_svg_shades_stages_and_slices() -> None:
    fills = {box.get("fill") for box in boxes(ElementTree.fromstring(svg(sliced())))}
    assert len(fills) == 2 * 2 * 2  # F and B, two stages of a rank, two slices


def test_svg_writes_the_units_of_every_number() -> None:
    assert "makespan 425.6 ms · bubble 30.6% · peak 1.12 GiB" in svg(real())
    assert "makespan 34.6 forwards · bubble 30.6% · peak 4 micro-batches<" in svg(
        small()
    )


def test_svg_of_many_actions_stays_small() -> None:
    assert len(svg(large())) < 500_000


def test_means_of_columns_keep_the_seconds_worked() -> None:
    timeline = sliced()
    paint = palette.paints(timeline)
    for rank, busy in enumerate(timeline.busy.tolist()):
        work, _ = palette.means(timeline, rank, 37, paint)
        assert work.sum() * timeline.makespan / 37 == pytest.approx(busy)


def test_the_ink_on_every_paint_is_readable() -> None:
    assert min(palette.contrast(fill, ink) for fill, ink in palette.PAINTS) > 4


# ---------------------------------------------------------------- trace
def events(timeline: Timeline, phase: str) -> list[dict[str, Any]]:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    found = json.loads(trace(timeline), parse_constant=refuse)["traceEvents"]
    return [event for event in found if event["ph"] == phase]


@pytest.mark.parametrize("timeline", [small, sliced, idle_rank, real])
def test_trace_has_every_span_once_with_its_times(timeline: Any) -> None:
    found = sorted(
        (event["tid"], event["name"], event["ts"], event["dur"])
        for event in events(timeline(), "X")
    )
    assert found == sorted(
        (span.rank, str(span.action), span.start * 1e6, (span.end - span.start) * 1e6)
        for span in timeline().spans()
    )


def test_trace_has_stage_part_micro_batch_and_slice() -> None:
    schedule = sliced().schedule
    for event, span in zip(events(sliced(), "X"), sliced().spans(), strict=True):
        _, stage, microbatch, piece = span.action
        part = schedule.stages[stage].part
        assert event["args"] == {
            "stage": stage,
            "part": part,
            "microbatch": microbatch,
            "slice": piece,
        }


@pytest.mark.parametrize("timeline", [small, sliced])
def test_arrows_of_the_trace_pair_up_and_lead_from_the_send_to_the_target_rank(
    timeline: Any,
) -> None:
    starts = {
        event["id"]: (event["tid"], event["ts"]) for event in events(timeline(), "s")
    }
    ends = {
        event["id"]: (event["tid"], event["ts"]) for event in events(timeline(), "f")
    }
    messages = list(timeline().messages())
    assert starts.keys() == ends.keys()
    assert sorted(starts.values()) == sorted(
        (message.source, message.sent * 1e6) for message in messages
    )
    routes = Counter((starts[arrow][0], ends[arrow][0]) for arrow in starts)
    assert routes == Counter((message.source, message.target) for message in messages)
    assert all(ends[arrow][1] >= starts[arrow][1] for arrow in starts)


def test_an_arrow_of_the_trace_ends_at_the_start_of_an_action() -> None:
    begins = {(event["tid"], event["ts"]) for event in events(sliced(), "X")}
    assert all((event["tid"], event["ts"]) in begins for event in events(sliced(), "f"))


def test_trace_has_a_named_track_and_activations_for_each_rank() -> None:
    names = {
        event["tid"]: event["args"]["name"]
        for event in events(small(), "M")
        if event["name"] == "thread_name"
    }
    assert names == {rank: f"rank {rank}" for rank in range(4)}
    for rank, peak in enumerate(small().peak_activations.tolist()):
        held = [
            event["args"]["bytes"]
            for event in events(small(), "C")
            if event["name"] == f"activations rank {rank}"
        ]
        assert max(held) == peak
        assert held[-1] == 0


def test_trace_of_messages_at_unknown_times_is_still_json() -> None:
    unknown = np.full(len(small().start), np.nan)
    assert events(replace(small(), sent=unknown, arrived=unknown), "s")


# ---------------------------------------------------------------- html
def data_of(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        re.findall(r'id="data">(.*?)</script>', text, re.DOTALL)[0]
    )
    return found


@pytest.mark.parametrize("timeline", TIMELINES)
def test_page_needs_no_network(timeline: Any) -> None:
    text = page([("predicted", timeline())], "A page")
    assert re.findall(r"https?://", text) == []
    assert re.findall(r"<(?:link|script|img)[^>]*(?:src|href)=\"(?!data:)", text) == []


def test_page_carries_every_column() -> None:
    (found,) = data_of(page([("predicted", sliced())]))["timelines"]
    table = sliced().schedule.table
    for name, expected in (
        ("start", sliced().start),
        ("stage", table.stage),
        ("cause", sliced().cause + 1),
    ):
        column = found["columns"][name]
        values = np.frombuffer(
            zlib.decompress(b64decode(column["data"])), "<" + column["kind"]
        )
        np.testing.assert_allclose(values, expected, rtol=1e-6)


def test_names_and_titles_cannot_break_the_page() -> None:
    text = page([("</script><b>", small())], "<i>&")
    assert "<title>&lt;i&gt;&amp;</title>" in text
    assert data_of(text)["timelines"][0]["name"] == "</script><b>"


def test_page_knows_whether_timelines_have_one_schedule() -> None:
    assert data_of(page([("predicted", small()), ("measured", real())]))["alike"]
    assert not data_of(page([("one", small()), ("other", sliced())]))["alike"]


def test_page_without_timelines_is_refused() -> None:
    with pytest.raises(ShapeError, match="at least one timeline"):
        page([])


# ---------------------------------------------------------------- numbers
@pytest.mark.parametrize(
    ("value", "text"),
    [
        (33.0, "33"),
        (0.012345, "0.01235"),
        (12345.6, "12346"),
        (0.0, "0"),
        (-1.5, "-1.5"),
    ],
)
def test_short_writes_few_digits_and_no_exponent(value: float, text: str) -> None:
    assert short(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (167_000, "167,000 s"),
        (1.5, "1.5 s"),
        (0.0315, "31.5 ms"),
        (2e-6, "2 µs"),
        (0.0, "0 µs"),
    ],
)
def test_seconds_have_a_unit(seconds: float, text: str) -> None:
    assert write_time(seconds, REAL_UNITS) == text


def test_few_names_stand_next_to_the_title_and_many_next_to_the_plot():
    few, many = (
        chart(
            [Series(f"line {n}", (0, 1), (n, 1)) for n in range(count)], "t", "x", "y"
        )
        for count in (2, 3)
    )
    assert (
        few.split('width="')[1].split('"')[0],
        many.split('width="')[1].split('"')[0],
    ) == ("606", "792")
    assert [
        float(y) for y in re.findall(r'<text x="[\d.]+" y="([\d.]+)">line', few)
    ] == [24, 24]
    assert [
        float(y) for y in re.findall(r'<text x="[\d.]+" y="([\d.]+)">line', many)
    ] == [58, 78, 98]


def test_a_measured_page_has_seconds_but_no_bytes():
    timeline = simulate(make("1f1b", ranks=2, microbatches=2), UnitCost())
    measured = replace(timeline, units=MEASURED_UNITS)
    assert '"units":{"seconds":true,"inBytes":false}' in page([("measured", measured)])
    assert '"units":{"seconds":false,"inBytes":false}' in page(
        [("predicted", timeline)]
    )


def test_a_page_writes_each_timeline_in_its_own_units():
    counted = simulate(make("1f1b", ranks=2, microbatches=2), UnitCost())
    measured = replace(counted, units=MEASURED_UNITS)
    text = page([("predicted", replace(counted, units=REAL_UNITS)), ("it", measured)])
    assert '"name":"predicted","units":{"seconds":true,"inBytes":true}' in text
    assert '"name":"it","units":{"seconds":true,"inBytes":false}' in text


def test_a_report_says_where_the_time_of_each_rank_went():
    predicted = simulate(make("1f1b", ranks=2, microbatches=2), UnitCost(comm=0.5))
    predicted = replace(predicted, units=REAL_UNITS)
    late = np.full(len(predicted.start), 0.25)
    late[0] = 0.0
    measured = replace(
        predicted, start=predicted.start + late, end=predicted.end + late
    )
    rows = time_rows_of(predicted, measured)
    assert [row[0] for row in rows] == ["0", "1"]
    assert rows[0][1] == "6 s (59%)"
    assert rows[0][4] == "250 ms (2%)"
    text = report_page("A run", [], [], [], time_rows=rows)
    assert "<h2>Where the time went</h2>" in text
    assert "<td>6 s (59%)</td>" in text
    assert "Where the time went" not in report_page("A run", [], [], [])


def test_every_colour_of_a_reports_curves_changes_on_a_dark_page():
    lines = [Series("train", (1, 2), (2.0, 1.0)), Series("held out", (2,), (1.5,))]
    text = report_page("A run", [], [("loss", lines)], [], moments=[(1.5, "a loss")])
    style = text[: text.index("</style>")]
    drawing = text[text.index("<svg") :]
    own = {"fill": palette.INK}  # all of it inherits this colour
    for attribute, colour in set(re.findall(r' (fill|stroke)="(#\w+)"', drawing)):
        if own.get(attribute) != colour:
            assert f'[{attribute}="{colour}"] {{' in style, (attribute, colour)
