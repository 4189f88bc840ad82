"""Ledger sink: pins what the log says in the DVC-tracked ledger, files first and documents after them.

Weights that newer versions or better scores superseded leave the ledger while the run goes on. What a
process did not finish the next one does: entries that are there are left as they are.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from antiphon.api.policy_file import policy_facts
from antiphon.api.sink import LogRecord, RunEnd, SinkRun
from antiphon.core.config import RunConfig
from antiphon.core.digests import digest_file
from antiphon.core.errors import IntegrityError, UnavailableError
from antiphon.lineage.documents.replay_copy import ReplayCopy
from antiphon.lineage.export import Export, export_version
from antiphon.lineage.layout import PUBLISH_ENTRIES
from antiphon.lineage.ledger.replay_pins import due, pin_checkpoint, pin_model
from antiphon.lineage.ledger.run_pins import pin_run_files
from antiphon.lineage.names import RUN, version_entry, version_of_weights
from antiphon.lineage.retention import is_anchor, keeps_weights, recompute_note
from antiphon.lineage.run_log import read_evaluations
from antiphon.lineage.store.artifact_store import ArtifactStore

if TYPE_CHECKING:
    from antiphon.lineage.ledger.document_pins import DocumentPins
    from antiphon.lineage.ledger.pins import Ledger

_log = structlog.get_logger("antiphon.lineage")

PUBLISH_SHARE = 0.05
"""Publishing waits for this share of all entries, so that publishing stays cheap in long runs."""

WeightsFile = Callable[[int], Path]
"""Returns the policy file of a published version, checked."""


class LedgerSink:
    """The ledger of one run."""

    name = "ledger"

    def __init__(
        self,
        run: SinkRun,
        project: Path,
        store: ArtifactStore,
        weights_file: WeightsFile | None,
        late: Callable[[], bool] = lambda: False,
    ) -> None:
        """Prepare to pin in the DVC project at `project`.

        Without a `weights_file` versions are pinned by their digests alone, not with their weights. A ledger
        is `late` that follows a run which went on without it: weights that left meanwhile are not missed.
        """
        self._run, self._config = run, run.config
        self._project, self._store, self._weights_file = project, store, weights_file
        self._late = late
        self._scores: dict[int, float] = {}
        self._pins: DocumentPins | None = None

    @property
    def place(self) -> str:
        """The ledger's folder; empty while nothing of the run's records is in it."""
        if self.md5(version_entry(0)) is None:
            return ""
        return str(self._opened().ledger.directory)

    def open(self) -> None:
        """Open the ledger, and pin what the run starts from."""
        # DVC's import belongs on the follower's thread.
        from antiphon.lineage.ledger.document_pins import DocumentPins
        from antiphon.lineage.ledger.pins import Ledger

        record, run_dir = self._config.record, self._run.run_dir
        ledger = Ledger(self._project, record.ledger, self._run.run_id, kept=record.keep_ledger)
        pins = DocumentPins(ledger, self._store, self._run.run_id)
        try:
            pins.run(self._config, run_dir / RUN)
            pin_model(ledger, self._config.model.path)
        except BaseException:  # it is opened again
            ledger.release()
            raise
        self._scores = {int(line["version"]): line["reward_mean"] for line in read_evaluations(run_dir)}
        self._pins = pins

    def write(self, records: Sequence[LogRecord]) -> None:
        """Pin what records say."""
        pins = self._opened()
        for record in records:
            number, line = record.number, record.line
            match record.kind:
                case "snapshot.announced":
                    self._pin_weights(pins, number)
                    if number == 0:
                        pins.version(0, line)
                case "step.committed":
                    if (batch := line["batch"]) is not None:
                        pins.batch(number, line["batch_digest"], line["timings"]["timings_digest"], batch)
                    version = int(line["version"])
                    pins.version(version, {**line, **recompute_note(version, self._config)})
                    learner, stride = self._config.learner, self._config.record.checkpoint_stride
                    if due(version, learner.checkpoint_interval, stride):
                        pin_checkpoint(pins.ledger, self._run.run_dir / "checkpoints", version)
                case "evaluation.finished":
                    self._scores[number] = line["reward_mean"]
                    pins.evaluation(number, line)
            if pins.ledger.unpublished >= max(PUBLISH_ENTRIES, PUBLISH_SHARE * len(pins.ledger)):
                pins.ledger.publish()
        if any(record.kind != "step.committed" for record in records):
            self._remove_superseded(pins)

    def close(self, end: RunEnd) -> None:
        """Publish all entries, of a finished run with its own files."""
        pins = self._opened()
        self._remove_superseded(pins)
        if end.events:
            pin_run_files(pins.ledger, self._run.run_dir, end.events)
        pins.ledger.close()

    def release(self) -> None:
        """Let go of the ledger without what is left to publish; the next process does it."""
        if self._pins is not None:
            self._pins.ledger.release()

    def md5(self, rel: str) -> str | None:
        """Return the md5 under which an entry is pinned, or None; from any thread."""
        return None if self._pins is None else self._pins.ledger.md5(rel)

    def export(self, version: int, folder: Path) -> Export | None:
        """Write a version as a Hugging Face folder; None when its weights were not pinned."""
        copy = ReplayCopy(self._project / self._config.record.ledger / self._run.run_id)
        return export_version(copy, version, folder, link=True) if version in copy.published() else None

    def _opened(self) -> "DocumentPins":
        assert self._pins is not None, "the follower opens a sink first"
        return self._pins

    def _pin_weights(self, pins: "DocumentPins", version: int) -> None:
        rel = version_entry(version, "safetensors")
        if self._weights_file is None or pins.ledger.md5(rel) is not None:
            return
        if is_superseded(pins.ledger, version, self._scores, self._config):
            return
        try:
            path = self._weights_file(version)
        except UnavailableError as error:
            if self._late():
                _log.info("record.weights_not_kept", version=version, reason=str(error))
                return
            # What left the payload store does not come back.
            raise IntegrityError(
                f"the weights of version {version} were gone before they were pinned: {error}"
            ) from error
        pins.ledger.append(rel, self._store.path(self._store.take(path)))

    def _remove_superseded(self, pins: "DocumentPins") -> None:
        if self._config.record.weights == "all":
            return
        remove_superseded(pins.ledger, self._store, self._run.run_id, self._scores, self._config)


def is_superseded(ledger: "Ledger", version: int, scores: Mapping[int, float], config: RunConfig) -> bool:
    """Return whether the weights of a version need not enter the ledger any more; `scores` by version."""
    if is_anchor(version, config):
        return False
    newest = max([version, *_held(ledger)])
    return not keeps_weights(version, newest, scores, config)


def remove_superseded(
    ledger: "Ledger", store: ArtifactStore, run_id: str, scores: Mapping[int, float], config: RunConfig
) -> None:
    """Take superseded weights out of the ledger, DVC's cache and the store, oldest first.

    What a killed process began to take away goes too. A file that does not say it is of this run may be
    another run's as well: only its place in the ledger goes, the rest is left to `antiphon gc`.

    Raises:
        UnavailableError: when there is no space left for the ledger's journal or tree.
    """

    def release(path: Path) -> bool:
        if policy_facts(path).get("run") != run_id:
            return False
        store.discard(digest_file(path))
        return True

    held = sorted(_held(ledger))
    gone = [version for version in held if not keeps_weights(version, held[-1], scores, config)]
    ledger.remove([version_entry(version, "safetensors") for version in gone], release)


def _held(ledger: "Ledger") -> list[int]:
    return [version for rel in ledger if (version := version_of_weights(rel)) is not None]
