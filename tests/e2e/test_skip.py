"""A step whose batch cannot be trained is skipped by its operator, and the run ends well.

Coordinator, journal, learner and command are the real ones; workers hand in made-up tokens, and a reward
service gives one group a reward so large that the gradient is no number.
"""

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from antiphon.cli.app import execute
from antiphon.core.config import RunConfig, build_config, dump_config
from antiphon.core.coordinator import groups
from antiphon.core.errors import IntegrityError
from antiphon.core.records import (
    PROTOCOL_VERSION,
    BatchRef,
    FinishReason,
    GroupRewards,
    GroupSubmission,
    Lease,
    SampleReward,
    SnapshotManifest,
    StepCommit,
    Trajectory,
    VersionSpan,
)
from antiphon.core.requests import LeaseRequest, WorkerHello
from antiphon.lineage.records import Records
from antiphon.lineage.store.artifact_store import ArtifactStore
from antiphon.net.rpc.serving import Security, stop_server
from antiphon.net.security.local_run import ensure_local_credentials
from antiphon.services.coordinator.client import CoordinatorClient
from antiphon.services.coordinator.journal.journal import JOURNAL_NAME, Journal
from antiphon.services.coordinator.prompts import load_prompts
from antiphon.services.coordinator.run_state_machine import RunStateMachine
from antiphon.services.coordinator.server import coordinator_guard, start_coordinator
from antiphon.services.coordinator.service import CoordinatorService
from antiphon.services.learner.server import open_learner
from antiphon.services.learner.service import LearnerService
from antiphon.system.clock import wall_clock
from antiphon.weights.payload_store import PAYLOADS, PayloadStore
from tests.support.made_log import MadeLog

pytestmark = pytest.mark.engine
MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "chain-sum"
RUN_ID, STEPS, LENGTH, TOKEN = "skip-1", 3, 4, 7
POISONED = {"elastic": "g0000002", "fixed": "s000001-g000"}
"""Both modes: a group of step 1."""
DEADLINE_S = 240.0


def make_config(mode: str) -> RunConfig:
    return build_config(
        {
            "run": {"steps": STEPS, "seed": 3},
            "model": {"path": str(MODEL)},
            "environment": {
                "parameters": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
                "train_size": 16,
                "heldout_size": 2,
            },
            "loop": {
                "mode": mode,
                "max_staleness": 0,
                "prompts_per_step": 2,
                "group_size": 2,
                "filter": "none",
            },
            "algorithm": {"normalise_advantages": False},
            "sampling": {"max_tokens": LENGTH},
            "evaluation": {"prompts": 2, "interval": 0},
            "record": {"mlflow": False, "dvc": False},
        }
    )


def sampled(lease: Lease, worker_id: str, version: int) -> GroupSubmission:
    trajectories = tuple(
        Trajectory(
            sample_index=index,
            seed=seed,
            token_ids=np.full(LENGTH, TOKEN + index, np.int32),
            logprobs=np.full(LENGTH, -1.0, np.float32),
            spans=(VersionSpan(version, 0, LENGTH),),
            finish_reason=FinishReason.LENGTH,
        )
        for index, seed in enumerate(lease.seeds)
    )
    return GroupSubmission(lease.lease_id, lease.group_id, worker_id, trajectories, 0.01)


async def work(client: CoordinatorClient) -> None:
    """Sample whatever is offered with the newest version."""
    welcome = await client.register(WorkerHello("w", PROTOCOL_VERSION, RUN_ID, 4))
    held: int | None = None
    while True:
        reply = await client.lease_group(LeaseRequest(welcome.worker_id, held, 4, 0.2))
        for lease in reply.leases:
            version = held if lease.version is None else lease.version
            assert version is not None
            await client.submit_group(sampled(lease, welcome.worker_id, version))
        newer = reply.newest_version if reply.wanted_version is None else reply.wanted_version
        held = newer if newer is not None else held


async def judge(client: CoordinatorClient, poisoned: str) -> None:
    while True:
        for group in (await client.pull_for_reward("judge", 8, 0.2)).groups:
            first = 1e30 if group.group_id == poisoned else 1.0
            rewards = [SampleReward(0, first), SampleReward(1, 0.0)]
            await client.submit_rewards([GroupRewards(group.group_id, tuple(rewards))])


@asynccontextmanager
async def services(
    config: RunConfig, run_dir: Path
) -> AsyncIterator[tuple[CoordinatorClient, LearnerService]]:
    """Serve a coordinator and a learner of the run, with a worker and a reward service."""
    store = ArtifactStore(run_dir.parents[1] / "store")
    clock = asyncio.get_running_loop().time
    machine = RunStateMachine(
        config, RUN_ID, Journal(run_dir / JOURNAL_NAME, RUN_ID), store, load_prompts(config), clock
    )
    await machine.start()
    credentials = ensure_local_credentials(run_dir)  # as every run on one machine, so the command finds it
    security = Security(credentials, coordinator_guard(machine, credentials, wall_clock))
    server, port = await start_coordinator(CoordinatorService(machine), "127.0.0.1", 0, security)
    ready = run_dir / "services" / "coordinator.json"
    ready.write_text(json.dumps({"port": port}))
    clients = [CoordinatorClient(f"127.0.0.1:{port}", credentials=credentials) for _ in range(3)]
    learner = open_learner(config, RUN_ID, run_dir, store, PayloadStore(run_dir / PAYLOADS), clients[0])
    learner.origin = "127.0.0.1:1"
    tasks = []
    try:
        await learner.restore()
        await learner.publish_again()
        tasks = [
            asyncio.ensure_future(party)
            for party in (work(clients[1]), judge(clients[2], POISONED[config.loop.mode]))
        ]
        yield clients[0], learner
    finally:
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks)
        await learner.close()
        for client in clients:
            await client.close()
        await stop_server(server, grace_s=0.1)
        await machine.close()
        ready.unlink()


