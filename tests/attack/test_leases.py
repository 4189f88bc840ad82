"""A hostile worker with a certificate and a token of its own uses the leases of another (T2)."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3

from antiphon.core.errors import ContractError, RefusedError
from antiphon.core.loop.admission import lease_id_of
from antiphon.core.records import (
    KeptProgress,
    Lease,
    LeaseProgress,
    PartialTrajectory,
    SubmitVerdict,
    VersionSpan,
)
from antiphon.core.requests import HeartbeatReply, LeaseRequest, WorkerHeartbeat
from antiphon.net.security.keys import LEARNER_KEY, load_key
from antiphon.services.coordinator.client import CoordinatorClient
from antiphon.weights.signature import sign_manifest
from tests.support.light_parties import hello, sample_lease
from tests.support.loop_model import LEASE_KEY, RUN_ID, light_manifest, make_config
from tests.support.secured import House, SecuredSite, make_house, secured

CONFIG = make_config(mode="elastic", max_staleness=2, prompts_per_step=4, filter_="none")
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> House:
    return make_house(tmp_path_factory.mktemp("home") / "keys", ["victim", "thief"])


@dataclasses.dataclass
class Guest:
    """A worker that says what it likes, with its own bundle."""

    site: SecuredSite
    client: CoordinatorClient
    name: str
    worker_id: str

    async def lease(self, groups: int) -> list[Lease]:
        reply = await self.client.lease_group(LeaseRequest(self.worker_id, 0, groups, 5.0))
        return list(reply.leases)

    async def beat(self, *lease_ids: str, **fields: object) -> HeartbeatReply:
        digest = light_manifest(0).weights_digest
        return await self.client.heartbeat(
            WorkerHeartbeat(self.worker_id, 0, digest, lease_ids, 0, 0.0, 1.0, **fields)  # type: ignore[arg-type]
        )

    @property
    def strikes(self) -> int:
        standing = self.site.state_machine.state.standings.get(self.name)
        return 0 if standing is None else standing.strikes


async def enter(site: SecuredSite, house: House, name: str) -> Guest:
    if not site.state_machine.state.snapshots:
        flow = site.client(house.services)
        key = load_key(house.keys / "services", LEARNER_KEY)
        await flow.announce_snapshot(sign_manifest(light_manifest(0), key))
        await flow.open_step(0)
    client = site.client(house.worker(name))
    return Guest(site, client, name, (await client.register(hello(name))).worker_id)


def piece(start: int, stop: int) -> PartialTrajectory:
    tokens, logprobs = np.arange(start, stop, dtype=np.int32), -np.ones(stop - start, dtype=np.float32)
    return PartialTrajectory(tokens, logprobs, (VersionSpan(0, start, stop),), sample_index=0)


def told(lease_id: str, start: int = 0, stop: int = 2) -> dict[str, object]:
    return {"progress": (LeaseProgress(lease_id, (piece(start, stop),)),)}


def run(
    tmp_path: Path, house: House, act: Callable[[SecuredSite, Guest, Guest, Lease], Awaitable[None]]
) -> None:
    """Let the victim lease a group and report two tokens of it, then `act`."""

    async def serve() -> None:
        async with secured(CONFIG, tmp_path, house) as site, asyncio.timeout(DEADLINE_S):
            victim, thief = await enter(site, house, "victim"), await enter(site, house, "thief")
            (lease,) = await victim.lease(1)
            await victim.beat(lease.lease_id, **told(lease.lease_id))
            await act(site, victim, thief, lease)

    asyncio.run(serve())


async def beat(thief: Guest, lease: Lease) -> None:
    assert (await thief.beat(lease.lease_id)).cancelled_leases == (lease.lease_id,)


async def release(thief: Guest, lease: Lease) -> None:
    assert (await thief.beat(released_leases=(lease.lease_id,))).known


async def report(thief: Guest, lease: Lease) -> None:
    assert (await thief.beat(**told(lease.lease_id, 2, 4))).kept == ()


async def steal_and_leave(thief: Guest, lease: Lease) -> None:
    assert (await thief.beat(lease.lease_id, leaving=True)).cancelled_leases == (lease.lease_id,)


async def hand_in(thief: Guest, lease: Lease) -> None:
    with pytest.raises(RefusedError, match="was not granted to 'thief-1'"):
        await thief.client.submit_group(sample_lease(lease, thief.worker_id, 0))


@pytest.mark.parametrize("attack", [beat, release, report, steal_and_leave, hand_in])
def test_the_lease_of_another_is_refused_and_costs_a_strike(
    tmp_path: Path, house: House, attack: Callable[[Guest, Lease], Awaitable[None]]
) -> None:
    async def act(site: SecuredSite, victim: Guest, thief: Guest, lease: Lease) -> None:
        leases = site.state_machine.loop.leases
        before = leases.get(lease.lease_id)
        await attack(thief, lease)
        assert before is not None and leases.get(lease.lease_id) == before  # holder and deadline
        assert leases.partial_groups.kept(lease.lease_id) == (2, 0)
        assert (thief.strikes, victim.strikes) == (1, 0)
        reply = await victim.beat(lease.lease_id, **told(lease.lease_id, 2, 3))
        assert not reply.cancelled_leases
        assert reply.kept == (KeptProgress(lease.lease_id, (3, 0)),)
        handed_in = sample_lease(lease, victim.worker_id, 0)
        assert await victim.client.submit_group(handed_in) is SubmitVerdict.ACCEPTED
        rows = await site.state_machine.journal.read(0, 500)
        (submitted,) = [row.body for row in rows if row.kind == "group.submitted"]
        assert "thief" not in submitted

    run(tmp_path, house, act)


def test_only_the_foreign_lease_of_a_heartbeat_is_refused(tmp_path: Path, house: House) -> None:
    async def act(site: SecuredSite, victim: Guest, thief: Guest, lease: Lease) -> None:
        (own,) = await thief.lease(1)
        reply = await thief.beat(own.lease_id, lease.lease_id, **told(own.lease_id))
        assert reply.cancelled_leases == (lease.lease_id,)
        assert reply.kept == (KeptProgress(own.lease_id, (2, 0)),)
        assert thief.strikes == 1

    run(tmp_path, house, act)


def test_a_worker_that_goes_on_with_it_is_shut_out(tmp_path: Path, house: House) -> None:
    async def act(site: SecuredSite, victim: Guest, thief: Guest, lease: Lease) -> None:
        (own,) = await thief.lease(1)
        for attack in (beat, report, release):
            await attack(thief, lease)
        assert "holds" in site.state_machine.state.barred("thief")
        assert not (await thief.beat(own.lease_id)).known
        with pytest.raises(ContractError, match="was excluded from this run: 3 strikes"):
            await thief.client.register(hello("thief"))
        assert own.group_id in {again.group_id for again in await victim.lease(8)}
        assert not (await victim.beat(lease.lease_id)).cancelled_leases
        assert not victim.strikes and not site.state_machine.state.barred("victim")

    run(tmp_path, house, act)


def test_what_a_former_holder_hands_in_leaves_the_present_one_alone(tmp_path: Path, house: House) -> None:
    async def act(site: SecuredSite, victim: Guest, thief: Guest, lease: Lease) -> None:
        (old,) = await thief.lease(1)
        await thief.beat(old.lease_id, **told(old.lease_id), released_leases=(old.lease_id,))
        (new,) = [again for again in await victim.lease(8) if again.group_id == old.group_id]
        await victim.beat(new.lease_id, **told(new.lease_id, 2, 3))
        whole = sample_lease(old, thief.worker_id, 0)
        false = dataclasses.replace(whole, trajectories=whole.trajectories[:1])
        with pytest.raises(RefusedError, match="hand in whole groups"):
            await thief.client.submit_group(false)
        assert (thief.strikes, victim.strikes) == (1, 0)
        assert site.state_machine.loop.leases.partial_groups.kept(new.lease_id) == (3, 0)
        assert not (await victim.beat(new.lease_id)).cancelled_leases
        handed_in = sample_lease(new, victim.worker_id, 0)
        assert await victim.client.submit_group(handed_in) is SubmitVerdict.ACCEPTED

    run(tmp_path, house, act)


def test_no_one_speaks_for_the_holder(tmp_path: Path, house: House) -> None:
    async def act(site: SecuredSite, victim: Guest, thief: Guest, lease: Lease) -> None:
        as_victim = dataclasses.replace(thief, worker_id=victim.worker_id)
        with pytest.raises(ContractError, match="speaks for 'victim'"):
            await as_victim.beat(released_leases=(lease.lease_id,))
        with pytest.raises(ContractError, match="speaks for 'victim'"):
            await thief.client.submit_group(sample_lease(lease, victim.worker_id, 0))
        held = site.state_machine.loop.leases.get(lease.lease_id)
        assert held is not None and held.worker_id == victim.worker_id

    run(tmp_path, house, act)


def test_lease_ids_cannot_be_worked_out(tmp_path: Path, house: House) -> None:
    """All that a worker knows are the names of run, group and attempt, and its own leases."""

    async def act(site: SecuredSite, victim: Guest, thief: Guest, lease: Lease) -> None:
        named = bytearray()
        for part in (RUN_ID, lease.group_id, 1):
            body = str(part).encode()
            named += len(body).to_bytes(4, "little") + body
        keys = (LEASE_KEY, blake3(RUN_ID.encode()).digest(), blake3(b"").digest())
        guesses = [lease_id_of(key, lease.group_id, 1) for key in keys]
        guesses.append(blake3(named).hexdigest(length=16))
        assert lease.lease_id not in guesses
        reply = await thief.beat(*guesses, released_leases=tuple(guesses))
        assert reply.cancelled_leases == tuple(guesses) and not thief.strikes
        for guess in guesses:
            with pytest.raises(RefusedError, match="was never granted for group"):
                guessed = dataclasses.replace(lease, lease_id=guess)
                await thief.client.submit_group(sample_lease(guessed, thief.worker_id, 0))
        assert not (await victim.beat(lease.lease_id)).cancelled_leases

    run(tmp_path, house, act)


def test_a_holder_that_registers_again_keeps_its_leases_over_a_restart(tmp_path: Path, house: House) -> None:
    async def first() -> tuple[list[Lease], bytes]:
        async with secured(CONFIG, tmp_path, house) as site, asyncio.timeout(DEADLINE_S):
            victim = await enter(site, house, "victim")
            leases = await victim.lease(3)
            rows = await site.state_machine.journal.read(0, 500)
            assert not any(site.state_machine.loop.lease_key.hex() in row.body for row in rows)
            return leases, site.state_machine.loop.lease_key

    async def second(leases: list[Lease], key: bytes) -> None:
        async with secured(CONFIG, tmp_path, house) as site, asyncio.timeout(DEADLINE_S):
            assert site.state_machine.loop.lease_key == key and len(key) == 32
            thief, victim = await enter(site, house, "thief"), await enter(site, house, "victim")
            finished, released, running = leases
            ids = tuple(lease.lease_id for lease in leases)
            assert (await thief.beat(*ids)).cancelled_leases == ids
            assert not (await victim.beat(*ids)).cancelled_leases
            handed_in = sample_lease(finished, victim.worker_id, 0)
            assert await victim.client.submit_group(handed_in) is SubmitVerdict.ACCEPTED
            await victim.beat(running.lease_id, released_leases=(released.lease_id,))
            held = site.state_machine.loop.leases.get(running.lease_id)
            assert held is not None and held.worker_id == victim.worker_id == "victim-2"
            assert site.state_machine.loop.leases.get(released.lease_id) is None
            again = next(a for a in await victim.lease(8) if a.group_id == released.group_id)
            assert again.lease_id == lease_id_of(key, again.group_id, again.attempt)
            assert (again.attempt, victim.strikes) == (2, 0)

    asyncio.run(second(*asyncio.run(first())))
