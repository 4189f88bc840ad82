"""Follower: reads a run's log in order and hands it to a sink, so that nothing is lost or kept twice.

Its cursor, a file of the run, says how far the sink has answered; it is written after the answer, so a
process that dies between the two hands the same records over again, and the sink knows them. A sink that is
away delays its own records alone: they stay in the journal, and what the cursor has not passed is not pruned.
Records that it refuses are handed over again by the next process, with those after them. The cursor names the
sink's place: another place, or one that was cleared, is filled from the first record on.
A follower that is started later, also on the journal of a run that rests, goes on at its cursor.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import structlog
from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_when_event_set, wait_exponential

from antiphon.api.sink import LogRecord, LogSource, RunEnd, Sink
from antiphon.core.errors import AntiphonError, ConfigError, IntegrityError, UnavailableError
from antiphon.lineage.cursors import FOLDER, read_cursor, write_cursor
from antiphon.lineage.log_fold import LogFold

FIRST_PAUSE_S = 0.5
"""Pause before the second attempt; it doubles with each further one."""
LONGEST_PAUSE_S = 30.0
"""Most seconds between two attempts."""
UNANSWERED_S = 20.0
"""Longest wait at the end for a sink that has never answered."""
STILL_S = 60.0
"""A sink that has not answered for so long is named; the one behind it goes on while it is away."""
HELD_S = 120.0
"""Longest time that the first records of a run wait for those of its first step."""
LOOK_S = 5.0
"""Longest wait for the next event in one call."""
TURN_S = 0.05
"""Longest wait for the follower before this one, while someone waits for both."""
MOST_RECORDS = 40
"""Records that are handed over together."""
FAILURES_KEPT = 50
"""Reasons that a report names; all failures are counted."""

_log = structlog.get_logger("antiphon.lineage")


@dataclass(frozen=True, slots=True)
class FollowerReport:
    """How far a sink is."""

    name: str
    done: int
    """Records that it has taken from this process."""
    failed: int
    """Records that it refused, and 1 where nothing more is handed to it."""
    pending: int
    """Records that wait, and 1 where not all was read; 0 where nothing more is handed over."""
    retries: int
    """Calls that found it away."""
    cpu_s: float
    """CPU seconds of the follower's thread, imports included."""
    busy_s: float
    """Seconds spent in the sink."""
    still_s: float
    """Seconds since it answered last, while something waits for it."""
    failures: tuple[str, ...]
    """Reasons, the latest last."""


