"""Whole runs in fixed mode on the real engines, one after another: python fixed_runs.py FOLDER SEED.

vLLM, DeepSpeed, the coordinator with its journal, the judge and the chunk origin share one
process and one event loop; what differs between the runs of a case is timing alone. The result
is FOLDER/results.json: run -> {"weights": digest of the last version, "batches": digests}.
"""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from antiphon.api.engine import EngineOutput
from antiphon.core.config import RunConfig, build_config, dump_config
from antiphon.core.drafting.gate import DraftGate, StepPlan
from antiphon.core.loop.staleness import is_published
from antiphon.environments.registry import make_environment
from antiphon.environments.scoring.pool import InProcess
from antiphon.lineage.store.artifact_store import ArtifactStore
from antiphon.models.codec import TextCodec
from antiphon.net.rpc.serving import start_server, stop_server
from antiphon.services.coordinator.client import CoordinatorClient
from antiphon.services.coordinator.journal.journal import Journal
from antiphon.services.coordinator.prompts import load_prompts
from antiphon.services.coordinator.run_state_machine import RunStateMachine
from antiphon.services.coordinator.server import start_coordinator
from antiphon.services.coordinator.service import CoordinatorService
from antiphon.services.learner.server import open_learner
from antiphon.services.learner.service import LearnerService
from antiphon.services.reward.service import RewardService
from antiphon.services.rollout.engine.vllm_engine import VllmEngine
from antiphon.services.rollout.process import engine_settings
from antiphon.services.rollout.snapshot_source import SnapshotSource
from antiphon.services.rollout.worker import RolloutWorker
from antiphon.weights.payload_store import PAYLOADS, PayloadStore
from antiphon.weights.rpc import SERVICE_NAME, register_broadcast
from antiphon.weights.service import BroadcastService
from tests.support.light_environment import PacedScorer
from tests.support.snapshots import FarService

MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "chain-sum"
RUN_ID = "run-1"
DEADLINE_S = 120.0
LONGEST_DELAY_S = 0.15
STEPS = 4

CASES = ((0, 1), (2, 1), (2, 2))
"""(staleness bound, publish interval)."""


@dataclass(frozen=True)
class Manner:
    """How a run goes about its work; nothing of it may show in the results."""

    concurrent_groups: int = 6
    delays: int | None = None
    """Seed of random pauses in worker and judge."""
    evaluates: bool = False
    drafts: bool = True
    far: bool = False
    """Snapshots are sent, instead of linked as on one machine."""


def make_config(max_staleness: int, publish_interval: int) -> RunConfig:
    """Return a run of a few small steps."""
    return build_config(
        {
            "run": {"steps": STEPS, "seed": 3},
            "model": {"path": str(MODEL)},
            "environment": {
                "parameters": {"min_terms": 2, "max_terms": 4, "min_digits": 1, "max_digits": 1},
                "train_size": 12,  # a second epoch begins within the run
                "heldout_size": 8,
            },
            "loop": {
                "mode": "fixed",
                "max_staleness": max_staleness,
                "publish_interval": publish_interval,
                "prompts_per_step": 4,
                "group_size": 4,
            },
            "sampling": {"max_tokens": 96},
            "rollout": {"concurrent_groups": 8, "kv_cache_mib": 128, "max_model_tokens": 256},
            "learner": {"warmup_steps": 0, "learning_rate": 1e-3},
            "coordinator": {"heartbeat_s": 0.2},
            "broadcast": {"chunk_bytes": 200_000},
            "evaluation": {"prompts": 8},
        }
    )


def make_patched(patches: str) -> RunConfig:
    """Return a run in bfloat16 at a small learning rate, whose patches are "on" or "off"."""
    tree: dict[str, Any] = make_config(2, 1).model_dump(mode="json")
    tree["model"]["dtype"] = "bfloat16"
    tree["learner"]["learning_rate"] = 1e-5
    tree["broadcast"]["patches"] = patches
    return build_config(tree)


class KeptEngine(VllmEngine):
    """An engine that outlives the worker that used it, and counts the drafts that were right."""

    accepted = 0

    def step(self) -> list[EngineOutput]:
        outputs = super().step()
        self.accepted += sum(o.drafting.accepted for o in outputs if o.drafting is not None)
        return outputs

    def close(self) -> None:
        self.abort(list(self._live))


def pauses(seed: int | None) -> Callable[[], Awaitable[None]]:
    """Return what pauses for a random time, or not at all."""
    chance = np.random.default_rng(seed)

    async def wait() -> None:
        if seed is not None:
            await asyncio.sleep(float(chance.uniform(0.0, LONGEST_DELAY_S)))

    return wait


