"""Records: the sinks that follow a run's log, each by a follower of its own; the loop waits for none of them.

The run log goes first, so that no other sink has a step before it stands there; MLflow goes behind the
ledger, whose md5 it names; sinks of `record.sinks` go behind the run log. What a sink has not taken stays
in the journal, for this process or a later one.
"""

import pkgutil
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from time import monotonic

import structlog
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from antiphon.api.sink import LogRecord, LogSource, RunEnd, Sink, SinkRun
from antiphon.core.config import RunConfig
from antiphon.core.errors import ConfigError, IntegrityError, UnavailableError
from antiphon.core.reporting.deliveries import VersionDeliveries
from antiphon.lineage.cursors import WEIGHT_SINKS, leave_off
from antiphon.lineage.documents.graph import run_document
from antiphon.lineage.documents.manifest import source_tree
from antiphon.lineage.follower import FIRST_PAUSE_S, Follower, FollowerReport
from antiphon.lineage.layout import ledger_project
from antiphon.lineage.ledger.sink import AdapterFile, LedgerSink, WeightsFile
from antiphon.lineage.log_fold import LogFold
from antiphon.lineage.names import RUN, VERSIONS, version_entry
from antiphon.lineage.retention import keeps_weights
from antiphon.lineage.rollout_table import count_workers
from antiphon.lineage.run_log import RunLog, read_evaluations
from antiphon.lineage.store.artifact_store import ArtifactStore, open_store
from antiphon.lineage.tracking.mlflow_sink import MlflowSink
from antiphon.system.files import copy_atomically, write_atomically

LOG_REST_S = 1.0
"""Seconds that a line of the run log waits for others."""
REST_S = 5.0
"""Seconds that records wait for others which a sink takes together with them."""
ATTEMPTS = 5
"""Attempts to read a file of the store that is on this machine, within two seconds."""
KNOWN = {
    "tensorboard": "antiphon.lineage.tracking.tensorboard_sink:TensorBoardSink",
    "wandb": "antiphon.lineage.tracking.wandb_sink:WandbSink",
}
"""Sinks that `record.sinks` names in a word."""

_log = structlog.get_logger("antiphon.lineage")


@dataclass(frozen=True, slots=True)
class RecordsReport:
    """How far the records of a run are."""

    complete: bool
    """Nothing was refused and nothing waits."""
    writer_cpu_s: float
    """CPU seconds of all followers."""
    writers: tuple[FollowerReport, ...]


