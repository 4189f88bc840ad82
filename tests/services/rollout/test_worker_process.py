"""The real worker and judge processes: vLLM samples what the coordinator leases, and both leave cleanly."""

import asyncio
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from safetensors.torch import load_file

from antiphon.core.config import RunConfig, build_config, dump_config
from antiphon.core.records import BatchRef, SnapshotManifest, StepCommit
from antiphon.lineage.rollout_table import decode_batch
from antiphon.lineage.store.artifact_store import ArtifactStore
from antiphon.net.rpc.serving import start_server, stop_server
from antiphon.net.security.keys import SIGNATURE_BYTES, SigningKey, signing_key
from antiphon.net.worker_kit import DIGEST_BYTES, KIT_FILE, write_kit
from antiphon.services.coordinator.journal.journal import Journal
from antiphon.services.coordinator.prompts import load_prompts
from antiphon.services.coordinator.run_state_machine import RunStateMachine
from antiphon.services.coordinator.server import start_coordinator
from antiphon.services.coordinator.service import CoordinatorService
from antiphon.services.rollout.engine.environment import child_environment
from antiphon.weights.payload_store import PayloadStore
from antiphon.weights.rpc import SERVICE_NAME, register_broadcast
from antiphon.weights.signature import sign_manifest
from tests.support.snapshots import FarService, publish

pytestmark = pytest.mark.engine

PROJECT = Path(__file__).resolve().parents[3]
MODEL = PROJECT / "examples" / "models" / "chain-sum"
RUN_ID = "run-1"
DEADLINE_S = 240.0
LOOK_S = 0.05

WORKER = """
import sys
from pathlib import Path
from antiphon.system.processes import run_service
from antiphon.services.rollout.process import serve_worker
address, folder = sys.argv[1:]
ready = lambda: print("ready", flush=True)
sys.exit(run_service(lambda stop: serve_worker(address, "w0", "run-1", Path(folder), ready, stop=stop)))
"""
JUDGE = """
import asyncio, sys
from pathlib import Path
from antiphon.core.config import load_config
from antiphon.services.reward.server import serve_reward
address, folder = sys.argv[1:]
config = load_config(Path(folder) / "config.yaml")
ready = lambda port: print("ready", port, flush=True)
asyncio.run(serve_reward(config, "run-1", address, "127.0.0.1", 0, ready))
"""


def make_config(model: Path) -> RunConfig:
    return build_config(
        {
            "run": {"steps": 3},
            "model": {"path": str(model)},
            "environment": {"train_size": 8, "heldout_size": 4},
            "loop": {"mode": "fixed", "max_staleness": 1, "prompts_per_step": 2, "group_size": 4},
            "sampling": {"max_tokens": 24},
            "rollout": {"concurrent_groups": 2, "kv_cache_mib": 64, "max_model_tokens": 256},
            "broadcast": {"chunk_bytes": 100_000},
            "evaluation": {"prompts": 4},
        }
    )


class Origin:
    """Publishes the base model, a little louder in each version."""

    def __init__(self, folder: Path, signer: SigningKey) -> None:
        self._signer = signer
        self._store = PayloadStore(folder)
        self._port = 0
        self.server: grpc.aio.Server | None = None

    async def open(self) -> None:
        service = FarService(self._store)
        self.server, self._port = await start_server(
            "127.0.0.1", 0, lambda server: register_broadcast(server, service), [SERVICE_NAME]
        )

    def publish(self, version: int) -> SnapshotManifest:
        tensors = {
            name: tensor * (1.0 + 0.01 * version) if "norm" in name else tensor
            for name, tensor in load_file(MODEL / "model.safetensors").items()
        }
        tensors.pop("lm_head.weight", None)
        address = f"127.0.0.1:{self._port}"
        manifest = publish(self._store, tensors, version, run_id=RUN_ID, chunk_bytes=100_000, origin=address)
        manifest = sign_manifest(manifest, self._signer)
        self._store.put_manifest(manifest)
        return manifest


@asynccontextmanager
async def process(code: str, *arguments: str, log: Path) -> AsyncIterator["subprocess.Popen[bytes]"]:
    with log.open("wb") as output:
        child = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=child_environment(threads=1),
            cwd=log.parent,
        )
        try:
            yield child
        finally:
            child.kill()
            child.wait(timeout=30)


