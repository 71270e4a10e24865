"""The page of `penstock plan --page`: what won, why, and what the rest of the space looks like."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from html import unescape
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path

import pytest

from commands import called
from penstock import Network, UnitCost, make, simulate
from penstock.cli.landscape import LandscapePage, PlanTable
from penstock.cost import Profile, RowProfiles
from penstock.cost.profile import Point, block
from penstock.ir.timeline import PAPER_UNITS
from penstock.plan.overview import (
    MapFinding,
    best_by_placement,
    divisions,
    divisions_by_placement,
    fastest_fixed,
    front,
    placement_name,
    rivals,
)
from penstock.plan.pricing import Question, profile_question, unit_question
from penstock.plan.search import CANNOT_WIN, Landscape, search
from penstock.plan.space import Limits
from penstock.plan.workload import Fixed, Workload
from penstock.view import svg
from penstock.view.chart import Dot, Front, front_figure
from penstock.view.numbers import Scale, name_time, write_size, write_time

TOKENS = 64
VOID_TAGS = {"meta", "link", "br"}
SMALL = "plan --pp 2 --microbatches 3 --cost comm=0.05 --limit stages=2,slices=2"


def measured(factor: float) -> list[Point]:
    """Times that grow with the tokens and with what a slice attends to."""
    points = []
    for tokens, prefix in [(16, 0), (32, 0), (64, 0), (16, 48), (32, 32), (48, 16)]:
        seconds = factor * (1e-4 + tokens * 1e-5 + tokens * prefix * 1e-8)
        points.append(Point(tokens, prefix, seconds, 2 * seconds, seconds, seconds))
    return points


def small_profile(analytic: bool = False) -> Profile:
    device = (("device", "cuda"), ("analytic", True)) if analytic else ()
    return Profile(
        4,
        TOKENS,
        1,
        256.0,
        embed=block(measured(0.2), held=8.0, kept=0.0, weights=2e6, update=1e-4),
        layer=block(measured(1.0), held=8e4, kept=6e4, weights=4e6, update=1e-4),
        head=block(measured(0.5), held=4e4, kept=3e4, weights=2e6, update=1e-4),
        network=Network(1e-5, 3e8),  # so slow that copies win or lose by little
        device=device,
    )


def answer(question: Question) -> Landscape:
    return search(
        question,
        shown=lambda size: write_size(size, question.units, digits=4),
    )


def small_question(memory: float | None, analytic: bool = False) -> Question:
    workload = Workload(
        layers=4,
        tokens=TOKENS,
        batch=4,
        devices=4,
        memory=memory,
        fixed=Fixed(tensor=1, shard=1, recompute=False, microbatches=2),
    )
    profiles = RowProfiles((small_profile(analytic),))
    source = 'a <profile> & "friends"'
    return profile_question(workload, profiles.at, Limits(2, 2), source)


@cache
def profile_case(memory: float | None = None) -> tuple[Landscape, Question]:
    question = small_question(memory)
    return answer(question), question


@cache
def unit_case() -> tuple[Landscape, Question]:
    question = unit_question(2, 3, UnitCost(comm=0.05), 2.0, Limits(2, 2))
    return answer(question), question


def rendered(landscape: Landscape, question: Question) -> str:
    return LandscapePage(landscape, question).html()


def text_of(html: str) -> str:
    """The text of a page, without its style and its figures."""
    body = re.sub(r"<(style|svg|title)\b.*?</\1>", " ", html, flags=re.S)
    return unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", body)))


class Balance(HTMLParser):
    """Collects the tags that are not closed where they should be."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.faults: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in VOID_TAGS:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"{tag} at {self.getpos()}")


def faults_of(html: str) -> list[str]:
    balance = Balance()
    balance.feed(html)
    return balance.faults + balance.open


