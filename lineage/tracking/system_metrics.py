"""System metrics: CPU and memory of the machine and of the run's own processes, now and then.

One thread takes a sample every few seconds and keeps it until someone collects; no one waits
for it, and a collector that stays away costs only the oldest samples.
"""

import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

import psutil

from antiphon.system.cpu_time import FamilyTimes

SAMPLES_KEPT = 720
"""Samples that wait for a collector; two hours at ten seconds."""
_MEGABYTE = 1e6


@dataclass(frozen=True, slots=True)
class SystemSample:
    """One look at the machine."""

    second: int
    """Whole seconds the run had been going."""
    at: float
    """Unix seconds."""
    metrics: dict[str, float]
    """Names of `core.metrics.SYSTEM_METRICS`, each with `system/`."""


class SystemSampler:
    """Samples until it is closed."""

    def __init__(self, interval_s: float, run_s: float = 0.0) -> None:
        """Begin to sample.

        Args:
            interval_s: seconds between two samples; must be positive.
            run_s: seconds the run had been going before.
        """
        self._interval_s = interval_s
        self._began = time.monotonic() - run_s
        self._samples: deque[SystemSample] = deque(maxlen=SAMPLES_KEPT)
        self._root = psutil.Process()
        self._times = FamilyTimes(self._root)
        self._spent_s, self._looked = 0.0, time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="antiphon-system", daemon=True)
        self._thread.start()

    def collect(self, most: int) -> list[SystemSample]:
        """Return up to `most` samples that no one has collected, oldest first."""
        return [self._samples.popleft() for _ in range(min(most, len(self._samples)))]

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop the thread."""
        self._over.set()
        self._thread.join(timeout_s)

    def sample(self) -> SystemSample:
        """Look at the machine now; shares of CPU are since the look before."""
        memory, own = psutil.virtual_memory(), list[int]()
        for process in (self._root, *self._root.children(recursive=True)):
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # it ended while it was looked at
                own.append(process.memory_info().rss)
        now, seconds = time.monotonic(), self._times.look()
        spent_s = sum(seconds.values())
        share = 100.0 * (spent_s - self._spent_s) / max(1e-9, now - self._looked)
        self._spent_s, self._looked = spent_s, now
        values = {
            "cpu_utilization_percentage": psutil.cpu_percent(),
            "system_memory_usage_megabytes": (memory.total - memory.available) / _MEGABYTE,
            "system_memory_usage_percentage": float(memory.percent),
            "run_cpu_percentage": share,
            "run_memory_megabytes": sum(own) / _MEGABYTE,
            "run_processes": float(len(own)),
            **{f"cpu_seconds_{kind}": taken for kind, taken in seconds.items()},
        }
        metrics = {f"system/{name}": value for name, value in values.items()}
        return SystemSample(int(time.monotonic() - self._began), datetime.now(UTC).timestamp(), metrics)

    def _work(self) -> None:
        self.sample()  # the first look only begins the shares
        while not self._over.wait(self._interval_s):
            self._samples.append(self.sample())
