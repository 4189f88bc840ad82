"""Workers that hand payloads on, over real connections and by plan, whatever one of them does."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from antiphon.api.manifest import full_payload
from antiphon.api.snapshots import Place
from antiphon.cli.invite import invite
from antiphon.core.config import RunConfig, build_config
from antiphon.core.dissemination.plan import ORIGIN, Assignment, TransferPlan
from antiphon.core.dissemination.reports import NetworkLog
from antiphon.core.dissemination.transfers import TransferPlans
from antiphon.core.errors import AntiphonError, ConfigError, UnavailableError
from antiphon.core.records import Payload, SnapshotManifest
from antiphon.net.rpc.serving import start_server, stop_server
from antiphon.net.security.credentials import Credentials, load_credentials
from antiphon.services.rollout.process import WorkerRelay, serve_worker
from antiphon.system.ports import free_port
from antiphon.weights.payload_store import PayloadStore
from antiphon.weights.rpc import SERVICE_NAME, BroadcastClient, register_broadcast
from antiphon.weights.transport import Connections, RelayTransport
from tests.support.light_engine import LightEngine
from tests.support.light_parties import served
from tests.support.light_weights import light_bias
from tests.support.loop_model import RUN_ID, make_config
from tests.support.secured import House, make_house
from tests.support.snapshots import FarService, publish
from tests.support.virtual_peers import virtual_loop

DEADLINE_S = 300.0


class Member:
    """A worker as far as the network goes."""

    def __init__(self, folder: Path, name: str, plans: "Plans", **limits: object) -> None:
        self.worker_id, self.network = f"{name}-1", NetworkLog()
        self.address = f"127.0.0.1:{free_port()}"
        self.store = PayloadStore(folder / name)
        self.relay = WorkerRelay(self.store, self.address, None)
        self.config = build_config({"broadcast": limits})
        self._plans = plans
        plans.peers[self.worker_id] = self.address
        self.transport = RelayTransport(
            self.store,
            Connections(2, 60.0),
            60.0,
            arrivals=self.relay.arrivals,
            network=self.network,
            ask_plan=self._ask,
        )

    async def _ask(self, manifest: SnapshotManifest, payload: Payload) -> TransferPlan:
        return self._plans.ask(self.worker_id, payload)

    async def fetch(
        self, manifest: SnapshotManifest, arrived: Callable[[int], None] = lambda length: None
    ) -> Mapping[str, int]:
        """Fetch a version, tell the coordinator, and return the bytes from each source."""
        await self.transport.fetch(manifest, full_payload(manifest), arrived)
        self.network.loaded(manifest.version, 0.1, 0.2)
        told = self.network.report()
        assert told is not None
        self._plans.transfers.take(self.worker_id, told)
        self.network.confirmed(told)
        return told.deliveries[-1].bytes_from


class Plans:
    """The coordinator's part, without the coordinator."""

    def __init__(self) -> None:
        self.transfers, self.peers = TransferPlans(), dict[str, str]()

    def ask(self, worker_id: str, payload: Payload) -> TransferPlan:
        return self.transfers.plan(worker_id, payload, self.peers, self.peers)


@asynccontextmanager
async def _origin(store: PayloadStore) -> AsyncIterator[tuple[str, Any]]:
    server, port = await start_server(
        "127.0.0.1", 0, lambda s: register_broadcast(s, FarService(store)), [SERVICE_NAME]
    )
    try:
        yield f"127.0.0.1:{port}", server
    finally:
        await stop_server(server, 0.0)


@asynccontextmanager
async def _serving(*members: Member) -> AsyncIterator[None]:
    for member in members:
        await member.relay.start(member.config, "run")
    try:
        yield
    finally:
        for member in members:
            await member.transport.close()
            await member.relay.stop()


def _publish(store: PayloadStore, origin: str, version: int = 1, elements: int = 400_000) -> SnapshotManifest:
    values = torch.from_numpy(np.random.default_rng(version).normal(size=elements))
    return publish(store, {"a": values}, version, chunk_bytes=65536, origin=origin)


