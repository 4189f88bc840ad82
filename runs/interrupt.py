"""Interrupt: what Ctrl-C means for a run in the foreground, and SIGTERM and a terminal that hangs up.

The first one says at once what is waited for, asks the services to stop and lets the flow unwind; the
second, or LIMIT_S later, ends everything at once. Nothing is lost either way: what counts is in the
journal before anyone is told of it, and the same command continues the run.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

from antiphon.core.errors import INTERRUPTED
from antiphon.core.reporting.run_display import RunDisplay
from antiphon.system.logs import configure_logs

LIMIT_S = 4.0
"""Seconds that an interrupted run gets to end in order."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""By these people, batch systems and terminals end a command; its exit code is the number and 128."""


class Interrupt:
    """Handles SIGNALS while it is entered, from the main thread."""

    def __init__(self, view: RunDisplay, end: Callable[[int], None] = os._exit) -> None:
        """Speak through `view`; `end` ends this process with an exit code, whatever still runs in it."""
        self._view = view
        self._end = end
        self._doing: Callable[[], str] = lambda: ""
        self._stop: Callable[[], None] = lambda: None
        self._kill: Callable[[], None] = lambda: None
        self._limit_s = LIMIT_S
        self._asked = threading.Event()
        self._number = int(signal.SIGINT)
        self._before: dict[signal.Signals, Any] = {}
        self._unasked = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="interrupt", daemon=True)

    @property
    def asked(self) -> bool:
        """Return whether there was a Ctrl-C, or another signal of its kind."""
        return self._asked.is_set() and not self._unasked

    def tell(
        self,
        doing: Callable[[], str],
        stop: Callable[[], None],
        kill: Callable[[], None],
        limit_s: float | None = None,
    ) -> None:
        """Say what there is to stop.

        Args:
            doing: returns what has to end, as words.
            stop: asks it to end soon and returns at once.
            kill: ends it at once.
            limit_s: seconds that it gets before that; None for LIMIT_S.
        """
        self._doing, self._stop, self._kill = doing, stop, kill
        self._limit_s = LIMIT_S if limit_s is None else limit_s

    def __enter__(self) -> Self:
        for number in SIGNALS:
            handler = signal.getsignal(number)
            if handler in (signal.default_int_handler, signal.SIG_DFL):  # else ignored, or someone else's
                self._before[number] = handler
        self.listen()
        self._thread.start()
        return self

    def listen(self) -> None:
        """Take the signals, also from who took one of them since: Prefect does when a flow begins."""
        for number in self._before:
            signal.signal(number, self._take)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._unasked = not self._asked.is_set()
        self._over.set()
        self._asked.set()
        self._thread.join(LIMIT_S)
        if kind is not None and not self._unasked:
            with contextlib.suppress(OSError):
                sys.stdout.flush()
            self._end_at_once()  # all is closed; what libraries do at their exit may take long

    def _take(self, number: int, frame: FrameType | None) -> None:
        # Little may be done here: whatever this thread was in the middle of, it holds its locks.
        if self._asked.is_set():
            if number == signal.SIGHUP:
                return  # of a terminal that closes the kernel tells, and then the shell
            self._end_at_once()
        self._number = number
        self._asked.set()
        raise KeyboardInterrupt

    def _watch(self) -> None:
        self._asked.wait()
        if self._unasked:
            return
        configure_logs("error")  # what is cut short now is cut short on purpose
        doing = self._doing()
        self._stop()
        with contextlib.suppress(OSError):  # there is no terminal any more to say it on
            self._view.stopping(f"stopping{doing and ' '}{doing}; Ctrl-C again ends it at once")
        if not self._over.wait(self._limit_s):
            self._end_at_once()

    def _end_at_once(self) -> None:
        self._kill()
        with contextlib.suppress(OSError):
            os.write(2, f"antiphon: {INTERRUPTED}\n".encode())
        self._end(128 + self._number)
