"""A run that was given no DVC project is recorded all the same, and its best weights can be exported."""

import shutil
from pathlib import Path

import pytest

from antiphon.cli.app import execute
from antiphon.core.errors import ConfigError
from antiphon.core.status import EvaluationRecord
from antiphon.lineage.documents.replay_copy import BareCopy
from antiphon.lineage.export import choose_version
from antiphon.runs.finding import find_artifacts
from tests.support.artifacts import RecordedRun


@pytest.fixture(params=["no project", "record.dvc=false"])
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RecordedRun:
    wanted = request.param == "no project"
    made = RecordedRun(tmp_path / "home", record={"mlflow": False, "dvc": wanted}, loop={"max_staleness": 1})
    if wanted:
        shutil.rmtree(made.home / ".dvc")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ANTIPHON_HOME", str(made.home))
    return made


def test_the_base_the_best_and_the_newest_versions_can_be_exported(run: RecordedRun) -> None:
    records = run.records()
    run.tell(range(2))
    run.log.evaluate(EvaluationRecord(2, 8, 8, 0.75, 6.0, ""))
    run.tell(range(2, 4))
    run.log.evaluate(EvaluationRecord(4, 8, 8, 0.5, 6.0, ""))
    assert records.close(60.0).complete
    copy, own = find_artifacts(run.home, run.run_id, None)
    assert isinstance(copy, BareCopy) and own is None
    assert copy.published() == [0, 2, 3, 4]  # with S=1 running work may still name version 3
    scores = {found["version"]: found["reward_mean"] for found in copy.evaluations()}
    assert choose_version(copy, "best") == 2 and scores[2] == 0.75
    weights = copy.weights(2)
    assert weights is not None and weights.stat().st_nlink > 1  # a link: it costs no space
    with pytest.raises(ConfigError, match="no weights of version 1; the versions with weights are v0, v2"):
        choose_version(copy, "v1")
    with pytest.raises(ConfigError, match="has no ledger, so its steps cannot be repeated; `dvc init`"):
        copy.require(range(1))


def test_a_run_that_was_killed_goes_on_keeping_them(run: RecordedRun) -> None:
    first = run.records()
    run.tell(range(2))
    first.close(60.0)
    again = run.records()
    run.tell(range(2, 4))
    again.close(60.0)
    assert find_artifacts(run.home, run.run_id, None)[0].published() == [0, 3, 4]


def test_what_needs_a_ledger_says_so_and_the_rest_works(
    run: RecordedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run.complete()
    (run.run_dir / "outcome.json").write_text("{}")
    assert execute(["lineage", "--verify"]) == 0
    assert execute(["replay", run.run_id]) == 2
    assert "has no ledger" in capsys.readouterr().err
