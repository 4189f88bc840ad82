"""The worker keeps sampling whatever the coordinator does, and hands in each group once."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.api.engine import ALL_ABILITIES
from antiphon.core.config import RunConfig, build_config
from antiphon.core.errors import ContractError, IntegrityError, UnavailableError
from antiphon.core.records import FinishReason, GroupSubmission
from antiphon.services.rollout.swap import WeightView, leases_wait, version_to_fetch, version_to_load
from antiphon.services.rollout.worker import RolloutWorker
from tests.support.light_coordinator import LightCoordinator, light_lease
from tests.support.light_engine import LightEngine
from tests.support.light_weights import ENDLESS, SHORT, LightSource, light_manifest

DEADLINE_S = 60.0


def make_config(mode: str = "elastic", stall_timeout_s: float = 20.0, orphan_s: float = 600.0) -> RunConfig:
    return build_config(
        {
            "loop": {"mode": mode, "group_size": 2},
            "rollout": {"concurrent_groups": 4},
            "services": {"stall_timeout_s": stall_timeout_s, "orphan_s": orphan_s},
        }
    )


class StepGate:
    """Holds the engine's thread before each step until the test lets it through."""

    def __init__(self) -> None:
        self._permits = threading.Semaphore(0)
        self._open = False

    def allow(self, steps: int) -> None:
        for _ in range(steps):
            self._permits.release()

    def open(self) -> None:
        self._open = True
        self._permits.release()

    def __call__(self) -> None:
        if not self._open:
            self._permits.acquire(timeout=DEADLINE_S)


@dataclass
class Site:
    """A worker at work, and everything around it."""

    coordinator: LightCoordinator
    source: LightSource
    worker: RolloutWorker
    engines: list[LightEngine] = field(default_factory=list)
    task: "asyncio.Task[None] | None" = None
    ready: bool = False

    @property
    def engine(self) -> LightEngine:
        return self.engines[0]

    async def left(self) -> None:
        assert self.task is not None
        async with asyncio.timeout(DEADLINE_S):
            await self.task


def make_site(
    config: RunConfig,
    *,
    source: LightSource | None = None,
    gate: Callable[[], None] | None = None,
    run_id: str = "",
    engine_class: type[LightEngine] = LightEngine,
    pace: Callable[[], "asyncio.Future[None]"] | None = None,
    coordinator_class: type[LightCoordinator] = LightCoordinator,
) -> Site:
    coordinator = coordinator_class(config)
    source = source or LightSource()
    engines: list[LightEngine] = []

    def make_engine(config: RunConfig) -> LightEngine:
        engines.append(engine_class(gate))
        return engines[-1]

    extra = {} if pace is None else {"delay": pace}
    worker = RolloutWorker(
        coordinator, "w", run_id, make_engine, lambda config: source, lease_wait_s=0.01, **extra
    )
    return Site(coordinator, source, worker, engines)


@asynccontextmanager
async def at_work(site: Site) -> AsyncIterator[Site]:
    def ready() -> None:
        site.ready = True

    site.task = asyncio.create_task(site.worker.run(ready))
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield site
    finally:
        site.task.cancel()
        await asyncio.wait([site.task], timeout=DEADLINE_S)
    assert all(engine.closed for engine in site.engines)


def sampled(submissions: list[GroupSubmission]) -> dict[str, list[list[int]]]:
    return {s.group_id: [t.token_ids.tolist() for t in s.trajectories] for s in submissions}


async def serve_groups(site: Site, numbers: range, version: int | None = None) -> None:
    site.coordinator.queue.extend(light_lease(n, version=version) for n in numbers)
    await site.coordinator.until(lambda: len(site.coordinator.submissions) >= len(numbers))


