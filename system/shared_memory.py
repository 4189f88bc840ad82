"""Shared memory: names for what the processes of one engine share, and the end of what killed ones left.

A name begins with its user's number, that of the namespace of process ids and that of the process it was made
for, so that others can see whether that is still there, and ends with a part of its own for each start.
"""

import contextlib
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

from antiphon.system.clock import wall_clock

SHARED = Path("/dev/shm")
"""Where Linux shows shared memory as files."""
_NAMESPACE = os.stat("/proc/self/ns/pid").st_ino
"""Containers may share memory and no process ids."""
ENGINES = re.compile(rf"antiphon-\d+-(?:{_NAMESPACE}-(\d+)|\d+)-.+")
"""Of `new_name`; where the name has the id of its maker's process, in this namespace, it is a group."""
SEGMENT = re.compile(
    rf"{ENGINES.pattern}|psm_.+|sem\.mp-.+|.+-cpushm|torch_(\d+)_.+|__KMP_REGISTERED_LIB_(\d+)_.+"
)
"""What a run's processes make, in multiprocessing, vLLM, torch and its threads too."""
SETTLED_S = 60.0
"""A younger file without that id may wait, closed, for the process that its maker hands it to."""


def new_name() -> str:
    """Return a name for the shared memory of this process, and of those that it starts."""
    return f"antiphon-{os.getuid()}-{_NAMESPACE}-{os.getpid()}-{secrets.token_hex(4)}"


def leftovers(folder: Path, processes: Path = Path("/proc")) -> Iterator[Path]:
    """Yield this user's files of shared memory that no process of theirs has mapped or open, by name."""
    used: set[str] = set()
    for process in processes.iterdir() if folder.is_dir() else ():
        if not process.name.isdecimal():
            continue
        try:
            if process.stat().st_uid != os.getuid():
                continue
            text = (process / "maps").read_text(errors="replace")
            used |= {line.split(maxsplit=5)[5] for line in text.splitlines() if str(folder) in line}
            for one in (process / "fd").iterdir():
                with contextlib.suppress(FileNotFoundError):  # it has closed that one just now
                    used.add(os.readlink(one))
        except OSError:  # it has just ended
            continue
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):  # whose process removed it just now
            if path.is_file() and path.stat().st_uid == os.getuid() and str(path) not in used:
                yield path


def remove_leftovers(
    folder: Path = SHARED, processes: Path = Path("/proc"), named: re.Pattern[str] = SEGMENT
) -> Iterator[Path]:
    """Remove the `leftovers` of runs whose maker is gone, and yield each.

    Their names are as `named` says. The process of which a name has the id does not exist; a file without
    one, which nothing has mapped or open, is older than `SETTLED_S`.
    """
    now = wall_clock()
    for path in leftovers(folder, processes):
        found = named.fullmatch(path.name)
        with contextlib.suppress(FileNotFoundError):  # its maker's resource tracker was quicker
            maker = found and next(filter(None, found.groups()), None)
            gone = not (processes / maker).exists() if maker else now - path.stat().st_mtime > SETTLED_S
            if found and gone:
                path.unlink()
                yield path
