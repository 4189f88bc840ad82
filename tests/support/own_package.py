"""The package of examples/own-environment, built as people install it, without network."""

import subprocess
import sys
import zipfile
from pathlib import Path
from shutil import copytree

EXAMPLE = Path(__file__).parents[2] / "examples" / "own-environment"


def install(folder: Path, version: str = "0.1") -> Path:
    """Build the example's wheel and unpack it, with its entry points; return the folder for PYTHONPATH."""
    source, target = folder / f"source-{version}", folder / f"installed-{version}"
    copytree(EXAMPLE, source, ignore=lambda *_: ["__pycache__", "build", "near_sums.egg-info"])
    project = source / "pyproject.toml"
    project.write_text(project.read_text().replace('version = "0.1"', f'version = "{version}"'))
    command = "import setuptools.build_meta as b; print(b.build_wheel('out'))"
    (source / "out").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", command], cwd=source, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    with zipfile.ZipFile(next((source / "out").glob("*.whl"))) as wheel:
        wheel.extractall(target)
    return target
