"""Pins: every artifact of a run as an entry of a DVC-tracked directory, appended in process.

A run's ledger is the directory ``<folder>/<run>`` with a pointer beside it that names the tree of its
entries. An entry is first a line of the journal, name and md5, then in DVC's cache and then, under its name,
in the directory. So the next process that opens the ledger knows what a killed one had not published, and
takes nothing else that lies there for it. Publishing writes the tree, flushed to the disk, before the pointer
and empties the journal but for the tree's name. Appending takes a few milliseconds, where the command needs
seconds. ``dvc status``, ``push``, ``pull``, ``checkout`` and ``gc`` work on ledgers that are kept.

Entries never change; those that retention takes away leave in the same order: a line of the journal, the tree
and the pointer without them, DVC's cache, and the file last. A long run of an earlier release has further
directories of the same form, its shards; they are read, and the last one is written on.
"""

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import structlog
from dvc.exceptions import DvcException, NotDvcRepoError
from dvc.repo import Repo
from dvc_data.hashfile.hash import file_md5, hash_file
from dvc_data.hashfile.hash_info import HashInfo
from dvc_data.hashfile.meta import Meta
from dvc_data.hashfile.tree import Tree
from dvc_objects.fs import generic
from dvc_objects.fs.local import localfs

from antiphon.core.errors import ConfigError, IntegrityError, UnavailableError
from antiphon.lineage import layout
from antiphon.system.files import PREFIX, flush_folder, hold, write_atomically

_PROTECTED = 0o444
"""DVC trusts a cached file of this mode without reading it again."""
_log = structlog.get_logger("antiphon.lineage")


