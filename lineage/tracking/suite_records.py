"""Suite records: a suite's scores in MLflow, in the run whose version was evaluated, and its items.

`suite/NAME/avg_at_1` and the like are drawn at the version, so beside the held-out curve, and the items of
each evaluation are one table, an artifact that a repeated call writes over.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from antiphon.core.reporting.suite_scores import SuiteResult
from antiphon.lineage.tracking.charts import plain_name
from antiphon.lineage.tracking.mlflow_client import client_at, explained
from antiphon.lineage.tracking.tracked_run import points

COLUMNS = ("key", "prompt", "reference", "rewards", "answers", "completion")
"""Of the table of items; rewards and answers are JSON, the completion is the first one."""


def log_suite(run_dir: Path, result: SuiteResult, items: Sequence[Sequence[str]], at: float) -> None:
    """Log a result and its items, where `mlflow.json` in the run's folder says that MLflow has the run.

    Args:
        run_dir: the run's folder.
        result: of a version.
        items: a row of `COLUMNS` for each.
        at: Unix seconds, at which the points stand; those of an equal score stay where they are.

    Raises:
        ConfigError, ContractError, UnavailableError: when MLflow refuses, or does not answer.
    """
    mapping, version = run_dir / "mlflow.json", result.version
    if version is None or not mapping.exists():
        return
    known = json.loads(mapping.read_text(encoding="utf-8"))
    metrics: dict[str, float] = {}
    for name, one in result.scores.items():
        stem = f"suite/{plain_name(result.suite.replace('+', '_plus'))}/{name.replace('@', '_at_')}"
        metrics |= {stem: one.mean, f"{stem}_low": one.low, f"{stem}_high": one.high}
    table = json.dumps({"columns": COLUMNS, "data": items})
    with explained(known["tracking_uri"]):
        client = client_at(known["tracking_uri"])
        average = next(iter(metrics))
        logged = client.get_metric_history(known["run_id"], average)
        if (version, metrics[average]) not in {(point.step, point.value) for point in logged}:
            client.log_batch(known["run_id"], metrics=points(metrics, version, at))
        client.log_text(known["run_id"], table, f"suites/{result.suite}-v{version}.json")