def _run(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(body, DEADLINE_S))


def test_three_workers_take_about_one_copy_from_the_origin(tmp_path: Path) -> None:
    async def body() -> None:
        origin, plans = PayloadStore(tmp_path / "origin"), Plans()
        members = [Member(tmp_path, f"w{i}", plans) for i in range(3)]
        async with _origin(origin) as (address, _), _serving(*members):
            manifest = _publish(origin, address)
            payload = full_payload(manifest)
            sent = await asyncio.gather(*(member.fetch(manifest) for member in members))
            assert sum(found.get(ORIGIN, 0) for found in sent) <= 1.2 * payload.payload_bytes
            for member in members:
                assert bytes(member.store.map(payload.digest)) == bytes(origin.map(payload.digest))
            assert sorted(plans.ask(m.worker_id, payload).assignment.depth for m in members) == [1, 2, 3]
            (told, *_) = plans.transfers.deliveries
            assert told.version == 1 and told.bytes >= payload.payload_bytes
            assert 0 < told.first_chunk_s <= told.seconds and (told.verify_s, told.load_s) == (0.1, 0.2)

    _run(body())


def test_a_liar_is_named_reported_and_avoided(tmp_path: Path) -> None:
    async def body() -> None:
        origin, plans = PayloadStore(tmp_path / "origin"), Plans()
        liar, first, second = (Member(tmp_path, name, plans) for name in ("liar", "w1", "w2"))
        async with _origin(origin) as (address, _), _serving(liar, first, second):
            manifest = _publish(origin, address)
            payload = full_payload(manifest)
            await liar.fetch(manifest)
            file = liar.store.path(payload.digest)
            spoiled = bytearray(file.read_bytes())
            spoiled[1000] ^= 1
            file.unlink()
            file.write_bytes(spoiled)

            def through_the_liar(member: Member) -> None:
                async def ask(manifest: SnapshotManifest, payload: Payload) -> TransferPlan:
                    plans.ask(member.worker_id, payload)
                    found = Assignment((liar.worker_id, ORIGIN), (), 2, 1e7)
                    return TransferPlan(found, {liar.worker_id: liar.address})

                member.transport._ask_plan = ask

            for member in (first, second):
                through_the_liar(member)
                await member.fetch(manifest)
                assert "chunk 0" in member.network.culprits[liar.worker_id]
                assert bytes(member.store.map(payload.digest)) == bytes(origin.map(payload.digest))
            assert list(plans.transfers.excluded()) == ["liar"]
            for delivery in list(plans.transfers.deliveries)[1:]:
                assert list(delivery.culprits) == [liar.worker_id]
            again = _publish(origin, address, 2)
            for member in (first, second):
                found = plans.ask(member.worker_id, full_payload(again)).assignment
                assert liar.worker_id not in (*found.parents, *found.others)

    _run(body())


def test_when_the_origin_is_gone_the_others_have_it(tmp_path: Path) -> None:
    async def body() -> None:
        origin, plans = PayloadStore(tmp_path / "origin"), Plans()
        first, second = (Member(tmp_path, f"w{i}", plans) for i in range(2))
        async with _serving(first, second):
            async with _origin(origin) as (address, _):
                manifest = _publish(origin, address)
                await first.fetch(manifest)
            found = await second.fetch(manifest)
            assert found == {first.worker_id: full_payload(manifest).payload_bytes}

    _run(body())


