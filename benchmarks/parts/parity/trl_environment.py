"""Parity parts: an environment of its own for TRL, on top of this project's.

It sees the packages of the environment that runs this script and adds TRL with what it needs, so both
sides train with the same torch and transformers, and nothing of it enters the project's environment.
"""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

PACKAGES = ("trl==1.16.0", "accelerate==1.15.0", "datasets==5.2.0", "multiprocess", "xxhash")
"""Without what they depend on in turn: the project's environment has that."""
INSTALL_S = 600.0


class MissingTrlError(Exception):
    """TRL cannot be had here; the text says why."""


def trl_python(home: Path) -> Path:
    """Return the interpreter of TRL's environment under `home`, made if need be.

    Raises:
        MissingTrlError: when it cannot be installed.
    """
    folder = home / f"trl-{PACKAGES[0].partition('==')[2]}"
    python = folder / "bin" / "python"
    if (folder / "complete").exists():
        return python
    venv.create(folder, clear=True, with_pip=True)
    site = next((folder / "lib").glob("python*/site-packages"))
    # Unlike a plain path, this also reads the .pth files there, by which the project itself is found.
    ours = sysconfig.get_paths()["purelib"]
    (site / "project.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    command = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", *PACKAGES]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=INSTALL_S, env={**os.environ, "PYTHONPATH": ""}
    )
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["pip said nothing"]
        raise MissingTrlError(f"{PACKAGES[0]} cannot be installed: {lines[-1][:300]}")
    (folder / "complete").touch()
    return python


if __name__ == "__main__":
    print(trl_python(Path(sys.argv[1])))
