"""The page of rollouts in a real browser, served by its command: wide, on a phone, and by links."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.report.test_page_in_browser import DESKTOP, PHONE
from tests.support.browsed_run import GROUP, BrowsedRun
from tests.support.browser import Browser
from tests.support.main_job import environment
from tests.support.report_page import width

STEPS = 3
COLOUR = "e => getComputedStyle(e).backgroundColor"
COLOURS = f"new Set(Array.from(document.querySelectorAll('article span'), {COLOUR}))"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    run = BrowsedRun(tmp_path_factory.mktemp("home"), record={"mlflow": False, "samples": 2})
    run.complete(STEPS)
    command = [sys.executable, "-P", "-m", "antiphon.cli.app", "browse", run.run_id, "--port", "0"]
    with subprocess.Popen(
        command, env=environment(run.home), cwd=run.home, stdout=subprocess.PIPE, text=True
    ) as serving:
        assert serving.stdout is not None
        line = serving.stdout.readline()
        try:
            assert line.startswith(f"{STEPS * GROUP + 15} trajectories of run demo-1: http://127.0.0.1:"), (
                line
            )
            yield line.split(": ", 1)[1].split()[0]
        finally:
            serving.terminate()
            serving.wait(20.0)


@pytest.fixture(scope="module")
def browser(
    needs_system: Callable[[str], str], address: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Browser]:
    with Browser(needs_system("chromium"), tmp_path_factory.mktemp("profile") / "profile") as opened:
        opened.go(address)
        opened.shows("demo-1", "27 of 27 trajectories", "t0.0")
        yield opened


def go_to(browser: Browser, fragment: str, *texts: str) -> None:
    browser.run(f"location.hash = {json.dumps(fragment)}")
    browser.shows(*texts)


def fill(browser: Browser, name: str, value: str, shows: str) -> None:
    field = f"document.querySelector('[name={name}]')"
    event = "new Event('input', {bubbles: true})"
    browser.run(f"({field}.value = {json.dumps(value)}, {field}.dispatchEvent({event}), 1)")
    browser.shows(shows)


@pytest.mark.parametrize("pixels", [DESKTOP, PHONE])
@pytest.mark.parametrize("view", ["", "/group", "/versions"])
def test_nothing_sticks_out_of_a_page_of_any_width(browser: Browser, pixels: int, view: str) -> None:
    browser.resize(pixels, 800)
    go_to(browser, f"t2.3{view}", "t2.3: reward 1.5, version 1")
    count = {"": 1, "/group": GROUP, "/versions": 3}[view]
    browser.wait_for(f"document.querySelectorAll('article').length === {count}", "others are shown")
    assert width(browser) == pixels
    tops = browser.run("Array.from(document.querySelectorAll('article'), e => e.getBoundingClientRect().top)")
    assert len(set(tops[:2])) == (1 if pixels == DESKTOP else len(tops[:2])), (
        "side by side where there is room"
    )


def test_filters_narrow_the_list_and_stand_in_the_address(browser: Browser, address: str) -> None:
    browser.resize(DESKTOP, 800)
    fill(browser, "part", "trained", f"{STEPS * GROUP} of 27 trajectories")
    fill(browser, "step", "1..2", f"{2 * GROUP} of 27")
    fill(browser, "text", "</THINK>", "of 27")
    asked = "?part=trained&step=1..2&text=%3C%2FTHINK%3E"
    browser.wait_for(f"location.search === '{asked}'", "the address names other filters")
    fill(browser, "step", "1-2", "step='1-2' means nothing here")
    browser.go(f"{address}?reason=length&part=trained")
    browser.shows(f"{STEPS} of 27 trajectories")
    browser.go(address)
    browser.shows("27 of 27 trajectories")


def test_a_link_names_the_very_token_opens_its_fold_and_scrolls_there(browser: Browser, address: str) -> None:
    browser.resize(PHONE, 400)
    browser.go("about:blank")
    browser.go(f"{address}#t1.1/3")
    browser.shows("token 3 of t1.1:", "number 9, observed")
    chosen = "document.querySelector('.chosen')"
    assert browser.run(f"[{chosen}.dataset.index, {chosen}.closest('details').open]") == ["3", True]
    browser.wait_for(
        f"(r => r.top >= 0 && r.bottom <= innerHeight)({chosen}.getBoundingClientRect())", "not scrolled"
    )
    browser.run("document.querySelector('[data-index=\"5\"]').click()")
    browser.shows("token 5 of t1.1:", "version 1, log-probability -0.75")
    assert browser.run("location.hash") == "#t1.1/5"
    browser.run("scrollTo(0, 0)")
    go_to(browser, "t1.1/3", "token 3 of t1.1:")
    browser.wait_for(
        f"(r => r.top >= 0 && r.bottom <= innerHeight)({chosen}.getBoundingClientRect())", "not scrolled"
    )
    go_to(browser, "t1.1/99", "t1.1 has no token 99")


def test_a_filter_that_means_nothing_hides_no_trajectory(browser: Browser, address: str) -> None:
    browser.go(f"{address}?step=1-2#t1.1")
    browser.shows("step='1-2' means nothing here", "t1.1: reward 0.5")
    browser.go("about:blank")
    browser.go(f"{address}?run=other#t1.1")
    browser.shows("this is run demo-1; start `antiphon browse other`")
    assert browser.run("document.querySelectorAll('article').length") == 0
    browser.go("about:blank")
    browser.go(address)
    browser.shows("27 of 27 trajectories")


def test_turns_are_folded_and_what_was_observed_is_closed(browser: Browser) -> None:
    go_to(browser, "t2.1", "t2.1: reward 0.5")
    each = "e => [e.querySelector('summary').innerText, e.open]"
    folds = f"Array.from(document.querySelectorAll('article details'), {each})"
    found = [(title.split(",")[0], is_open) for title, is_open in browser.run(folds)]
    assert found == [
        *(("prompt", True), ("turn 1", True), ("observed", False), ("turn 2", True), ("observed", False)),
        ("turn 3", True),
    ]
    assert "the context begins afresh" in browser.text()


@pytest.mark.parametrize(
    ("mode", "legend", "colours"),
    [
        ("logprob", "≥ 50%", 1),
        ("version", "version 2", 2),
        ("source", "observed", 1),
        ("draft", "which tokens were drafted is not recorded", 1),
    ],
)
def test_tokens_are_coloured_by_what_the_record_has(
    browser: Browser, mode: str, legend: str, colours: int
) -> None:
    go_to(browser, "t2.0", "t2.0: reward 0")
    select = "document.getElementById('colour')"
    browser.run(f"({select}.value = '{mode}', {select}.dispatchEvent(new Event('change')), 1)")
    browser.shows(legend)
    assert browser.run(f"{COLOURS}.size") == colours
    if mode == "draft":
        browser.shows("in its group 34 tokens drafted, 30 right, 9 passes")


def test_what_differs_from_the_version_before_is_marked(browser: Browser) -> None:
    go_to(browser, "t2.3/versions", "t0.3: reward 1.5", "t2.3: reward 1.5", "not in the version before")
    marked = "Array.from(document.querySelectorAll('#t2\\\\.3 .marked'), e => e.dataset.index)"
    assert browser.run(marked) == ["7", "8"]


def test_words_of_models_and_environments_are_text(browser: Browser) -> None:
    go_to(browser, "t1.2", "t1.2: reward 1", "lost <img src=x onerror=", "<think>")
    assert browser.run("document.querySelectorAll('img, article script, think').length") == 0
    assert browser.run("document.title") == "Rollouts - Antiphon"
    blocked = (
        "new Promise(done => { addEventListener('securitypolicyviolation', e => done(e.effectiveDirective));"
    )
    added = "const s = document.createElement('script'); s.textContent = 'document.title = 1'; "
    added += "document.body.append(s); })"
    assert browser.run(blocked + added).startswith("script-src")


def test_the_figures_are_on_the_page(browser: Browser) -> None:
    browser.run("(document.querySelector('header details').open = true, 1)")
    browser.shows("largest staleness", "The record has not: which tokens were drafted")
