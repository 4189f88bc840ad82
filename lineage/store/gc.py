"""Garbage: which objects of the store are needed no more, found cautiously, and removed on demand.

Whatever looks like a digest in something that is kept keeps the object of that name: in the
documents of runs, in their journals, in the ledgers, in the objects that these name. An object
whose bytes a ledger pins stays too, and so does what a remote store still lacks. So an object
may be kept in vain, but none that a run still needs goes.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from antiphon.core.errors import ConfigError, UnavailableError
from antiphon.lineage import layout
from antiphon.lineage.store.artifact_store import waiting_objects
from antiphon.system.files import hold

DOCUMENT_BYTES = 16 << 20
"""Largest JSON object of the store that is searched for further names."""

_DIGEST = re.compile(rb"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")
_BULK = {"calls", "checkpoints", "logs", "payloads", "saved", "workers"}
"""Folders of a run that name their content by other digests than the store's."""


@dataclass(frozen=True, slots=True)
class Survey:
    """What a store holds and what of it is not needed."""

    kept: int
    """Objects that are needed."""
    unneeded: tuple[Path, ...]
    """Objects and leftovers of broken writes that are not needed."""
    freed_bytes: int
    """Bytes that removing them frees; an object that the ledger links to frees none."""


def digests_in(text: bytes) -> set[str]:
    """Return everything in `text` that has the form of a digest."""
    return {name.decode() for name in _DIGEST.findall(text)}


def digests_of_run(run_dir: Path) -> set[str]:
    """Return the digests that the documents in a run's folder name; its journal is not read."""
    found: set[str] = set()
    for path in run_dir.rglob("*"):
        if path.relative_to(run_dir).parts[0] in _BULK or path.suffix in {".db", ".html"}:
            continue
        if path.is_file():
            found |= digests_in(path.read_bytes())
    return found


def pinned(ledger: Path, cache: Path, without: Set[str] = frozenset()) -> set[str]:
    """Return the md5 of everything that the ledgers in a folder pin, those of some runs left out.

    Raises:
        UnavailableError: when it is not known what a ledger pins.
        IntegrityError: when a pointer cannot be read.
    """
    found: set[str] = set()
    for name in layout.ledger_names(ledger):
        for directory in layout.shard_directories(ledger, name) if name not in without else ():
            files, pointer = layout.files_in(directory), layout.pointer_of(directory)
            if pointer.is_file():
                out = layout.read_pointer(pointer.read_bytes())
                entries = layout.read_tree(cache / "files" / "md5" / out["md5"][:2] / out["md5"][2:])
                if entries is None and len(files) < out["nfiles"]:
                    raise UnavailableError(
                        f"{pointer} names a tree that is not in the DVC cache, so it is not known what it "
                        f"pins; run `dvc pull {pointer}` first"
                    )
                found |= set((entries or {}).values())
                files = {rel: path for rel, path in files.items() if rel not in (entries or {})}
            found |= set(map(_md5, files.values()))
    return found


def survey(root: Path, named: Iterable[str], pins: Set[str]) -> Survey:
    """Return which objects of the store at `root` are not needed.

    Needed is what digests of `named` lead to, and what ledgers pin by md5.
    """
    objects = root / "objects"
    needed = _reach(objects, set(named) | waiting_objects(root))
    kept, unneeded, freed = 0, [], 0
    for path in sorted(objects.glob("*/*")):
        if path.name in needed or (len(path.name) == 64 and _md5(path) in pins):
            kept += 1
        else:
            unneeded.append(path)
            status = path.stat()
            freed += status.st_size if status.st_nlink == 1 else 0
    return Survey(kept, tuple(unneeded), freed)


def sweep(found: Survey) -> None:
    """Remove what is not needed; call it while the store is held by `alone`."""
    for path in found.unneeded:
        path.unlink(missing_ok=True)


@contextmanager
def alone(root: Path) -> Iterator[None]:
    """Hold the store for this process; putting something waits until this is over.

    Raises:
        ConfigError: when a process uses the store.
    """
    held = hold(root / "lock")
    if held is None:
        raise ConfigError(
            f"{root} is in use by a run; wait until it is over, or stop it, then give the same command again"
        )
    with held:
        yield


def _reach(objects: Path, named: set[str]) -> set[str]:
    """Return `named` and what these objects name, as far as they are documents."""
    needed: set[str] = set()
    waiting = list(named)
    while waiting:
        digest = waiting.pop()
        if digest in needed:
            continue
        needed.add(digest)
        path = objects / digest[:2] / digest
        if path.is_file() and path.stat().st_size <= DOCUMENT_BYTES:
            body = path.read_bytes()
            if body[:1] in (b"{", b"["):
                waiting.extend(digests_in(body) - needed)
    return needed


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