def test_groups_come_back_whole_and_in_sample_order() -> None:
    async def story() -> None:
        site = make_site(make_config())
        async with at_work(site):
            await site.coordinator.announce(light_manifest("run-1", 0))
            await serve_groups(site, range(10))
            site.coordinator.finished = True
            await site.left()
        assert site.ready
        for submission in site.coordinator.submissions:
            lease = site.coordinator.granted[submission.lease_id]
            assert tuple(t.seed for t in submission.trajectories) == lease.seeds
            assert [t.sample_index for t in submission.trajectories] == [0, 1]
            assert submission.generation_s >= 0
            for trajectory in submission.trajectories:
                count = len(trajectory.token_ids)
                assert trajectory.logprobs.shape == (count,)
                assert [(s.version, s.start, s.stop) for s in trajectory.spans] == [(0, 0, count)]
                cut = trajectory.finish_reason is FinishReason.LENGTH
                assert cut == (trajectory.token_ids[-1] != 0)
        beat = site.coordinator.beats[-1]
        assert beat.held_version == 0 and beat.weights_digest == light_manifest("run-1", 0).weights_digest
        assert beat.busy_s >= 0 and beat.tokens_generated > 0

    asyncio.run(story())


def test_never_more_in_flight_than_configured() -> None:
    async def story() -> None:
        gate = StepGate()
        site = make_site(make_config(), gate=gate)
        async with at_work(site):
            await site.coordinator.announce(light_manifest("run-1", 0))
            site.coordinator.queue.extend(light_lease(n) for n in range(10))
            await site.coordinator.until(lambda: len(site.coordinator.granted) == 4)
            beats = len(site.coordinator.beats)
            await site.coordinator.until(lambda: len(site.coordinator.beats) > beats + 2)
            assert len(site.coordinator.granted) == 4
            assert len(site.coordinator.beats[-1].lease_ids) == 4
            gate.open()
            await site.coordinator.until(lambda: len(site.coordinator.submissions) == 10)

    asyncio.run(story())


class SecondSampleWaits(LightEngine):
    """Brings every group's second sample its first token, and no more while it is held."""

    held = True

    def _advance(self, live: Any) -> None:
        if not (self.held and live.tokens and live.request.request_id.endswith("/1")):
            super()._advance(live)


def test_completions_that_ended_make_room_for_further_groups() -> None:
    async def story() -> None:
        site = make_site(
            make_config(), source=LightSource(lambda version: ENDLESS), engine_class=SecondSampleWaits
        )
        async with at_work(site):
            await site.coordinator.announce(light_manifest("run-1", 0))
            site.coordinator.queue.extend(light_lease(n) for n in range(10))
            # Room for 8 completions: those of 4 groups, and when one of two has ended, of 7.
            await site.coordinator.until(lambda: len(site.coordinator.granted) == 7)
            assert not site.coordinator.submissions
            cast(SecondSampleWaits, site.engine).held = False
            await site.coordinator.until(lambda: len(site.coordinator.submissions) == 10)

    asyncio.run(story())


def test_single_samples_fill_the_places_of_groups() -> None:
    async def story() -> None:
        gate = StepGate()
        site = make_site(make_config(), gate=gate)
        async with at_work(site):
            await site.coordinator.announce(light_manifest("run-1", 0))
            site.coordinator.queue.extend(light_lease(n, samples=1) for n in range(20))
            await site.coordinator.until(lambda: len(site.coordinator.granted) >= 7)
            gate.open()
            await site.coordinator.until(lambda: len(site.coordinator.submissions) == 20)

    asyncio.run(story())


def test_elastic_swaps_in_flight_and_says_where() -> None:
    async def story() -> None:
        gate = StepGate()
        source = LightSource(end=lambda version: ENDLESS if version == 0 else SHORT)
        site = make_site(make_config(), source=source, gate=gate)
        async with at_work(site):
            await site.coordinator.announce(light_manifest("run-1", 0))
            site.coordinator.queue.extend(light_lease(n, max_tokens=10**6) for n in range(2))
            await site.coordinator.until(lambda: len(site.coordinator.granted) == 2)
            gate.allow(5)
            await site.coordinator.announce(light_manifest("run-1", 1))
            while 1 not in site.engine.loaded:
                gate.allow(1)
                await asyncio.sleep(0)
            gate.open()
            await site.coordinator.until(lambda: len(site.coordinator.submissions) == 2)
            beats = len(site.coordinator.beats)
            await site.coordinator.until(lambda: len(site.coordinator.beats) > beats + 1)
        assert site.engine.loaded == [0, 1]
        for submission in site.coordinator.submissions:
            for trajectory in submission.trajectories:
                first, second = trajectory.spans
                assert (first.version, second.version) == (0, 1)
                assert first.stop == second.start and second.stop == len(trajectory.token_ids)
                assert trajectory.oldest_version == 0
        assert site.coordinator.beats[-1].held_version == 1

    asyncio.run(story())


