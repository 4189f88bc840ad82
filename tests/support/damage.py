"""Damage: artifacts altered on purpose, one bit at a time, and put back."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from antiphon.lineage.layout import journal_of, pointer_of
from antiphon.lineage.ledger.verify import identity


def files_of_run(home: Path, run_id: str) -> list[Path]:
    """Return every file of the store, the ledger and the DVC cache; of names of one file the first."""
    cache, ledger = home / ".dvc" / "cache" / "files", home / "ledger"
    tree = pointer_of(ledger / run_id).read_text().split("md5: ")[1].split()[0]
    files = [path for folder in (home / "store" / "objects", ledger) for path in sorted(folder.rglob("*"))]
    # Trees of earlier publications stay in the cache until `dvc gc`; no pointer names them.
    files += [p for p in sorted(cache.rglob("*")) if not p.name.endswith(".dir") or p.name == tree[2:]]
    single = {identity(path): path for path in reversed(files) if path.is_file()}
    # The journal of a ledger that is published says nothing that its pointer does not.
    spare = {ledger / ".gitignore", journal_of(ledger / run_id)}
    return sorted(path for path in single.values() if path not in spare and path.stat().st_size)


@contextmanager
def flipped(path: Path, position: int, bit: int) -> Iterator[None]:
    """Alter one bit of a file and put it back."""
    mode = stat.S_IMODE(path.stat().st_mode)
    os.chmod(path, 0o644)
    with path.open("r+b") as file:
        file.seek(position)
        (old,) = file.read(1)

        def write(value: int) -> None:
            file.seek(position)
            file.write(bytes([value]))
            file.flush()

        write(old ^ (1 << bit))
        try:
            yield
        finally:
            write(old)
            os.chmod(path, mode)
