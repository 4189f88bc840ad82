"""Libraries of records are loaded before the writers need them, and only those that a run needs."""

import subprocess
import sys

import pytest

LATE = """
import os, sys, tempfile
from pathlib import Path
os.environ.pop("MLFLOW_TRACKING_URI", None)
from antiphon.core.config_sections import RecordSection
from antiphon.runs.live_run import load_libraries
from antiphon.lineage.tracking.mlflow_client import make_own_database

load_libraries(RecordSection(mlflow={mlflow}, dvc={dvc})).join()
known = set(sys.modules)
print(*sorted({{"mlflow", "dvc"}} & known))
if {mlflow} and {dvc}:
    from antiphon.lineage.ledger.pins import Ledger
    from mlflow.tracking import MlflowClient
    with tempfile.TemporaryDirectory() as home:
        make_own_database(Path(home))
        client = MlflowClient(f"sqlite:///{{home}}/mlflow/mlflow.db")
        client.log_metric(client.create_run(client.create_experiment("e")).info.run_id, "m", 1.0)
    libraries = ("mlflow", "sqlalchemy", "alembic", "dvc", "pandas")
    print(*sorted(name for name in set(sys.modules) - known if name.partition(".")[0] in libraries))
"""


def loaded(mlflow: bool, dvc: bool) -> list[str]:
    code = LATE.format(mlflow=mlflow, dvc=dvc)
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_what_the_first_records_need_is_loaded_before_them() -> None:
    names, late = loaded(mlflow=True, dvc=True)

    assert names == "dvc mlflow"
    assert len(late.split()) <= 30, late  # hundreds without it


@pytest.mark.parametrize(("mlflow", "dvc", "names"), [(True, False, "mlflow"), (False, False, "")])
def test_nothing_else_is_loaded(mlflow: bool, dvc: bool, names: str) -> None:
    assert loaded(mlflow, dvc) == [names]
