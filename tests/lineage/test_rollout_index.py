"""A rollout index has what the report counts, under names that are the same in every copy of a run."""

import shutil
from collections import Counter
from pathlib import Path

import pytest

from antiphon.core.errors import ConfigError, IntegrityError, UnavailableError
from antiphon.core.reporting.rollouts import read_query
from antiphon.lineage import rollout_index
from antiphon.lineage.names import batch_entry, evaluation_entry
from antiphon.lineage.rollout_index import RolloutIndex
from antiphon.lineage.run_overview import read_figures
from antiphon.runs.samples import files_of
from tests.support.artifacts import RecordedRun
from tests.support.browsed_run import GROUP, BrowsedRun, browsed_row

STEPS = 3


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> BrowsedRun:
    made = BrowsedRun(tmp_path_factory.mktemp("home"), record={"mlflow": False, "samples": 2})
    made.complete(STEPS)
    return made


def index_of(run: RecordedRun) -> RolloutIndex:
    return RolloutIndex(files_of(run.run_dir, run.home))


def test_what_trained_is_as_stale_as_the_report_says(run: BrowsedRun) -> None:
    table, figures = index_of(run).table, read_figures(run.run_dir)
    trained = table[table["part"] == "trained"]
    assert dict(Counter(trained["staleness"].tolist())) == figures.staleness_histogram
    assert int(trained["tokens"].sum()) == figures.tokens_trained
    assert trained.size == STEPS * GROUP and {*table["part"]} == {"trained", "filtered", "held-out"}


def test_every_trajectory_is_found_by_its_name(run: BrowsedRun) -> None:
    index = index_of(run)
    assert [index.place(name) for name in index.table["name"]] == list(range(index.table.size))
    row, timing = index.trajectory(index.place("t2.3"))
    assert row.token_ids.tolist() == browsed_row(2, 3).token_ids.tolist()
    assert timing is not None and timing.drafted == 34
    row, timing = index.trajectory(index.place("v0.1"))
    assert (row.reward, timing) == (0.5, None)
    for wrong in ("t9.0", "t2.4", "x", "t2", "t02.1"):
        with pytest.raises(ConfigError, match=f"has no trajectory '{wrong}'; names are such as t7.12"):
            index.place(wrong)


def test_reasons_are_why_it_ended_and_what_was_said(run: BrowsedRun) -> None:
    table = index_of(run).table
    assert {row["reason"].partition("<")[0] for row in table[table["part"] == "trained"]} == {
        "stop",
        "environment",
        "length; lost ",
    }


