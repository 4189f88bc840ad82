"""Broadcast over gRPC, the asking side: the same contract over a channel."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

from antiphon.protos import broadcast_pb2, broadcast_pb2_grpc
from antiphon.services.broadcast.api import Broadcast
from antiphon.services.rpc.serving import stream
from antiphon.services.rpc.unary import Client
from antiphon.services.security.credentials import Credentials


class BroadcastClient(Client, Broadcast):
    """A holder of chunks at host:port, such as a manifest's origin."""

    def __init__(
        self,
        address: str,
        transfer_timeout_s: float = 600.0,
        *,
        channel: Any = None,
        credentials: Credentials | None = None,
    ) -> None:
        """Open a channel, unless one is given; each chunk may take `transfer_timeout_s` seconds to come."""
        super().__init__(broadcast_pb2_grpc.BroadcastStub, address, credentials, channel)
        self._transfer_timeout_s = transfer_timeout_s

    async def get_chunks(self, digests: Sequence[str]) -> AsyncIterator[tuple[str, bytes]]:
        request = broadcast_pb2.ChunksRequest(digests=digests)
        async for chunk in stream(self._stub.GetChunks, request, None, self._transfer_timeout_s):
            yield chunk.digest, chunk.payload
