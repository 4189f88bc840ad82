"""`lineage --verify` looks at every run and every ledger that is here, and never passes on nothing."""

import hashlib
import json
import shutil
from itertools import starmap
from pathlib import Path

import pytest

from antiphon.cli.app import execute
from antiphon.cli.lineage import verify_all
from antiphon.core.errors import AntiphonError, ConfigError
from antiphon.lineage.layout import files_in, journal_line, journal_of
from antiphon.runs.finding import find_run, pulled_runs
from tests.support.artifacts import RecordedRun


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    """A recorded run that no test changes."""
    run = RecordedRun(tmp_path_factory.mktemp("verified") / "home")
    run.complete(3)
    return run


@pytest.fixture
def run(whole: RecordedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RecordedRun:
    """A copy of it, as the home."""
    copy = RecordedRun(tmp_path / "home")
    shutil.rmtree(copy.home)
    shutil.copytree(whole.home, copy.home)
    monkeypatch.setenv("ANTIPHON_HOME", str(copy.home))
    monkeypatch.chdir(tmp_path)
    return copy


def begun(run: RecordedRun, name: str) -> Path:
    """Leave the folder of a run that was cancelled before anything was recorded."""
    directory = run.home / "runs" / name
    directory.mkdir()
    shutil.copy(run.run_dir / "config.yaml", directory)
    return directory


def test_a_run_that_recorded_nothing_is_left_out(
    run: RecordedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    begun(run, "cancelled-1")
    assert execute(["lineage", "--verify"]) == 0
    said = capsys.readouterr().out
    assert "of run demo-1 are as recorded" in said
    assert "left out: run cancelled-1 ended before anything was recorded" in said
    assert execute(["lineage", "cancelled-1", "--verify"]) == 1
    told = capsys.readouterr()
    assert "there is nothing to verify: run cancelled-1 ended before" in told.err and not told.out


def test_a_start_that_died_with_an_empty_ledger_is_left_out(run: RecordedRun) -> None:
    (directory,) = [begun(run, "died-1")]
    ledger = run.ledger / "died-1"
    (ledger / "origins").mkdir(parents=True)
    shutil.copy(run.ledger / "demo-1/origins/code.json", ledger / "origins")
    (run.ledger / "died-1.journal").write_text("")
    (left,) = [
        entry.left_out for entry in verify_all(run.home, None) if entry.what == f"run {directory.name}"
    ]
    assert left == "run died-1 ended before anything was recorded"


def test_a_run_killed_before_its_ledger_was_published_is_sound(tmp_path: Path) -> None:
    killed = RecordedRun(tmp_path / "home")
    killed.log.announce(killed.snapshot(0))
    killed.records().close(60.0)
    directory, pointer = killed.ledger / "demo-1", killed.ledger / "demo-1.dvc"
    pointer.unlink()
    (found, _) = verify_all(killed.home, None)  # it was published, and is missed
    assert found.result is not None and "is missing" in found.result.findings[0].problem
    files = {rel: hashlib.md5(path.read_bytes()).hexdigest() for rel, path in files_in(directory).items()}
    journal_of(directory).write_text("".join(starmap(journal_line, files.items())))
    results = [entry.result for entry in verify_all(killed.home, None)]
    assert all(result is not None and not result.findings for result in results)


def test_a_missing_ledger_of_a_recorded_run_is_no_such_case(run: RecordedRun) -> None:
    for path in run.ledger.glob("demo-1*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (found, _) = verify_all(run.home, None)
    assert found.result is not None and found.result.findings[0].problem == "is missing"


def test_every_ledger_that_is_here_is_read_without_its_run(
    run: RecordedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a second clone after `dvc pull`."""
    shutil.rmtree(run.home / "runs")
    shutil.rmtree(run.home / "store")
    assert execute(["lineage", "--verify"]) == 0
    said = capsys.readouterr().out
    assert "of ledger demo-1 are as recorded" in said and "of the store" not in said
    batch = run.ledger / "demo-1/batches/t000001.parquet"
    body = batch.read_bytes()
    batch.unlink()
    batch.write_bytes(body[:-1] + b"?")
    assert execute(["lineage", "--verify", "--json"]) == 1
    (entry,) = [e for e in json.loads(capsys.readouterr().out) if e["checked"] == "ledger demo-1"]
    assert {finding["artifact"] for finding in entry["findings"]} == {"batch 1"}


def test_nothing_to_verify_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "home" / ".dvc").mkdir(parents=True)
    with pytest.raises(AntiphonError, match=r"there is nothing to verify: .*home has no run") as caught:
        verify_all(tmp_path / "home", None)
    assert caught.value.exit_code == 1


def test_what_was_not_pulled_is_named_with_what_brings_it(
    run: RecordedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("runs", "store", ".dvc/cache", "ledger/demo-1"):
        shutil.rmtree(run.home / name)
    pull = f"`dvc pull {run.ledger / 'demo-1.dvc'}` brings it"
    for words in (["report", "demo-1"], ["replay", "demo-1"], ["status", "demo-1"], ["lineage", "--verify"]):
        assert execute(words) in (1, 2), words
        assert pull in capsys.readouterr().err, words
    with pytest.raises(ConfigError, match=r"there is no run demo-2 under .*runs or in .*ledger"):
        find_run(run.home, "demo-2")


def test_a_ledger_of_an_unfinished_run_says_what_it_is_good_for(run: RecordedRun) -> None:
    shutil.rmtree(run.home / "runs")
    assert pulled_runs(run.home) == {"demo-1": run.ledger}
    with pytest.raises(ConfigError, match=r"was not finished when its ledger .* only `antiphon replay`"):
        find_run(run.home, "demo-1")
