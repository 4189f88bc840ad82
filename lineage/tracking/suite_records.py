"""Suite records: a suite's scores in MLflow, in the run whose version was evaluated, and its items.

`suite/NAME/avg_at_1` and the like are drawn at the version, so beside the held-out curve, and the items of
each evaluation are one table, an artifact that a repeated call writes over.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from antiphon.core.reporting.suite_scores import Estimate
from antiphon.lineage.tracking.mlflow_client import client_at, explained
from antiphon.lineage.tracking.tracked_run import points


def log_suite(
    run_dir: Path,
    suite: str,
    version: int,
    scores: Mapping[str, Estimate],
    items: Sequence[Mapping[str, Any]],
    at: float,
) -> str:
    """Log the scores and items of a suite; return the table's name, "" where the run is in no MLflow.

    Args:
        run_dir: the run's folder, whose `mlflow.json` says which MLflow run it is.
        suite: name of the suite.
        version: the policy version.
        scores: avg@k and others.
        items: one row an item, all with the same keys.
        at: Unix seconds, at which the points stand; those of an equal score stay where they are.

    Raises:
        ConfigError, ContractError, UnavailableError: when MLflow refuses, or does not answer.
    """
    mapping = run_dir / "mlflow.json"
    if not mapping.exists():
        return ""
    known = json.loads(mapping.read_text(encoding="utf-8"))
    metrics: dict[str, float] = {}
    for name, estimate in scores.items():
        stem = f"suite/{suite.replace('+', '_plus')}/{name.replace('@', '_at_')}"
        metrics |= {stem: estimate.mean, f"{stem}_low": estimate.low, f"{stem}_high": estimate.high}
    columns = [*items[0]]
    table = {"columns": columns, "data": [[item[column] for column in columns] for item in items]}
    name = f"suites/{suite}-v{version}.json"
    with explained(known["tracking_uri"]):
        client = client_at(known["tracking_uri"])
        average = next(iter(metrics))
        logged = client.get_metric_history(known["run_id"], average)
        if (version, metrics[average]) not in {(point.step, point.value) for point in logged}:
            client.log_batch(known["run_id"], metrics=points(metrics, version, at))
        client.log_text(known["run_id"], json.dumps(table), name)
    return name