def test_an_origin_that_dies_in_the_middle_and_comes_back_sends_only_the_rest(tmp_path: Path) -> None:
    async def body() -> None:
        origin, plans = PayloadStore(tmp_path / "origin"), Plans()
        only, port = Member(tmp_path, "w0", plans), free_port()
        killing: list[asyncio.Task[None]] = []
        came: list[int] = []

        def kill(length: int) -> None:
            came.append(length)
            if len(came) == 5:
                killing.append(asyncio.ensure_future(stop_server(server, 0.0)))

        manifest = _publish(origin, f"127.0.0.1:{port}")
        payload = full_payload(manifest)
        async with _serving(only):
            service = FarService(origin, uplink_bytes_per_s=2e6)
            server, _ = await start_server(
                "127.0.0.1", port, lambda s: register_broadcast(s, service), [SERVICE_NAME]
            )
            with pytest.raises(UnavailableError, match="what has arrived is kept"):
                await only.transport.fetch(manifest, payload, kill)
            await asyncio.gather(*killing)
            missing = len(only.store.receive(payload).missing())
            assert 0 < missing < len(payload.chunk_digests)
            server, _ = await start_server(
                "127.0.0.1", port, lambda s: register_broadcast(s, FarService(origin)), [SERVICE_NAME]
            )
            found = await only.fetch(manifest)
            await stop_server(server, 0.0)
            assert found[ORIGIN] <= missing * payload.chunk_bytes
            assert bytes(only.store.map(payload.digest)) == bytes(origin.map(payload.digest))

    _run(body())


def test_a_relay_that_dies_costs_no_chunk_that_had_come(tmp_path: Path) -> None:
    async def body() -> None:
        origin, plans = PayloadStore(tmp_path / "origin"), Plans()
        first, second = Member(tmp_path, "w0", plans, relay_bytes_per_s=4e6), Member(tmp_path, "w1", plans)
        killing: list[asyncio.Task[None]] = []

        def kill(length: int) -> None:
            if not killing:
                killing.append(asyncio.ensure_future(first.relay.stop()))

        async with _origin(origin) as (address, _), _serving(first, second):
            manifest = _publish(origin, address)
            payload = full_payload(manifest)
            await first.fetch(manifest)
            found = await second.fetch(manifest, kill)
            await asyncio.gather(*killing)
            assert found[first.worker_id] > 0 and found[ORIGIN] > 0
            assert sum(found.values()) < 1.5 * payload.payload_bytes
            assert bytes(second.store.map(payload.digest)) == bytes(origin.map(payload.digest))

    _run(body())


def test_a_payload_from_before_a_restart_is_handed_on(tmp_path: Path) -> None:
    async def body() -> None:
        origin, plans = PayloadStore(tmp_path / "origin"), Plans()
        before = Member(tmp_path, "w0", plans)
        async with _origin(origin) as (address, _), _serving(before):
            manifest = _publish(origin, address)
            payload = full_payload(manifest)
            await before.fetch(manifest)
            again = Member(tmp_path, "w0", plans)
            async with _serving(again):
                await again.transport.fetch(manifest, payload, lambda length: None)
                assert again.network.held == (payload.digest,)
                client = BroadcastClient(again.address)
                assert await anext(client.get_chunks(payload.digest, [0], held_only=True))
                assert not (await client.where()).token
                await client.close()

    _run(body())


def test_whole_workers_serve_each_other_and_the_coordinator_knows_it(tmp_path: Path) -> None:
    # The cap makes the plan a chain; nothing keeps to it here.
    config = make_config(steps=2, max_staleness=1, filter_="none", prompts_per_step=2)
    config = config.model_copy(
        update={
            "model": config.model.model_copy(update={"path": str(tmp_path)}),
            "broadcast": config.broadcast.model_copy(update={"uplink_bytes_per_s": 1e5}),
        }
    )

    async def body() -> None:
        origin = PayloadStore(tmp_path / "origin")
        async with served(config, tmp_path) as site, _origin(origin) as (address, _):
            client = site.client()
            bias = torch.from_numpy(np.tile(light_bias(0), (1000, 1)))
            manifest = publish(origin, {"bias": bias}, 0, run_id=RUN_ID, chunk_bytes=4096, origin=address)
            await client.announce_snapshot(manifest)
            workers = [
                asyncio.ensure_future(
                    serve_worker(
                        site.address,
                        f"w{number}",
                        RUN_ID,
                        tmp_path / f"w{number}",
                        lambda: None,
                        make_engine=lambda config: TiledEngine(),
                        relay_address=f"127.0.0.1:{free_port()}",
                    )
                )
                for number in range(3)
            ]
            came = 0
            async for event in client.watch_events(0, follow=True):
                came += event.kind == "snapshot.delivered"
                if came == len(workers):
                    break
            deliveries = (await client.status()).deliveries
            assert {one.worker_id for one in deliveries} == {"w0-1", "w1-1", "w2-1"}
            assert any(name for one in deliveries for name in one.bytes_from)
            copies = sum(one.bytes_from.get(ORIGIN, 0) for one in deliveries)
            assert copies < 2 * full_payload(manifest).payload_bytes
            assert all(one.verify_s > 0 and one.seconds >= one.first_chunk_s > 0 for one in deliveries)
            await client.finish()
            await asyncio.gather(*workers)

    _run(body())