async def ended(child: "subprocess.Popen[bytes]") -> int:
    return await asyncio.to_thread(child.wait, 60)


async def batch_of(service: CoordinatorService, step: int) -> BatchRef:
    while True:
        reply = await service.await_stage("reward", step, 5.0)
        if reply.batch is not None:
            return reply.batch


async def story(folder: Path) -> None:
    """The worker's machine has no model: its folder is gone once coordinator and judge have read it."""
    model, key = folder / "model", signing_key(b"k" * 32)
    shutil.copytree(MODEL, model)
    config = make_config(model)
    (folder / "config.yaml").write_text(dump_config(config))
    store = ArtifactStore(folder / "store")
    clock = asyncio.get_running_loop().time
    state_machine = RunStateMachine(
        config, RUN_ID, Journal(folder / "journal.db", RUN_ID), store, load_prompts(config), clock
    )
    await state_machine.start()
    write_kit(model, RUN_ID, folder, key)
    service = CoordinatorService(state_machine, key.public, kit=folder / KIT_FILE)
    server, port = await start_coordinator(service, "127.0.0.1", 0)
    origin = Origin(folder / "origin", key)
    await origin.open()
    address = f"127.0.0.1:{port}"
    rewarding = process(JUDGE, address, str(folder), log=folder / "judge.log")
    sampling = process(WORKER, address, str(folder / "w0"), log=folder / "worker.log")
    async with asyncio.timeout(DEADLINE_S), rewarding as judge:
        while "ready" not in (folder / "judge.log").read_text(errors="replace"):
            assert judge.poll() is None
            await asyncio.sleep(LOOK_S)
        shutil.rmtree(model)
        async with sampling as worker:
            manifest = origin.publish(0)
            await service.announce_snapshot(manifest)
            await service.open_evaluation(0)
            for step in range(config.run.steps):
                await service.open_step(step)
                batch = await batch_of(service, step)
                for row in decode_batch(store.get(batch.digest)):
                    assert {span.version for span in row.spans} == {max(0, step - 1)}
                    assert row.spans[-1].stop == len(row.token_ids) <= 24
                if step == 0:
                    await check_what_it_fetched(state_machine, manifest, folder / KIT_FILE)
                manifest = origin.publish(step + 1)
                await service.commit_step(
                    StepCommit(step, step + 1, manifest.weights_digest, batch.digest, published=True)
                )
                await service.announce_snapshot(manifest)
            status = await service.status()
            assert [member.worker_id for member in status.workers] == ["w0-1"]
            assert status.workers[0].tokens_generated > 0
            worker.send_signal(signal.SIGTERM)
            assert await ended(worker) == 0
        await service.finish()
        assert await ended(judge) == 0
    log = (folder / "worker.log").read_text(errors="replace")
    places = [
        log.index(word) for word in ("worker_kit.unpacked", "worker.ready", "engine.tested", "weights.loaded")
    ]
    assert places == sorted(places)
    assert origin.server is not None
    await stop_server(origin.server)
    await stop_server(server, grace_s=0.0)
    await state_machine.close()


async def check_what_it_fetched(
    state_machine: RunStateMachine, manifest: SnapshotManifest, kit: Path
) -> None:
    """A kit and one snapshot, while there is one version alone."""
    member = state_machine.loop.fleet.get("w0-1")
    assert member is not None
    while not member.tokens_generated:  # what it fetched came with the same heartbeat
        await asyncio.sleep(LOOK_S)
    assert member.held_version == 0
    kit_bytes = kit.stat().st_size - SIGNATURE_BYTES - DIGEST_BYTES
    assert member.bytes_fetched == kit_bytes + manifest.payloads[0].payload_bytes and kit_bytes < 1 << 20
    assert member.numerics  # its engine tested itself, on the weights of version 0


def test_processes_sample_judge_and_leave_and_the_worker_needs_a_kit_and_one_snapshot(tmp_path: Path) -> None:
    try:
        asyncio.run(story(tmp_path))
    except BaseException:
        for name in ("worker.log", "judge.log"):
            if (tmp_path / name).exists():
                print(name, (tmp_path / name).read_text(errors="replace")[-4000:])
        raise
