"""Learner over gRPC, the asking side: the same contract over a channel."""

from typing import Any

from antiphon.core.records import SnapshotManifest
from antiphon.protos import coordinator_pb2, learner_pb2_grpc, records_pb2
from antiphon.services.learner.api import Learner, LearnerStatus, StepResult
from antiphon.services.rpc.serving import call, open_channel
from antiphon.services.security.credentials import Credentials
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
            work_timeout_s: deadline of steps and publications, seconds.
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

    async def status(self) -> LearnerStatus:
        return learner_status_from_proto(await call(self._stub.Status, records_pb2.Empty(), self._timeout_s))

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()
