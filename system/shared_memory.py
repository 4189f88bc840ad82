"""Shared memory: names for what the processes of one engine share, and the end of what killed ones left.

A name begins with its user's number and that of the process it was made for, so that others can see whether
that is still there, and ends with a part of its own for each start.
"""

import os
import re
import secrets
from pathlib import Path

import psutil

SHARED = Path("/dev/shm")
"""Where Linux shows shared memory as files."""


def new_name() -> str:
    """Return a name for the shared memory of this process, and of those that it starts."""
    return f"antiphon-{os.getuid()}-{os.getpid()}-{secrets.token_hex(4)}"


def sweep(folder: Path = SHARED) -> list[str]:
    """Remove the shared memory of this user's processes that are gone, and return its names."""
    found = []
    for segment in folder.glob(f"antiphon-{os.getuid()}-*"):
        owner = re.match(rf"antiphon-{os.getuid()}-(\d+)-", segment.name)
        if owner and not _is_owned(segment, int(owner[1])):
            segment.unlink(missing_ok=True)  # another process may sweep as well
            found.append(segment.name)
    return found


def _is_owned(segment: Path, pid: int) -> bool:
    """Return whether the process is there, and did not get its number after the segment was made."""
    try:
        return psutil.Process(pid).create_time() <= segment.stat().st_mtime + 1.0
    except (psutil.NoSuchProcess, FileNotFoundError):
        return False
