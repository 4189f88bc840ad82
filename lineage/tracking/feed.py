"""Tracking feed: what the recorder tells, put into the words that MLflow shows and compares.

It adds to each step what its version had cost and what the machine did meanwhile, picks the
trajectories that are shown, and sums the run up at its end.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog

from antiphon.core.config import RunConfig
from antiphon.core.errors import IntegrityError, UnavailableError
from antiphon.core.loop.schedule import is_evaluated
from antiphon.core.records import BatchRef
from antiphon.lineage.documents.manifest import flatten_config
from antiphon.lineage.rollout_table import count_workers
from antiphon.lineage.run_log import RunLog
from antiphon.lineage.store.artifact_store import ArtifactStore
from antiphon.lineage.tracking.system_metrics import SystemSampler
from antiphon.lineage.tracking.totals import TotalsFold, summarise
from antiphon.lineage.tracking.traces import SampledTrajectory, read_trajectories
from antiphon.lineage.tracking.tracked_run import HELDOUT
from antiphon.lineage.tracking.tracker import Tracker

SAMPLES_PER_STEP = 100
"""Most looks at the machine that are written with one step; MLflow takes 1,000 figures in a call."""
_CLOCKS = frozenset({"at", "wall_s"})
"""Timings of a line that are told as totals of its version, not as metrics of its step."""

_log = structlog.get_logger("antiphon.lineage")


class TrackingFeed:
    """Feeds one run's tracker; calls come from one thread at a time and return at once."""

    def __init__(
        self,
        tracker: Tracker,
        config: RunConfig,
        store: ArtifactStore,
        log: RunLog,
        decode: Callable[[Iterable[int]], str] | None,
    ) -> None:
        """Open the run in MLflow and begin to sample the machine.

        Args:
            tracker: the run's tracker, not used before.
            config: the resolved configuration.
            store: holds the batches.
            log: the run log.
            decode: turns token ids into text, called by the writer; without it no trajectories
                are shown.
        """
        self.tracker = tracker
        self._config, self._store, self._log, self._decode = config, store, log, decode
        self._totals = TotalsFold(config)
        self._shown: set[int] = set()
        tags = {"antiphon.run_id": tracker.run_id, "antiphon.mode": config.loop.mode}
        tracker.start_run(flatten_config(config), tags)
        self._sampler: SystemSampler | None = None
        if config.record.system_metrics_s > 0:
            self._sampler = SystemSampler(config.record.system_metrics_s, log.wall_s)

    def batch(
        self,
        step: int,
        digest: str,
        timings_digest: str,
        profile: Mapping[str, Any],
        at: float,
        md5: str | None,
    ) -> None:
        """Tell of a sealed batch: a dataset, and trajectories of versions that are evaluated."""
        source = {
            "uri": str(self._store.path(digest)),
            "digest": digest,
            "timings_digest": timings_digest,
            "dvc_md5": md5,
        }
        self.tracker.log_batch(f"batch-t{step:06d}", digest, source, profile)
        for version in self._versions_to_show(step, profile["staleness_histogram"]):
            self.tracker.log_traces(version, at, self._reader(digest, timings_digest, version, step))

    def version(self, version: int, facts: Mapping[str, Any], step: int, md5: str | None) -> None:
        """Tell of a policy version and the step that made it."""
        params = {
            "version": str(version),
            "parent": str(max(0, version - 1)),
            "weights_digest": str(facts["weights_digest"]),
            "batch_digest": str(facts.get("batch_digest", "")),
            "dvc_md5": md5 or "",
        }
        self.tracker.log_version(version, params, step)

    def step(self, line: Mapping[str, Any]) -> None:
        """Tell of a committed step, as the run log has it."""
        timings, batch = line["timings"], line["batch"] or {}
        figures = {**line["metrics"], **{k: v for k, v in timings.items() if _is_figure(k, v)}}
        figures |= {f"batch/{key}": value for key, value in batch.items() if not isinstance(value, dict)}
        for staleness, count in batch.get("staleness_histogram", {}).items():
            figures[f"batch/staleness_{staleness}"] = count
        if timings.get("workers"):
            figures["batch/workers"] = len(timings["workers"])
        figures["version"] = int(line["version"])
        totals = self._totals.add(line)
        samples = self._sampler.collect(SAMPLES_PER_STEP) if self._sampler is not None else []
        self.tracker.log_step(int(line["step"]), figures, timings["at"], totals, samples)

    def evaluation(self, line: Mapping[str, Any]) -> None:
        """Tell of a finished evaluation, as the run log has it."""
        figures = {
            HELDOUT: line["reward_mean"],
            "heldout/completion_tokens_mean": line["completion_tokens_mean"],
        }
        self.tracker.log_evaluation(
            int(line["version"]), figures, int(line["prompts"]), line["timings"]["at"]
        )

    def attach(self, path: Path) -> None:
        """Attach a file; the figures of a page also by themselves."""
        self.tracker.log_artifact(path)
        if path.suffix == ".html":
            self.tracker.log_figures(path)

    def end(self) -> None:
        """Sum the run up and close it in MLflow: FINISHED, or KILLED when steps are left."""
        if self._sampler is not None:
            self._sampler.close()
        lines = [self._log.steps[step] for step in sorted(self._log.steps)]
        held = [self._log.evaluations[version] for version in sorted(self._log.evaluations)]
        if lines:
            at = max(line["timings"]["at"] for line in (*lines, *held))
            self.tracker.log_summary(len(lines), summarise(lines, held, self._config), at)
        finished = len(lines) >= self._config.run.steps
        self.tracker.set_status("FINISHED" if finished else "KILLED")

    def _versions_to_show(self, step: int, histogram: Mapping[str, int]) -> list[int]:
        """Return the evaluated versions of which this batch is the first to have trajectories."""
        if self._decode is None or not self._config.record.traces:
            return []
        found = []
        for version in sorted(step - int(staleness) for staleness in histogram):
            if is_evaluated(version, self._config) and version not in self._shown:
                self._shown.add(version)
                found.append(version)
        return found

    def _reader(
        self, digest: str, timings_digest: str, version: int, step: int
    ) -> Callable[[], Sequence[SampledTrajectory]]:
        decode, count, store = self._decode, self._config.record.traces, self._store

        def read() -> Sequence[SampledTrajectory]:
            if decode is None:
                return ()
            batch, timings = store.get(digest), store.get(timings_digest)
            return read_trajectories(batch, timings, version, step, count, decode)

        return read


def worker_mix(store: ArtifactStore, batch: BatchRef | None) -> dict[str, int]:
    """Return how many trajectories of a batch each worker sampled; {} when that cannot be read."""
    if batch is None:
        return {}
    try:
        return count_workers(store.get(batch.timings_digest))
    except (IntegrityError, UnavailableError) as error:
        # The mix of workers is a courtesy; whoever needs the file says what is wrong with it.
        _log.warning("record.workers_unknown", step=batch.step, reason=str(error))
        return {}


def _is_figure(key: str, value: object) -> bool:
    return key not in _CLOCKS and isinstance(value, int | float)
