"""Learner over gRPC, the answering side, and the process that trains, with the origin beside it."""

import asyncio
import os
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from antiphon.api.coordinator import Coordinator
from antiphon.api.learner import Learner
from antiphon.core.client_records import CLIENT
from antiphon.core.config import RunConfig
from antiphon.core.ranks.memory import trained_parameters
from antiphon.core.status import LearnerProgress
from antiphon.lineage.cursors import recorded_version
from antiphon.lineage.store.artifact_store import ArtifactStore, open_store
from antiphon.models.codec import HUB_NAME, local_model_directory, model_folder
from antiphon.models.spared_libraries import spare_unused_libraries
from antiphon.net.rpc.calls import serve_contract
from antiphon.net.rpc.serving import Security, start_server, stop_server
from antiphon.net.security.credentials import (
    Credentials,
    learner_signer,
    lets_others_in,
    needed_token_key,
)
from antiphon.net.security.guard import Guard
from antiphon.net.security.keys import SigningKey
from antiphon.net.wire import LEARNER, LEARNER_CALLS
from antiphon.net.worker_kit import write_kit
from antiphon.services.coordinator.client import CoordinatorClient
from antiphon.services.learner.service import LearnerService
from antiphon.system.clock import wall_clock
from antiphon.system.collecting import collect_as_usual
from antiphon.system.processes import StopRequest
from antiphon.weights.origin import OriginOrder, serving_origin
from antiphon.weights.payload_store import PAYLOADS, PayloadStore

OpenLearner = Callable[[RunConfig, str, Path, ArtifactStore, PayloadStore, Coordinator], LearnerService]
"""As `open_learner`."""
TELL_S = 1.0
"""Pause between two reports of a learner that restores."""
SERVICE_NAME = "antiphon.Learner"
"""Full name of the service, for the health check."""


def register_learner(server: Any, service: Learner) -> None:
    """Add the service to a server that was not started yet."""
    serve_contract(server, LEARNER, LEARNER_CALLS, service)


def open_learner(
    config: RunConfig,
    run_id: str,
    run_dir: Path,
    store: ArtifactStore,
    payloads: PayloadStore,
    coordinator: Coordinator,
    signer: SigningKey | None = None,
    audits: bool = False,
    remote: bool = False,
) -> LearnerService:
    """Return the production learner of one run; its engine is made by `restore`.

    The batches are in `store`, checkpoints in a folder of `run_dir`; `payloads` is the origin's store. The
    `signer` signs manifests and the lists of checkpoint files, and a checkpoint that it did not sign is
    never opened; None signs nothing and believes every list. With `audits` the coordinator learns
    whose logprobs differ from the learner's own. `remote`: workers may sit on other machines.
    """
    spare_unused_libraries()
    # torch and DeepSpeed: only for who trains with them
    from antiphon.services.learner.checkpoints import CheckpointStore
    from antiphon.services.learner.client_calls import ClientCalls
    from antiphon.services.learner.deepspeed_engine import pin_numerics
    from antiphon.services.learner.earlier_policies import stored_policies, versions_to_keep
    from antiphon.services.learner.publish import SnapshotPublisher, payload_choice
    from antiphon.services.learner.saved import SavedFolder
    from antiphon.services.learner.snapshot_model import SnapshotModel
    from antiphon.services.learner.step import Trainer
    from antiphon.system.free_space import SpaceFloor

    driven = config.environment.name == CLIENT
    saved = SavedFolder(run_dir, signer)
    checkpoints = CheckpointStore(
        run_dir / "checkpoints",
        config.learner.checkpoints_kept,
        signer,
        recorded=partial(recorded_version, run_dir),
    )
    stale = config.loop.max_staleness if config.scores_earlier else 0
    publisher = SnapshotPublisher(
        run_id,
        payloads,
        config.broadcast.chunk_bytes,
        config.broadcast.snapshots_kept,
        signer,
        SpaceFloor(run_dir, config.record.free_bytes),
        payload_choice(config.broadcast, remote, config.learner.threads * config.learner.ranks),
        recorded=partial(recorded_version, run_dir),
        trained=partial(trained_parameters, config.learner),
        pinned=saved.pinned if driven else partial(versions_to_keep, checkpoints.versions, stale),
    )
    threads, earlier = config.learner.threads, stored_policies(config, payloads)
    trainer = Trainer(config, checkpoints, saved=saved, earlier=earlier)
    model = SnapshotModel(config, payloads)
    return LearnerService(
        config,
        trainer,
        publisher,
        store,
        coordinator,
        prepare=lambda: pin_numerics(threads),
        audits=audits,
        client=ClientCalls(run_dir, trainer, saved, model) if driven else None,
    )


