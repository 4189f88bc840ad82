"""MLflow's database of a home is whole whatever is killed while it is made."""

import signal
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from antiphon.core.errors import UnavailableError
from antiphon.lineage.tracking.mlflow_client import client_at, make_own_database
from antiphon.lineage.tracking.tracked_run import TrackedRun, open_run

DEADLINE_S = 120.0


def experiments(path: Path) -> list[str]:
    return [found.name for found in client_at(f"sqlite:///{path}").search_experiments()]


def test_a_database_that_was_left_half_made_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "mlflow" / "mlflow.db"
    path.parent.mkdir()
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE mcp_servers (name VARCHAR)")
    connection.close()
    make_own_database(tmp_path)
    assert experiments(path) == ["Default"]
    assert sorted(file.name for file in path.parent.iterdir()) == ["mlflow.db", "mlflow.unfinished"]


def test_a_database_in_use_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "mlflow" / "mlflow.db"
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(make_own_database, [tmp_path, tmp_path]))
    client_at(f"sqlite:///{path}").create_experiment("kept")
    inode = path.stat().st_ino
    make_own_database(tmp_path)
    assert path.stat().st_ino == inode
    assert "kept" in experiments(path)


def test_a_process_that_is_killed_while_it_makes_one_leaves_none(tmp_path: Path) -> None:
    words = (
        "import sys\nfrom pathlib import Path\n"
        "from antiphon.lineage.tracking.mlflow_client import make_own_database\n"
        "sys.prefix = sys.argv[1]  # without the empty one of set-up\n"
        "make_own_database(Path(sys.argv[1]))"
    )
    process = subprocess.Popen([sys.executable, "-P", "-c", words, str(tmp_path)])
    folder, deadline = tmp_path / "mlflow", time.monotonic() + DEADLINE_S
    while not list(folder.glob(".incoming-*/mlflow.db")):
        assert process.poll() is None and time.monotonic() < deadline
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (folder / "mlflow.db").exists()
    make_own_database(tmp_path)
    assert experiments(folder / "mlflow.db") == ["Default"]


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mlflow" / "mlflow.db"
    path.parent.mkdir()
    path.write_text("no database at all, but text that is long enough to be read as one" * 20)
    with pytest.raises(UnavailableError, match=r"mlflow\.db cannot be used"):
        make_own_database(tmp_path)


@pytest.mark.parametrize("name", ["moved", "moved %20?"])
def test_a_home_that_moved_continues_its_run_and_keeps_its_artifacts_together(
    tmp_path: Path, name: str
) -> None:
    """Nothing is written to the place where it was."""
    mapping = tmp_path / "mlflow.json"

    def opened(home: Path) -> TrackedRun:
        return open_run(home, mapping, "demo", "demo-1", {}, {})

    before = opened(tmp_path / "home")
    (tmp_path / "home").rename(tmp_path / name)
    after = opened(tmp_path / name)
    assert after.run_id == before.run_id
    (tmp_path / "note.txt").write_text("kept")
    after.client.log_artifact(after.run_id, str(tmp_path / "note.txt"))
    assert [file.parents[3].name for file in tmp_path.rglob("artifacts/note.txt")] == ["artifacts"]
    assert not (tmp_path / "home").exists()
    assert list((tmp_path / name).rglob("note.txt"))
