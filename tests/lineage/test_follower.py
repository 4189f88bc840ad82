"""Followers: every record reaches its sink once and in order, whatever the sink or the process does."""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from antiphon.api.sink import LogRecord, RunEnd
from antiphon.core.errors import ConfigError, ContractError, IntegrityError, UnavailableError
from antiphon.core.records import BatchRef, StepCommit
from antiphon.core.status import EvaluationRecord, Event
from antiphon.lineage import follower as following
from antiphon.lineage.cursors import FOLDER, recorded_version
from antiphon.lineage.follower import Follower, FollowerReport
from antiphon.lineage.log_fold import LogFold
from tests.support.made_log import MadeLog

CLOSE_S = 30.0


class ListSink:
    """Keeps the numbers of records, in memory, as one that knows them would."""

    name = "ledger"

    def __init__(self) -> None:
        self.kept: list[tuple[str, int]] = []
        self.calls: list[int] = []
        self.closed = 0
        self.before: Callable[[Sequence[LogRecord]], None] = lambda records: None

    def open(self) -> None:
        """Be ready."""

    def write(self, records: Sequence[LogRecord]) -> None:
        self.calls.append(len(records))
        self.before(records)
        for record in records:
            if (record.kind, record.number) not in self.kept:
                self.kept.append((record.kind, record.number))

    def close(self, end: RunEnd) -> None:
        self.closed += 1


def made(steps: int = 6) -> MadeLog:
    log = MadeLog(lambda: 7.0)
    log.begin(2.0)
    for step in range(steps):
        tell(log, step)
    log.evaluate(EvaluationRecord(steps, 8, 8, 0.5, 3.0))
    return log


def tell(log: MadeLog, step: int) -> None:
    batch = BatchRef(step, f"{step:064x}", "c" * 64, 8, 2, 0, 0, 40, 0.5, {0: 8}, 5.0)
    metrics = {"loss": 1.0 / (step + 1)}
    log.commit(StepCommit(step, step + 1, f"{step:064x}", batch.digest, metrics, True), batch, 3.0 + step)


def follow(folder: Path, log: MadeLog, sink: ListSink, **how: object) -> Follower:
    return Follower(folder, log, sink, LogFold(), first_pause_s=0.001, **how)  # type: ignore[arg-type]


def close(follower: Follower, timeout_s: float = CLOSE_S) -> FollowerReport:
    follower.ask(RunEnd())
    return follower.close(timeout_s)


def run_to_end(folder: Path, log: MadeLog, sink: ListSink) -> FollowerReport:
    follower = follow(folder, log, sink)
    follower.start()
    return close(follower)


STEPS = [("step.committed", step) for step in range(6)]
ALL = [*STEPS, ("evaluation.finished", 6)]


def test_records_come_in_order_and_a_later_process_goes_on(tmp_path: Path) -> None:
    log, first, second = made(), ListSink(), ListSink()
    assert run_to_end(tmp_path, log, first).done == 7 and first.kept == ALL and first.closed == 1
    tell(log, 6)
    assert run_to_end(tmp_path, log, second).done == 1 and second.kept == [("step.committed", 6)]


def test_what_a_record_says_does_not_depend_on_where_a_process_began(tmp_path: Path) -> None:
    log, whole, parts = made(), list[LogRecord](), list[LogRecord]()
    for places, found in (((len(log.events),), whole), (range(1, len(log.events) + 1), parts)):
        fold, done = LogFold(), 0
        for place in places:
            found += [record for event in log.events[done:place] if (record := fold.take(event))]
            state, fold, done = json.loads(json.dumps(fold.state())), LogFold(), place
            fold.restore(state)
    assert parts == whole
    assert whole[3].line["timings"]["wall_s"] == 4.0 and whole[3].metrics["learning/loss"] == 0.25


def test_what_is_live_is_followed_and_written_together(tmp_path: Path) -> None:
    log, sink = MadeLog(), ListSink()
    follower = follow(tmp_path, log, sink, rest_s=3600.0)
    follower.start()
    for step in range(3):
        tell(log, step)
    follower.ask()
    assert follower.flush(CLOSE_S) and sink.kept == STEPS[:3]
    tell(log, 3)
    assert close(follower).done == 4 and sink.kept == STEPS[:4] and len(sink.calls) <= 4


def test_an_outage_delays_and_loses_nothing(tmp_path: Path) -> None:
    log, sink = made(), ListSink()
    left = 1100  # the pause doubles only until it is longest

    def away(records: Sequence[LogRecord]) -> None:
        nonlocal left
        left -= 1
        if left > 0:
            raise (UnavailableError if left % 2 else OSError)("no space left on device")

    sink.before = away
    follower = Follower(tmp_path, log, sink, LogFold(), first_pause_s=1e-9)
    follower.start()
    report = close(follower, 60.0)
    assert (report.done, report.failed, report.pending, report.retries) == (7, 0, 0, 1099)
    assert sink.kept == ALL


