"""What people look at, in a real browser: a run's Prefect page, the form, MLflow's comparison, the report.

The pictures in docs/images come from here. To make them again, from a home directory that holds
two finished runs of one experiment (docs/guides/compare-experiments.md makes them):
`ANTIPHON_SCREENSHOTS=docs/images ANTIPHON_SCREENSHOTS_HOME=HOME scripts/test tests/e2e/test_browser.py`;
ANTIPHON_SCREENSHOTS_RUN names the run whose pages are shown, by default the first by name.
"""

import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from antiphon.cli.up import read_pages
from antiphon.lineage.tracking.charts import run_link
from antiphon.runs.servers.prefect_server import server_password
from tests.support.browser import Browser
from tests.support.main_job import PROJECT as ROOT
from tests.support.main_job import command, environment
from tests.support.prefect_api import find_all
from tests.support.report_page import SHOWN, crowded_cards, point_at_charts, smallest_letters, width
from tests.support.tracked_runs import TrackedRunFixture, mlflow_of

pytestmark = [pytest.mark.e2e, pytest.mark.engine]
CLOSE_S = 120.0
BOUND = "Staleness bound S, versions"
"""The form's words for `loop.max_staleness`."""
FORM_PX = 2800
"""The form of a run is at most so high, before anything is opened."""
ASSISTANT = "document.querySelector('button[aria-label=Close]')?.click()"
"""Closes the panel that MLflow opens on a first visit."""


@dataclass(frozen=True, slots=True)
class Site:
    """A home with a finished run, a second one to compare it with, and servers that show both."""

    home: Path
    run: str
    prefect: str
    mlflow: str
    comparison: str
    """The page that `up` names for the newest run."""
    browser: Browser
    pictures: Path

    def ask(self, kind: str) -> list[dict[str, Any]]:
        """Return what the Prefect server holds of a kind."""
        return find_all(self.prefect, self.home, kind)

    def form(self, deployment: str) -> str:
        """Return the address of a deployment's form."""
        (found,) = [one["id"] for one in self.ask("deployments") if one["name"] == deployment]
        return f"{self.prefect}/deployments/deployment/{found}/run"


