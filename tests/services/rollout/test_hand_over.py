"""Production workers and coordinator over gRPC: a lost worker's groups end as if it had lived."""

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from antiphon.api.engine import EngineOutput, EngineRequest
from antiphon.core.config import RunConfig, build_config
from antiphon.core.coordinator import consequences
from antiphon.core.coordinator.loop_state import prefix_name
from antiphon.core.loop.events import GroupSubmitted, LeaseExpired, load_event
from antiphon.core.loop.group_state import GroupPhase
from antiphon.core.records import GroupRewards, GroupSubmission, SampleReward, StepCommit, VersionSpan
from antiphon.core.status import WorkerState
from antiphon.services.rollout.worker import RolloutWorker
from tests.support.light_engine import VOCABULARY, LightEngine
from tests.support.light_parties import Served, served
from tests.support.light_weights import ENDLESS, LightSource, light_bias, light_manifest

DEADLINE_S = 60.0
GROUPS, SAMPLES, TOKENS, BEGUN = 3, 2, 24, 9


def make_config(mode: str, **coordinator: float) -> RunConfig:
    return build_config(
        {
            "run": {"steps": 2, "seed": 5},
            "environment": {"train_size": 8, "heldout_size": 2},
            "evaluation": {"prompts": 2},
            "loop": {"mode": mode, "max_staleness": 1, "prompts_per_step": GROUPS, "group_size": SAMPLES},
            "sampling": {"max_tokens": TOKENS},
            "rollout": {"concurrent_groups": GROUPS},
            "coordinator": {"lease_s": 60.0, "heartbeat_s": 1.0, **coordinator},
            "drafting": {"enabled": False},
        }
    )


class GatedEngine(LightEngine):
    """Takes this many steps once all requests are there, then none until it is opened.

    It obeys messages all the while.
    """

    def __init__(self, steps: int) -> None:
        super().__init__()
        self._steps = steps
        self._opened = threading.Event()

    def open(self) -> None:
        self._opened.set()

    def step(self) -> list[EngineOutput]:
        ready = self._steps and self.unfinished == GROUPS * SAMPLES
        if not ready and not self._opened.is_set():
            self._opened.wait(0.002)
            return []
        self._steps = max(0, self._steps - 1)
        return super().step()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.01)


class Hand:
    """One production worker with a light engine behind a gate."""

    def __init__(self, site: Served, name: str, steps: int, end: float) -> None:
        self.site, self.name = site, name
        self.engine = GatedEngine(steps)
        self.client = site.client()
        self.worker = RolloutWorker(
            self.client,
            name,
            "",
            lambda config: self.engine,
            lambda config: LightSource(lambda version: end),
            lease_wait_s=0.05,
        )
        self.task = asyncio.ensure_future(self.worker.run(lambda: None))

    @property
    def prefixes(self) -> list[int]:
        return [len(request.prefix_token_ids) for request in self.engine.requests]

    async def vanish(self) -> None:
        """End without a word, as a reclaimed machine does; the coordinator need not wait to notice."""
        self.task.cancel()
        state_machine = self.site.service.state_machine
        for member in state_machine.loop.fleet.named(self.name):
            state_machine.run(
                consequences.lose(state_machine.loop, member, "no heartbeat", state_machine.clock())
            )
        await asyncio.wait([self.task], timeout=DEADLINE_S)


@asynccontextmanager
async def hands(site: Served) -> AsyncIterator[Callable[..., Hand]]:
    made: list[Hand] = []

    def make(name: str, steps: int = 0, end: float = ENDLESS) -> Hand:
        made.append(Hand(site, name, steps, end))
        if not steps:
            made[-1].engine.open()
        return made[-1]

    try:
        async with asyncio.timeout(DEADLINE_S):
            yield make
    finally:
        for hand in made:
            await hand.vanish()


def undisturbed(seeds: tuple[int, ...], prompt: tuple[int, ...], config: RunConfig) -> list[EngineOutput]:
    """Return what one engine makes of a group in one go, under version 0."""
    engine = LightEngine()
    engine.load_weights(0, {"bias": light_bias(0, ENDLESS)}, "")
    parameters = config.sampling.parameters()
    engine.add([EngineRequest(str(i), prompt, seed, parameters) for i, seed in enumerate(seeds)])
    outputs: list[EngineOutput] = []
    while engine.unfinished:
        outputs += engine.step()
    return sorted(outputs, key=lambda output: output.request_id)


async def handed_in(site: Served, count: int = GROUPS) -> list[GroupSubmission]:
    groups = site.service.state_machine.state.groups
    await until(lambda: sum(g.phase is GroupPhase.SUBMITTED for g in groups.values()) >= count)
    return [await site.service.state_machine.submissions.get(group_id) for group_id in sorted(groups)][:count]


async def journalled(site: Served, kind: type) -> list:  # type: ignore[type-arg]
    await site.service.state_machine.written()
    rows = await site.service.state_machine.journal.read(0, 500)
    return [load_event(row.kind, row.body) for row in rows if row.kind == kind.kind]  # type: ignore[attr-defined]


