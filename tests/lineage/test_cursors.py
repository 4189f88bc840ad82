"""Cursors: what a sink refused, lost or left off holds nothing for ever, and nothing of it is forgotten."""

import json
import resource
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from antiphon.api.sink import LogRecord
from antiphon.core.errors import ConfigError, ContractError, UnavailableError
from antiphon.core.loop.events import SnapshotAnnounced
from antiphon.core.records import BatchRef, StepCommit
from antiphon.core.status import EvaluationRecord
from antiphon.lineage import follower as following
from antiphon.lineage.cursors import FOLDER, recorded_version, standing
from antiphon.lineage.follower import Follower, FollowerReport
from antiphon.lineage.log_fold import LogFold
from antiphon.lineage.run_log import STEPS_FILE, RunLog, read_steps
from tests.lineage.test_follower import CLOSE_S, ListSink, close, follow, made, run_to_end
from tests.support.made_log import MadeLog


def announced(versions: range) -> MadeLog:
    log = MadeLog()
    announce(log, versions)
    return log


def announce(log: MadeLog, versions: range) -> None:
    for version in versions:
        log.add(SnapshotAnnounced(version, f"{version:064x}", ""))


class PlacedSink(ListSink):
    """Says where its records are."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place


def test_another_place_is_filled_from_the_first_record_on(tmp_path: Path) -> None:
    log = announced(range(3))
    for place, taken in (("a", 3), ("a", 0), ("b", 3), ("b", 0)):
        sink = PlacedSink(place)
        assert run_to_end(tmp_path, log, sink).done == taken and len(sink.kept) == taken


def test_a_refused_record_holds_no_later_version_and_comes_again(tmp_path: Path) -> None:
    log, sink, again = announced(range(4)), ListSink(), ListSink()

    def refuse(records: Sequence[LogRecord]) -> None:
        if any(record.number == 1 for record in records):
            raise ContractError("the weights of version 1 were gone")

    sink.before = again.before = refuse
    follower = follow(tmp_path, log, sink)
    follower.start()
    follower.ask()
    assert follower.flush(CLOSE_S)
    announce(log, range(4, 200))
    report = close(follower)
    assert (report.failed, report.done) == (1, 199) and recorded_version(tmp_path) == 199
    assert follower.refusal == "snapshot.announced 1: the weights of version 1 were gone"
    assert run_to_end(tmp_path, log, again).failed == 1 and recorded_version(tmp_path) == 199
    again.before = lambda records: None
    assert run_to_end(tmp_path, log, again).failed == 0 and len(again.kept) == 200
    assert run_to_end(tmp_path, log, again).done == 0


@pytest.mark.parametrize("text", ['{"seq": 3, "fo', "null", "7", '{"at": 1.0}', '{"seq": 2, "at": 7.0}'])
def test_a_cursor_that_cannot_be_read_stops_its_sink_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / FOLDER / "ledger.json"
    path.parent.mkdir()
    path.write_text(text)
    report = run_to_end(tmp_path, made(1), ListSink())
    assert report.failed == 1
    assert f"the cursor {path} cannot be read" in report.failures[0] and "remove it" in report.failures[0]
    assert recorded_version(tmp_path) is None and standing(tmp_path) == list(report.failures)


def test_a_start_that_waits_for_its_first_step_does_not_stand_still(tmp_path: Path) -> None:
    log, sink, now = MadeLog(), ListSink(), [0.0]
    log.evaluate(EvaluationRecord(0, 8, 8, 0.5, 3.0))
    follower = follow(tmp_path, log, sink, held=True, clock=lambda: now[0])
    follower.advance()
    now[0] = 90.0
    follower.advance()
    assert sink.calls == [] and follower.report().still_s == 0.0


def test_one_behind_a_sink_that_stands_still_goes_on_and_status_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "STILL_S", 0.05)
    log, first, second = made(), ListSink(), ListSink()
    second.name = "second"  # type: ignore[misc]

    def away(records: Sequence[LogRecord]) -> None:
        raise UnavailableError("the disk of the ledger is full")

    first.before = away
    ahead = follow(tmp_path, log, first)
    behind = follow(tmp_path, log, second, behind=ahead)
    for follower in (ahead, behind):
        follower.start()
        follower.ask()
    assert behind.flush(CLOSE_S) and behind.report().done == 7
    assert ahead._wait(lambda: bool(standing(tmp_path)), CLOSE_S)
    assert standing(tmp_path) == ["ledger: the disk of the ledger is full"]
    first.before = lambda records: None
    assert close(ahead).done == 7 and standing(tmp_path) == []
    close(behind)


def test_a_sink_that_hangs_holds_up_no_other_and_status_names_it(tmp_path: Path) -> None:
    log, first, second, gate, begun = made(), ListSink(), ListSink(), threading.Event(), threading.Event()
    second.name = "second"  # type: ignore[misc]
    now = [0.0]

    def hang(records: Sequence[LogRecord]) -> None:
        begun.set()
        gate.wait(CLOSE_S)

    first.before = hang
    ahead = follow(tmp_path, log, first, clock=lambda: now[0])
    behind = follow(tmp_path, log, second, behind=ahead, clock=lambda: now[0])
    for follower in (ahead, behind):
        follower.start()
        follower.ask()
    assert begun.wait(CLOSE_S) and ahead.standing() == "" and standing(tmp_path) == []
    now[0] = following.STILL_S
    assert behind.flush(CLOSE_S) and behind.report().done == 7
    assert "it does not return" in ahead.standing() and behind.standing() == ""
    assert standing(tmp_path) == ["ledger: it does not return"]
    gate.set()
    assert close(ahead).done == 7 and ahead.standing() == "" and standing(tmp_path) == []
    close(behind)


def test_a_sink_whose_end_did_not_come_in_time_lets_go(tmp_path: Path) -> None:
    class Locked(ListSink):
        held = False

        def open(self) -> None:
            self.held = True

        def release(self) -> None:
            self.held = False

    sink = Locked()
    for error in (UnavailableError("nobody answers"), ConfigError("no")):

        def away(records: Sequence[LogRecord], error: Exception = error) -> None:
            raise error

        sink.before = away
        follower = follow(tmp_path, made(), sink)
        follower.start()
        close(follower, 0.05)
        follower._thread.join(CLOSE_S)
        assert not sink.held


def run_log_to_end(folder: Path, log: MadeLog) -> FollowerReport:
    follower = Follower(folder, log, RunLog(folder), LogFold(), first_pause_s=0.001)
    follower.start()
    return close(follower)


def test_a_journal_that_was_restored_from_a_copy_is_what_the_run_log_says_in_the_end(tmp_path: Path) -> None:
    run_log_to_end(tmp_path, made(7))
    restored = made(3)  # the last steps are trained again, with other results
    for step in range(3, 6):
        batch = BatchRef(step, f"{step + 50:064x}", "c" * 64, 8, 2, 0, 0, 40, 0.5, {0: 8}, 5.0)
        commit = StepCommit(step, step + 1, f"{step + 50:064x}", batch.digest, {"loss": 9.0}, True)
        restored.commit(commit, batch, 3.0 + step)
    for path in (tmp_path / FOLDER / "log.json", tmp_path / STEPS_FILE):
        assert "remove" in run_log_to_end(tmp_path, restored).failures[-1]
        path.unlink()
    assert run_log_to_end(tmp_path, restored).failed == 0
    digests = [line["weights_digest"] for line in read_steps(tmp_path)]
    assert digests[3:] == [f"{step + 50:064x}" for step in range(3, 6)]


def test_a_full_disk_does_not_damage_the_run_log(tmp_path: Path) -> None:
    fold = LogFold()
    records = [record for event in made(3).events if (record := fold.take(event))]
    sink = RunLog(tmp_path)
    sink.write(records[:1])
    size = (tmp_path / STEPS_FILE).stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, hard))  # space for a part of the next line
    try:
        with pytest.raises(UnavailableError, match="free space"):
            sink.write(records[1:])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    sink.write(records[1:])  # as the follower does once there is space
    assert [line["step"] for line in read_steps(tmp_path)] == [0, 1, 2]
    assert sink.line("step.committed", 1) == read_steps(tmp_path)[1]


def test_a_damaged_run_log_is_a_sentence_and_is_written_again_once_it_is_removed(tmp_path: Path) -> None:
    log, path = made(3), tmp_path / STEPS_FILE
    assert run_log_to_end(tmp_path, log).failed == 0
    body = path.read_bytes()
    path.write_text('{"step": 0, "metr{"step": 0, "version": 1}\n')
    (failure,) = run_log_to_end(tmp_path, log).failures
    assert f"line 1 of {path} cannot be read" in failure and "remove it" in failure
    path.unlink()
    assert run_log_to_end(tmp_path, log).failed == 0 and path.read_bytes() == body
    assert "stopped" not in json.loads((tmp_path / FOLDER / "log.json").read_bytes())
