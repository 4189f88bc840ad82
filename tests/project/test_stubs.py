"""The committed gRPC stubs are what the .proto files give."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_stubs_are_current(tmp_path: Path) -> None:
    done = subprocess.run(
        [ROOT / "scripts" / "protos", tmp_path],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    made = {path.name: path.read_text() for path in (tmp_path / "antiphon" / "protos").iterdir()}
    committed = {path.name: path.read_text() for path in (ROOT / "protos").glob("*_pb2*.py*")}
    assert made.keys() == committed.keys(), "run scripts/protos"
    assert [name for name in made if made[name] != committed[name]] == [], "run scripts/protos"
