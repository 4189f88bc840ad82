"""Delivery metrics: how versions came to the workers, as MLflow draws it."""

from collections.abc import Sequence

from antiphon.core.reporting.deliveries import VersionDeliveries
from antiphon.lineage.tracking.tracked_run import TrackedRun

SECTION = "weights"
"""By its letters after all others: what is learned comes first."""
VERSIONS_PER_CALL = 200
"""MLflow takes 1,000 metrics in a call."""


def log_deliveries(run: TrackedRun, versions: Sequence[VersionDeliveries]) -> None:
    """Log each version's deliveries once, at the step of its number."""
    from mlflow.entities import Metric

    known = {point.step for point in run.client.get_metric_history(run.run_id, f"{SECTION}/workers")}
    new = [version for version in versions if version.version not in known]
    for start in range(0, len(new), VERSIONS_PER_CALL):
        entries = [
            Metric(f"{SECTION}/{name}", value, int(version.at * 1000), version.version)
            for version in new[start : start + VERSIONS_PER_CALL]
            for name, value in _metrics(version).items()
        ]
        run.client.log_batch(run.run_id, metrics=entries)


def _metrics(version: VersionDeliveries) -> dict[str, float]:
    return {
        "seconds_to_last": version.seconds_to_last,
        "bytes": float(version.bytes),
        "relayed_share": version.relayed_share,
        "workers": float(version.workers),
    }
