"""Ledger sink: pins what the log says in the DVC-tracked ledger, files first and documents after them.

Every document is an object of the store under its digest and an entry of the ledger under its name. Weights
that newer versions or better scores superseded leave the ledger while the run goes on. What a process did
not finish the next one does: entries that are there are left as they are.

Version 0 and all batches are enough to execute a run again, with the model's own configuration beside them;
a checkpoint now and then spares a replay of late steps the early ones. From the files of a finished run its
folder can be made again on any machine: `report`, `status` and the others then say the same there.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from antiphon.api.policy_file import policy_facts
from antiphon.api.sink import LogRecord, RunEnd, SinkRun
from antiphon.core.config import RunConfig
from antiphon.core.digests import digest_file
from antiphon.core.errors import IntegrityError, UnavailableError
from antiphon.lineage import names
from antiphon.lineage.client_steps import loads_weights
from antiphon.lineage.documents.graph import (
    build_document,
    line_facts,
    model_files,
    origin_facts,
    run_document,
)
from antiphon.lineage.documents.manifest import build_manifest, source_tree
from antiphon.lineage.documents.replay_copy import ReplayCopy
from antiphon.lineage.export import Export, export_version
from antiphon.lineage.retention import due, is_anchor, keeps_weights, recompute_note
from antiphon.lineage.rollout_table import sampled_versions
from antiphon.lineage.run_events import EVENTS_FILE
from antiphon.lineage.run_log import read_evaluations
from antiphon.lineage.store.artifact_store import ArtifactStore
from antiphon.lineage.suite_records import PATTERN
from antiphon.system.files import write_atomically

if TYPE_CHECKING:
    from antiphon.lineage.ledger.pins import Ledger

_log = structlog.get_logger("antiphon.lineage")

PUBLISH_ENTRIES = 16
"""New entries after which the tree is published."""
PUBLISH_SHARE = 0.05
"""Publishing waits for this share of all entries, so that publishing stays cheap in long runs."""

WeightsFile = Callable[[int], Path]
"""Returns the policy file of a published version, checked."""
AdapterFile = Callable[[int], Path | None]
"""Returns the adapter that makes a published version, None for one without."""


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
        adapter_file: AdapterFile = lambda version: None,
    ) -> None:
        """Prepare to pin in the DVC project at `project`.

        Without a `weights_file` versions are pinned by their digests alone, not with their weights. A ledger
        is `late` that follows a run which went on without it: weights that left meanwhile are not missed.
        """
        self._run, self._config = run, run.config
        self._project, self._store, self._weights_file = project, store, weights_file
        self._late, self._adapter_file = late, adapter_file
        self._scores: dict[int, float] = {}
        self._ledger: Ledger | None = None

    @property
    def place(self) -> str:
        """The ledger's folder; empty while nothing of the run's records is in it."""
        return "" if self.md5(names.version_entry(0)) is None else str(self._opened().directory)

    def open(self) -> None:
        """Open the ledger, and pin what the run starts from."""
        from antiphon.lineage.ledger.pins import Ledger  # DVC's import belongs on the follower's thread

        record = self._config.record
        self._ledger = Ledger(self._project, record.ledger, self._run.run_id, kept=record.keep_ledger)
        try:
            self._pin_start(self._ledger)
        except BaseException:  # it is opened again
            self._ledger.release()
            self._ledger = None
            raise
        evaluations = read_evaluations(self._run.run_dir)
        self._scores = {int(line["version"]): line["reward_mean"] for line in evaluations}

    def write(self, records: Sequence[LogRecord]) -> None:
        """Pin what records say."""
        ledger = self._opened()
        for record in records:
            number, line = record.number, record.line
            facts = line_facts(self._run.run_id, line)
            match record.kind:
                case "snapshot.announced":
                    self._pin_weights(number)
                    if number == 0:
                        self._pin(names.version_entry(0), facts[names.version_entry(0)])
                case "step.committed":
                    if line["batch"] is not None:
                        self._pin_batch(number, line, facts[names.batch_entry(number)])
                    version = int(line["version"])
                    entry = names.version_entry(version)
                    self._pin(entry, facts[entry] | recompute_note(version, self._config))
                    learner, stride = self._config.learner, self._config.record.checkpoint_stride
                    # What a client loaded may be another run's, or be gone when the step is replayed.
                    loaded = line["batch"] is not None and loads_weights(
                        self._store.get(line["batch_digest"])
                    )
                    if loaded or due(version, learner.checkpoint_interval, stride):
                        pin_checkpoint(ledger, self._run.run_dir / "checkpoints", version)
                case "evaluation.finished":
                    self._scores[number] = line["reward_mean"]
                    self._pin_samples(names.evaluation_entry(number, "samples.parquet"), line)
                    self._pin(names.evaluation_entry(number), facts[names.evaluation_entry(number)])
            if ledger.unpublished >= max(PUBLISH_ENTRIES, PUBLISH_SHARE * len(ledger)):
                ledger.publish()
        if any(record.kind != "step.committed" for record in records):
            self._remove_superseded()

    def close(self, end: RunEnd) -> None:
        """Publish all entries, of a finished run with its own files; its events come last."""
        ledger, run_dir = self._opened(), self._run.run_dir
        self._remove_superseded()
        for path in run_dir.glob(PATTERN):  # a suite may be sampled long after the end
            if ledger.md5(rel := f"{names.RUN_FOLDER}/{path.name}") is None:
                ledger.append(rel, path.read_bytes())
        if end.events and ledger.md5(f"{names.RUN_FOLDER}/{EVENTS_FILE}") is None:
            for name in names.RUN_FILES:
                if (run_dir / name).is_file():
                    # Copies: a later command may write the run's folder again, and entries never change.
                    ledger.append(f"{names.RUN_FOLDER}/{name}", (run_dir / name).read_bytes())
            outcome = json.loads((run_dir / names.OUTCOME_FILE).read_bytes())
            outcome.pop("run_dir", None)  # a path of this machine
            ledger.append(
                f"{names.RUN_FOLDER}/{names.OUTCOME_FILE}",
                json.dumps(outcome, sort_keys=True).encode() + b"\n",
            )
            ledger.append(f"{names.RUN_FOLDER}/{EVENTS_FILE}", end.events)
        ledger.close()

    def release(self) -> None:
        """Let go of the ledger without what is left to publish; the next process does it."""
        if self._ledger is not None:
            self._ledger.release()

    def md5(self, rel: str) -> str | None:
        """Return the md5 under which an entry is pinned, or None; from any thread."""
        return None if self._ledger is None else self._ledger.md5(rel)

    def export(self, version: int, folder: Path) -> Export | None:
        """Write a version as a Hugging Face folder; None when its weights were not pinned."""
        copy = ReplayCopy(self._project / self._config.record.ledger / self._run.run_id)
        return export_version(copy, version, folder, link=True) if version in copy.published() else None

    def _opened(self) -> "Ledger":
        assert self._ledger is not None, "the follower opens a sink first"
        return self._ledger

    def _pin_start(self, ledger: "Ledger") -> None:
        """Pin what the run starts from, and its manifest: one in the run's folder says how it began."""
        config, kept, source = self._config, self._run.run_dir / names.RUN, source_tree()
        manifest = build_manifest(config, self._run.run_id, source)
        for rel, facts in origin_facts(config, manifest, model_files(Path(config.model.path))).items():
            self._pin(rel, facts)
        if not kept.exists():
            write_atomically(kept, run_document(config, self._run.run_id, source, self._digest_of))
        if ledger.md5(names.RUN) is None:
            self._append(names.RUN, kept.read_bytes())
        path = config.model.path
        folder = Path(path) if Path(path).is_dir() else source / path  # a model known by name only has none
        for name in names.MODEL_FILES:
            rel = f"{names.MODEL_FOLDER}/{name}"
            if (folder / name).is_file() and ledger.md5(rel) is None:
                # A copy, not a link: what lies in the model's folder is the user's and may change.
                ledger.append(rel, (folder / name).read_bytes())

    def _pin_batch(self, step: int, line: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Pin the files of a batch and its document."""
        digest = line["batch_digest"]
        self._opened().append(names.batch_entry(step, "parquet"), self._object(digest))
        timings = self._object(line["timings"]["timings_digest"])
        self._opened().append(names.batch_entry(step, "timings.parquet"), timings)
        self._pin_samples(names.batch_entry(step, "samples.parquet"), line["batch"])
        if self.md5(names.batch_entry(step)) is None:
            self._pin(names.batch_entry(step), facts, sampled_versions(self._store.get(digest)))

    def _pin_samples(self, rel: str, facts: Mapping[str, Any]) -> None:
        if digest := facts.get("samples_digest"):
            self._opened().append(rel, self._object(digest))

    def _pin(self, rel: str, facts: Mapping[str, Any], sampled: Iterable[int] = ()) -> None:
        if self.md5(rel) is None:
            self._append(rel, build_document(rel, facts, self._digest_of, sampled))

    def _append(self, rel: str, body: bytes) -> None:
        self._opened().append(rel, self._store.path(self._store.put(body)))

    def _digest_of(self, rel: str) -> str | None:
        """Return the digest of a pinned document; None without one."""
        path = self._opened().path(rel)
        return digest_file(path) if path is not None and path.is_file() else None

    def _object(self, digest: str) -> Path:
        if not self._store.has(digest):
            raise IntegrityError(f"object {digest} is not in {self._store.root}, so it cannot be pinned")
        return self._store.path(digest)

    def _pin_weights(self, version: int) -> None:
        rel, ledger = names.version_entry(version, names.WEIGHTS), self._opened()
        if self._weights_file is None or ledger.md5(rel) is not None:
            return
        if not is_anchor(version, self._config):
            newest = max([version, *_held(ledger)])
            if not keeps_weights(version, newest, self._scores, self._config):
                return
        try:
            path, adapter = self._weights_file(version), self._adapter_file(version)
        except UnavailableError as error:
            if self._late():
                _log.info("record.weights_not_kept", version=version, reason=str(error))
                return
            # What left the payload store does not come back.
            raise IntegrityError(
                f"the weights of version {version} were gone before they were pinned: {error}"
            ) from error
        if adapter is not None:  # first: what has its weights has its adapter too
            entry = names.version_entry(version, names.ADAPTER)
            ledger.append(entry, self._store.path(self._store.take(adapter)))
        ledger.append(rel, self._store.path(self._store.take(path)))

    def _remove_superseded(self) -> None:
        if self._config.record.weights != "all":
            remove_superseded(self._opened(), self._store, self._run.run_id, self._scores, self._config)


def pin_checkpoint(ledger: "Ledger", checkpoints: Path, version: int) -> str:
    """Pin a checkpoint of the learner's checkpoints; return the md5 of its list, empty when it is gone.

    The list of its digests comes last, so that half a checkpoint is never taken for a whole one. Files are
    pinned as they lie, so a checkpoint is read in the ledger exactly as in the learner's folder.
    """
    name = f"v{version:08d}"
    folder, contents = checkpoints / name, f"{names.CHECKPOINTS}/{name}/contents.json"
    known = ledger.md5(contents)
    if known is not None:
        return known
    if not (folder / "contents.json").is_file():
        _log.info("checkpoint.unpinned", version=version, reason="it has left the learner's checkpoints")
        return ""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in sorted(files, key=lambda path: path.name == "contents.json"):
        rel = f"{names.CHECKPOINTS}/{name}/{path.relative_to(folder).as_posix()}"
        if ledger.md5(rel) is None:
            ledger.append(rel, path)
    return ledger.md5(contents) or ""


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
    ledger.remove([names.version_entry(version, names.WEIGHTS) for version in gone], release)


def _held(ledger: "Ledger") -> list[int]:
    return [version for rel in ledger if (version := names.version_of_weights(rel)) is not None]
