"""Folder sink: where a run has no ledger, its own folder keeps its manifest and the weights that matter.

These are the base's, the best's and the newest's, linked to the published files.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import structlog

from antiphon.api.sink import LogRecord, RunEnd, SinkRun
from antiphon.core.errors import UnavailableError
from antiphon.lineage.documents.artifacts import run_document
from antiphon.lineage.documents.manifest import source_tree
from antiphon.lineage.names import RUN, VERSIONS, version_entry
from antiphon.lineage.retention import keeps_weights
from antiphon.lineage.run_log import read_evaluations
from antiphon.system.files import write_atomically

_log = structlog.get_logger("antiphon.lineage")


class FolderSink:
    """The weights of one run without a ledger."""

    name = "weights"

    def __init__(self, run: SinkRun, weights_file: Callable[[int], Path] | None) -> None:
        """Begin the folder of versions and the manifest at once: they say that there is no ledger."""
        self._run_dir, self._weights_file = run.run_dir, weights_file
        record = run.config.record.model_copy(update={"weights": "last"})
        self._config = run.config.model_copy(update={"record": record})
        (run.run_dir / VERSIONS).mkdir(exist_ok=True)
        manifest = run_document(run.config, run.run_id, source_tree(), lambda _: None)
        write_atomically(run.run_dir / RUN, manifest)

    def open(self) -> None:
        """Do nothing: the folder is there."""

    def write(self, records: Sequence[LogRecord]) -> None:
        """Link weights that were published, and drop those that newer or better ones superseded."""
        for record in records:
            if record.kind == "snapshot.announced" and self._weights_file is not None:
                path = self._run_dir / version_entry(record.number, "safetensors")
                try:
                    found = self._weights_file(record.number)
                    with suppress(FileExistsError):
                        path.hardlink_to(found)
                except (UnavailableError, OSError) as error:
                    _log.warning("record.weights_not_kept", version=record.number, reason=str(error))
        scores = {int(line["version"]): line["reward_mean"] for line in read_evaluations(self._run_dir)}
        kept = {int(path.stem[1:]): path for path in self._run_dir.glob("versions/v*.safetensors")}
        for version, path in kept.items():
            if not keeps_weights(version, max(kept), scores, self._config):
                path.unlink()

    def close(self, end: RunEnd) -> None:
        """Do nothing: every link is on the disk."""
