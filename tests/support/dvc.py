"""DVC's own command, as a person types it."""

import os
import subprocess
import sys
from pathlib import Path


def dvc(folder: Path, *arguments: str) -> str:
    """Run it in `folder` and return what it printed; it must succeed."""
    done = subprocess.run(
        [str(Path(sys.executable).with_name("dvc")), *arguments],
        cwd=folder,
        env={**os.environ, "DVC_NO_ANALYTICS": "true"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
