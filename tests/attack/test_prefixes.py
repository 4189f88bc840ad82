"""A hostile worker leaves beginnings of groups that no model can have sampled (T3).

Who continues is the production worker with a light engine; it speaks TLS and has its own token.
"""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from antiphon.core.checks import TokenRules
from antiphon.core.config import RunConfig, build_config
from antiphon.core.coordinator.loop_state import prefix_name
from antiphon.core.loop.events import GroupSubmitted, WorkerStruck, load_event
from antiphon.core.loop.group_state import GroupPhase
from antiphon.core.records import FinishReason, Lease, LeaseProgress, PartialTrajectory, VersionSpan
from antiphon.core.requests import HeartbeatReply, LeaseRequest, WorkerHeartbeat
from antiphon.net.security.keys import LEARNER_KEY, load_key
from antiphon.services.coordinator.client import CoordinatorClient
from antiphon.services.rollout.worker import RolloutWorker
from antiphon.weights.signature import sign_manifest
from tests.support.light_engine import END_TOKEN, VOCABULARY, LightEngine
from tests.support.light_parties import hello
from tests.support.light_weights import LightSource, light_manifest
from tests.support.loop_model import RUN_ID
from tests.support.secured import House, SecuredSite, make_house, secured

DEADLINE_S = 60.0
GROUPS, SAMPLES, TOKENS = 3, 2, 24
RULES = TokenRules(VOCABULARY, frozenset({END_TOKEN}))
STOP = FinishReason.STOP


def make_config(mode: str) -> RunConfig:
    return build_config(
        {
            "run": {"steps": 2, "seed": 5},
            "environment": {"train_size": 8, "heldout_size": 2},
            "evaluation": {"prompts": 2},
            "loop": {"mode": mode, "max_staleness": 1, "prompts_per_step": GROUPS, "group_size": SAMPLES},
            "sampling": {"max_tokens": TOKENS},
            "rollout": {"concurrent_groups": GROUPS},
            "coordinator": {"lease_s": 60.0, "heartbeat_s": 0.2},
            "drafting": {"enabled": False},
        }
    )


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> House:
    return make_house(tmp_path_factory.mktemp("home") / "keys", ["liar", "honest"])


def piece(
    tokens: list[int],
    finish_reason: FinishReason | None = None,
    logprob: float = -1.0,
    version: int = 0,
    covered: int | None = None,
) -> PartialTrajectory:
    span = VersionSpan(version, 0, len(tokens) if covered is None else covered)
    logprobs = np.full(len(tokens), logprob, dtype=np.float32)
    return PartialTrajectory(
        np.array(tokens, dtype=np.int32), logprobs, (span,), finish_reason, sample_index=0
    )


FALSE = {
    "goes on after an end token": (piece([3, END_TOKEN, 4]), "continues after its end token at 1"),
    "stops without an end token": (piece([3, 4], STOP), "finish_reason=stop, but token 4 is no end token"),
    "could go on after its end token": (piece([3, END_TOKEN]), "ends it, but it has no finish_reason"),
    "outside of the vocabulary": (piece([3, VOCABULARY]), "is not in the vocabulary"),
    "impossible probability": (piece([3, 4], logprob=1.0), "must lie in"),
    "infinitely improbable": (piece([3, 4], logprob=-1e5), "must lie in"),
    "a version that does not exist": (piece([3, 4], version=9), "sampled with version 9"),
    "spans with a gap": (piece([3, 4], covered=1), "must cover"),
    "too long": (piece([3] * (TOKENS + 1)), "exceed sampling.max_tokens"),
}


class Liar:
    """Leases, reports and releases what it likes, with its own bundle."""

    def __init__(self, client: CoordinatorClient) -> None:
        self.client = client
        self.worker_id = ""

    async def lease(self, groups: int = 1) -> list[Lease]:
        if not self.worker_id:
            self.worker_id = (await self.client.register(hello("liar"))).worker_id
        reply = await self.client.lease_group(LeaseRequest(self.worker_id, 0, groups, 5.0))
        return list(reply.leases)

    async def tell(self, lease: Lease, *pieces: PartialTrajectory, release: bool = False) -> HeartbeatReply:
        digest = light_manifest(RUN_ID, 0).weights_digest
        told = (LeaseProgress(lease.lease_id, pieces),)
        released = (lease.lease_id,) if release else ()
        return await self.client.heartbeat(
            WorkerHeartbeat(
                self.worker_id,
                0,
                digest,
                (lease.lease_id,),
                0,
                0.0,
                1.0,
                progress=told,
                released_leases=released,
            )
        )


async def announce(site: SecuredSite, house: House) -> None:
    flow = site.client(house.services)
    key = load_key(house.keys / "services", LEARNER_KEY)
    await flow.announce_snapshot(sign_manifest(light_manifest(RUN_ID, 0), key))
    await flow.open_step(0)


@asynccontextmanager
async def honest_worker(site: SecuredSite, house: House) -> AsyncIterator["asyncio.Task[None]"]:
    worker = RolloutWorker(
        site.client(house.worker("honest")),
        "honest",
        "",
        lambda config: LightEngine(),
        lambda config: LightSource(),
        lease_wait_s=0.05,
    )
    task = asyncio.ensure_future(worker.run(lambda: None))
    try:
        yield task
    finally:
        worker.stop(0.0)
        await asyncio.wait([task], timeout=DEADLINE_S)