def test_fixed_mode_drains_before_it_swaps() -> None:
    async def story() -> None:
        gate = StepGate()
        site = make_site(make_config("fixed"), gate=gate)
        coordinator = site.coordinator
        async with at_work(site):
            coordinator.wanted = 0
            await coordinator.announce(light_manifest("run-1", 0))
            await coordinator.announce(light_manifest("run-1", 1))
            coordinator.queue.extend(light_lease(n, version=0) for n in range(2))
            await coordinator.until(lambda: len(coordinator.granted) == 2)
            coordinator.wanted = 1
            coordinator.queue.extend(light_lease(n, version=1) for n in range(2, 4))
            calls = coordinator.calls["lease_group"]
            await coordinator.until(lambda: coordinator.calls["lease_group"] > calls + 3)
            assert 1 in site.source.fetched, "the wanted version is fetched while the old one samples"
            assert site.engine.loaded == [0] and len(coordinator.granted) == 2
            gate.open()
            await coordinator.until(lambda: len(coordinator.submissions) == 4)
        assert site.engine.loaded == [0, 1]
        for submission in coordinator.submissions:
            wanted = coordinator.granted[submission.lease_id].version
            assert {s.version for t in submission.trajectories for s in t.spans} == {wanted}

    asyncio.run(story())


def test_fixed_mode_goes_back_to_an_older_version_for_a_lost_group() -> None:
    async def story() -> None:
        site = make_site(make_config("fixed"))
        coordinator = site.coordinator
        async with at_work(site):
            for version, number in ((0, 0), (1, 1), (0, 2)):
                if version not in site.source.fetched:
                    await coordinator.announce(light_manifest("run-1", version))
                coordinator.wanted = version
                coordinator.queue.append(light_lease(number, version=version))
                await coordinator.until(lambda done=number + 1: len(coordinator.submissions) == done)
        assert site.engine.loaded == [0, 1, 0]
        assert site.source.fetched == [0, 1], "the older snapshot was kept"

    asyncio.run(story())


def test_a_version_that_is_evaluated_is_held_until_its_prompts_are_out_and_sampled() -> None:
    async def story() -> None:
        gate = StepGate()
        site = make_site(make_config(), gate=gate)
        coordinator = site.coordinator
        async with at_work(site):
            coordinator.wanted = 1
            await coordinator.announce(light_manifest("run-1", 1))
            await coordinator.until(lambda: bool(site.engines) and site.engine.loaded == [1])
            await coordinator.announce(light_manifest("run-1", 2))
            await coordinator.until(lambda: 2 in site.source.fetched)
            assert site.engine.loaded == [1], "its prompts wait"
            coordinator.queue.append(light_lease(0, version=1))
            await coordinator.until(lambda: len(coordinator.granted) == 1)
            coordinator.wanted = None
            calls = coordinator.calls["lease_group"]
            await coordinator.until(lambda: coordinator.calls["lease_group"] > calls + 1)
            assert site.engine.loaded == [1], "one is being sampled"
            gate.open()
            await coordinator.until(lambda: site.engine.loaded == [1, 2])
            coordinator.wanted = 1  # one of its groups was lost, and all workers have gone on
            await coordinator.until(lambda: site.engine.loaded == [1, 2, 1])
        (submission,) = coordinator.submissions
        assert {s.version for t in submission.trajectories for s in t.spans} == {1}

    asyncio.run(story())


def test_a_lease_for_another_version_is_not_sampled_and_given_back_at_once() -> None:
    class Careless(LightCoordinator):
        def _grant(self, request):  # type: ignore[no-untyped-def]
            leases, self.queue = self.queue, []
            self.granted.update((lease.lease_id, lease) for lease in leases)
            return leases

    async def story() -> None:
        site = make_site(make_config(), coordinator_class=Careless)
        careless = site.coordinator
        async with at_work(site):
            await careless.announce(light_manifest("run-1", 0))
            await careless.until(lambda: any(beat.held_version == 0 for beat in careless.beats))
            careless.queue.extend([light_lease(0, version=5), light_lease(1, version=0)])
            await careless.until(lambda: len(careless.submissions) == 1)
            await careless.until(lambda: any(beat.released_leases for beat in careless.beats))
            beats = len(careless.beats)
            await careless.until(lambda: len(careless.beats) > beats + 2)
        assert [s.group_id for s in careless.submissions] == ["g1"]
        assert careless.beats[-1].lease_ids == ()
        given_back = [beat.released_leases for beat in careless.beats if beat.released_leases]
        assert given_back == [(light_lease(0).lease_id,)]

    asyncio.run(story())


