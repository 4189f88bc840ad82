"""Each alarm is told once when it rises and once when it is over."""

from dataclasses import replace

from antiphon.core.config import RunConfig
from antiphon.core.records import StepCommit
from antiphon.core.reporting.alarms import StepAlarms, status_alarms
from antiphon.core.reporting.run_display import planes_of
from antiphon.core.status import LearnerProgress, RunStatus, WorkerRecord, WorkerState
from antiphon.runs.alarm_watch import AlarmWatch, current_alarms

WORKER = WorkerRecord("w-1", WorkerState.ACTIVE, 0, 1, 10, 1.0, 0.0)
CONFIG = RunConfig.model_validate({"services": {"stall_timeout_s": 100.0}})


def status_of(steps, **more):
    figures = dict.fromkeys(
        ("groups_open", "groups_leased", "groups_to_reward", "groups_ready", "groups_dropped_stale"), 0
    )
    fixed = {"opened_steps": steps, "sealed_steps": steps, "newest_version": steps, **figures}
    counts = {"groups_filtered": 0, "groups_requeued": 0}
    return RunStatus("r", 500, steps, waiting="a judge", **counts, **fixed, **{"workers": (WORKER,), **more})


def commit(step, **figures):
    return StepCommit(step, step + 1, f"{step:064x}", "b" * 64, figures)


def test_a_figure_rises_once_and_ends_once(tmp_path):
    watch = AlarmWatch(CONFIG, tmp_path, shown := StepAlarms(), now=0.0)
    told = []
    for step in range(100):
        shown.add(commit(step, entropy_estimate=1e-5 if 20 <= step < 60 else 0.5))
        told += watch.look(status_of(step + 1), now=float(step))
        told += watch.look(status_of(step + 1), now=step + 0.5)
    rose, ended = told
    assert rose.startswith("alarm entropy_collapse: entropy_estimate is") and "sampling.temperature" in rose
    assert ended == "alarm entropy_collapse is over"


def test_a_stall_names_whom_is_waited_for_and_ends_with_the_next_step(tmp_path):
    watch = AlarmWatch(CONFIG, tmp_path, shown := StepAlarms(), now=0.0)
    shown.add(commit(0))
    assert watch.look(status_of(1), now=1.0) == []
    (line,) = watch.look(status_of(1), now=150.0)
    assert line.startswith("alarm stall: step 1: no token, group or reward for 149 s; a judge")
    assert watch.look(status_of(1), now=200.0) == []
    shown.add(commit(1))
    assert watch.look(status_of(2), now=201.0) == ["alarm stall is over"]
    for idle in ({"finished": True}, {"paused_reason": "disk"}):
        assert watch.look(status_of(2, **idle), now=900.0) == []


def test_a_fleet_that_is_empty_is_no_stall(tmp_path):
    watch = AlarmWatch(CONFIG, tmp_path, shown := StepAlarms(), now=0.0)
    shown.add(commit(0))
    joining = replace(WORKER, state=WorkerState.JOINING)
    for now, workers in ((1.0, ()), (150.0, ()), (5000.0, (joining,)), (5050.0, (WORKER,))):
        assert watch.look(status_of(1, workers=workers), now=now) == []
    (line,) = watch.look(status_of(1), now=5200.0)
    assert line.startswith("alarm stall: step 1")


def test_a_long_step_is_no_stall_while_the_learner_moves_and_is_named_when_it_does_not(tmp_path):
    watch = AlarmWatch(CONFIG, tmp_path, StepAlarms(), now=0.0)

    def look(counter, now):
        sealed = replace(status_of(12), sealed_steps=13)
        return watch.look(sealed, now, LearnerProgress("training step 12", counter, "micro-batch"))

    for minute in range(60):
        assert look(minute, 60.0 * minute) == []
    (line,) = look(59, 59 * 60.0 + 101.0)
    assert line.startswith("alarm stall: step 12: no micro-batch for 101 s; the learner is training step 12")
    assert look(60, 3700.0) == ["alarm stall is over"]


