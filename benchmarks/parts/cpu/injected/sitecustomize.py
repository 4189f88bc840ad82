"""Sampler: where one Python process spends its CPU seconds, by function; Python imports it at every start.

It stands alone: whatever a process imports otherwise is its own. Every few milliseconds a thread reads the
CPU clock of every Python thread and gives what it took since the look before to the functions on its stack.
What gives the interpreter away, such as a wait, is met there more often than it deserves; sums are right.
"""

import atexit
import json
import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType

FOLDER_VARIABLE = "ANTIPHON_CPU_SAMPLES"
"""Names the folder that gets one file for each process; unset, nothing is sampled."""
SAMPLE_S = 0.01
"""Pause between two looks."""
WRITE_S = 3.0
"""Pause between two writings: a process may be killed."""
DEEP = 60
"""Innermost calls of a stack that are looked at."""


class Sampler:
    """Counts CPU seconds by function until the process ends."""

    def __init__(self, folder: str) -> None:
        """Begin; the file is named by the process id and appears in `folder`."""
        self._path = Path(folder) / f"{os.getpid()}.json"
        self._within: dict[str, float] = {}
        self._threads: dict[str, float] = {}
        self._clocks: dict[int, float] = {}
        self._thread = threading.Thread(target=self._work, name="cpu-sampler", daemon=True)
        self._thread.start()
        atexit.register(self.write)

    def write(self) -> None:
        """Write the seconds of functions with what they called, and those of threads."""
        found = {
            "words": sys.orig_argv[1:],
            "process_s": time.process_time(),
            "sampler_s": self._threads.get("cpu-sampler", 0.0),
            "threads": dict(self._threads),
            "within": dict(self._within),
        }
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(found))
        new.replace(self._path)

    def _work(self) -> None:
        written = time.monotonic()
        while True:
            time.sleep(SAMPLE_S)
            self._look()
            if time.monotonic() - written > WRITE_S:
                self.write()
                written = time.monotonic()

    def _look(self) -> None:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, frame in sys._current_frames().items():
            if ident not in names:
                continue  # a thread that Python does not know may end while its clock is read
            try:
                now = time.clock_gettime(time.pthread_getcpuclockid(ident))
            except OSError:
                continue
            before = self._clocks.get(ident, 0.0)
            self._clocks[ident] = now
            spent = now - before if now >= before else now  # a new thread may get an old one's number
            if spent == 0.0:
                continue
            name = names[ident]
            self._threads[name] = self._threads.get(name, 0.0) + spent
            if ident != self._thread.ident:
                self._give(frame, spent)

    def _give(self, frame: FrameType | None, spent: float) -> None:
        seen: set[str] = set()
        for _ in range(DEEP):
            if frame is None:
                break
            code = frame.f_code
            key = f"{code.co_filename}:{code.co_name}"
            if key not in seen:
                seen.add(key)
                self._within[key] = self._within.get(key, 0.0) + spent
            frame = frame.f_back


if os.environ.get(FOLDER_VARIABLE):
    Sampler(os.environ[FOLDER_VARIABLE])
