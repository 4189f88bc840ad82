"""First use: what the first run of an environment would otherwise have to make while it starts.

    python -m antiphon.runs.first_use

compiles the project's modules and the draft and patch kernels into their caches on disk, makes empty
databases of Prefect and MLflow that new homes begin with, and looks at the demo's model. Set-up calls it
once; without it the first run makes all itself, seconds later.
"""

import compileall
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from antiphon.core.drafting.forest import DraftForest
from antiphon.core.errors import UnavailableError
from antiphon.core.records import TensorEntry
from antiphon.lineage.tracking.mlflow_client import make_tables
from antiphon.services.learner.asked_tensors import check_weights
from antiphon.system.set_up import empty_database
from antiphon.weights.patch import apply_patch, encode_patch

MIGRATE_S = 300.0
"""Longest time that Prefect may take for its tables."""


def compile_modules(project: Path) -> None:
    """Compile the packages in a checkout: where Python may write no bytecode, each process would do so again.

    Args:
        project: folder that holds the packages.
    """
    for package in sorted(place.parent for place in project.glob("*/__init__.py")):
        compileall.compile_dir(package, quiet=1)


def compile_kernels() -> None:
    """Run every compiled kernel once on a little data of each kind that runs bring."""
    DraftForest(slots=1, max_window=4, min_match=2)
    for dtype, width in (("float32", 4), ("bfloat16", 2)):
        parent, new = np.zeros(16 * width, dtype=np.uint8), np.ones(16 * width, dtype=np.uint8)
        size = parent.nbytes
        tensors = [TensorEntry(name="w", dtype=dtype, shape=(16,), offset=0, length=size)]
        patch, full, made = bytearray(), bytearray(), bytearray()
        old_digest, digest = "1" * 64, "2" * 64
        encode_patch(
            parent.data, new.data, tensors, patch.extend, parent_digest=old_digest, result_digest=digest
        )
        encode_patch(None, new.data, tensors, full.extend, result_digest=digest)
        apply_patch(parent.data, patch, tensors, made.extend, parent_digest=old_digest, result_digest=digest)
        apply_patch(None, full, tensors, made.extend, result_digest=digest)


def make_empty(package: str, make: Callable[[Path], None]) -> None:
    """Keep the file that `make` leaves at a path as the empty database of a package for new homes."""
    kept = empty_database(package)
    if kept.exists():
        return
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
        made = Path(folder) / f"{package}.db"
        make(made)
        made.replace(kept)


def make_prefect_database(path: Path) -> None:
    """Let Prefect make its tables in a folder of its own, in prefect.db.

    Raises:
        subprocess.SubprocessError: when Prefect could not, or took too long.
        UnavailableError: when the file that it left is not all of the database.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment |= {
        "PREFECT_HOME": str(path.parent),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }
    command = [sys.executable, "-P", "-m", "prefect", "server", "database", "upgrade", "--yes"]
    subprocess.run(command, env=environment, check=True, timeout=MIGRATE_S, stdout=subprocess.DEVNULL)
    if path.with_name("prefect.db-wal").exists():
        raise UnavailableError("Prefect left its new database unfinished; the first run makes one")


if __name__ == "__main__":
    project = Path(__file__).resolve().parents[1]
    compile_modules(project)
    check_weights(project / "examples" / "models" / "chain-sum")
    compile_kernels()
    make_empty("prefect", make_prefect_database)
    make_empty("mlflow", make_tables)