def test_a_sink_that_stands_still_costs_nothing_and_is_named(tmp_path: Path) -> None:
    log, sink, gate, begun = made(), ListSink(), threading.Event(), threading.Event()
    now = [0.0]

    def hang(records: Sequence[LogRecord]) -> None:
        begun.set()
        gate.wait(CLOSE_S)

    sink.before = hang
    follower = Follower(tmp_path, log, sink, LogFold(), clock=lambda: now[0])
    follower.start()
    assert begun.wait(CLOSE_S)
    now[0] = 3600.0
    for step in range(6, 600):
        tell(log, step)
    report = follower.report()
    assert report.still_s == 3600.0 and report.pending <= following.MOST_RECORDS + 1  # no more in memory
    gate.set()
    assert close(follower).done == 601 and len(sink.kept) == 601


def test_a_refused_record_keeps_no_other_out_and_comes_again_with_the_next_process(tmp_path: Path) -> None:
    log, sink = made(), ListSink()

    def refuse(records: Sequence[LogRecord]) -> None:
        if any(record.number == 2 for record in records):
            raise ContractError("no such number")

    sink.before = refuse
    report = run_to_end(tmp_path, log, sink)
    assert (report.done, report.failed) == (6, 1) and ("step.committed", 2) not in sink.kept
    assert report.failures == ("step.committed 2: no such number",)
    sink.before = lambda records: None
    assert run_to_end(tmp_path, log, sink).failed == 0 and sorted(sink.kept) == sorted(ALL)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConfigError("the experiment was deleted"), "the experiment was deleted"),
        (ValueError("odd"), "the sink ledger broke: ValueError('odd')"),
    ],
)
def test_a_sink_that_takes_nothing_more_is_left_alone(tmp_path: Path, error: Exception, words: str) -> None:
    log, sink = made(), ListSink()

    def stop(records: Sequence[LogRecord]) -> None:
        raise error

    sink.before = stop
    report = run_to_end(tmp_path, log, sink)
    assert (report.done, report.failed, report.pending) == (0, 1, 0) and words in report.failures[0]
    assert sink.calls == [7] and recorded_version(tmp_path) is None  # it holds nothing back
    again = ListSink()
    assert run_to_end(tmp_path, log, again).done == 7 and again.kept == ALL


def test_a_follower_never_overtakes_the_one_before_it(tmp_path: Path) -> None:
    log, first, second, gate = made(), ListSink(), ListSink(), threading.Event()
    second.name = "second"  # type: ignore[misc]
    first.before = lambda records: gate.wait(CLOSE_S) and None  # type: ignore[func-returns-value]
    ahead = follow(tmp_path, log, first)
    behind = follow(tmp_path, log, second, behind=ahead)
    seen: list[int] = []
    second.before = lambda records: seen.append(len(first.kept))
    for follower in (ahead, behind):
        follower.start()
    gate.set()
    for follower in (ahead, behind):
        follower.ask(RunEnd())
    assert [follower.close(CLOSE_S).done for follower in (ahead, behind)] == [7, 7]
    assert seen and set(seen) == {7} and second.kept == ALL


def test_one_behind_a_sink_that_stopped_goes_on(tmp_path: Path) -> None:
    log, first, second = made(), ListSink(), ListSink()
    second.name = "second"  # type: ignore[misc]

    def stop(records: Sequence[LogRecord]) -> None:
        raise ConfigError("no")

    first.before = stop
    ahead = follow(tmp_path, log, first)
    behind = follow(tmp_path, log, second, behind=ahead)
    for follower in (ahead, behind):
        follower.start()
        follower.ask(RunEnd())
    assert behind.close(CLOSE_S).done == 7


def test_the_base_waits_for_the_first_step(tmp_path: Path) -> None:
    log, sink = MadeLog(), ListSink()
    log.evaluate(EvaluationRecord(0, 8, 8, 0.5, 3.0))
    follower = follow(tmp_path, log, sink, held=True)
    follower.advance()
    follower.advance()
    assert sink.kept == []
    tell(log, 0)
    follower.advance()
    assert sink.kept == [("evaluation.finished", 0), ("step.committed", 0)]


def test_a_cursor_that_is_ahead_of_its_log_is_named(tmp_path: Path) -> None:
    log, sink = made(), ListSink()
    run_to_end(tmp_path, log, sink)
    shorter, other = made(2), made()
    other.events = [Event(e.seq, 8.0, e.kind, e.data_json) for e in other.events]
    for found, words in ((shorter, "the log ends before it"), (other, "is another one")):
        report = run_to_end(tmp_path, found, ListSink())
        (failure,) = report.failures
        assert words in failure and f"remove {tmp_path / FOLDER / 'ledger.json'}" in failure
    (tmp_path / FOLDER / "ledger.json").write_text("{")
    assert "cannot be read" in run_to_end(tmp_path, log, ListSink()).failures[0]


