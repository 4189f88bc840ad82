"""A suite's scores and items in MLflow: drawn at the version, one table, and no point twice."""

import json
from pathlib import Path

from antiphon.lineage.tracking.mlflow_client import client_at
from antiphon.lineage.tracking.suite_records import log_suite
from antiphon.lineage.tracking.tracked_run import open_run
from tests.support.suite_results import suite_result

ITEMS = [[f"heldout-0-{n}", "1 + 1 =", "2", "[1.0]", "null", "2"] for n in range(3)]


def test_scores_are_drawn_at_the_version_beside_a_table_of_the_items(tmp_path: Path) -> None:
    mapping = tmp_path / "runs" / "demo-1" / "mlflow.json"
    mapping.parent.mkdir(parents=True)
    log_suite(mapping.parent, suite_result("mbpp+", 4, 0.5), ITEMS, 10.0)
    tracked = open_run(tmp_path, mapping, "demo", "demo-1", {}, {})
    client = client_at(tracked.uri)
    for at, (version, mean) in enumerate(((4, 0.5), (8, 0.7), (8, 0.7))):
        log_suite(mapping.parent, suite_result("mbpp+", version, mean), ITEMS, 10.0 + at)
    found = client.get_metric_history(tracked.run_id, "suite/mbpp_plus/avg_at_1")
    assert [(point.step, point.value) for point in found] == [(4, 0.5), (8, 0.7)]
    path = Path(client.download_artifacts(tracked.run_id, "suites/mbpp+-v8.json", str(tmp_path)))
    table = json.loads(path.read_text())
    assert table["columns"][:2] == ["key", "prompt"] and table["data"] == ITEMS
    log_suite(mapping.parent, suite_result("mine (2)", 8, 0.5), ITEMS, 20.0)
    assert client.get_metric_history(tracked.run_id, "suite/mine _2_/avg_at_1")
