"""Broadcast over gRPC: the contract between those that hold chunks and those that want them, on a channel."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from antiphon.api.snapshots import Blocks, Broadcast, Place
from antiphon.net.rpc.calls import Client, asks, serve_contract, unary_calls
from antiphon.net.rpc.codec import codec
from antiphon.net.rpc.serving import call, stream
from antiphon.net.security.credentials import Credentials
from antiphon.protos import broadcast_pb2, broadcast_pb2_grpc

codec(Place, broadcast_pb2.Place, folder=(str, Path))
_, _blocks_from_proto = codec(Blocks, broadcast_pb2.Blocks)
_SERVICE = broadcast_pb2.DESCRIPTOR.services_by_name["Broadcast"]
_CALLS = unary_calls(_SERVICE, Broadcast, {})
SERVICE_NAME: str = _SERVICE.full_name
"""For the health check."""


def register_broadcast(server: Any, service: Broadcast) -> None:
    """Add a holder of chunks to a server that was not started yet."""

    async def get_chunks(request: Any, context: object) -> AsyncIterator[Any]:
        asked = request.payload_digest, list(request.indices), request.held_only
        async for index, data in service.get_chunks(*asked):
            yield broadcast_pb2.Chunk(index=index, data=data)

    serve_contract(server, _SERVICE, _CALLS, service, GetChunks=get_chunks)


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

    where = asks(_CALLS, Broadcast.where)

    async def get_chunks(
        self, payload_digest: str, indices: Sequence[int], held_only: bool = False
    ) -> AsyncIterator[tuple[int, bytes]]:
        request = broadcast_pb2.ChunksRequest(
            payload_digest=payload_digest, indices=indices, held_only=held_only
        )
        async for chunk in stream(self._stub.GetChunks, request, None, self._transfer_timeout_s):
            yield chunk.index, chunk.data

    async def get_blocks(self, payload_digest: str) -> Blocks:
        request = broadcast_pb2.BlocksRequest(payload_digest=payload_digest)
        # The holder may have to read all of the payload first.
        return _blocks_from_proto(await call(self._stub.GetBlocks, request, self._transfer_timeout_s))
