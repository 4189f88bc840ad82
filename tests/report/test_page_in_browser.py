"""The report in a real browser: wide and on a phone, in both palettes, by mouse, touch and keys."""

import json
import re
from collections.abc import Callable, Iterator

import pytest

from antiphon.core.config import build_config, dump_config
from antiphon.core.loop.events import load_event
from antiphon.lineage.store.artifact_store import ArtifactStore
from antiphon.report.page import build_report
from tests.report.test_page import journal, status
from tests.support.browser import Browser
from tests.support.report_page import (
    SHOWN,
    crowded_cards,
    point_at_charts,
    press_in_first_chart,
    smallest_letters,
    width,
)
from tests.support.run_logs import write_run_log
from tests.support.run_views import view_of

DESKTOP, PHONE = 1280, 360


@pytest.fixture(scope="module")
def browser(
    needs_system: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Browser]:
    folder = tmp_path_factory.mktemp("report")
    config = build_config({"run": {"name": "demo"}})
    (folder / "config.yaml").write_text(dump_config(config))
    events, tokens = journal(12, workers=3), {"useful": 1234, "filtered": 567}
    write_run_log(folder, [load_event(event.kind, event.data_json) for event in events])
    seconds = {"useful": 30.0, "idle": 5.0, "starting": 60.0}
    facts = status(12, worker_seconds=seconds, tokens_by_use=tokens)
    build_report(folder, ArtifactStore(folder / "store"), view_of(events), facts, folder / "report.html")
    with Browser(needs_system("chromium"), folder / "profile") as opened:
        opened.go((folder / "report.html").as_uri())
        opened.shows("demo-1", "How to read this")
        yield opened


@pytest.mark.parametrize(("pixels", "rows"), [(DESKTOP, 1), (PHONE, 2)])
def test_a_page_of_any_width_is_readable_and_nothing_sticks_out(
    browser: Browser, pixels: int, rows: int
) -> None:
    browser.resize(pixels, 800)
    assert width(browser) == pixels
    assert crowded_cards(browser) == []
    size, text = smallest_letters(browser)
    assert size >= 10.0, text
    places = json.loads(browser.run("document.querySelector('[data-chart=learning] svg').dataset.axes"))
    assert len({place[1] for place in places}) == rows, "beside each other where there is room, else below"


@pytest.mark.parametrize(("pixels", "pointer"), [(DESKTOP, "mouse"), (PHONE, "touch")])
def test_every_curve_tells_its_values_where_one_points(browser: Browser, pixels: int, pointer: str) -> None:
    browser.resize(pixels, 800)
    told = point_at_charts(browser, pointer)
    assert len(told) == 14 and all(told.values())
    assert re.fullmatch(r"learner step [56]\nloss 0\.01\d+", told["Loss over learner steps"])
    assert re.search(r"^training step \d$", told["Which stage worked when, second 0 to 52"], re.MULTILINE)
    assert width(browser) == pixels, "what is told sticks out of the page"


def test_the_arrow_keys_go_from_point_to_point(browser: Browser) -> None:
    browser.resize(DESKTOP, 800)
    press_in_first_chart(browser, "Escape")
    first, second = (press_in_first_chart(browser, "ArrowRight") for _ in range(2))
    assert first.startswith("learner step, policy version 0\n") and "interval 0.2 ± 0.05658" in first
    assert second.startswith("learner step, policy version 1\n")
    assert press_in_first_chart(browser, "ArrowLeft") == first
    assert press_in_first_chart(browser, "End").startswith("seconds from the first lease ")
    assert press_in_first_chart(browser, "Escape") == ""


def test_the_palette_follows_the_reader(browser: Browser) -> None:
    colour = "getComputedStyle(document.querySelector('svg text')).fill"
    seen = set()
    for palette in ("light", "dark"):
        browser.prefer(palette)
        seen.add(browser.run(colour))
    browser.prefer("light")
    assert len(seen) == 2


def test_on_paper_every_chart_and_every_row_is_there(browser: Browser) -> None:
    browser.resize(DESKTOP, 800)
    browser.print_media(True)
    boxes = "Array.from(document.querySelectorAll('.scroll, figure'))"
    cut = browser.run(f"{boxes}.filter(e => e.scrollHeight > e.clientHeight + 1).map(e => e.innerText)")
    assert cut == []
    assert width(browser) == DESKTOP and len(browser.run(f"{SHOWN}.map(e => e.dataset.axes)")) == 14
    browser.print_media(False)