def test_cancelled_leases_are_dropped() -> None:
    async def story() -> None:
        gate = StepGate()
        site = make_site(make_config(), gate=gate)
        coordinator = site.coordinator
        async with at_work(site):
            await coordinator.announce(light_manifest("run-1", 0))
            first, second = light_lease(0), light_lease(1)
            coordinator.queue.extend([first, second])
            await coordinator.until(lambda: len(coordinator.granted) == 2)
            coordinator.cancelled.append(first.lease_id)
            await coordinator.until(lambda: coordinator.beats[-1].lease_ids == (second.lease_id,))
            gate.open()
            await coordinator.until(lambda: len(coordinator.submissions) == 1)
            await serve_groups(site, range(2, 4))
        assert "g0" not in sampled(coordinator.submissions)

    asyncio.run(story())


def test_a_worker_without_a_lease_beats_as_rarely_as_it_is_told() -> None:
    async def story() -> None:
        gate = StepGate()
        site = make_site(make_config(), gate=gate)
        coordinator = site.coordinator
        coordinator.next_s = 3600.0
        async with at_work(site):
            await coordinator.announce(light_manifest("run-1", 0))
            await coordinator.until(lambda: any(beat.held_version == 0 for beat in coordinator.beats))
            idle = len(coordinator.beats)
            asked = len(coordinator.asked)
            await coordinator.until(lambda: len(coordinator.asked) >= asked + 5)  # time passes meanwhile
            assert len(coordinator.beats) == idle
            coordinator.queue.append(light_lease(0))
            await coordinator.until(lambda: len(coordinator.beats) >= idle + 3)
            assert coordinator.beats[-1].lease_ids
            gate.open()
            await coordinator.until(lambda: len(coordinator.submissions) == 1)

    asyncio.run(story())


class SlowToLoad(LightEngine):
    """Takes in every version but the first only when it is let through."""

    let_through = threading.Event()

    def load_weights(self, version: int, tensors: Mapping[str, Any], weights_digest: str) -> None:
        if version:
            self.let_through.wait(DEADLINE_S)
        super().load_weights(version, tensors, weights_digest)


def test_heartbeats_say_whether_tokens_are_due() -> None:
    async def story() -> None:
        gate = StepGate()
        SlowToLoad.let_through.clear()
        site = make_site(make_config(), gate=gate, engine_class=SlowToLoad)
        coordinator = site.coordinator
        async with at_work(site):
            await coordinator.announce(light_manifest("run-1", 0))
            await coordinator.until(lambda: any(beat.held_version == 0 for beat in coordinator.beats))
            assert not coordinator.beats[-1].sampling
            coordinator.queue.append(light_lease(0))
            await coordinator.until(lambda: coordinator.beats[-1].sampling)
            # Weights that wait for a step which does not come back are no excuse.
            await coordinator.announce(light_manifest("run-1", 1))
            await coordinator.until(lambda: site.source.opened == [0, 1])
            beats = len(coordinator.beats)
            await coordinator.until(lambda: len(coordinator.beats) >= beats + 5)
            assert all(beat.sampling for beat in coordinator.beats[beats:])
            gate.allow(1)
            await coordinator.until(lambda: not coordinator.beats[-1].sampling)
            assert coordinator.beats[-1].lease_ids
            SlowToLoad.let_through.set()
            await coordinator.until(lambda: coordinator.beats[-1].sampling)
            assert coordinator.beats[-1].held_version == 1
            gate.open()
            await coordinator.until(lambda: len(coordinator.submissions) == 1)

    asyncio.run(story())


def test_forgotten_worker_registers_again_and_hands_in_what_it_has() -> None:
    async def story() -> None:
        gate = StepGate()
        site = make_site(make_config(), gate=gate)
        coordinator = site.coordinator
        async with at_work(site):
            await coordinator.announce(light_manifest("run-1", 0))
            coordinator.queue.extend(light_lease(n) for n in range(3))
            await coordinator.until(lambda: len(coordinator.granted) == 3)
            coordinator.known.clear()
            await coordinator.until(lambda: len(coordinator.hellos) == 2)
            assert coordinator.hellos[1].run_id == "run-1"
            gate.open()
            await coordinator.until(lambda: len(coordinator.submissions) == 3)
            await coordinator.until(lambda: coordinator.beats[-1].worker_id == "w-2")

    asyncio.run(story())


