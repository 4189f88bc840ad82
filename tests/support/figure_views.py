"""Every view of a finished run's figures, read as people and programs read them, and compared."""

import html
import json
import re
import sqlite3
from contextlib import closing
from pathlib import Path

from antiphon.core.metrics import SUMMARY_METRICS
from antiphon.core.reporting.figures import FIGURES, RunFigures, seconds
from antiphon.flows.run_page import artifact_key
from antiphon.lineage.run_overview import read_figures, read_totals
from antiphon.runs.servers.prefect_server import begin_prefect_server
from tests.support.main_job import Job, typed
from tests.support.prefect_api import find_all

SERVER_S = 120.0
"""Longest wait for a Prefect server."""


def check_views(job: Job, folder: Path) -> RunFigures:
    """Check that every view of a job's run has the same figures to the last digit shown, and return them.

    `folder` takes what commands write.
    """
    run_dir = job.run_dir
    figures, said = read_figures(run_dir), job.said
    folded = " ".join(said.split())  # long lines go on in the next one
    for line in figures.lines():
        assert line in folded, f"{line!r} is not in what the job said last:\n{said[-2000:]}"
    resting = typed(job.home, "status", run_dir.name)
    assert resting.returncode == 0, resting.stderr
    for line in figures.lines():
        assert line in resting.stdout
    told = json.loads(typed(job.home, "status", run_dir.name, "--json").stdout)
    files = [
        json.loads(path.read_text()) for path in (run_dir / "outcome.json", job.results / "timings.json")
    ]
    for plain in (told, *files):
        assert plain["figures"] == figures.plain()
        assert RunFigures.from_plain(plain["figures"]) == figures
    metrics = json.loads((job.results / "metrics.json").read_text())
    assert (metrics["pass_before"], metrics["pass_after"]) == (figures.reward_first, figures.reward_last)
    assert metrics["staleness"] == figures.plain()["staleness_histogram"]
    drawn = typed(job.home, "report", run_dir.name, "--out", str(folder / "again.html"))
    assert drawn.returncode == 0, drawn.stderr
    for page in (run_dir / "report.html", folder / "again.html"):
        check_report(page.read_text(), figures, run_dir)
    check_mlflow(job.home, run_dir, figures)
    check_prefect(job.home, run_dir.name, figures, folder / "server.log")
    return figures


def check_report(page: str, figures: RunFigures, run_dir: Path) -> None:
    """Compare what a report says in numbers."""
    page = html.unescape(page)
    found = re.findall(r"<div class=card><p>(.*?)</p><b>(.*?)</b><small>(.*?)</small>", page)
    cards = {name: (value, more) for name, value, more in found}
    said = figures.text
    assert cards["time"][0] == said("wall_s") and f"start-up {said('startup_s')}" in cards["time"][1]
    assert f"{said('seconds_per_step')} per step" in cards["time"][1]
    assert (f"breaks {said('break_s')}" in cards["time"][1]) == bool(figures.breaks)
    assert cards["tokens sampled"][0] == said("tokens_sampled")
    for name, words in (("tokens_per_s", "per second"), ("tokens_trained", "trained")):
        assert f"{said(name)} {words}" in cards["tokens sampled"][1]
    assert f"{said('tokens_filtered')} filtered" in cards["tokens sampled"][1]
    assert cards["staleness"][0] == f"at most {said('staleness_max')}"
    assert f"mean {said('staleness_mean')};" in cards["staleness"][1]
    for name, figure in (("groups filtered", "groups_filtered"), ("groups dropped", "groups_dropped_stale")):
        assert cards[name] == (said(f"{figure}_share"), f"{said(figure)} groups")
    busy, idle = cards["learner busy"]
    assert busy == said("learner_busy_share") and idle.startswith(
        f"idle {said('learner_idle_share')}, waiting "
    )
    first, last = said("reward_first"), said("reward_last")
    assert cards["held-out pass@1"] == (
        f"{first} → {last}",
        f"best {said('reward_best')} {said('reward_best_error')}",
    )
    if figures.drafting_acceptance is not None:
        acceptance, passes = said("drafting_acceptance"), said("drafting_tokens_per_pass")
        row = re.search(r"<tr><td>all</td><td>(.*?)</td><td>.*?</td><td>(.*?)</td>", page)
        assert row is not None and row.groups() == (acceptance, passes)
    assert f"{said('groups_filtered')} groups had equal rewards" in page
    assert f"training<b>{100 * (figures.learner_busy_share or 0.0):.1f}%</b>" in page
    rows = re.findall(r"<tr><td>(\d+)</td><td>([\d.,]+ s)</td>", page)
    made = {str(totals.version): seconds(totals.wall_s) for totals in read_totals(run_dir)[1:]}
    assert dict(rows) == made and made[str(figures.steps)] == said("wall_s")