def assert_undisturbed(site: Served, submissions: list[GroupSubmission], config: RunConfig) -> None:
    state_machine = site.service.state_machine
    for submission in submissions:
        group = state_machine.state.groups[submission.group_id]
        prompt = state_machine.prompts.prompt("train", group.prompt_index).token_ids
        expected = undisturbed(state_machine.loop.seeds(group), prompt, config)
        for trajectory, output in zip(submission.trajectories, expected, strict=True):
            count = len(trajectory.token_ids)
            assert trajectory.token_ids.tolist() == output.token_ids[:count].tolist()
            assert trajectory.logprobs.tobytes() == output.logprobs[:count].tobytes()
            assert trajectory.finish_reason is output.finish_reason
            assert trajectory.spans == (VersionSpan(0, 0, count),)


async def begun(site: Served, make: Callable[..., Hand]) -> Hand:
    """Have a worker sample the first tokens of every group and tell the coordinator."""
    await site.service.announce_snapshot(light_manifest("run-1", 0))
    await site.service.open_step(0)
    first = make("first", steps=BEGUN)
    await until(
        lambda: site.service.state_machine.loop.leases.partial_groups.tokens == GROUPS * SAMPLES * BEGUN
    )
    return first


def test_a_vanished_workers_groups_end_with_the_tokens_they_would_have_had(tmp_path: Path) -> None:
    config = make_config("fixed")

    async def story() -> None:
        async with served(config, tmp_path) as site, hands(site) as make:
            first = await begun(site, make)
            await first.vanish()
            second = make("second")
            submissions = await handed_in(site)
            assert second.prefixes == [BEGUN] * GROUPS * SAMPLES
            assert_undisturbed(site, submissions, config)
            assert site.service.state_machine.loop.leases.partial_groups.tokens == 0
            for event in await journalled(site, LeaseExpired):
                assert (event.tokens, event.kept) == (SAMPLES * BEGUN, SAMPLES * BEGUN)
            for event in await journalled(site, GroupSubmitted):
                assert event.worker_id == "second-1" and event.attempt == 2
                assert event.authors == tuple((i, "first-1", 0, BEGUN) for i in range(SAMPLES))

    asyncio.run(story())


async def train(site: Served, step: int) -> None:
    """Be judge and learner of one step."""
    client = site.client()
    while (reply := await client.await_stage("reward", step, 0.05)).batch is None:
        for group in (await client.pull_for_reward("judge", 8, 0.05)).groups:
            scores = [SampleReward(index, float(index % 2)) for index in range(len(group.trajectories))]
            await client.submit_rewards([GroupRewards(group.group_id, tuple(scores))])
    manifest = light_manifest("run-1", step + 1)
    await client.commit_step(StepCommit(step, step + 1, manifest.weights_digest, reply.batch.digest))
    await client.announce_snapshot(manifest)


def test_in_elastic_mode_the_spans_say_where_the_version_changed(tmp_path: Path) -> None:
    config = make_config("elastic")

    async def story() -> None:
        async with served(config, tmp_path) as site, hands(site) as make:
            await site.service.announce_snapshot(light_manifest("run-1", 0))
            await site.service.open_step(0)
            eager = make("eager")
            await handed_in(site)
            await eager.vanish()
            await site.service.open_step(1)
            first = await begun(site, make)  # the groups of step 1, under version 0
            await train(site, 0)
            await first.vanish()
            second = make("second")
            submissions = await handed_in(site)
            assert second.engine.version == 1
            continued = [p for p in second.prefixes if p]
            assert continued == [BEGUN] * GROUPS * SAMPLES
            for submission in submissions:
                group = site.service.state_machine.state.groups[submission.group_id]
                assert group.oldest_version == group.held_version == 0
                for trajectory in submission.trajectories:
                    assert trajectory.spans == (VersionSpan(0, 0, BEGUN), VersionSpan(1, BEGUN, TOKENS))
            assert_undisturbed(site, [cut(s, BEGUN) for s in submissions], config)

    asyncio.run(story())


def test_a_stopped_worker_hands_over_at_once(tmp_path: Path) -> None:
    config = make_config("fixed")

    async def story() -> None:
        async with served(config, tmp_path) as site, hands(site) as make:
            first = await begun(site, make)
            first.worker.stop(grace_s=DEADLINE_S)
            state = site.service.state_machine.state
            await until(lambda: all(g.phase is GroupPhase.OPEN for g in state.groups.values()))
            first.engine.open()
            await first.task
            assert [w.state for w in (await site.service.status()).workers] == [WorkerState.LOST]
            second = make("second")
            assert_undisturbed(site, await handed_in(site), config)
            assert min(second.prefixes) >= BEGUN
            reasons = {event.reason for event in await journalled(site, LeaseExpired)}
            assert reasons == {"handed over by its worker"}

    asyncio.run(story())