class Records:
    """The followers of one run; calls may come from any thread."""

    def __init__(
        self,
        run_id: str,
        config: RunConfig,
        run_dir: Path,
        home: Path,
        store_root: Path,
        source: LogSource,
        project: Path | None = None,
        weights_file: WeightsFile | None = None,
        adapter_file: AdapterFile = lambda version: None,
        decode: Callable[[Iterable[int]], str] | None = None,
        held: bool = False,
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        """Follow a run's log, from where earlier processes stopped.

        Args:
            run_id: the run.
            config: its resolved configuration; `record` says what is kept.
            run_dir: the run's directory; gets the run log, the cursors, manifest.json and mlflow.json.
            home: holds MLflow's database and artifacts.
            store_root: root of the artifact store.
            source: the run's log.
            project: the ledger's DVC project; by default the nearest above `home` or this folder. Without one
                the base, the best and the newest weights are kept in `run_dir`.
            weights_file: returns a version's policy file, checked; it is linked into store and ledger.
                Without it versions are pinned by their digests alone.
            adapter_file: returns the adapter that makes a version; it is linked into store and ledger too.
            decode: turns token ids into text, for the trajectories that MLflow shows.
            held: the first records wait for those of the first step (see `Follower`).
            first_pause_s: pause before a second attempt.

        Raises:
            ConfigError: when `record.sinks` names what is no sink.
        """
        store, run = open_store(store_root, config.record), SinkRun(run_id, run_dir, config)
        own = make_sinks(config.record.sinks, run)
        project = ledger_project(config.record, home, project)
        workers = _worker_counts(store)
        log_sink = RunLog(run_dir)
        self._run_id, self._end = run_id, RunEnd()

        def follower(sink: Sink, rest_s: float, behind: Follower | None) -> Follower:
            pauses = partial(Follower, rest_s=rest_s, first_pause_s=first_pause_s)
            return pauses(run_dir, source, sink, LogFold(workers, log_sink.line), behind=behind, held=held)

        log = follower(log_sink, LOG_REST_S, None)
        self.followers = [log]
        """The run log's first, each behind those that it depends on."""
        ledger = None
        if project is not None:
            gap = lambda: self.followers[1].gap  # noqa: E731
            ledger = LedgerSink(run, project, store, weights_file, gap, adapter_file)
        weights: Sink = ledger or FolderSink(run, weights_file)
        for name in WEIGHT_SINKS:
            if name != weights.name:
                leave_off(run_dir, name)
        self.followers.append(follower(weights, REST_S, log))
        if config.record.mlflow:
            made = (ledger.md5, ledger.export) if ledger is not None else ()
            sink = MlflowSink(run, home, store, decode, *made)
            self.followers.append(follower(sink, REST_S, self.followers[-1]))
        self.followers += [follower(sink, REST_S, log) for sink in own]
        for started in self.followers:
            started.start()

    def attach(
        self, path: Path, plots: Mapping[str, str] | None = None, versions: Sequence[VersionDeliveries] = ()
    ) -> None:
        """Hand sinks at their end the report, its plots (name -> SVG), and how versions came to workers."""
        self._end = replace(self._end, report=path, plots=dict(plots or {}), deliveries=tuple(versions))

    def finish(self, events: bytes) -> None:
        """Hand the packed events of a finished run's journal to sinks at their end."""
        self._end = replace(self._end, complete=True, events=events)

    def standing(self) -> list[str]:
        """Return a sentence for each sink that stands still or refused records; the run goes on."""
        return [said for follower in self.followers if (said := follower.standing())]

    def report(self) -> RecordsReport:
        """Return how far the records are."""
        writers = tuple(follower.report() for follower in self.followers)
        complete = not any(writer.failed or writer.pending for writer in writers)
        return RecordsReport(complete, sum(writer.cpu_s for writer in writers), writers)

    def flush(self, timeout_s: float) -> RecordsReport:
        """Wait up to `timeout_s` until all that the log has now is written."""
        deadline = monotonic() + timeout_s
        for follower in self.followers:
            follower.ask()
        for follower in self.followers:
            follower.flush(max(0.0, deadline - monotonic()))
        return self.report()

    def close(self, timeout_s: float) -> RecordsReport:
        """Write what is left, for at most `timeout_s` seconds, and stop; names what is missing."""
        deadline = monotonic() + timeout_s
        for follower in self.followers:
            follower.ask(self._end)
        for follower in self.followers:
            follower.close(max(0.0, deadline - monotonic()))
        report = self.report()
        if not report.complete:
            reasons = [reason for writer in report.writers for reason in writer.failures[-3:]]
            _log.warning("record.incomplete", run=self._run_id, reasons=reasons)
        return report


def make_sinks(names: Sequence[str], run: SinkRun) -> list[Sink]:
    """Return the sinks that `record.sinks` names.

    Raises:
        ConfigError: when there is none of a name, it cannot be made, or two would share a cursor.
    """
    sinks, taken = [], {*WEIGHT_SINKS, RunLog.name, MlflowSink.name}
    for name in names:
        sink = make_sink(name, run)
        if not re.fullmatch("[a-z0-9_-]+", str(sink.name)) or sink.name in taken:
            raise ConfigError(
                f"record.sinks: the `name` of {name!r} is {sink.name!r}, as its cursor is; give it one of "
                f"a-z, 0-9, _ and - that is not one of {', '.join(sorted(taken))}"
            )
        taken.add(sink.name)
        sinks.append(sink)
    return sinks


def make_sink(name: str, run: SinkRun) -> Sink:
    """Return the sink that an entry of `record.sinks` names.

    Raises:
        ConfigError: when there is none of that name, or it cannot be made.
    """
    try:
        sink: Sink = pkgutil.resolve_name(KNOWN.get(name, name))(run)
    except ConfigError:
        raise
    except Exception as error:  # whatever a user's module raises when it is imported
        raise ConfigError(
            f"record.sinks: {name!r} cannot be used ({error!r}); name tensorboard, wandb or a "
            "package.module:Class that is made with one antiphon.api.sink.SinkRun"
        ) from error
    lacking = [part for part in ("name", "open", "write", "close") if not hasattr(sink, part)]
    if lacking:
        raise ConfigError(f"record.sinks: {name!r} has no {', '.join(lacking)}; see antiphon.api.sink.Sink")
    return sink


class FolderSink:
    """Where a run has no ledger, its own folder keeps its manifest and the weights that matter.

    These are the base's, the best's and the newest's, linked to the published files.
    """

    name = "weights"

    def __init__(self, run: SinkRun, weights_file: WeightsFile | None) -> None:
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
        """Link weights that were published, and drop those that newer or better ones superseded.

        Raises:
            OSError: when the folder or the weights cannot be used now.
        """
        for record in records:
            if record.kind == "snapshot.announced" and self._weights_file is not None:
                path = self._run_dir / version_entry(record.number, "safetensors")
                try:
                    published = self._weights_file(record.number)
                    if not path.exists():
                        try:
                            path.hardlink_to(published)
                        except OSError:  # a file system without links
                            copy_atomically(published, path)
                except UnavailableError as error:  # they left while nothing followed, and do not come back
                    _log.warning("record.weights_not_kept", version=record.number, reason=str(error))
        scores = {int(line["version"]): line["reward_mean"] for line in read_evaluations(self._run_dir)}
        kept = {int(path.stem[1:]): path for path in self._run_dir.glob("versions/v*.safetensors")}
        for version, path in kept.items():
            if not keeps_weights(version, max(kept), scores, self._config):
                path.unlink()

    def close(self, end: RunEnd) -> None:
        """Do nothing: every link is on the disk."""


def _worker_counts(store: ArtifactStore) -> Callable[[str], Mapping[str, int]]:
    """Return what counts a batch's trajectories by worker; one read of a file serves all followers."""

    @lru_cache(maxsize=64)
    def count(timings_digest: str) -> Mapping[str, int]:
        attempts = ATTEMPTS if store.has(timings_digest) else 1
        retrying = Retrying(
            retry=retry_if_exception_type(UnavailableError),
            stop=stop_after_attempt(attempts),
            wait=wait_exponential(0.1),
            reraise=True,
        )
        try:
            return retrying(lambda: count_workers(store.get(timings_digest)))
        except (IntegrityError, UnavailableError) as error:
            # Records do without it; who needs the file says what is wrong with it.
            _log.warning("record.workers_unknown", timings=timings_digest, reason=str(error))
            return {}

    return count