def test_outage_of_the_coordinator_costs_no_group() -> None:
    async def story() -> None:
        gate = StepGate()
        site = make_site(make_config(), gate=gate)
        coordinator = site.coordinator
        async with at_work(site):
            await coordinator.announce(light_manifest("run-1", 0))
            coordinator.queue.extend(light_lease(n) for n in range(4))
            await coordinator.until(lambda: len(coordinator.granted) == 4)
            coordinator.away = True
            gate.open()
            tries = coordinator.calls["submit_group"]
            await coordinator.until(lambda: coordinator.calls["submit_group"] > tries + 1)
            assert not coordinator.submissions
            coordinator.away = False
            coordinator.known.clear()
            await serve_groups(site, range(4, 8))
            await coordinator.until(lambda: len(coordinator.submissions) == 8)
        groups = [submission.group_id for submission in coordinator.submissions]
        assert sorted(groups) == [f"g{n}" for n in range(8)]

    asyncio.run(story())


def test_groups_are_handed_in_while_others_wait_for_their_answers() -> None:
    async def story() -> None:
        site = make_site(make_config())
        coordinator = site.coordinator
        coordinator.answer.clear()
        async with at_work(site):
            await coordinator.announce(light_manifest("run-1", 0))
            coordinator.queue.extend(light_lease(n) for n in range(12))
            await coordinator.until(lambda: len(coordinator.submissions) == 12)
            coordinator.answer.set()
            await coordinator.until(lambda: coordinator.beats[-1].lease_ids == ())
        assert coordinator.calls["submit_group"] == 12

    asyncio.run(story())


def test_a_lost_answer_does_not_double_a_group() -> None:
    async def story() -> None:
        site = make_site(make_config())
        coordinator = site.coordinator
        coordinator.lose_answers = 3
        async with at_work(site):
            await coordinator.announce(light_manifest("run-1", 0))
            await serve_groups(site, range(5))
        groups = [submission.group_id for submission in coordinator.submissions]
        assert sorted(groups) == sorted(set(groups))

    asyncio.run(story())


def test_a_worker_whose_coordinator_stays_away_leaves_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    async def story() -> None:
        site = make_site(make_config(orphan_s=1.0))
        async with at_work(site):
            await site.coordinator.announce(light_manifest("run-1", 0))
            await serve_groups(site, range(1))
            site.coordinator.away = True
            await site.left()  # without an error: its process ends with status 0
        assert "worker.orphaned" in capsys.readouterr().out

    asyncio.run(story())


def test_a_worker_of_another_run_is_refused() -> None:
    async def story() -> None:
        site = make_site(make_config(), run_id="run-2")
        async with at_work(site):
            with pytest.raises(ContractError, match="run-2"):
                await site.left()
        assert not site.ready

    asyncio.run(story())


def test_stop_leaves_after_the_grace_time() -> None:
    async def story() -> None:
        gate = StepGate()
        source = LightSource(end=lambda version: ENDLESS)
        site = make_site(make_config(), source=source, gate=gate)
        async with at_work(site):
            await site.coordinator.announce(light_manifest("run-1", 0))
            site.coordinator.queue.append(light_lease(0, max_tokens=10**9))
            await site.coordinator.until(lambda: len(site.coordinator.granted) == 1)
            gate.open()
            site.worker.stop(grace_s=0.05)
            await site.left()
        assert not site.coordinator.submissions

    asyncio.run(story())


def test_stop_before_the_engine_is_up_leaves_at_once() -> None:
    async def story() -> None:
        site = make_site(make_config())
        site.coordinator.away = True
        async with at_work(site):
            await site.coordinator.until(lambda: site.coordinator.calls["register"] > 0)
            site.worker.stop()
            await site.left()
        assert not site.engines

    asyncio.run(story())


