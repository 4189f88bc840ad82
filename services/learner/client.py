"""Learner over gRPC, the asking side: the same contract over a channel."""

from collections.abc import Sequence
from typing import Any

from antiphon.core.records import FloatArray, IntArray, SnapshotManifest
from antiphon.protos import coordinator_pb2, learner_pb2, learner_pb2_grpc, records_pb2
from antiphon.services.learner.api import Learner, LearnerStatus, StepResult
from antiphon.services.rpc.serving import call, open_channel
from antiphon.services.security.credentials import Credentials
from antiphon.services.wire.arrays import logprobs_from_bytes
from antiphon.services.wire.status import learner_status_from_proto
from antiphon.services.wire.steps import snapshot_manifest_from_proto, step_result_from_proto


class LearnerClient(Learner):
    """A learner at host:port.

    A call that ran into its deadline may be repeated: the learner joins it with the one under way.
    """

    def __init__(
        self,
        address: str,
        timeout_s: float = 10.0,
        work_timeout_s: float = 600.0,
        *,
        channel: Any = None,
        credentials: Credentials | None = None,
    ) -> None:
        """Open a channel; nothing is sent yet.

        Args:
            address: host:port.
            timeout_s: deadline of quick questions, seconds.
            work_timeout_s: deadline of steps, publications, checkpoints and restores, seconds.
            channel: used instead of a new one to `address`; an `in_process.InProcessChannel`, say.
            credentials: shown to the learner; None speaks without encryption, on loopback alone.
        """
        self._channel = open_channel(address, credentials) if channel is None else channel
        self._stub = learner_pb2_grpc.LearnerStub(self._channel)  # type: ignore[no-untyped-call]
        self._timeout_s = timeout_s
        self._work_timeout_s = work_timeout_s

    async def step(self, step: int) -> StepResult:
        """Train on the sealed batch of `step` and commit version step + 1."""
        request = coordinator_pb2.StepRequest(step=step)
        return step_result_from_proto(await call(self._stub.Step, request, self._work_timeout_s))

    async def publish(self, version: int) -> SnapshotManifest:
        """Write the snapshot of `version` and announce it."""
        request = coordinator_pb2.VersionRequest(version=version)
        return snapshot_manifest_from_proto(await call(self._stub.Publish, request, self._work_timeout_s))

    async def checkpoint(self) -> int:
        """Write a checkpoint of the present version and return the version."""
        reply = await call(self._stub.Checkpoint, records_pb2.Empty(), self._work_timeout_s)
        return int(reply.version)

    async def restore(self) -> int:
        """Return to the coordinator's committed version."""
        reply = await call(self._stub.Restore, records_pb2.Empty(), self._work_timeout_s)
        return int(reply.version)

    async def score_tokens(self, prompt: Sequence[int], completion: IntArray) -> FloatArray:
        """Return the learner's logprobs of `completion` after `prompt`, [T] float32, nats."""
        request = learner_pb2.ScoreRequest(prompt=prompt, completion=completion.tolist())
        reply = await call(self._stub.ScoreTokens, request, self._work_timeout_s)
        return logprobs_from_bytes(reply.logprobs)

    async def status(self) -> LearnerStatus:
        """Return the learner at a glance."""
        return learner_status_from_proto(await call(self._stub.Status, records_pb2.Empty(), self._timeout_s))

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()
