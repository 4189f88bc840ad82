"""Pages: where the servers that `antiphon up` started show a run, and the addresses of its pages there."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from antiphon.lineage.tracking.charts import experiment_link, run_link

PREFECT = "http://127.0.0.1:4200"
"""Where `antiphon up` serves Prefect's pages unless told otherwise."""
_LOOPBACK = {"127.0.0.1", "localhost", "::1"}


def served(home: Path, name: str) -> str:
    """Return the address at which `antiphon up` serves "mlflow" or "prefect"; "" where it does not."""
    path = home / "up.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return str(known.get(name, {}).get("url", "")).rstrip("/")


def mlflow_links(run_dir: Path, home: Path) -> Mapping[str, str]:
    """Return the addresses of a run's pages in MLflow: run, report, comparison; {} where none is served."""
    mapping = run_dir / "mlflow.json"
    known = json.loads(mapping.read_text(encoding="utf-8")) if mapping.exists() else {}
    uri = str(known.get("tracking_uri", ""))
    base = uri if uri.startswith("http") else served(home, "mlflow")
    if not known or not base:
        return {}
    return {
        "run": run_link(base, known["experiment_id"], known["run_id"]),
        "report": run_link(base, known["experiment_id"], known["run_id"], "artifacts/report.html"),
        "comparison": experiment_link(base, known["experiment_id"]),
    }


def flow_run_link(run_dir: Path, home: Path) -> str:
    """Return the address of the page of the flow run that lived a run last; "" where none did.

    The server that `antiphon run` starts for itself ends with the run, so the pages of `antiphon up`, which
    show the same database, are named in its place.
    """
    path = run_dir / "prefect.json"
    if not path.exists():
        return ""
    flow_run = json.loads(path.read_text(encoding="utf-8"))["flow_run_id"]
    api = os.environ.get("PREFECT_API_URL", "").removesuffix("/").removesuffix("/api")
    distant = api if urlsplit(api).hostname not in {None, *_LOOPBACK} else ""
    return f"{distant or served(home, 'prefect') or PREFECT}/runs/flow-run/{flow_run}"
