"""Workers and a judge around the real coordinator over gRPC: what trains depends on no timing.

The engine and the learner are light; leases, submissions, rewards, sealing and the journal are
the real ones.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import pytest

from antiphon.api.engine import EngineOutput, EngineRequest
from antiphon.core.config import RunConfig, build_config
from antiphon.core.coordinator import running_leases
from antiphon.core.coordinator.loop_state import PromptSource
from antiphon.core.loop.partials import PartialGroups
from antiphon.core.records import BatchRef, SamplingParameters, StepCommit, TurnLimits
from antiphon.core.seeds import branch_seed, request_seeds
from antiphon.core.spans import sampled_mask, token_versions
from antiphon.environments.scoring.pool import InProcess
from antiphon.lineage.rollout_table import decode_batch
from antiphon.lineage.store.artifact_store import ArtifactStore
from antiphon.net.rpc.retry import retry_unavailable
from antiphon.net.rpc.serving import stop_server
from antiphon.services.coordinator.client import CoordinatorClient
from antiphon.services.coordinator.journal.journal import Journal
from antiphon.services.coordinator.run_state_machine import RunStateMachine
from antiphon.services.coordinator.server import start_coordinator
from antiphon.services.coordinator.service import CoordinatorService
from antiphon.services.reward.service import RewardService
from antiphon.services.rollout.worker import RolloutWorker
from tests.support.light_engine import LightEngine
from tests.support.light_environment import (
    LightEnvironment,
    LightHostedPrompts,
    LightPrompts,
    LightTurnPrompts,
    PacedScorer,
    check_light_turns,
    light_codec,
    light_host_says,
)
from tests.support.light_weights import LightSource, light_bias, light_manifest

RUN_ID = "run-1"
DEADLINE_S = 60.0
PATIENCE_S = 30.0


def make_config(
    mode: str,
    max_staleness: int = 2,
    publish_interval: int = 1,
    steps: int = 6,
    max_model_tokens: int = 1024,
) -> RunConfig:
    return build_config(
        {
            "run": {"steps": steps},
            "environment": {"train_size": 16, "heldout_size": 4},
            "loop": {
                "mode": mode,
                "max_staleness": max_staleness,
                "publish_interval": publish_interval,
                "prompts_per_step": 3,
                "group_size": 4,
            },
            "sampling": {"max_tokens": 10},
            "rollout": {"concurrent_groups": 2, "max_model_tokens": max_model_tokens},
            "coordinator": {"heartbeat_s": 0.05, "lease_s": 5.0},
            "evaluation": {"prompts": 4},
            "services": {"stall_timeout_s": PATIENCE_S},
        }
    )


class House:
    """A coordinator that can be shut and opened again on the same port and journal."""

    def __init__(self, config: RunConfig, folder: Path, prompts: PromptSource) -> None:
        self.config, self._prompts = config, prompts
        self.store = ArtifactStore(folder / "store")
        folder.mkdir(exist_ok=True)
        self._journal_path = folder / "journal.db"
        self._port = 0
        self._state_machine: RunStateMachine | None = None
        self._server: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    async def open(self) -> None:
        clock = asyncio.get_running_loop().time
        journal = Journal(self._journal_path, RUN_ID)
        self._state_machine = RunStateMachine(self.config, RUN_ID, journal, self.store, self._prompts, clock)
        await self._state_machine.start()
        service = CoordinatorService(self._state_machine)
        self._server, self._port = await start_coordinator(service, "127.0.0.1", self._port)

    async def shut(self) -> None:
        assert self._state_machine is not None and self._server is not None
        await stop_server(self._server, grace_s=0.0)
        await self._state_machine.close()


async def train(
    config: RunConfig, address: str, after_step: Callable[[int], Awaitable[None]]
) -> list[BatchRef]:
    """Be flow and learner at once: open steps, take batches, commit, announce."""
    coordinator = CoordinatorClient(address, timeout_s=5.0)
    batches = []
    try:
        await coordinator.announce_snapshot(light_manifest(RUN_ID, 0))
        await coordinator.open_evaluation(0)
        for step in range(config.run.steps):
            for ahead in range(step, min(config.run.steps, step + config.loop.max_staleness + 1)):
                await retry_unavailable("open", lambda ahead=ahead: coordinator.open_step(ahead), PATIENCE_S)
            batch = None
            while batch is None:
                reply = await retry_unavailable(
                    "pull", lambda step=step: coordinator.await_stage("reward", step, 1.0), PATIENCE_S
                )
                batch = reply.batch
            batches.append(batch)
            manifest = light_manifest(RUN_ID, step + 1)
            publish = (step + 1) % config.loop.publish_interval == 0
            commit = StepCommit(step, step + 1, manifest.weights_digest, batch.digest, published=publish)
            await retry_unavailable(
                "commit", lambda commit=commit: coordinator.commit_step(commit), PATIENCE_S
            )
            if publish:
                await retry_unavailable(
                    "announce", lambda manifest=manifest: coordinator.announce_snapshot(manifest), PATIENCE_S
                )
            await after_step(step)
        while True:
            status = await coordinator.status()
            if any(e.version == 0 and e.complete for e in status.evaluations):
                break
            await asyncio.sleep(0.05)
        await coordinator.finish()
    finally:
        await coordinator.close()
    return batches


@dataclass
class Delays:
    """Random pauses, or none."""

    seed: int | None
    most_s: float = 0.02

    def pace(self) -> Callable[[], Awaitable[None]]:
        chance = np.random.default_rng(self.seed)

        async def wait() -> None:
            if self.seed is not None:
                await asyncio.sleep(float(chance.uniform(0, self.most_s)))

        return wait


async def run_loop(
    config: RunConfig,
    folder: Path,
    *,
    workers: int = 1,
    concurrent_groups: int = 2,
    delays: Delays | None = None,
    restart_after: int | None = None,
    lose_after: int | None = None,
    turns: LightTurnPrompts | None = None,
) -> tuple[list[BatchRef], ArtifactStore]:
    delays = delays or Delays(None)
    house = House(config, folder, turns or LightPrompts())
    await house.open()

    working: list[asyncio.Task[None]] = []

    async def after_step(step: int) -> None:
        if step == lose_after:  # without a word
            working[0].cancel()
        if step == restart_after:
            await house.shut()
            await house.open()

    clients = [CoordinatorClient(house.address, timeout_s=5.0) for _ in range(workers + 1)]
    judge = RewardService(
        clients[-1],
        PacedScorer(InProcess(LightEnvironment()), delays.pace()),
        light_codec(),
        RUN_ID,
        "judge",
        PATIENCE_S,
        answer=None if turns is None else turns.answer,
    )
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        for number in range(workers):
            worker = RolloutWorker(
                clients[number],
                f"w{number}",
                RUN_ID,
                lambda config: LightEngine(),
                lambda config: LightSource(),
                concurrent_groups=concurrent_groups,
                delay=delays.pace(),
            )
            working.append(tasks.create_task(worker.run(lambda: None)))
        tasks.create_task(judge.run(lambda: None))
        batches = await train(config, house.address, after_step)
    for client in clients:
        await client.close()
    await house.shut()
    return batches, house.store


def check_batches(config: RunConfig, batches: list[BatchRef], store: ArtifactStore) -> None:
    """Nothing stale, nothing twice, every version span as it should be."""
    seen: set[str] = set()
    for batch in batches:
        rows = decode_batch(store.get(batch.digest))
        groups = {row.group_id for row in rows}
        assert not groups & seen
        seen |= groups
        for row in rows:
            oldest = row.oldest_version
            assert 0 <= batch.step - oldest <= config.loop.max_staleness
            assert row.spans[-1].stop == len(row.token_ids) == len(row.logprobs)


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_elastic_loop_stays_within_the_bound(tmp_path: Path, max_staleness: int) -> None:
    config = make_config("elastic", max_staleness)
    batches, store = asyncio.run(run_loop(config, tmp_path, workers=2))
    check_batches(config, batches, store)


def test_elastic_loop_survives_a_restart_of_the_coordinator(tmp_path: Path) -> None:
    config = make_config("elastic")
    batches, store = asyncio.run(run_loop(config, tmp_path, workers=2, restart_after=2))
    assert [batch.step for batch in batches] == list(range(6))
    check_batches(config, batches, store)


@pytest.mark.parametrize(("max_staleness", "publish_interval"), [(0, 1), (2, 2)])
def test_fixed_batches_depend_on_no_timing(
    tmp_path: Path, test_seed: int, max_staleness: int, publish_interval: int
) -> None:
    config = make_config("fixed", max_staleness, publish_interval)
    calm, store = asyncio.run(run_loop(config, tmp_path / "calm"))
    check_batches(config, calm, store)
    shaken, _ = asyncio.run(
        run_loop(
            config,
            tmp_path / "shaken",
            workers=2,
            concurrent_groups=3,
            delays=Delays(test_seed),
            restart_after=3,
        )
    )
    assert [batch.digest for batch in shaken] == [batch.digest for batch in calm]


def check_turns(batches: list[BatchRef], store: ArtifactStore, turns: LightTurnPrompts) -> None:
    """What the rows observed is what the environment said, and only what was sampled has a version."""
    rows = [row for batch in batches for row in decode_batch(store.get(batch.digest))]
    for row in rows:
        tokens = row.token_ids.tolist()
        check_light_turns(row.prompt_token_ids.tolist(), tokens, row.observed, row.reward, turns.limits)
        assert np.array_equal(token_versions(row) >= 0, sampled_mask(row))
        assert not row.logprobs[~sampled_mask(row)].any() and row.logprobs[sampled_mask(row)].all()
    assert max(len(row.observed) for row in rows) > 1


def test_elastic_loop_with_turns(tmp_path: Path) -> None:
    config, turns = make_config("elastic"), LightTurnPrompts()
    batches, store = asyncio.run(run_loop(config, tmp_path, workers=2, restart_after=2, turns=turns))
    check_batches(config, batches, store)
    check_turns(batches, store, turns)


def test_turns_go_on_where_no_beginning_finds_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the coordinator cannot keep is sent whole, and not asked for again and again."""
    monkeypatch.setattr(running_leases, "PartialGroups", lambda most_bytes: PartialGroups(6000))
    config, turns = make_config("elastic"), LightTurnPrompts()
    batches, store = asyncio.run(run_loop(config, tmp_path, turns=turns))
    check_turns(batches, store, turns)