async def drive(
    coordinator: CoordinatorClient, learner: LearnerService, published: dict[int, SnapshotManifest]
) -> None:
    """Do what the flow does, from the first step that is not committed."""
    first = (await coordinator.status()).committed_steps
    for step in range(first, STEPS):
        published[step] = await learner.publish(step)
        await coordinator.open_step(step)
        await learner.step(step)
    published[STEPS] = await learner.publish(STEPS)
    await coordinator.finish()


def record(
    config: RunConfig,
    run_dir: Path,
    batches: list[BatchRef],
    commits: list[StepCommit],
    published: dict[int, SnapshotManifest],
) -> None:
    """Record the finished run in the ledger of a DVC project, as the flow does."""
    home = run_dir.parents[1]
    (home / ".dvc").mkdir()
    (home / ".dvc" / "config").write_text("[core]\n    no_scm = true\n    analytics = false\n")
    payloads = PayloadStore(run_dir / PAYLOADS)
    kept = config.model_copy(update={"record": config.record.model_copy(update={"dvc": True})})
    log = MadeLog()
    records = Records(
        *(RUN_ID, kept, run_dir, home, home / "store", log, home),
        weights_file=lambda version: payloads.checked(published[version]),
    )
    log.announce(published[0])
    for batch, commit in zip(batches, commits, strict=True):
        log.commit(commit, batch)
        log.announce(published[commit.version])
    assert records.close(DEADLINE_S).complete


@pytest.mark.parametrize(("mode", "running"), [("elastic", True), ("fixed", False)])
@pytest.mark.long
def test_a_run_whose_batch_cannot_be_trained_ends_well_once_the_step_is_skipped(
    mode: str,
    running: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("ANTIPHON_HOME", str(tmp_path))
    # Nothing that is known makes a batch that cannot be trained; here a check has let one through.
    monkeypatch.setattr(groups, "check_rewards", lambda group, rewards, samples: tuple(rewards))
    run_dir, config = tmp_path / "runs" / RUN_ID, make_config(mode)
    (run_dir / "services").mkdir(parents=True)
    (run_dir / "config.yaml").write_text(dump_config(config))

    async def command(step: int, *more: str) -> int:
        return await asyncio.to_thread(
            execute, ["skip", RUN_ID, str(step), "--reason", "no finite loss", *more]
        )

    async def skip(poison: str) -> None:
        assert await command(0) == 1  # committed
        assert "step 0 of run skip-1 is committed" in capsys.readouterr().err
        for _ in range(2):
            assert await command(1, "--operator", "ada") == 0
            out = capsys.readouterr().out
            assert f"step 1 is skipped, batch {poison[:12]} of 2 groups: no finite loss" in out
            assert f"is {'paused' if running else 'resting'}; continue it with `antiphon run" in out

    published: dict[int, SnapshotManifest] = {}

    async def body() -> tuple[list[BatchRef], list[StepCommit]]:
        async with services(config, run_dir) as (coordinator, learner):
            with pytest.raises(IntegrityError, match=r"step 1 on batch .* `antiphon skip RUN 1 --reason"):
                await drive(coordinator, learner, published)
            reply = await coordinator.await_stage("reward", 1, 0.0)
            assert reply.batch is not None and (await coordinator.status()).paused_reason
            poison = reply.batch.digest
            if running:
                await skip(poison)
        if not running:
            await skip(poison)
        async with services(config, run_dir) as (coordinator, learner):
            await drive(coordinator, learner, published)
            status = await coordinator.status()
            commits = list(await coordinator.commits(-1))
            sealed = [(await coordinator.await_stage("reward", step, 0.0)).batch for step in range(STEPS)]
            assert await command(1) == 0  # long after: still the same batch, nothing more
        assert status.finished and len(commits) == STEPS
        assert [c.batch_digest for c in commits] == [b.digest for b in sealed if b is not None]
        assert poison not in {c.batch_digest for c in commits}
        assert all(math.isfinite(c.metrics.get("loss", 0.0)) for c in commits)
        assert commits[1].weights_digest == commits[0].weights_digest
        assert (
            sum(status.staleness_histogram.values()) == (STEPS - 1) * 4
            and max(status.staleness_histogram) == 0
        )
        assert [(v.step, v.digest, v.operator) for v in status.voided] == [(1, poison, "ada")]
        assert sealed[1] is not None and sealed[1].replaced == status.voided
        assert status.tokens_by_use["voided"] == 4 * LENGTH
        return [batch for batch in sealed if batch is not None], commits

    batches, commits = asyncio.run(asyncio.wait_for(body(), DEADLINE_S))
    record(config, run_dir, batches, commits, published)
    document = json.loads((tmp_path / "ledger" / RUN_ID / "batches" / "t000001.json").read_text())
    assert document["replaced"][0]["operator"] == "ada"
    capsys.readouterr()
    assert execute(["replay", RUN_ID, "--copy", str(tmp_path / "ledger")]) == 0
    assert f"{STEPS} of {STEPS} steps of {RUN_ID} repeat bit for bit" in capsys.readouterr().out
    assert execute(["status", RUN_ID, "--kind", "batch.voided"]) == 0
    assert "operator=ada" in capsys.readouterr().out
