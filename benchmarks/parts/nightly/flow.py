"""benchmark: a grid of runs and scripts, one table for the commit, compared with the one before.

Cases run one after the other, so that each has the machine to itself. A case that fails is
named in the table and the others continue. The flow fails at the end when a case failed or a metric
got worse beyond noise, so that a schedule's page turns red and automations can send a message.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import structlog
from prefect import flow, task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.exceptions import FailedRun
from prefect.runtime import flow_run
from pydantic import BaseModel, ConfigDict, Field

from antiphon.benchmarks.parts.nightly.script import run_script
from antiphon.benchmarks.parts.nightly.table import (
    BenchmarkTable,
    ComparedTable,
    Verdict,
    compare_tables,
    name_of_commit,
    name_of_machine,
    pin_table,
    read_tables,
    settings_of,
    write_table,
)
from antiphon.benchmarks.parts.results import flatten
from antiphon.core.config import RunConfig, load_config
from antiphon.core.errors import AntiphonError, ConfigError
from antiphon.core.reporting.run_display import RunDisplay
from antiphon.flows.form import label
from antiphon.flows.post_train import post_train
from antiphon.flows.run_page import artifact_key
from antiphon.flows.told import ToldView
from antiphon.lineage.layout import find_project
from antiphon.lineage.tracking.mlflow_client import explained
from antiphon.lineage.tracking.tracked_run import open_run
from antiphon.report.render import render
from antiphon.runs.clients import RunStopped
from antiphon.runs.directory import home_directory
from antiphon.runs.live_run import RunOptions, claim_run
from antiphon.system.files import write_atomically

HISTORY_SHOWN = 30
"""Newest tables drawn."""
BARS = "▁▂▃▄▅▆▇█"


def rows_of(compared: ComparedTable, tables: Sequence[BenchmarkTable]) -> list[dict[str, str]]:
    """Return what is shown of a comparison, a row each for failed cases, metrics, and cases left aside.

    `tables` has all, oldest first.
    """
    table = compared.table
    alike = [t.like(table) for t in tables if t.machine == table.machine]
    alike = [t for t in alike if t.cases][-HISTORY_SHOWN:]
    columns = ("figure", "should be", "before", "now", "change", "noise", "pairs", "history", "verdict")

    def row(*cells: str) -> dict[str, str]:
        return dict(zip(columns, cells, strict=True))

    failed = [row(case, *[""] * 3, why, *[""] * 3, "failed") for case, why in table.failed.items()]
    metrics = [
        row(
            c.measure.name,
            c.measure.better.value,
            _number(c.before),
            _number(c.after if c.after is not None else table.medians()[c.measure.name]),
            change_words(c.change),
            noise_words(c.allowance),
            str(c.pairs or ""),
            history(c.measure.name, alike),
            c.verdict.value,
        )
        for c in sorted(compared.comparisons, key=lambda c: list(Verdict).index(c.verdict))
    ]
    aside = [
        row(case, "", before, now, name, *[""] * 3, "not compared")
        for case, fields in compared.differing.items()
        for name, (before, now) in fields.items()
    ]
    return [*failed, *metrics, *aside]


def history(name: str, tables: Sequence[BenchmarkTable]) -> str:
    """Return one metric's medians as bars, oldest commit left; empty when it was measured once.

    All `tables` are of one kind of machine, oldest first.
    """
    medians = [table.medians()[name] for table in tables if name in table.names()]
    if len(medians) < 2:
        return ""
    scale = (len(BARS) - 1) / ((max(medians) - min(medians)) or 1.0)
    return "".join(BARS[round((value - min(medians)) * scale)] for value in medians)


def build_benchmark_page(compared: ComparedTable, tables: Sequence[BenchmarkTable], out: Path) -> Path:
    """Write the page of the newest table to `out` and return its path; `tables` has all, oldest first.

    Raises:
        UnavailableError: when the file cannot be written.
    """
    table = compared.table
    counts = Counter(comparison.verdict for comparison in compared.comparisons)
    notes = [
        "A history has a bar for the median of each commit on this kind of machine; what makes a metric "
        "better or worse stands in docs/guides/scheduled-benchmarks.md."
    ]
    if changed := compared.other_weights(next((t for t in tables if t.commit == compared.before), None)):
        notes.append(
            f"Other final weights than before: {', '.join(changed)}. In fixed mode this means that the "
            "numerics changed; in elastic mode it is ordinary."
        )
    page = render(
        "benchmarks.html",
        title=f"Benchmarks {table.commit}",
        brand="Antiphon benchmarks",
        heading=table.commit,
        facts=[table.at, table.machine, f"compared with {compared.before or 'nothing yet'}"],
        cards=[
            *((verdict.value, counts[verdict], "metrics") for verdict in list(Verdict)[:3]),
            ("cases", len(table.cases), f"{len(table.failed)} failed"),
        ],
        rows=rows_of(compared, tables),
        names=table.judged(),
        cases=[(case, *map(_number, map(found.get, table.judged()))) for case, found in table.cases.items()],
        notes=notes,
    )
    write_atomically(out, page.encode("utf-8"))
    return out


def change_words(change: float | None) -> str:
    """Write a comparison's change relative to the value before; one from nothing has no number.

    >>> change_words(0.5), change_words(-0.5), change_words(0.0), change_words(1.0)
    ('+100.0%', '-50.0%', '0.0%', 'from 0')
    """
    if change is None:
        return ""
    # Comparisons weigh a change and its way back alike: it is relative to the larger of the two values.
    if change >= 1.0:
        return "from 0"
    return f"{100 * (change / (1.0 - change) if change > 0 else change):{'+' if change else ''}.1f}%"


def noise_words(allowance: float | None) -> str:
    """Write how far a metric may rise and fall without being judged.

    >>> noise_words(0.2), noise_words(0.0), noise_words(1.0)
    ('+25.0% or -20.0%', 'none', 'any')
    """
    if allowance is None:
        return ""
    if 0.0 < allowance < 1.0:
        return f"{change_words(allowance)} or {change_words(-allowance)}"
    return "any" if allowance else "none"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


_log = structlog.get_logger(__name__)
SMOKE = "benchmarks/parts/pages.py --smoke"
"""Every benchmark in its smallest form."""

RUN_METRICS = {
    "reward_first": "pass_before",
    "reward_last": "pass_after",
    "steps": "steps",
    "wall_s": "wall_s",
    "seconds_per_step": "seconds_per_step",
    "learner_idle_share": "learner_idle_share",
    "groups_dropped_stale_share": "dropped_stale_share",
    "drafting_acceptance": "drafting_acceptance",
    "drafting_tokens_per_pass": "tokens_per_pass",
}
"""Figure of a run -> its name in the table."""


class BenchmarkPlan(BaseModel):
    """What is measured: every configuration with every seed, then every script."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        field_title_generator=lambda name, _: label(name),
    )

    configs: list[str] = Field(default=["examples/quickstart.yaml"])
    """Configurations to run, as paths below the working directory."""
    seeds: list[int] = Field(default=[0, 1, 2])
    """Seeds of each configuration; the same ones every time, so that tables can be paired."""
    overrides: list[str] = Field(default=[])
    """section.field=value for all runs, such as run.steps=20."""
    scripts: list[str] = Field(default=[])
    """Scripts with their arguments, such as `benchmarks/replay.py`; each prints a JSON object last."""
    repeats: int = Field(default=3, ge=1, le=20)
    """Times each script is run; three or more show its noise."""
    smoke: bool = False
    """Run every benchmark in its smallest form besides, some 15 minutes; one that fails is a failed case."""
    script_timeout_s: float = Field(default=3600.0, gt=0.0)
    """Seconds a script may take."""
    results: str = Field(default="results/benchmarks", min_length=1)
    """Folder of the tables, the history and the page."""
    record: bool = True
    """Pin the table in the DVC ledger."""
    track: bool = True
    """Log the table as an MLflow run of the experiment `benchmarks`."""
    on_regression: Literal["fail", "report"] = "fail"
    """What a failed case, or a metric that got worse beyond noise, does to the flow run."""