class Follower:
    """One sink, its cursor and the thread that moves it."""

    def __init__(
        self,
        run_dir: Path,
        source: LogSource,
        sink: Sink,
        fold: LogFold,
        *,
        rest_s: float = 0.0,
        behind: "Follower | None" = None,
        held: bool = False,
        first_pause_s: float = FIRST_PAUSE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare to follow; `start` begins.

        Args:
            run_dir: the run's folder, which keeps the cursor.
            source: the run's log.
            sink: where its records go.
            fold: makes records of events; this follower's own.
            rest_s: seconds for which records wait for others that are written together with them.
            behind: another follower that is always further.
            held: nothing is handed over before the record of a step is there: a start needs the machine.
            first_pause_s: pause before a second attempt.
            clock: seconds that never go back.
        """
        self.name = sink.name
        self._path, self._run_dir = run_dir / FOLDER / f"{sink.name}.json", run_dir
        self._source, self.sink, self._fold = source, sink, fold
        self._rest_s, self._behind, self._held = rest_s, behind, held
        self._first_pause_s, self._clock = first_pause_s, clock
        self._seq, self._at = 0, 0.0
        """The last event that was read, and its time."""
        self.answered_seq = 0
        """The last event that the sink needs no more."""
        self.failure = ""
        """Why nothing more is handed over; empty while it is."""
        self.refusal = ""
        """What the sink refused last; empty where it took all."""
        self.gap = False
        """The run went on without the sink for a while: what its records name may have left."""
        self._cursor: dict[str, Any] = {}
        """What is saved."""
        self._writing = threading.Lock()
        """Of the cursor, which says of a sink that does not return what another thread saw."""
        self._waiting: list[LogRecord] = []
        self._opened = self._closed = False
        self._began_s = clock()
        self._since_s: float | None = None
        """When a call of the sink began that has not been answered."""
        self._asked = self._reached = 0
        """How often someone asked for all there is, and of these how many had it."""
        self._changed: threading.Condition = threading.Condition() if behind is None else behind._changed
        self._closing, self._abandoned = threading.Event(), threading.Event()
        self._end = RunEnd()
        self._done = self._failed = self._retries = 0
        self._cpu_s = self._busy_s = 0.0
        self._failures: deque[str] = deque(maxlen=FAILURES_KEPT)
        self._thread = threading.Thread(target=self._work, name=f"antiphon-{sink.name}", daemon=True)

    def start(self) -> None:
        """Begin to follow, in a thread."""
        self._thread.start()

    def report(self) -> FollowerReport:
        """Return how far the sink is."""
        with self._changed:
            pending = 0 if self.failure else len(self._waiting) + (self._reached < self._asked)
            counts = self._done, self._failed, pending, self._retries
            spent = self._cpu_s, self._busy_s, self._still_s()
            return FollowerReport(self.name, *counts, *spent, tuple(self._failures))

    def standing(self) -> str:
        """Say why the sink takes nothing or refused something; "" where it goes on.

        Of a sink that does not return the cursor says it from then on, as it does of one that is away.
        """
        if self.failure:
            return f"{self.name}: {self.failure}"
        if self.refusal:
            return f"{self.name} refused records, {self.refusal}; the next start hands them over again"
        report = self.report()
        if report.still_s < STILL_S:
            return ""
        reason = report.failures[-1] if report.failures else "it does not return"
        self._mark("delayed", reason)
        waits = f"{report.pending} records wait for it: {reason}"
        return f"{self.name} has not answered for {report.still_s / 60.0:.0f} min; {waits}"

    def ask(self, end: RunEnd | None = None) -> None:
        """Ask for all that the log has now, of several followers the furthest first.

        With an `end` this is the last time, and the sink is closed then.
        """
        with self._changed:
            self._asked += 1
            if end is not None:
                self._end = end
                self._closing.set()
            self._changed.notify_all()
        self._source.interrupt()

    def flush(self, timeout_s: float) -> bool:
        """Wait until the sink has what was asked for; False when the time runs out."""
        return self._wait(lambda: self._reached >= self._asked or bool(self.failure), timeout_s)

    def close(self, timeout_s: float) -> FollowerReport:
        """Wait until the sink is closed, for at most `timeout_s` seconds; what is left follows later."""
        self._wait(lambda: not self._thread.is_alive(), timeout_s)
        self._abandoned.set()
        report = self.report()
        if report.pending:
            _log.warning("record.pending", sink=self.name, pending=report.pending, failures=report.failures)
        return report

    def _wait(self, over: Callable[[], bool], timeout_s: float) -> bool:
        """Wait for something; less where the sink has never answered."""
        deadline = time.monotonic() + timeout_s
        patient = time.monotonic() + min(timeout_s, UNANSWERED_S)
        with self._changed:
            while not over():
                now = time.monotonic()
                answers = self._opened or not self._retries
                if now >= deadline or (now >= patient and not answers):
                    return False
                self._changed.wait(min(0.1, deadline - now))
        return True

    def _work(self) -> None:
        try:
            self._resume()
            while not (self._closing.is_set() and self._reached >= self._asked):
                self._check_wanted()
                self.advance()
            self._open()
            self._call(lambda: self.sink.close(self._end))
            self._closed = True
        except AntiphonError as error:
            self._give_up(str(error))
        except OSError as error:
            self._give_up(f"{error}; free space or check the folder")
        except Exception as error:  # noqa: BLE001 - a fault in a sink; the run and the other sinks go on
            self._give_up(f"the sink {self.name} broke: {error!r}; its records continue with the next start")
            _log.error("record.broke", sink=self.name, exc_info=error)
        finally:
            release = getattr(self.sink, "release", None)
            if release is not None and not self._closed:
                release()
            with self._changed:
                self._changed.notify_all()

    def advance(self) -> None:
        """Read what the log has next, wait for what belongs to it, and hand it over.

        Raises:
            AntiphonError: when nothing more can be handed over.
        """
        hurried, asked = self._reached < self._asked, self._asked
        read = self._read(0.0 if hurried else LOOK_S)
        if read and not hurried:
            self._pause(self._rest_s)
            while len(self._waiting) < MOST_RECORDS and self._read(0.0):
                pass
        if self._waiting and not (self._holds() and not hurried):
            self._deliver()
        elif not read and not hurried:
            self._pause(self._first_pause_s)  # the source answers at once where it is gone or interrupted
        with self._changed:
            self._cpu_s = time.thread_time()
            if not read and not self._waiting:
                self._reached = asked
                self._changed.notify_all()

    def _holds(self) -> bool:
        if not self._held or self._opened:
            return False
        first = any(record.kind == "step.committed" for record in self._waiting)
        return not first and self._clock() - self._began_s < HELD_S

    def _read(self, wait_s: float) -> bool:
        """Read a page; False when the log has no more for now."""
        last = self._behind
        if last is not None and not last.allows(self._seq + 1):
            with self._changed:
                asked, more = self._asked, last._reached < last._asked
                self._changed.wait_for(
                    lambda: last.allows(self._seq + 1) or self._asked != asked, wait_s or TURN_S
                )
            return more
        return bool(self._call(lambda: self._take(wait_s)))

    def _take(self, wait_s: float) -> bool:
        events = self._source.page(self._seq, wait_s)
        for event in events:
            if self._behind is not None and not self._behind.allows(event.seq):
                break
            if event.seq != self._seq + 1:
                raise IntegrityError(
                    f"the log of {self._run_dir.name} lacks event {self._seq + 1}; restore it from a copy"
                )
            record = self._fold.take(event)
            self._seq, self._at = event.seq, event.at
            if record is not None:
                self._waiting.append(record)
        with self._changed:
            if not self._waiting:
                self.answered_seq = self._seq
                self._changed.notify_all()
        return bool(events)

    def allows(self, seq: int) -> bool:
        """Return whether a follower behind this one may go on to an event."""
        return bool(self.failure) or seq <= self.answered_seq or self._still_s() >= STILL_S

    def _still_s(self) -> float:
        since_s = self._since_s
        return 0.0 if since_s is None else self._clock() - since_s

    def _deliver(self) -> None:
        self._open()
        started = time.monotonic()
        self._since_s = self._clock()
        before = self._cursor
        try:
            self._call(lambda: self.sink.write(self._waiting))
            self._done += len(self._waiting)
        except (ConfigError, UnavailableError):
            raise
        except AntiphonError:
            self._deliver_singly()
        with self._changed:
            self._busy_s += time.monotonic() - started
            self._waiting.clear()
            self.answered_seq, self._since_s = self._seq, None
            self._changed.notify_all()
        # Until the next process hands over again what was refused, the cursor says from where.
        place = {name: before[name] for name in ("seq", "at", "fold") if name in before}
        self._save({"refused": before.get("refused", place)} if self.refusal else {})

    def _deliver_singly(self) -> None:
        for record in self._waiting:  # one that is refused keeps no other out
            one: Sequence[LogRecord] = [record]
            try:
                self._call(partial(self.sink.write, one))
                self._done += 1
            except (ConfigError, UnavailableError):
                raise
            except AntiphonError as error:
                self.refusal = f"{record.kind} {record.number}: {error}"
                self._note(self.refusal, failed=True)
                _log.warning("record.failed", sink=self.name, record=record.seq, reason=str(error))

    def _open(self) -> None:
        if not self._opened:
            self._since_s = self._clock()
            self._call(self.sink.open)
            self._opened, self._since_s = True, None

    def _place(self) -> str:
        return str(getattr(self.sink, "place", ""))

    def _call(self, call: Callable[[], Any]) -> Any:
        """Make a call, again and again while it finds its peer away; there is no limit but the end."""
        attempts = Retrying(
            retry=retry_if_exception_type((UnavailableError, OSError)),
            wait=wait_exponential(self._first_pause_s, max=LONGEST_PAUSE_S),
            stop=stop_when_event_set(self._abandoned),
            sleep=self._pause_between,
            before_sleep=self._say_delay,
            reraise=True,
        )

        def attempt() -> Any:
            self._check_wanted()
            return call()

        answer = attempts(attempt)
        if attempts.statistics["attempt_number"] > 1:
            _log.warning("record.resumed", sink=self.name, attempts=attempts.statistics["attempt_number"])
        return answer

    def _check_wanted(self) -> None:
        if self._abandoned.is_set():
            raise UnavailableError("the records were closed; what is left follows with the next start")

    def _say_delay(self, state: RetryCallState) -> None:
        reason = str(state.outcome.exception()) if state.outcome is not None else ""
        self._retries += 1
        if not self._run_dir.is_dir():
            raise IntegrityError(f"the folder {self._run_dir} was removed, so its records end here")
        if state.attempt_number == 1:  # once for each outage; the report counts the attempts
            self._note(reason)
            _log.warning("record.delayed", sink=self.name, reason=reason)
        if self._still_s() >= STILL_S:
            self._mark("delayed", reason)

    def _pause_between(self, seconds: float) -> None:
        """Pause between two attempts; shortly while the end waits for it."""
        if self._closing.is_set():
            self._abandoned.wait(min(seconds, self._first_pause_s))
        else:
            self._closing.wait(seconds)

    def _pause(self, seconds: float) -> None:
        """Pause, unless someone asks for all there is."""
        with self._changed:
            self._changed.wait_for(lambda: self._reached < self._asked, seconds)

    def _note(self, reason: str, failed: bool = False) -> None:
        with self._changed:
            self._failed += failed
            if reason and (not self._failures or self._failures[-1] != reason):
                self._failures.append(reason)

    def _give_up(self, reason: str) -> None:
        if self._abandoned.is_set():
            return  # what is pending was said
        self._note(reason, failed=True)
        self.failure = reason
        _log.warning("record.stopped", sink=self.name, reason=reason)
        self._mark("stopped", reason)  # it holds nothing back any more

    def _resume(self) -> None:
        """Go on where the cursor is.

        Raises:
            IntegrityError: when the cursor and the log do not belong together, or it cannot be read.
        """
        cursor = read_cursor(self._path)
        self.gap = not self._held if not cursor else "stopped" in cursor or bool(cursor.get("gap"))
        if cursor and cursor["seq"]:
            self._cursor = {name: cursor[name] for name in cursor if name not in ("stopped", "delayed")}
            if self._cursor != cursor:
                self._save_as(self._cursor)  # from now on it holds what the sink lacks
            self._open()
            if self._place() != cursor.get("place", self._place()):
                _log.warning("record.again", sink=self.name, place=self._place())
                cursor, self.gap = {}, True
        cursor = cursor.get("refused", cursor)
        if seq := int(cursor.get("seq", 0)):
            page = self._call(lambda: self._source.page(seq - 1, 0.0))
            if not page or (page[0].seq, page[0].at) != (seq, cursor["at"]):
                known = f"event {page[0].seq} is another one" if page else "the log ends before it"
                raise IntegrityError(
                    f"the cursor of {self.name} is at event {seq} of {self._run_dir.name}, but {known}; "
                    f"remove {self._path} to write its records again"
                )
            self._seq = self.answered_seq = seq
            self._at = float(cursor["at"])
            self._fold.restore(cursor["fold"])
        self._save({})

    def _save(self, more: dict[str, Any]) -> None:
        """Save how far the sink is; `more` than its position and its place where there is any."""
        position = {"seq": self._seq, "at": self._at, "fold": self._fold.state()}
        gap = {"gap": True} if self.gap else {}
        self._save_as({**position, "place": self._place(), **gap, **more})

    def _save_as(self, cursor: dict[str, Any]) -> None:
        if not self._run_dir.is_dir():
            raise IntegrityError(f"the folder {self._run_dir} was removed, so its records end here")
        self._call(lambda: self._write(cursor))

    def _write(self, cursor: dict[str, Any]) -> None:
        with self._writing:
            write_cursor(self._path, cursor)
            self._cursor = cursor

    def _mark(self, what: str, reason: str) -> None:
        """Say in the cursor what became of the sink, from any thread; the reason was said already."""
        with self._writing, suppress(AntiphonError):
            stands = what != "delayed" or self._still_s() >= STILL_S  # it may have answered by now
            if stands and self._cursor and what not in self._cursor and self._run_dir.is_dir():
                self._cursor = {**self._cursor, what: reason}
                write_cursor(self._path, self._cursor)