# ---------------------------------------------------------------- the command
def test_the_command_writes_a_page_that_says_what_won_and_why(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = called(
        monkeypatch, capsys, f"{SMALL} --memory 2mb --page plan.html"
    )
    assert code == 0, err
    assert "plan.html" in out + err
    html = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert faults_of(html) == []
    text = text_of(html)
    landscape, _ = unit_case()
    best = landscape.best
    assert f"predicted to take {name_time(best.step, PAPER_UNITS)}." in text
    assert f"Its ranks idle {best.bubble:.1%} of the time" in text
    peak = write_size(best.peak, PAPER_UNITS)
    assert f"per GPU is {peak} micro-batches, with a limit of 2 micro-batches" in text
    assert "The best plan with plain 1F1B is 1f1b: its step takes" in text
    assert "Stages of a rank and slices of a sequence" in text
    assert "unit costs (F = 1" in text
    assert "Time of a step of the best plan in each place, in forwards." in text
    assert "copies D, ranks P" not in text  # there is only one division


def test_a_page_needs_no_script_and_loads_nothing() -> None:
    html = rendered(*profile_case())
    assert "<script" not in html
    assert "src=" not in html
    assert "url(" not in html
    assert re.findall(r'href="([^"]*)"', html) == ["data:,"]
    assert set(re.findall(r"https?://[^\"' ]+", html)) == {"http://www.w3.org/2000/svg"}


# ---------------------------------------------------------------- why it won
def test_each_rival_is_the_fastest_plan_of_a_kind_that_the_best_plan_is_not() -> None:
    landscape, _ = unit_case()
    best = landscape.best
    assert best.slices > 1
    assert best.schedule.is_split
    found = {
        kind: rival.candidate for rival in rivals(landscape) for kind in rival.kinds
    }
    rest = landscape.candidates[1:]
    assert found["without token slices"].step == min(
        one.step for one in rest if one.slices == 1
    )
    assert found["with whole backwards"].step == min(
        one.step for one in rest if not one.schedule.is_split
    )
    assert found["with plain 1F1B"].name == "1f1b"
    assert "with another number of copies" not in found


def test_the_difference_to_a_rival_is_in_percent_of_the_best_step() -> None:
    landscape, question = unit_case()
    plain = next(row for row in landscape.candidates if row.name == "1f1b")
    more = plain.step / landscape.best.step - 1
    reasons = LandscapePage(landscape, question).reasons()
    [reason] = [one for one in reasons if "plain 1F1B" in one]
    assert f", {more:.1%} more, with a bubble of {plain.bubble:.1%}" in reason


def test_divisions_are_rivals_too() -> None:
    landscape, _ = profile_case()
    kinds = {kind for rival in rivals(landscape) for kind in rival.kinds}
    assert {"with another number of copies", "with another number of ranks"} <= kinds
    for rival in rivals(landscape):
        if "with another number of copies" in rival.kinds:
            assert rival.candidate.division.copies != landscape.best.division.copies


def test_a_plan_that_is_as_fast_is_not_called_slower() -> None:
    landscape, question = unit_case()
    best, *rest = landscape.candidates
    plain = next(row for row in rest if row.name == "1f1b")
    tie = replace(plain, step=best.step)
    tied = replace(landscape, candidates=(best, tie, *rest))
    [reason] = [one for one in LandscapePage(tied, question).reasons() if "1F1B" in one]
    assert ", the same time, " in reason


# ---------------------------------------------------------------- the maps
def test_a_map_shows_the_speed_of_the_best_plan_of_every_division() -> None:
    landscape, question = profile_case()
    page = LandscapePage(landscape, question)
    first = page.heat_maps()[0]
    assert first.columns == {1: "pp=1", 2: "pp=2", 3: "pp=3", 4: "pp=4"}
    cells = first.cells
    divided = {(one.division.copies, one.division.ranks) for one in landscape.divisions}
    assert set(cells) == divided
    best = landscape.best
    chosen = cells[best.division.copies, best.division.ranks]
    speed = TOKENS * 4 / best.step
    assert chosen.chosen
    assert chosen.level == 1.0
    assert float(chosen.text.replace(",", "")) == pytest.approx(
        speed if speed < 1e4 else speed / 1e3, rel=1e-3
    )
    assert sum(cell.chosen for cell in cells.values()) == 1
    assert (
        f"{best.division.microbatches} micro-batches of {best.division.rows}"
        in chosen.tip
    )


def test_there_is_a_map_for_each_placement() -> None:
    landscape, question = profile_case()
    everything = divisions(landscape, question.pricing)
    by_placement = divisions_by_placement(landscape, everything)
    assert set(by_placement) >= {"1 stage", "1 wave", "2 chunks"}
    titles = [one.title for one in LandscapePage(landscape, question).heat_maps()]
    assert titles[2:] == [f"{name} on each rank" for name in by_placement]
    for name, places in by_placement.items():
        for place in places.values():
            if place.candidate is not None:
                assert placement_name(place.candidate.schedule) == name


def test_the_best_of_the_maps_of_all_placements_is_the_map_of_the_best() -> None:
    landscape, question = profile_case()
    everything = divisions(landscape, question.pricing)
    for key, place in everything.items():
        steps = [
            places[key].candidate.step
            for places in divisions_by_placement(landscape, everything).values()
            if places[key].candidate is not None
        ]
        if place.candidate is None:
            assert place.finding is MapFinding.TOO_SLOW
            assert not steps
        else:
            assert place.candidate.step == pytest.approx(min(steps), rel=0.003)


def test_divisions_that_do_not_fit_are_hatched_with_the_reason() -> None:
    landscape, question = profile_case(memory=36e6)
    places = divisions(landscape, question.pricing)
    unfit = {key for key, one in places.items() if not one.candidate}
    assert (1, 1) in unfit
    assert unfit != set(places)
    html = rendered(landscape, question)
    assert faults_of(html) == []
    hatched = re.findall(r'<td class="large" title="([^"]*)">.*?</td>', html)
    assert hatched
    assert all("needs at least" in reason for reason in hatched)
    assert "MiB" in hatched[0]
    details = html[html.index('<details class="card" id="misfits">') :]
    assert "<details open" not in html
    for one in landscape.divisions:
        if one.best is None:
            assert f"<td>{one.division.name}</td>" in details
            assert one.reason in unescape(details)


def test_the_reason_of_a_division_is_that_of_its_smallest_cell() -> None:
    landscape, question = profile_case()
    [result] = [one for one in landscape.divisions if one.division.ranks == 4]
    small = replace(result, best=None, reason="needs at least 3 GiB")
    larger_cell = replace(result.division, rows=8 * result.division.rows)
    large = replace(small, division=larger_cell, reason="needs at least 24 GiB")
    others = [row for row in landscape.candidates if row.division.ranks != 4]
    for cells in ((small, large), (large, small)):
        unfit = replace(landscape, divisions=cells, candidates=tuple(others))
        place = divisions(unfit, question.pricing)[1, 4]
        assert place.finding is MapFinding.TOO_LARGE
        assert place.reason == "needs at least 3 GiB"


def test_a_division_that_cannot_win_shows_its_bound() -> None:
    landscape, question = profile_case()
    best = landscape.best
    late = tuple(
        replace(one, best=None, reason=CANNOT_WIN, bound=2 * best.step)
        if one.division.ranks == 3
        else one
        for one in landscape.divisions
    )
    rows = tuple(row for row in landscape.candidates if row.division.ranks != 3)
    pruned = replace(landscape, divisions=late, candidates=rows, bound=best.step / 1.1)
    assert divisions(pruned, question.pricing)[1, 3].finding is MapFinding.TOO_SLOW
    html = rendered(pruned, question)
    half = TOKENS * 4 / (2 * best.step)
    cells = re.findall(r'<td class="slow"[^>]*><span>([^<]*)</span>', html)
    shown = [float(cell.replace(",", "")) for cell in cells]
    assert any(
        one in (pytest.approx(half, rel=1e-3), pytest.approx(half / 1e3, rel=1e-3))
        for one in shown
    )
    assert "the optimality gap is at most 10.0%" in text_of(html)
    assert f"The bound ignores {question.ignored}" in text_of(html)


def test_a_plan_that_reaches_the_bound_is_optimal() -> None:
    landscape, question = unit_case()
    reached = replace(landscape, bound=landscape.best.step)
    text = text_of(rendered(reached, question))
    assert "so this one is optimal." in text
    assert "above the optimum" not in text


def test_placements_and_slices_of_the_chosen_division_are_mapped() -> None:
    landscape, _ = unit_case()
    found = best_by_placement(landscape)
    assert list(dict.fromkeys(name for name, _ in found)) == [
        "1 stage",
        "1 wave",
        "2 chunks",
    ]
    assert {slices for _, slices in found} == {1, 2}
    for (name, slices), row in found.items():
        alike = [
            other.step
            for other in landscape.candidates
            if placement_name(other.schedule) == name and other.slices == slices
        ]
        assert row.step == pytest.approx(min(alike), rel=0.003)


# ---------------------------------------------------------------- front, timelines, words
def test_no_plan_beats_one_of_the_front_in_both_time_and_memory() -> None:
    landscape = answer(unit_question(3, 3, UnitCost(comm=0.1), None, Limits(2, 1)))
    line = front(landscape.candidates)
    assert len(line) > 1
    for row in line:
        mine = row
        for other in landscape.candidates:
            its = other
            assert not (its.step < mine.step * (1 - 1e-9) and its.peak <= mine.peak)
    steps = [row.step for row in line]
    assert steps == sorted(steps, reverse=True)


def test_timelines_share_one_time_axis() -> None:
    landscape, question = unit_case()
    page = LandscapePage(landscape, question)
    names = [name.split(":")[0] for name, _ in page.timelines()]
    # The best fixed order is not drawn twice if it was chosen.
    chosen_is_fixed = fastest_fixed(landscape) is landscape.best
    others = [] if chosen_is_fixed else ["best published order"]
    assert names == ["chosen", *others, "1F1B"]
    assert page.timelines()[0][1].makespan == landscape.best.makespan
    html = rendered(landscape, question)
    figures = re.findall(r'<div class="card timeline">(.*?)</div>', html, re.S)
    axes = [
        re.search(r'<g class="time".*?</g>', figure, re.S).group(0).count("<text")
        for figure in figures
    ]
    ends = [
        re.findall(r'<text x="([\d.]+)" y="[\d.]+">(\d+)</text>', f) for f in figures
    ]
    assert len(set(axes)) == 1
    assert len(axes) == len(names)
    assert all(one == ends[0] for one in ends)


def test_a_figure_until_a_later_time_leaves_room_at_its_right() -> None:
    timeline = simulate(make("1f1b", ranks=2, microbatches=2), UnitCost())
    alone = svg(timeline, width=400)
    shared = svg(timeline, until=2 * timeline.makespan, width=400)

    def right_edge(drawing: str) -> float:
        spans = drawing[drawing.index('<g class="spans"') :]
        boxes = re.findall(r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', spans)
        return max(float(x) + float(width) for x, width in boxes[:8])

    assert right_edge(alone) == pytest.approx(64 + 400, abs=0.1)
    assert right_edge(shared) == pytest.approx(64 + 200, abs=0.1)


def test_names_are_escaped() -> None:
    landscape, question = profile_case()
    best, *rest = landscape.candidates
    strange = replace(best, name="<b>&\"x'")
    html = rendered(replace(landscape, candidates=(strange, *rest)), question)
    assert faults_of(html) == []
    assert "<b>" not in html
    assert "<profile>" not in html
    assert '<profile> & "friends"' in text_of(html)


def test_the_page_says_that_a_profile_is_analytic() -> None:
    landscape, question = profile_case()
    measured_page = rendered(landscape, question)
    analytic_page = rendered(landscape, small_question(None, analytic=True))
    assert "The profile is analytic" in text_of(analytic_page)
    assert "nothing was measured" in text_of(analytic_page)
    assert "analytic" not in text_of(measured_page)


def test_times_and_sizes_have_units() -> None:
    landscape, question = profile_case()
    page = LandscapePage(landscape, question)
    facts = dict(page.facts())
    assert facts["step"].endswith(" ms")
    assert facts["speed"].endswith("tokens/s")
    assert facts["peak memory per GPU"].endswith(" MiB")
    heads = PlanTable(landscape, question, 20).heads
    assert "step ms" in heads
    assert "MiB per GPU" in heads
    assert page.front().across.endswith("in MiB")
    assert page.front().up.endswith("in ms")


def test_the_table_has_the_best_twenty_rows() -> None:
    landscape, question = profile_case()
    hidden = len(landscape.candidates) - 20
    assert hidden > 0
    grid = PlanTable(landscape, question, 20)
    rows = grid.lines()
    assert len(rows) == 20
    assert f"{hidden:,} more plans fit" in text_of(rendered(landscape, question))
    place = grid.heads.index("step ms")
    times = [float(row[place].replace(",", "")) for row in rows]
    assert times[1:] == sorted(times[1:])
    assert rows[0][place] + " ms" == write_time(landscape.best.step)


def test_labels_cover_neither_dots_nor_numbers_nor_each_other():
    """Three plans on the front that lie as close together as in the plan of a tiny model."""
    crowd = [(3.4, 1.057, "1F1B"), (3.59, 1.054, ""), (3.66, 1.036, "chosen")]
    dots = [
        Dot(size, time, "", group=0, place=place, label=label)
        for place, (size, time, label) in enumerate(crowd, start=1)
    ]
    dots += [Dot(3.66, 1.036, "", group=0, label="best fixed order")]
    dots += [Dot(6.3, 1.28, "", group=0)]
    count = Scale("", 1.0)
    drawn = front_figure(
        Front(tuple(dots), ("any",), count, count, "size", "time"), dots
    )
    number = r"([\d.]+)"
    circles = re.findall(f'<circle class="g0" cx="{number}" cy="{number}" r="5"', drawn)
    boxes = []
    label_text = f'<text x="{number}" y="{number}" class="halo">(.+?)<'
    for x, y, label in re.findall(label_text, drawn):
        left, base = float(x), float(y)
        boxes.append((left, base - 9, left + 6 * len(label), base))
    assert len(boxes) == 3
    for x, y in circles:
        boxes.append((float(x) - 5, float(y) - 5, float(x) + 5, float(y) + 5))
    for one, other in combinations(boxes, 2):
        apart = one[2] <= other[0] or other[2] <= one[0]
        same = one[:2] == other[:2]  # two plans in one place
        assert apart or same or one[3] <= other[1] or other[3] <= one[1]
