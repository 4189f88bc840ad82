"""Training: seeded stand-ins for DeepSpeed and for publishing; all else of the learner is production.

The trainer goes from version to version by batch file alone and keeps checkpoints; the publisher's snapshots
hold the name of the weights. What they keep across a kill lies in a `LearnerDisk`; how long things take is
virtual.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from antiphon.api.policy_file import policy_header
from antiphon.core.digests import digest_bytes
from antiphon.core.errors import ContractError, IntegrityError, UnavailableError
from antiphon.core.records import GroupToAudit, SnapshotManifest, TensorEntry, Trajectory
from antiphon.core.trust.audit import SampleStatistics
from antiphon.services.learner.audits.audit_loop import TokenScores
from antiphon.services.learner.progress import ProgressCounter
from antiphon.services.learner.training import TrainedStep
from antiphon.simulator.standins import arithmetic
from antiphon.simulator.virtual.chunks import MemoryPayloads
from antiphon.simulator.virtual.loop import VirtualLoop
from antiphon.weights.payload_store import PayloadStore

CHUNK_BYTES = 170
"""Smaller than a snapshot of the stand-ins, so that one is several chunks."""
STEP_PARTS = 64
"""Micro-batches of a step."""


@dataclass(slots=True)
class LearnerDisk:
    """What a learner finds again after it was killed."""

    checkpoints: dict[int, str] = field(default_factory=dict)
    """Version -> digest of its weights."""
    payloads: MemoryPayloads = field(default_factory=MemoryPayloads)
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
        return TrainedStep(self.version, self._weights, metrics)


class ArithmeticPublisher:
    """Writes snapshots whose one tensor is the name of the weights, as the production publisher does."""

    def __init__(self, run_id: str, payloads: PayloadStore, snapshots_kept: int) -> None:
        """Keep the `snapshots_kept` newest announced snapshots."""
        self._run_id = run_id
        self._payloads = payloads
        self._snapshots_kept = snapshots_kept
        self.progress = ProgressCounter()

    def digest(self, weights: str, done: Callable[[int], None]) -> str:
        return weights

    def write(self, version: int, weights: str, done: Callable[[int], None]) -> str:
        body = weights.encode()
        tensor = TensorEntry("weights", "uint8", (len(body),), 0, len(body))
        head = policy_header(self._run_id, version, weights, (tensor,))
        if isinstance(self._payloads, MemoryPayloads):
            payload = self._payloads.keep(head + body, CHUNK_BYTES)
        else:
            making = self._payloads.make(CHUNK_BYTES, len(head))
            making.write(body)
            payload = making.finish(head)
        manifest = SnapshotManifest(self._run_id, version, weights, (tensor,), len(body), (payload,), "")
        self._payloads.put_manifest(manifest)
        done(len(body))
        return weights

    def manifest(self, version: int, origin: str) -> SnapshotManifest:
        self._payloads.prune_announced(version, self._snapshots_kept)
        try:
            return replace(self._payloads.manifest(version), origin=origin)
        except UnavailableError as error:
            raise ContractError(f"version {version} cannot be published: {error}") from None

    def stored(self) -> dict[int, str]:
        return self._payloads.weights()


class ArithmeticAuditor:
    """Compares completions with what prompt, seed and versions give."""

    def __init__(self, payloads: MemoryPayloads) -> None:
        """Examine versions of which `payloads` has the snapshot."""
        self._payloads = payloads

    def examine(self, group: GroupToAudit) -> Sequence[SampleStatistics]:
        """Return what each sample and author showed; see `services.learner.audits.audit_loop.Examine`."""
        found: list[SampleStatistics] = []
        scored = 0
        for trajectory in group.submission.trajectories:
            scores = self._scores(trajectory, group.prompt_token_ids)
            scored += int(scores.scored.sum())
            found += scores.by_author(trajectory.sample_index, group.authors)
        if not scored:
            raise UnavailableError("no version of the group is kept any more")
        return found

    def _scores(self, trajectory: Trajectory, prompt: Sequence[int]) -> TokenScores:
        scores = TokenScores.of(trajectory)
        for span in trajectory.spans:
            if span.version not in self._payloads.versions():
                continue
            digest = self._payloads.manifest(span.version).weights_digest
            weights = {span.version: arithmetic.weights_number(digest)}
            tokens, logprobs = arithmetic.sampled(weights, (span,), prompt, trajectory, trajectory.seed)
            places = slice(span.start, span.stop)
            wrong = tokens != trajectory.token_ids[places]
            scores.scored[places] = True
            scores.missed[places] = scores.near[places] = scores.gross[places] = wrong
            scores.difference[places] = np.abs(logprobs - trajectory.logprobs[places])
        return scores
