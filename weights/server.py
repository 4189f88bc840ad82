"""Broadcast over gRPC, the serving side: proto in, service call, proto out."""

from collections.abc import AsyncIterator
from typing import Any

import grpc

from antiphon.api.snapshots import Broadcast
from antiphon.protos import broadcast_pb2, broadcast_pb2_grpc

SERVICE_NAME = "antiphon.Broadcast"
"""Full name of the service, for the health check."""


class BroadcastServicer(broadcast_pb2_grpc.BroadcastServicer):
    """Answers for any holder of chunks."""

    def __init__(self, service: Broadcast) -> None:
        self._service = service

    async def GetChunks(self, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        """Stream the chunks asked for."""
        async for index, data in self._service.get_chunks(
            request.payload_digest, list(request.indices), request.held_only
        ):
            yield broadcast_pb2.Chunk(index=index, data=data)

    async def Where(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """Answer where the payloads lie."""
        place = await self._service.where()
        return broadcast_pb2.Place(folder=str(place.folder), token=place.token)

    async def GetBlocks(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """Answer where the chunks are blocks."""
        found = await self._service.blocks(request.payload_digest)
        return broadcast_pb2.Blocks(peer_id=found.peer_id, port=found.port, addresses=found.addresses)


def register_broadcast(server: grpc.aio.Server, service: Broadcast) -> None:
    """Add the service to a server that was not started yet."""
    servicer = BroadcastServicer(service)
    broadcast_pb2_grpc.add_BroadcastServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
