"""Watched worker: `antiphon worker` as shipped, with the times of its engine's steps, swaps and transfers.

    python -m antiphon.benchmarks.parts.network.watched_worker FILE worker --coordinator HOST:PORT ...

FILE gets them as JSON when the worker ends. The environment must be as the engine needs it
(`child_environment`): a process that replaces itself would lose them. The seconds of steps are right where
the process has one core.
"""

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from antiphon.api.engine import Engine
from antiphon.cli.app import execute
from antiphon.core.records import SnapshotManifest
from antiphon.services.rollout import process
from antiphon.services.rollout.engine.driver import LoadReport
from antiphon.services.rollout.engine.thread import EngineThread
from antiphon.services.rollout.snapshot_source import SnapshotSource, no_manifest
from antiphon.services.rollout.weights import Find

STEPS: list[tuple[float, float, float, int]] = []
"""Of each step of the engine: begin, end, seconds that it took, requests, which get a token each. Begin and
end are monotonic seconds. What other processes of the machine took away of its core does not count."""
LOADS: list[tuple[float, float]] = []
TRANSFERS: list[tuple[float, float, int]] = []
"""Begin, end and bytes of each attempt to bring a version here."""


class WatchedEngineThread(EngineThread):
    """Notes when the engine steps and swaps."""

    def _advance(self, engine: Engine) -> None:
        requests, begun_s = engine.unfinished, time.monotonic()
        before = _kept_waiting_s()
        super()._advance(engine)
        waited_s, ended_s = _kept_waiting_s() - before, time.monotonic()
        STEPS.append((begun_s, ended_s, ended_s - begun_s - max(0.0, waited_s), requests))

    async def load(
        self, version: int, tensors: Mapping[str, Any], weights_digest: str, timeout_s: float
    ) -> LoadReport:
        begun_s = time.monotonic()
        try:
            return await super().load(version, tensors, weights_digest, timeout_s)
        finally:
            LOADS.append((begun_s, time.monotonic()))


def _kept_waiting_s() -> float:
    """Return how long this thread was ready and another process had its core, up to now.

    This process has one core: as long as its other threads ran, it was they who had it.
    """
    waited_s = int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    return waited_s - (time.process_time() - time.thread_time())


class WatchedSource(SnapshotSource):
    """Notes when something is on its way."""

    async def fetch(self, manifest: SnapshotManifest, find: Find = no_manifest) -> None:
        begun_s, before = time.monotonic(), self.bytes_fetched
        try:
            await super().fetch(manifest, find)
        finally:
            TRANSFERS.append((begun_s, time.monotonic(), self.bytes_fetched - before))


def main() -> int:
    """Be a worker, and say what it did when."""
    notes = Path(sys.argv.pop(1))
    vars(process).update(EngineThread=WatchedEngineThread, SnapshotSource=WatchedSource)
    try:
        return execute(sys.argv[1:])
    finally:
        notes.write_text(json.dumps({"steps": STEPS, "loads": LOADS, "transfers": TRANSFERS}))


if __name__ == "__main__":
    sys.exit(main())
