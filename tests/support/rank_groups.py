"""A learner of several ranks, rank 0 in this process, on batches that are made up."""

from pathlib import Path
from typing import Any, Self

from antiphon.core.config import RunConfig
from antiphon.core.records import BatchRow
from antiphon.lineage.rollout_table import encode_batch
from antiphon.lineage.store.artifact_store import ArtifactStore
from antiphon.services.learner.checkpoints import CheckpointStore
from antiphon.services.learner.deepspeed_engine import pin_numerics
from antiphon.services.learner.ranks.followers import Followers
from antiphon.services.learner.saved import SavedFolder
from antiphon.services.learner.step import Trainer
from antiphon.services.learner.training import TrainedStep


class RankGroup:
    """A trainer and its followers, for a `with` statement; checkpoints stay in `folder`."""

    def __init__(self, folder: Path, config: RunConfig, elsewhere: Path | None = None) -> None:
        """Prepare; `elsewhere` is the folder of checkpoints as the followers see it."""
        self._folder, self._config, self._elsewhere = folder, config, elsewhere
        self._store = ArtifactStore(folder / "store")

    def __enter__(self) -> Self:
        checkpoints = CheckpointStore(self._folder / "checkpoints", 10)
        pin_numerics(self._config.learner.threads)
        self._followers = Followers(self._config, self._elsewhere or checkpoints.root, self._store.root)
        self.saved = SavedFolder(self._folder)
        self.trainer = Trainer(self._config, checkpoints, saved=self.saved)
        return self

    def __exit__(self, *_: Any) -> None:
        try:
            self.trainer.stop()
        finally:
            self._followers.close()

    @property
    def processes(self) -> list[Any]:
        """Return the processes of ranks 1 and up."""
        return list(self._followers.processes)

    def train(self, step: int, rows: list[BatchRow]) -> TrainedStep:
        return self.train_on(step, encode_batch(rows))

    def train_on(self, step: int, payload: bytes) -> TrainedStep:
        self._store.put(payload)
        return self.trainer.train(step, payload)
