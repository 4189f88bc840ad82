"""Learner: the contract, in our own records."""

from dataclasses import dataclass
from typing import Protocol

from antiphon.core.records import SnapshotManifest, StepCommit
from antiphon.core.status import LearnerProgress


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did and how its seconds were spent."""

    commit: StepCommit
    idle_s: float
    """Seconds between the end of the step before and having this step's batch; 0 for the first."""
    train_s: float
    """Seconds from having the batch until the version was committed; 0 for a repeated step."""


@dataclass(frozen=True, slots=True)
class LearnerStatus:
    """The learner at a glance."""

    version: int
    state: str
    """idle, training, publishing or restoring."""
    progress: LearnerProgress


@dataclass(frozen=True, slots=True)
class StepReply:
    """The result of a step that is over, or how far the learner is."""

    progress: LearnerProgress
    result: StepResult | None = None


@dataclass(frozen=True, slots=True)
class SnapshotReply:
    """The manifest of an announced version, or how far the learner is with it."""

    progress: LearnerProgress
    manifest: SnapshotManifest | None = None


class Learner(Protocol):
    """Trains on stored batches, one optimizer step at a time, and publishes versions.

    Work may take any time: both calls are long polls that begin it, or join it, and return after
    `wait_s` seconds, at most 30, with what was done meanwhile. While the learner restores they wait for that.
    """

    async def await_step(self, step: int, wait_s: float) -> StepReply:
        """Train on the sealed batch of `step` and commit version step + 1.

        The learner pulls the batch's reference from the coordinator, loads the file by digest
        from the store, trains, and commits at the coordinator before it answers. Repeating a
        committed step returns its recorded result.

        Raises:
            IntegrityError: when the batch file does not match its digest, or the loss or a
                weight is not finite (then nothing is committed or published and the run
                pauses with the reason), or the run is paused or finished before the batch is sealed.
            ContractError: when `step` is not the next one.
            UnavailableError: when the coordinator or the batch cannot be reached in time.
        """

    async def await_snapshot(self, version: int, wait_s: float) -> SnapshotReply:
        """Announce the snapshot of `version`, which the step that made it has written.

        Raises:
            ContractError: when that version is not published, or kept no more.
        """

    async def status(self) -> LearnerStatus:
        """Return the learner at a glance."""