@dataclass(slots=True)
class _Shard:
    directory: Path
    entries: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Path inside the directory -> bytes and md5."""
    unpublished: set[str] = field(default_factory=set)
    """Entries that came or left since the tree was written."""
    tree: str = ""
    """Name of the tree that was written last."""


class Ledger:
    """The pinned artifacts of one run; used by one thread of one process at a time."""

    def __init__(self, project: Path, folder: str, run_id: str, kept: bool = True) -> None:
        """Open a run's ledger in the project's `folder`, continuing where an earlier process stopped.

        `run_id` names the directory and its pointer. The pointer of a `kept` ledger is a ``.dvc`` file from
        the start; else `antiphon keep` makes it one.

        Raises:
            ConfigError: when `project` is in no DVC project, or another process has the ledger open.
            IntegrityError: when its pointer was altered.
            UnavailableError: when the cache or the folder cannot be used, or the tree is not in the cache.
        """
        self._repo = _open_project(project)
        self._cache: Any = self._repo.cache.local
        self._folder = Path(self._repo.root_dir) / folder
        self._kept = kept
        self.directory = self._folder / run_id
        """Directory of the ledger."""
        with _explained(self.directory):
            self._lock = _lock(self.directory, Path(str(self._repo.tmp_dir)))
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                ignore = self._folder / ".gitignore"
                if not ignore.exists():
                    write_atomically(ignore, layout.GITIGNORE.encode())
                if kept:
                    layout.keep(self._folder, run_id)
                self._shards = [
                    self._opened(place) for place in layout.shard_directories(self._folder, run_id)
                ]
            except BaseException:
                self.release()  # the error keeps this object alive, and the ledger may be opened again
                raise
        self._homes = {rel: shard for shard in self._shards for rel in shard.entries}

    @property
    def unpublished(self) -> int:
        """Entries that came or left since the last `publish`."""
        return sum(len(shard.unpublished) for shard in self._shards)

    def __len__(self) -> int:
        return len(self._homes)

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    def md5(self, rel: str) -> str | None:
        """Return the md5 under which an entry is pinned, or None."""
        shard = self._homes.get(rel)
        return shard.entries[rel][1] if shard else None

    def path(self, rel: str) -> Path | None:
        """Return where an entry's file lies, or None when there is no such entry."""
        shard = self._homes.get(rel)
        return shard.directory / rel if shard else None

    def append(self, rel: str, payload: Path | bytes) -> str:
        """Pin one artifact under the ledger's path `rel` and return its md5.

        A file is linked where the file system can, so pinning the store's objects costs no
        space. Repeating an entry changes nothing.

        Raises:
            IntegrityError: when `rel` already holds something else; entries never change.
            UnavailableError: when there is no space left, or the file is missing.
        """
        rel = layout.check_rel(rel)
        with _explained(self.directory):
            if isinstance(payload, Path):
                md5 = str(file_md5(str(payload), localfs))
            else:
                md5 = hashlib.md5(payload, usedforsecurity=False).hexdigest()
            shard, known = self._homes.get(rel, self._shards[-1]), self.md5(rel)
            target = shard.directory / rel
            if known not in (None, md5):
                raise IntegrityError(
                    f"ledger entry {rel} of {shard.directory.name} is pinned as {known}, not {md5}; "
                    "entries never change"
                )
            if known is None:
                self._note(shard, rel, md5)
            if known is None or not target.exists():
                self._place(payload, target, HashInfo("md5", md5))
                shard.entries[rel] = target.stat().st_size, md5
                if known is None:
                    shard.unpublished.add(rel)
        self._homes[rel] = shard
        return md5

    def remove(self, rels: Iterable[str], release: Callable[[Path], bool] = lambda path: True) -> None:
        """Take entries away; a kill at any point leaves a ledger that verifies, and entries to remove again.

        Bytes that another entry has too stay in the cache.

        Args:
            rels: entries of the ledger.
            release: is given each file before it goes, and removes what else this run holds of it; false
                leaves its bytes in the cache.

        Raises:
            UnavailableError: when there is no space left for the tree.
        """
        leaving, published = deque[tuple[str, _Shard, tuple[int, str]]](), False
        try:
            with _explained(self.directory):
                for rel in rels:
                    shard = self._homes[rel]
                    if rel not in shard.unpublished:
                        self._note(shard, rel, shard.entries[rel][1])
                        published = True
                    shard.unpublished ^= {rel}
                    leaving.append((rel, self._homes.pop(rel), shard.entries.pop(rel)))
                if published:
                    self._write_trees()
                needed = {md5 for shard in self._shards for _, md5 in shard.entries.values()}
                while leaving:
                    rel, shard, (_, md5) = leaving[0]
                    place = shard.directory / rel
                    if place.exists():
                        if md5 not in needed and release(place):
                            self._cached(md5).unlink(missing_ok=True)
                        place.unlink()
                    leaving.popleft()
                if published:
                    self._empty_journals()
        finally:  # what could not leave is an entry again
            for rel, shard, entry in leaving:
                self._homes[rel], shard.entries[rel] = shard, entry
                shard.unpublished ^= {rel}

    def publish(self) -> None:
        """Write what is new as a tree and its pointer.

        Raises:
            UnavailableError: when there is no space left.
        """
        with _explained(self.directory):
            self._write_trees()
            self._empty_journals()

    def _write_trees(self) -> None:
        for shard in self._shards:
            pointer = layout.pointer_of(shard.directory)
            if not shard.unpublished and pointer.exists():
                continue
            tree = Tree()
            for rel, (size, md5) in shard.entries.items():
                tree.add(tuple(rel.split("/")), Meta(size=size), HashInfo("md5", md5))
            body = tree.as_bytes()
            name = layout.tree_name(body)
            write_atomically(self._cached(name), body, _PROTECTED)
            size = sum(size for size, _ in shard.entries.values())
            place = layout.kept_pointer_of(shard.directory) if self._kept else pointer
            self._note(shard, "", name)
            write_atomically(place, layout.pointer_bytes(shard.directory, name, size, len(tree)))
            before, shard.tree = shard.tree, name
            shard.unpublished.clear()
            if before not in ("", shard.tree) and place.suffix != ".dvc":  # which git may know as it was
                self._cached(before).unlink(missing_ok=True)

    def _empty_journals(self) -> None:
        for shard in self._shards:
            write_atomically(layout.journal_of(shard.directory), layout.journal_line("", shard.tree).encode())

    def _note(self, shard: _Shard, rel: str, md5: str) -> None:
        """Write to the journal that an entry comes or leaves, or which tree is next, before it happens."""
        with layout.journal_of(shard.directory).open("a", encoding="utf-8") as journal:
            journal.write(layout.journal_line(rel, md5))
            journal.flush()
            os.fsync(journal.fileno())

    def close(self) -> None:
        """Publish what is new and let go of the project's databases and of the ledger."""
        if self.unpublished:
            self.publish()
        self.release()

    def release(self) -> None:
        """Let go of the project's databases and of the ledger."""
        self._repo.close()
        self._lock.close()

    def _place(self, payload: Path | bytes, target: Path, info: HashInfo) -> None:
        """Put an entry into DVC's cache and into the directory."""
        if isinstance(payload, bytes):
            write_atomically(target, payload)
            self._cache_file(target, info)
            return
        cached = self._cache_file(payload, info)
        target.parent.mkdir(parents=True, exist_ok=True)
        incoming = target.with_name(f"{PREFIX}{target.name}")
        links = [*self._cache.cache_types, "copy"]
        generic.transfer(self._cache.fs, str(cached), localfs, str(incoming), links=links)
        _flush(incoming)
        target.unlink(missing_ok=True)  # it was altered
        incoming.rename(target)
        flush_folder(target.parent)
        self._repo.state.save(str(target), localfs, info)

    def _cache_file(self, path: Path, info: HashInfo) -> Path:
        """Put a file into DVC's cache, where a killed process may have left a part of it."""
        place = self._cached(info.value)
        if place.is_file() and place.stat().st_size != path.stat().st_size:
            place.unlink()
        self._cache.add(str(path), localfs, info.value, hardlink=True)
        _flush(place)
        return place

    def _opened(self, directory: Path) -> _Shard:
        """Read what was published, and enter what the journal has besides.

        What lies in the directory counts by itself only where an earlier release left no journal, the tree
        was lost, or the pointer is not the one that the journal follows.
        """
        directory.mkdir(parents=True, exist_ok=True)
        for path in filter(layout.half_written, directory.rglob(".*")):
            path.unlink()
        shard, files = _Shard(directory), layout.files_in(directory)
        tree, (trees, noted) = self._published(shard, files), layout.read_journal(directory) or ((), {})
        if tree is None or shard.tree not in trees:
            lying = files.keys() - (tree or {}).keys()
            noted = {rel: self._md5(files[rel]) for rel in lying} | noted
        for rel, md5 in ({rel: noted[rel] for rel in noted if rel in files} | (tree or {})).items():
            info, file, place = HashInfo("md5", md5), files.get(rel), self._cached(md5)
            if rel not in (tree or {}):
                shard.unpublished.add(rel)
                if file and self._md5(file) == md5:  # a verification names one that was altered
                    self._cache_file(file, info)
            size = next((known.stat().st_size for known in (place, file) if known and known.is_file()), 0)
            shard.entries[rel] = size, md5
        lines = [layout.journal_line("", shard.tree)]
        lines += [layout.journal_line(rel, shard.entries[rel][1]) for rel in shard.unpublished]
        write_atomically(layout.journal_of(directory), "".join(lines).encode())
        return shard

    def _md5(self, path: Path) -> str:
        return str(hash_file(str(path), localfs, "md5", state=self._repo.state)[1].value)

    def _published(self, shard: _Shard, files: dict[str, Path]) -> dict[str, str] | None:
        """Return the tree that the pointer names, {} without a pointer; None where the files stand for it."""
        pointer = layout.pointer_of(shard.directory)
        if not pointer.is_file():
            return {}
        try:
            out = layout.read_pointer(pointer.read_bytes())
        except IntegrityError as error:
            fix = (
                "git has the file as it was" if pointer.suffix == ".dvc" else "remove it: the files are there"
            )
            raise IntegrityError(f"{pointer}: {error}; {fix}") from error
        shard.tree = str(out["md5"])
        if (tree := layout.read_tree(self._cached(shard.tree))) is not None:
            return tree
        if len(files) < out["nfiles"]:
            raise UnavailableError(
                f"{pointer} names a tree that is not in the DVC cache; run `dvc pull {pointer}` first"
            )
        _log.warning("ledger.tree_rebuilt", shard=shard.directory.name, entries=len(files))
        return None

    def _cached(self, name: Any) -> Path:
        return Path(self._cache.oid_to_path(name))


