"""Broadcast over gRPC, the asking side: the same contract over a channel."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from antiphon.api.snapshots import Blocks, Broadcast, Place
from antiphon.net.rpc.calls import Client
from antiphon.net.rpc.serving import call, stream
from antiphon.net.security.credentials import Credentials
from antiphon.protos import broadcast_pb2, broadcast_pb2_grpc

_ANSWER_S = 10.0
"""Longest wait for the answer where a holder keeps its payloads."""


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

    async def get_chunks(
        self, payload_digest: str, indices: Sequence[int], held_only: bool = False
    ) -> AsyncIterator[tuple[int, bytes]]:
        request = broadcast_pb2.ChunksRequest(
            payload_digest=payload_digest, indices=indices, held_only=held_only
        )
        async for chunk in stream(self._stub.GetChunks, request, None, self._transfer_timeout_s):
            yield chunk.index, chunk.data

    async def where(self) -> Place:
        place = await call(self._stub.Where, broadcast_pb2.PlaceRequest(), _ANSWER_S)
        return Place(Path(place.folder), place.token)

    async def blocks(self, payload_digest: str) -> Blocks:
        request = broadcast_pb2.BlocksRequest(payload_digest=payload_digest)
        # The holder may have to read all of the payload first.
        said = await call(self._stub.GetBlocks, request, self._transfer_timeout_s)
        return Blocks(said.peer_id, said.port, tuple(said.addresses))