def check_mlflow(home: Path, run_dir: Path, figures: RunFigures) -> None:
    """Compare a run's summary in MLflow, as its client gives it, and the last point of each total."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{home}/mlflow/mlflow.db")
    known = json.loads((run_dir / "mlflow.json").read_text())
    metrics = client.get_run(known["run_id"]).data.metrics
    numbers = figures.numbers()
    assert {name: metrics.get(f"summary/{name}") for name in numbers} == numbers
    for figure in FIGURES:
        if (value := metrics.get(f"summary/{figure.name}")) is not None:
            assert figure.write(value) == figures.text(figure.name)
    own = {name.removeprefix("summary/") for name in metrics if name.startswith("summary/")}
    catalogue = {metric.name for metric in SUMMARY_METRICS}
    assert {"worker_share.NAME" if name.startswith("worker_share.") else name for name in own} <= catalogue
    for name, figure in (
        ("wall_s", "wall_s"),
        ("tokens_total", "tokens_sampled"),
        ("tokens_trained_total", "tokens_trained"),
        ("cost_dollars", "dollars"),
    ):
        points = {point.step: point.value for point in client.get_metric_history(known["run_id"], name)}
        assert points[figures.steps] == numbers[figure] and max(points) == figures.steps


def check_prefect(home: Path, run_id: str, figures: RunFigures, log: Path) -> None:
    """Compare the figures on a flow run's page, as its server gives them."""
    server = begin_prefect_server(home, 0, log)
    try:
        server.wait_healthy(SERVER_S)
        key = artifact_key("plan", run_id)
        pages = [
            found
            for found in find_all(server.url.removesuffix("/api"), home, "artifacts")
            if found["key"] == key
        ]
    finally:
        server.stop()
    assert pages, "the run has no page"
    newest = max(pages, key=lambda found: str(found["updated"]))["data"]  # each session has a page of its own
    rows = dict(re.findall(r"^\| (.*?) \| (.*?) \|$", newest, re.MULTILINE))
    for label, text in figures.rows():
        assert rows[label] == text, label


def check_against_the_journal(job: Job, figures: RunFigures) -> None:
    """Compare the figures of a run without breaks with a count of its journal, made another way."""
    with closing(sqlite3.connect(f"file:{job.run_dir / 'journal.db'}?mode=ro", uri=True)) as connection:
        rows = connection.execute("SELECT kind, body FROM events ORDER BY seq").fetchall()
    events = [(kind, json.loads(body)) for kind, body in rows]
    opened = next(event["at_s"] for kind, event in events if kind == "run.opened")
    leased = min(event["at_s"] for kind, event in events if kind == "lease.granted")
    commits = [event for kind, event in events if kind == "step.committed"]
    assert figures.wall_s == commits[-1]["at_s"] - leased and figures.startup_s == leased - opened
    assert (figures.breaks, figures.break_s, figures.steps) == (0, 0.0, len(commits))
    busy_s = sum(event["metrics"]["train_s"] for event in commits)
    assert figures.learner_busy_share == busy_s / figures.wall_s
    tokens = {event["group_id"]: event["token_counts"] for kind, event in events if kind == "group.submitted"}
    sealed = [event for kind, event in events if kind == "batch.sealed"]
    trained = [group for event in sealed for group in event["group_ids"]]
    filtered = [group for event in sealed for group in event["filtered_ids"]]
    assert (figures.groups_trained, figures.groups_filtered) == (len(trained), len(filtered))
    assert figures.tokens_trained == sum(sum(tokens[group]) for group in trained)
    assert figures.tokens_filtered == sum(sum(tokens[group]) for group in filtered)
    assert figures.tokens_sampled == figures.tokens_trained + figures.tokens_filtered
    held_out = [sum(counts) for group, counts in tokens.items() if group.startswith("v")]
    assert figures.tokens_evaluated == sum(held_out)
    drafted = [
        event["drafting"]
        for kind, event in events
        if kind == "group.submitted" and event["group_id"] in {*trained, *filtered} and event["drafting"]
    ]
    accepted, guessed = (sum(one[name] for one in drafted) for name in ("accepted", "drafted"))
    assert figures.drafting_acceptance == (accepted / guessed if guessed else 0.0)
