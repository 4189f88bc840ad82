"""Learner: the contract, in our own records."""

from dataclasses import dataclass
from typing import Protocol

from antiphon.core.client_records import Scores
from antiphon.core.records import IntArray, SnapshotManifest, StepCommit
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


@dataclass(frozen=True, slots=True)
class CallReply:
    """Whether a call of a client is done, or how far the learner is with it."""

    progress: LearnerProgress
    held: int = 0
    """Calls whose gradients are summed since the version that is held."""
    done: bool = False
    """The result lies in RUN_DIR/calls/DIGEST.out."""


@dataclass(frozen=True, slots=True)
class SavedReply:
    """What was saved, or how far the learner is with it."""

    progress: LearnerProgress
    digest: str | None = None
    """blake3 of the version's weights, once all of it is on the disk."""
    bytes: int = 0
    """Of the checkpoint; 0 for weights that can only be sampled from."""


class Learner(Protocol):
    """Trains on stored batches, one optimizer step at a time, and publishes versions.

    Work may take any time: calls that wait are long polls that begin it, or join it, and return after
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

    async def await_call(
        self, step: int, place: int, digest: str, forward_only: bool, wait_s: float
    ) -> CallReply:
        """Do the call of a client whose file lies in RUN_DIR/calls, and write its result beside it.

        Its gradients are added to those of the calls since version `step`, of which it is number `place`; one
        that is `forward_only` adds nothing and has no place. When `place` is above the calls that are held,
        nothing is done and the reply says how many are: a learner that was started again has forgotten them,
        and so has one after a loss that was no number. They are to be given again.

        Raises:
            ContractError: when the run is not driven by a client, the call cannot be trained on, `step` is
                not the version held, or another call has that place.
            IntegrityError: when its loss is no number.
        """

    async def await_saved(
        self, kind: str, name: str, version: int, wait_s: float, expires_at: float | None = None
    ) -> SavedReply:
        """Keep a version under a name, in place of what had it.

        Args:
            kind: `weights`, a checkpoint of the version that is held, or `sampler_weights`, the snapshot of
                a stored version, which stays stored and announced.
            name: of the folder in RUN_DIR/saved/KIND.
            version: as above.
            wait_s: as for other calls.
            expires_at: when its time is over, Unix seconds; noted, and for others to act upon.

        Raises:
            ContractError: when the run is not driven by a client, there can be no such kind or name, or the
                version is not the one that is held, or not stored.
            UnavailableError: when the disk is full; nothing is left then.
        """

    async def drop_saved(self, kind: str, name: str) -> None:
        """Give up what was saved under a name; what is not there is ignored.

        Raises:
            ContractError: when there can be no such kind or name.
        """

    async def score(self, version: int, token_ids: IntArray, top: int) -> Scores:
        """Return the log-probabilities of tokens [P] under a stored version, at temperature 1, and the `top`
        most probable ones at each place.

        Raises:
            ContractError: when the version is not stored, or the tokens cannot be: none, too many, or one
                that the model does not have.
        """

    async def status(self) -> LearnerStatus:
        """Return the learner at a glance."""
