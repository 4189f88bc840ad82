"""Recorder: what the loop reports, written to three places, while the loop waits for none of them.

Each call appends to the run log at once (microseconds) and queues the rest: the ledger's
entries on one thread, MLflow's on another. Opening a run again queues everything its log
holds; what was written before is skipped, so records lost in a crash are made up for.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from antiphon.core.config import RunConfig
from antiphon.core.errors import AntiphonError, IntegrityError, UnavailableError
from antiphon.core.records import BatchRef, SnapshotManifest, StepCommit
from antiphon.core.reporting.deliveries import VersionDeliveries
from antiphon.core.reporting.figures import FiguresFold, RunFigures
from antiphon.core.status import EvaluationRecord
from antiphon.lineage.documents.artifacts import run_document
from antiphon.lineage.documents.manifest import source_tree
from antiphon.lineage.documents.replay_copy import ReplayCopy
from antiphon.lineage.export import Export, export_version
from antiphon.lineage.layout import PUBLISH_ENTRIES, ledger_project
from antiphon.lineage.ledger.replay_pins import due, pin_checkpoint, pin_model
from antiphon.lineage.ledger.run_pins import pin_run_files
from antiphon.lineage.names import RUN, VERSIONS, version_entry
from antiphon.lineage.recording_cost import RecorderReport, Timed, summarise
from antiphon.lineage.retention import keeps_weights, recompute_note
from antiphon.lineage.rollout_table import count_workers
from antiphon.lineage.run_log import Plan, RunLog, kept_samples, now, replaced_batches
from antiphon.lineage.sequencer import Sequencer
from antiphon.lineage.store.artifact_store import open_store
from antiphon.lineage.tracking.tracker import Tracker
from antiphon.lineage.writer import Writer
from antiphon.system.files import write_atomically

if TYPE_CHECKING:
    from antiphon.lineage.ledger.document_pins import DocumentPins

PUBLISH_SHARE = 0.05
"""Publishing waits for this share of all entries, so that publishing stays cheap in long runs."""

_log = structlog.get_logger("antiphon.lineage")


@dataclass(frozen=True, slots=True)
class _Record:
    """One thing to write: in the ledger first, then in MLflow with the md5 that it got there."""

    label: str
    pin: Callable[["DocumentPins"], str] | None
    track: Callable[[Tracker, str | None], None] | None


class Recorder:
    """Records one run; calls may come from any thread and return at once."""

    def __init__(
        self,
        run_id: str,
        config: RunConfig,
        run_dir: Path,
        home: Path,
        store_root: Path,
        project: Path | None = None,
        payload_file: Callable[[SnapshotManifest], Path] | None = None,
        decode: Callable[[Iterable[int]], str] | None = None,
        begin: threading.Event | None = None,
    ) -> None:
        """Open the records of a run, continuing where an earlier process stopped.

        Args:
            run_id: the run.
            config: its resolved configuration; `record` says what is kept.
            run_dir: the run's directory; gets the run log, manifest.json and mlflow.json.
            home: holds MLflow's database and artifacts.
            store_root: root of the artifact store.
            project: the ledger's DVC project; by default the nearest above `home` or this folder. Without one
                the base, the best and the newest weights are kept in `run_dir`.
            payload_file: returns a version's policy file, checked; it is linked into store and ledger.
                Without it versions are pinned by their digests alone, not with their weights.
            decode: turns token ids into text, for the trajectories that MLflow shows; called by
                its writer. Without it no trajectories are shown.
            begin: the writers wait until it is set (see `Writer`).
        """
        self._run_id = run_id
        self._config = config
        self._store = open_store(store_root, config.record)
        self._payload_file = payload_file
        self._project = ledger_project(config.record, home, project)
        self._run_dir = run_dir
        self._timed = Timed()
        self._batches: dict[int, BatchRef] = {}
        self._log = RunLog(run_dir)
        self._figures = FiguresFold(config)
        self._pins: DocumentPins | None = None
        self._order: Sequencer[_Record] = Sequencer()
        self._ledger_writer = Writer("ledger", begin=begin) if self._project else None
        self._tracker: Tracker | None = None
        if config.record.mlflow:
            export = self._export if self._project is not None else None
            self._tracker = Tracker(
                run_dir, home, run_id, config, self._store, self._log, decode, export=export, begin=begin
            )
        self._open()

    def record_base(self, manifest: SnapshotManifest) -> None:
        """Record version 0, the model the run starts from."""
        with self._timed:
            self._pin_weights(manifest)  # first, so that a version that is known has its weights
            self._tell_base(self._log.add_base(manifest.weights_digest))

    def record_batch(self, batch: BatchRef) -> None:
        """Record a sealed batch: its two files in the ledger, a dataset in MLflow."""
        with self._timed:
            self._batches[batch.step] = batch
            profile = {
                "trajectories": batch.trajectories,
                "groups": batch.groups,
                "tokens": batch.tokens,
                "reward_mean": batch.reward_mean,
                "staleness_histogram": {str(k): v for k, v in sorted(batch.staleness_histogram.items())},
                **replaced_batches(batch),
                **kept_samples(batch),
            }
            self._tell_batch(batch.step, batch.digest, batch.timings_digest, profile, now())

    def record_version(self, commit: StepCommit, manifest: SnapshotManifest | None, aim: Plan = None) -> None:
        """Record a committed step, its plan, and the version it made, with its weights when published."""
        with self._timed:
            batch = self._batches.pop(commit.step, None)
            line = self._log.add_step(commit, batch, self._workers(batch), aim)
            self._figures.add(line)
            if manifest is not None:
                self._pin_weights(manifest)
            self._tell_step(line)
            self._pin_checkpoint(commit.version)

    def has_step(self, step: int) -> bool:
        """Tell whether a step was recorded, by this process or an earlier one."""
        return step in self._log.steps

    def record_weights(self, manifest: SnapshotManifest) -> None:
        """Pin the weights of a version that was published after it was recorded."""
        with self._timed:
            self._pin_weights(manifest)

    def record_evaluation(self, evaluation: EvaluationRecord) -> None:
        """Record the held-out score of a version; an incomplete one is left for later."""
        with self._timed:
            if evaluation.complete:
                self._tell_evaluation(self._log.add_evaluation(evaluation))
                self._remove_superseded()

    def record_end(self, events: bytes) -> None:
        """Pin what others need to look at a finished run, the packed events of its journal among it."""
        run_dir = self._run_dir

        def pin(pins: "DocumentPins") -> str:
            pin_run_files(pins.ledger, run_dir, events)
            return ""

        with self._timed:
            if self._ledger_writer is not None:
                self._queue([*self._order.release(), _Record("run files", pin, None)])

    def attach(
        self, path: Path, plots: Mapping[str, str] | None = None, versions: Sequence[VersionDeliveries] = ()
    ) -> None:
        """Attach the report to MLflow, its plots (name -> SVG), and how versions came to the workers."""
        with self._timed:
            if self._tracker is not None:
                self._tracker.attach(path, plots)
                self._tracker.deliveries(versions)

    def figures(self) -> RunFigures:
        """Return the run's figures up to the last step that was recorded without a gap."""
        with self._timed.lock:
            held = sorted(self._log.evaluations.items())
            return self._figures.figures([line for _, line in held])

    def report(self) -> RecorderReport:
        """Return what recording cost so far."""
        return summarise(self._timed.milliseconds, [writer.report() for writer in self._writers])

    def flush(self, timeout_s: float) -> RecorderReport:
        """Wait up to `timeout_s` until everything recorded so far is written; publish the ledger."""
        deadline = time.perf_counter() + timeout_s
        with self._timed.lock:
            self._queue(self._order.release())
        if self._ledger_writer is not None:
            self._ledger_writer.put("publish", self._publish)
        for writer in self._writers:
            writer.flush(max(0.0, deadline - time.perf_counter()))
        return self.report()

    def close(self, timeout_s: float) -> RecorderReport:
        """Write what is left, for at most `timeout_s` seconds, and stop; names what is missing."""
        deadline, writers = time.perf_counter() + timeout_s, []
        with self._timed.lock:
            self._queue(self._order.release())
        if self._ledger_writer is not None:
            self._ledger_writer.put("close", self._close_ledger)
            writers.append(self._ledger_writer.close(timeout_s))
        if self._tracker is not None:
            self._tracker.end()
            writers.append(self._tracker.mlflow.close(max(1.0, deadline - time.perf_counter())))
        report = summarise(self._timed.milliseconds, writers)
        if not report.complete:
            reasons = [reason for writer in report.writers for reason in writer.failures[-3:]]
            _log.warning("record.incomplete", run=self._run_id, reasons=reasons)
        return report

    def _workers(self, batch: BatchRef | None) -> dict[str, int]:
        """Return how many trajectories of a batch each worker sampled; {} when that cannot be read."""
        if batch is None:
            return {}
        try:
            return count_workers(self._store.get(batch.timings_digest))
        except (IntegrityError, UnavailableError) as error:
            # Records do without it; what needs the file says what is wrong with it.
            _log.warning("record.workers_unknown", step=batch.step, reason=str(error))
            return {}

    def _open(self) -> None:
        # The manifest asks git and the machine: on the writers' side of the queue.
        if self._ledger_writer is not None:
            self._ledger_writer.put("ledger", self._open_ledger)
        else:
            (self._run_dir / VERSIONS).mkdir(exist_ok=True)
            manifest = run_document(self._config, self._run_id, source_tree(), lambda _: None)
            write_atomically(self._run_dir / RUN, manifest)
        if self._log.base is not None:
            self._tell_base(self._log.base)
        for line in self._log.steps.values():
            if line["batch"] is not None:
                timings = line["timings"]
                files = (line["batch_digest"], timings["timings_digest"])
                self._tell_batch(line["step"], *files, line["batch"], timings["at"])
            self._figures.add(line)
            self._tell_step(line)
        for line in self._log.evaluations.values():
            self._tell_evaluation(line)
        self._remove_superseded()

    def _open_ledger(self) -> None:
        # DVC's import belongs on the writer's thread too.
        from antiphon.lineage.ledger.document_pins import DocumentPins
        from antiphon.lineage.ledger.pins import Ledger

        if self._project is None:
            return
        folder, kept = self._config.record.ledger, self._config.record.keep_ledger
        ledger = Ledger(self._project, folder, self._run_id, kept=kept)
        self._pins = DocumentPins(ledger, self._store, self._run_id)
        self._pins.run(self._config, self._run_dir / RUN)
        pin_model(ledger, self._config.model.path)

    def _export(self, version: int, folder: Path) -> Export | None:
        """Write a version as a Hugging Face folder; None when its weights were not pinned."""
        if self._project is None:
            return None
        copy = ReplayCopy(self._project / self._config.record.ledger / self._run_id)
        return export_version(copy, version, folder, link=True) if version in copy.published() else None

    def _tell_base(self, line: Mapping[str, Any]) -> None:
        self._tell(0, self._policy(0, line, step=0), completes=True)

    def _tell_batch(
        self, step: int, digest: str, timings_digest: str, profile: Mapping[str, Any], at: float
    ) -> None:
        record = _Record(
            f"batch-t{step:06d}",
            lambda pins: pins.batch(step, digest, timings_digest, profile),
            lambda tracker, md5: tracker.batch(step, digest, timings_digest, profile, at, md5),
        )
        # Its document names the versions that sampled it, the newest being the one made before.
        self._tell(step + 1, record)

    def _tell_step(self, line: Mapping[str, Any]) -> None:
        step, version = int(line["step"]), int(line["version"])
        self._tell(version, self._policy(version, line, step), completes=True)
        self._tell(version, _Record(f"step {step}", None, lambda tracker, _: tracker.step(line)))

    def _policy(self, version: int, line: Mapping[str, Any], step: int) -> "_Record":
        return _Record(
            f"version {version}",
            lambda pins: pins.version(version, {**line, **recompute_note(version, self._config)}),
            lambda tracker, md5: tracker.version(version, line, step, md5),
        )

    def _tell_evaluation(self, line: Mapping[str, Any]) -> None:
        version = int(line["version"])
        record = _Record(
            f"evaluation {version}",
            lambda pins: pins.evaluation(version, line),
            lambda tracker, _: tracker.evaluation(line),
        )
        self._tell(version + 1, record)

    def _pin_weights(self, manifest: SnapshotManifest) -> None:
        payload_file = self._payload_file
        if payload_file is None:
            return
        if self._project is None:
            self._keep_weights(manifest, payload_file)
            return
        rel, config, scores = version_entry(manifest.version, "safetensors"), self._config, self._scores()

        def pin(pins: "DocumentPins") -> str:
            from antiphon.lineage.ledger.superseded import is_superseded

            known = pins.ledger.md5(rel)
            if known is not None:
                return known
            if is_superseded(pins.ledger, manifest.version, scores, config):
                return ""
            try:
                digest = self._store.take(payload_file(manifest))
            except UnavailableError as error:
                # Payloads leave when newer snapshots come; waiting would not bring them back.
                raise IntegrityError(
                    f"the weights of version {manifest.version} were gone before they were pinned: {error}"
                ) from error
            return pins.ledger.append(rel, self._store.path(digest))

        self._queue([_Record(f"weights {manifest.version}", pin, None)])
        self._remove_superseded()

    def _keep_weights(
        self, manifest: SnapshotManifest, payload_file: Callable[[SnapshotManifest], Path]
    ) -> None:
        """Keep weights in the run's own folder, where there is no ledger for them."""
        path = self._run_dir / version_entry(manifest.version, "safetensors")
        try:
            found = payload_file(manifest)
            with suppress(FileExistsError):
                path.hardlink_to(found)
        except (UnavailableError, OSError) as error:
            _log.warning("record.weights_not_kept", version=manifest.version, reason=str(error))
        self._remove_superseded()

    def _remove_superseded(self) -> None:
        """Queue that weights which newer versions or better scores superseded leave the ledger."""
        config, scores = self._config, self._scores()
        if self._project is None:
            kept = {int(path.stem[1:]): path for path in self._run_dir.glob("versions/v*.safetensors")}
            bare = config.model_copy(update={"record": config.record.model_copy(update={"weights": "last"})})
            for version, path in kept.items():
                if not keeps_weights(version, max(kept), scores, bare):
                    path.unlink()
            return
        if config.record.weights == "all":
            return

        def remove(pins: "DocumentPins") -> str:
            from antiphon.lineage.ledger.superseded import remove_superseded

            remove_superseded(pins.ledger, self._store, self._run_id, scores, config)
            return ""

        self._queue([_Record("superseded weights", remove, None)])

    def _scores(self) -> dict[int, float]:
        return {version: float(line["reward_mean"]) for version, line in self._log.evaluations.items()}

    def _pin_checkpoint(self, version: int) -> None:
        interval, stride = self._config.learner.checkpoint_interval, self._config.record.checkpoint_stride
        if due(version, interval, stride):
            label, folder = f"checkpoint {version}", self._run_dir / "checkpoints"
            self._queue([_Record(label, lambda p: pin_checkpoint(p.ledger, folder, version), None)])

    def _tell(self, number: int, record: "_Record", *, completes: bool = False) -> None:
        self._queue(self._order.add(number, record, completes=completes))

    def _queue(self, records: Iterable["_Record"]) -> None:
        for record in records:
            if self._ledger_writer is not None:
                self._ledger_writer.put(record.label, partial(self._write, record))
            else:
                self._track(record, None)

    def _write(self, record: "_Record") -> None:
        """Pin first, so that MLflow can name the md5; track even when pinning failed for good."""
        md5 = None
        try:
            if record.pin is not None and self._pins is not None:
                md5 = record.pin(self._pins)
                self._publish_when_due()
        except UnavailableError:
            raise  # tried again
        except AntiphonError:
            self._track(record, None)
            raise
        self._track(record, md5)

    def _track(self, record: "_Record", md5: str | None) -> None:
        if self._tracker is not None and record.track is not None:
            record.track(self._tracker, md5)

    def _publish_when_due(self) -> None:
        ledger = self._pins.ledger if self._pins else None
        if ledger is not None and ledger.unpublished >= max(PUBLISH_ENTRIES, PUBLISH_SHARE * len(ledger)):
            ledger.publish()

    def _publish(self) -> None:
        if self._pins is not None and self._pins.ledger.unpublished:
            self._pins.ledger.publish()

    def _close_ledger(self) -> None:
        if self._pins is not None:
            self._pins.ledger.close()

    @property
    def _writers(self) -> list[Writer]:
        tracker = self._tracker.mlflow if self._tracker is not None else None
        return [writer for writer in (self._ledger_writer, tracker) if writer is not None]
