"""The run log: one line per step, clocks apart, and a torn end never matters."""

import json
from pathlib import Path

import pytest

from antiphon.core.errors import UnavailableError
from antiphon.core.records import BatchRef, StepCommit
from antiphon.core.status import EvaluationRecord
from antiphon.lineage.run_log import RunLog, read_evaluations, read_steps


def commit(step: int) -> StepCommit:
    return StepCommit(step, step + 1, "a" * 64, "b" * 64, {"loss": 0.5, "train_s": 1.25}, True)


def batch(step: int) -> BatchRef:
    return BatchRef(step, "b" * 64, "c" * 64, 16, 2, 1, 0, 400, 0.5, {1: 4, 0: 12}, 25.0)


def test_a_line_holds_what_the_configuration_decides_and_the_clocks_apart(tmp_path: Path) -> None:
    RunLog(tmp_path).add_step(commit(0), batch(0))
    (line,) = read_steps(tmp_path)
    timings = line.pop("timings")
    assert timings["train_s"] == 1.25 and timings["timings_digest"] == "c" * 64 and timings["at"] > 0
    assert line["metrics"] == {"loss": 0.5}
    assert line["batch"]["staleness_histogram"] == {"0": 12, "1": 4}


def test_a_step_is_written_once_also_after_a_restart(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.add_step(commit(0), batch(0))
    log.add_step(commit(0), None)
    RunLog(tmp_path).add_step(commit(0), None)
    RunLog(tmp_path).add_step(commit(1), batch(1))
    assert [line["step"] for line in read_steps(tmp_path)] == [0, 1]


def test_a_torn_end_is_dropped_and_written_anew(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.add_step(commit(0), batch(0))
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 1, "vers')
    assert [line["step"] for line in read_steps(tmp_path)] == [0]
    RunLog(tmp_path).add_step(commit(1), batch(1))
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1]


def test_evaluations_have_their_own_file(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.add_evaluation(EvaluationRecord(10, 192, 192, 0.5, 60.0))
    log.add_evaluation(EvaluationRecord(0, 192, 192, 0.25, 70.0))
    assert [line["version"] for line in read_evaluations(tmp_path)] == [0, 10]
    assert read_steps(tmp_path) == []


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="cannot write"):
        RunLog(tmp_path / "gone").add_step(commit(0), None)
