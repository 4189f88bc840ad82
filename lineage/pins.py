"""Pins: every artifact of a run as an entry of a DVC-tracked directory, appended in process.

A run's ledger is the directory ``<folder>/<run>`` with its own ``<folder>/<run>.dvc``.
Appending hashes one file and adds it to the project's DVC cache (about a millisecond, where
the command needs seconds); publishing writes the tree of all entries and the ``.dvc`` file.
What was appended and not yet published stands in a journal beside them, so a crash between
the two loses nothing. ``dvc status``, ``push``, ``pull`` and ``checkout`` work on the result.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import structlog
import yaml
from dvc.exceptions import DvcException, NotDvcRepoError
from dvc.repo import Repo
from dvc_data.hashfile.hash import hash_file
from dvc_data.hashfile.hash_info import HashInfo
from dvc_data.hashfile.meta import Meta
from dvc_data.hashfile.tree import Tree
from dvc_objects.fs import generic
from dvc_objects.fs.local import localfs

from antiphon.core.errors import ConfigError, IntegrityError, UnavailableError
from antiphon.lineage.store import write_atomically

_log = structlog.get_logger("antiphon.lineage")

GITIGNORE = """\
# Git keeps the .dvc files; the artifacts they name are DVC's.
/*/
/*.journal
/.incoming-*
"""
"""Written into a new ledger folder. A rule in a parent folder would make DVC overlook the pointers."""


class Ledger:
    """The pinned artifacts of one run; used by one thread of one process at a time."""

    def __init__(self, project: Path, folder: str, run_id: str) -> None:
        """Open a run's ledger, going on where an earlier process stopped.

        Args:
            project: folder inside a DVC project.
            folder: where ledgers lie, relative to the project.
            run_id: the run; names the directory and its ``.dvc`` file.

        Raises:
            ConfigError: when `project` is in no DVC project.
            UnavailableError: when the cache or the folder cannot be used.
        """
        self._repo = _open_project(project)
        self._cache = self._repo.cache.local
        self.directory = Path(self._repo.root_dir) / folder / run_id
        self.pointer = self.directory.with_name(f"{run_id}.dvc")
        self._journal = self.directory.with_name(f"{run_id}.journal")
        self._tree = Tree()
        self._unpublished = 0
        with _in_words(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
            ignore = self.directory.with_name(".gitignore")
            if not ignore.exists():
                write_atomically(ignore, GITIGNORE.encode())
            self._restore()

    @property
    def unpublished(self) -> int:
        """Entries appended since the last `publish`."""
        return self._unpublished

    def __len__(self) -> int:
        return len(self._tree)

    def md5(self, rel: str) -> str | None:
        """Return the md5 under which an entry is pinned, or None."""
        known = self._tree.get(_key(rel))
        return str(known[1].value) if known and known[1] else None

    def append(self, rel: str, payload: Path | bytes) -> str:
        """Pin one artifact under the ledger's path `rel` and return its md5.

        A file is linked where the file system can, so pinning the store's objects costs no
        space. Repeating an entry changes nothing.

        Raises:
            IntegrityError: when `rel` already holds something else; entries never change.
            UnavailableError: when there is no space left, or the file is missing.
        """
        target = self.directory.joinpath(*_key(rel))
        with _in_words(self.directory):
            if isinstance(payload, bytes):
                if not target.exists():
                    write_atomically(target, payload)
                source = target
                if target.read_bytes() != payload:
                    raise IntegrityError(f"{target} already holds other bytes; ledger entries never change")
            else:
                source = payload
            meta, found = hash_file(str(source), localfs, "md5")
            known = self.md5(rel)
            if known is not None and known == found.value and target.exists():
                return known
            if known is not None and known != found.value:
                raise IntegrityError(
                    f"ledger entry {rel} of {self.directory.name} is pinned as {known}, not {found.value}; "
                    "entries never change"
                )
            self._cache.add(str(source), localfs, found.value, hardlink=True)
            if source is not target:
                self._materialise(found, target)
            self._remember(rel, str(found.value), int(meta.size))
        return str(found.value)

    def publish(self) -> str:
        """Write the tree of all entries and the ``.dvc`` file that names it; return its md5.

        Raises:
            UnavailableError: when there is no space left.
        """
        with _in_words(self.directory):
            self._tree.digest()
            self._cache.add(self._tree.path, self._tree.fs, self._tree.oid, hardlink=False)
            self._tree.fs.rm_file(self._tree.path)  # DVC keeps it in memory for the process's life
            _flush(self._journal)
            out = {
                "md5": self._tree.oid,
                "size": sum(meta.size for _, meta, _ in self._tree),
                "nfiles": len(self._tree),
                "hash": "md5",
                "path": self.directory.name,
            }
            write_atomically(self.pointer, yaml.safe_dump({"outs": [out]}, sort_keys=False).encode())
        self._unpublished = 0
        return str(self._tree.oid)

    def close(self) -> None:
        """Publish what is new and let go of the project's databases."""
        if self._unpublished:
            self.publish()
        self._repo.close()

    def _materialise(self, info: HashInfo, target: Path) -> None:
        if target.exists():
            target.unlink()  # an earlier attempt ended between linking and the journal
        target.parent.mkdir(parents=True, exist_ok=True)
        cached = self._cache.oid_to_path(info.value)
        generic.transfer(
            self._cache.fs, cached, localfs, str(target), links=[*self._cache.cache_types, "copy"]
        )
        self._repo.state.save(str(target), localfs, info)

    def _remember(self, rel: str, md5: str, size: int) -> None:
        line = json.dumps({"rel": rel, "md5": md5, "size": size}) + "\n"
        with self._journal.open("a", encoding="utf-8") as journal:
            journal.write(line)
        self._tree.add(_key(rel), Meta(size=size), HashInfo("md5", md5))
        self._unpublished += 1

    def _restore(self) -> None:
        journalled = {entry["rel"]: entry for entry in self._journalled()}
        for rel, md5 in self._published():
            size = journalled[rel]["size"] if rel in journalled else self._cached_size(md5)
            self._tree.add(_key(rel), Meta(size=size), HashInfo("md5", md5))
        published = len(self._tree)
        for rel, entry in journalled.items():
            if self._tree.get(_key(rel)) is None and self._intact(entry):
                self._tree.add(_key(rel), Meta(size=entry["size"]), HashInfo("md5", entry["md5"]))
        self._unpublished = len(self._tree) - published

    def _published(self) -> Iterator[tuple[str, str]]:
        if not self.pointer.is_file():
            return
        out = yaml.safe_load(self.pointer.read_text(encoding="utf-8"))["outs"][0]
        path = Path(self._cache.oid_to_path(out["md5"]))
        if not path.is_file():
            raise UnavailableError(
                f"{self.pointer} names a tree that is not in the DVC cache; "
                f"run `dvc pull {self.pointer}` first"
            )
        for item in json.loads(path.read_bytes()):
            yield item["relpath"], item["md5"]

    def _cached_size(self, md5: str) -> int:
        cached = Path(self._cache.oid_to_path(md5))
        return cached.stat().st_size if cached.is_file() else 0

    def _journalled(self) -> Iterator[dict[str, Any]]:
        if not self._journal.is_file():
            return
        text = self._journal.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            # A process died while writing the last line; nobody was told that entry was pinned.
            os.truncate(self._journal, len(whole.encode()))
        for line in whole.splitlines():
            yield json.loads(line)

    def _intact(self, entry: dict[str, Any]) -> bool:
        if self._cached_size(entry["md5"]) == entry["size"]:
            return True
        _log.warning("ledger.entry_lost", run=self.directory.name, rel=entry["rel"], md5=entry["md5"])
        return False


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


def _key(rel: str) -> tuple[str, ...]:
    path = PurePosixPath(rel)
    if path.is_absolute() or not path.parts or ".." in path.parts:
        raise IntegrityError(
            f"{rel!r} is no path inside a ledger; use relative names such as batches/t000001"
        )
    return path.parts


def _flush(path: Path) -> None:
    if path.is_file():
        with path.open("rb") as file:
            os.fsync(file.fileno())


@contextmanager
def _in_words(folder: Path) -> Iterator[None]:
    try:
        yield
    except (DvcException, OSError) as error:
        raise UnavailableError(
            f"cannot write the ledger {folder}: {error}; free space or check the folder's permissions"
        ) from error