async def finished(site: SecuredSite, worker: "asyncio.Task[None]") -> None:
    """Wait until all groups of the step were handed in, while the worker lives."""
    state = site.state_machine.state
    while sum(group.phase is GroupPhase.SUBMITTED for group in state.groups.values()) < GROUPS:
        if worker.done():
            worker.result()
        await site.state_machine.journal.grown.wait(0.2)
    assert not worker.done()


async def events(site: SecuredSite, kind: str) -> list:  # type: ignore[type-arg]
    await site.state_machine.written()
    rows = await site.state_machine.journal.read(0, 1000)
    return [load_event(row.kind, row.body) for row in rows if row.kind == kind]


def strikes(site: SecuredSite, name: str) -> int:
    standing = site.state_machine.state.standings.get(name)
    return 0 if standing is None else standing.strikes


def serve(story: Callable[[], object]) -> None:
    async def within() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await story()  # type: ignore[misc]

    asyncio.run(within())


@pytest.mark.parametrize("kind", FALSE)
def test_a_false_piece_is_refused_when_it_arrives(tmp_path: Path, house: House, kind: str) -> None:
    false, words = FALSE[kind]

    async def story() -> None:
        async with secured(make_config("elastic"), tmp_path, house, RULES) as site:
            await announce(site, house)
            liar = Liar(site.client(house.worker("liar")))
            first, second = await liar.lease(2)
            await liar.tell(first, piece([3, 5]))
            longer = dataclasses.replace(false, sample_index=1)
            reply = await liar.tell(first, longer, release=True)
            assert reply.known and reply.kept == () and reply.cancelled_leases == (first.lease_id,)
            # What it said of the group before is not believed either; its other lease runs on.
            group = site.state_machine.state.groups[first.group_id]
            assert group.phase is GroupPhase.OPEN
            partials = site.state_machine.loop.leases.partial_groups
            assert partials.waiting(first.group_id) is None and partials.tokens == 0
            assert await site.state_machine.journal.payload(prefix_name(first.group_id)) is None
            assert site.state_machine.loop.leases.get(second.lease_id) is not None
            (struck,) = await events(site, WorkerStruck.kind)
            assert (struck.worker_name, struck.group_id) == ("liar", first.group_id)
            assert words in struck.reason
            await liar.tell(second, release=True)
            async with honest_worker(site, house) as worker:
                await finished(site, worker)
            assert (strikes(site, "liar"), strikes(site, "honest")) == (1, 0)

    serve(story)


def test_three_false_pieces_shut_their_author_out(tmp_path: Path, house: House) -> None:
    async def story() -> None:
        async with secured(make_config("elastic"), tmp_path, house, RULES) as site:
            await announce(site, house)
            liar = Liar(site.client(house.worker("liar")))
            for lease in await liar.lease(GROUPS):
                assert not site.state_machine.state.barred("liar")
                await liar.tell(lease, piece([END_TOKEN, 3]))
            assert "3 strikes" in site.state_machine.state.barred("liar")
            async with honest_worker(site, house) as worker:
                await finished(site, worker)
            assert strikes(site, "honest") == 0

    serve(story)


@pytest.mark.parametrize("mode", ["fixed", "elastic"])
@pytest.mark.parametrize("kind", ["goes on after an end token", "stops without an end token"])
def test_who_continues_a_false_beginning_loses_nothing(
    tmp_path: Path, house: House, mode: str, kind: str
) -> None:
    """The beginning was journalled by a coordinator that did not check it yet."""
    false, words = FALSE[kind]
    config = make_config(mode)

    async def before() -> str:
        async with secured(config, tmp_path, house) as site:
            await announce(site, house)
            liar = Liar(site.client(house.worker("liar")))
            (lease,) = await liar.lease()
            other = dataclasses.replace(piece([5, 6]), sample_index=1)
            await liar.tell(lease, false, other, release=True)
            assert await site.state_machine.journal.payload(prefix_name(lease.group_id)) is not None
            return lease.group_id

    async def after(group_id: str) -> None:
        async with secured(config, tmp_path, house, RULES) as site:
            assert site.state_machine.loop.leases.partial_groups.waiting(group_id) is not None
            async with honest_worker(site, house) as worker:
                await finished(site, worker)
            (struck,) = await events(site, WorkerStruck.kind)
            assert (struck.worker_name, struck.group_id) == ("liar", group_id) and words in struck.reason
            assert (strikes(site, "liar"), strikes(site, "honest")) == (1, 0)
            submitted = {event.group_id: event for event in await events(site, GroupSubmitted.kind)}
            # Refused once, sampled from the beginning, and taken then.
            assert submitted[group_id].attempt == 3 and submitted[group_id].authors == ()
            assert await site.state_machine.journal.payload(prefix_name(group_id)) is None
            assert site.state_machine.loop.leases.partial_groups.tokens == 0

    async def later(group_id: str) -> None:
        async with secured(config, tmp_path, house, RULES) as site:
            assert site.state_machine.loop.leases.partial_groups.waiting(group_id) is None
            assert site.state_machine.state.groups[group_id].phase is GroupPhase.SUBMITTED

    async def story() -> None:
        group_id = await before()
        await after(group_id)
        await later(group_id)

    serve(story)
