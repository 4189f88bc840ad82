"""Production workers and coordinator over gRPC: clients get what they asked for, whoever is lost."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from antiphon.api.engine import EngineOutput, EngineRequest
from antiphon.core.checks import TokenRules
from antiphon.core.client_records import SampledReply, SampleRequest
from antiphon.core.config import RunConfig
from antiphon.core.errors import ContractError, UnavailableError
from antiphon.core.loop.events import LeaseDuplicated, LeaseExpired, load_event
from antiphon.core.records import FinishReason, Prompt, SamplingParameters, StepCommit
from antiphon.core.seeds import derive_seed
from antiphon.services.coordinator.client import CoordinatorClient
from antiphon.services.rollout.worker import RolloutWorker
from tests.support.client_model import client_config
from tests.support.light_engine import END_TOKEN, VOCABULARY, LightEngine
from tests.support.light_parties import Served, served
from tests.support.light_weights import LightSource, light_bias, light_manifest

DEADLINE_S, TOKENS = 60.0, 12
CONFIG = client_config(
    coordinator={"lease_s": 5.0, "heartbeat_s": 0.1},
    drafting={"enabled": True, "epochs": 2},
)


class LightTokens:
    """Prompts come from clients; texts that stop are runs of digits, a token each."""

    rules = TokenRules(VOCABULARY, frozenset({END_TOKEN}))

    def prompt(self, split: str, index: int) -> Prompt:
        raise AssertionError("clients bring the prompts")


def asking(name: str, version: int | None = None, samples: int = 2, **sampling: object) -> SampleRequest:
    seeds = tuple(derive_seed("client", name, index) for index in range(samples))
    given = SamplingParameters(**{"max_tokens": TOKENS, **sampling})  # type: ignore[arg-type]
    return SampleRequest(name, (1, 2, 3), seeds, given, version)


def alone(request: SampleRequest, version: int) -> list[tuple[list[int], bytes, FinishReason]]:
    """Return what one engine makes of a request in one go, under one version."""
    engine = LightEngine()
    engine.load_weights(version, {"bias": light_bias(version)}, "")
    of_seed = enumerate(request.seeds)
    engine.add([EngineRequest(f"{i:03}", request.prompt_token_ids, s, request.sampling) for i, s in of_seed])
    found = []
    while engine.unfinished:
        found += engine.step()
    found.sort(key=lambda output: output.request_id)
    return [(x.token_ids.tolist(), x.logprobs.tobytes(), x.finish_reason) for x in found]


def told(reply: SampledReply) -> list[tuple[list[int], bytes, FinishReason]]:
    return [(x.token_ids.tolist(), x.logprobs.tobytes(), x.finish_reason) for x in reply.trajectories]


async def answer(client: CoordinatorClient, request_id: str) -> SampledReply:
    while not (reply := await client.await_samples(request_id, 5.0)).trajectories:
        assert reply.waiting_for
    return reply


class TiredEngine(LightEngine):
    """Takes this many steps and then none, though it obeys messages."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self._left = steps

    def step(self) -> list[EngineOutput]:
        self._left -= bool(self.unfinished)
        return super().step() if self._left >= 0 else []


class Team:
    """Production workers with light engines."""

    def __init__(self, site: Served) -> None:
        self._site = site
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.engines: dict[str, LightEngine] = {}
        self.sources: dict[str, LightSource] = {}

    def add(self, name: str, engine: LightEngine | None = None) -> None:
        engine = self.engines[name] = engine or LightEngine()
        source = self.sources[name] = LightSource()
        worker = RolloutWorker(
            self._site.client(), name, "", lambda _: engine, lambda _: source, lease_wait_s=0.05
        )
        self._tasks[name] = asyncio.create_task(worker.run(lambda: None))

    async def vanish(self, name: str) -> None:
        self._tasks[name].cancel()
        await asyncio.wait([self._tasks[name]], timeout=DEADLINE_S)

    async def close(self) -> None:
        for name in self._tasks:
            await self.vanish(name)


async def make_version(client: CoordinatorClient, site: Served) -> int:
    """Take the next step, as a client's learner does, and publish its version."""
    step = len(site.service.state_machine.state.commits)
    digest = site.store.put(f"step {step}".encode())
    batch = await client.seal_client_step(step, digest, 3, 12)
    assert batch == await client.seal_client_step(step, digest, 3, 12)
    assert (await client.await_stage("reward", step, 1.0)).batch == batch
    manifest = light_manifest("run-1", step + 1)
    await client.commit_step(StepCommit(step, step + 1, manifest.weights_digest, digest))
    await client.announce_snapshot(manifest)
    return step + 1


