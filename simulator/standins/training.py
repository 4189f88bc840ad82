"""Training: seeded stand-ins for DeepSpeed and for publishing; all else of the learner is production.

The trainer goes from version to version by batch file alone and keeps checkpoints, the publisher publishes
what was kept aside. What they keep across a kill lies in a `LearnerDisk`; how long things take is virtual.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from antiphon.core.digests import digest_bytes
from antiphon.core.errors import ContractError, IntegrityError
from antiphon.core.records import ChunkEntry, SnapshotManifest, TensorEntry
from antiphon.services.broadcast.chunk_store import ChunkStore
from antiphon.services.learner.progress import ProgressCounter
from antiphon.services.learner.training import TrainedStep
from antiphon.simulator.standins import arithmetic
from antiphon.simulator.virtual.chunks import MemoryChunks
from antiphon.simulator.virtual.loop import VirtualLoop

CHUNK_BYTES = 40
"""Smaller than a snapshot of the stand-ins, so that one is several chunks."""
STEP_PARTS = 64
"""Micro-batches of a step."""


@dataclass(slots=True)
class LearnerDisk:
    """What a learner finds again after it was killed."""

    checkpoints: dict[int, str] = field(default_factory=dict)
    """Version -> digest of its weights."""
    chunks: MemoryChunks = field(default_factory=MemoryChunks)
    """The origin's."""


class ArithmeticTrainer:
    """Goes from version to version by the digest of the batch file, which it reads and checks."""

    def __init__(
        self,
        disk: LearnerDisk,
        loop: VirtualLoop,
        step_s: Callable[[], float],
        kept: int,
        trained: Callable[[int, bytes], int],
    ) -> None:
        """Keep the `kept` newest checkpoints; `trained` gets each step and its file, and returns its rows."""
        self._disk = disk
        self._loop = loop
        self._step_s = step_s
        self._kept = kept
        self._trained = trained
        self._weights = arithmetic.BASE_WEIGHTS
        self.version = -1
        self.progress = ProgressCounter()

    def newest_checkpoint(self, at_most: int) -> int | None:
        return max((version for version in self._disk.checkpoints if version <= at_most), default=None)

    def start(self, at_most: int) -> TrainedStep:
        self.progress.counting("byte", self._spend())
        version = self.newest_checkpoint(at_most)
        self.version = version or 0
        self._weights = arithmetic.BASE_WEIGHTS if version is None else self._disk.checkpoints[version]
        return self._step_of({})

    def train(self, step: int, payload: bytes) -> TrainedStep:
        if step != self.version:
            raise IntegrityError(f"step {step} cannot train on version {self.version}; restore first")
        self.progress.counting("micro-batch", self._spend())
        rows = self._trained(step, payload)
        if rows:  # a batch without rows changes no weights
            self._weights = arithmetic.next_weights(self._weights, digest_bytes(payload))
        self.version = step + 1
        return self._step_of({"loss": 0.0, "trajectories": float(rows)})

    def save(self) -> int:
        self._disk.checkpoints[self.version] = self._weights
        for version in sorted(self._disk.checkpoints)[: -self._kept]:
            del self._disk.checkpoints[version]
        return self.version

    def stop(self) -> None:
        """There is nothing to drop."""

    def _spend(self) -> Callable[[], int]:
        """Take as long as a step does, and return what says how many of its parts are done by now."""
        seconds, begun_s = self._step_s(), self._loop.time()
        self._loop.spend(seconds)
        return lambda: min(STEP_PARTS, int(STEP_PARTS * (self._loop.time() - begun_s) / max(seconds, 1e-9)))

    def _step_of(self, metrics: dict[str, float]) -> TrainedStep:
        return TrainedStep(self.version, self._weights, {"weights": self._weights}, metrics)


class ArithmeticPublisher:
    """Keeps versions aside and cuts them into chunks, as the production publisher does."""

    def __init__(
        self, run_id: str, chunks: MemoryChunks | ChunkStore, snapshots_kept: int, waiting_limit: int
    ) -> None:
        """Store the `snapshots_kept` newest snapshots; keep at most `waiting_limit` versions aside."""
        self._run_id = run_id
        self._chunks = chunks
        self._snapshots_kept = snapshots_kept
        self._waiting_limit = waiting_limit
        self.progress = ProgressCounter()
        self._waiting: dict[int, str] = {}

    def keep(self, version: int, weights: Mapping[str, Any]) -> None:
        self._waiting[version] = str(weights["weights"])
        while len(self._waiting) > self._waiting_limit:
            del self._waiting[min(self._waiting)]

    def write(self, version: int, origin: str) -> SnapshotManifest:
        if version in self._waiting:
            manifest = self._cut(version, self._waiting[version], origin)
        elif version in self._chunks.versions():
            known = self._chunks.manifest(version)
            manifest = self._cut(version, known.weights_digest, origin)
        else:
            raise ContractError(f"the weights of version {version} are not kept for publication")
        self._chunks.put_manifest(manifest)
        self._waiting.pop(version, None)
        newest = self._chunks.versions()[-self._snapshots_kept :]
        self._chunks.prune([self._chunks.manifest(held) for held in newest])
        return manifest

    def waiting(self) -> list[int]:
        return sorted(self._waiting)

    def stored(self) -> list[int]:
        return self._chunks.versions()

    def _cut(self, version: int, weights: str, origin: str) -> SnapshotManifest:
        payload = weights.encode()
        chunks = []
        for offset in range(0, len(payload), CHUNK_BYTES):
            part = payload[offset : offset + CHUNK_BYTES]
            chunks.append(ChunkEntry(digest_bytes(part), offset, len(part)))
            self._chunks.put(chunks[-1].digest, part)
        tensor = TensorEntry("weights", "uint8", (len(payload),), 0, len(payload))
        return SnapshotManifest(
            self._run_id, version, weights, (tensor,), tuple(chunks), len(payload), origin
        )