async def flow(
    config: RunConfig, coordinator: CoordinatorClient, learner: LearnerService, manner: Manner
) -> None:
    """Open steps as far ahead as the bound allows, train, publish beside it, evaluate if asked."""
    last = config.run.steps - 1
    publishing: list[asyncio.Task[object]] = []
    async with asyncio.TaskGroup() as tasks:

        async def publish(version: int) -> None:
            await learner.publish(version)
            if manner.evaluates:
                await coordinator.open_evaluation(version)

        await publish(0)
        for step in range(config.run.steps):
            for ahead in range(step, min(last, step + config.loop.max_staleness) + 1):
                await coordinator.open_step(ahead)
            await learner.step(step)
            if is_published(step + 1, config.loop.publish_interval, config.run.steps):
                publishing.append(tasks.create_task(publish(step + 1)))
    while not all(e.complete for e in (await coordinator.status()).evaluations):
        await asyncio.sleep(0.05)
    await coordinator.finish()


async def run_once(config: RunConfig, folder: Path, engine: KeptEngine, manner: Manner) -> dict[str, object]:
    """Live one run from its first event to its last."""
    folder.mkdir(parents=True)
    engine.use_drafts(manner.drafts)
    engine.accepted = 0
    (folder / "config.yaml").write_text(dump_config(config))
    store = ArtifactStore(folder / "store")
    journal = Journal(folder / "journal.db", RUN_ID)
    clock = asyncio.get_running_loop().time
    state_machine = RunStateMachine(config, RUN_ID, journal, store, load_prompts(config), clock)
    await state_machine.start()
    server, port = await start_coordinator(CoordinatorService(state_machine), "127.0.0.1", 0)
    clients = [CoordinatorClient(f"127.0.0.1:{port}") for _ in range(4)]
    payloads = PayloadStore(folder / PAYLOADS)
    learner = open_learner(config, RUN_ID, folder, store, payloads, clients[0])
    origin = FarService(payloads) if manner.far else BroadcastService(payloads)
    source = SnapshotSource(PayloadStore(folder / "worker"), config)

    def register(server: grpc.aio.Server) -> None:
        register_broadcast(server, origin)

    origin_server, origin_port = await start_server("127.0.0.1", 0, register, [SERVICE_NAME])
    learner.origin = f"127.0.0.1:{origin_port}"
    section = config.environment
    judge = RewardService(
        clients[1],
        PacedScorer(
            InProcess(
                make_environment(
                    section.name, section.parameters, section.seed, section.train_size, section.heldout_size
                )
            ),
            pauses(manner.delays),
        ),
        TextCodec.load(config.model.path),
        RUN_ID,
        "judge",
        30.0,
    )
    worker = RolloutWorker(
        clients[2],
        "w0",
        RUN_ID,
        lambda config: engine,
        lambda config: source,
        concurrent_groups=manner.concurrent_groups,
        delay=pauses(None if manner.delays is None else manner.delays + 1),
    )
    try:
        await learner.restore()
        async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(worker.run(lambda: None))
            tasks.create_task(judge.run(lambda: None))
            await flow(config, clients[3], learner, manner)
        commits = await clients[3].commits(-1)
        status = await clients[3].status()
    finally:
        await learner.close()
        for client in clients:
            await client.close()
        await stop_server(origin_server, grace_s=0.0)
        await stop_server(server, grace_s=0.0)
        await state_machine.close()
    return {
        "weights": commits[-1].weights_digest,
        "batches": [commit.batch_digest for commit in commits],
        "trajectories": sum(status.staleness_histogram.values()),
        "evaluations": len(status.evaluations),
        "accepted": engine.accepted,
        "bytes_fetched": source.bytes_fetched,
        "full_bytes": payloads.manifest(None).full_bytes,
    }


def main() -> None:
    """Live every case calmly and disturbed, one evaluated without drafts, one over a link with patches."""
    folder, seed = Path(sys.argv[1]), int(sys.argv[2])
    results: dict[str, dict[str, object]] = {}

    def live(name: str, config: RunConfig, engine: KeptEngine, manner: Manner) -> None:
        results[name] = asyncio.run(run_once(config, folder / name, engine, manner))
        print(name, results[name], flush=True)

    # Whether drafts pay is a matter of time; here they are made whatever the machine is busy with.
    DraftGate.plan = lambda self, requests: StepPlan(draft=True, floor=0.2)  # type: ignore[method-assign]
    engine = KeptEngine(engine_settings(make_config(0, 1), str(MODEL)))
    for max_staleness, publish_interval in CASES:
        config = make_config(max_staleness, publish_interval)
        manners = {"calm": Manner(), "disturbed": Manner(concurrent_groups=3, delays=seed)}
        if (max_staleness, publish_interval) == (2, 1):
            manners["evaluated"] = Manner(concurrent_groups=8, evaluates=True, drafts=False)
        for name, manner in manners.items():
            live(f"S{max_staleness}k{publish_interval}-{name}", config, engine, manner)
    engine = KeptEngine(engine_settings(make_patched("on"), str(MODEL)))
    for patches in ("off", "on"):
        live(f"patches-{patches}", make_patched(patches), engine, Manner(far=True, drafts=False))
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
