"""Own environments: what a benchmark needs and the project does not, away from the project's packages."""

import os
import subprocess
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

INSTALL_S = 600.0


class MissingToolError(Exception):
    """A tool cannot be had here; the text says why."""


def python_with(packages: Sequence[str], beside_project: bool) -> Path:
    """Return the interpreter of an environment in the user's cache that has some packages, made if need be.

    Args:
        packages: as NAME==VERSION; the first one names the environment.
        beside_project: it sees the packages of the environment that runs this, so that both use the same
            libraries, and of `packages` none brings what it depends on.

    Raises:
        MissingToolError: when a package cannot be installed.
    """
    name, _, version = packages[0].partition("==")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "antiphon"
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / f"{name}-{version}"
    python = folder / "bin" / "python"
    made = (folder / "complete").exists()
    if not made:
        venv.create(folder, clear=True, with_pip=True)
    command = [str(python), "-m", "pip", "install", "--quiet", *packages]
    if beside_project:  # also where it is made already: perhaps by another clone, which may be gone
        site = next((folder / "lib").glob("python*/site-packages"))
        # Unlike a plain path, this also reads the .pth files there, by which the project itself is found.
        ours = sysconfig.get_paths()["purelib"]
        (site / "project.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
        command.insert(4, "--no-deps")
    if made:
        return python
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=INSTALL_S, env={**os.environ, "PYTHONPATH": ""}
    )
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["pip said nothing"]
        raise MissingToolError(f"{packages[0]} cannot be installed: {lines[-1][:300]}")
    (folder / "complete").touch()
    return python
