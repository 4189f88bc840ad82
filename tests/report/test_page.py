"""The report: one page from a journal, complete, self-contained and repeatable."""

import dataclasses
import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from antiphon.core.config import build_config, dump_config
from antiphon.core.loop.events import (
    BatchSealed,
    EvaluationFinished,
    EvaluationOpened,
    GroupRewarded,
    GroupSubmitted,
    JournalEvent,
    LeaseExpired,
    LeaseGranted,
    RunOpened,
    RunResumed,
    SnapshotAnnounced,
    SnapshotDelivered,
    StepCommitted,
    WorkerLoaded,
    dump_event,
    load_event,
)
from antiphon.core.reporting.run_view import RunView
from antiphon.core.status import Event, RunStatus
from antiphon.core.voided_batch import VoidedBatch
from antiphon.lineage.store.artifact_store import ArtifactStore
from antiphon.lineage.suite_records import write_result
from antiphon.report import run_charts
from antiphon.report.page import build_report
from tests.support.run_logs import write_run_log
from tests.support.run_views import view_of
from tests.support.suite_results import suite_result

STEP_S, GROUPS, STARTUP_S = 4.0, 6, 60.0


BASE = "ba" * 32
METRICS = {"entropy_estimate": 1.2, "kl_k3": 0.002, "ratio_mean": 1.0, "clip_share": 0.01}
METRICS |= {"effective_sample_share": 0.99, "gradient_norm": 0.3, "ratio_max": 2.5}


def journal(steps: int, workers: int = 2, store: ArtifactStore | None = None) -> list[Event]:
    """A plausible overlapped run: sampling never stops, training and broadcast run beside it."""
    opening = (RunOpened("demo-1", {}, -STARTUP_S), SnapshotAnnounced(0, BASE, "127.0.0.1:1"))
    moments: list[tuple[float, JournalEvent]] = [(-STARTUP_S, event) for event in opening]
    for step in range(steps):
        began = 2.0 + step * STEP_S
        version = max(0, step - 1)
        for group in range(GROUPS):
            name, worker = f"g{step}-{group}", f"worker-{group % workers}"
            leased, done = began + 0.3 * group - 1.5, began + 1.0 + 0.5 * group
            tokens = tuple(30 + (7 * group + 3 * step + i) % 40 for i in range(8))
            moments += [
                (leased, LeaseGranted(name, f"l{name}", worker, 1, version, leased)),
                (done, GroupSubmitted(name, f"l{name}", worker, 1, "d" * 64, version, tokens, 1.0, done)),
                (done + 0.2, GroupRewarded(name, (0.0, 1.0) * 4, "judge", done + 0.2)),
            ]
        reward = min(0.8, 0.2 + 0.6 * step / max(1, steps) + 0.03 * (-1) ** step)
        digest = store.put(f"batch {step}".encode()) if store else "b" * 64
        histogram = ((0, 16), (1, 32)) if step else ((0, 48),)
        sealed, committed = began + 3.8, began + 6.4
        batch = BatchSealed(
            step, ("g",), (), digest, "t" * 64, 48, 1, 0, 2400, reward, 50.0 - step / 4, histogram
        )
        metrics = {"train/loss": 0.1 / (step + 1), "train/train_s": 2.5} | METRICS
        moments += [
            (sealed, batch),
            (committed, StepCommitted(step, step + 1, f"{step:064x}", digest, metrics, True, committed)),
            (committed + 0.3, SnapshotAnnounced(step + 1, f"{step:064x}", "127.0.0.1:1")),
            *((committed + 0.9 + w / 2, WorkerLoaded(f"worker-{w}", step + 1)) for w in range(workers)),
        ]
    for version in range(0, steps + 1, 5):
        at = 2.0 + version * STEP_S
        score = 0.2 + 0.6 * version / max(1, steps)
        moments += [
            (at, EvaluationOpened(version, 192)),
            (at + 3, EvaluationFinished(version, score, 44.0)),
        ]
    moments.sort(key=lambda moment: moment[0])
    return [Event(i, 1.7e9 + at, e.kind, dump_event(e)) for i, (at, e) in enumerate(moments)]


def status(steps: int, **changes: object) -> RunStatus:
    plain = dict.fromkeys(("opened_steps", "sealed_steps", "groups_open", "groups_leased"), 0)
    plain |= dict.fromkeys(("groups_to_reward", "groups_ready", "groups_dropped_stale", "groups_filtered"), 0)
    facts = {**plain, "run_id": "demo-1", "steps_total": steps, "committed_steps": steps}
    facts |= {"newest_version": steps, "groups_requeued": 0, "finished": True, **changes}
    return RunStatus(**facts)  # type: ignore[arg-type]


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., str]:
    def build(steps: int, view: RunView | None = None, **changes: object) -> str:
        (tmp_path / "config.yaml").write_text(dump_config(build_config({"run": {"name": "demo"}})))
        store = ArtifactStore(tmp_path / "store")
        events = journal(steps, store=store) if steps >= 0 else []
        write_run_log(tmp_path, [load_event(event.kind, event.data_json) for event in events])
        view = view or view_of(events)
        out = tmp_path / "report.html"
        build_report(tmp_path, store, view, status(max(steps, 0), **changes), out)
        return out.read_text()

    return build


