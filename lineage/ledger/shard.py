"""Ledger shard: one DVC-tracked directory, whole after a kill at any point.

An entry is first in DVC's cache, then in the directory, then a line of the journal. Publishing
writes the tree of all entries, flushed to the disk, before the pointer that names it. So
a pointer never names what is missing, and whatever a process had not finished is finished by
the next one that appends the same entries.

Entries never change; those that retention takes away leave in the opposite order: a line of the
journal, then the tree and the pointer without them, then DVC's cache, and the file last.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog
from dvc.repo import Repo
from dvc_data.hashfile.hash import hash_file
from dvc_data.hashfile.hash_info import HashInfo
from dvc_objects.fs import generic
from dvc_objects.fs.local import localfs

from antiphon.core.errors import IntegrityError, UnavailableError
from antiphon.lineage.layout import (
    Entry,
    ShardJournal,
    journal_line,
    journal_of,
    journal_text,
    kept_pointer_of,
    pointer_bytes,
    pointer_of,
    read_journal,
    read_pointer,
    read_tree,
    tree_bytes,
    tree_name,
)
from antiphon.system.files import PREFIX, write_atomically

_PROTECTED = 0o444
"""DVC trusts a cached file of this mode without reading it again."""
_log = structlog.get_logger("antiphon.lineage")


class Shard:
    """The entries of one directory; used by one thread of one process at a time."""

    def __init__(self, repo: Repo, directory: Path, kept: bool) -> None:
        """Open a shard, continuing where an earlier process stopped; a `kept` one has a ``.dvc`` file.

        Raises:
            UnavailableError: when its tree is neither in the cache nor in its journal.
        """
        self._repo = repo
        self._cache: Any = repo.cache.local
        self.directory = directory
        self._kept = kept
        self._journal = journal_of(directory)
        self.entries: dict[str, Entry] = {}
        self._leaving: dict[str, Entry] = {}
        self.unpublished = 0
        """Entries appended since the last `publish`."""
        directory.mkdir(parents=True, exist_ok=True)
        self._sweep()
        self._restore()

    @property
    def pointer(self) -> Path:
        """Return where its pointer lies; a ledger may be kept while it is written."""
        return kept_pointer_of(self.directory) if self._kept else pointer_of(self.directory)

    def append(self, rel: str, payload: Path | bytes) -> str:
        """Pin one artifact and return its md5; see `pins.Ledger.append`."""
        target = self.directory / rel
        source = self._source(payload, target)
        meta, found = hash_file(str(source), localfs, "md5")
        md5 = str(found.value)
        known = self.entries.get(rel)
        if known is not None and known.md5 != md5:
            raise IntegrityError(
                f"ledger entry {rel} of {self.directory.name} is pinned as {known.md5}, not {md5}; "
                "entries never change"
            )
        if known is not None and target.exists():
            return md5
        self._cache.add(str(source), localfs, md5, hardlink=True)
        if source is not target:
            self._materialise(found, target)
        if known is None:
            entry = Entry(rel, md5, int(meta.size))
            with self._journal.open("a", encoding="utf-8") as journal:
                journal.write(journal_line(entry))
            self.entries[rel] = entry
            self._leaving.pop(rel, None)
            self.unpublished += 1
        return md5

    def leave(self, rel: str) -> None:
        """Note that an entry leaves; its file stays until `clear`."""
        entry = self.entries[rel]
        with self._journal.open("a", encoding="utf-8") as journal:
            journal.write(journal_line(entry, left=True))
        self._leaving[rel] = self.entries.pop(rel)
        self.unpublished += 1

    @property
    def leaving(self) -> bool:
        """Return whether files of entries that left are still there."""
        return bool(self._leaving)

    def clear(self, needed: Callable[[str], bool], release: Callable[[Path], bool]) -> None:
        """Remove the files of entries that left; the tree without them must be published.

        Their bytes leave the cache too, unless an entry of that md5 is `needed`; `release` is given the file
        before, and returns whether nobody but this ledger holds its bytes there.
        """
        for rel, entry in list(self._leaving.items()):
            place = self.directory / rel
            if place.exists():
                if not needed(entry.md5) and release(place):
                    self._cached(entry.md5).unlink(missing_ok=True)
                place.unlink()
            del self._leaving[rel]

    def publish(self) -> str:
        """Write the tree of all entries and the pointer that names it; return its md5."""
        body = tree_bytes(self.entries)
        tree = tree_name(body)
        place = self._cached(tree)
        if not place.is_file() or place.read_bytes() != body:
            write_atomically(place, body, _PROTECTED)
        _flush(self._journal)
        size = sum(entry.size or 0 for entry in self.entries.values())
        write_atomically(self.pointer, pointer_bytes(self.directory, tree, size, len(self.entries)))
        self.unpublished = 0
        return tree

    def _source(self, payload: Path | bytes, target: Path) -> Path:
        if isinstance(payload, Path):
            return payload
        if not target.exists():
            write_atomically(target, payload)
        if target.read_bytes() != payload:
            raise IntegrityError(f"{target} already holds other bytes; ledger entries never change")
        return target

    def _materialise(self, info: HashInfo, target: Path) -> None:
        if target.exists():
            target.unlink()  # an earlier attempt ended between linking and the journal
        target.parent.mkdir(parents=True, exist_ok=True)
        links = [*self._cache.cache_types, "copy"]
        generic.transfer(self._cache.fs, str(self._cached(info.value)), localfs, str(target), links=links)
        self._repo.state.save(str(target), localfs, info)

    def _sweep(self) -> None:
        """Remove what a killed process left half-written: the directory is DVC's to the last file."""
        for path in self.directory.rglob(".*"):
            if path.name.startswith(PREFIX) or path.suffix == ".tmp":
                path.unlink()

    def _restore(self) -> None:
        journal = self._journalled()
        journalled = journal.entries
        published = {entry.rel: entry for entry in self._published(journal)}
        for entry in published.values():
            if entry.rel in journal.left:
                continue
            known = journalled.get(entry.rel)
            size = known.size if known else self._cached_size(entry.md5)
            self.entries[entry.rel] = Entry(entry.rel, entry.md5, size)
        for rel, entry in journalled.items():
            if rel not in self.entries and self._intact(entry):
                self.entries[rel] = entry
        self.unpublished = len(self.entries.keys() ^ published.keys())
        self._leaving = {rel: left for rel, left in journal.left.items() if (self.directory / rel).exists()}

    def _published(self, journal: ShardJournal) -> list[Entry]:
        if not self.pointer.is_file():
            return []
        kept = self.pointer.suffix == ".dvc"
        with _naming(
            self.pointer, "git has the file as it was" if kept else "remove it: the journal has all"
        ):
            out = read_pointer(self.pointer.read_bytes())
        path = self._cached(out["md5"])
        if path.is_file() and tree_name(body := path.read_bytes()) == out["md5"]:
            return read_tree(body)
        # The disk may have lost the tree while the journal, which is flushed before it, has it all.
        journalled = journal.entries
        body = tree_bytes(journalled)
        if tree_name(body) != out["md5"] and len(journalled) + len(journal.left) < out["nfiles"]:
            raise UnavailableError(
                f"{self.pointer} names a tree that is not in the DVC cache; "
                f"run `dvc pull {self.pointer}` first"
            )
        _log.warning("ledger.tree_rebuilt", shard=self.directory.name, entries=len(journalled))
        return []

    def _journalled(self) -> ShardJournal:
        text = journal_text(self.directory)
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            # A process died while writing the last line; no one counts on this entry.
            os.truncate(self._journal, len(whole.encode()))
        with _naming(self._journal, "remove the file if the .dvc file beside it is there"):
            return read_journal(whole)

    def _intact(self, entry: Entry) -> bool:
        if self._cached_size(entry.md5) == entry.size:
            return True
        _log.warning("ledger.entry_lost", run=self.directory.name, rel=entry.rel, md5=entry.md5)
        return False

    def _cached(self, name: str) -> Path:
        return Path(self._cache.oid_to_path(name))

    def _cached_size(self, md5: str) -> int:
        cached = self._cached(md5)
        return cached.stat().st_size if cached.is_file() else 0


@contextmanager
def _naming(path: Path, fix: str) -> Iterator[None]:
    try:
        yield
    except IntegrityError as error:
        raise IntegrityError(f"{path}: {error}; {fix}") from error


def _flush(path: Path) -> None:
    if path.is_file():
        with path.open("rb") as file:
            os.fsync(file.fileno())
