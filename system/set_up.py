"""Set-up: where this environment keeps what set-up made once, so that no run has to."""

import sys
from importlib import metadata
from pathlib import Path


def made_once(name: str) -> Path:
    """Return where a file lies that is made once for all runs of this environment."""
    return Path(sys.prefix) / "share" / "antiphon" / name


def empty_database(package: str) -> Path:
    """Return where a database with a package's tables and no rows lies, if set-up made one."""
    return made_once(f"{package}-{metadata.version(package)}.db")