@pytest.fixture(scope="module")
def home(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of a home that holds two runs of one experiment."""
    given = os.environ.get("ANTIPHON_SCREENSHOTS_HOME")
    original = Path(given) if given else request.getfixturevalue("job").home
    copy = tmp_path_factory.mktemp("browser") / "home"
    shutil.copytree(original, copy, ignore=shutil.ignore_patterns("store", "ledger", "up.json"))
    if not given:
        _add_a_run(copy)
    return copy


def _add_a_run(home: Path) -> None:
    """Tell MLflow of a small run in the experiment of the one that is there."""
    with closing(sqlite3.connect(home / "mlflow" / "mlflow.db")) as database:
        ((name,),) = database.execute("SELECT name FROM experiments WHERE name != 'Default'").fetchall()
        folder = (home / "mlflow" / "artifacts" / name).as_uri()
        database.execute("UPDATE experiments SET artifact_location = ? WHERE name = ?", (folder, name))
        database.commit()
    light = TrackedRunFixture(home, name, "light")
    light.tell_all()
    report = mlflow_of(light.records().close(CLOSE_S))
    assert (report.failed, report.pending) == (0, 0), report


@pytest.fixture(scope="module")
def site(
    home: Path, needs_system: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    program = needs_system("chromium")
    reports = sorted(home.glob("runs/*/report.html"))
    try:
        served = command(home, "up", "--prefect-port", "0", "--mlflow-port", "0", timeout_s=240.0)
        assert served.returncode == 0, served.stderr
        deployed = command(home, "deploy", "--project", str(home), timeout_s=240.0)
        assert deployed.returncode == 0, deployed.stderr
        pages = read_pages(home)
        folder = tmp_path_factory.mktemp("pictures")
        pictures = Path(os.environ.get("ANTIPHON_SCREENSHOTS") or folder)
        with Browser(program, folder / "profile") as browser:
            browser.go(f"{pages['prefect'].url}/login")  # as its form keeps what was typed
            password = json.dumps(server_password(home))
            browser.run(f"localStorage.setItem('prefect-password', btoa({password}))")
            # A browser keeps for its session what a person typed into MLflow's dialogue.
            browser.go(pages["mlflow"].url.replace("://", f"://{server_password(home)}@"))
            run = os.environ.get("ANTIPHON_SCREENSHOTS_RUN") or reports[0].parent.name
            (comparison,) = re.findall(r"runs beside .*: (http.*)", served.stdout)
            yield Site(home, run, pages["prefect"].url, pages["mlflow"].url, comparison, browser, pictures)
    finally:
        command(home, "up", "--stop")


def test_the_page_of_a_run_shows_its_stages_artifacts_and_log(site: Site) -> None:
    browser = site.browser
    (flow_run,) = [one["id"] for one in site.ask("flow_runs") if one["name"] == site.run]
    browser.go(f"{site.prefect}/runs/flow-run/{flow_run}")
    browser.shows(site.run, "Completed", "Task runs", "post_train")
    browser.click("Logs")
    browser.shows("training reward", "held-out pass@1 of version 0", "report: ")
    browser.click("Artifacts")
    browser.shows(*(f"{kind}-{site.run}" for kind in ("progress", "versions", "plan")))
    browser.wait_until_painted("canvas")
    browser.picture(site.pictures / "prefect-run.png")
    made = [one for one in site.ask("artifacts") if one["flow_run_id"] == flow_run]
    for kind, words, name in (
        ("table", ("reward", "loss", "staleness"), "prefect-versions.png"),
        (
            "markdown",
            ("asked for", "staleness bound", "final weights", "where", "report.html"),
            "prefect-plan.png",
        ),
    ):
        (artifact,) = [one["id"] for one in made if one["type"] == kind]
        browser.go(f"{site.prefect}/artifacts/artifact/{artifact}")
        browser.shows(*words)
        browser.picture(site.pictures / name)


def test_the_form_shows_what_is_changed_first_and_refuses_what_is_out_of_bounds(site: Site) -> None:
    browser = site.browser
    browser.go(site.form("post-train"))
    browser.shows("Staleness bound S, in policy versions: nothing older trains.", BOUND, "min_terms")
    height = "Math.max(...Array.from(document.querySelectorAll('*'), e => e.scrollHeight))"
    assert browser.run(height) < FORM_PX
    assert browser.run(f"{_field('Steps')}.getBoundingClientRect().bottom < innerHeight")
    assert "Kv" not in browser.text()
    entry = f"{_field(BOUND)}.querySelector('input')"
    browser.wait_for(f"{entry}.value === '2'", "the form does not hold the default")
    browser.run(f"{_field(BOUND)}.scrollIntoView({{block: 'center'}})")
    browser.type(entry, "65")
    words = "65 is greater than the maximum of 64"
    browser.press_until("Submit", f"{_field(BOUND)}.innerText.includes('{words}')")
    browser.run(f"{_field('Run')}.scrollIntoView({{block: 'start'}})")
    browser.picture(site.pictures / "prefect-form.png")
    assert not [one for one in site.ask("flow_runs") if one["deployment_id"]]
    browser.click("change")
    browser.shows("HistoSpec", "How far the stages may run ahead of each other.")


def _field(label: str) -> str:
    """Return the JavaScript expression of the form's innermost field with this label."""
    return (
        "Array.from(document.querySelectorAll('.schema-form-property')).filter(e => "
        "e.querySelector('.schema-form-property__label')?.innerText.replace('(Optional)', '').trim() "
        f"=== '{label}').pop()"
    )


def test_the_benchmark_has_a_form_too(site: Site) -> None:
    site.browser.go(site.form("benchmark"))
    site.browser.shows("so that tables can be paired", "benchmarks/")
    site.browser.picture(site.pictures / "prefect-benchmark.png")


def test_the_named_page_compares_runs_over_steps_seconds_tokens_and_dollars(site: Site) -> None:
    browser = site.browser
    with closing(sqlite3.connect(site.home / "mlflow" / "mlflow.db")) as database:
        marked = "tags.run_uuid = runs.run_uuid AND tags.key = 'antiphon.run_id'"
        query = f"SELECT name FROM runs JOIN tags ON {marked}"
        names = [name for (name,) in database.execute(query).fetchall()]
    assert len(names) == 2
    browser.resize(1560, 1020)
    browser.go(site.comparison)
    browser.shows("Model training", "Models", "2 matching runs", "Held-out reward", "heldout/pass_at_1")
    browser.run(ASSISTANT)
    browser.shows("wall_s", "tokens_total", "cost_dollars", "Learning", *names)
    order = ["Held-out reward", "Learning", "What the overlap does", "Parameters that differ", "summary"]
    seen = browser.shows(*(f"\n{section}\n" for section in order))
    assert [seen.index(f"\n{section}\n") for section in order] == sorted(
        seen.index(f"\n{section}\n") for section in order
    )
    browser.picture(site.pictures / "mlflow-compare.png")


def test_the_page_of_a_run_in_mlflow_says_what_it_is(site: Site) -> None:
    browser = site.browser
    known = json.loads((site.home / "runs" / site.run / "mlflow.json").read_text(encoding="utf-8"))
    place = run_link(site.mlflow, known["experiment_id"], known["run_id"])
    browser.go(place)
    browser.shows(site.run, "Differs from", "report", "antiphon.differs", "quickstart.yaml")
    browser.run(ASSISTANT)
    browser.picture(site.pictures / "mlflow-run.png")
    browser.go(place.replace("?", "/model-metrics?"))
    groups = ("heldout", "learning", "optimizer", "rollout", "summary", "timing")
    seen = browser.shows(*(f"\n{group}\n" for group in groups))
    assert seen.index("\nheldout\n") < seen.index("\nlearning\n") < seen.index("\noptimizer\n")
    browser.go(run_link(site.mlflow, known["experiment_id"], "").replace("runs/?", "models?"))
    browser.shows("Model name", "policy-v0", "policy-v1", "Ready")
    browser.resize(1280, 800)


def test_the_lines_without_a_browser_print_the_same_figures(site: Site) -> None:
    page = (ROOT / "docs" / "guides" / "compare-experiments.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"<<'END'\n(.*?)^END$", page, re.MULTILINE | re.DOTALL)
    with closing(sqlite3.connect(site.home / "mlflow" / "mlflow.db")) as database:
        ((experiment,),) = database.execute("SELECT name FROM experiments WHERE name != 'Default'").fetchall()
    done = subprocess.run(
        [sys.executable, "-P", "-c", script.replace('"compare"', json.dumps(experiment))],
        env=environment(site.home),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    names, *rows = done.stdout.splitlines()
    assert site.run in names and len(names.split()) == 3
    assert {row.split()[0] for row in rows} >= {"wall_s", "dollars", "staleness_mean", "workers_seen"}


def test_the_report_draws_what_was_learned(site: Site) -> None:
    browser = site.browser
    browser.go((site.home / "runs" / site.run / "report.html").as_uri())
    browser.shows(site.run, "held-out pass@1", "What was learned", "How the stages overlapped")
    browser.shows("What the learner saw", "KL between engine and learner", "git commit")
    drawn = browser.run(f"{SHOWN}.map(e => e.getBoundingClientRect().height)")
    assert len(drawn) >= 2 and min(drawn) > 50
    assert crowded_cards(browser) == []
    browser.picture(site.pictures / "report.png")
    browser.resize(360, 740)
    assert width(browser) == 360
    assert crowded_cards(browser) == []
    size, text = smallest_letters(browser)
    assert size >= 10.0, text
    assert all(point_at_charts(browser, "touch").values())
    browser.picture(site.pictures / "report-phone.png")
    browser.resize(1280, 800)
