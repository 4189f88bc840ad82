"""A run none of whose steps trained anything says so in the end, and shows what it answered."""

from types import SimpleNamespace

from antiphon.core.records import StepCommit
from antiphon.core.reporting.alarms import ALARMS, StepAlarms
from antiphon.runs.outcome import SHOWN, RunOutcome, closing_lines
from tests.support.artifacts import RecordedRun

NOTHING = {"trajectories": 0.0, "gradient_norm": 0.0, "reward_mean": 0.0}
USEFUL = {"trajectories": 8.0, "gradient_norm": 0.3, "reward_mean": 0.5}


def commits_of(*figures):
    return [StepCommit(t, t + 1, f"{t:064x}", "b" * 64, metrics) for t, metrics in enumerate(figures)]


def test_one_sentence_three_completions_and_the_fix(tmp_path):
    run = RecordedRun(tmp_path, record={"mlflow": False, "dvc": False, "samples": 2})
    run.tell(range(1))
    run.records().close(30.0)
    first, *shown, last = closing_lines(StepAlarms(commits_of(*[NOTHING] * 3)), run.run_dir, run.home)
    fix = next(kind.fix for kind in ALARMS if kind.name == "no_signal")
    assert first == (
        "no_signal: this run taught nothing; 3 steps in a row trained nothing: no group's rewards differed; "
        f"all rewards were 0; {fix}"
    )
    assert len(shown) == SHOWN and all(line.startswith("  reward ") for line in shown)
    assert last == "more of them: ./antiphon evaluate demo-1 --samples"


def test_a_run_with_one_step_that_trained_says_nothing(tmp_path):
    assert closing_lines(StepAlarms(commits_of(NOTHING, USEFUL, NOTHING)), tmp_path, tmp_path) == []
    assert closing_lines(StepAlarms([]), tmp_path, tmp_path) == []


def test_completions_that_cannot_be_shown_take_nothing_from_the_sentence(tmp_path):
    first, second = closing_lines(StepAlarms(commits_of(NOTHING)), tmp_path / "runs" / "gone-1", tmp_path)
    assert first.startswith("no_signal: this run taught nothing; 1 step trained nothing")
    assert second.startswith("its completions cannot be shown: there is no run gone-1")


def test_only_such_a_run_ends_with_exit_code_1():
    code = RunOutcome.exit_code.fget
    assert code(SimpleNamespace(no_signal=[])) == 0
    assert code(SimpleNamespace(no_signal=["no_signal: this run taught nothing"])) == 1
