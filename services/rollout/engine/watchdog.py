"""Watchdog: ends the worker's process when its engine hangs, whatever the other threads do.

A step that does not come back cannot be cancelled: its thread is in a driver or a library. So a thread of
its own measures each command that the engine executes, says what hangs, lets the worker leave in order,
and then ends the process; its supervisor starts a new one. If even this thread gets no turn,
because a library waits while it holds the interpreter, the interpreter's own timer ends the process and
prints where each thread was.
"""

import faulthandler
import os
import threading
import time
from collections import deque
from collections.abc import Callable

import structlog

HUNG_EXIT = 75
"""Exit code of a process that ended itself because its engine hung; another start may well work."""
LEAVE_S = 5.0
"""What the worker gets to hand its leases back before the process ends."""
STEP_FACTOR = 20.0
"""A step hangs when it takes this many times as long as the longest of those remembered."""
STEPS_REMEMBERED = 256
MOST_POLL_S = 1.0
POLLS = 20
"""Looks within the shortest limit, as long as they are not rarer than `MOST_POLL_S`."""
STDERR = 2
"""Its descriptor: the interpreter's timer writes without a file object."""
COUNTED_POLLS = 2.0
"""Of the time between two looks at most this many polls count: a process that was stopped has not hung."""

_log = structlog.get_logger(__name__)


class Watchdog:
    """Measures what the engine's thread executes; until it is armed, it only measures."""

    def __init__(
        self, leave: Callable[[float], None] = lambda seconds: None, end: Callable[[int], object] = os._exit
    ) -> None:
        """Prepare.

        Args:
            leave: called in the watchdog's thread when the engine hangs; returns within the seconds given.
            end: ends the process with an exit code.
        """
        self._leave = leave
        self._end = end
        self._command: tuple[bool, float] | None = None
        """What the engine executes: whether it is a step, and since when."""
        self._steps: deque[float] = deque(maxlen=STEPS_REMEMBERED)
        self._step_s = self._message_s = 0.0
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def arm(self, step_s: float, message_s: float) -> None:
        """Begin to watch.

        Args:
            step_s: shortest time, seconds, after which a step may count as hung.
            message_s: the same of everything else, such as taking in weights.
        """
        self._step_s, self._message_s = step_s, max(step_s, message_s)
        self._set_timer()  # here: the thread may not get its first turn
        self._thread = threading.Thread(target=self._watch, name="engine-watchdog", daemon=True)
        self._thread.start()

    def disarm(self) -> None:
        """Watch no longer."""
        self._closed.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(LEAVE_S)

    def begin(self, *, is_step: bool) -> None:
        """Note that the engine's thread begins a step or another command."""
        self._command = is_step, time.monotonic()

    def finish(self) -> float:
        """Note that the command came to its end, and return its seconds."""
        assert self._command is not None, "no command was begun"
        (is_step, started), self._command = self._command, None
        seconds = time.monotonic() - started
        if is_step:
            self._steps.append(seconds)
        return seconds

    def limit_s(self, is_step: bool) -> float:
        """Return after how many seconds a step or another command counts as hung."""
        longest_s = max(tuple(self._steps), default=0.0)
        return max(self._step_s if is_step else self._message_s, STEP_FACTOR * longest_s)

    def _watch(self) -> None:
        poll_s = min(MOST_POLL_S, self._step_s / POLLS)
        seen, waited_s, looked = self._command, 0.0, time.monotonic()
        try:
            while not self._closed.wait(poll_s):
                now, command = time.monotonic(), self._command
                waited_s += min(now - looked, COUNTED_POLLS * poll_s)
                looked = now
                if command is None or command is not seen:
                    seen, waited_s = command, 0.0
                self._set_timer()
                if command is not None and waited_s >= self.limit_s(command[0]):
                    self._give_up("a step" if command[0] else "a change of weights or requests", waited_s)
                    return
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _set_timer(self) -> None:
        """Have the interpreter's timer end the process, unless this is called again in time."""
        no_turn_s = 2 * self.limit_s(is_step=True) + LEAVE_S
        faulthandler.dump_traceback_later(no_turn_s, exit=True, file=STDERR)

    def _give_up(self, what: str, waited_s: float) -> None:
        _log.error(
            "engine.hung",
            reason=f"the engine has not come back from {what} for {waited_s:.1f} s; this process ends, and "
            "a new one can take its place (raise rollout.hung_step_s if steps take so long here)",
            exit_code=HUNG_EXIT,
        )
        leaving = threading.Thread(target=self._leave, args=(LEAVE_S,), daemon=True)
        leaving.start()
        leaving.join(LEAVE_S)
        self._end(HUNG_EXIT)
