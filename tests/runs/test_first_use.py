"""First use: what set-up makes, so that the first run does not have to."""

import sqlite3
import sys
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from antiphon.core.broadcast import patch_kernels
from antiphon.lineage.tracking.mlflow_client import make_own_database, make_tables
from antiphon.runs.first_use import (
    compile_kernels,
    compile_modules,
    make_empty,
    make_prefect_database,
)
from antiphon.runs.servers.prefect_server import begin_with_empty_database
from antiphon.system.set_up import empty_database


def test_new_homes_begin_with_the_tables_that_prefect_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    first, home = tmp_path / "first", tmp_path / "home"
    first.mkdir()
    home.mkdir()
    begin_with_empty_database(first)
    assert not list(first.iterdir()), "without set-up's database the server makes its own"
    make_empty("prefect", make_prefect_database)
    kept = empty_database("prefect")
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]
    begin_with_empty_database(home)
    with sqlite3.connect(home / "prefect.db") as database:
        assert database.execute("SELECT count(*) FROM task_run").fetchone() == (0,)
        assert database.execute("SELECT count(*) FROM alembic_version").fetchone() == (1,)
        database.execute("DELETE FROM alembic_version")
    begin_with_empty_database(home)
    with sqlite3.connect(home / "prefect.db") as database:
        assert database.execute("SELECT count(*) FROM alembic_version").fetchone() == (0,), "was replaced"
    assert all(path.name.startswith("prefect.db") for path in home.iterdir())
    assert not list(home.glob("prefect.db.*")), "the copy was left"


def test_new_homes_begin_with_the_tables_that_mlflow_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    make_empty("mlflow", make_tables)
    kept = empty_database("mlflow")
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]
    with sqlite3.connect(kept) as database:
        database.execute("CREATE TABLE of_the_kept_one (x INTEGER)")
    make_own_database(tmp_path / "home")
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'home' / 'mlflow' / 'mlflow.db'}")
    assert [found.name for found in client.search_experiments()] == ["Default"]
    with sqlite3.connect(tmp_path / "home" / "mlflow" / "mlflow.db") as database:
        assert database.execute("SELECT count(*) FROM of_the_kept_one").fetchone() == (0,), "made again"


def test_the_kernels_are_compiled_for_both_widths() -> None:
    compile_kernels()
    widths = {str(signature[0].dtype) for signature in patch_kernels.find_changes.signatures}
    assert {"uint16", "uint32"} <= widths


def test_packages_are_compiled_and_nothing_else(tmp_path: Path) -> None:
    package, other = tmp_path / "package", tmp_path / "other"
    for folder in (package, other):
        folder.mkdir()
        (folder / "module.py").write_text("x = 1\n")
    (package / "__init__.py").touch()
    compile_modules(tmp_path)
    assert sorted(path.name.partition(".")[0] for path in package.glob("__pycache__/*.pyc")) == [
        "__init__",
        "module",
    ]
    assert not (other / "__pycache__").exists()
