"""A server answers the health protocol, for the one that watches it from outside, and needs a port of its
own."""

import asyncio

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from antiphon.core.errors import ConfigError
from antiphon.net.rpc.serving import open_channel, start_server, stop_server


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
