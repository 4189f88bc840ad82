"""The coordinator learns of links and deliveries with the heartbeats, and answers whom to fetch from."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from antiphon.api.manifest import payload_digest
from antiphon.core.dissemination.plan import ORIGIN
from antiphon.core.dissemination.reports import DeliveryRecord, NetworkReport
from antiphon.core.errors import ContractError
from antiphon.core.records import Payload
from antiphon.core.requests import WorkerHeartbeat
from tests.support.light_parties import hello, served
from tests.support.loop_model import light_manifest, make_config

CONFIG = make_config(steps=4, max_staleness=3, filter_="none", prompts_per_step=10)
CHUNKS = ("b" * 64,) * 100
PAYLOAD = Payload("full", None, "raw", payload_digest(100_000, 1000, CHUNKS), 100_000, 1000, CHUNKS)


def _beat(worker_id: str, network: NetworkReport) -> WorkerHeartbeat:
    return WorkerHeartbeat(worker_id, None, None, (), 0, 0.0, 0.0, network=network)


def test_workers_are_sent_to_each_other_and_what_came_is_shown_and_journalled(tmp_path: Path) -> None:
    async def run() -> None:
        async with served(CONFIG, tmp_path) as site, asyncio.timeout(120.0):
            client = site.client()
            manifest = replace(light_manifest(0), payloads=(PAYLOAD,))
            await client.announce_snapshot(manifest)
            ids = []
            for number in range(3):
                address = "" if number == 2 else f"10.0.0.{number}:7000"
                told = replace(hello(f"w{number}"), relay_address=address)
                ids.append((await client.register(told)).worker_id)
            plans = {one: await client.plan_transfer(one, 0, PAYLOAD.digest) for one in ids}
            assert sorted(plan.assignment.depth for plan in plans.values()) in ([1, 2, 2], [1, 2, 3])
            for plan in plans.values():
                assert plan.assignment.parents[-1] == ORIGIN
                assert ids[2] not in plan.addresses and set(plan.addresses.values()) <= {
                    "10.0.0.0:7000",
                    "10.0.0.1:7000",
                }
            record = DeliveryRecord(0, "", 2.0, 0.5, {ORIGIN: 100_000}, {ORIGIN: 5e4}, {}, 0.1, 0.2)
            for _ in range(2):  # a repeated heartbeat changes nothing
                await client.heartbeat(_beat(ids[0], NetworkReport(0.05, 5e4, (PAYLOAD.digest,), (record,))))
            unknown = replace(record, version=77)
            await client.heartbeat(_beat(ids[0], NetworkReport(deliveries=(unknown,))))
            invented = replace(
                record, version=0, bytes_from={"x" * 200: 1, f"{ids[0]}9": 1, "w0-01": 1, ids[0]: 2}
            )
            await client.heartbeat(_beat(ids[1], NetworkReport(deliveries=(invented,))))
            *_, last = (await client.status()).deliveries
            assert last.worker_id == ids[1] and last.bytes_from == {ids[0]: 2}
            shown = (await client.status()).deliveries[:-1]
            assert shown == (replace(record, worker_id=ids[0]),)
            await site.service.state_machine.written()  # what was noted is on the disk
            kinds = [event.kind async for event in client.watch_events(0, follow=False)]
            assert kinds.count("snapshot.delivered") == 2
            with pytest.raises(ContractError, match="has no payload"):
                await client.plan_transfer(ids[0], 0, "c" * 64)
            with pytest.raises(ContractError, match="round_trip_s"):
                await client.heartbeat(_beat(ids[0], NetworkReport(round_trip_s=float("nan"))))
            with pytest.raises(ContractError, match="HOST:PORT"):
                await client.register(replace(hello("w9"), relay_address="http://169.254.1.1/"))
            assert (await client.plan_transfer("stranger-1", 0, PAYLOAD.digest)).assignment.parents == (
                ORIGIN,
            )

    asyncio.run(run())


def test_without_relays_everyone_is_sent_to_the_origin(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"broadcast": CONFIG.broadcast.model_copy(update={"relay": "off"})})

    async def run() -> None:
        async with served(config, tmp_path) as site, asyncio.timeout(60.0):
            client = site.client()
            await client.announce_snapshot(replace(light_manifest(0), payloads=(PAYLOAD,)))
            for number in range(2):
                told = replace(hello(f"w{number}"), relay_address=f"10.0.0.{number}:7000")
                worker_id = (await client.register(told)).worker_id
                plan = await client.plan_transfer(worker_id, 0, PAYLOAD.digest)
                assert plan.assignment.parents == (ORIGIN,) and not plan.addresses

    asyncio.run(run())


def test_a_worker_with_an_earlier_manifest_gets_the_plan_of_the_payload_that_it_wants(tmp_path: Path) -> None:
    """A version may be announced again, with patches from other versions."""
    patches = [replace(PAYLOAD, kind="patch", parent=at, digest=f"{at:064x}") for at in range(2)]
    first, again = ((*patches, PAYLOAD), (patches[1], PAYLOAD))

    async def run() -> None:
        async with served(CONFIG, tmp_path) as site, asyncio.timeout(60.0):
            client = site.client()
            await client.announce_snapshot(replace(light_manifest(0), payloads=first))
            ids = []
            for number in range(3):
                told = replace(hello(f"w{number}"), relay_address=f"10.0.0.{number}:7000")
                ids.append((await client.register(told)).worker_id)
            before = await client.plan_transfer(ids[0], 0, PAYLOAD.digest)
            await client.announce_snapshot(replace(light_manifest(0), payloads=again))
            assert await client.plan_transfer(ids[0], 0, PAYLOAD.digest) == before
            depths = [(await client.plan_transfer(one, 0, PAYLOAD.digest)).assignment.depth for one in ids]
            assert sorted(depths) == [1, 2, 3]  # one plan for all, those that know one manifest or the other
            with pytest.raises(ContractError, match="has no payload 000000000000; ask for its manifest"):
                await client.plan_transfer(ids[0], 0, patches[0].digest)

    asyncio.run(run())
