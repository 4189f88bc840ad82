"""Broadcast over gRPC, the asking side: the same contract over a channel."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

from antiphon.protos import broadcast_pb2, broadcast_pb2_grpc
from antiphon.services.broadcast.api import Broadcast
from antiphon.services.rpc.serving import open_channel, stream
from antiphon.services.security.credentials import Credentials


class BroadcastClient(Broadcast):
    """A holder of chunks at host:port."""

    def __init__(
        self,
        address: str,
        transfer_timeout_s: float = 600.0,
        *,
        channel: Any = None,
        credentials: Credentials | None = None,
    ) -> None:
        """Open a channel; nothing is sent yet.

        Args:
            address: host:port, such as a manifest's origin.
            transfer_timeout_s: deadline of one stream of chunks, seconds.
            channel: used instead of a new one to `address`; an `in_process.InProcessChannel`, say.
            credentials: shown to the holder; None speaks without encryption, on loopback alone.
        """
        self._channel = open_channel(address, credentials) if channel is None else channel
        self._stub = broadcast_pb2_grpc.BroadcastStub(self._channel)  # type: ignore[no-untyped-call]
        self._transfer_timeout_s = transfer_timeout_s

    async def get_chunks(self, digests: Sequence[str]) -> AsyncIterator[tuple[str, bytes]]:
        """Yield (digest, bytes) as the holder sent them; nothing is checked here."""
        request = broadcast_pb2.ChunksRequest(digests=digests)
        async for chunk in stream(self._stub.GetChunks, request, self._transfer_timeout_s):
            yield chunk.digest, chunk.payload

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()
