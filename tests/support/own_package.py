"""The packages of examples/own-environment and examples/own-turns, built as people install them."""

import subprocess
import sys
import zipfile
from pathlib import Path
from shutil import copytree, ignore_patterns

EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE, TURNS = EXAMPLES / "own-environment", EXAMPLES / "own-turns"


def install(folder: Path, version: str = "0.1", example: Path = EXAMPLE) -> Path:
    """Build an example's wheel and unpack it, with its entry points; return the folder for PYTHONPATH.

    No network is needed.
    """
    source, target = folder / f"source-{version}", folder / f"installed-{version}"
    copytree(example, source, ignore=ignore_patterns("__pycache__", "build", "*.egg-info"))
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
