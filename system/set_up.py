"""Set-up: where this environment keeps what set-up made once, so that no run has to."""

import sys
from importlib import metadata
from pathlib import Path


def empty_database(package: str) -> Path:
    """Return where a database with a package's tables and no rows lies, if set-up made one."""
    return Path(sys.prefix) / "share" / "antiphon" / f"{package}-{metadata.version(package)}.db"