def test_a_log_of_a_newer_version_or_with_a_gap_is_named(tmp_path: Path) -> None:
    newer, gap = made(1), made(2)
    newer.events.append(Event(len(newer.events) + 1, 7.0, "group.painted", "{}"))
    del gap.events[1]
    for log, words in ((newer, "another version wrote it"), (gap, "lacks event 2")):
        folder = tmp_path / words.split()[0]
        folder.mkdir()
        report = run_to_end(folder, log, ListSink())
        assert report.failed == 1 and words in report.failures[0]


def test_a_run_that_was_removed_ends_its_records(tmp_path: Path) -> None:
    folder, log, sink = tmp_path / "run", made(), ListSink()
    folder.mkdir()
    sink.before = lambda records: shutil.rmtree(folder)
    report = run_to_end(folder, log, sink)
    assert "was removed" in report.failures[-1] and not folder.exists()


def test_closing_ends_at_its_deadline_and_names_what_is_left(tmp_path: Path) -> None:
    log, sink = made(), ListSink()

    def away(records: Sequence[LogRecord]) -> None:
        raise UnavailableError("nobody answers")

    sink.before = away
    report = run_to_end_within(tmp_path, log, sink, 0.05)
    assert report.pending >= 7 and report.failures == ("nobody answers",)


def run_to_end_within(folder: Path, log: MadeLog, sink: ListSink, timeout_s: float) -> FollowerReport:
    follower = follow(folder, log, sink)
    follower.start()
    return close(follower, timeout_s)


def test_a_sink_that_never_answered_is_not_waited_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "UNANSWERED_S", 0.05)
    log = made()

    class Closed(ListSink):
        def open(self) -> None:
            raise UnavailableError("nobody listens")

    assert run_to_end_within(tmp_path, log, Closed(), 3600.0).pending >= 7


def test_what_a_sink_has_not_seen_is_held(tmp_path: Path) -> None:
    assert recorded_version(tmp_path) is None  # nobody follows
    log, sink = made(0), ListSink()
    run_to_end(tmp_path, log, sink)
    assert recorded_version(tmp_path) == -1
    from antiphon.core.loop.events import SnapshotAnnounced

    log.add(SnapshotAnnounced(3, "d" * 64, ""))
    run_to_end(tmp_path, log, sink)
    assert recorded_version(tmp_path) == 3


KILLED = """
import os, sys
from pathlib import Path
from antiphon.lineage import follower as following
from antiphon.lineage.run_log import RunLog
from antiphon.lineage.log_fold import LogFold
from antiphon.api.sink import RunEnd
from antiphon.services.coordinator.journal.reading import JournalLog

root = Path(sys.argv[1])
following.MOST_RECORDS = 1
real = following.Follower._save_as
for point in range(int(sys.argv[2])):
    if os.fork() == 0:
        saved = 0

        def save(self, cursor):
            global saved
            saved += 1
            if saved == 3:  # the cursor was read, then one record was kept: the answer of the next is lost
                os.kill(os.getpid(), 9)
            real(self, cursor)

        following.Follower._save_as = save
        source = JournalLog(root / "journal.db", "run")
        one = lambda after, wait: JournalLog.page(source, after, wait)[:3]
        source.page = one
        follower = following.Follower(root, source, RunLog(root), LogFold())
        follower.start()
        follower.ask(RunEnd())
        follower.close(60.0)
        os._exit(0)
    os.wait()
"""


def test_kills_between_the_answer_and_the_cursor_lose_and_double_nothing(tmp_path: Path) -> None:
    """Fifty processes end at that very point, on a journal of a hundred steps."""
    log = MadeLog()
    for step in range(100):
        tell(log, step)
    log.write_journal(tmp_path / "journal.db", "run")
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), "50"],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    from antiphon.lineage.run_log import RunLog, read_steps
    from antiphon.services.coordinator.journal.reading import JournalLog

    before = len(read_steps(tmp_path))
    assert 50 <= before < 100
    source = JournalLog(tmp_path / "journal.db", "run")
    follower = Follower(tmp_path, source, RunLog(tmp_path), LogFold())
    follower.start()
    assert close(follower).failed == 0
    assert [line["step"] for line in read_steps(tmp_path)] == list(range(100))


def test_a_damaged_journal_ends_the_records_with_a_sentence(tmp_path: Path) -> None:
    class Damaged(MadeLog):
        def page(self, after_seq: int, wait_s: float) -> Sequence[Event]:
            raise IntegrityError("the journal is damaged")

    assert run_to_end(tmp_path, Damaged(), ListSink()).failures == ("the journal is damaged",)