def charts_of(page: str) -> dict[str, Any]:
    """Return what the page's script draws, by name."""
    found = re.search(r'<script type="application/json" id="charts">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    charts: dict[str, Any] = json.loads(found[1])
    return charts


class Outline(HTMLParser):
    """Collects headings, tags and anything that would reach for the network."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attributes:
            if name in {"src", "href", "xlink:href"}:
                self.links.append(value or "")


def test_the_page_is_complete_and_needs_nothing_else(make: Callable[..., str]) -> None:
    page = make(20)
    outline = Outline(page)
    names = {"learning", "timeline", "timeline-zoom", "staleness", "throughput", "length", "filtered", "loss"}
    names |= {"entropy_estimate", "kl_k3", "ratio_mean", "clip_share", "effective_sample_share"}
    names |= {"gradient_norm"}
    assert set(charts_of(page)) == names and outline.tags.count("figure") == len(names) + 1
    assert {name for name in names if f'data-chart="{name}"' not in page} == set()
    assert "Where the seconds went" in page
    assert outline.tags.count("script") == 2 and "link" not in outline.tags
    assert outline.links == [] and len(page) < 100_000
    assert not re.findall(r"url\((?!#)", page) and "@import" not in page
    assert not re.findall(r"\b(?:fetch|XMLHttpRequest|WebSocket|import)\b\s*\(", page)
    for words in ("demo-1", "20 of 20 steps", "20.0% → 80.0%", "best 80.0%", "bound 2", "max_staleness: 2"):
        assert words in page, words
    assert page.count("<tr>") == 22 and f"{19:064x}" in page


def test_suites_stand_beside_the_held_out_curve_and_in_a_table(
    make: Callable[..., str], tmp_path: Path
) -> None:
    assert "<h2>Suites</h2>" not in make(4)
    for version, mean in ((4, 0.75), (0, 0.25)):
        write_result(tmp_path, suite_result("gsm8k", version, mean))
    page = make(4)
    assert "<h2>Suites</h2>" in page and "avg@1 0.7500 (0.6500 to 0.8500)" in page
    assert "8 x 1 at temperature 0" in page and "64, 25.0% cut off" in page
    (series,) = charts_of(page)["learning"]["drawn"][2]["series"]
    assert (series["name"], series["points"]) == ("gsm8k", [[0.0, 0.25], [4.0, 0.75]])


def test_the_page_shows_how_weights_came_to_the_workers(make: Callable[..., str]) -> None:
    assert "<h2>Weights</h2>" not in make(5)
    lying = {"w1": "sent <b>other</b> bytes"}
    delivered = (
        SnapshotDelivered(2, "w0", 2.5, 0.5, {"": 3_000_000, "w1": 1_000_000}, {}, lying, 0.25, 0.125),
        SnapshotDelivered(2, "w1", 4.5, 0.5, {name: 1_000_000 for name in "abcdef"}),
        SnapshotDelivered(3, "w0"),
    )
    told = [Event(1000 + i, 1.7e9 + 30, e.kind, dump_event(e)) for i, e in enumerate(delivered)]
    view = view_of([*journal(5), *told])
    assert [(v.version, v.seconds_to_last) for v in view.deliveries.in_order()] == [(2, 4.5), (3, 0.0)]
    page = make(5, view)
    assert "<h2>Weights</h2>" in page and "deliveries" in charts_of(page)
    rows = [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>(<td>.*?)</tr>", page)]
    wrong = "w1 sent &lt;b&gt;other&lt;/b&gt; bytes"
    assert rows[:3] == [
        ["3", "w0", "0.0", "linked on the origin&#39;s machine", "0.00", "0.00", "", "", ""],
        ["2", "w1", "6.0", "a 1.0, b 1.0, c 1.0, d 1.0, 2 others 2.0", "0.50", "4.50", "", "", ""],
        ["2", "w0", "4.0", "origin 3.0, w1 1.0", "0.50", "2.50", "0.25", "0.12", wrong],
    ]


def test_the_versions_begin_with_the_one_that_the_run_began_with(make: Callable[..., str]) -> None:
    rows = re.findall(r"<tr>(<td>.*?)</tr>", make(5))
    cells = [re.findall(r"<td>(.*?)</td>", row) for row in rows]
    assert [row[0] for row in cells] == ["0", "1", "2", "3", "4", "5"]
    assert cells[0][3] == "20.0%" and BASE in cells[0][8] and cells[0][1] == cells[0][2] == "–"
    assert [row[3] for row in cells[1:]] == ["–", "–", "–", "–", "80.0%"]


def test_the_clock_stands_still_in_a_break(make: Callable[..., str]) -> None:
    events = journal(4)
    half = len(events) // 2
    before = events[half - 1].at
    resumed = RunResumed(at_s=before - 1.7e9, break_s=3600.0)
    late = [dataclasses.replace(event, at=event.at + 3600.0) for event in events[half:]]
    told = [*events[:half], Event(0, before + 3600.0, resumed.kind, dump_event(resumed)), *late]
    view, whole = view_of(told), view_of(events)
    assert run_charts.break_marks(view, *view.window) == [(pytest.approx(before - 1.7e9 - 0.5), "break")]
    assert view.window[1] == pytest.approx(whole.window[1], abs=STEP_S), "but for a start-up"
    assert "interrupted and continued once" in make(4, view=view)
    page = make(4)
    assert "started for 60.5 s before they worked" in page and "interrupted" not in page


def test_the_page_shows_what_became_of_the_work(make: Callable[..., str]) -> None:
    seconds = {"useful": 300.0, "preempted": 60.0, "idle": 40.0, "stale": 0.0, "starting": 70.0}
    page = make(3, worker_seconds=seconds, tokens_by_use={"useful": 12345, "preempted": 600})
    section = page[page.index("What became of the work") : page.index("Versions and what they came from")]
    for words in ("useful: 300 s, 12,345 tokens", "preempted: 60 s, 600 tokens", "idle: 40 s"):
        assert words in section, words
    assert "stale:" not in section and "starting:" not in section
    assert "The 70.0 s until their first leases" in section
    assert "What became of the work" not in make(3)


def test_equal_journals_give_equal_pages(make: Callable[..., str]) -> None:
    assert make(6) == make(6)


@pytest.mark.parametrize("steps", [-1, 0, 1, 2])
def test_a_run_that_hardly_began_has_a_page_too(make: Callable[..., str], steps: int) -> None:
    assert "How to read this" in make(steps)


def test_an_unfinished_run_says_so(make: Callable[..., str]) -> None:
    page = make(4, steps_total=60, finished=False, paused_reason="loss is <nan>")
    voided = VoidedBatch(2, "cd" * 32, 4, 0, 8, "loss is <nan>", "ada")
    assert "ada voided batch cdcd" in make(4, voided=(voided,)) and "voided batch" not in page
    assert "paused: loss is &lt;nan&gt;" in page and "metrics are partial" in page


def test_groups_that_were_offered_again_are_explained(make: Callable[..., str]) -> None:
    assert "offered again" not in make(2)
    events = journal(2)
    at = events[-1].at + 1.0
    told = [
        LeaseExpired("g", f"l{i}", "w", reason, waste=waste)
        for i, (reason, waste) in enumerate(
            (
                ("no sign of life for 60 s", "preempted"),
                ("no sign of life for 60 s", "preempted"),
                ("handed over by its worker", "preempted"),
                ("a duplicate was handed in first", "duplicate"),
            )
        )
    ]
    view = view_of([*events, *(Event(0, at, event.kind, dump_event(event)) for event in told)])
    assert view.offered_again == {"no sign of life": 2, "handed over by its worker": 1}
    page = make(2, view=view)
    assert "3 groups were offered again" in page
    assert "(2 x no sign of life, 1 x handed over by its worker)" in page


def test_the_head_names_command_and_commit(make: Callable[..., str], tmp_path: Path) -> None:
    assert "<dl>" not in make(-1), "a run that noted neither"
    starts = [
        {"command": "./antiphon run <x>.yaml", "commit": "ab" * 20, "modified": True, "at": 1.0},
        {"command": "./antiphon run <x>.yaml", "commit": "cd" * 20, "modified": False, "at": 2.0},
    ]
    (tmp_path / "starts.json").write_text(json.dumps(starts))
    head = make(-1).partition("</header>")[0]
    assert "<code>./antiphon run &lt;x&gt;.yaml</code>continued once<" in head
    assert "abababababab</span></code>with uncommitted changes<" in head
    assert "<dt>continued with</dt>" in head and f'title="{"cd" * 20}"' in head


def test_each_plot_of_a_page_stands_by_itself(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path / "store")
    files = build_report(tmp_path, store, view_of(journal(6)), status(6), tmp_path / "report.html")
    assert (
        list(files)[:3] == ["learning.svg", "timeline.svg", "timeline-zoom.svg"] and "work.svg" not in files
    )
    page = (tmp_path / "report.html").read_text()
    for name, text in files.items():
        assert ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
        assert f'data-chart="{name.removesuffix(".svg")}"' in page or name == "busy.svg"
    assert files == build_report(tmp_path, store, view_of(journal(6)), status(6), tmp_path / "again.html")


def test_rewards_of_another_range_are_numbers(make: Callable[..., str]) -> None:
    view = view_of(journal(10))
    view.reward_range = (-5.0, 5.0)
    page = make(10, view, trajectories_failed=2, last_failure="it hung")
    assert "pass@1" not in page.partition("Configuration")[0].partition('class="cards"')[0]
    assert "solved nothing and count as -5" in page
    panel = charts_of(page)["learning"]["drawn"][0]
    assert panel["low"] == 0.0 and panel["high"] < 1.0, "what occurs, not the whole range"
    assert "held-out reward, 95% interval" in page
    assert "20.0%" not in page.partition("Versions and what they came from")[2].partition("</table>")[0]