def test_texts_are_found_once_they_are_read(run: BrowsedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    index = index_of(run)
    answer = read_query({"text": "</THINK>"})
    assert index.select(answer).size == index.searched == 0
    index.read_texts()
    codec = index.files.codec
    found = [
        i for i in range(index.table.size) if "</think>" in codec.decode(index.trajectory(i)[0].token_ids)
    ]
    assert index.select(answer).tolist() == found != []
    assert index.searched == index.table.size
    prompt = codec.decode(browsed_row(0, 1).prompt_token_ids)
    asked = index.select(read_query({"text": prompt}))
    assert {name.partition(".")[2] for name in index.table["name"][asked]} >= {"1"}
    assert index.select(read_query({"text": "\n.*"})).size == 0, "a text is no pattern"
    monkeypatch.setattr(rollout_index, "TEXT_BYTES", 1)
    index = index_of(run)
    index.read_texts()
    assert index.searched == GROUP, "what there is no room for stays unread"


def test_a_copied_ledger_shows_the_same_under_the_same_names(run: BrowsedRun, tmp_path: Path) -> None:
    shutil.copytree(run.ledger / run.run_id, tmp_path / "copy" / run.run_id)
    here = index_of(run).table
    for place in (tmp_path / "copy", tmp_path / "copy" / run.run_id):
        copied = RolloutIndex(files_of(place, tmp_path / "no home"))
        assert copied.table.tolist() == here.tolist() and copied.codec is not None
    shutil.copytree(run.home / "store", tmp_path / "other" / "store")
    shutil.copytree(run.run_dir, tmp_path / "other" / "runs" / "renamed")
    moved = files_of(tmp_path / "other" / "runs" / "renamed", tmp_path / "no home")
    assert RolloutIndex(moved).table.tolist() == here.tolist()
    assert moved.log is not None and read_figures(moved.log) == read_figures(run.run_dir)


@pytest.mark.parametrize(
    "rel",
    [batch_entry(1, "parquet"), batch_entry(1, "samples.parquet"), evaluation_entry(0, "samples.parquet")],
)
def test_a_file_of_a_ledger_that_is_not_the_recorded_one_is_refused(
    run: BrowsedRun, tmp_path: Path, rel: str
) -> None:
    pinned = tmp_path / run.run_id
    shutil.copytree(run.ledger / run.run_id, pinned)
    (pinned / rel).unlink()
    shutil.copyfile(pinned / batch_entry(2, "parquet"), pinned / rel)
    with pytest.raises(IntegrityError, match=f"{rel} is not the file that run demo-1 recorded"):
        RolloutIndex(files_of(pinned, tmp_path))


def test_a_copied_run_shows_no_other_run_of_the_same_name(run: BrowsedRun, tmp_path: Path) -> None:
    made = BrowsedRun(tmp_path / "here", record={"mlflow": False, "samples": 0}, environment={"seed": 5})
    made.complete(STEPS + 1)
    copied = tmp_path / "copied" / "runs" / run.run_id
    shutil.copytree(run.run_dir, copied)
    with pytest.raises(ConfigError, match="no trajectory of run demo-1 is here"):
        RolloutIndex(files_of(copied, made.home))
    shutil.rmtree(made.ledger / run.run_id)
    shutil.copytree(run.ledger / run.run_id, made.ledger / run.run_id)
    assert RolloutIndex(files_of(copied, made.home)).files.steps == [*range(STEPS)]


def test_what_disappears_while_it_is_shown_is_a_sentence(tmp_path: Path) -> None:
    run = BrowsedRun(tmp_path, record={"mlflow": False, "dvc": False, "samples": 0})
    run.tell(range(3))
    assert run.records().close(30.0).complete
    index = index_of(run)
    run.store.path(run.batch(1).digest).unlink()
    index.read_texts()
    gone = "batches/t000001.parquet of run demo-1 is gone since this began"
    assert index.searched == index.table.size == 3 * GROUP
    (said,) = index.lacks
    assert said.startswith(f"the texts of {GROUP} trajectories: {gone}")
    assert {name[:2] for name in index.table["name"][index.select(read_query({"text": "</think>"}))]} == {
        "t0",
        "t2",
    }
    with pytest.raises(UnavailableError, match=gone):
        index.trajectory(index.place("t1.0"))


def test_what_is_not_here_is_said(run: BrowsedRun, tmp_path: Path) -> None:
    shutil.copytree(run.ledger / run.run_id, tmp_path / run.run_id)
    (tmp_path / run.run_id / "model" / "tokenizer.json").unlink(missing_ok=True)
    files = files_of(tmp_path / run.run_id, tmp_path)
    nowhere = files.config.model.model_copy(update={"path": "/nowhere"})
    files.config = files.config.model_copy(update={"model": nowhere})
    index = RolloutIndex(files)
    assert index.codec is None
    index.read_texts()
    assert index.searched == 0 and "tokens are shown as numbers: model.path='/nowhere'" in index.lacks[0]


def test_missing_batches_and_empty_runs_are_sentences(tmp_path: Path) -> None:
    run = BrowsedRun(tmp_path, record={"mlflow": False, "dvc": False, "samples": 0})
    records = run.records()
    with pytest.raises(
        ConfigError, match="no trajectory of run demo-1 is here; they are in its ledger, or in"
    ):
        index_of(run)
    run.tell(range(2))
    assert records.close(30.0).complete
    run.store.path(run.batch(1).digest).unlink()
    index = index_of(run)
    assert index.table.size == GROUP and index.lacks == ["the batches of 1 steps"]
    with pytest.raises(ConfigError, match="there is no run demo-9"):
        files_of(run.home / "runs" / "demo-9", run.home)
    with pytest.raises(ConfigError, match="the artifacts of one run are not in"):
        files_of(run.home / "store", run.home)
