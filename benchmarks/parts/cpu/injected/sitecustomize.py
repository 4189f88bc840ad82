"""Sampler: where one Python process spends its CPU seconds, by function; Python imports it at every start.

It stands alone: whatever a process imports otherwise is its own. Every few milliseconds a thread reads the CPU
clock of every Python thread and gives what a thread took since the look before to the functions on its stack.
"""

import atexit
import json
import os
import sys
import threading
import time
from pathlib import Path

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

    def __init__(self, folder):
        self._path = Path(folder) / f"{os.getpid()}.json"
        self._alone, self._within, self._threads, self._clocks = {}, {}, {}, {}
        self._thread = threading.Thread(target=self._work, name="cpu-sampler", daemon=True)
        self._thread.start()
        atexit.register(self.write)

    def write(self):
        """Write what was counted: seconds alone, seconds with what was called, seconds by thread."""
        found = {
            "words": sys.orig_argv[1:],
            "process_s": time.process_time(),
            "sampler_s": self._threads.get("cpu-sampler", 0.0),
            "threads": dict(self._threads),
            "alone": dict(self._alone),
            "within": dict(self._within),
        }
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(found))
        new.replace(self._path)

    def _work(self):
        written = time.monotonic()
        while True:
            time.sleep(SAMPLE_S)
            self._look()
            if time.monotonic() - written > WRITE_S:
                self.write()
                written = time.monotonic()

    def _look(self):
        names = {thread.ident: thread.name for thread in list(threading._active.values())}
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

    def _give(self, frame, spent):
        seen = set()
        for depth in range(DEEP):
            if frame is None:
                break
            code = frame.f_code
            key = f"{code.co_filename}:{code.co_name}"
            if depth == 0:
                self._alone[key] = self._alone.get(key, 0.0) + spent
            if key not in seen:
                seen.add(key)
                self._within[key] = self._within.get(key, 0.0) + spent
            frame = frame.f_back


if os.environ.get(FOLDER_VARIABLE):
    Sampler(os.environ[FOLDER_VARIABLE])