def name_of_benchmark() -> str:
    """Return what the current flow run measures, and of which commit; it is the flow run's name."""
    plan = BenchmarkPlan.model_validate(flow_run.get_parameters()["plan"])
    parts = [f"{Path(path).stem} x {len(plan.seeds)} seeds" for path in plan.configs if plan.seeds]
    parts += [Path(script.split()[0]).name for script in plan.scripts]
    return f"{', '.join(parts) or 'nothing'} at {name_of_commit(Path.cwd())}"


@flow(name="benchmark", flow_run_name=name_of_benchmark, persist_result=False, validate_parameters=True)
def benchmark(plan: BenchmarkPlan) -> dict[str, Any]:
    """Measure the commit in the working directory and compare it with the one measured before.

    Args:
        plan: what is measured and where the results go.
    """
    project, home = Path.cwd(), home_directory()
    configs = check_plan(plan, project, home)
    commit = name_of_commit(project)
    at = datetime.now(UTC).isoformat(timespec="seconds")
    settings = {case: settings_of(config) for case, config in configs.items()}
    cases: dict[str, dict[str, float]] = {}
    weights: dict[str, str] = {}
    failed: dict[str, str] = {}
    for case, config in configs.items():
        with noted(case, failed):
            outcome = measure_run(config)
            cases[case] = run_metrics(outcome)
            weights[case] = str(outcome["weights_digest"])
    logs = home / "benchmarks" / f"{commit}-{at.replace(':', '')}"
    for number, script in ((n, s) for s in plan.scripts for n in range(plan.repeats)):
        with noted(case := f"{script} #{number + 1}", failed):
            cases[case] = measure_script(script, number, plan.script_timeout_s, str(project), str(logs))
    if plan.smoke:
        with noted("smallest forms", failed):
            run_script(SMOKE, project, plan.script_timeout_s, logs / "smoke.log")
    if not cases:
        raise AntiphonError(f"no case of the benchmark could be measured: {'; '.join(failed.values())}")
    table = BenchmarkTable(commit, at, name_of_machine(), cases, weights, failed, settings)
    compared = publish(table, plan, project, home, logs)
    return conclude(compared, plan)