class TiledEngine(LightEngine):
    """Takes many copies of the toy policy, so that there is something to send."""

    def load_weights(self, version: int, tensors: Mapping[str, Any], weights_digest: str) -> None:
        super().load_weights(version, {"bias": np.asarray(tensors["bias"])[0]}, weights_digest)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> House:
    house = make_house(tmp_path_factory.mktemp("keys"), ["leaf"])
    invite("relay", relay_host=["127.0.0.1", "far.example"], keys=house.keys)
    return house


def test_a_relay_lets_in_who_has_a_token_of_the_run_alone(tmp_path: Path, house: House) -> None:
    async def body() -> None:
        store = PayloadStore(tmp_path / "relay")
        manifest = _publish(store, "")
        payload = full_payload(manifest)
        address = f"127.0.0.1:{free_port()}"
        relay = WorkerRelay(store, address, house.worker("relay"))
        await relay.start(RunConfig(), RUN_ID)
        try:

            async def ask(credentials: Credentials) -> int:
                client = BroadcastClient(address, credentials=credentials)
                try:
                    return sum([len(piece) async for _, piece in client.get_chunks(payload.digest, [0])])
                finally:
                    await client.close()

            assert await ask(house.worker("leaf")) == payload.span(0)[1]
            with pytest.raises(AntiphonError, match="run another"):
                await ask(house.worker("leaf", run_id="another"))
        finally:
            await relay.stop()

    _run(body())


def test_a_bundle_that_cannot_serve_is_refused_with_the_command_that_helps(
    tmp_path: Path, house: House
) -> None:
    store = PayloadStore(tmp_path)
    for name, address in (("leaf", "127.0.0.1:7000"), ("relay", "other.example:7000")):
        with pytest.raises(ConfigError, match=r"antiphon invite NAME --relay-host"):
            WorkerRelay(store, address, load_credentials(house.keys / "workers" / name))
    with pytest.raises(ConfigError, match="without encryption"):
        WorkerRelay(store, "far.example:7000", None)
    WorkerRelay(store, "far.example:7000", load_credentials(house.keys / "workers" / "relay"))


def test_a_relay_host_is_of_one_worker_and_none_of_the_services(house: House) -> None:
    with pytest.raises(ConfigError, match="one worker"):
        invite("a", "b", relay_host=["a.example"], keys=house.keys)
    with pytest.raises(ConfigError, match="address of the services"):
        invite("a", host=["s.example"], relay_host=["s.example"], keys=house.keys)


def test_opening_a_connection_is_no_part_of_the_round_trip(tmp_path: Path) -> None:
    origin, network = PayloadStore(tmp_path / "origin"), NetworkLog()

    class Cold(FarService):
        asked = 0

        async def where(self) -> Place:
            self.asked += 1
            await asyncio.sleep(5.0 if self.asked == 1 else 0.08)
            return await super().where()

    async def run() -> None:
        source = Cold(origin)
        transport = RelayTransport(
            PayloadStore(tmp_path / "worker"), lambda address: [source], 30.0, network=network
        )
        manifest = publish(origin, {"w": torch.zeros(4)})
        for times in (2, 3):
            assert not await transport.link(manifest, full_payload(manifest))
            assert source.asked == times
        told = network.report()
        assert told is not None and told.round_trip_s == pytest.approx(0.08)

    virtual_loop().run(run())
