"""MLflow: a run's records as MLflow shows and compares them, written by one sink.

The import and the first migration of the database happen on the sink's thread too. A run that continues after
a break continues the same MLflow run. Where MLflow refuses for good, one sentence says why, and the run
continues without it.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from antiphon.api.sink import LogRecord, RunEnd, SinkRun
from antiphon.core.client_records import CLIENT
from antiphon.core.config import RunConfig
from antiphon.core.errors import ConfigError, ContractError, IntegrityError, UnavailableError
from antiphon.core.loop.schedule import is_evaluated
from antiphon.core.metrics import REWARD_LEVELS
from antiphon.core.reporting.figures import VersionTotals, figures_of, next_totals, totals_of
from antiphon.lineage.documents.graph import BATCH_FACTS
from antiphon.lineage.documents.manifest import flatten_config
from antiphon.lineage.names import batch_entry, version_entry
from antiphon.lineage.run_log import read_evaluations, read_steps
from antiphon.lineage.store.artifact_store import ArtifactStore
from antiphon.lineage.tracking.champion import Exporter, crown
from antiphon.lineage.tracking.charts import comparison_tag
from antiphon.lineage.tracking.description import display_name, nearest_example, note, origin_tags
from antiphon.lineage.tracking.mlflow_client import explained
from antiphon.lineage.tracking.system_metrics import SystemSample, SystemSampler
from antiphon.lineage.tracking.tracked_run import NOTE_TAG, TrackedRun, open_run, points

METRICS_PER_CALL = 1000
"""MLflow's limit for one batch of metrics."""
SAMPLES_PER_STEP = 60
"""Most samples of the machine, of a dozen metrics each, that are written with one step."""