def check_plan(plan: BenchmarkPlan, project: Path, home: Path) -> dict[str, RunConfig]:
    """Return case -> configuration, after checking all that can be checked before the first minute.

    Raises:
        ConfigError: for an empty plan, a missing or wrong configuration or script, or a ledger
            outside a DVC project.
    """
    if not (plan.configs and plan.seeds) and not plan.scripts:
        raise ConfigError("the plan measures nothing; name configs with seeds, or scripts")
    found = {
        f"{Path(path).stem} seed {seed}": load_config(project / path, [*plan.overrides, f"run.seed={seed}"])
        for path in plan.configs
        for seed in plan.seeds
    }
    for script in plan.scripts:
        if not (project / script.split()[0]).is_file():
            raise ConfigError(f"there is no script {script.split()[0]} under {project}; correct plan.scripts")
    if plan.record:
        find_project(None, home)
    read_tables(project / plan.results)
    return found


def measure_run(config: RunConfig) -> dict[str, Any]:
    """Run one configuration to its end as a flow run of its own and return its outcome.

    Raises:
        AntiphonError: with the reason, when it did not complete.
    """
    display, options = ToldView(RunDisplay()), RunOptions(fresh=True)
    with claim_run(config, None, home_directory(), display, options) as run:
        try:
            outcome = post_train(run.config, run.run_id)
        except FailedRun as error:  # none of its steps trained anything
            raise AntiphonError(str(error)) from error
    if not isinstance(outcome, dict):
        raise AntiphonError(f"the run did not complete: {outcome}")
    return outcome


