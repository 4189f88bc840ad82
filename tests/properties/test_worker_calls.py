"""Every call of a worker, in every state of a worker and while it changes: answered, or refused in words."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.api.manifest import payload_digest
from antiphon.core.checks import MOST_NUMBER
from antiphon.core.coordinator import consequences
from antiphon.core.coordinator.consequences import strike
from antiphon.core.errors import AntiphonError
from antiphon.core.records import Lease, Payload
from antiphon.core.requests import LeaseRequest, WorkerHeartbeat
from antiphon.lineage.store.artifact_store import ArtifactStore
from antiphon.net.wire import CALLS
from antiphon.services.coordinator.run_state_machine import RunStateMachine
from antiphon.services.coordinator.service import CoordinatorService
from antiphon.simulator.virtual.disk import JournalDisk, MemoryJournal, MemoryStore
from tests.support.light_parties import LightPrompts, hello, sample_lease
from tests.support.loop_model import light_manifest, make_config

CHUNKS = ("b" * 64,) * 100
PAYLOAD = Payload("full", None, "raw", payload_digest(100_000, 1000, CHUNKS), 100_000, 1000, CHUNKS)
NAMES = ("w", "v")
IDS = ("w-1", "w-2", "v-1", "never-1", "")
CALLS_OF_A_WORKER = (
    "register",
    "beat",
    "leave",
    "lie",
    "lease",
    "submit",
    "manifest",
    "plan",
    "plan_more",
    "kit",
)
CHANGES = ("lose", "drain", "revoke", "pardon", "strike")

step = st.tuples(st.sampled_from(CALLS_OF_A_WORKER + CHANGES), st.sampled_from(IDS), st.integers(0, 4))


class Site:
    """A coordinator without sockets, its workers and the one that changes what they are."""

    def __init__(self, store: ArtifactStore) -> None:
        config, clock = make_config(steps=8, filter_="none"), asyncio.get_running_loop().time
        journal = MemoryJournal(JournalDisk(), lambda: 0.0)
        self.machine = RunStateMachine(config, "simulated-1", journal, store, LightPrompts(), clock)
        self.service = CoordinatorService(self.machine)
        self.leases: list[Lease] = []

    async def begin(self) -> None:
        await self.machine.start()
        manifest = light_manifest(0, "simulated-1")
        await self.service.announce_snapshot(replace(manifest, payloads=(PAYLOAD,)))
        await self.service.open_step(0)
        for name in NAMES:
            await self.register(f"{name}-1")

    async def register(self, worker: str) -> None:
        told = replace(hello(worker.rpartition("-")[0]), run_id="simulated-1", relay_address="10.0.0.1:7000")
        await self.service.register(told)

    async def beat(self, worker: str, leaving: bool = False, tokens: int = 5) -> None:
        leases = tuple(lease.lease_id for lease in self.leases[-2:])
        await self.service.heartbeat(
            WorkerHeartbeat(
                worker, 0, None, leases, tokens, 1.0, 1.0, released_leases=leases[:1], leaving=leaving
            )
        )

    async def lease(self, worker: str) -> None:
        self.leases += (await self.service.lease_group(LeaseRequest(worker, 0, 2, 0.01))).leases

    async def submit(self, worker: str) -> None:
        for lease in self.leases[-1:]:
            await self.service.submit_group(sample_lease(lease, worker, 0))

    def act(self, what: str, worker: str) -> Awaitable[object]:
        service, name = self.service, worker.rpartition("-")[0]
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "register": lambda: self.register(worker),
            "beat": lambda: self.beat(worker),
            "leave": lambda: self.beat(worker, leaving=True),
            "lie": lambda: self.beat(worker, tokens=int(10 * MOST_NUMBER)),
            "lease": lambda: self.lease(worker),
            "submit": lambda: self.submit(worker),
            "manifest": lambda: service.latest_manifest(None),
            "plan": lambda: service.plan_transfer(worker, 0, PAYLOAD.digest),
            "plan_more": lambda: service.plan_transfer(worker, 3, "f" * 64),
            "kit": lambda: service.worker_kit(2**62),
            "drain": lambda: service.drain(name),
            "revoke": lambda: service.revoke(name, "a test"),
            "pardon": lambda: service.pardon(name, "a test"),
            "lose": lambda: self.lose(worker),
            "strike": lambda: self.machine.do(
                strike(self.machine.loop, name, "g", "refused", "a test", self.machine.clock(), certain=True)
            ),
        }
        return calls[what]()

    async def lose(self, worker: str) -> None:
        if (member := self.machine.loop.fleet.get(worker)) is not None:
            self.machine.run(
                consequences.lose(self.machine.loop, member, "no heartbeat", self.machine.clock())
            )


@settings(max_examples=60)
@given(story=st.lists(step, max_size=25))
def test_no_call_of_a_worker_breaks_the_coordinator(story: list[tuple[str, str, int]]) -> None:
    async def act() -> None:
        site = Site(MemoryStore())
        await site.begin()
        running = []

        async def one(what: str, worker: str) -> None:
            with contextlib.suppress(AntiphonError):
                await site.act(what, worker)

        for what, worker, turns in story:
            running.append(asyncio.ensure_future(one(what, worker)))
            for _ in range(turns):  # some calls are answered before the next one, others are under way
                await asyncio.sleep(0)
        async with asyncio.timeout(60.0):
            await asyncio.gather(*running)
        assert site.machine.failure is None
        CALLS["status"].write_reply(await site.service.status())
        await site.machine.close()

    asyncio.run(act())


def test_who_leaves_while_it_asks_for_a_transfer_is_sent_to_the_origin() -> None:
    async def act() -> None:
        site = Site(MemoryStore())
        await site.begin()
        asking = asyncio.ensure_future(site.service.plan_transfer("w-1", 0, PAYLOAD.digest))
        await asyncio.sleep(0)
        await site.lose("w-1")
        assert (await asking).assignment.parents == ("",)
        await site.machine.close()

    asyncio.run(act())
