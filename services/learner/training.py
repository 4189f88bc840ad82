"""Training: what the learner service needs of the engine behind it, without naming any engine.

The service decides when to train, commit, checkpoint and publish. What holds the weights
answers here: DeepSpeed's `Trainer` and the `SnapshotPublisher` in production, arithmetic in the
simulation. Nothing in this module imports torch.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from antiphon.core.errors import BlockedError
from antiphon.core.records import SnapshotManifest
from antiphon.core.trust.audit import SampleStatistics
from antiphon.services.learner.progress import ProgressCounter


@dataclass(frozen=True, slots=True, eq=False)
class TrainedStep:
    """What a step left behind."""

    version: int
    weights: Any
    """To be read, on the training thread, while the trainer holds the version: `snapshot.Weights`."""
    metrics: dict[str, float]
    drifts: Mapping[str, tuple[SampleStatistics, ...]] = field(default_factory=dict)
    """By group: how far the workers' logprobs were from the learner's, where both had the same weights."""
    exactness: str = ""
    """As in `StepCommit`."""
    loaded: bool = False
    """Whether it is of saved weights. These may be given up, so a checkpoint comes before the commit."""


class Training(Protocol):
    """The weights and their checkpoints; every method runs on the training thread."""

    progress: ProgressCounter
    """Counts micro-batches, bytes of the weights and of checkpoints as they are done."""
    version: int
    """The version whose weights are held; -1 before the first `start` and within a step."""

    def newest_checkpoint(self, at_most: int) -> int | None:
        """Return the newest version up to `at_most` with a sound checkpoint, or None."""

    def start(self, at_most: int) -> TrainedStep:
        """Begin again from the newest sound checkpoint up to a version, or from the base weights.

        Raises:
            ConfigError: when the model cannot be loaded, or the checkpoint was made with
                another configuration.
        """

    def train(self, step: int, payload: bytes) -> TrainedStep:
        """Train on the batch file of `step`, its digest checked; version step + 1 is held afterwards.

        Raises:
            IntegrityError: when the step is not the next one, or loss, gradient or weights are no
                numbers; in the latter case the trainer must be started again.
        """

    def save(self) -> int:
        """Write a checkpoint of the version held, and return the version.

        Raises:
            UnavailableError: when the disk is full or cannot be written; nothing is left then.
        """

    def stop(self) -> None:
        """Drop the engine."""


class Publishing(Protocol):
    """Snapshots of versions, written when the versions are made and announced later."""

    progress: ProgressCounter
    """Counts what is done for a version that is announced."""

    def digest(self, weights: Any, done: Callable[[int], None]) -> str:
        """Return the digest of weights that no snapshot is made of; `done` gets bytes as they are read.

        Raises:
            IntegrityError: when they hold something else than numbers.
        """

    def write(self, version: int, weights: Any, done: Callable[[int], None]) -> str:
        """Write the snapshot of a version, in place of another one of that version, and return its digest.

        It is on the disk when this returns. Called on the training thread.

        Raises:
            IntegrityError: as `digest`.
            BlockedError: while too little of the disk is free; nothing was written.
            UnavailableError: when the disk is full or cannot be written; nothing is left then.
        """

    def manifest(self, version: int, origin: str) -> SnapshotManifest:
        """Return the signed manifest of a version that was written, and drop snapshots that are too old.

        Raises:
            ContractError: when it was not written, or is kept no more.
        """

    def stored(self) -> Mapping[int, str]:
        """Return the versions whose snapshots are stored, oldest first, and the digests of their weights."""


def read_weights(
    held: TrainedStep, publisher: Publishing, progress: ProgressCounter, writes: bool
) -> tuple[str, dict[str, float]]:
    """Return the digest of the version that the trainer holds, on its thread, and its step's metrics.

    With `writes` its snapshot is on the disk then.
    """
    begun = time.perf_counter()
    progress.counting("byte of the weights")
    if writes:
        try:
            digest = publisher.write(held.version, held.weights, progress.add)
        except BlockedError as error:
            progress.begin(str(error), "byte")  # so that those who watch the learner read why nothing moves
            raise
    else:
        digest = publisher.digest(held.weights, progress.add)
    metrics = dict(held.metrics)
    if "train_s" in metrics:  # a trainer that takes the time has not counted this
        metrics["train_s"] += time.perf_counter() - begun
    return digest, metrics
