"""A server answers the health protocol, for the one that watches it from outside, and needs a port of its
own."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from antiphon.core.errors import ConfigError, UnavailableError
from antiphon.net.rpc.serving import Duplex, open_channel, start_server, stop_server


def test_health_and_a_taken_port() -> None:
    async def story() -> None:
        server, port = await start_server("127.0.0.1", 0, lambda server: None, ["antiphon.Reward"])
        try:
            async with open_channel(f"127.0.0.1:{port}") as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                request = health_pb2.HealthCheckRequest(service="antiphon.Reward")
                reply = await stub.Check(request, timeout=10.0)
                assert reply.status == health_pb2.HealthCheckResponse.SERVING
            with pytest.raises(ConfigError, match=str(port)):
                await start_server("127.0.0.1", port, lambda server: None, [])
        finally:
            await stop_server(server, 0.1)

    asyncio.run(story())


def test_a_write_into_a_stream_that_just_broke_is_a_peer_that_is_away() -> None:
    async def broken() -> AsyncIterator[object]:
        nothing = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(
            grpc.StatusCode.INTERNAL, nothing, nothing, details="Internal error from Core"
        )
        yield

    async def story() -> None:
        with pytest.raises(UnavailableError, match="Internal error from Core"):
            async for _ in Duplex(broken):
                pass

    asyncio.run(story())