async def serve_learner(
    config: RunConfig,
    run_id: str,
    run_dir: Path,
    store_root: Path,
    coordinator_address: str,
    host: str,
    port: int,
    ready: Callable[[int], None],
    open_service: OpenLearner | None = None,
    credentials: Credentials | None = None,
    signer: SigningKey | None = None,
    stop: StopRequest | None = None,
    starting: Callable[[LearnerProgress], None] = lambda progress: None,
) -> None:
    """Train for one run, and have its snapshots served, until the process is asked to stop.

    The learner listens at once and announces the stored snapshots from its own address; calls wait while
    it returns to the coordinator's committed version, and only then it is ready. Until then `starting`
    is told about once a second how far it is.

    Port 0 picks a free one; `ready` is called with it. By default DeepSpeed trains, and the key in
    the run's folder signs manifests and checkpoints. Without `credentials`, the services' bundle, it
    serves without encryption, on loopback alone.

    Raises:
        ConfigError: when the model, a checkpoint's settings or the port cannot be used.
        IntegrityError: when repeated steps give other digests than the committed ones.
        UnavailableError: when the coordinator is away for longer than services.stall_timeout_s.
    """
    remote = lets_others_in(credentials)
    audits = config.trust.audits == "all" or (config.trust.audits == "remote" and remote)
    if open_service is None:
        signer = signer or learner_signer(run_dir, None)
        open_service = partial(open_learner, signer=signer, audits=audits, remote=remote)
    leave = asyncio.Event()
    if stop is not None:
        stop.tell(leave.set)
    payloads = PayloadStore(run_dir / PAYLOADS)
    payloads.remove_leftovers()
    order = OriginOrder(
        str(payloads.root),
        run_id,
        host,
        config.broadcast.origin_port,
        config.broadcast.uplink_bytes_per_s,
        config.services.start_timeout_s,
        config.broadcast.object_store,
        config.broadcast.object_endpoint,
        config.broadcast.lattica_port,
    )
    security = None
    if credentials is not None:
        guard = Guard(needed_token_key(credentials), run_id, wall_clock, asyncio.get_running_loop().time)
        security = Security(credentials, guard)
    async with AsyncExitStack() as serving:

        def begin(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
            task = asyncio.create_task(work)
            serving.callback(task.cancel)
            return task

        coordinator = CoordinatorClient(coordinator_address, credentials=credentials)
        serving.push_async_callback(coordinator.close)
        store = open_store(store_root, config.record)
        service = open_service(config, run_id, run_dir, store, payloads, coordinator)
        serving.push_async_callback(service.close)
        origin_port = await serving.enter_async_context(serving_origin(order, credentials))
        service.origin = f"{config.services.address or host}:{origin_port}"
        server, bound = await start_server(
            host, port, lambda s: register_learner(s, service), [SERVICE_NAME], security
        )
        serving.push_async_callback(stop_server, server)
        leaving = begin(leave.wait())
        working = begin(_take_up(service, partial(make_kit, config, run_id, run_dir, signer)))
        while not (working.done() or leave.is_set()):
            await asyncio.wait({working, leaving}, timeout=TELL_S, return_when=asyncio.FIRST_COMPLETED)
            starting((await service.status()).progress)
        if leave.is_set():
            return
        await working
        begin(service.keep_announced())
        if audits:
            from antiphon.services.learner.audits.audit_loop import audit_forever
            from antiphon.services.learner.audits.auditor import Auditor  # torch again

            begin(audit_forever(coordinator, Auditor(config, payloads).examine, f"learner-{os.getpid()}"))
        collect_as_usual()  # everything is loaded; tensors in cycles are not to be kept for long
        ready(bound)
        await leaving


def make_kit(config: RunConfig, run_id: str, run_dir: Path, signer: SigningKey | None) -> None:
    """Put what workers without the model's folder need into the run's folder; the model is here by now."""
    folder = model_folder(config.model.path)
    if folder is None and HUB_NAME.fullmatch(config.model.path):
        folder = local_model_directory(config.model.path)
    if folder is not None:
        write_kit(folder, run_id, run_dir, signer)


async def _take_up(service: LearnerService, kit: Callable[[], None]) -> None:
    await service.restore()
    await asyncio.to_thread(kit)
    await service.publish_again()