class MlflowSink:
    """One run in MLflow.

    It adds to each step what its version had cost and what the machine did meanwhile, picks the trajectories
    that are shown, and sums the run up at its end.
    """

    name = "mlflow"

    def __init__(
        self,
        run: SinkRun,
        home: Path,
        store: ArtifactStore,
        decode: Callable[[Iterable[int]], str] | None = None,
        md5: Callable[[str], str | None] = lambda rel: None,
        export: Exporter | None = None,
    ) -> None:
        """Prepare to write, and begin to sample the machine.

        Args:
            run: the run; its folder keeps `mlflow.json`, which says which MLflow run it is.
            home: its `mlflow` folder holds the database and the artifacts, unless MLFLOW_TRACKING_URI names
                another place.
            store: has the batches.
            decode: turns token ids into text; without it no trajectories are shown.
            md5: returns the md5 under which the ledger has an entry.
            export: writes the files of a champion.
        """
        self._run, self._config, self._home, self._store = run, run.config, home, store
        self._decode, self._md5, self._export = decode, md5, export
        self._tracked: TrackedRun | None = None
        self._uncertain = False
        """A call got no answer, so what MLflow has must be read before the next one."""
        self._last: VersionTotals | None = None
        """What the last version had cost whose step came; None before the first one."""
        self._notes: dict[int, tuple[list[VersionTotals], list[SystemSample]]] = {}
        """What else is said with steps that MLflow has not confirmed, by the number of their record."""
        self._shown: set[int] = set()
        self._sampler: SystemSampler | None = None
        if self._config.record.system_metrics_s > 0:
            wall_s = 0.0
            with suppress(IntegrityError):  # which the run log says
                wall_s = max(
                    (line["timings"].get("wall_s", 0.0) for line in read_steps(run.run_dir)), default=0.0
                )
            self._sampler = SystemSampler(self._config.record.system_metrics_s, wall_s)

    @property
    def place(self) -> str:
        """The MLflow run: another server or a database that was cleared has another one."""
        return "" if self._tracked is None else self._tracked.run_id

    def open(self) -> None:
        """Open the MLflow run, or the one that an earlier process opened."""
        config, run_id = self._config, self._run.run_id
        tags = {"antiphon.run_id": run_id, "antiphon.mode": config.loop.mode}
        name = display_name(run_id, nearest_example(config)[1])
        place = self._home, self._run.run_dir / "mlflow.json", config.run.name, name
        try:
            tracked = open_run(*place, flatten_config(config), tags, dict([comparison_tag()]))
            with explained(tracked.uri):
                self._describe(tracked, origin_tags(config))
        except ContractError as error:
            raise ConfigError(f"{error}; the run continues without MLflow") from error
        self._tracked = tracked

    def write(self, records: Sequence[LogRecord]) -> None:
        """Write batches, versions, steps and scores, those of many steps in a few calls.

        All metrics of one step go in one call: from one of them `reload` knows that the others are there.
        With them go what versions had cost, each at the step of its number, and samples of the machine, each
        at the second of the run.
        """
        steps = [record for record in records if record.kind == "step.committed"]
        for record in steps:  # before a call that may fail, so that nothing is counted twice
            if record.seq not in self._notes:
                totals = self._totals(record.number, record.at)
                if self._last is not None and record.number == self._last.version:
                    self._last = next_totals(self._last, record.line, self._config)
                    totals.append(self._last)
                samples = [] if self._sampler is None else self._sampler.collect(SAMPLES_PER_STEP)
                self._notes[record.seq] = totals, samples
        with self._calls() as run:
            run.log_batches(dict(self._batch(r.number, r.line) for r in steps if r.line["batch"] is not None))
            made = {r.number + 1: self._version(r.number + 1, r.line) for r in steps}
            base = [r for r in records if r.kind == "snapshot.announced" and r.number == 0]
            run.log_versions({r.number: self._version(0, r.line) for r in base} | made)
            call: list[Any] = []
            for record in steps:
                totals, samples = self._notes[record.seq]
                new = [point for one in samples for point in points(one.metrics, one.second, one.at)]
                if (step := record.number) not in run.steps:
                    new += points(record.metrics, step, record.line["timings"]["at"], run.models[step + 1])
                for known in totals:
                    if known.version not in run.totals:
                        model = run.models.get(known.version)
                        new += points(total_metrics(known), known.version, known.at, model)
                if len(call) + len(new) > METRICS_PER_CALL:
                    run.client.log_batch(run.run_id, metrics=call)
                    call = []
                call += new
            if call:
                run.client.log_batch(run.run_id, metrics=call)
            for record in steps:
                run.steps.add(record.number)
                run.totals |= {known.version for known in self._notes.pop(record.seq)[0]}
                if record.line["batch"] is not None:
                    self._show(run, record.number, record.line)
            for record in records:
                if record.kind == "evaluation.finished":
                    prompts, reward = int(record.line["prompts"]), float(record.line["reward_mean"])
                    run.log_evaluation(record.number, record.metrics, prompts, record.line["timings"]["at"])
                    found = self._config.run.name, record.number, reward, prompts
                    crown(run, *found, self._export, self._run.run_dir / "exports")

    def close(self, end: RunEnd) -> None:
        """Attach what the end made, sum the run up, and close it: FINISHED, or KILLED when steps are left."""
        if self._sampler is not None:
            self._sampler.close()
        steps, held = read_steps(self._run.run_dir), read_evaluations(self._run.run_dir)
        with self._calls() as run:
            if end.report is not None:
                run.client.log_artifact(run.run_id, str(end.report))
            for name, text in end.plots.items():
                run.client.log_text(run.run_id, text, f"plots/{name}")
            if end.deliveries:
                run.log_deliveries(end.deliveries)
            if steps:
                at = max(line["timings"]["at"] for line in (*steps, *held))
                run.log_summary(len(steps), summarise(steps, held, self._config), at)
            self._describe(run, {})  # the flow run is known by now
            finished = len(steps) >= self._config.run.steps
            run.client.set_terminated(run.run_id, "FINISHED" if finished else "KILLED")

    def _totals(self, step: int, at: float) -> list[VersionTotals]:
        """Begin with what earlier processes wrote; return what the base had cost with the first step."""
        if self._last is None:
            before = [line for line in read_steps(self._run.run_dir) if int(line["step"]) < step]
            *_, self._last = [VersionTotals(0), *totals_of(before, self._config)]
        return [VersionTotals(0, at=at)] if step == 0 else []

    def _batch(self, step: int, line: Mapping[str, Any]) -> tuple[str, dict[str, dict[str, Any]]]:
        digest, batch = line["batch_digest"], line["batch"]
        source = {
            "uri": str(self._store.path(digest)),
            "digest": digest,
            "timings_digest": line["timings"]["timings_digest"],
            "dvc_md5": self._md5(batch_entry(step, "parquet")),
        }
        profile = {name: batch[name] for name in BATCH_FACTS if name in batch}
        return f"batch-t{step:06d}", {"source": source, "profile": profile}

    def _version(self, version: int, line: Mapping[str, Any]) -> dict[str, str]:
        return {
            "version": str(version),
            "parent": str(max(0, version - 1)),
            "weights_digest": str(line["weights_digest"]),
            "batch_digest": str(line.get("batch_digest", "")),
            "dvc_md5": self._md5(version_entry(version)) or "",
        }

    def _show(self, run: TrackedRun, step: int, line: Mapping[str, Any]) -> None:
        """Show a few trajectories of each evaluated version, from the first batch that has any."""
        decode, count, store = self._decode, self._config.record.traces, self._store
        if decode is None or not count or self._config.environment.name == CLIENT:
            return
        for version in sorted(step - int(staleness) for staleness in line["batch"]["staleness_histogram"]):
            if version in self._shown or not is_evaluated(version, self._config):
                continue
            if version not in run.traced:
                timings = line["timings"]
                files = store.get(line["batch_digest"]), store.get(timings["timings_digest"])
                run.log_traces(version, step, files, count, decode, timings["at"])
            self._shown.add(version)

    def _describe(self, run: TrackedRun, tags: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        text = note(self._config, self._run.run_dir, self._home, run.experiment_id, run.run_id)
        every = {**tags, NOTE_TAG: text}
        run.client.log_batch(run.run_id, tags=[RunTag(name, value) for name, value in every.items()])

    @contextmanager
    def _calls(self) -> Iterator[TrackedRun]:
        """Yield the MLflow run, as MLflow has it; what goes wrong is explained."""
        run = self._tracked
        assert run is not None, "the follower opens a sink first"
        if self._uncertain:
            with explained(run.uri):
                run.reload()
            self._uncertain = False
        try:
            with explained(run.uri):
                yield run
        except UnavailableError:
            self._uncertain = True
            raise
        except ContractError as error:
            with explained(run.uri):
                gone = run.why_gone()
            if gone:
                raise ConfigError(f"{gone}; the run continues without MLflow") from error
            raise


def total_metrics(totals: VersionTotals) -> dict[str, float]:
    """Return what a version had cost under the names of `core.metrics.TOTAL_METRICS`."""
    return {
        "tokens_total": float(totals.tokens_sampled),
        "tokens_trained_total": float(totals.tokens_trained),
        "wall_s": totals.wall_s,
        "cost_dollars": totals.dollars,
    }


def summarise(
    steps: Sequence[Mapping[str, Any]], held: Sequence[Mapping[str, Any]], config: RunConfig
) -> dict[str, float]:
    """Return a run's summary under the names of `core.metrics.SUMMARY_METRICS`, each with `summary/`.

    `steps` and `held` are lines of the run log, of steps and of evaluations, in order.
    """
    totals = {known.version: known for known in totals_of(steps, config)}
    if not totals:
        return {}
    metrics = figures_of(steps, held, config).numbers() | _levels(held, totals) | _workers(steps)
    return {f"summary/{name}": value for name, value in metrics.items()}


def _levels(
    evaluations: Sequence[Mapping[str, Any]], totals: Mapping[int, VersionTotals]
) -> dict[str, float]:
    metrics = {}
    for level in REWARD_LEVELS:
        reached = next((line for line in evaluations if float(line["reward_mean"]) >= level), None)
        spent = totals.get(int(reached["version"])) if reached is not None else None
        if spent is not None:
            metrics[f"steps_to_reward_{level:g}"] = float(spent.version)
            metrics[f"wall_s_to_reward_{level:g}"] = spent.wall_s
            metrics[f"tokens_to_reward_{level:g}"] = float(spent.tokens_sampled)
            metrics[f"tokens_trained_to_reward_{level:g}"] = float(spent.tokens_trained)
            metrics[f"dollars_to_reward_{level:g}"] = spent.dollars
    return metrics


def _workers(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    mixes = [mix for line in steps if (mix := line["timings"].get("workers"))]
    if not mixes:
        return {}
    counts = Counter[str]()
    for mix in mixes:
        counts.update(mix)
    total = counts.total()
    return {
        "workers": sum(map(len, mixes)) / len(mixes),
        "workers_seen": float(len(counts)),
        **{f"worker_share.{worker}": count / total for worker, count in sorted(counts.items())},
    }