def story(
    folder: Path,
    act: Callable[[Served, CoordinatorClient, Team], Awaitable[None]],
    config: RunConfig = CONFIG,
) -> None:
    async def run() -> None:
        async with served(config, folder, prompts=LightTokens()) as site, asyncio.timeout(DEADLINE_S):
            team, client = Team(site), site.client()
            if site.service.state_machine.state.newest_version is None:
                await client.announce_snapshot(light_manifest("run-1", 0))
            try:
                await act(site, client, team)
            finally:
                await team.close()

    asyncio.run(run())


async def events(site: Served, kind: type) -> list:  # type: ignore[type-arg]
    await site.service.state_machine.written()
    rows = await site.service.state_machine.journal.read(0, 1000)
    return [load_event(row.kind, row.body) for row in rows if row.kind == kind.kind]  # type: ignore[attr-defined]


def test_clients_get_the_tokens_of_the_version_they_name_also_after_a_restart(tmp_path: Path) -> None:
    requests = [asking(f"r{number}", number % 3, samples=1 + number % 5) for number in range(24)]

    async def before(site: Served, client: CoordinatorClient, team: Team) -> None:
        team.add("a")
        team.add("b")
        for _ in range(2):
            await make_version(client, site)
        for request in requests:
            await client.request_samples(request)
            await client.request_samples(request)
        replies = await asyncio.gather(*(answer(client, request.request_id) for request in requests))
        for request, reply in zip(requests, replies, strict=True):
            assert told(reply) == alone(request, request.version or 0)
            assert tuple(one.seed for one in reply.trajectories) == request.seeds
            versions = {span.version for one in reply.trajectories for span in one.spans}
            assert versions == {request.version}

    async def after(site: Served, client: CoordinatorClient, team: Team) -> None:
        for request in requests:  # nobody samples any more
            await client.request_samples(request)
            assert told(await answer(client, request.request_id)) == alone(request, request.version or 0)
        with pytest.raises(ContractError, match="request 'other' is not known"):
            await client.await_samples("other", 0.0)

    story(tmp_path, before)
    story(tmp_path, after)


class CachingEngine(LightEngine):
    """Had more of the prompt's cache with each completion that it finishes."""

    finished = 0

    def step(self) -> list[EngineOutput]:
        found = []
        for one in super().step():
            found.append(replace(one, cached_tokens=self.finished))
            self.finished += 1
        return found


def test_cached_tokens_of_the_prompt_are_told_and_kept(tmp_path: Path) -> None:
    async def before(site: Served, client: CoordinatorClient, team: Team) -> None:
        team.add("a", CachingEngine())
        for name, cached in (("r0", 0), ("r1", 2), ("r2", 3)):  # those of two completions; a prompt of three
            await client.request_samples(asking(name, 0))
            assert (await answer(client, name)).cached_tokens == cached

    async def after(site: Served, client: CoordinatorClient, team: Team) -> None:
        assert (await client.await_samples("r1", 0.0)).cached_tokens == 2

    story(tmp_path, before)
    story(tmp_path, after)


def test_a_request_without_a_version_is_sampled_by_the_newest(tmp_path: Path) -> None:
    async def act(site: Served, client: CoordinatorClient, team: Team) -> None:
        team.add("a")
        for version in range(3):
            request = asking(f"r{version}")
            await client.request_samples(request)
            reply = await answer(client, request.request_id)
            assert told(reply) == alone(request, version)
            await make_version(client, site)

    story(tmp_path, act)


def test_stop_tokens_of_a_request_end_its_completions_and_are_kept(tmp_path: Path) -> None:
    stops = tuple(range(1, VOCABULARY, 3))

    async def act(site: Served, client: CoordinatorClient, team: Team) -> None:
        team.add("a")
        await client.request_samples(asking("plain", 0, 16))
        await client.request_samples(asking("stops", 0, 16, stop_token_ids=stops))
        plain, stopped = await answer(client, "plain"), await answer(client, "stops")
        for one in plain.trajectories:
            assert one.finish_reason is FinishReason.LENGTH or one.token_ids[-1] == END_TOKEN
        for one in stopped.trajectories:
            assert not {END_TOKEN, *stops} & set(one.token_ids[:-1].tolist())
            if one.finish_reason is FinishReason.STOP:
                assert one.token_ids[-1] in (END_TOKEN, *stops)
        assert any(one.token_ids[-1] in stops for one in stopped.trajectories)
        assert not site.service.state_machine.state.standings

    story(tmp_path, act)


