"""Opening: the production learner from its parts: DeepSpeed trains, folders keep what it made."""

from pathlib import Path

from antiphon.core.config import RunConfig
from antiphon.lineage.store.artifact_store import ArtifactStore
from antiphon.services.broadcast.chunk_store import ChunkStore
from antiphon.services.coordinator.api import Coordinator
from antiphon.services.learner.checkpoints import CheckpointStore
from antiphon.services.learner.deepspeed_engine import pin_numerics
from antiphon.services.learner.publish import SnapshotPublisher
from antiphon.services.learner.service import LearnerService
from antiphon.services.learner.step import Trainer
from antiphon.services.security.keys import SigningKey


def open_learner(
    config: RunConfig,
    run_id: str,
    run_dir: Path,
    store: ArtifactStore,
    chunks: ChunkStore,
    coordinator: Coordinator,
    signer: SigningKey | None = None,
    audits: bool = False,
) -> LearnerService:
    """Return the learner of one run; its engine is made by `restore`.

    Args:
        config: the run's configuration.
        run_id: goes into the manifests.
        run_dir: holds checkpoints/.
        store: where the batches are.
        chunks: the origin's store.
        coordinator: the run's coordinator, or a client of it.
        signer: signs manifests and the lists of checkpoint files; a checkpoint that it did not sign is
            never opened. None signs nothing and believes every list.
        audits: tell the coordinator whose logprobs differ from the learner's own.
    """
    loop = config.loop
    publisher = SnapshotPublisher(
        run_id,
        chunks,
        config.broadcast.chunk_bytes,
        config.broadcast.snapshots_kept,
        waiting_limit=loop.max_staleness // loop.publish_interval + 2,
        signer=signer,
    )
    checkpoints = CheckpointStore(run_dir / "checkpoints", config.learner.checkpoints_kept, signer)
    threads = config.learner.threads
    return LearnerService(
        config,
        Trainer(config, checkpoints),
        publisher,
        store,
        coordinator,
        prepare=lambda: pin_numerics(threads),
        audits=audits,
    )