def test_a_nearly_full_disk_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("antiphon.core.reporting.alarms.LEAST_FREE_BYTES", 1 << 62)
    (alarm,) = current_alarms(StepAlarms(), status_of(0), CONFIG, tmp_path)
    assert alarm.name == "no_space" and str(tmp_path) in alarm.text


def test_a_disk_that_fills_while_nothing_is_committed_is_told(tmp_path, monkeypatch):
    watch = AlarmWatch(CONFIG, tmp_path, shown := StepAlarms(), now=0.0)
    shown.add(commit(0))
    assert watch.look(status_of(1), now=1.0) == []
    with monkeypatch.context() as patch:
        patch.setattr("antiphon.core.reporting.alarms.LEAST_FREE_BYTES", 1 << 62)
        (line,) = watch.look(status_of(1), now=2.0)
        assert line.startswith("alarm no_space:")
        assert watch.look(status_of(1), now=3.0) == []
    assert watch.look(status_of(1), now=4.0) == ["alarm no_space is over"]


def test_a_learner_that_waits_for_space_is_told_at_once(tmp_path):
    watch = AlarmWatch(CONFIG, tmp_path, StepAlarms(), now=0.0)
    said = "waiting for space to publish version 3: 11 MiB are free"
    (line,) = watch.look(status_of(2), 1.0, LearnerProgress(said, 7, "byte"))
    assert line.startswith(f"alarm no_space: {said}")
    assert watch.look(status_of(2), 2.0, LearnerProgress("idle", 8, "byte")) == ["alarm no_space is over"]


def test_audits_that_could_not_take_place_are_told(tmp_path):
    watch = AlarmWatch(CONFIG, tmp_path, StepAlarms(), now=0.0)
    status = status_of(0, unaudited=2, unaudited_reason="version 3 is not kept any more")
    (line,) = watch.look(status, now=1.0)
    assert line.startswith(
        "alarm unaudited: 2 groups could not be audited; one of them: version 3 is not kept"
    )
    assert watch.look(status, now=2.0) == []


def test_a_worker_that_cannot_load_newer_weights_is_told(tmp_path):
    watch = AlarmWatch(CONFIG, tmp_path, StepAlarms(), now=0.0)
    stuck = replace(WORKER, held_version=3, swap_error="version 4 was refused", swap_failing_s=7.0)
    lost = replace(stuck, worker_id="w-2", state=WorkerState.LOST, swap_failing_s=99.0)
    worse = replace(stuck, worker_id="w-3", held_version=None, swap_failing_s=8.0)
    assert watch.look(status_of(0, workers=(WORKER, lost)), now=0.5) == []
    (line,) = watch.look(status_of(0, workers=(WORKER, stuck, lost)), now=1.0)
    assert line.startswith("alarm swap_failed: w-1 stays at version 3 for 7 s: version 4 was refused; read")
    assert watch.look(status_of(0, workers=(stuck, worse)), now=2.0) == []
    assert (
        planes_of(status_of(0, workers=(stuck,)), {})["broadcast"].waits_for == "w-1: version 4 was refused"
    )
    (said,) = status_alarms(status_of(0, workers=(stuck, worse)))
    assert said.text == ("w-3 samples with nothing for 8 s: version 4 was refused; 1 others fail as well")
    assert watch.look(status_of(0), now=3.0) == ["alarm swap_failed is over"]


def test_a_sink_that_stands_still_is_named_once(tmp_path):
    watch = AlarmWatch(CONFIG, tmp_path, StepAlarms(), now=0.0)
    late = ["mlflow has not answered for 61 min"]
    (line,) = watch.look(status_of(1), now=1.0, late=late)
    assert line.startswith("alarm records_late: mlflow has not answered for 61 min; read the reason")
    assert watch.look(status_of(1), now=2.0, late=late) == []
    assert watch.look(status_of(1), now=3.0) == ["alarm records_late is over"]