def test_a_lost_worker_s_requests_end_as_if_it_had_lived(tmp_path: Path) -> None:
    requests = [asking(f"r{number}", 0, 2) for number in range(4)]

    async def act(site: Served, client: CoordinatorClient, team: Team) -> None:
        for request in requests:
            await client.request_samples(request)
        team.add("a", TiredEngine(3))
        partials = site.service.state_machine.loop.leases.partial_groups
        while not partials.tokens:
            await asyncio.sleep(0.01)
        await team.vanish("a")
        team.add("b")
        for request in requests:
            assert told(await answer(client, request.request_id)) == alone(request, 0)
        expired = await events(site, LeaseExpired)
        assert any(event.worker_id == "a-1" and event.kept for event in expired)
        assert any(request.prefix_token_ids for request in team.engines["b"].requests)

    story(tmp_path, act, client_config(coordinator={"lease_s": 2.0, "heartbeat_s": 0.2}))


def test_later_requests_of_an_equal_prompt_draft_from_earlier_answers(tmp_path: Path) -> None:
    async def act(site: Served, client: CoordinatorClient, team: Team) -> None:
        team.add("a", LightEngine(drafts=True))
        first = None
        for name in ("r0", "r1"):
            await client.request_samples(asking(name, 0))
            reply = await answer(client, name)
            first = reply if first is None else first
        assert first is not None
        history = team.engines["a"].requests[-1].history
        assert history is not None
        known = [one.token_ids.tolist() for one in history.completions]
        assert known == [one.token_ids.tolist() for one in first.trajectories]
        assert team.engines["a"].requests[0].history is None

    story(tmp_path, act)


def test_more_samples_than_a_worker_has_places_for_are_taken_alone(tmp_path: Path) -> None:
    async def act(site: Served, client: CoordinatorClient, team: Team) -> None:
        team.add("a")
        request = asking("many", 0, 100)
        await client.request_samples(request)
        assert told(await answer(client, "many")) == alone(request, 0)

    story(tmp_path, act)


def test_a_version_that_no_worker_can_fetch_ends_with_a_refusal(tmp_path: Path) -> None:
    async def act(site: Served, client: CoordinatorClient, team: Team) -> None:
        await make_version(client, site)
        team.add("a")
        await client.request_samples(asking("new", 1))
        await answer(client, "new")
        team.sources["a"].failures = [UnavailableError("the payload is not held here")] * 1000
        await client.request_samples(asking("old", 0))
        with pytest.raises(ContractError, match="the weights of version 0 are kept no longer"):
            await answer(client, "old")
        await client.request_samples(asking("newer", 1))
        assert told(await answer(client, "newer")) == alone(asking("newer", 1), 1)

    quick = {"services": {"stall_timeout_s": 2.0}, "coordinator": {"lease_s": 5.0, "heartbeat_s": 0.1}}
    story(tmp_path, act, client_config(**quick))


def test_a_straggler_s_request_is_sampled_twice_and_answered_once(tmp_path: Path) -> None:
    async def act(site: Served, client: CoordinatorClient, team: Team) -> None:
        stuck, late = threading.Event(), list[bool]()
        team.add("a", LightEngine(lambda: stuck.wait(DEADLINE_S) if late else None))
        for number in range(24):
            await client.request_samples(asking(f"r{number}", 0))
            await answer(client, f"r{number}")
        late.append(True)
        await client.request_samples(asking("late", 0))
        while team.engines["a"].unfinished == 0:
            await asyncio.sleep(0.01)
        team.add("b")
        assert told(await answer(client, "late")) == alone(asking("late", 0), 0)
        (twin,) = await events(site, LeaseDuplicated)
        assert twin.worker_id == "b-1"
        stuck.set()

    calm = {"lease_s": 60.0, "heartbeat_s": 0.5, "hung_factor": 1e6}
    story(tmp_path, act, client_config(coordinator=calm))


def test_steps_of_clients_are_sealed_once_and_only_with_a_file(tmp_path: Path) -> None:
    async def act(site: Served, client: CoordinatorClient, team: Team) -> None:
        with pytest.raises(ContractError, match="the artifact store has no file"):
            await client.seal_client_step(0, "a" * 64, 1, 1)
        await make_version(client, site)
        other = site.store.put(b"another step")
        with pytest.raises(ContractError, match="a sealed batch never changes"):
            await client.seal_client_step(0, other, 1, 1)
        with pytest.raises(ContractError, match="step 2 cannot be sealed"):
            await client.seal_client_step(2, other, 1, 1)
        with pytest.raises(ContractError, match="a client drives run run-1"):
            await client.open_evaluation(0)
        batch = await client.seal_client_step(1, other, 5, 7)
        assert (batch.trajectories, batch.tokens, batch.groups) == (5, 7, 0)
        assert np.isfinite(batch.completion_tokens_mean)
        voided = await client.skip_step(1, "no loss", "me")
        assert voided.digest == other
        with pytest.raises(ContractError, match="a sealed batch never changes"):
            await client.seal_client_step(1, other, 5, 7)

    story(tmp_path, act)
