"""The page in a real browser: what the mouse, the keys and the buttons do."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import Timeline, UnitCost, make, simulate
from penstock.cli.landscape import LandscapePage
from penstock.plan.pricing import unit_question
from penstock.plan.search import search
from penstock.plan.space import Limits
from penstock.view import Series, page, report_page

webdriver = pytest.importorskip("selenium.webdriver")
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.actions.wheel_input import ScrollOrigin  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

CHROMIUM = (
    shutil.which("chromium")
    or shutil.which("chromium-browser")
    or shutil.which("google-chrome")
)
DRIVER = shutil.which("chromedriver")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--window-size=1300,900",
)

pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver"
)


class Page:
    """The page, driven from outside."""

    def __init__(self, driver: Any, folder: Path) -> None:
        self.driver, self.folder = driver, folder

    def open(self, *timelines: tuple[str, Timeline]) -> Page:
        file = self.folder / "page.html"
        file.write_text(page(timelines, "A page"), encoding="utf-8")
        self.driver.get(file.as_uri())
        return self.until("window.penstock && penstock.frames > 0")

    def ask(self, what: str) -> Any:
        return self.driver.execute_script(f"return {what}")

    def until(self, what: str, seconds: float = 120) -> Page:
        late = time.monotonic() + seconds
        while not self.ask(f"!!({what})"):
            assert time.monotonic() < late, (
                f"{what} has not come true; the browser says {self.errors()}"
            )
            time.sleep(0.02)
        return self

    def errors(self) -> list[str]:
        return [
            entry["message"]
            for entry in self.driver.get_log("browser")
            if entry["level"] == "SEVERE"
        ]

    def press(self, name: str) -> None:
        self.driver.find_element(By.ID, name).click()

    def keys(self, *words: str) -> None:
        self.driver.execute_script("document.activeElement.blur()")
        ActionChains(self.driver).send_keys(*words).perform()

    def where(self, action: str, timeline: int = 0) -> tuple[int, int]:
        point = self.ask(
            f"penstock.locate({timeline}, penstock.find('{action}', {timeline}))"
        )
        return round(point["x"]), round(point["y"])

    def point(self, action: str, timeline: int = 0) -> ActionChains:
        chain = ActionChains(self.driver, duration=10)
        chain.w3c_actions.pointer_action.move_to_location(*self.where(action, timeline))
        chain.perform()
        return ActionChains(self.driver)

    def tip(self) -> dict[str, str]:
        return self.ask(
            "Object.fromEntries([...document.querySelectorAll('#tip dt')].map(t => [t.textContent,"
            " t.nextElementSibling.textContent]))"
        )

    def view(self) -> tuple[float, float]:
        begin, end = self.ask("penstock.view")
        return begin, end


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield found
    found.quit()


@pytest.fixture
def browser(driver: Any, tmp_path: Path) -> Iterator[Page]:
    shown = Page(driver, tmp_path)
    yield shown
    assert shown.errors() == []


def predicted() -> Timeline:
    return simulate(make("1f1b", ranks=4, microbatches=8), UnitCost())


def measured() -> Timeline:
    return simulate(make("1f1b", ranks=4, microbatches=8), UnitCost(B=2.25, comm=0.5))


def test_hovering_over_an_action_shows_its_facts_and_times(browser: Page) -> None:
    browser.open(("predicted", measured())).point("1B2")
    span = next(span for span in measured().spans() if str(span.action) == "1B2")
    assert browser.ask("penstock.hovered") == "1B2"
    assert browser.ask("document.querySelector('#tip b').textContent") == "1B2backward"
    tip = browser.tip()
    assert (tip["rank"], tip["stage"], tip["micro-batch"]) == ("1", "1, part 1", "2")
    times = [tip[word].split() for word in ("start", "end", "duration")]
    assert [float(number) for number, _ in times] == [span.start, span.end, 2.25]
    assert {unit for _, unit in times} == {"forwards"}
    assert tip["sends"].startswith("1 micro-batch to rank 0, leaves ")
    assert tip["holds"] == "3 micro-batches of activations"


def test_hovering_shows_what_an_action_waited_for(browser: Page) -> None:
    browser.open(("predicted", predicted())).point("2F0")
    assert browser.tip()["waited for"] == (
        "1F0 from rank 1, arrived 2 forwards, idle 2 forwards"
    )
    browser.point("2F1")
    assert browser.tip()["waited for"] == "2F0 on this rank"


def test_leaving_an_action_hides_the_tip(browser: Page) -> None:
    browser.open(("predicted", predicted())).point("1B2")
    ActionChains(browser.driver).move_to_element(
        browser.driver.find_element(By.TAG_NAME, "h1")
    ).perform()
    assert browser.ask("penstock.hovered") is None
    assert not browser.driver.find_element(By.ID, "tip").is_displayed()


def test_buttons_zoom_and_fit(browser: Page) -> None:
    browser.open(("predicted", predicted()))
    assert browser.view() == (0, 33)
    browser.press("in")
    begin, end = browser.view()
    assert end - begin == pytest.approx(33 / 1.5)
    assert (begin + end) / 2 == pytest.approx(16.5)
    browser.press("out")
    assert browser.view() == pytest.approx((0, 33))
    browser.press("in")
    browser.press("fit")
    assert browser.view() == (0, 33)


def test_the_wheel_zooms_around_the_pointer(browser: Page) -> None:
    browser.open(("predicted", predicted()))
    x, y = browser.where("1B2")
    ActionChains(browser.driver).scroll_from_origin(
        ScrollOrigin.from_viewport(x, y), 0, -400
    ).perform()
    begin, end = browser.view()
    assert 5 < end - begin < 25
    assert browser.where("1B2")[0] == pytest.approx(x, abs=2)
    ActionChains(browser.driver).scroll_from_origin(
        ScrollOrigin.from_viewport(x, y), 0, 4000
    ).perform()
    assert browser.view() == pytest.approx((0, 33))


def test_dragging_pans(browser: Page) -> None:
    browser.open(("predicted", predicted()))
    browser.press("in")
    before = browser.view()
    x, _ = browser.where("1B2")
    browser.point("1B2").click_and_hold().move_by_offset(-100, 0).release().perform()
    assert browser.where("1B2")[0] == pytest.approx(x - 100, abs=2)
    assert browser.view()[0] > before[0]
    assert browser.ask("penstock.selected") is None


def test_the_keys_pan_zoom_and_walk(browser: Page) -> None:
    browser.open(("predicted", predicted()))
    browser.keys("+")
    before = browser.view()
    browser.keys(Keys.ARROW_RIGHT)
    assert browser.view()[0] > before[0]
    browser.keys("0")
    assert browser.view() == (0, 33)
    browser.keys("n", "n", "j")
    assert browser.ask("penstock.hovered") == "1F0"
    browser.keys(Keys.ENTER)
    assert browser.ask("penstock.selected") == 0
    browser.keys(Keys.ESCAPE)
    assert (browser.ask("penstock.selected"), browser.ask("penstock.hovered")) == (
        None,
        None,
    )


def test_clicking_an_action_highlights_the_path_of_its_micro_batch(
    browser: Page,
) -> None:
    browser.open(("predicted", predicted())).point("1B2").click().perform()
    path = {f"{stage}{op}2" for stage in range(4) for op in "FB"}
    assert browser.ask("penstock.selected") == 2
    assert set(browser.ask("penstock.highlighted[0]")) == path
    assert browser.ask("document.getElementById('microbatch').value") == "2"
    browser.point("1B2").click().perform()
    assert browser.ask("penstock.selected") is None


def test_a_number_highlights_the_path_of_that_micro_batch(browser: Page) -> None:
    browser.open(("predicted", predicted()))
    field = browser.driver.find_element(By.ID, "microbatch")
    field.send_keys("5")
    assert set(browser.ask("penstock.highlighted[0]")) == {
        f"{stage}{op}5" for stage in range(4) for op in "FB"
    }
    field.send_keys("7")  # 57: there is none
    assert browser.ask("penstock.highlighted") == [[]]


def test_highlighting_dims_the_others(browser: Page) -> None:
    colour = (
        "(() => {{ const c = document.getElementById('plot'), b = c.getBoundingClientRect();"
        " return [...c.getContext('2d').getImageData({} - b.left - 9, {} - b.top, 1, 1).data].slice(0, 3) }})()"
    )
    browser.open(("predicted", predicted()))
    mine, other = (colour.format(*browser.where(action)) for action in ("1B2", "1B3"))
    assert browser.ask(mine) == browser.ask(other)
    browser.point("1B2").click().perform()
    ActionChains(browser.driver).move_to_element(
        browser.driver.find_element(By.TAG_NAME, "h1")
    ).perform()
    total = "{}.reduce((a, b) => a + b)"
    browser.until(f"{total.format(other)} > {total.format(mine)}")


def test_memory_and_critical_path_are_drawn_on_demand(browser: Page) -> None:
    browser.open(("predicted", predicted()))
    before = browser.ask("document.getElementById('plot').toDataURL()")
    browser.press("memory")
    browser.until("penstock.state.memory")
    browser.press("critical")
    assert (
        browser.ask("document.getElementById('critical').getAttribute('aria-pressed')")
        == "true"
    )
    assert browser.ask("penstock.lines[0].critical.found.length") == len(
        predicted().critical_path()
    )
    browser.until(f"document.getElementById('plot').toDataURL() !== '{before}'")


def test_two_timelines_are_compared_rank_by_rank(browser: Page) -> None:
    browser.open(("predicted", predicted()), ("measured", measured()))
    assert browser.ask("penstock.counts.actions") == [64, 64]
    above, below = browser.where("1F0", 0), browser.where("1F0", 1)
    assert above[1] < below[1] < browser.where("2F0", 0)[1]
    assert below[0] > above[0]  # half a tick later, on one axis
    cards = browser.ask("document.getElementById('stats').innerText")
    slower = measured().makespan / predicted().makespan - 1
    assert f"+{slower:.1%}" in cards
    assert f"+{(measured().bubble - predicted().bubble) * 100:.1f} pp" in cards
    browser.point("1F0", 1)
    assert (
        browser.ask("document.querySelector('#tip b').textContent")
        == "1F0forward, measured"
    )
    assert (
        browser.tip()["predicted"] == "1 to 2 forwards (start \u22120.5, duration +0)"
    )
    browser.point("1F0", 1).click().perform()
    assert [len(path) for path in browser.ask("penstock.highlighted")] == [8, 8]


def test_a_page_of_256_ranks_draws_in_less_than_a_second(browser: Page) -> None:
    timeline = simulate(make("1f1b", ranks=256, microbatches=512), UnitCost(comm=0.1))
    took = []
    for _ in range(5):  # others may use this machine
        browser.open(("predicted", timeline))
        took.append(browser.ask("penstock.milliseconds"))
        if took[-1] < 1000:
            break
    assert min(took) < 1000
    assert browser.ask("[penstock.counts.ranks, penstock.drawn]") == [256, 262144]
    browser.driver.find_element(By.ID, "microbatch").send_keys("200")
    assert browser.ask("penstock.highlighted[0].length") == 512
    browser.ask("penstock.show(0, penstock.find('128B200'))")
    assert browser.ask("penstock.hovered") == "128B200"


def test_a_timeline_that_the_runtime_measured_is_laid_over_the_predicted_one(
    browser: Page,
) -> None:
    trial = pytest.importorskip("penstock.train.before.trial").trial
    schedule = make("seq1f1b", ranks=2, microbatches=3, slices=2)
    ours = trial(schedule).timeline
    unit = ours.makespan / simulate(schedule, UnitCost()).makespan
    guess = simulate(schedule, UnitCost(F=unit, B=2 * unit))
    browser.open(("predicted", guess), ("measured", ours)).point("1F1.1", 1)
    span = next(span for span in ours.spans() if str(span.action) == "1F1.1")
    tip = browser.tip()
    assert float(tip["duration"].split()[0]) > 0
    assert browser.ask("penstock.hovered") == "1F1.1"
    assert browser.ask("penstock.lines[1].makespan") == pytest.approx(ours.makespan)
    start = browser.ask("penstock.lines[1].start[penstock.find('1F1.1', 1)]")
    assert start == pytest.approx(span.start, rel=1e-5, abs=1e-7)


def test_the_report_of_a_run_draws_its_curves_and_both_timelines(browser: Page) -> None:
    curves = (
        Series("train", (1, 2, 3), (3.0, float("nan"), 1.0)),
        Series("held out", (3,), (1.5,)),
        Series("none", (), ()),
    )
    text = report_page(
        "A run",
        [("loss", "<1.0>")],
        [("loss", curves)],
        [("predicted", predicted()), ("measured", measured())],
        "def <f>:",
        [("Ranks", ["rank 0: <all>"]), ("Nothing", [])],
    )
    file = browser.folder / "report.html"
    file.write_text(text, encoding="utf-8")
    browser.driver.get(file.as_uri())
    assert browser.ask("document.querySelector('dd').textContent") == "<1.0>"
    assert browser.ask("document.querySelector('pre').textContent") == "def <f>:"
    assert browser.ask("document.querySelectorAll('polyline')[0].points.length") == 2
    # A curve of one point.
    assert browser.ask("document.querySelectorAll('circle').length") == 1
    assert browser.ask("document.querySelector('li').textContent") == "rank 0: <all>"
    assert "Nothing" not in text
    browser.driver.switch_to.frame(0)
    browser.until("window.penstock && penstock.frames > 0")
    assert browser.ask("penstock.counts.actions") == [64, 64]
    browser.driver.switch_to.default_content()


def test_a_report_of_two_ranks_has_no_empty_band_under_its_timelines(
    browser: Page,
) -> None:
    two = simulate(make("1f1b", ranks=2, microbatches=4), UnitCost())
    timelines = [("predicted", two), ("measured", two)]
    file = browser.folder / "two.html"
    file.write_text(report_page("A run", [], [], timelines), encoding="utf-8")
    browser.driver.get(file.as_uri())
    browser.driver.switch_to.frame(0)
    browser.until("window.penstock && penstock.frames > 0")
    bottom = "document.querySelector('footer').getBoundingClientRect().bottom"
    browser.until(f"innerHeight - {bottom} > 0 && innerHeight - {bottom} < 30")
    assert browser.ask("penstock.state.row") == 36  # the tallest
    assert "15 forwards" in browser.ask("document.getElementById('stats').textContent")
    browser.driver.switch_to.default_content()


def test_a_narrow_report_keeps_rows_that_show_which_timeline_is_which(
    browser: Page,
) -> None:
    timelines = [("predicted", predicted()), ("measured", measured())]
    file = browser.folder / "narrow.html"
    file.write_text(report_page("A run", [], [], timelines), encoding="utf-8")
    before = browser.driver.get_window_size()
    browser.driver.set_window_size(500, 800)
    browser.driver.get(file.as_uri())
    browser.driver.switch_to.frame(0)
    browser.until("window.penstock && penstock.frames > 0")
    assert browser.ask("penstock.state.row") >= 11  # Lower rows have no names.
    browser.driver.switch_to.default_content()
    browser.driver.set_window_size(before["width"], before["height"])


def test_the_page_of_a_plan_fits_a_window_and_opens_its_list_of_misfits(
    browser: Page,
) -> None:
    question = unit_question(2, 3, UnitCost(comm=0.05), 2.0, Limits(2, 2))
    landscape = search(question)
    file = browser.folder / "plan.html"
    file.write_text(LandscapePage(landscape, question).html(), encoding="utf-8")
    browser.driver.get(file.as_uri())
    assert browser.ask("document.documentElement.scrollWidth <= innerWidth")
    assert browser.ask("document.querySelectorAll('.heat td.chosen').length") == 1
    tint = "getComputedStyle(document.querySelector('.heat td.{}')).backgroundColor"
    assert browser.ask(tint.format("chosen")) != browser.ask(
        "getComputedStyle(document.querySelector('.card')).backgroundColor"
    )
    widths = browser.ask(
        "[...document.querySelectorAll('.timeline svg')].map(one => one.clientWidth)"
    )
    assert len(widths) >= 2  # the best plan may itself be a fixed one
    assert len(set(widths)) == 1  # one time axis
    row = browser.driver.find_element(By.CSS_SELECTOR, "#misfits tbody tr")
    assert not row.is_displayed()
    browser.driver.find_element(By.CSS_SELECTOR, "#misfits summary").click()
    assert row.is_displayed()
