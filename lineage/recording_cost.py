"""Recording cost: how long the loop spent in calls of the recorder, and what its writers took."""

import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from antiphon.lineage.writer import WriterReport


@dataclass(frozen=True, slots=True)
class RecorderReport:
    """What recording cost and whether it is complete."""

    complete: bool
    """Nothing failed and nothing is pending."""
    calls: int
    """Calls by the loop."""
    enqueue_ms_median: float
    enqueue_ms_max: float
    enqueue_ms_total: float
    """Milliseconds the loop spent in calls."""
    writer_cpu_s: float
    """CPU seconds of both writer threads."""
    writers: tuple[WriterReport, ...]


def summarise(milliseconds: Sequence[float], writers: Sequence[WriterReport]) -> RecorderReport:
    """Return what recording cost: `milliseconds` of each call, and what each writer says."""
    return RecorderReport(
        complete=not any(writer.failed or writer.pending for writer in writers),
        calls=len(milliseconds),
        enqueue_ms_median=statistics.median(milliseconds) if milliseconds else 0.0,
        enqueue_ms_max=max(milliseconds, default=0.0),
        enqueue_ms_total=sum(milliseconds),
        writer_cpu_s=sum(writer.cpu_s for writer in writers),
        writers=tuple(writers),
    )


class Timed:
    """Lets one call in at a time and remembers how long each took, waiting included."""

    def __init__(self) -> None:
        self.milliseconds: list[float] = []
        self.lock = threading.Lock()
        self._local = threading.local()

    def __enter__(self) -> None:
        self._local.started = time.perf_counter()
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.milliseconds.append((time.perf_counter() - self._local.started) * 1e3)
        self.lock.release()
