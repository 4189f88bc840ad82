"""Floods: who may not ask costs headers alone, who may has a share of memory and calls (finding T7)."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest

from antiphon.core.errors import ContractError, UnavailableError
from antiphon.core.message_sizes import MOST_SPANS
from antiphon.core.records import FinishReason, GroupSubmission, Trajectory, VersionSpan
from antiphon.core.requests import LeaseRequest, WorkerHeartbeat
from antiphon.net import wire
from antiphon.net.rpc import interceptor
from antiphon.net.rpc.serving import Security, open_channel, start_server, stop_server
from antiphon.net.security.credentials import Credentials, needed_token_key
from antiphon.net.security.guard import CALLS_AT_ONCE, Guard
from antiphon.net.security.keys import LEARNER_KEY, load_key
from antiphon.protos import rollout_pb2
from antiphon.system.clock import wall_clock
from antiphon.weights.payload_store import PayloadStore
from antiphon.weights.rpc import BroadcastClient, register_broadcast
from antiphon.weights.service import BroadcastService
from antiphon.weights.signature import sign_manifest
from tests.support.artifacts import light_snapshot
from tests.support.light_parties import hello
from tests.support.loop_model import RUN_ID, light_manifest, make_config
from tests.support.secured import House, SecuredSite, make_house, secured

CONFIG = make_config(steps=4)
DEADLINE_S = 60.0
REGISTER, WORK = "/antiphon.Coordinator/Register", "/antiphon.Coordinator/Work"


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> House:
    return make_house(tmp_path_factory.mktemp("home") / "keys", ["w", "other"])


def serve_and(tmp_path: Path, house: House, act: Callable[[SecuredSite], Awaitable[None]]) -> None:
    async def run() -> None:
        async with secured(CONFIG, tmp_path, house) as site, asyncio.timeout(DEADLINE_S):
            await act(site)

    asyncio.run(run())


@asynccontextmanager
async def channel_to(address: str, credentials: Credentials) -> AsyncIterator[grpc.aio.Channel]:
    channel = open_channel(address, credentials)
    try:
        yield channel
    finally:
        await channel.close()


def test_a_call_without_a_token_is_refused_before_its_message_is_sent(tmp_path: Path, house: House) -> None:
    async def act(site: SecuredSite) -> None:
        bare = replace(house.worker("w"), token_file=None)
        async with channel_to(site.address, bare) as channel:
            for method in (REGISTER, WORK, "/antiphon.Coordinator/Status"):
                call = channel.stream_unary(method)()  # not a byte of a message is ever written
                assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
                assert "carries no access token" in (await call.details())
            # Nor is a message read that is sent all the same, over and over.
            heavy = rollout_pb2.WorkerHello(run_id="x" * (4 << 20)).SerializeToString()
            calls = [channel.unary_unary(REGISTER)(heavy) for _ in range(50)]
            codes = await asyncio.gather(*(call.code() for call in calls))
            assert set(codes) == {grpc.StatusCode.UNAUTHENTICATED}
        await site.client(house.worker("w")).register(hello("w"))

    serve_and(tmp_path, house, act)


def test_a_call_that_never_sends_its_message_is_ended(
    tmp_path: Path, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interceptor, "READ_S", 0.1)

    async def act(site: SecuredSite) -> None:
        async with channel_to(site.address, house.worker("w")) as channel:
            for _ in range(CALLS_AT_ONCE + 4):  # each gives its place back
                call = channel.stream_unary(REGISTER)()
                assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                assert "no message came within" in await call.details()

    serve_and(tmp_path, house, act)


def test_one_worker_has_only_so_many_calls_at_once(tmp_path: Path, house: House) -> None:
    async def act(site: SecuredSite) -> None:
        async with channel_to(site.address, house.worker("w")) as channel:
            held = [channel.stream_stream(WORK)() for _ in range(CALLS_AT_ONCE + 1)]
            codes = [asyncio.create_task(call.code()) for call in held]
            (refused,), _ = await asyncio.wait(codes, return_when=asyncio.FIRST_COMPLETED)
            assert refused.result() is grpc.StatusCode.UNAVAILABLE
            assert "asks too much at once" in await held[codes.index(refused)].details()
            await site.client(house.worker("other")).register(hello("other"))
            for call in held:
                call.cancel()
        worker = site.client(house.worker("w"))
        while True:  # as soon as the server has seen that they ended
            try:
                await worker.register(hello("w"))
                return
            except UnavailableError as busy:
                assert "asks too much at once" in str(busy)

    serve_and(tmp_path, house, act)


def test_who_registers_again_and_again_is_slowed(tmp_path: Path, house: House) -> None:
    async def act(site: SecuredSite) -> None:
        worker = site.client(house.worker("w"))
        with pytest.raises(UnavailableError, match="asks too much at once"):
            for _ in range(200):
                await worker.register(hello("w"))
        assert site.state_machine.state.registrations["w"] < 50
        await site.client(house.worker("other")).register(hello("other"))

    serve_and(tmp_path, house, act)


def test_who_takes_and_gives_back_again_and_again_is_slowed(tmp_path: Path, house: House) -> None:
    async def act(site: SecuredSite) -> None:
        flow, worker = site.client(house.services), site.client(house.worker("w"))
        key = load_key(house.keys / "services", LEARNER_KEY)
        await flow.announce_snapshot(sign_manifest(light_manifest(0), key))
        await flow.open_step(0)
        worker_id = (await worker.register(hello("w"))).worker_id
        beat = WorkerHeartbeat(worker_id, 0, None, (), 0, 0.0, 1.0)
        with pytest.raises(UnavailableError, match="asks too much at once"):
            for _ in range(1000):
                reply = await worker.lease_group(LeaseRequest(worker_id, 0, 8, 0.0))
                given = tuple(lease.lease_id for lease in reply.leases)
                await worker.heartbeat(replace(beat, released_leases=given))
        assert site.state_machine.state.groups_requeued <= 260

    serve_and(tmp_path, house, act)


def test_spans_beyond_any_bound_are_refused_before_they_are_looked_at() -> None:
    count = MOST_SPANS + 1
    trajectory = Trajectory(
        np.ones(count, dtype=np.int32),
        np.full(count, -1.0, dtype=np.float32),
        tuple(VersionSpan(0, i, i + 1) for i in range(count)),
        FinishReason.LENGTH,
        sample_index=0,
        seed=1,
    )
    message = wire.group_submission_to_proto(GroupSubmission("l", "g", "w-1", (trajectory,), 1.0))
    with pytest.raises(ContractError, match="version spans"):
        wire.group_submission_from_proto(message)


def test_a_request_for_the_same_chunk_again_and_again_is_refused(tmp_path: Path, house: House) -> None:
    async def run() -> None:
        store = PayloadStore(tmp_path)
        store.put_manifest(light_snapshot(store, RUN_ID, 0, "0" * 64, b"x" * 1000))
        (payload,) = store.manifest(0).payloads
        clock = asyncio.get_running_loop().time
        guard = Guard(needed_token_key(house.services), RUN_ID, wall_clock, clock)
        server, port = await start_server(
            "127.0.0.1",
            0,
            lambda server: register_broadcast(server, BroadcastService(store)),
            ["antiphon.Broadcast"],
            Security(house.services, guard),
        )
        client = BroadcastClient(f"127.0.0.1:{port}", 10.0, credentials=house.worker("w"))
        try:
            async with asyncio.timeout(DEADLINE_S):
                with pytest.raises(ContractError, match="a request for 10000 chunks names 1"):
                    async for _ in client.get_chunks(payload.digest, [0] * 10_000):
                        pass
                found = [found async for found in client.get_chunks(payload.digest, [0])]
                assert found == [(0, store.path(payload.digest).read_bytes())]
        finally:
            await client.close()
            await stop_server(server)

    asyncio.run(run())
