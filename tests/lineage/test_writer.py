"""The writer: in order, never in the caller's way, and honest about what was not written."""

import threading

import pytest

from antiphon.core.errors import IntegrityError, UnavailableError
from antiphon.lineage import writer as writing
from antiphon.lineage.writer import Writer


def test_jobs_are_done_in_order_and_counted() -> None:
    writer, seen = Writer("test"), []
    for number in range(20):
        writer.put(str(number), lambda number=number: seen.append(number))  # type: ignore[misc]
    report = writer.close(10)
    assert seen == list(range(20))
    assert (report.done, report.failed, report.pending, report.retries) == (20, 0, 0, 0)


def test_an_unavailable_service_is_tried_again_and_the_order_kept() -> None:
    writer, seen, attempts = Writer("test", first_pause_s=0.001), [], []

    def flaky() -> None:
        attempts.append(1)
        if len(attempts) < 4:
            raise UnavailableError("the database is away")
        seen.append("flaky")

    writer.put("flaky", flaky)
    writer.put("next", lambda: seen.append("next"))
    assert writer.flush(10)
    report = writer.close(10)
    assert seen == ["flaky", "next"]
    assert (report.done, report.failed, report.retries) == (2, 0, 3)
    assert report.failures == ("flaky: the database is away",)


def test_a_job_that_fails_for_good_is_left_out() -> None:
    writer, seen = Writer("test"), []

    def broken() -> None:
        raise IntegrityError("no such bytes")

    writer.put("broken", broken)
    writer.put("next", lambda: seen.append("next"))
    report = writer.close(10)
    assert seen == ["next"] and (report.done, report.failed) == (1, 1)
    assert report.failures == ("broken: no such bytes",)


def test_closing_ends_at_its_deadline_and_names_what_is_left() -> None:
    writer = Writer("test", first_pause_s=0.001)

    def away() -> None:
        raise UnavailableError("nobody answers")

    writer.put("first", away)
    writer.put("second", away)
    report = writer.close(0.05)
    assert report.pending == 2 and report.failures == ("first: nobody answers",)
    writer._thread.join(10)
    assert not writer._thread.is_alive()


def test_the_caller_never_waits_for_the_work() -> None:
    writer, gate = Writer("test"), threading.Event()
    writer.put("slow", lambda: gate.wait(10) and None)
    writer.put("behind", lambda: None)
    assert not writer.flush(0.01)
    gate.set()
    assert writer.flush(10)
    writer.close(10)


def test_what_comes_after_closing_is_counted_as_failed() -> None:
    writer = Writer("test")
    writer.close(10)
    writer.put("late", lambda: None)
    assert writer.report().failed == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_of_our_own_is_loud_and_leaves_the_rest_pending() -> None:
    writer = Writer("test")
    writer.put("fault", lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    writer.put("next", lambda: None)
    writer._thread.join(10)
    report = writer.close(1)
    assert report.pending == 2 and "ZeroDivisionError" in report.failures[-1]


def test_an_outage_of_any_length_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pause doubles only until it is longest; a thousand doublings would be no number any more."""
    attempts = 0

    def away() -> None:
        nonlocal attempts
        attempts += 1
        if attempts <= 1100:
            raise UnavailableError("away")

    writer = Writer("t", first_pause_s=0.0)
    writer.put("job", away)
    report = writer.close(60)
    assert (report.done, report.retries) == (1, 1100)


def test_a_writer_that_is_held_back_writes_once_it_may_or_must() -> None:
    begin, seen = threading.Event(), []
    writer = Writer("test", begin=begin)
    writer.put("one", lambda: seen.append(1))
    assert seen == [] and writer.report().pending == 1
    begin.set()
    assert writer.flush(10.0) and seen == [1]
    held = Writer("test", begin=threading.Event())
    held.put("two", lambda: seen.append(2))
    report = held.close(10.0)  # nobody may be left waiting at the end of a run
    assert seen == [1, 2] and (report.done, report.pending) == (1, 0)


def test_a_writer_rests_until_what_belongs_together_has_come() -> None:
    writer, seen = Writer("test", rest_s=3600.0), []
    writer.put("one", lambda: seen.append(1))
    writer.put("two", lambda: seen.append(2))
    assert seen == [] and writer.report().pending == 2
    assert writer.flush(10.0) and seen == [1, 2]
    writer.put("three", lambda: seen.append(3))
    assert writer.close(10.0).done == 3 and seen == [1, 2, 3]


def test_a_service_that_never_answered_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "UNANSWERED_S", 0.01)
    tried, answer = threading.Event(), threading.Event()

    def away() -> None:
        tried.set()
        if not answer.is_set():
            raise UnavailableError("nobody listens")

    writer = Writer("test", first_pause_s=0.001)
    writer.put("first", away)
    assert tried.wait(60.0)
    while not writer.report().retries:
        tried.wait(0.001)
    assert not writer.flush(3600.0)
    answer.set()
    assert writer.flush(3600.0)
    assert writer.close(3600.0).done == 1
