"""Tracker: the run's records as MLflow shows and compares them.

It adds to each step what its version had cost and what the machine did meanwhile, picks the
trajectories that are shown, and sums the run up at its end. Everything is written by the thread
of `MlflowWriter`.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from antiphon.core.config import RunConfig
from antiphon.core.loop.schedule import is_evaluated
from antiphon.core.reporting.deliveries import VersionDeliveries
from antiphon.core.reporting.figures import FiguresFold
from antiphon.lineage.documents.manifest import flatten_config
from antiphon.lineage.run_log import RunLog
from antiphon.lineage.store.artifact_store import ArtifactStore
from antiphon.lineage.tracking.champion import crown
from antiphon.lineage.tracking.charts import HELDOUT, chart_name, comparison_tag
from antiphon.lineage.tracking.delivery_metrics import log_deliveries
from antiphon.lineage.tracking.description import display_name, nearest_example, note, origin_tags
from antiphon.lineage.tracking.mlflow_writer import MlflowWriter
from antiphon.lineage.tracking.model_files import Exporter
from antiphon.lineage.tracking.notes import BatchNote, StepNote, VersionNote
from antiphon.lineage.tracking.system_metrics import SystemSampler
from antiphon.lineage.tracking.totals import summarise
from antiphon.lineage.tracking.traces import read_trajectories
from antiphon.lineage.tracking.tracked_run import NOTE_TAG, TrackedRun
from antiphon.lineage.writer import FIRST_PAUSE_S

SAMPLES_PER_STEP = 100
"""Most samples of the machine that are written with one step; MLflow takes 1,000 metrics in a call."""
_CLOCKS = frozenset({"at", "wall_s", "startup_s", "break_s", "breaks"})
"""Timings of a line that say something of the run so far, not of its step."""


class Tracker:
    """One run in MLflow; calls come from one thread at a time and return at once."""

    def __init__(
        self,
        run_dir: Path,
        home: Path,
        run_id: str,
        config: RunConfig,
        store: ArtifactStore,
        log: RunLog,
        decode: Callable[[Iterable[int]], str] | None,
        first_pause_s: float = FIRST_PAUSE_S,
        export: Exporter | None = None,
        begin: threading.Event | None = None,
    ) -> None:
        """Open the run in MLflow, whose database lies in `home`, and begin to sample the machine.

        `decode` turns token ids into text, called by the writer; without it no trajectories are
        shown. `export` writes the files of a champion, also called by the writer. `first_pause_s`
        passes before a second attempt; it doubles with each further one. The writer waits for `begin`.
        """
        self._config, self._store, self._log, self._decode = config, store, log, decode
        self._export, self._scratch = export, run_dir / "exports"
        self._totals = FiguresFold(config)
        self._shown: set[int] = set()
        self._run_dir, self._home = run_dir, home
        tags = {"antiphon.run_id": run_id, "antiphon.mode": config.loop.mode}
        name = display_name(run_id, nearest_example(config)[1])
        view = dict([comparison_tag()])
        self.mlflow = MlflowWriter(
            run_dir, home, config.run.name, name, flatten_config(config), tags, first_pause_s, view, begin
        )
        self.mlflow.write("origin", lambda run: run.tell(origin_tags(config)))
        self._describe()
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
        """Note a sealed batch: a dataset, and trajectories of versions that are evaluated."""
        name = f"batch-t{step:06d}"
        source = {
            "uri": str(self._store.path(digest)),
            "digest": digest,
            "timings_digest": timings_digest,
            "dvc_md5": md5,
        }
        self.mlflow.note(f"dataset {name}", BatchNote(name, digest, source, profile))
        for version in sorted(step - int(staleness) for staleness in profile["staleness_histogram"]):
            self._show(version, step, digest, timings_digest, at)

    def version(self, version: int, facts: Mapping[str, Any], step: int, md5: str | None) -> None:
        """Note a policy version as a logged model, and the step that made it."""
        params = {
            "version": str(version),
            "parent": str(max(0, version - 1)),
            "weights_digest": str(facts["weights_digest"]),
            "batch_digest": str(facts.get("batch_digest", "")),
            "dvc_md5": md5 or "",
        }
        self.mlflow.note(f"version {version}", VersionNote(version, step, params))

    def step(self, line: Mapping[str, Any]) -> None:
        """Log a committed step, as the run log has it."""
        step, timings, batch = int(line["step"]), line["timings"], line["batch"] or {}
        # A commit repeats most of what is known of its batch; each number is drawn once.
        metrics = {k: v for k, v in batch.items() if k != "tokens" and isinstance(v, int | float)}
        metrics |= {**line["metrics"], **{k: v for k, v in timings.items() if _is_metric(k, v)}}
        if batch.get("replaced"):
            metrics["voided"] = len(batch["replaced"])
        if timings.get("workers"):
            metrics["workers"] = len(timings["workers"])
        metrics = {chart_name(name): value for name, value in metrics.items()}
        for staleness, count in batch.get("staleness_histogram", {}).items():
            metrics[f"staleness/trajectories.staleness_{staleness}"] = count
        totals = self._totals.add(line)
        samples = self._sampler.collect(SAMPLES_PER_STEP) if self._sampler is not None else []
        self.mlflow.note(f"step {step}", StepNote(step, metrics, timings["at"], totals, samples))

    def evaluation(self, line: Mapping[str, Any]) -> None:
        """Log a finished evaluation, as the run log has it; its version may become the champion."""
        version, prompts, reward = int(line["version"]), int(line["prompts"]), line["reward_mean"]
        metrics = {HELDOUT: reward, "heldout/tokens_mean": line["completion_tokens_mean"]}
        label, at = f"evaluation {version}", line["timings"]["at"]
        self.mlflow.write(label, lambda run: run.log_evaluation(version, metrics, prompts, at))
        experiment, files = self._config.run.name, (self._export, self._scratch)
        self.mlflow.write(
            f"{label} champion", lambda run: crown(run, experiment, version, reward, prompts, *files)
        )

    def deliveries(self, versions: Sequence[VersionDeliveries]) -> None:
        """Log how versions came to the workers."""
        self.mlflow.write("deliveries", lambda run: log_deliveries(run, versions))

    def attach(self, path: Path, plots: Mapping[str, str] | None = None) -> None:
        """Attach a file, and plots (file name -> SVG) under `plots/`."""
        self.mlflow.attach(path)

        def write(run: TrackedRun) -> None:
            for name, text in (plots or {}).items():
                run.client.log_text(run.run_id, text, f"plots/{name}")

        if plots:
            self.mlflow.write(f"plots of {path.name}", write)

    def end(self) -> None:
        """Sum the run up and close it in MLflow: FINISHED, or KILLED when steps are left."""
        if self._sampler is not None:
            self._sampler.close()
        steps = [self._log.steps[step] for step in sorted(self._log.steps)]
        held = [self._log.evaluations[version] for version in sorted(self._log.evaluations)]
        if steps:
            at = max(line["timings"]["at"] for line in (*steps, *held))
            self.mlflow.summarise(len(steps), summarise(steps, held, self._config), at)
        self._describe()  # the flow run is known by now
        self.mlflow.end("FINISHED" if len(steps) >= self._config.run.steps else "KILLED")

    def _describe(self) -> None:
        def write(run: TrackedRun) -> None:
            text = note(self._config, self._run_dir, self._home, run.experiment_id, run.run_id)
            run.tell({NOTE_TAG: text})

        self.mlflow.write("description", write)

    def _show(self, version: int, step: int, digest: str, timings_digest: str, at: float) -> None:
        """Show a few trajectories of an evaluated version, from the first batch that has any."""
        decode, count, store = self._decode, self._config.record.traces, self._store
        if decode is None or not count or version in self._shown or not is_evaluated(version, self._config):
            return
        self._shown.add(version)

        def write(run: TrackedRun) -> None:
            if version not in run.traced:
                batch, timings = store.get(digest), store.get(timings_digest)
                run.log_traces(version, read_trajectories(batch, timings, version, step, count, decode), at)

        self.mlflow.write(f"trajectories of version {version}", write)


def _is_metric(key: str, value: object) -> bool:
    return key not in _CLOCKS and isinstance(value, int | float)
