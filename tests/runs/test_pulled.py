"""A pulled run gets its folder again, from its ledger alone, also where its model and environment are not."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from antiphon.core.errors import ConfigError, IntegrityError
from antiphon.core.loop import events as e
from antiphon.core.reporting.run_view import RunView
from antiphon.core.status import Event, RunStatus
from antiphon.lineage.ledger.verify import verify_run
from antiphon.lineage.run_events import EventPacker
from antiphon.lineage.suite_records import read_results, write_result
from antiphon.runs.attach import attached, read_events
from antiphon.runs.directory import is_finished, list_runs
from antiphon.runs.finding import find_run, pulled_runs
from antiphon.services.coordinator.journal.pinned import MODEL_FILES, pinned_values
from tests.support.artifacts import RecordedRun
from tests.support.suite_results import suite_result

BEGAN = 1_000_000.0


def packed(run: RecordedRun, *more: e.JournalEvent) -> bytes:
    opened = e.RunOpened(run.run_id, pinned_values(run.config, {MODEL_FILES: "a digest"}))
    packer = EventPacker()
    for seq, event in enumerate([opened, *more], start=1):
        packer.add([Event(seq, BEGAN + seq, event.kind, e.dump_event(event))])
    return packer.finish()


@pytest.fixture
def run(tmp_path: Path) -> RecordedRun:
    """A finished run of a model and an environment that are on no machine of the test."""
    model, environment = {"path": "/nowhere/model"}, {"name": "gone:Away"}
    run = RecordedRun(tmp_path / "first", model=model, environment=environment)
    (run.run_dir / "outcome.json").write_text(json.dumps({"run_id": run.run_id, "run_dir": str(run.run_dir)}))
    records = run.records()
    run.tell(range(2))
    records.finish(packed(run, e.RunFinished()))
    assert records.close(60.0).complete
    return run


@pytest.fixture
def second(run: RecordedRun, tmp_path: Path) -> Path:
    """Another home, after `dvc pull`."""
    home = tmp_path / "second"
    shutil.copytree(run.home / ".dvc", home / ".dvc")
    shutil.copytree(run.ledger, home / "ledger", ignore=shutil.ignore_patterns("*.journal"))
    return home


def asked(directory: Path, home: Path) -> tuple[RunStatus, bytes]:
    async def ask() -> tuple[RunStatus, bytes]:
        async with asyncio.timeout(60.0), attached(directory) as (coordinator, running):
            assert not running
            packer = EventPacker()
            await read_events(coordinator, RunView(), packer)
            return await coordinator.status(), packer.finish()

    return asyncio.run(ask())


def test_the_folder_is_made_again(run: RecordedRun, second: Path) -> None:
    assert list(pulled_runs(second)) == [run.run_id] and list_runs(second) == []
    directory = find_run(second, None)  # the only one that there is
    assert directory == second / "runs" / run.run_id and is_finished(directory)
    for name in ("config.yaml", "base.json", "metrics.jsonl", "evaluations.jsonl", "manifest.json"):
        assert (directory / name).read_bytes() == (run.run_dir / name).read_bytes(), name
    assert json.loads((directory / "outcome.json").read_bytes())["run_dir"] == str(directory)
    assert "first" not in "".join(p.read_text() for p in second.glob("ledger/*/run/*.json"))
    assert (directory / "config.yaml").stat().st_mtime == BEGAN + 1
    status, events = asked(directory, second)
    assert status.finished and status.run_id == run.run_id and events == packed(run, e.RunFinished())
    sound = verify_run(directory, second / "store", second, "ledger")
    assert sound.findings == () and sound.files > 20
    assert find_run(second, run.run_id) == directory and list_runs(second) == [directory]
    assert pulled_runs(second) == {}


def test_results_of_suites_come_along_also_those_found_after_the_end(
    run: RecordedRun, tmp_path: Path
) -> None:
    for version in (2, 4):
        write_result(run.run_dir, suite_result("gsm8k", version, 0.5))
        records = run.records()
        records.finish(packed(run, e.RunFinished()))
        assert records.close(60.0).complete
    assert verify_run(run.run_dir, run.store.root, run.home, "ledger").findings == ()
    home = tmp_path / "third"
    shutil.copytree(run.home / ".dvc", home / ".dvc")
    shutil.copytree(run.ledger, home / "ledger", ignore=shutil.ignore_patterns("*.journal"))
    found = read_results(find_run(home, run.run_id))
    assert found == read_results(run.run_dir) and [one.version for one in found] == [2, 4]


def test_damaged_events_leave_nothing_behind(run: RecordedRun, second: Path) -> None:
    events = second / "ledger" / run.run_id / "run" / "events.jsonl.gz"
    body = events.read_bytes()
    events.unlink()
    for damaged in (body[:-9], b"", b"no events", body[:40] + b"?" + body[41:]):
        events.write_bytes(damaged)
        with pytest.raises(IntegrityError, match="take another copy"):
            find_run(second, run.run_id)
        assert [*(second / "runs").iterdir()] == []


def test_of_several_one_has_to_be_named(run: RecordedRun, second: Path) -> None:
    shutil.copytree(second / "ledger" / run.run_id, second / "ledger" / "other-1")
    with pytest.raises(
        ConfigError, match=r"there are no runs under .*; name one that was pulled: demo-1, oth"
    ):
        find_run(second, None)
