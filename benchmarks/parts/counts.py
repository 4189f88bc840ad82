"""Counts: what snapshots cost besides seconds: bytes hashed, flushes to the disk, memory."""

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from blake3 import blake3

from antiphon.api import manifest as manifest_module
from antiphon.weights import payload_files, snapshot

LOOK_S = 0.002
"""Between two looks at the memory."""


class Counts:
    """Bytes hashed and syncs, by who caused them, while `of` is open."""

    def __init__(self) -> None:
        self.hashed: Counter[str] = Counter()
        self.syncs: Counter[str] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def of(self, side: str) -> Iterator[None]:
        """Count what is hashed and synced inside the block as a side's, but for an engine's thread."""
        real = blake3
        counts = self

        class Counting:
            AUTO = real.AUTO

            def __init__(self, data: Any = b"", **options: Any) -> None:
                self._real = real(data, **options)
                self._note(data)

            def update(self, data: Any) -> None:
                self._real.update(data)
                self._note(data)

            def hexdigest(self) -> str:
                return str(self._real.hexdigest())

            def _note(self, data: Any) -> None:
                who = "engine" if threading.current_thread().name == "engine" else side
                with counts._lock:
                    counts.hashed[who] += memoryview(data).nbytes

        def noted(flush: Callable[[int], None]) -> Callable[[int], None]:
            def call(descriptor: int) -> None:
                with counts._lock:
                    counts.syncs[side] += 1
                flush(descriptor)

            return call

        flushes = {name: getattr(os, name) for name in ("fsync", "fdatasync")}
        modules: tuple[Any, ...] = (payload_files, snapshot, manifest_module)
        try:
            for module in modules:
                module.blake3 = Counting
            for name, flush in flushes.items():
                setattr(os, name, noted(flush))
            yield
        finally:
            for module in modules:
                module.blake3 = real
            for name, flush in flushes.items():
                setattr(os, name, flush)


@contextmanager
def anonymous_growth() -> Iterator[list[int]]:
    """Give a list that holds, after the block, the most bytes that the process's own memory grew by."""
    before, most, ended = anonymous_bytes(), [0], threading.Event()

    def look() -> None:
        while not ended.wait(LOOK_S):
            most[0] = max(most[0], anonymous_bytes() - before)

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield most
    finally:
        ended.set()
        watcher.join()


def anonymous_bytes() -> int:
    """Return the bytes of the process's memory that no file holds."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise SystemExit("this kernel does not tell RssAnon; use Linux 4.5 or later")