def test_a_stopped_worker_finishes_what_is_finished_soon(tmp_path: Path) -> None:
    config = make_config("fixed")

    async def story() -> None:
        async with served(config, tmp_path) as site, hands(site) as make:
            first = await begun(site, make)
            first.worker._work.seconds_per_token = 0.001  # what a longer run would have measured
            first.worker.stop(grace_s=DEADLINE_S)
            first.engine.open()
            await first.task
            assert_undisturbed(site, await handed_in(site), config)
            assert not await journalled(site, LeaseExpired)

    asyncio.run(story())


def test_a_second_stop_leaves_at_once_and_only_the_rest_is_sampled_again(tmp_path: Path) -> None:
    config = make_config("fixed")

    async def story() -> None:
        async with served(config, tmp_path) as site, hands(site) as make:
            first = await begun(site, make)
            first.worker.stop(grace_s=DEADLINE_S)
            first.worker.stop()
            await first.task
            first.engine.open()
            second = make("second")
            assert_undisturbed(site, await handed_in(site), config)
            assert second.prefixes == [BEGUN] * GROUPS * SAMPLES

    asyncio.run(story())


def test_what_was_handed_over_outlives_the_coordinator(tmp_path: Path) -> None:
    config = make_config("fixed")

    async def story() -> None:
        async with served(config, tmp_path) as site, hands(site) as make:
            await (await begun(site, make)).vanish()
            state = site.service.state_machine.state
            await until(lambda: all(g.phase is GroupPhase.OPEN for g in state.groups.values()))
            await site.service.state_machine.written()
        async with served(config, tmp_path) as site, hands(site) as make:
            assert site.service.state_machine.loop.leases.partial_groups.tokens == GROUPS * SAMPLES * BEGUN
            second = make("second")
            assert_undisturbed(site, await handed_in(site), config)
            assert second.prefixes == [BEGUN] * GROUPS * SAMPLES
            state_machine = site.service.state_machine
            await state_machine.written()
            assert [
                await state_machine.journal.payload(prefix_name(g)) for g in state_machine.state.groups
            ] == [None] * GROUPS

    asyncio.run(story())


def test_progress_is_told_again_to_a_coordinator_that_forgot_it(tmp_path: Path) -> None:
    config = make_config("fixed")

    async def story() -> None:
        async with served(config, tmp_path) as site, hands(site) as make:
            first = await begun(site, make)
            state_machine = site.service.state_machine
            for group in state_machine.state.groups.values():
                state_machine.loop.leases.partial_groups.end(group.lease_id)
                state_machine.loop.leases.partial_groups.begin(group.lease_id, group.group_id, SAMPLES, None)
            state_machine.loop.fleet._members.clear()
            state_machine.loop.fleet._living = None
            assert state_machine.loop.leases.partial_groups.tokens == 0
            await until(lambda: state_machine.loop.leases.partial_groups.tokens == GROUPS * SAMPLES * BEGUN)
            first.engine.open()
            assert_undisturbed(site, await handed_in(site), config)

    asyncio.run(story())


def test_without_memory_for_it_a_lost_group_is_begun_anew(tmp_path: Path) -> None:
    config = make_config("fixed", partials_mib=0)

    async def story() -> None:
        async with served(config, tmp_path) as site, hands(site) as make:
            await site.service.announce_snapshot(light_manifest("run-1", 0))
            await site.service.open_step(0)
            first = make("first", steps=BEGUN)
            state = site.service.state_machine.state
            await until(lambda: {g.phase for g in state.groups.values()} == {GroupPhase.LEASED})
            await first.vanish()
            second = make("second")
            assert_undisturbed(site, await handed_in(site), config)
            assert second.prefixes == [0] * GROUPS * SAMPLES

    asyncio.run(story())


@pytest.mark.parametrize("token", [-1, VOCABULARY])
def test_a_prefix_that_no_engine_can_have_written_is_left_aside(tmp_path: Path, token: int) -> None:
    config = make_config("fixed")

    async def story() -> None:
        async with served(config, tmp_path) as site, hands(site) as make:
            await (await begun(site, make)).vanish()
            state_machine = site.service.state_machine
            await until(lambda: all(g.phase is GroupPhase.OPEN for g in state_machine.state.groups.values()))
            for group_id in state_machine.state.groups:
                kept = state_machine.loop.leases.partial_groups.waiting(group_id)
                assert kept is not None
                kept.samples[0].whole.token_ids[3] = token
            second = make("second")
            assert_undisturbed(site, await handed_in(site), config)
            assert second.prefixes == [0] * GROUPS * SAMPLES
            for event in await journalled(site, GroupSubmitted):
                assert (0, "first-1", 0, 3) in event.authors

    asyncio.run(story())


def cut(submission: GroupSubmission, stop: int) -> GroupSubmission:
    """Return a submission's first tokens only."""
    return dataclasses.replace(
        submission,
        trajectories=tuple(
            dataclasses.replace(
                trajectory,
                token_ids=trajectory.token_ids[:stop],
                logprobs=trajectory.logprobs[:stop],
                spans=(VersionSpan(0, 0, stop),),
            )
            for trajectory in submission.trajectories
        ),
    )
