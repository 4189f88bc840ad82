"""kill -9 of a real coordinator process: nothing acknowledged is lost, nothing trains twice."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from antiphon.core.config import RunConfig, dump_config
from antiphon.core.errors import ConfigError, UnavailableError
from antiphon.core.loop.run_state import ENVIRONMENT_FILES, RunState, fold, new_state
from antiphon.core.requests import LeaseRequest, WorkerHeartbeat
from antiphon.lineage.rollout_table import decode_batch
from antiphon.lineage.store.artifact_store import ArtifactStore
from antiphon.services.coordinator.client import CoordinatorClient
from antiphon.services.coordinator.journal.journal import Journal
from antiphon.services.coordinator.journal.opening import showing_life
from antiphon.services.coordinator.journal.payloads import load_submission
from antiphon.services.coordinator.journal.pinned import MODEL_FILES
from antiphon.services.coordinator.run_state_machine import RunStateMachine
from antiphon.services.coordinator.server import JOURNAL_NAME
from antiphon.services.coordinator.service import CoordinatorService
from antiphon.system.ports import free_port
from tests.support.light_history import archived, rewarded_epochs
from tests.support.light_parties import (
    LightPrompts,
    hello,
    insist,
    reward_all,
    run_parties,
    sample_lease,
    served,
)
from tests.support.loop_model import RUN_ID, light_manifest, make_config

ROOT = Path(__file__).resolve().parents[3]


async def start_process(folder: Path, port: int) -> Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(ROOT / "tests/support/coordinator_process.py"),
        str(folder),
        str(port),
        stdout=PIPE,
        stderr=PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    return process


async def end(process: Process) -> None:
    if process.returncode is None:
        process.kill()
    await asyncio.wait_for(process.wait(), 60.0)


async def ready(process: Process) -> None:
    assert process.stdout is not None
    async with asyncio.timeout(120.0):
        while not (line := (await process.stdout.readline()).decode()).startswith("ready"):
            assert line and not line.startswith("error"), line


def read_state(folder: Path, config: RunConfig) -> RunState:
    journal = Journal(folder / JOURNAL_NAME, RUN_ID)
    state = fold(new_state(config), journal.replay())
    asyncio.run(journal.close())
    return state


@pytest.fixture(params=["elastic", "fixed"])
def prepared(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[RunConfig, Path]]:
    config = make_config(mode=request.param, steps=8, lease_s=1.0, heartbeat_s=0.2, filter_="none")
    (tmp_path / "config.yaml").write_text(dump_config(config))
    yield config, tmp_path


def test_run_survives_kills_of_the_coordinator(prepared: tuple[RunConfig, Path]) -> None:
    config, folder = prepared
    kills = 2

    async def storm(port: int, first: Process) -> list[Process]:
        rng = np.random.default_rng(11)
        started = [first]
        client = CoordinatorClient(f"127.0.0.1:{port}", timeout_s=5.0)
        try:
            for wanted in range(1, kills + 1):
                # Kill only after the run has moved on.
                while (await insist(client.status)).sealed_steps < 3 * wanted - 2:
                    await asyncio.sleep(0.01 + 0.02 * float(rng.random()))
                started[-1].send_signal(signal.SIGKILL)
                await started[-1].wait()
                started.append(await start_process(folder, port))
                await ready(started[-1])
        except BaseException:
            await asyncio.gather(*(end(process) for process in started))
            raise
        finally:
            await client.close()
        return started

    async def run() -> list[str]:
        port = free_port()
        process = await start_process(folder, port)
        client = CoordinatorClient(f"127.0.0.1:{port}", timeout_s=5.0)
        storming: asyncio.Future[list[Process]] | None = None
        try:
            await ready(process)
            storming = asyncio.ensure_future(storm(port, process))
            refs, crew = await run_parties(client, config, seed=3, delay_s=0.05, limit_s=120.0)
            process = (await asyncio.wait_for(storming, 60.0))[-1]
            status = await client.status()
            assert status.finished and status.committed_steps == config.run.steps
        finally:
            await client.close()
            if storming is not None and not storming.done():
                storming.cancel()
                await asyncio.gather(storming, return_exceptions=True)
            await end(process)
        store = ArtifactStore(folder / "store")
        rows = [row for ref in refs for row in decode_batch(store.get(ref.digest))]
        keys = [(row.group_id, row.sample_index) for row in rows]
        assert len(keys) == len(set(keys)) == config.run.steps * 3 * 2
        tokens = {(row.group_id, row.sample_index): row.token_ids.tolist() for row in rows}
        for worker in crew:
            for group_id, submission in worker.acknowledged.items():
                for trajectory in submission.trajectories:
                    found = tokens.get((group_id, trajectory.sample_index))
                    assert found is None or found == trajectory.token_ids.tolist()
        return [ref.digest for ref in refs]

    digests = asyncio.run(run())
    state = read_state(folder, config)
    assert [ref.digest for ref in state.sealed] == digests
    # Whatever was rewarded is in the archive, and nothing else: both stand in one transaction.
    assert archived(folder) == rewarded_epochs(folder, config.drafting.epochs)
    if config.loop.mode == "fixed":

        async def unbroken() -> list[str]:
            (folder / "unbroken").mkdir()
            async with served(config, folder / "unbroken") as site:
                return [ref.digest for ref in (await run_parties(site.client(), config, seed=9))[0]]

        assert asyncio.run(unbroken()) == digests


def test_acknowledged_groups_are_all_there_after_a_kill(prepared: tuple[RunConfig, Path]) -> None:
    config, folder = prepared

    async def run() -> set[str]:
        port = free_port()
        process = await start_process(folder, port)
        await ready(process)
        client = CoordinatorClient(f"127.0.0.1:{port}", timeout_s=30.0)
        acknowledged: dict[str, object] = {}

        async def work() -> None:
            worker = await insist(client.register, hello())
            while True:
                reply = await client.lease_group(LeaseRequest(worker.worker_id, 0, 1, 1.0))
                for lease in reply.leases:
                    submission = sample_lease(lease, worker.worker_id, 0)
                    await client.submit_group(submission)
                    acknowledged[lease.group_id] = submission
                    if len(acknowledged) == 3:
                        process.send_signal(signal.SIGKILL)

        try:
            async with asyncio.timeout(60.0):
                await insist(client.announce_snapshot, light_manifest(0))
                await insist(client.open_step, 2)
                with pytest.raises(UnavailableError):
                    await work()
        finally:
            await client.close()
            await end(process)
        return set(acknowledged)

    acknowledged = asyncio.run(run())
    assert len(acknowledged) >= 3
    state = read_state(folder, config)
    assert acknowledged <= {group_id for group_id, receipt in state.receipts.items()}

    async def bodies() -> None:
        journal = Journal(folder / JOURNAL_NAME, RUN_ID)
        for group_id in acknowledged:
            body = await journal.payload(group_id)
            assert body is not None and load_submission(body).group_id == group_id
        await journal.close()

    asyncio.run(bodies())


def test_state_after_reopening_equals_the_state_before(tmp_path: Path) -> None:
    config = make_config(steps=4, lease_s=30.0)

    async def run() -> None:
        async with served(config, tmp_path) as site:
            client = site.client()
            await run_parties(client, config, seed=2)
            before = site.service.state_machine.state
        journal = Journal(tmp_path / JOURNAL_NAME, RUN_ID)
        assert fold(new_state(config), journal.replay()) == before
        await journal.close()

    asyncio.run(run())


def test_open_leases_go_on_after_a_restart(tmp_path: Path) -> None:
    config = make_config(steps=2, lease_s=30.0)

    async def run() -> None:
        async with served(config, tmp_path) as site:
            client = site.client()
            await client.announce_snapshot(light_manifest(0))
            await client.open_step(1)
            worker = await client.register(hello())
            reply = await client.lease_group(LeaseRequest(worker.worker_id, 0, 2, 1.0))
            assert len(reply.leases) == 2
        async with served(config, tmp_path) as site:
            client = site.client()
            ids = tuple(lease.lease_id for lease in reply.leases)
            beat = WorkerHeartbeat(worker.worker_id, 0, light_manifest(0).weights_digest, ids, 0, 0.0, 1.0)
            assert not (await client.heartbeat(beat)).known
            again = await client.register(hello())
            assert again.worker_id != worker.worker_id
            beat = WorkerHeartbeat(again.worker_id, 0, light_manifest(0).weights_digest, ids, 0, 0.0, 1.0)
            answer = await client.heartbeat(beat)
            assert answer.known and answer.cancelled_leases == ()
            assert (await client.status()).groups_leased == 2
            for lease in reply.leases:
                verdict = await client.submit_group(sample_lease(lease, again.worker_id, 0))
                assert verdict.value == "accepted"

    asyncio.run(run())


def test_who_never_registers_again_keeps_no_lease_however_often_it_beats(tmp_path: Path) -> None:
    config = make_config(steps=2, lease_s=1.0, heartbeat_s=0.2)

    async def run() -> None:
        async with served(config, tmp_path) as site:
            client = site.client()
            await client.announce_snapshot(light_manifest(0))
            await client.open_step(1)
            worker = await client.register(hello())
            reply = await client.lease_group(LeaseRequest(worker.worker_id, 0, 2, 1.0))
            assert len(reply.leases) == 2
        async with served(config, tmp_path) as site:
            client = site.client()
            ids = tuple(lease.lease_id for lease in reply.leases)
            beat = WorkerHeartbeat(worker.worker_id, 0, light_manifest(0).weights_digest, ids, 0, 0.0, 1.0)
            async with asyncio.timeout(30.0):
                while (await client.status()).groups_leased:
                    assert not (await client.heartbeat(beat)).known

    asyncio.run(run())


def test_second_coordinator_is_refused_and_names_the_run(tmp_path: Path) -> None:
    config = make_config()
    (tmp_path / "config.yaml").write_text(dump_config(config))

    async def run() -> None:
        async with served(config, tmp_path) as site:
            machine = site.service.state_machine
            async with showing_life(machine.journal, machine.fail):
                process = await start_process(tmp_path, 0)
                output, _ = await asyncio.wait_for(process.communicate(), 60.0)
            assert machine.failure is None and process.returncode == ConfigError.exit_code
            assert b"run run-1 already has a coordinator" in output

    asyncio.run(run())


def test_changed_configuration_is_refused_on_restart(tmp_path: Path) -> None:
    async def run() -> None:
        async with served(make_config(max_staleness=2), tmp_path):
            pass
        with pytest.raises(ConfigError, match=r"loop\.max_staleness=1 differs from 2"):
            async with served(make_config(max_staleness=1), tmp_path):
                pass

    asyncio.run(run())


def test_pause_ends_when_the_run_is_started_again(tmp_path: Path) -> None:
    config = make_config(steps=2)

    async def run() -> None:
        async with served(config, tmp_path) as site:
            client = site.client()
            await client.open_step(0)
            await client.pause("the loss of step 0 is not a number")
            reply = await client.await_stage("reward", 0, 5.0)
            assert "the loss of step 0 is not a number" in reply.waiting_for
            assert (await client.status()).paused_reason == "the loss of step 0 is not a number"
        async with served(config, tmp_path) as site:
            assert (await site.client().status()).paused_reason == ""
            await run_parties(site.client(), config, seed=1)

    asyncio.run(run())


def test_sealing_goes_on_after_a_restart_between_judging_and_sealing(tmp_path: Path) -> None:
    config = make_config(steps=1, max_staleness=0, filter_="none")

    async def run() -> None:
        store = ArtifactStore(tmp_path / "store")
        journal = Journal(tmp_path / JOURNAL_NAME, RUN_ID)
        clock = asyncio.get_running_loop().time
        state_machine = RunStateMachine(config, RUN_ID, journal, store, LightPrompts(), clock)
        await state_machine.start()
        for task in state_machine._tasks:  # as if the process died right after the last rewards
            task.cancel()
        service = CoordinatorService(state_machine)
        parties = asyncio.ensure_future(run_parties(service, config, seed=1, limit_s=30.0))
        while (await service.status()).groups_ready < 3:
            await asyncio.sleep(0.01)
        parties.cancel()
        await asyncio.gather(parties, return_exceptions=True)
        await state_machine.close()
        async with served(config, tmp_path) as site:
            rewarding = asyncio.ensure_future(reward_all(site.service, np.random.default_rng(0)))
            reply = await site.client().await_stage("reward", 0, 10.0)
            rewarding.cancel()
            assert reply.batch is not None and reply.batch.groups == 3

    asyncio.run(run())


def test_a_run_does_not_continue_with_another_model(tmp_path: Path) -> None:
    """The name of its folder is the same, but its files are not."""

    class Prompts(LightPrompts):
        files: ClassVar = {MODEL_FILES: "a" * 64, ENVIRONMENT_FILES: "c" * 64}

    class OtherPrompts(LightPrompts):
        files: ClassVar = {MODEL_FILES: "b" * 64, ENVIRONMENT_FILES: "c" * 64}

    config = make_config(steps=1)

    async def open_with(prompts: LightPrompts) -> None:
        state_machine = RunStateMachine(
            config,
            RUN_ID,
            Journal(tmp_path / JOURNAL_NAME, RUN_ID),
            ArtifactStore(tmp_path / "store"),
            prompts,
            asyncio.get_running_loop().time,
        )
        try:
            await state_machine.start()
            # By this a reward service knows that it has the run's files.
            assert (await CoordinatorService(state_machine).status()).environment_digest == "c" * 64
        finally:
            await state_machine.close()

    asyncio.run(open_with(Prompts()))
    asyncio.run(open_with(Prompts()))
    with pytest.raises(ConfigError, match=r"digest of model\.path's files=b.* differs from a.*put it back"):
        asyncio.run(open_with(OtherPrompts()))