def test_a_damaged_or_late_snapshot_is_fetched_again() -> None:
    async def story() -> None:
        source = LightSource()
        source.failures = [IntegrityError("altered"), UnavailableError("away")]
        source.damaged = [IntegrityError("altered on disk")]
        site = make_site(make_config(), source=source)
        async with at_work(site):
            await site.coordinator.announce(light_manifest("run-1", 0))
            await serve_groups(site, range(2))
        assert source.fetched == [0, 0] and source.opened == [0]

    asyncio.run(story())


def test_a_link_that_breaks_again_and_again_is_waited_for_while_bytes_come() -> None:
    async def story() -> None:
        source = LightSource()
        source.arriving = 1
        source.failures = [UnavailableError("broke off") for _ in range(8)]  # longer than the stall timeout
        site = make_site(make_config(stall_timeout_s=0.3), source=source)
        async with at_work(site):
            await site.coordinator.announce(light_manifest("run-1", 0))
            await serve_groups(site, range(2))
            await site.coordinator.until(lambda: site.coordinator.beats[-1].bytes_fetched == 9)
        assert source.fetched == [0] and not source.failures

    asyncio.run(story())


def test_a_link_that_brings_nothing_ends_the_worker() -> None:
    async def story() -> None:
        source = LightSource()
        source.failures = [UnavailableError("away") for _ in range(1000)]
        site = make_site(make_config(stall_timeout_s=0.3), source=source)
        async with at_work(site):
            await site.coordinator.announce(light_manifest("run-1", 0))
            with pytest.raises(UnavailableError, match="away"):
                await site.left()

    asyncio.run(story())


def test_weights_that_echo_another_digest_are_never_sampled() -> None:
    class Forgetful(LightEngine):
        def load_weights(self, version, tensors, weights_digest):  # type: ignore[no-untyped-def]
            super().load_weights(version, tensors, "0" * 64)

    async def story() -> None:
        site = make_site(make_config(), engine_class=Forgetful)
        async with at_work(site):
            site.coordinator.queue.append(light_lease(0))
            await site.coordinator.announce(light_manifest("run-1", 0))
            with pytest.raises(IntegrityError, match="must not sample"):
                await site.left()
        assert not site.coordinator.granted

    asyncio.run(story())


def test_snapshot_of_another_run_is_refused() -> None:
    async def story() -> None:
        site = make_site(make_config())
        async with at_work(site):
            await site.coordinator.announce(light_manifest("run-7", 0))
            with pytest.raises(ContractError, match="run-7"):
                await site.left()

    asyncio.run(story())


def test_a_failing_engine_ends_the_worker() -> None:
    class Broken(LightEngine):
        def step(self):  # type: ignore[no-untyped-def]
            raise IntegrityError("NaN")

    async def story() -> None:
        site = make_site(make_config(), engine_class=Broken)
        async with at_work(site):
            await site.coordinator.announce(light_manifest("run-1", 0))
            site.coordinator.queue.append(light_lease(0))
            with pytest.raises(IntegrityError, match="NaN"):
                await site.left()

    asyncio.run(story())


def test_delays_change_no_token(test_seed: int) -> None:
    async def story(delayed: bool) -> dict[str, list[list[int]]]:
        chance = np.random.default_rng(test_seed)

        async def pace() -> None:
            if delayed:
                await asyncio.sleep(float(chance.uniform(0, 0.01)))

        site = make_site(make_config(), pace=pace)
        async with at_work(site):
            await site.coordinator.announce(light_manifest("run-1", 0))
            await serve_groups(site, range(12))
        return sampled(site.coordinator.submissions)

    assert asyncio.run(story(False)) == asyncio.run(story(True))


VERSIONS = st.integers(0, 5)


@given(
    held=st.none() | VERSIONS,
    complete=st.frozensets(VERSIONS),
    newest=st.none() | VERSIONS,
    wanted=st.none() | VERSIONS,
    pinned_groups=st.integers(0, 2),
    free_groups=st.integers(0, 2),
    mode=st.sampled_from(["elastic", "fixed"]),
    in_flight=st.booleans(),
)
def test_swap_policy(held, complete, newest, wanted, pinned_groups, free_groups, mode, in_flight) -> None:  # type: ignore[no-untyped-def]
    view = WeightView(held, complete, newest, wanted, pinned_groups, free_groups)
    chosen = version_to_load(view, mode, in_flight)
    if chosen is not None:
        assert chosen in complete and chosen != held and not pinned_groups
        if mode == "fixed":
            assert chosen == wanted and not free_groups
        else:
            assert wanted in (None, chosen)
            assert held is None or chosen > held or not free_groups, "along a completion versions never fall"
            assert in_flight or not free_groups
    fetch = version_to_fetch(view)
    assert fetch is None or (fetch not in complete and fetch in (wanted, newest))
    if newest is not None and newest not in complete:
        assert fetch is not None
    if leases_wait(view, mode):
        # What is waited for is announced, and is on its way or here; what is in flight ends first.
        assert wanted in complete or fetch == wanted
        assert wanted != held
        if mode == "fixed":
            assert not pinned_groups and not free_groups
        else:
            assert held is not None and wanted < held


