"""The report's part on drafting: a panel, the history hits and a table by epoch, from the journal alone."""

import dataclasses
import json
import re
from pathlib import Path

from antiphon.core.config import build_config, dump_config
from antiphon.core.drafting.statistics import add_statistics
from antiphon.core.loop.events import (
    BatchSealed,
    EvaluationOpened,
    GroupOpened,
    GroupSubmitted,
    JournalEvent,
    StepCommitted,
    dump_event,
)
from antiphon.core.records import DraftingStatistics
from antiphon.core.reporting.figures import RunFigures
from antiphon.core.reporting.run_view import RunView
from antiphon.core.status import Event, RunStatus
from antiphon.lineage.store.artifact_store import ArtifactStore
from antiphon.report import run_charts
from antiphon.report.page import build_report
from antiphon.runs.outcome import RunOutcome, write_results
from tests.report.test_page import charts_of
from tests.support.run_views import view_of

STEPS_PER_EPOCH, GROUPS = 4, 3


def figures_of(epoch: int) -> DraftingStatistics:
    accepted = 20 * min(epoch, 3)
    return DraftingStatistics(
        tokens=100,
        passes=100 - accepted,
        drafted=80,
        covered=accepted + 10,
        accepted=accepted,
        with_history=4 if epoch else 0,
        drafter_s=0.01,
        sampler_s=0.02,
        gain=1.0 + 0.25 * epoch,
        completions=4,
    )


def journal(steps: int, drafts: bool = True) -> list[Event]:
    """A run of `steps` steps; its evaluations draft too and belong to no epoch."""
    told: list[JournalEvent] = [EvaluationOpened(0, 1)]
    evaluated = figures_of(1) if drafts else None
    told.append(GroupSubmitted("v000000-e0000", "l", "w", 1, "d", 0, (9,), 1.0, 0.0, evaluated))
    for step in range(steps):
        epoch = step // STEPS_PER_EPOCH
        drafting = figures_of(epoch) if drafts else None
        names = tuple(f"t{step}-{group}" for group in range(GROUPS))
        for name in names:
            told.append(GroupOpened(name, 0, 0, epoch, None, None, False))
            told.append(GroupSubmitted(name, "l", "w", 1, "d", 0, (25,) * 4, 1.0, 0.0, drafting))
        whole = add_statistics([drafting] * GROUPS)
        used, filtered = (names[:2], names[2:]) if step % 2 else ((), names)
        told.append(
            BatchSealed(step, used, filtered, "b" * 64, "t" * 64, 8, 1, 0, 200, 0.5, 25.0, ((0, 8),), whole)
        )
        told.append(StepCommitted(step, step + 1, f"{step:064x}", "b" * 64, {"loss": 0.1}, False))
    return [Event(i, 1.7e9 + i, event.kind, dump_event(event)) for i, event in enumerate(told)]


def page(folder: Path, events: list[Event], steps: int) -> str:
    (folder / "config.yaml").write_text(dump_config(build_config({"run": {"name": "demo"}})))
    names = [field.name for field in dataclasses.fields(RunStatus)]
    facts: dict[str, object] = {name: 0 for name in names if name.startswith(("groups_", "opened", "sealed"))}
    facts |= {"run_id": "demo-1", "steps_total": steps, "committed_steps": steps, "newest_version": steps}
    status = RunStatus(**facts, staleness_histogram={}, finished=True)  # type: ignore[arg-type]
    build_report(folder, ArtifactStore(folder / "s"), view_of(events), status, folder / "r.html")
    return (folder / "r.html").read_text()


def test_the_page_shows_acceptance_by_epoch_and_the_history_hits(tmp_path: Path) -> None:
    drawn = page(tmp_path, journal(20), 20)
    section = drawn[drawn.index("What drafting did") : drawn.index("Versions and what they came from")]
    assert "epoch 0: 0%, epoch 1: 100%, epoch 2: 100%, epoch 3: 100%, epoch 4: 100%" in section
    assert "80%; epoch 0" in section, "of all completions, evaluations left out"
    rows = re.findall(r"<tr><td>(.*?)</td></tr>", section)
    assert rows[0].split("</td><td>")[:3] == ["0", "0.0%", "10.0%"]
    assert rows[4].split("</td><td>") == ["4", "75.0%", "70.0%", "2.50", "100%", "1,200"]
    assert rows[5].startswith("all") and len(rows) == 6
    marks = [panel["marks"] for panel in charts_of(drawn)["drafting"]["drawn"]]
    assert marks == [[[4 * epoch, f"epoch {epoch}"] for epoch in (1, 2, 3, 4)]] * 2


def test_a_run_without_drafting_has_no_such_section(tmp_path: Path) -> None:
    drawn = page(tmp_path, journal(6, drafts=False), 6)
    assert "What drafting did" not in drawn
    assert run_charts.drafting(RunView()) is None


def test_epochs_begin_where_their_first_group_was_judged() -> None:
    view = view_of(journal(9))
    assert view.epoch_starts() == [(4, 1), (8, 2)]
    assert view.drafting_by_epoch[0] == add_statistics([figures_of(0)] * STEPS_PER_EPOCH * GROUPS)
    assert set(view.drafting_by_epoch) == {0, 1, 2}
    assert view_of([]).epoch_starts() == []


def test_the_results_keep_drafting_among_the_timings(tmp_path: Path) -> None:
    from antiphon.core.drafting.statistics import drafting_summary

    drafting = drafting_summary(view_of(journal(8)).drafting_by_epoch)
    bare = RunOutcome("r", "d", "w" * 64, RunFigures(steps=8, staleness_histogram={0: 8}), 2.0)
    status = RunStatus("r", 8, 8, 8, 8, 8, 0, 0, 0, 0, 0, 0, 0, {})
    written = {}
    for name, outcome in (("bare", bare), ("drafted", dataclasses.replace(bare, drafting=drafting))):
        write_results(outcome, tmp_path / name, (), status, ())
        assert RunOutcome.from_summary(json.loads(json.dumps(outcome.summary()))) == outcome
        written[name] = (tmp_path / name / "metrics.json").read_bytes()
    assert written["bare"] == written["drafted"]
    timings = json.loads((tmp_path / "drafted/timings.json").read_text())["drafting"]
    assert [(e["epoch"], e["acceptance"], e["history_share"]) for e in timings["by_epoch"]] == [
        (0, 0.0, 0.0),
        (1, 0.25, 1.0),
    ]
    assert json.loads((tmp_path / "bare/timings.json").read_text())["drafting"] == {}
    lines = dataclasses.replace(bare, drafting=drafting).lines(tmp_path)
    assert any("by epoch: 0: 0.0%, 1: 25.0%" in line for line in lines)
    assert not any(line.startswith("draft") for line in bare.lines(tmp_path))
