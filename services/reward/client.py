"""Reward over gRPC, the asking side: the same contract over a channel."""

from typing import Any

from antiphon.protos import records_pb2, reward_pb2_grpc
from antiphon.services.reward.api import Reward, RewardStatus
from antiphon.services.rpc.serving import call, open_channel
from antiphon.services.security.credentials import Credentials
from antiphon.services.wire.status import reward_status_from_proto


class RewardClient(Reward):
    """A reward service at host:port."""

    def __init__(
        self,
        address: str,
        timeout_s: float = 10.0,
        *,
        channel: Any = None,
        credentials: Credentials | None = None,
    ) -> None:
        """Open a channel; nothing is sent yet.

        Args:
            address: host:port.
            timeout_s: deadline of each call, seconds.
            channel: used instead of a new one to `address`; an `in_process.InProcessChannel`, say.
            credentials: shown to the service; None speaks without encryption, on loopback alone.
        """
        self._channel = open_channel(address, credentials) if channel is None else channel
        self._stub = reward_pb2_grpc.RewardStub(self._channel)  # type: ignore[no-untyped-call]
        self._timeout_s = timeout_s

    async def status(self) -> RewardStatus:
        """Return the service at a glance."""
        return reward_status_from_proto(await call(self._stub.Status, records_pb2.Empty(), self._timeout_s))

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()