@contextmanager
def dvc_cache(project: Path) -> Iterator[Callable[[str], Path]]:
    """Yield the function from an md5 to its object's place in the project's DVC cache.

    Raises:
        ConfigError: when `project` is in no DVC project.
    """
    repo = _open_project(project)
    try:
        yield lambda md5: Path(repo.cache.local.oid_to_path(md5))
    finally:
        repo.close()


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _lock(directory: Path, place: Path) -> IO[bytes]:
    name = hashlib.md5(str(directory).encode(), usedforsecurity=False).hexdigest()
    held = hold(place / f"antiphon-{name}.lock")
    if held is None:
        raise ConfigError(
            f"another process is writing the ledger {directory}; two runs of one name cannot share it: "
            "wait for that one, or give this one another run.name or record.ledger"
        )
    return held


def _open_project(project: Path) -> Repo:
    inside_git = any((folder / ".git").exists() for folder in (project.resolve(), *project.resolve().parents))
    try:
        # A source tree without git history is fine for pinning; the commands then want core.no_scm.
        return Repo(str(project), config=None if inside_git else {"core": {"no_scm": True}})
    except NotDvcRepoError:
        raise ConfigError(
            f"record.dvc=true needs a DVC project, but {project} is in none; "
            "run `dvc init` there or set record.dvc=false"
        ) from None
    except DvcException as error:
        raise UnavailableError(
            f"cannot open the DVC project of {project}: {error}; repair it or set record.dvc=false"
        ) from error


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except (DvcException, OSError) as error:
        raise UnavailableError(
            f"cannot write the ledger {folder}: {error}; free space or check the folder's permissions"
        ) from error