def run_metrics(outcome: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of a finished run, from its outcome."""
    figures = outcome["figures"]
    metrics = {name: figures.get(figure) for figure, name in RUN_METRICS.items()}
    metrics["total_s"] = outcome.get("total_s")
    if figures.get("reward_first") is not None:
        metrics["pass_gain"] = figures["reward_last"] - figures["reward_first"]
    return flatten(metrics)


@task(task_run_name="{script} #{number}", cache_policy=NO_CACHE, persist_result=False)
def measure_script(script: str, number: int, timeout_s: float, project: str, logs: str) -> dict[str, float]:
    """Run one script once and return the numbers of the JSON object it ends with; adds its seconds.

    Raises:
        AntiphonError: when it ended with another status than 0: what it checks is violated.
    """
    started = time.perf_counter()
    log = Path(logs) / f"{Path(script.split()[0]).stem}-{number}.log"
    found = run_script(script, Path(project), timeout_s, log)
    return {**flatten(found), "script_seconds": round(time.perf_counter() - started, 2)}


@contextmanager
def noted(case: str, failed: dict[str, str]) -> Iterator[None]:
    """Note why a case failed and continue; a benchmark that is stopped stops."""
    try:
        yield
    except RunStopped:
        raise
    except AntiphonError as error:
        _log.warning("benchmark.failed", case=case, reason=str(error))
        failed[case] = str(error)


def publish(
    table: BenchmarkTable, plan: BenchmarkPlan, project: Path, home: Path, logs: Path
) -> ComparedTable:
    """Compare a table with those in the results folder, write everything, and return the comparison."""
    folder = project / plan.results
    compared = compare_tables(table, read_tables(folder))
    path = write_table(folder, compared)
    tables = read_tables(folder)
    page = build_benchmark_page(compared, tables, folder / "index.html")
    if plan.record:
        config = load_config(project / plan.configs[0]) if plan.configs else RunConfig()
        pin_table(path, find_project(None, home), config.record.ledger)
    if plan.track:
        track(compared, plan, logs, home, [path, page])
    # On the flow run's page stand the comparison and the place of ours.
    key, before = table.commit, compared.before or "nothing yet"
    rows = rows_of(compared, tables)
    create_table_artifact(rows, key=artifact_key("figures", key), description=f"Metrics of {key}")
    note = f"[{page.name}]({page.as_uri()}), compared with {before}"
    create_markdown_artifact(note, key=artifact_key("page", key), description="Page with history")
    return compared


def track(compared: ComparedTable, plan: BenchmarkPlan, logs: Path, home: Path, files: list[Path]) -> None:
    """Log a table as one MLflow run: medians and the first case at step 0, further cases after it."""
    table = compared.table
    logs.mkdir(parents=True, exist_ok=True)
    params = {name: str(value) for name, value in plan.model_dump(mode="json").items()}
    tags = {"commit": table.commit, "before": compared.before, "machine": table.machine}
    params["cases"] = str(len(table.cases))
    at = datetime.fromisoformat(table.at).timestamp()
    try:
        run = open_run(home, logs / "mlflow.json", "benchmarks", table.commit, params, tags)
        with explained(run.uri):
            for step, metrics in enumerate(table.cases.values()):
                entries = {f"case/{name}": value for name, value in metrics.items()}
                if step == 0:
                    entries |= table.medians() | {"regressions": float(len(compared.worse()))}
                run.log_summary(step, entries, at)
            for file in files:
                run.client.log_artifact(run.run_id, str(file))
            run.client.set_terminated(run.run_id, "FINISHED")
    except AntiphonError as error:
        _log.warning("benchmark.untracked", reason=str(error))


def conclude(compared: ComparedTable, plan: BenchmarkPlan) -> dict[str, Any]:
    """Return what came of it in plain values.

    Raises:
        AntiphonError: when a case failed or a metric got worse beyond noise, and the plan says to fail.
    """
    worse, table = compared.worse(), compared.table
    bad = []
    if worse:
        bad.append(f"{table.commit} is worse than {compared.before} beyond noise in {', '.join(worse)}")
    bad += [f"{case} failed: {reason}" for case, reason in table.failed.items()]
    if bad and plan.on_regression == "fail":
        raise AntiphonError(f"{'; '.join(bad)}; see {plan.results}/index.html")
    return {
        "commit": table.commit,
        "before": compared.before,
        "worse": worse,
        "cases": len(table.cases),
        "failed": sorted(table.failed),
    }
