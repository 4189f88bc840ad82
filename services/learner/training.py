"""Training: what the learner service needs of the engine behind it, without naming any engine.

The service decides when to train, commit, checkpoint and publish. Whoever holds the weights
answers here: DeepSpeed's `Trainer` and the `SnapshotPublisher` in production, arithmetic in the
simulation. Nothing in this module imports torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from antiphon.core.errors import IntegrityError
from antiphon.core.records import SnapshotManifest, StepCommit
from antiphon.core.trust.audit import SampleStatistics
from antiphon.services.learner.progress import ProgressCounter


@dataclass(frozen=True, slots=True, eq=False)
class TrainedStep:
    """What a step left behind."""

    version: int
    weights_digest: str
    weights: Mapping[str, Any]
    """Name -> tensor: a copy, as it would be published."""
    metrics: dict[str, float]
    drifts: Mapping[str, tuple[SampleStatistics, ...]] = field(default_factory=dict)
    """By group: how far the workers' logprobs were from the learner's, where both had the same weights."""


def check_repeated(commit: StepCommit, held: TrainedStep) -> None:
    """Compare a repeated step with its commit.

    Raises:
        IntegrityError: when its weights are others.
    """
    if commit.weights_digest != held.weights_digest:
        raise IntegrityError(
            f"version {commit.version} was committed with weights {commit.weights_digest}, but repeating "
            f"its steps gave {held.weights_digest}; the machine, the libraries or learner.threads differ "
            "from those of the run"
        )


class Training(Protocol):
    """The weights and their checkpoints; every method runs on the training thread."""

    progress: ProgressCounter
    """Counts micro-batches, bytes of the weights and of checkpoints as they are done."""

    @property
    def version(self) -> int:
        """The version whose weights are held; -1 before the first `start` and within a step."""

    def newest_checkpoint(self, at_most: int) -> int | None:
        """Return the newest version up to `at_most` with a sound checkpoint, or None."""

    def start(self, at_most: int) -> TrainedStep:
        """Begin anew from the newest sound checkpoint up to a version, or from the base weights.

        Raises:
            ConfigError: when the model cannot be loaded, or the checkpoint was made with
                another configuration.
        """

    def train(self, step: int, payload: bytes) -> TrainedStep:
        """Train on the batch file of `step`, its digest checked; version step + 1 is held afterwards.

        Raises:
            IntegrityError: when the step is not the next one, or loss, gradient or weights are no
                numbers; in the latter case the trainer must be started anew.
        """

    def save(self) -> int:
        """Write a checkpoint of the version held, and return the version.

        Raises:
            UnavailableError: when the disk is full or cannot be written; nothing is left then.
        """

    def stop(self) -> None:
        """Drop the engine."""


class Publishing(Protocol):
    """Versions kept aside for publication, and the snapshots already written."""

    progress: ProgressCounter
    """Counts bytes of the snapshot that is written."""

    def keep(self, version: int, weights: Mapping[str, Any]) -> None:
        """Keep the weights of a version aside; they must be a copy."""

    def write(self, version: int, origin: str) -> SnapshotManifest:
        """Write the snapshot of a version, unless it is there, and return its manifest.

        Raises:
            ContractError: when its weights are not kept any more.
            UnavailableError: when the disk is full or cannot be written; no manifest is left then.
        """

    def waiting(self) -> list[int]:
        """Return the versions that are kept aside and not written yet, oldest first."""

    def stored(self) -> list[int]:
        """Return the versions whose snapshots are stored, oldest first."""