def test_fixed_batches_with_turns_depend_on_no_timing(tmp_path: Path, test_seed: int) -> None:
    config, turns = make_config("fixed"), LightTurnPrompts()
    calm, store = asyncio.run(run_loop(config, tmp_path / "calm", turns=turns))
    check_batches(config, calm, store)
    check_turns(calm, store, turns)
    delays, shaken = Delays(test_seed), tmp_path / "shaken"
    again, _ = asyncio.run(run_loop(config, shaken, workers=2, delays=delays, restart_after=3, turns=turns))
    assert [batch.digest for batch in again] == [batch.digest for batch in calm]


def check_hosted(config: RunConfig, batches: list[BatchRef], store: ArtifactStore) -> None:
    """Each token is what a fresh engine samples in the context that its host gave, by the branch's seed."""
    limits = TurnLimits(5, 60, config.rollout.max_model_tokens)
    rows = [row for batch in batches for row in decode_batch(store.get(batch.digest))]
    for row in rows:
        seeds = request_seeds(config.run.seed, row.prompt_key, 0, config.loop.group_size)
        tokens: list[int] = []
        observed: list[tuple[int, int]] = []
        breaks: list[int] = []
        asked = row.prompt_key, row.sample_index
        while not isinstance(said := light_host_says(*asked, tokens, breaks, len(observed), limits), float):
            if said is None:
                break
            if said[1]:
                breaks.append(len(tokens))
            observed.append((len(tokens), len(tokens) + len(said[0])))
            tokens += said[0]
            first = max(breaks, default=0)
            begun = observed[[start for start, _ in observed].index(first)][1]
            request = EngineRequest(
                "alone",
                tuple(tokens[first:begun]),
                branch_seed(seeds[row.sample_index], len(breaks)),
                SamplingParameters(
                    max_tokens=min(
                        len(tokens) - begun + config.sampling.max_tokens,
                        min(60, first + config.rollout.max_model_tokens) - begun,
                    )
                ),
                prefix_token_ids=tuple(tokens[begun:]),
            )
            engine = LightEngine()
            engine.load_weights(row.oldest_version, {"bias": light_bias(row.oldest_version)}, "")
            engine.add([request])
            ended: list[EngineOutput] = []
            while not ended:
                ended = engine.step()
            tokens += ended[0].token_ids.tolist()
        assert (row.token_ids.tolist(), row.observed, row.breaks) == (tokens, tuple(observed), tuple(breaks))
        assert row.reward == (0.0 if said is None else said) and bool(row.failure) == (said is None)
        assert bool(tokens) or row.failure
    assert max(len(row.breaks) for row in rows) > 1 and any(not row.token_ids.size for row in rows)
    assert max(np.diff((0, *row.breaks, row.stop)).max() for row in rows) > limits.context - 4


def test_hosted_batches_with_branches_depend_on_no_timing(tmp_path: Path, test_seed: int) -> None:
    config, turns = make_config("fixed", steps=5, max_model_tokens=24), LightHostedPrompts(tokens=60)
    calm, store = asyncio.run(run_loop(config, tmp_path / "calm", turns=turns))
    check_hosted(config, calm, store)
    again, _ = asyncio.run(
        run_loop(
            config,
            tmp_path / "shaken",
            workers=2,
            delays=Delays(test_seed),
            restart_after=3,
            lose_after=1,
            turns=turns,
        )
    )
    assert [batch.digest for batch in again] == [batch.digest for batch in calm]


def test_elastic_loop_with_a_host(tmp_path: Path) -> None:
    config, turns = make_config("elastic", max_model_tokens=24), LightHostedPrompts(tokens=60)
    batches, store = asyncio.run(run_loop(config, tmp_path, workers=2, restart_after=2, turns=turns))
    rows = [row for batch in batches for row in decode_batch(store.get(batch.digest))]
    assert max(len(row.breaks) for row in rows) > 1 and any(not row.token_ids.size for row in rows)
    assert sum(batch.trajectories_failed for batch in batches) >= sum(bool(row.failure) for row in rows) > 0
