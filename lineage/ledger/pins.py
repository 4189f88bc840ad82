"""Pins: every artifact of a run as an entry of DVC-tracked directories, appended in process.

A run's ledger is the directory ``<folder>/<run>`` with a pointer of its own, and further shards of
the same form in a long run. Appending hashes one file and adds it to the project's DVC cache (about
a millisecond, where the command needs seconds); publishing writes the tree of the newest shard and
its pointer. What was appended and not yet published stands in a journal beside them, so a crash
between the two loses nothing. ``dvc status``, ``push``, ``pull``, ``checkout`` and ``gc`` work on
ledgers that are kept.
"""

import fcntl
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from dvc.exceptions import DvcException, NotDvcRepoError
from dvc.repo import Repo

from antiphon.core.errors import ConfigError, UnavailableError
from antiphon.lineage.layout import (
    GITIGNORE,
    SHARD_ENTRIES,
    check_rel,
    journal_of,
    keep,
    kept_pointer_of,
    shard_directories,
    shard_name,
)
from antiphon.lineage.ledger.shard import Shard
from antiphon.system.files import write_atomically


class Ledger:
    """The pinned artifacts of one run; used by one thread of one process at a time."""

    def __init__(
        self,
        project: Path,
        folder: str,
        run_id: str,
        shard_entries: int = SHARD_ENTRIES,
        kept: bool = True,
    ) -> None:
        """Open a run's ledger in the project's `folder`, continuing where an earlier process stopped.

        `run_id` names the directory and its pointer; after `shard_entries` entries the next directory
        begins. The pointer of a `kept` ledger is a ``.dvc`` file from the start; else `antiphon keep`
        makes it one.

        Raises:
            ConfigError: when `project` is in no DVC project, or another process has the ledger open.
            UnavailableError: when the cache or the folder cannot be used.
        """
        self._repo = _open_project(project)
        self._folder = Path(self._repo.root_dir) / folder
        self._run_id = run_id
        self._shard_entries = shard_entries
        with _explained(self._folder / run_id):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(self._folder / run_id)
            ignore = self._folder / ".gitignore"
            if not ignore.exists():
                write_atomically(ignore, GITIGNORE.encode())
            if kept:
                keep(self._folder, run_id)
            places = shard_directories(self._folder, run_id)
            self._kept = kept or kept_pointer_of(self._folder / run_id).exists()
            self._shards = [Shard(self._repo, place, self._kept) for place in places]
        self._homes = {rel: shard for shard in self._shards for rel in shard.entries}

    @property
    def directory(self) -> Path:
        """Return the directory of the first shard; a short run has no other."""
        return self._shards[0].directory

    @property
    def pointer(self) -> Path:
        """Return the pointer of the first shard."""
        return self._shards[0].pointer

    @property
    def unpublished(self) -> int:
        """Entries appended since the last `publish`."""
        return sum(shard.unpublished for shard in self._shards)

    def __len__(self) -> int:
        return len(self._homes)

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    def md5(self, rel: str) -> str | None:
        """Return the md5 under which an entry is pinned, or None."""
        shard = self._homes.get(rel)
        return shard.entries[rel].md5 if shard else None

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
        rel = check_rel(rel)
        with _explained(self.directory):
            shard = self._homes.get(rel) or self._open_shard()
            md5 = shard.append(rel, payload)
        self._homes[rel] = shard
        return md5

    def remove(self, rels: Iterable[str], release: Callable[[Path], bool] = lambda path: True) -> None:
        """Take entries away, and finish what an earlier process began to take away.

        A kill at any point leaves a ledger that verifies; the next call does the rest. Bytes that another
        entry has too stay in the cache.

        Args:
            rels: entries of the ledger.
            release: is given each file before it goes, and removes what else this run holds of it; false
                leaves its bytes in the cache.

        Raises:
            UnavailableError: when there is no space left for the journal or the tree.
        """
        with _explained(self.directory):
            for rel in rels:
                self._homes[rel].leave(rel)
                del self._homes[rel]
            for shard in (shard for shard in self._shards if shard.leaving):
                if shard.unpublished:
                    shard.publish()
                shard.clear(self._pins, release)

    def publish(self) -> str:
        """Write what is new as trees and pointers; return the newest shard's tree.

        Raises:
            UnavailableError: when there is no space left.
        """
        with _explained(self.directory):
            for shard in self._shards[:-1]:
                if shard.unpublished:
                    shard.publish()
            return self._shards[-1].publish()

    def close(self) -> None:
        """Publish what is new and let go of the project's databases and of the ledger."""
        if self.unpublished:
            self.publish()
        self.release()

    def release(self) -> None:
        """Let go of the project's databases and of the ledger."""
        self._repo.close()
        self._lock.close()

    def _pins(self, md5: str) -> bool:
        return any(entry.md5 == md5 for shard in self._shards for entry in shard.entries.values())

    def _open_shard(self) -> Shard:
        newest = self._shards[-1]
        if len(newest.entries) < self._shard_entries:
            return newest
        if newest.unpublished:
            newest.publish()  # a full shard is written once more and then never again
        kept = self._kept or kept_pointer_of(self.directory).exists()
        place = self._folder / shard_name(self._run_id, len(self._shards))
        self._shards.append(Shard(self._repo, place, kept))
        return self._shards[-1]


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


def _lock(directory: Path) -> IO[str]:
    handle = journal_of(directory).open("a", encoding="utf-8")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        raise ConfigError(
            f"another process is writing the ledger {directory}; two runs of one name cannot share it: "
            "wait for that one, or give this one another run.name or record.ledger"
        ) from None
    return handle


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
