"""Kill parts: seeded stand-ins for trainer and weights, on real disks, behind the interfaces of production.

The policy is a number: a batch file makes the next one from it, and tokens are drawn from it by
seed and position. So the one that knows the journal and the batch files can recompute every weight
and every token, whatever was killed in between.
"""

import asyncio
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from antiphon.api.coordinator import Coordinator
from antiphon.api.manifest import full_payload
from antiphon.core.checks import submission_digest
from antiphon.core.config import RunConfig
from antiphon.core.digests import digest_bytes
from antiphon.core.errors import IntegrityError
from antiphon.core.records import GroupSubmission, SnapshotManifest, SubmitVerdict
from antiphon.lineage.rollout_table import decode_batch
from antiphon.lineage.store.artifact_store import ArtifactStore
from antiphon.services.coordinator.client import CoordinatorClient
from antiphon.services.learner.checkpoints import CheckpointStore
from antiphon.services.learner.progress import ProgressCounter
from antiphon.services.learner.service import LearnerService
from antiphon.services.learner.training import TrainedStep, Training
from antiphon.services.rollout.snapshot_source import SnapshotSource, no_manifest
from antiphon.services.rollout.weights import Find
from antiphon.simulator.standins import arithmetic
from antiphon.simulator.standins.training import ArithmeticPublisher
from antiphon.system import failpoints
from antiphon.weights.payload_store import PayloadStore

HANG_VARIABLE = "ANTIPHON_HANG_AFTER_STEPS"
"""Names the steps after which a worker's engine hangs; unset, it never does."""
AFTER_VARIABLE = "ANTIPHON_START_AFTER"
"""Names a file of the run's folder that is there before a worker joins; unset, it joins at once."""
AFTER_S = 120.0
"""How long a worker waits for it."""
LINK_VARIABLE = "ANTIPHON_LINK_S"
"""Names the seconds that a snapshot takes on a worker's link, `inf` for one that never arrives."""
UPLOAD_SHARE = 0.1
"""A finished group takes this share of what a snapshot takes."""
LOOK_S = 0.002
WEIGHTS_FILE = "weights"


async def wait_for_file(path: Path, within_s: float = AFTER_S) -> None:
    """Return when a file is there.

    Raises:
        TimeoutError: when it does not come in time.
    """
    async with asyncio.timeout(within_s):
        while not path.exists():
            await asyncio.sleep(LOOK_S)


class LinkedSource(SnapshotSource):
    """Production's transfer and payload store, without torch, over a link; its time is slept."""

    def __init__(self, root: Path, config: RunConfig, link_s: float) -> None:
        """`link_s` is what a snapshot takes; with an infinite one it never arrives."""
        super().__init__(PayloadStore(root), config)
        self._link_s = link_s

    async def fetch(self, manifest: SnapshotManifest, find: Find = no_manifest) -> None:
        """Bring the chunks of a snapshot here."""
        await (asyncio.sleep(self._link_s) if self._link_s < math.inf else asyncio.Event().wait())
        await super().fetch(manifest, find)

    def open(self, manifest: SnapshotManifest) -> Mapping[str, Any]:
        """Return the payload of a fetched snapshot, each chunk checked; tensors stay bytes.

        Raises:
            IntegrityError: when its file was altered.
        """
        self._store.checked(manifest)
        return {"payload": self._store.map(full_payload(manifest).digest)}


class LightTrainer(Training):
    """Goes from version to version by the digest of the batch file; a step takes `step_s`."""

    def __init__(self, checkpoints: CheckpointStore, step_s: float) -> None:
        self._checkpoints, self._step_s = checkpoints, step_s
        self._weights = arithmetic.BASE_WEIGHTS
        self.version = -1
        self.progress = ProgressCounter()

    def newest_checkpoint(self, at_most: int) -> int | None:
        """Return the newest version up to `at_most` with a sound checkpoint, or None."""
        return self._checkpoints.newest_sound(at_most)

    def start(self, at_most: int) -> TrainedStep:
        """Begin from the newest checkpoint up to a version, or from the base weights."""
        found = self.newest_checkpoint(at_most)
        self.version = found or 0
        self._weights = arithmetic.BASE_WEIGHTS
        if found is not None:
            self._weights = (self._checkpoints.folder(found) / WEIGHTS_FILE).read_text()
        return self._trained({})

    def train(self, step: int, payload: bytes) -> TrainedStep:
        """Train on the batch file of `step`.

        Raises:
            IntegrityError: when it is not the next step.
        """
        if step != self.version:
            raise IntegrityError(f"step {step} cannot train on version {self.version}; restore first")
        self.version = -1
        failpoints.reach("learner.forward")
        time.sleep(self._step_s)
        rows = decode_batch(payload)
        failpoints.reach("learner.optimizer")
        if rows:
            self._weights = arithmetic.next_weights(self._weights, digest_bytes(payload))
        self.version = step + 1
        return self._trained({"loss": 0.0, "trajectories": float(len(rows))})

    def save(self) -> int:
        """Write a checkpoint and return its version."""
        weights = self._weights
        self._checkpoints.write(self.version, lambda folder: _write(folder / WEIGHTS_FILE, weights))
        return self.version

    def stop(self) -> None:
        """There is nothing to drop."""

    def _trained(self, metrics: dict[str, float]) -> TrainedStep:
        return TrainedStep(self.version, self._weights, metrics)


def open_light_learner(
    config: RunConfig,
    run_id: str,
    run_dir: Path,
    store: ArtifactStore,
    payloads: PayloadStore,
    coordinator: Coordinator,
    step_s: float = 0.0,
) -> LearnerService:
    """Return production's learner service with a light trainer, whose steps take `step_s`, and publisher."""
    checkpoints = CheckpointStore(run_dir / "checkpoints", config.learner.checkpoints_kept)
    publisher = ArithmeticPublisher(run_id, payloads, config.broadcast.snapshots_kept)
    return LearnerService(config, LightTrainer(checkpoints, step_s), publisher, store, coordinator)


class WitnessClient(CoordinatorClient):
    """Writes down what the coordinator acknowledged, where a kill of this process cannot take it away."""

    def __init__(self, address: str, path: Path, link_s: float = 0.0) -> None:
        """Append lines `group digest verdict` to the file at `path`; groups travel over a link."""
        super().__init__(address)
        self._upload_s = UPLOAD_SHARE * link_s if link_s < math.inf else 0.0
        self._notes = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    async def submit_group(self, submission: GroupSubmission) -> SubmitVerdict:
        """Hand in a group and note the answer."""
        await asyncio.sleep(self._upload_s)
        verdict = await super().submit_group(submission)
        line = f"{submission.group_id} {submission_digest(submission)} {verdict.value}\n"
        os.write(self._notes, line.encode())
        return verdict


def _write(path: Path, text: str) -> None:
    path.write_text(text)
