"""What people see of a run: a picture on a terminal, lines in a log, and never an exception."""

import io
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from antiphon.cli.view import LiveView, PlainView, RunHistory, TurnsConsole, make_view, picture, sparkline
from antiphon.core.records import StepCommit
from antiphon.core.reporting.run_display import (
    PlaneView,
    RunDisplay,
    TokenRates,
    drafting_words,
    planes_of,
)
from antiphon.core.status import CapacityRecord, EvaluationRecord, RunStatus, WorkerRecord, WorkerState
from antiphon.core.voided_batch import VoidedBatch
from tests.support.terminal import Terminal, panels

WAIT_S = 60.0
"""Longest wait for output."""

PLANES = {
    "rollout": PlaneView("rollout", "12 groups", 1234.5, ""),
    "learner": PlaneView("learner", "", 0, "x"),
}


def status_at(step: int, **changes: object) -> RunStatus:
    commit = StepCommit(step - 1, step, "a" * 64, "b" * 64, {"reward_mean": 0.25}) if step else None
    plain = RunStatus(
        run_id="r",
        steps_total=10,
        committed_steps=step,
        opened_steps=step,
        sealed_steps=step,
        newest_version=step,
        groups_open=0,
        groups_leased=0,
        groups_to_reward=0,
        groups_ready=0,
        groups_dropped_stale=0,
        groups_filtered=0,
        groups_requeued=0,
        staleness_histogram={0: 3, 2: 1},
        last_commit=commit,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def text_of(renderable: object, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(renderable)
    output = console.file
    assert isinstance(output, io.StringIO)
    return output.getvalue()


def test_the_picture_names_every_figure() -> None:
    history = RunHistory()
    evaluation = EvaluationRecord(0, 4, 4, 0.5, 10.0)
    voided = VoidedBatch(2, "cd" * 32, 4, 0, 8, "no finite loss", "ada")
    status = status_at(3, evaluations=(evaluation,), paused_reason="the loss is not finite", voided=(voided,))
    assert history.take(status) == [0]
    assert history.take(status) == []
    drawn = text_of(picture(status, PLANES, history, 60.0))
    for word in (
        "3 of 10",
        "batch cdcdcdcdcdcd of step 2, by ada: no finite loss",
        "1:00",
        "25.0%",
        "50.0%",
        "max 2",
        "1,234",
        "waits for",
        "the loss is not finite",
    ):
        assert word in drawn


@pytest.mark.parametrize("width", [80, 100, 120, 160, 200])
def test_the_panel_shows_its_columns_in_every_width_with_the_rows_of_a_demo(width: int) -> None:
    waiting = "step 12: 14 of 16 groups rewarded; 27 being sampled (27 at worker-0), 3 to be rewarded"
    capacity = CapacityRecord(12_611, 9_194, 0.9, 1.0, 0.5, 2.0, 2.5, "sampling", 1.12, 1.42, 1, 4)
    ahead = "1.50 of at most 4 steps ahead, 50% of the places in use; expected: 2.25 s a step, staleness 1.4"
    planes = {
        plane.name: plane
        for plane in (
            PlaneView("rollout", "27 groups at 1 worker", 9194.0, waiting),
            PlaneView("reward", "3 to reward, 14 ready", 0.0, ""),
            PlaneView("learner", "version 12, training: micro-batch 3 of 8", 12611.0, "the batch of step 12"),
            PlaneView("broadcast", "newest version 12", 0.0, ""),
        )
    }
    metrics = {"reward_mean": 0.5, "drafting_acceptance": 0.88, "drafting_tokens_per_pass": 13.45}
    history = RunHistory()
    commit = StepCommit(8, 9, "a" * 64, "b" * 64, metrics)
    order = "short_to_long: 1.29 s a step, arrival 1.35 s"
    status = status_at(9, last_commit=commit, run_ahead=ahead, capacity=capacity, order=order)
    history.take(status)
    drawn = text_of(picture(status, planes, history, 60.0), width)
    head = next(line for line in drawn.splitlines() if "stage" in line)
    assert [word for word in ("stage", "state", "tokens/s", "waits for") if word not in head] == []
    first = [line.strip("│ ").split(" ")[0] for line in drawn.splitlines()]
    assert [row for row in (*planes, "run-ahead", "capacity", "lease") if row not in first] == []
    assert "…" not in drawn and max(map(len, drawn.splitlines())) <= width
    words = " ".join(" ".join(line.strip("│").split()) for line in drawn.splitlines())
    for figure in ("50.0% (step 8)", "13.45 tokens per pass (step 8)", "in all steps", "9,194", "S_min 4"):
        assert figure in words


@pytest.mark.parametrize(("columns", "widest"), [(80, 80), (100, 100), (200, 120)])
def test_sentences_are_folded_at_the_width_of_the_terminal(columns: int, widest: int) -> None:
    output = io.StringIO()
    view = make_view(TurnsConsole(file=output, force_terminal=True, width=columns))
    view.message("a sentence that has a good many words " * 12)
    lines = [line.rstrip() for line in output.getvalue().splitlines()]
    assert widest - 12 < max(map(len, lines)) <= widest


def test_a_reader_that_leaves_does_not_end_the_run(tmp_path: Path) -> None:
    words = "from antiphon.cli.view import make_view\nview = make_view()\n"
    words += "for _ in range(9):\n    view.message('x' * 99999)"
    words += f"\nopen({str(tmp_path / 'end')!r}, 'w')"
    command = f'{shlex.quote(sys.executable)} -P -c "$WORDS" | head -c 1 > /dev/null'
    done = subprocess.run(
        command,
        shell=True,
        env=os.environ | {"WORDS": words},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert (tmp_path / "end").exists()
    assert done.stderr.count("nobody reads the output any more; the run goes on") == 1, done.stderr


def test_drafting_is_told_in_a_few_words_and_only_where_an_engine_drafts() -> None:
    metrics = {"drafting_acceptance": 0.61, "drafting_tokens_per_pass": 2.125, "drafting_gain": 1.9}
    drafted = status_at(3, last_commit=StepCommit(2, 3, "a" * 64, "b" * 64, metrics))
    said = "61.0% of drafts right, 2.12 tokens per pass, 1.90x as fast as undrafted (step 2)"
    for status in (drafted, status_at(3), status_at(0)):
        output = io.StringIO()
        view = make_view(TurnsConsole(file=output, width=200))
        view.status(status, PLANES)
        assert ("; 61.0% of drafts right" in output.getvalue()) == (status is drafted)
        assert (said in text_of(picture(status, PLANES, RunHistory(), None))) == (status is drafted)
    assert drafting_words(StepCommit(0, 1, "", "", {**metrics, "drafting_gain": 0.0})).endswith("per pass")


def test_an_unfinished_evaluation_is_no_news() -> None:
    history = RunHistory()
    assert history.take(status_at(1, evaluations=(EvaluationRecord(0, 4, 3, 0.5, 10.0),))) == []
    assert history.scores == {}


def test_time_left_counts_from_where_this_process_took_over() -> None:
    history = RunHistory()
    history.take(status_at(4))
    assert history.remaining_s(status_at(4), 60.0) is None
    assert history.remaining_s(status_at(6), 60.0) == 120.0


def test_lines_come_once_a_step_without_a_terminal() -> None:
    output = io.StringIO()
    view = make_view(TurnsConsole(file=output))
    assert isinstance(view, PlainView)
    view.started("r", {"prefect": "http://127.0.0.1:4200"})
    for step in (0, 1, 1, 1, 2):
        view.status(status_at(step), PLANES)
    view.finished(["held-out pass@1 went from 0.200 to 0.700"])
    lines = output.getvalue().splitlines()
    assert [line.split()[2] for line in lines if " step " in line] == ["0/10", "1/10", "2/10"]
    assert "learner waits for x" in output.getvalue()
    assert lines[-1].startswith("held-out pass@1")


def test_the_live_view_gives_the_terminal_back() -> None:
    output = io.StringIO()
    view = make_view(TurnsConsole(file=output, force_terminal=True, width=100))
    assert isinstance(view, LiveView)
    view.started("r", {"run": "folder"})
    view.status(status_at(2), PLANES)
    view.message("a sentence [with brackets]")
    view.finished(["done"])
    view.close()
    assert "a sentence [with brackets]" in output.getvalue()
    assert output.getvalue().rstrip().endswith("done")
    assert "\x1b[?25h" in output.getvalue()  # the cursor is back


WATCHED = """
import logging, sys, threading
from dataclasses import replace
import structlog
from tests.cli.test_view import PLANES, status_at
from antiphon.cli.view import make_view
from antiphon.system.logs import configure_logs

configure_logs("warning")
log, view = structlog.get_logger("of a module"), make_view()
view.message("quickstart: loading")
view.started("run-1", {"run": "/a/folder"})


def talk(name):
    for number in range(20):
        view.message(f"{name} says {number}")


talkers = [threading.Thread(target=talk, args=(name,)) for name in ("learner", "supervisor", "alarm")]
for talker in talkers:
    talker.start()
for step in range(11):
    view.status(status_at(step, waiting="worker-0 samples " * 9), PLANES)
    if step % 3 == 0:
        log.warning("service.restarted", name="worker-0", step=step)
        logging.getLogger("a library").warning("of a library %d", step)
        print("of another thread", step, file=sys.stderr)
        view.message("alarm no_space: " + "only little is free here; " * 8)
for talker in talkers:
    talker.join()
if sys.argv[1] == "stopping":
    view.stopping("stopping worker-0")
    view.status(status_at(9), PLANES)
else:
    view.finished(["done"])
view.close()
"""


@pytest.mark.parametrize(("end", "columns"), [("finished", 60), ("stopping", 100), ("finished", 220)])
def test_whoever_writes_while_it_is_drawn_there_is_one_panel(end: str, columns: int) -> None:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    terminal = Terminal([sys.executable, "-c", WATCHED, end], environment, root, columns)
    most = 0
    try:
        while terminal.read(WAIT_S):
            most = max(most, panels(terminal.screen.shown()))
        assert terminal.finish(WAIT_S) == 0
    finally:
        terminal.close()
    lines = terminal.screen.shown()
    assert most == 1 and panels(lines) == 0 and terminal.screen.cursor_shown
    assert not [line for line in lines if len(line) > 120]
    said = "\n".join(lines)
    for step in (0, 3, 6, 9):
        assert f"of a library {step}\n" in said and f"of another thread {step}\n" in said
    assert all(said.count(f"{name} says ") == 20 for name in ("learner", "supervisor", "alarm"))
    assert said.count("service.restarted") == 4 and said.count("alarm no_space") == 4
    assert said.rstrip().endswith("done" if end == "finished" else "stopping worker-0")


def test_a_line_without_a_terminal_is_never_longer_than_it_may_be() -> None:
    output = io.StringIO()
    view = make_view(TurnsConsole(file=output))
    busy = {
        "rollout": PlaneView("rollout", "", 12345.6, "x" * 300),
        "learner": PlaneView("learner", "", 9, "y"),
    }
    metrics = {"drafting_acceptance": 0.61, "drafting_tokens_per_pass": 2.125, "drafting_gain": 1.9}
    for step in range(3):
        view.status(status_at(step, last_commit=StepCommit(2, 3, "a", "b", metrics)), busy)
    view.message("word " * 100)
    view.message("report: /" + "folder/" * 30)
    lines = output.getvalue().splitlines()
    assert [line.split()[2] for line in lines[:3]] == ["0/10", "1/10", "2/10"]
    assert [line for line in lines if len(line) > 120] == [lines[-1]]
    assert lines[-1].strip() == "/" + "folder/" * 30


def test_every_view_keeps_the_protocol() -> None:
    views: list[RunDisplay] = [RunDisplay(), PlainView(Console(file=io.StringIO()))]
    for view in views:
        view.started("r", {})
        view.status(status_at(0, newest_version=None, staleness_histogram={}), {})
        view.message("x")
        view.stopping("y")
        view.finished([])


def test_planes_from_the_status_alone() -> None:
    planes = planes_of(status_at(2, waiting="worker-0 samples", groups_to_reward=3), {"rollout": 10.0})
    assert list(planes) == ["rollout", "reward", "learner", "broadcast"]
    assert planes["rollout"].waits_for == "worker-0 samples" and planes["rollout"].rate == 10.0
    assert planes["reward"].waits_for == ""
    assert planes["learner"].waits_for == "the batch of step 2"
    assert "engines without" not in planes["rollout"].state
    mute = WorkerRecord(
        "w", WorkerState.ACTIVE, 0, 0, 0, 0.0, 0.0, missing_abilities=("logprobs", "drafts", "ids")
    )
    said = planes_of(status_at(2, workers=(mute,)), {})["rollout"].state
    assert said.endswith("groups at 1 worker, engines without ids, logprobs")


def test_rates_are_tokens_since_the_last_look_and_those_of_the_last_step() -> None:
    rates = TokenRates()
    worker = WorkerRecord("w", WorkerState.ACTIVE, 0, 0, 100, 1.0, 0.0)
    commit = StepCommit(0, 1, "a", "b", {"completion_tokens": 900.0, "train_s": 3.0})
    looks = [(status_at(0, workers=(worker,)), 10.0), (status_at(1, workers=(), last_commit=commit), 12.0)]
    looks.append((replace(looks[1][0], workers=(replace(worker, tokens_generated=500),)), 14.0))
    found = [rates.take(status, now) for status, now in looks]
    assert [(rate["rollout"], rate["learner"]) for rate in found] == [
        (0.0, 0.0),
        (0.0, 300.0),
        (250.0, 300.0),
    ]


@given(st.lists(st.floats(-1e6, 1e6)), st.integers(1, 60))
def test_a_sparkline_never_grows_beyond_its_width(values: list[float], width: int) -> None:
    drawn = sparkline(values, width)
    assert len(drawn) == min(width, len(values))
    if drawn and max(values[-width:]) > min(values[-width:]):
        assert "█" in drawn and "▁" in drawn


def test_answers_that_could_not_be_scored_are_counted_with_the_last_reason() -> None:
    output = io.StringIO()
    view = make_view(TurnsConsole(file=output))
    reason = "the scorer returned 2.0, which lies outside 0..1"
    for failed in (0, 1, 2, 9, 10, 99, 250):
        view.status(status_at(1, trajectories_failed=failed, last_failure=reason), PLANES)
    said = [line for line in output.getvalue().splitlines() if "answers could not be scored" in line]
    assert [line.split()[0] for line in said] == ["1", "10", "250"]
    drawn = text_of(picture(status_at(1, trajectories_failed=3, last_failure=reason), {}, RunHistory(), None))
    assert "3 answers could not be scored" in drawn and "lies outside 0..1" in " ".join(drawn.split())
    assert "not scored" not in text_of(picture(status_at(1), {}, RunHistory(), None))
