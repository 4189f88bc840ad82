"""The run log: one line per step, clocks apart, and a torn end never matters."""

import json
from pathlib import Path

import pytest

from antiphon.api.sink import LogRecord
from antiphon.core.errors import UnavailableError
from antiphon.core.loop.events import EvaluationFinished
from antiphon.core.records import BatchRef, StepCommit
from antiphon.core.status import EvaluationRecord
from antiphon.lineage.documents.graph import line_facts
from antiphon.lineage.log_fold import LogFold
from antiphon.lineage.run_log import RunLog, evaluation_line, read_evaluations, read_steps
from antiphon.lineage.tracking.charts import heldout_metrics
from tests.support.made_log import MadeLog


def records(*steps: int, scores: tuple[tuple[int, float], ...] = ()) -> list[LogRecord]:
    """Return what the log of a run says of steps and scores."""
    log, fold = MadeLog(lambda: 100.0), LogFold()
    for step in steps:
        batch = BatchRef(step, "b" * 64, "c" * 64, 16, 2, 1, 0, 400, 0.5, {1: 4, 0: 12}, 25.0)
        metrics = {"loss": 0.5, "train_s": 1.25}
        log.commit(
            StepCommit(step, step + 1, "a" * 64, "b" * 64, metrics, True), batch, plan={"plan_step_s": 2.0}
        )
    for version, reward in scores:
        log.evaluate(EvaluationRecord(version, 192, 192, reward, 60.0))
    return [record for event in log.events if (record := fold.take(event))]


def open_log(folder: Path) -> RunLog:
    return RunLog(folder)


def test_a_line_holds_what_the_configuration_decides_and_the_clocks_apart(tmp_path: Path) -> None:
    open_log(tmp_path).write(records(0))
    (line,) = read_steps(tmp_path)
    timings = line.pop("timings")
    assert timings["train_s"] == 1.25 and timings["timings_digest"] == "c" * 64 and timings["at"] == 100.0
    assert timings["plan_step_s"] == 2.0
    assert line["metrics"] == {"loss": 0.5}
    assert line["batch"]["staleness_histogram"] == {"0": 12, "1": 4}


def test_a_step_is_written_once_also_after_a_restart(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    for _ in range(2):
        log.write(records(0))
    open_log(tmp_path).write(records(0))
    log = open_log(tmp_path)
    log.write(records(0, 1))
    assert [line["step"] for line in read_steps(tmp_path)] == [0, 1]


def test_a_torn_end_is_dropped_and_written_again(tmp_path: Path) -> None:
    open_log(tmp_path).write(records(0))
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 1, "vers')
    assert [line["step"] for line in read_steps(tmp_path)] == [0]
    open_log(tmp_path).write(records(0, 1))
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1]


def test_evaluations_have_their_own_file(tmp_path: Path) -> None:
    open_log(tmp_path).write(records(scores=((10, 0.5), (0, 0.25))))
    assert [line["version"] for line in read_evaluations(tmp_path)] == [0, 10]
    assert read_steps(tmp_path) == []


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="cannot write"):
        open_log(tmp_path / "gone").write(records(0))


def test_an_evaluation_says_its_samples_and_its_range_only_where_they_are_not_usual() -> None:
    usual = EvaluationFinished(3, 0.5, 60.0)
    assert set(evaluation_line(usual, 8, 1.0)) == {
        *("version", "prompts", "reward_mean", "completion_tokens_mean", "timings")
    }
    wide = EvaluationFinished(3, -0.5, 60.0, samples=4, best_of_k=0.75, reward_range=(-1.0, 1.0))
    line = evaluation_line(wide, 8, 1.0)
    assert (line["samples"], line["best_of_k"], line["reward_range"]) == (4, 0.75, [-1.0, 1.0])
    (document,) = line_facts("run-1", line).values()
    assert document["reward_range"] == [-1.0, 1.0] and document["prompts"] == 8
    assert heldout_metrics(line)["heldout/best_of_k"] == 0.75 and len(heldout_metrics(line)) == 3
    assert len(heldout_metrics(evaluation_line(usual, 8, 1.0))) == 2