class Refusing(LightEngine):
    """Takes version 0, and refuses later ones while it is told to."""

    refuses, keeps = True, True
    abilities = replace(ALL_ABILITIES, drafts=False)

    def load_weights(self, version, tensors, weights_digest):  # type: ignore[no-untyped-def]
        if version and self.refuses:
            if not self.keeps:
                self.version = self.weights_digest = None
            raise IntegrityError("a tensor was refused " + "x" * 2000)
        super().load_weights(version, tensors, weights_digest)


def test_a_worker_that_cannot_swap_samples_on_and_says_why_until_it_can() -> None:
    async def story() -> None:
        site = make_site(make_config(), engine_class=Refusing)
        async with at_work(site):
            await site.coordinator.announce(light_manifest("run-1", 0))
            await serve_groups(site, range(2))
            assert all(not beat.swap_error for beat in site.coordinator.beats)
            assert site.coordinator.beats[-1].missing_abilities == ("drafts",)
            await site.coordinator.announce(light_manifest("run-1", 1))
            await site.coordinator.until(lambda: bool(site.coordinator.beats[-1].swap_error))
            await serve_groups(site, range(2, 6))
            beat = site.coordinator.beats[-1]
            assert beat.held_version == 0 and beat.swap_failing_s >= 0
            assert beat.swap_error.startswith("version 1 was not loaded: a tensor was refused")
            assert len(beat.swap_error) <= 1000
            assert {
                s.version for g in site.coordinator.submissions for t in g.trajectories for s in t.spans
            } == {0}
            cast(Refusing, site.engine).refuses = False
            await site.coordinator.until(lambda: site.coordinator.beats[-1].held_version == 1)
            assert (
                site.coordinator.beats[-1].swap_error == "" and site.coordinator.beats[-1].swap_failing_s == 0
            )
        assert site.engine.loaded == [0, 1]

    asyncio.run(story())


def test_a_worker_left_without_weights_gives_its_groups_back_and_says_why() -> None:
    async def story() -> None:
        source = LightSource(lambda version: ENDLESS)
        site = make_site(make_config(), source=source, engine_class=Refusing)
        async with at_work(site):
            await site.coordinator.announce(light_manifest("run-1", 0))
            site.coordinator.queue.extend(light_lease(n, max_tokens=1_000_000) for n in range(2))
            await site.coordinator.until(lambda: len(site.coordinator.granted) == 2)
            cast(Refusing, site.engine).keeps = False
            await site.coordinator.announce(light_manifest("run-1", 1))
            beats = site.coordinator.beats
            await site.coordinator.until(lambda: any(beat.released_leases for beat in beats))
            released = next(beat for beat in beats if beat.released_leases)
            assert sorted(released.released_leases) == sorted(site.coordinator.granted)
            assert released.held_version is None and "refused" in released.swap_error
            await site.coordinator.until(lambda: beats[-1] is not released)
            assert not beats[-1].lease_ids
            cast(Refusing, site.engine).refuses = False
            await site.coordinator.until(lambda: site.coordinator.beats[-1].held_version == 1)

    asyncio.run(story())


def test_swaps_that_fail_for_too_long_end_the_worker() -> None:
    async def story() -> None:
        site = make_site(make_config(stall_timeout_s=0.3), engine_class=Refusing)
        async with at_work(site):
            await site.coordinator.announce(light_manifest("run-1", 0))
            await serve_groups(site, range(2))
            await site.coordinator.announce(light_manifest("run-1", 1))
            with pytest.raises(IntegrityError, match="version 1 was not loaded"):
                await site.left()

    asyncio.run(story())
