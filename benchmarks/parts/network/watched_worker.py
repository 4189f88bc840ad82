"""Watched worker: `antiphon worker` as shipped, with the times of its engine's steps, swaps and transfers.

    python -m antiphon.benchmarks.parts.network.watched_worker FILE worker --coordinator HOST:PORT ...

FILE gets them as JSON when the worker ends. The environment must be as the engine needs it
(`child_environment`): a process that replaces itself would lose them.
"""

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from antiphon.cli.app import execute
from antiphon.core.records import SnapshotManifest
from antiphon.services.rollout import process
from antiphon.services.rollout.engine.api import Engine
from antiphon.services.rollout.engine.driver import LoadReport
from antiphon.services.rollout.engine.thread import EngineThread
from antiphon.services.rollout.snapshot_source import SnapshotSource, no_manifest
from antiphon.services.rollout.weights import Find

STEPS: list[tuple[float, float, int]] = []
"""Begin, end and requests of each step of the engine; a request gets a token in each. Monotonic seconds."""
LOADS: list[tuple[float, float]] = []
TRANSFERS: list[tuple[float, float, int]] = []
"""Begin, end and bytes of each attempt to bring a version here."""


class WatchedEngineThread(EngineThread):
    """Notes when the engine steps and swaps."""

    def _advance(self, engine: Engine) -> None:
        requests, begun_s = engine.unfinished, time.monotonic()
        super()._advance(engine)
        STEPS.append((begun_s, time.monotonic(), requests))

    async def load(
        self, version: int, tensors: Mapping[str, Any], weights_digest: str, timeout_s: float
    ) -> LoadReport:
        begun_s = time.monotonic()
        try:
            return await super().load(version, tensors, weights_digest, timeout_s)
        finally:
            LOADS.append((begun_s, time.monotonic()))


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
    process.EngineThread = WatchedEngineThread  # type: ignore[misc]
    process.SnapshotSource = WatchedSource  # type: ignore[misc]
    try:
        return execute(sys.argv[1:])
    finally:
        notes.write_text(json.dumps({"steps": STEPS, "loads": LOADS, "transfers": TRANSFERS}))


if __name__ == "__main__":
    sys.exit(main())
